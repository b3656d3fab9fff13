"""A user's own images, from the folder to the predictions, through the command line.

Three classes of noisy colours, some test images in the wrong folder so that the accuracy is not just 1.
"""

import io
import json
import math
import shutil
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import yaml
from conftest import TINY, RunCLI, cli, logged, read_csv, runs
from helpers import TESTS, in_process, pixels, small_cifar10
from PIL import ExifTags, Image

from lit_project.data import CIFAR10
from lit_project.module import ImageClassifier

COLOURS = {"blue": (40, 60, 200), "green": (60, 180, 40), "red": (200, 50, 60)}
SIDE = 16
FIT = ["fit", "--config=configs/image_folder.yaml", "--data.batch_size=16", "--trainer.enable_model_summary=false"]
ONE_BATCH = ["--trainer.max_epochs=1", "--trainer.limit_train_batches=1", "--trainer.limit_val_batches=1"]
RECORD = "--trainer.callbacks+=helpers.Recorder"


def noisy(colour: tuple[int, int, int], seed: int) -> Image.Image:
    noise = np.random.default_rng(seed).normal(0, 40, (SIDE, SIDE, 3))
    return Image.fromarray((np.array(colour) + noise).clip(0, 255).astype(np.uint8))


def fill(folder: Path, counts: dict[str, int], seed: int = 0) -> None:
    for number, (name, count) in enumerate(counts.items()):
        (folder / name).mkdir(parents=True)
        for position in range(count):
            image = noisy(COLOURS.get(name, (128, 128, 128)), seed + 1000 * number + position)
            image.save(folder / name / f"{position}.png")


