"""Averaged weights through the config: they are what is validated, kept as best, and tested."""

from pathlib import Path

import lightning as L
import pytest
import torch
from conftest import TINY, RunCLI, logged, runs

from lit_project.data import Shapes10
from lit_project.module import ImageClassifier
from lit_project.networks import SimpleCNN


@pytest.mark.slow
def test_the_average_is_validated_kept_as_best_and_tested_without_warnings(run_cli: RunCLI, tmp_path: Path) -> None:
    (tmp_path / "ema.yaml").write_text(
        "callbacks: {ema: {class_path: lightning.pytorch.callbacks.EMAWeightAveraging, init_args: {decay: 0.9}}}\n"
        "trainer: {precision: 32-true}\n"
    )
    fit = run_cli("fit", *TINY, "--config=ema.yaml", "--callbacks.ema.decay=0.8")
    (run,) = runs(tmp_path)
    (validated,) = logged(run, "val/loss")
    best = torch.load(run / "checkpoints" / "best.ckpt", weights_only=True)
    assert best["config"]["callbacks"]["ema"]["init_args"]["decay"] == 0.8

    def loss(weights: dict[str, torch.Tensor], stage: str) -> float:
        model = ImageClassifier(SimpleCNN())
        model.load_state_dict(weights)
        data = Shapes10(num_train=256, num_val=129, num_test=131, batch_size=64)
        trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
        (values,) = getattr(trainer, stage)(model, datamodule=data, verbose=False)
        return next(value for name, value in values.items() if name.endswith("/loss"))

    assert validated == pytest.approx(loss(best["state_dict"], "validate"), rel=1e-5)
    assert validated != pytest.approx(loss(best["current_model_state"], "validate"), rel=1e-3)
    tested = run_cli("test", "--ckpt_path=best", "--config=ema.yaml")
    shown = next(line for line in tested.stdout.splitlines() if "test/loss" in line)
    assert float(shown.split("│")[2]) == pytest.approx(loss(best["state_dict"], "test"), rel=1e-5)
    for output in (fit.stderr, tested.stderr):
        assert "Averaging" not in output
        assert "arn" not in output
