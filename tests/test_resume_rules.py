"""Which run a checkpoint belongs to, and what may change when it goes on."""

import copy
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from lit_project.checkpoints import read_checkpoint
from lit_project.errors import InputError
from lit_project.resume import newest_run_of, refuse_changes, run_of_job, run_to_continue

CONFIG: dict[str, Any] = {
    "seed_everything": 0,
    "data": {
        "class_path": "lit_project.data.CIFAR10",
        "init_args": {"batch_size": 64, "num_workers": 0},
    },
    "model": {
        "class_path": "lit_project.module.ImageClassifier",
        "init_args": {
            "network": {
                "class_path": "lit_project.networks.SimpleCNN",
                "init_args": {"dropout": 0.5},
            },
            "optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.001, "betas": [0.9, 0.99]}},
            "scheduler": None,
            "compile": False,
        },
    },
    "trainer": {"max_epochs": 2, "accumulate_grad_batches": 1, "devices": 1},
    "callbacks": {"ema": None, "best": {"class_path": "ModelCheckpoint", "init_args": {"mode": "max"}}},
}


def changed(**values: Any) -> dict[str, Any]:
    """The config with other values at dotted keys, ``__`` for a dot."""
    config = copy.deepcopy(CONFIG)
    for key, value in values.items():
        *path, last = key.split("__")
        part = config
        for name in path:
            part = part.get("init_args", part) if name not in part else part
            part = part[name]
        part = part.get("init_args", {}) if last not in part and "init_args" in part else part
        part[last] = value
    return config


@pytest.mark.parametrize(
    "now",
    [
        changed(),
        changed(model__optimizer__lr="1e-3"),
        changed(model__optimizer__class_path="SGD", model__network__class_path="networks.SimpleCNN"),
        changed(model__compile="max-autotune", data__num_workers=4, model__gradient_checkpointing=True),
        changed(trainer__max_epochs=9, trainer__devices=4, callbacks__best=None),
        changed(model__optimizer__weight_decay=None),
    ],
    ids=["the same", "a number as text", "short class paths", "how fast", "how long, what is kept", "null is left out"],
)
def test_what_leaves_the_optimisation_as_it_is_may_change(now: dict[str, Any]) -> None:
    refuse_changes(CONFIG, now)
    refuse_changes(now, CONFIG)


@pytest.mark.parametrize(
    ("now", "line"),
    [
        (changed(model__optimizer__lr=0.002), "model.optimizer.lr: 0.001 -> 0.002"),
        (changed(model__optimizer__betas=[0.9, 0.999]), "model.optimizer.betas: [0.9, 0.99] -> [0.9, 0.999]"),
        (
            changed(model__optimizer__class_path="torch.optim.Adam"),
            "model.optimizer: torch.optim.SGD -> torch.optim.Adam",
        ),
        # the end of a name is not a short class path
        (
            changed(model__network__class_path="CNN"),
            "model.network: lit_project.networks.SimpleCNN -> CNN",
        ),
        (changed(model__scheduler={"class_path": "StepLR"}), "model.scheduler: None -> StepLR"),
        (changed(model__network__dropout=None), "model.network.dropout: 0.5 -> None"),
        (changed(model__network__dropout=True), "model.network.dropout: 0.5 -> True"),
        (changed(data__batch_size=32), "data.batch_size: 64 -> 32"),
        (changed(seed_everything=1), "seed_everything: 0 -> 1"),
        (changed(trainer__accumulate_grad_batches=2), "trainer.accumulate_grad_batches: 1 -> 2"),
        (
            changed(callbacks__ema={"class_path": "EMA", "init_args": {"decay": 0.9}}),
            "callbacks.ema.decay: None -> 0.9",
        ),
    ],
)
def test_what_changes_the_optimisation_is_refused_by_name(now: dict[str, Any], line: str) -> None:
    with pytest.raises(InputError) as refused:
        refuse_changes(CONFIG, now)
    assert f"\n  {line}\n" in str(refused.value)
    assert "--force_resume=true" in str(refused.value)


def test_a_long_list_of_changes_is_cut() -> None:
    old, new = ({"model": {f"argument_{i:02}": value for i in range(20)}} for value in (0, 1))
    with pytest.raises(InputError, match="and 8 more") as refused:
        refuse_changes(old, new)
    assert str(refused.value).count("->") == 12


# ---- runs


