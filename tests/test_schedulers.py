import pytest
import torch

from lit_project.schedulers import Triangular, WarmupCosine


def rates(schedule: type[Triangular], total_steps: int, warmup: float, lr: float = 0.4) -> list[float]:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=lr)
    scheduler = schedule(optimizer, total_steps, warmup)
    found = [optimizer.param_groups[0]["lr"]]
    for _ in range(total_steps):
        optimizer.step()
        scheduler.step()
        found.append(optimizer.param_groups[0]["lr"])
    return found


@pytest.mark.parametrize(("schedule", "three_quarters"), [(Triangular, 0.1), (WarmupCosine, 0.0586)])
@pytest.mark.parametrize("warmup", [0.0, 0.2, 0.6])
def test_rises_to_the_optimisers_rate_then_falls_to_zero(
    schedule: type[Triangular], three_quarters: float, warmup: float
) -> None:
    found = rates(schedule, 100, warmup)
    peak = int(warmup * 100)
    assert found[peak] == max(found) == pytest.approx(0.4)
    assert found[0] > 0
    assert found[: peak + 1] == sorted(found[: peak + 1])
    assert found[peak:] == sorted(found[peak:], reverse=True)
    assert found[(peak + 100) // 2] == pytest.approx(0.2), "half-way down is half the rate"
    assert found[(peak + 300) // 4] == pytest.approx(three_quarters, abs=1e-4)
    assert found[100] == pytest.approx(0.0)


@pytest.mark.parametrize("schedule", [Triangular, WarmupCosine])
def test_a_step_more_than_planned_stays_at_the_end(schedule: type[Triangular]) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler = schedule(optimizer, total_steps=2)
    for _ in range(4):
        optimizer.step()
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.0)


@pytest.mark.parametrize("schedule", [Triangular, WarmupCosine])
@pytest.mark.parametrize("arguments", [{"total_steps": 0}, {"total_steps": 5, "warmup": 1.0}, {}])
def test_bad_arguments_are_named(schedule: type[Triangular], arguments: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"^{schedule.__name__}: "):
        schedule(torch.optim.SGD([torch.zeros(1)], lr=1.0), **arguments)  # type: ignore[arg-type]