def break_three(folder: Path) -> list[Path]:
    """Half a JPEG, an empty PNG, and a web page that calls itself a JPEG."""
    buffer = io.BytesIO()
    noisy(COLOURS["red"], 0).save(buffer, "JPEG")
    broken = {"half.jpg": buffer.getvalue()[: len(buffer.getvalue()) // 2], "empty.png": b""}
    broken["page.jpg"] = b"<!DOCTYPE html><html><body>404 Not Found</body></html>"
    for name, content in broken.items():
        (folder / name).write_bytes(content)
    return [folder / name for name in broken]


def odd_files(folder: Path) -> None:
    """Every mode there is, and a photo that is lying on its side beside the same one upright."""
    noise = noisy((128, 128, 128), 9)
    transparent = noise.convert("RGBA")
    transparent.putalpha(0)
    for name, image in {
        "l": noise.convert("L"),
        "la": noise.convert("LA"),
        "p": noise.convert("P"),
        "rgba": transparent,
        "white": Image.new("RGB", (SIDE, SIDE), "white"),
        "cmyk": noise.convert("CMYK"),
        "upright": noise,
    }.items():
        image.save(folder / f"{name}.{'tif' if name == 'cmyk' else 'png'}")
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    noise.transpose(Image.Transpose.ROTATE_90).save(folder / "turned.png", exif=exif)


def metric(run: Path, name: str) -> float:
    return logged(run, name)[0]


class Trained(NamedTuple):
    folder: Path
    root: Path
    run: Path
    output: str
    notes: str

    @property
    def best(self) -> Path:
        return self.run / "checkpoints" / "best.ckpt"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A finished training on folders with everything in them that may lie around (read only: tests share it)."""
    folder = tmp_path_factory.mktemp("folders")
    root = folder / "images"
    fill(root / "train", dict.fromkeys(COLOURS, 48))
    fill(root / "val", dict.fromkeys(COLOURS, 4), seed=10_000)
    odd_files(root / "val" / "green")
    fill(root / "test", dict.fromkeys(COLOURS, 8), seed=20_000)
    for position in range(3):
        (root / "test" / "blue" / f"{position}.png").rename(root / "test" / "red" / f"stray {position}.png")
    # none of it is the user's
    for junk in ("train/.ipynb_checkpoints/0.png", "train/__MACOSX/red/0.png", "train/red/.cache/0.png"):
        (root / junk).parent.mkdir(parents=True)
        shutil.copy(root / "train" / "red" / "0.png", root / junk)
    for junk in (".DS_Store", "Thumbs.db", "blue/._0.png", "green/.DS_Store"):
        (root / "train" / junk).write_bytes(b"\0\5\26\7")
    (root / "train" / "red" / "notes.txt").write_text("not an image")
    done = cli(
        folder, *FIT, "--data.root=images", "--data.num_workers=0", "--trainer.max_epochs=8", RECORD, PYTHONPATH=TESTS
    )
    (run,) = runs(folder)
    return Trained(folder, root, run, done.stdout, done.stderr)


# ---- from the folder to the predictions


def test_fit_finds_the_classes_and_learns_them(trained: Trained) -> None:
    assert "ImageFolder: 144 train images, kept in: memory" in trained.notes, "neither junk nor hidden files"
    assert "1 .txt" in trained.notes, "what is not read is counted"
    model = ImageClassifier.load_from_checkpoint(trained.best)
    assert model.class_names == list(COLOURS)
    assert model(torch.zeros(2, 3, SIDE, SIDE)).shape == (2, 3)
    flat = torch.stack([torch.full((SIDE, SIDE), float(c == k)) for k in (2, 1, 0) for c in range(3)])
    assert model.eval()(flat.view(3, 3, SIDE, SIDE)).argmax(1).tolist() == [0, 1, 2]


def test_accuracy_is_what_a_hand_count_over_the_predictions_gives(trained: Trained) -> None:
    """``test`` and ``predict`` need the checkpoint and the images, nothing else; the broken file stops neither."""
    done = cli(trained.folder, "test", f"--ckpt_path={trained.best}")
    (run,) = runs(trained.folder, "test-*")
    accuracy = metric(run, "test/acc")
    assert "Test, by class" in done.stdout

    flat = trained.folder / "flat"
    flat.mkdir()
    for path in (trained.root / "test").glob("*/*.png"):
        shutil.copy(path, flat / f"{path.parent.name}-{path.name}")
    broken = break_three(flat)
    done = cli(trained.folder, "predict", f"--ckpt_path={trained.best}", "--images=flat", "--output=flat.csv")
    rows = read_csv(trained.folder / "flat.csv")
    assert [Path(row["path"]).name for row in rows] == [
        *(f"blue-{k}.png" for k in range(3, 8)),
        "empty.png",
        *(f"green-{k}.png" for k in range(8)),
        "half.jpg",
        "page.jpg",
        *(f"red-{k}.png" for k in range(8)),
        *(f"red-stray {k}.png" for k in range(3)),
    ], "one row a file, in order"
    readable = [row for row in rows if not row["error"]]
    unreadable = [row for row in rows if row["error"]]
    assert {Path(row["path"]).name for row in unreadable} == {path.name for path in broken}
    assert all(row["class"] == row["probability"] == row["top5"] == "" for row in unreadable)
    assert done.stdout.splitlines()[-1] == "Predictions for 27 images, 3 of them unreadable: flat.csv"

    correct = sum(Path(row["path"]).name.startswith(row["class"]) for row in readable)
    assert accuracy == pytest.approx(correct / 24)
    assert 0.5 < accuracy < 1.0
    for row in readable:
        top = json.loads(row["top5"])
        assert sorted(name for name, _ in top) == list(COLOURS)
        assert top[0] == [row["class"], float(row["probability"])]
        assert [share for _, share in top] == sorted((share for _, share in top), reverse=True)
        assert math.isclose(sum(share for _, share in top), 1, abs_tol=1e-5)


def test_a_file_is_the_same_image_in_fit_and_in_predict(trained: Trained) -> None:
    """Modes, transparency and rotation, by what the network was given in both."""
    glob = "images/val/*/*.*"
    predict = ["predict", f"--ckpt_path={trained.best}", f"--images={glob}", "--output=glob.csv"]
    cli(trained.folder, *predict, RECORD, PYTHONPATH=TESTS)
    rows = read_csv(trained.folder / "glob.csv")
    assert [Path(row["path"]).parts[-2] for row in rows] == ["blue"] * 4 + ["green"] * 12 + ["red"] * 4
    fitted, predicted = (torch.load(trained.folder / f"{stage}-0.pt") for stage in ("fit", "predict"))
    first = [batch for batch in fitted["batches"] if (batch["kind"], batch["epoch"]) == ("val", 0)]
    seen = torch.cat([batch["images"] for batch in first])
    given = torch.cat([batch["images"] for batch in predicted["batches"]])
    assert torch.equal(seen, given), "bit for bit, in the same order"
    assert torch.cat([batch["targets"] for batch in first]).tolist() == [0] * 4 + [1] * 12 + [2] * 4
    image = {Path(row["path"]).stem: pixels(fitted, seen[None, k])[0] for k, row in enumerate(rows)}
    assert torch.equal(image["turned"], image["upright"])
    assert torch.equal(image["rgba"], image["white"]), "what is transparent is white, not the colour hidden there"
    for mode in ("l", "la", "p", "cmyk"):
        distance = (image[mode].float().mean(0) - image["upright"].float().mean(0)).abs().mean()
        assert distance < 12, f"{mode} is read as another picture"


def test_predict_takes_one_file_and_says_when_there_is_none(
    trained: Trained, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    one = trained.root / "test" / "red" / "5.png"
    done = cli(tmp_path, "predict", f"--ckpt_path={trained.run}", f"--images={one}")
    (run,) = runs(tmp_path)
    (row,) = read_csv(run / "predictions.csv")
    assert row["path"] == str(one)
    assert row["class"] == "red"
    assert done.stdout.splitlines()[-1] == f"Predictions for 1 image: runs/{run.name}/predictions.csv"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "page.jpg").write_text("<html>")
    command = ["predict", f"--ckpt_path={trained.best}", "--images=page.jpg", "--output=none.csv"]
    status, printed, errors = in_process(monkeypatch, capfd, *command, "--trainer.default_root_dir=bad")
    assert (status, printed) == (1, "")
    assert "error: No image could be read; none.csv says why." in errors
    assert "page.jpg" in read_csv(tmp_path / "none.csv")[0]["path"]
    for images in (tmp_path / "nowhere", tmp_path / "*.bmp", tmp_path / "home"):
        status, _, errors = in_process(
            monkeypatch, capfd, "predict", f"--ckpt_path={trained.best}", f"--images={images}"
        )
        assert status == 1
        assert str(images) in errors
        assert errors.count("error: ") == 1
        assert "Traceback" not in errors
        assert runs(tmp_path) == [run], "no empty run folder is left"


def test_other_classes_than_the_models_are_refused(
    trained: Trained, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """More classes; and as many, but others, which would be scored against the wrong names."""
    fill(tmp_path / "four" / "train", dict.fromkeys([*COLOURS, "yellow"], 3))
    fill(tmp_path / "other" / "train", dict.fromkeys(["blue", "green", "yellow"], 3))
    monkeypatch.chdir(tmp_path)
    for root in ("four", "other"):
        status, _, errors = in_process(
            monkeypatch, capfd, "test", f"--ckpt_path={trained.best}", f"--data.root={tmp_path / root}"
        )
        assert status == 1
        message = errors.split("error: ")[1]
        assert str(tmp_path / root / "train" / "yellow") in message
        assert "blue, green, red" in message
        assert "Traceback" not in errors
        assert runs(tmp_path) == []


def test_a_test_folder_alone_and_classes_that_look_like_numbers(run_cli: RunCLI, tmp_path: Path) -> None:
    """The classes come back from the checkpoint, in the model's order, whatever YAML makes of their names."""
    names = ["-1e5", "012", "1.5E4", "1:30", "1e3", "a: b", "nan", "null", "yes"]
    fill(tmp_path / "images", dict.fromkeys(names, 8))
    run_cli(*FIT, *ONE_BATCH, "--data.root=images")
    (run,) = runs(tmp_path, "fit-*")
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["model"]["init_args"]["class_names"] == config["data"]["init_args"]["class_names"] == names
    fill(tmp_path / "new" / "test", {"1e3": 2, "yes": 3})
    done = run_cli("test", "--ckpt_path=best", "--data.root=new")
    assert "Decoding the 5 images" in done.stderr
    assert "The test data has no image of -1e5, 012, 1.5E4, 1:30, a: b, nan, null: these classes" in done.stderr
    (run,) = runs(tmp_path, "test-*")
    rows = {row["class"]: int(row["images"]) for row in read_csv(run / "per_class.csv")}
    assert rows == dict.fromkeys(names, 0) | {"1e3": 2, "yes": 3}


@pytest.mark.slow
def test_a_test_on_another_cut_than_in_training_is_told(run_cli: RunCLI, tmp_path: Path) -> None:
    """A config file wins over the checkpoint, also with what it says only by the way."""
    fill(tmp_path / "images", {"blue": 20, "red": 20})
    fit = [*FIT, *ONE_BATCH, "--data.root=images"]
    run_cli(*fit, "--data.val_fraction=0.3", "--data.resize=pad")
    test = ["test", "--ckpt_path=best", "--data.root=images"]
    assert "in training" not in run_cli(*test).stderr
    told = run_cli(*test, "--config=configs/image_folder.yaml").stderr
    assert "data.val_fraction is 0.1, in training 0.3" in told
    assert "data.resize is crop, in training pad" in told
    for number in range(5):
        noisy(COLOURS["red"], 9000 + number).save(tmp_path / "images" / "red" / f"new{number}.png")
    assert "cut from 45 images, in training 40 others" in run_cli(*test).stderr


# ---- folders with something wrong


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path]]:
    """Two classes, three broken files among the second's; val has no image of the first."""
    root = tmp_path_factory.mktemp("damaged") / "images"
    fill(root / "train", {"blue": 20, "red": 20})
    fill(root / "val", {"red": 5})
    return root, break_three(root / "train" / "red")