def make_run(root: Path, name: str, config: dict[str, Any] | None, age: float, step: int = 10) -> Path:
    """A run folder with ``best.ckpt`` of half the steps of its ``last.ckpt``."""
    folder = root / name
    (folder / "checkpoints").mkdir(parents=True)
    if config is not None:
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
    for file, at in (("best", step // 2), ("last", step)):
        checkpoint = {"state_dict": {}, "pytorch-lightning_version": "2.6.6", "optimizer_states": [], "loops": {}}
        torch.save(checkpoint | {"global_step": at}, folder / "checkpoints" / f"{file}.ckpt")
    os.utime(folder / "checkpoints" / "last.ckpt", (1e9 - age, 1e9 - age))
    return folder / "checkpoints" / "last.ckpt"


def test_the_newest_run_of_what_the_configs_say(tmp_path: Path) -> None:
    old = make_run(tmp_path, "z", CONFIG, age=3)
    small = make_run(tmp_path, "a", changed(data__batch_size=32), age=2)
    unknown = make_run(tmp_path, "b", None, age=1)
    assert newest_run_of([], tmp_path) == unknown, "nothing is said"
    batch_32 = {"data": {"init_args": {"batch_size": 32}}, "trainer": {"max_epochs": 77, "devices": 8}}
    assert newest_run_of([batch_32], tmp_path) == small, "how long and where is not what a run is"
    assert (
        newest_run_of([{"model": {"optimizer": {"class_path": "SGD", "lr": "1e-3"}}, "data": CONFIG["data"]}], tmp_path)
        == old
    )
    newest = make_run(tmp_path, "c", CONFIG, age=0)
    assert newest_run_of([{"data": CONFIG["data"]}], tmp_path) == newest


def test_a_run_is_found_by_what_its_config_settles(tmp_path: Path) -> None:
    """Not by what it left to the data, by what options settled, or by what does not matter to the result."""
    run = make_run(tmp_path, "a", changed(data__batch_size=32, data__image_size=64, data__num_workers=4), age=0)
    config = {"data": {"init_args": {"batch_size": 128, "image_size": None, "num_workers": 0}}}
    assert newest_run_of([config], tmp_path, {"data.batch_size", "trainer.max_epochs"}) == run
    with pytest.raises(InputError, match="none of the 1 runs"):
        newest_run_of([config], tmp_path, {"trainer.max_epochs"})


@pytest.mark.parametrize("option", ["model.optimizer", "model.init_args.optimizer", "data.augment+"])
def test_what_an_option_replaces_or_adds_to_is_not_looked_for(tmp_path: Path, option: str) -> None:
    run = make_run(tmp_path, "a", changed(data__augment=[{"class_path": "a.Crop", "init_args": {"padding": 4}}]), age=0)
    settled = {"data": {"batch_size": 64, "augment": [{"class_path": "Crop"}]}}
    replaced = {"model": {"optimizer": {"class_path": "Muon", "init_args": {"sgd_lr": 25.0}}}}
    if option == "data.augment+":
        replaced = {}
    assert newest_run_of([settled, replaced], tmp_path, {option}) == run


def test_a_relative_path_in_a_config_is_the_absolute_one_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = make_run(tmp_path / "runs", "a", changed(data__root=str(tmp_path / "one")), age=2)
    make_run(tmp_path / "runs", "b", changed(data__root=str(tmp_path / "two")), age=1)
    monkeypatch.chdir(tmp_path)
    assert newest_run_of([{"data": {"init_args": {"root": "one"}}}], tmp_path / "runs") == one
    with pytest.raises(InputError, match="none of the 2 runs"):
        newest_run_of([{"data": {"init_args": {"root": "ne"}}}], tmp_path / "runs")


def test_of_a_job_with_two_fits_each_goes_on_with_its_own_run(tmp_path: Path) -> None:
    """The newest run of the job may be the other one's."""
    started = {}
    for age, name in enumerate(("b-job77", "a-job77", "c-job78", "d-job77", "e")):
        started[name] = make_run(tmp_path, name, CONFIG, age=age)
        command = ["python", "fit", "--config=" + ("one.yaml" if name[0] in "ad" else "two.yaml")]
        record = {"command": command, "exit_reason": "running", "start": f"2026-11-30T1{9 - age}:00:00+00:00"}
        (tmp_path / name / "run.json").write_text(json.dumps(record))
    make_run(tmp_path, "f-job77", CONFIG, age=0)  # which has no record
    assert run_of_job("77", ["python", "fit", "--config=one.yaml"], tmp_path) == started["a-job77"]
    assert run_of_job("77", ["python", "fit", "--config=two.yaml"], tmp_path) == started["b-job77"]
    assert run_of_job("77", ["python", "fit"], tmp_path) is None
    assert run_of_job("79", ["python", "fit", "--config=one.yaml"], tmp_path) is None


def test_without_such_a_run_the_message_says_what_was_looked_at(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no run there has a checkpoint 'last\.ckpt'\. Train first"):
        newest_run_of([], tmp_path)
    make_run(tmp_path, "a", CONFIG, age=0)
    make_run(tmp_path, "b", CONFIG, age=0)
    with pytest.raises(InputError, match=r"none of the 2 runs there has this config\. Train first"):
        newest_run_of([{"seed_everything": 5}], tmp_path)


def test_a_run_goes_on_in_its_folder_from_its_newest_checkpoint_alone(tmp_path: Path) -> None:
    last = make_run(tmp_path, "run", CONFIG, age=0)
    best = last.with_name("best.ckpt")
    assert run_to_continue(last, read_checkpoint(last)) == tmp_path / "run"
    assert run_to_continue(best, read_checkpoint(best)) is None, "it would overwrite what came after"
    weights = {"state_dict": {}, "global_step": 0}
    assert run_to_continue(last, weights) is None, "weights have no run"
    last.unlink()
    assert run_to_continue(best, read_checkpoint(best)) == tmp_path / "run", "there is nothing after it"
    (tmp_path / "run" / "config.yaml").unlink()
    assert run_to_continue(best, read_checkpoint(best)) is None, "not a run's folder"


def test_a_damaged_last_checkpoint_does_not_keep_an_earlier_one_from_being_used(tmp_path: Path) -> None:
    last = make_run(tmp_path, "run", CONFIG, age=0)
    last.write_bytes(b"damaged")
    best = last.with_name("best.ckpt")
    assert run_to_continue(best, read_checkpoint(best)) is None
