"""Images to predict: found wherever the user points, prepared as in training, and not stopped by a broken file."""

import csv
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from helpers import QUIET
from PIL import ExifTags, Image

from lit_project.callbacks.prediction_writer import PredictionWriter
from lit_project.data.augment import to_float
from lit_project.data.decode import read_image
from lit_project.data.image_folder import ImageFolder
from lit_project.data.predict import ImagesToPredict
from lit_project.errors import InputError

PREPROCESSING = {
    "image_size": [6, 8],
    "in_channels": 3,
    "mean": [0.5, 0.4, 0.3],
    "std": [0.2, 0.3, 0.4],
    "class_names": ["a", "b"],
}


def draw(path: Path, value: int = 0, size: tuple[int, int] = (8, 6)) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (value, value, 0)).save(path)
    return path


def names(images: Any, root: Path) -> list[str]:
    return [str(path.relative_to(root)) for path in ImagesToPredict(images, PREPROCESSING).paths]


def collect(data: ImagesToPredict) -> tuple[torch.Tensor, list[int], list[str | None]]:
    """All batches as the network would see them."""
    images, indices, errors = [], [], []
    for batch in data.predict_dataloader():
        batch = data.on_after_batch_transfer(batch, 0)
        images.append(batch[0])
        indices += batch[1].tolist()
        errors += batch[2]
    return torch.cat(images), indices, errors


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("10.png", "2.jpg", "1.PNG", "sub/3.png", ".hidden/x.png", "__MACOSX/2.jpg"):
        draw(tmp_path / name)
    (tmp_path / "._2.jpg").write_bytes(b"\0\5\26\7")
    (tmp_path / ".DS_Store").write_bytes(b"x")
    (tmp_path / "notes.txt").write_text("x")
    return tmp_path


def test_a_folder_flat_or_nested_in_natural_order(folder: Path):
    assert names(str(folder), folder) == ["1.PNG", "2.jpg", "10.png", "sub/3.png"]


def test_a_file_a_glob_and_a_list(folder: Path):
    assert names(str(folder / "2.jpg"), folder) == ["2.jpg"]
    assert names(str(folder / "*.png"), folder) == ["10.png"]
    assert names(str(folder / "*"), folder) == ["1.PNG", "2.jpg", "10.png", "sub/3.png"], "junk and text left out"
    assert names(str(folder / "**" / "*.png"), folder) == ["10.png", "sub/3.png"]
    assert names(str(folder / "**" / "*.jpg"), folder) == ["2.jpg"], "nothing from __MACOSX"
    both = [str(folder / "sub"), str(folder / "10.png"), str(folder / "*.png")]
    assert names(both, folder) == ["10.png", "sub/3.png"], "each file once"


def test_home_is_expanded(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(folder))
    assert names("~/2.jpg", folder) == ["2.jpg"]
    assert names("~/*.jpg", folder) == ["2.jpg"]


def test_a_file_that_is_named_needs_no_extension_and_may_look_like_a_glob(tmp_path: Path):
    Image.new("RGB", (8, 6)).save(tmp_path / "upload", "PNG")
    assert names(str(tmp_path / "upload"), tmp_path) == ["upload"]
    draw(tmp_path / "copy[1].png")
    assert names(str(tmp_path / "copy[1].png"), tmp_path) == ["copy[1].png"]


def test_nothing_found_says_what_was_looked_for(tmp_path: Path):
    (tmp_path / "a.heic").write_bytes(b"x")
    (tmp_path / "b.heic").write_bytes(b"x")
    for images, found in (("nowhere", ""), ("*.jpeg", ""), ("", "2 .heic"), ("*.heic", "2 .heic")):
        with pytest.raises(InputError) as caught:
            _ = ImagesToPredict(str(tmp_path / images), PREPROCESSING).paths
        assert str(tmp_path / images) in str(caught.value)
        assert found in str(caught.value)
        assert (".png" in str(caught.value)) == bool(found)
    draw(tmp_path / "x.png")
    with pytest.raises(InputError, match="nowhere"):
        _ = ImagesToPredict([str(tmp_path / "x.png"), str(tmp_path / "nowhere")], PREPROCESSING).paths


def test_a_link_to_nowhere_is_a_row_with_its_error(tmp_path: Path):
    draw(tmp_path / "1.png")
    (tmp_path / "2.png").symlink_to(tmp_path / "gone.png")
    for images, errors in (("2.png", [True]), ("*.png", [False, True]), (".", [False, True])):
        data = ImagesToPredict(str(tmp_path / images), PREPROCESSING)
        found = collect(data)[2]
        assert [bool(error) for error in found] == errors
        assert "a link to a file that does not exist" in found[-1]


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_broken_files_are_reported_and_the_rest_predicted(tmp_path: Path, workers: int):
    paths = [draw(tmp_path / f"{number}.png", 20 * number) for number in range(10)]
    paths[3].write_bytes(b"")
    paths[7].write_bytes(paths[7].read_bytes()[:45])
    data = ImagesToPredict(str(tmp_path), PREPROCESSING, batch_size=4, num_workers=workers)
    images, indices, errors = collect(data)
    assert data.paths == paths
    assert indices == list(range(10))
    assert images.shape == (10, 3, 6, 8)
    assert images.dtype == torch.float32
    assert [index for index, error in enumerate(errors) if error] == [3, 7]
    assert "0 bytes" in errors[3]
    mean, std = torch.tensor(PREPROCESSING["mean"]), torch.tensor(PREPROCESSING["std"])
    for index in range(10):
        value = 0 if index in (3, 7) else 20 * index
        pixel = (torch.tensor([value, value, 0]) / 255 - mean) / std
        torch.testing.assert_close(images[index], pixel.view(3, 1, 1).expand(3, 6, 8))