@pytest.mark.parametrize("workers", [0, 2])
def test_broken_images_are_all_named_before_training(
    damaged: tuple[Path, list[Path]], run_cli: RunCLI, tmp_path: Path, workers: int
) -> None:
    root, broken = damaged
    done = run_cli(*FIT, f"--data.root={root}", f"--data.num_workers={workers}", check=False)
    assert done.returncode == 1
    message = done.stderr.split("error: ")[1]
    assert all(str(path) in message for path in broken)
    assert "3 of 43 images cannot be read" in message
    assert "--data.on_bad_image=skip" in message
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.glob("runs/*/checkpoints/*"))


def test_skipping_trains_on_the_rest_and_val_may_lack_a_class(
    damaged: tuple[Path, list[Path]], run_cli: RunCLI, tmp_path: Path
) -> None:
    """Red keeps the index that it has in train. With a worker, which needs its own options."""
    root, broken = damaged
    skip = ["--data.on_bad_image=skip", "--data.num_workers=1"]
    done = run_cli(*FIT, *ONE_BATCH, f"--data.root={root}", *skip, RECORD, PYTHONPATH=TESTS)
    assert "3 of 43 images cannot be read" in done.stderr
    assert all(str(path) in done.stderr for path in broken)
    assert "ImageFolder: 36 train images, kept in: memory" in done.stderr, "4 are cut off for testing"
    assert "The val data has no image of blue" in done.stderr
    val = [batch["targets"] for batch in torch.load(tmp_path / "fit-0.pt")["batches"] if batch["kind"] == "val"]
    assert torch.cat(val).tolist() == [1] * 5


