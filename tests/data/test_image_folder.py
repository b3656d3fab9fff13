"""A user's own folders: one class map, clear complaints, and every image accounted for. The files are real ones."""

import copy
import logging
import pickle
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from jsonargparse import ArgumentParser
from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.trainer.states import TrainerFn
from PIL import ExifTags, Image
from torch.utils.data import DataLoader

from lit_project.data.base import ImageDataModule
from lit_project.data.batches import keep_batch
from lit_project.data.decode import read_image
from lit_project.data.image_folder import ImageFolder
from lit_project.errors import InputError


def draw(path: Path, value: int = 0, size: tuple[int, int] = (8, 8)) -> Path:
    """A grey PNG, or other kind by its extension, of one value."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (value,) * 3).save(path)
    return path


def make(root: Path, split: str, counts: dict[str, int], first: int = 0) -> None:
    """``counts`` images in each class, every one of another grey."""
    for name, count in counts.items():
        for number in range(count):
            draw(root / split / name / f"{number}.png", first)
            first += 1


def ready(root: Path, *stages: str, **options: Any) -> ImageFolder:
    data = ImageFolder(str(root), **options)
    for stage in stages or ("fit", "test"):
        data.setup(stage)
    return data


def greys(data: ImageFolder, split: Any) -> list[int]:
    return data.splits[split].images[:, 0, 0, 0].tolist()


def complaint(root: Path, **options: Any) -> str:
    with pytest.raises(InputError) as caught:
        ready(root, **options)
    return str(caught.value)


# ---- classes


def test_one_class_map_for_all_splits_when_val_lacks_a_class(tmp_path: Path):
    make(tmp_path, "train", {"a": 3, "b": 3, "c": 3})
    make(tmp_path, "val", {"b": 2, "c": 1}, first=100)
    make(tmp_path, "test", {"a": 1, "c": 2}, first=200)
    with pytest.warns(UserWarning, match="has no image of") as caught:
        data = ready(tmp_path)
    assert data.class_names == ["a", "b", "c"]
    assert data.splits["val"].targets.tolist() == [1, 1, 2]
    assert data.splits["test"].targets.tolist() == [0, 2, 2]
    messages = [str(warning.message) for warning in caught if "has no image of" in str(warning.message)]
    assert len(messages) == 2, "once for val, once for test"
    assert "The val data has no image of a:" in messages[0]
    assert "The test data has no image of b:" in messages[1]


def test_equal_class_counts_do_not_hide_a_shift(tmp_path: Path):
    make(tmp_path, "train", {"a": 2, "b": 2, "c": 2})
    make(tmp_path, "val", {"b": 1, "c": 1, "d": 1})
    message = complaint(tmp_path)
    assert str(tmp_path / "val" / "d") in message
    assert "a, b, c" in message


def test_hidden_and_system_files_change_nothing(tmp_path: Path):
    make(tmp_path, "train", {"a": 2, "b": 2})
    make(tmp_path, "val", {"a": 1, "b": 1}, first=50)
    make(tmp_path, "test", {"a": 1, "b": 1}, first=60)
    for name in (".ipynb_checkpoints/x.png", "__MACOSX/a/x.png", "a/.cache/x.png", "a/__MACOSX/x.png", "@eaDir/x.png"):
        draw(tmp_path / "train" / name)
    draw(tmp_path / ".hidden" / "x.png")
    for name in (".DS_Store", "Thumbs.db", "a/.DS_Store", "a/._0.png", "b/desktop.ini"):
        (tmp_path / "train" / name).write_bytes(b"\0\5\26\7")
    data = ready(tmp_path)
    assert data.class_names == ["a", "b"]
    assert greys(data, "train") == [0, 1, 2, 3]


def test_links_and_nested_folders_are_followed(tmp_path: Path):
    draw(tmp_path / "elsewhere" / "x" / "1.png", 7)
    make(tmp_path / "root", "train", {"a": 2})
    draw(tmp_path / "root" / "train" / "a" / "nested" / "deep.png", 9)
    (tmp_path / "root" / "train" / "b").symlink_to(tmp_path / "elsewhere")
    make(tmp_path / "root", "val", {"a": 1, "b": 1})
    make(tmp_path / "root", "test", {"a": 1, "b": 1})
    data = ready(tmp_path / "root")
    assert data.class_names == ["a", "b"]
    assert greys(data, "train") == [0, 1, 9, 7]
    assert data.splits["train"].targets.tolist() == [0, 0, 0, 1]


# ---- layouts


def test_a_flat_root_gives_val_and_test_from_train(tmp_path: Path):
    make(tmp_path, "", {"a": 20, "b": 10})
    data = ready(tmp_path, val_fraction=0.2)
    assert data.provided_splits == {"train"}
    assert [len(data.splits[split].targets) for split in ("train", "val", "test")] == [18, 6, 6]
    assert sorted(greys(data, "train") + greys(data, "val") + greys(data, "test")) == list(range(30))
    for split in ("val", "test"):
        assert torch.bincount(data.splits[split].targets).tolist() == [4, 2]


def test_without_a_test_folder_the_test_images_are_not_trained_on(tmp_path: Path):
    make(tmp_path, "train", {"a": 20, "b": 20})
    make(tmp_path, "val", {"a": 2, "b": 2}, first=100)
    for stages in (("fit", "test"), ("test", "fit")):
        data = ready(tmp_path, *stages)
        assert greys(data, "val") == [100, 101, 102, 103]
        assert len(greys(data, "test")) == 4
        assert sorted(greys(data, "train") + greys(data, "test")) == list(range(40))


def test_without_a_val_folder_only_val_is_cut(tmp_path: Path):
    make(tmp_path, "train", {"a": 20, "b": 20})
    make(tmp_path, "test", {"a": 2, "b": 2}, first=100)
    data = ready(tmp_path)
    assert greys(data, "test") == [100, 101, 102, 103]
    assert sorted(greys(data, "train") + greys(data, "val")) == list(range(40))
    assert "train" not in ready(tmp_path, "test").splits, "testing does not load the training images"


@pytest.mark.parametrize("name", ["val", "valid", "validation", "Val"])
def test_other_names_of_the_validation_folder(tmp_path: Path, name: str):
    make(tmp_path, "Train", {"a": 2, "b": 2})
    make(tmp_path, name, {"a": 1, "b": 1}, first=50)
    make(tmp_path, "testing", {"a": 1, "b": 1}, first=60)
    data = ready(tmp_path)
    assert data.class_names == ["a", "b"], "a split's folder is not a class"
    assert [greys(data, split) for split in ("train", "val", "test")] == [[0, 1, 2, 3], [50, 51], [60, 61]]


def test_another_set_of_images_or_another_resize_than_in_training_is_told(tmp_path: Path):
    make(tmp_path / "old", "", {"a": 20, "b": 20})
    trained = ready(tmp_path / "old", "fit").preprocessing()
    (tmp_path / "old").rename(tmp_path / "moved")

    def told(**options: Any) -> list[str]:
        data = ImageFolder(str(tmp_path / "moved"), **options)
        data.use_preprocessing(trained)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            data.setup("test")
        return [str(warning.message) for warning in caught]

    assert told() == [], "wherever they lie"
    (message,) = told(resize="pad")
    assert "data.resize is pad, in training crop." in message
    (tmp_path / "moved" / "a" / "0.png").rename(tmp_path / "moved" / "a" / "renamed.png")
    (message,) = told()
    assert "cut from 40 images, in training 40 others" in message, "of as many, the same seed takes others"


def test_paths_follow_the_images_through_cutting_and_skipping(tmp_path: Path):
    make(tmp_path, "train", {"a": 12, "b": 12})
    make(tmp_path, "test", {"a": 2, "b": 2}, first=100)
    (tmp_path / "train" / "a" / "3.png").write_bytes(b"")
    (tmp_path / "test" / "a" / "0.png").write_bytes(b"")
    with pytest.warns(UserWarning, match="cannot be read"):
        data = ready(tmp_path, on_bad_image="skip", val_fraction=0.25)
    seen = set()
    for split in ("train", "val", "test"):
        images, targets, _ = data.splits[split]
        paths = data.paths(split)
        assert len(paths) == len(images) == len(targets)
        for path, image, target in zip(paths, images, targets.tolist(), strict=True):
            assert np.array_equal(read_image(path), image.numpy())
            assert path.parent.name == data.class_names[target]
        seen.update(paths)
    assert len(seen) == 26


def test_paths_follow_the_images_that_are_shuffled_to_be_overfitted(tmp_path: Path):
    make(tmp_path, "train", {"a": 12, "b": 12})
    data = ImageFolder(str(tmp_path), val_fraction=0.25)
    data.trainer = L.Trainer(logger=False, enable_checkpointing=False, accelerator="cpu", overfit_batches=1)
    data.setup("fit")
    paths = data.paths("train")
    assert paths != sorted(paths)
    for path, image in zip(paths, data.splits["train"].select(torch.arange(12)).images, strict=True):
        assert np.array_equal(read_image(path), image.numpy())


# ---- complaints


def test_a_root_that_is_missing_or_empty(tmp_path: Path):
    message = complaint(tmp_path / "nowhere")
    assert str(tmp_path / "nowhere") in message
    assert "train/CLASS" in message
    (tmp_path / "README.txt").write_text("x")
    assert f"{tmp_path} has no class folder" in complaint(tmp_path)
    (tmp_path / "train").mkdir()
    assert f"{tmp_path / 'train'} has no class folder" in complaint(tmp_path)


def test_images_without_class_folders(tmp_path: Path):
    draw(tmp_path / "train" / "x.png")
    message = complaint(tmp_path)
    assert str(tmp_path / "train" / "x.png") in message
    assert "train/CLASS" in message
    make(tmp_path, "train", {"a": 2, "b": 2})
    make(tmp_path, "val", {"a": 1, "b": 1})
    with pytest.warns(UserWarning, match=r"x\.png lies in no class folder"):
        data = ready(tmp_path, "fit")
    assert len(data.splits["train"].images) + len(data.splits["test"].images) == 4


def test_an_unlabelled_test_folder(tmp_path: Path):
    make(tmp_path, "train", {"a": 2, "b": 2})
    draw(tmp_path / "test" / "x.png")
    message = complaint(tmp_path)
    assert str(tmp_path / "test") in message
    assert "predict --images" in message


def test_a_single_class(tmp_path: Path):
    make(tmp_path, "train", {"cat": 2})
    assert "one class only, cat" in complaint(tmp_path)


def test_an_empty_class_folder_and_one_of_unread_files(tmp_path: Path):
    make(tmp_path, "train", {"a": 2, "b": 2})
    (tmp_path / "train" / "c").mkdir()
    message = complaint(tmp_path)
    assert "Class c has no image" in message
    assert ".jpg" in message
    (tmp_path / "train" / "c" / "x.heic").write_bytes(b"x")
    (tmp_path / "train" / "c" / "y.HEIC").write_bytes(b"x")
    assert "2 .heic" in complaint(tmp_path)


def test_a_gif_is_an_image_too(tmp_path: Path):
    make(tmp_path, "train", {"a": 2, "b": 2})
    draw(tmp_path / "train" / "c" / "x.gif", 9)
    make(tmp_path, "val", {"a": 1, "b": 1, "c": 1})
    make(tmp_path, "test", {"a": 1, "b": 1, "c": 1})
    assert greys(ready(tmp_path), "train") == [0, 1, 2, 3, 9]


def test_a_split_folder_without_train_or_twice(tmp_path: Path):
    make(tmp_path, "val", {"a": 1, "b": 1})
    assert "has val, but no folder train" in complaint(tmp_path)
    make(tmp_path, "train", {"a": 1, "b": 1})
    make(tmp_path, "valid", {"a": 1, "b": 1})
    assert "has val and valid: which is the val data?" in complaint(tmp_path)


def test_a_split_folder_of_empty_classes(tmp_path: Path):
    make(tmp_path, "train", {"a": 2, "b": 2})
    (tmp_path / "val" / "a").mkdir(parents=True)
    assert f"{tmp_path / 'val'} holds no image" in complaint(tmp_path)


def test_other_files_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    make(tmp_path, "train", {"a": 2, "b": 2})
    make(tmp_path, "val", {"a": 1, "b": 1})
    for name in ("labels.csv", "a/1.txt", "a/2.txt", "b/x.heic", "b/.DS_Store"):
        (tmp_path / "train" / name).write_text("x")
    monkeypatch.setattr(logging.getLogger("lightning.pytorch"), "propagate", True)
    with caplog.at_level(logging.INFO):
        ready(tmp_path, "fit")
    lines = [record.getMessage() for record in caplog.records if "ignored" in record.getMessage()]
    assert len(lines) == 1
    assert str(tmp_path / "train") in lines[0]
    for counted in ("2 .txt", "1 .csv", "1 .heic"):
        assert counted in lines[0]


@pytest.mark.parametrize("kind", ["half", "empty", "html"])
def test_a_broken_file_is_named(tmp_path: Path, kind: str):
    make(tmp_path, "train", {"a": 3, "b": 3})
    path = draw(tmp_path / "train" / "b" / "broken.jpg", size=(64, 64))
    content = {"half": path.read_bytes()[: path.stat().st_size // 2], "empty": b"", "html": b"<html></html>"}[kind]
    path.write_bytes(content)
    message = complaint(tmp_path, image_size=8)
    assert "1 of 7 images" in message
    assert str(path) in message


def test_skipping_keeps_targets_in_step(tmp_path: Path):
    make(tmp_path, "train", {"a": 3, "b": 3})
    make(tmp_path, "val", {"a": 1, "b": 1})
    make(tmp_path, "test", {"a": 1, "b": 1})
    (tmp_path / "train" / "a" / "0.png").write_bytes(b"")
    with pytest.warns(UserWarning, match="1 of 6 images cannot be read"):
        data = ready(tmp_path, on_bad_image="skip")
    assert greys(data, "train") == [1, 2, 3, 4, 5]
    assert data.splits["train"].targets.tolist() == [0, 0, 1, 1, 1]


def test_what_is_skipped_is_said_in_every_run_and_not_taken_for_good(tmp_path: Path):
    make(tmp_path, "train", {"a": 3, "b": 3})
    make(tmp_path, "val", {"a": 1, "b": 1})
    (tmp_path / "train" / "a" / "0.png").write_bytes(b"")
    for _ in range(2):
        with pytest.warns(UserWarning, match="1 of 6 images cannot be read") as caught:
            assert greys(ready(tmp_path, "fit", on_bad_image="skip"), "train") != []
        assert str(tmp_path / "train" / "a" / "0.png") in str(caught[0].message)
        assert "1 of 6 images cannot be read" in complaint(tmp_path)


def test_nothing_but_broken_images_cannot_be_skipped(tmp_path: Path):
    make(tmp_path, "train", {"a": 2, "b": 2})
    for path in tmp_path.rglob("*.png"):
        path.write_bytes(b"")
    assert "4 of 4 images cannot be read" in complaint(tmp_path, on_bad_image="skip", image_size=8)


# ---- classes that are given


def test_given_classes_number_the_targets(tmp_path: Path):
    make(tmp_path, "train", {"a": 2, "b": 2})
    make(tmp_path, "val", {"a": 1, "b": 1}, first=50)
    make(tmp_path, "test", {"b": 1}, first=60)
    for names, train, test in ((["a", "b"], [0, 0, 1, 1], [1]), (["b", "x", "a"], [2, 2, 0, 0], [0])):
        with pytest.warns(UserWarning, match="has no image of"):
            data = ready(tmp_path, class_names=names)
        assert data.class_names == names
        assert data.num_classes == len(names)
        assert greys(data, "train") == [0, 1, 2, 3], "what was decoded for other classes is used"
        assert data.splits["train"].targets.tolist() == train
        assert data.splits["test"].targets.tolist() == test


def test_a_folder_that_is_none_of_the_given_classes(tmp_path: Path):
    make(tmp_path, "train", {"a": 2, "b": 2})
    message = complaint(tmp_path, class_names=["a", "c"])
    assert str(tmp_path / "train" / "b") in message
    assert "a, c" in message


@pytest.mark.parametrize("names", [[], ["a"], ["a", "b", "a"]])
def test_impossible_class_names(tmp_path: Path, names: list[str]):
    with pytest.raises(InputError, match="class_names"):
        ImageFolder(str(tmp_path), class_names=names)


def test_a_test_folder_alone_can_be_tested_but_not_trained_on(tmp_path: Path):
    make(tmp_path, "test", {"b": 2, "c": 1})
    assert "--data.class_names" in complaint(tmp_path)
    with pytest.warns(UserWarning, match="no image of a"):
        data = ready(tmp_path, "test", class_names=["a", "b", "c"])
    assert data.image_size == (8, 8)
    assert data.splits["test"].targets.tolist() == [1, 1, 2]
    for method in (data.prepare_data, lambda: data.setup("fit")):
        with pytest.raises(InputError, match=f"{tmp_path} has no folder train"):
            method()


# ---- decoded once


def test_only_what_the_stage_needs_is_decoded_and_by_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for number, split in enumerate(("train", "val", "test")):
        make(tmp_path, split, {"a": 2, "b": 2}, first=10 * number)
    read: list[str] = []
    monkeypatch.setattr(
        "lit_project.data.cache.read_image",
        lambda path, **options: read.append(path) or read_image(path, **options),
    )
    ImageFolder(str(tmp_path)).prepare_data()
    assert sorted({Path(path).parts[-3] for path in read}) == ["train", "val"]
    assert len(read) == 8
    ready(tmp_path, "fit")  # as another process
    assert len(read) == 8
    testing = ImageFolder(str(tmp_path))
    testing.trainer = L.Trainer(logger=False, enable_checkpointing=False, accelerator="cpu")
    testing.trainer.state.fn = TrainerFn.TESTING
    testing.prepare_data()
    assert [Path(path).parts[-3] for path in read[8:]] == ["test"] * 4
    ready(tmp_path, "fit", "test")
    assert len(read) == 12


def test_where_decoded_images_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    make(tmp_path / "images", "train", {"a": 3, "b": 3})
    monkeypatch.delenv("LIT_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    expected = [tmp_path / "home" / ".cache" / "lit_project" / "images"]
    ready(tmp_path / "images", "fit")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    expected.append(tmp_path / "xdg" / "lit_project" / "images")
    ready(tmp_path / "images", "fit")
    monkeypatch.setenv("LIT_CACHE_DIR", "~/own")
    expected.append(tmp_path / "home" / "own")
    ready(tmp_path / "images", "fit")
    expected.append(tmp_path / "given")
    ready(tmp_path / "images", "fit", cache_dir=str(tmp_path / "given"))
    assert sorted(path.parents[2] for path in tmp_path.rglob("images.bin")) == sorted(expected)


# ---- image size and channels


def test_size_is_that_of_the_images_if_all_agree(tmp_path: Path):
    for number in range(6):
        draw(tmp_path / "train" / "ab"[number % 2] / f"{number}.png", size=(9, 5))
    data = ready(tmp_path, "fit")
    assert data.image_size == (5, 9)
    assert data.splits["train"].images.shape[1:] == (5, 9, 3)


def test_differing_sizes_name_two_files_and_the_option(tmp_path: Path):
    make(tmp_path, "train", {"a": 40})
    draw(tmp_path / "train" / "b" / "even1.png")
    draw(tmp_path / "train" / "b" / "even2.png")
    odd = draw(tmp_path / "train" / "b" / "odd.png", size=(12, 10))
    message = complaint(tmp_path)
    assert str(tmp_path / "train" / "a" / "0.png") in message
    assert "8 pixels wide and 8 high" in message
    assert str(odd) in message
    assert "12 pixels wide and 10 high" in message
    assert "--data.image_size=64" in message
    assert ready(tmp_path, "fit", image_size=16).splits["train"].images.shape[1:] == (16, 16, 3)
    assert ready(tmp_path, "fit", image_size=[6, 9]).image_size == (6, 9)


def test_rotated_photos_have_the_size_they_are_seen_in(tmp_path: Path):
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    for name in ("a", "b"):
        (tmp_path / "train" / name).mkdir(parents=True)
        for number in range(3):
            Image.new("RGB", (40, 20)).save(tmp_path / "train" / name / f"{number}.png", exif=exif)
    data = ready(tmp_path)
    assert data.image_size == (40, 20)
    assert data.splits["train"].images.shape[1:] == (40, 20, 3)


def test_a_broken_file_does_not_hide_the_size(tmp_path: Path):
    make(tmp_path, "train", {"a": 3, "b": 3})
    (tmp_path / "train" / "a" / "0.png").write_bytes(b"")
    assert ImageFolder(str(tmp_path)).image_size == (8, 8)
    for path in tmp_path.rglob("*.png"):
        path.write_bytes(b"")
    with pytest.raises(InputError, match="can be read"):
        _ = ImageFolder(str(tmp_path)).image_size


@pytest.mark.parametrize("size", [0, -3, [8], [8, 8, 8], [8, 0]])
def test_an_impossible_size(tmp_path: Path, size: Any):
    with pytest.raises(InputError, match="image_size"):
        ImageFolder(str(tmp_path), image_size=size)


def test_greyscale(tmp_path: Path):
    make(tmp_path, "train", {"a": 20, "b": 20})
    data = ready(tmp_path, grayscale=True, batch_size=8)
    assert data.in_channels == 1
    assert data.splits["train"].images.shape[1:] == (8, 8, 1)
    assert next(iter(data.train_dataloader()))[0].shape == (8, 1, 8, 8)
    assert data.preprocessing()["in_channels"] == 1
    assert len(data.preprocessing()["mean"]) == 1


# ---- as an object


def test_construction_reads_nothing():
    data = ImageFolder("/nonexistent/images")
    with pytest.raises(InputError):
        _ = data.class_names


def test_home_is_expanded_and_root_survives_a_change_of_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    make(tmp_path, "pictures/train", {"a": 2, "b": 2})
    monkeypatch.setenv("HOME", str(tmp_path))
    assert ImageFolder("~/pictures").class_names == ["a", "b"]
    monkeypatch.chdir(tmp_path)
    data = ImageFolder("pictures")
    monkeypatch.chdir("/")
    assert data.class_names == ["a", "b"]


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_batches_do_not_depend_on_workers(tmp_path: Path, workers: int):
    make(tmp_path, "train", {"a": 12, "b": 12})
    data = ready(tmp_path, num_workers=workers, batch_size=4)
    train = [(images.tolist(), targets.tolist()) for images, targets, _ in data.train_dataloader()]
    expected = ready(tmp_path, batch_size=4).train_dataloader()
    assert train == [(images.tolist(), targets.tolist()) for images, targets, _ in expected]
    assert sum(len(targets) for _, targets, _ in data.test_dataloader()) == len(data.splits["test"].targets)


def on_disk(root: Path) -> ImageFolder:
    """More than 300 kB of images, left in their file."""
    for number in range(32):
        draw(root / "ab"[number % 2] / f"{number}.png", number, (64, 64))
    return ready(root, "fit", placement="disk", batch_size=8)


def test_a_worker_is_handed_the_name_of_the_file_not_what_is_in_it(tmp_path: Path):
    dataset: Any = on_disk(tmp_path).train_dataloader().dataset
    pickled = pickle.dumps(dataset)
    assert len(pickled) < 10_000 < dataset.arrays.nbytes
    for other in (pickle.loads(pickled), copy.deepcopy(dataset)):
        assert all(map(torch.equal, other.__getitems__([3, 0, 20]), dataset.__getitems__([3, 0, 20])))


def expect_a_mapping(worker: int) -> None:
    assert "images.bin" in Path("/proc/self/maps").read_text()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux what is mapped")
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_workers_that_are_not_forked_map_the_file(tmp_path: Path, method: str):
    loader = on_disk(tmp_path).train_dataloader()
    options = {"multiprocessing_context": method, "num_workers": 1, "worker_init_fn": expect_a_mapping}
    spawned = DataLoader(loader.dataset, batch_size=8, collate_fn=keep_batch, **options)
    plain = DataLoader(loader.dataset, batch_size=8, collate_fn=keep_batch)
    for ours, theirs in zip(spawned, plain, strict=True):
        assert all(map(torch.equal, ours, theirs))


def test_the_split_is_the_same_in_another_process_with_another_seed(tmp_path: Path):
    make(tmp_path, "", {"a": 30, "b": 30})
    here = [ready(tmp_path, "fit").paths(split) for split in ("train", "val", "test")]
    code = (
        "import sys, torch, lightning as L; from lit_project.data.image_folder import ImageFolder\n"
        "L.seed_everything(99, verbose=False); torch.rand(5)\n"
        "data = ImageFolder(sys.argv[1]); data.setup('test'); torch.rand(5); data.setup('fit')\n"
        "print([[str(p) for p in data.paths(s)] for s in ('train', 'val', 'test')])"
    )
    there = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert there.stdout.splitlines()[-1] == str([[str(path) for path in paths] for paths in here])


def test_every_option_shows_in_the_help_with_its_text():
    parser = LightningArgumentParser()
    parser.add_lightning_class_args(ImageFolder, "data")
    text = parser.format_help()
    base = ("batch_size", "num_workers", "val_fraction", "split_seed", "augment")
    own = ("root", "image_size", "resize", "grayscale", "class_names", "on_bad_image", "cache_dir")
    for name in (*own, *base):
        assert f"--data.{name}" in text
    assert "share of the training data held out" in " ".join(text.split())


def test_options_from_the_command_line_reach_both_classes(tmp_path: Path):
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(ImageDataModule, "data")
    arguments = [
        "--data=lit_project.data.image_folder.ImageFolder",
        f"--data.root={tmp_path}",
        "--data.image_size=32",
    ]
    arguments += ["--data.batch_size=7", "--data.on_bad_image=skip", "--data.augment=[]"]
    data = parser.instantiate(parser.parse_args(arguments)).data
    assert isinstance(data, ImageFolder)
    assert (data.image_size, data.batch_size, data.on_bad_image, data.augment) == ((32, 32), 7, "skip", [])
    pair = parser.instantiate(parser.parse_args([*arguments, "--data.image_size=[20,30]"])).data
    assert pair.image_size == (20, 30)