def test_images_can_be_written_to(tmp_path: Path, recwarn: pytest.WarningsRecorder):
    loader = ImagesToPredict(str(draw(tmp_path / "a.png")), PREPROCESSING).predict_dataloader()
    next(iter(loader))[0].add_(1)
    assert not recwarn.list


@pytest.mark.parametrize(("grayscale", "resize"), [(False, "crop"), (True, "crop"), (False, "pad"), (False, "stretch")])
def test_a_file_is_the_same_input_as_in_training(tmp_path: Path, grayscale: bool, resize: Any):
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    for label in ("a", "b"):
        folder = tmp_path / "train" / label
        folder.mkdir(parents=True)
        Image.linear_gradient("L").resize((40, 20)).convert("RGB").save(folder / "turned.jpg", exif=exif)
        Image.new("RGBA", (30, 30), (200, 0, 0, 0)).save(folder / "transparent.png")
        Image.linear_gradient("L").convert("CMYK").save(folder / "inks.tif")
        Image.linear_gradient("L").convert("LA").save(folder / "grey.png")
    options = {"grayscale": grayscale, "resize": resize}
    training = ImageFolder(str(tmp_path), image_size=[24, 20], **options, val_fraction=0.25)
    training.setup("fit")
    data = ImagesToPredict([str(path) for path in training.paths("train")], training.preprocessing())
    images, indices, errors = collect(data)
    assert errors == [None] * len(images)
    assert [data.paths[index] for index in indices] == data.paths
    order = [training.paths("train").index(path) for path in data.paths]
    batch = training.splits["train"].images[order].permute(0, 3, 1, 2), torch.zeros(len(order)), torch.tensor(order)
    torch.testing.assert_close(images, training.on_after_batch_transfer(batch, 0)[0], rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_workers_are_started_only_for_many_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for count, cpus, workers in ((3, 64, 0), (300, 1, 1), (300, 64, 4)):
        monkeypatch.setattr("lit_project.data.predict.usable_cpus", lambda cpus=cpus: cpus)
        data = ImagesToPredict(str(tmp_path), PREPROCESSING)
        data.paths = [tmp_path / f"{number}.png" for number in range(count)]
        assert data.predict_dataloader().num_workers == workers


class Recorder(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[torch.Tensor, list[int], list[str | None]]] = []

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.seen.append((batch[0], batch[1].tolist(), batch[2]))
        return batch[0]


def test_every_device_has_as_many_batches_and_at_least_one(tmp_path: Path):
    for number in range(9):
        draw(tmp_path / f"{number}.png")
    data = ImagesToPredict(str(tmp_path), PREPROCESSING, batch_size=4)
    for devices, batch_size in ((1, 4), (2, 3), (3, 4), (9, 4)):  # on two of them 5 and 4 images
        data.trainer = SimpleNamespace(world_size=devices, strategy=SimpleNamespace(root_device=torch.device("cpu")))
        assert data.predict_dataloader().batch_size == batch_size
    data.trainer.world_size = 10
    with pytest.raises(InputError, match="only 9 images to predict for 10 devices"):
        data.predict_dataloader()


@pytest.mark.parametrize("workers", [0, 2])
def test_the_trainer_predicts_every_file_once(tmp_path: Path, workers: int):
    for number in range(7):
        draw(tmp_path / f"{number}.png", number)
    (tmp_path / "5.png").write_bytes(b"")
    model = Recorder()
    data = ImagesToPredict(str(tmp_path), PREPROCESSING, batch_size=3, num_workers=workers)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = L.Trainer(accelerator="cpu", devices=1, default_root_dir=tmp_path, **quiet)
    trainer.predict(model, datamodule=data, return_predictions=False)
    assert [index for _, indices, _ in model.seen for index in indices] == list(range(7))
    assert [bool(error) for _, _, errors in model.seen for error in errors] == [False] * 5 + [True, False]
    raw = torch.from_numpy(read_image(data.paths[6], (6, 8))).permute(2, 0, 1)[None]
    mean, std = torch.tensor(PREPROCESSING["mean"]), torch.tensor(PREPROCESSING["std"])
    torch.testing.assert_close(model.seen[-1][0], to_float(raw, mean, std))


class Scores(L.LightningModule):
    """Any module: it has no names of classes."""

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return torch.tensor([[0.25, 0.75]]).repeat(len(batch[1]), 1)


def test_predictions_of_a_module_without_class_names_are_numbers(tmp_path: Path):
    data = ImagesToPredict(str(draw(tmp_path / "a.png")), PREPROCESSING)
    trainer = L.Trainer(**QUIET, callbacks=[PredictionWriter(tmp_path / "predictions.csv")])
    trainer.predict(Scores(), datamodule=data, return_predictions=False)
    with (tmp_path / "predictions.csv").open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert (row["class"], row["probability"], row["top5"]) == ("1", "0.75", '[["1", 0.75], ["0", 0.25]]')