def make_unknown_class(root: Path) -> list[str]:
    fill(root / "train", {"blue": 3, "green": 3, "red": 3})
    fill(root / "val", {"blue": 3, "green": 3, "violet": 3})  # as many classes, which hides it
    return [str(root / "val" / "violet"), "blue, green, red"]


def make_empty_class(root: Path) -> list[str]:
    fill(root, {"blue": 3, "red": 0})
    return [str(root / "red"), "no file", ".jpg", ".png"]


def make_class_of_other_files(root: Path) -> list[str]:
    fill(root, {"blue": 3, "red": 0})
    (root / "red" / "x.heic").write_bytes(b"?")
    return [str(root / "red"), "1 .heic", ".jpg", ".png"]


def make_one_class(root: Path) -> list[str]:
    fill(root / "train", {"blue": 3})
    return [str(root / "train"), "one class only, blue"]


def make_empty_root(root: Path) -> list[str]:
    root.mkdir()
    return [str(root), "ROOT/train/CLASS"]


def make_flat_root(root: Path) -> list[str]:
    fill(root.parent, {root.name: 3})
    return [str(root), "3 images", "predict --images"]


@pytest.mark.parametrize(
    "make",
    [make_unknown_class, make_empty_class, make_class_of_other_files, make_one_class, make_empty_root, make_flat_root],
)
def test_a_folder_that_is_laid_out_wrongly(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path, make: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    told = make(tmp_path / "images")
    status, _, errors = in_process(monkeypatch, capfd, *FIT, "--data.root=images")
    assert status == 1
    message = errors.split("error: ")[1]
    assert all(text in message for text in told), message
    assert "Traceback" not in errors
    assert runs(tmp_path) == []


# ---- workers


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("data", ["Shapes10", "SmallCIFAR10"])
def test_any_number_of_workers(run_cli: RunCLI, tmp_path: Path, data: str, workers: int) -> None:
    """The options that only workers have are dropped without any. Image folders have both above."""
    options = [*TINY, "--trainer.max_epochs=2"]
    if data == "SmallCIFAR10":
        (tmp_path / CIFAR10.source.filename).write_bytes(small_cifar10()[0])
        options = ["--data=helpers.SmallCIFAR10", f"--data.data_dir={tmp_path}", *ONE_BATCH]
    done = run_cli("fit", *options, f"--data.num_workers={workers}", PYTHONPATH=TESTS)
    counted = Counter(line.split(":")[0] for line in done.stderr.splitlines() if "images, kept in" in line)
    assert counted == {data: 2}, "loaded once a split, by the main process only"
