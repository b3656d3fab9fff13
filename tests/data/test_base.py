"""What all data sets share: splits, sharding, loaders, statistics, and augmentation keyed by where it happens."""

import math
import random
import subprocess
import sys
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from helpers import QUIET
from torch import Tensor
from torchvision.transforms import v2

from lit_project.data.augment import Draw, RandomCrop, RandomHorizontalFlip, to_float
from lit_project.data.base import ImageDataModule, SplitName, channel_statistics, stratified_split
from lit_project.data.batches import Arrays, BatchDataset, ShardedSampler, even_batch_size
from lit_project.errors import InputError
from lit_project.seeding import IsolatedRandomness, keyed_generator


class Numbered(ImageDataModule):
    """Three unequal classes of 4x4 images; every image of all splits shows another number, in two of its channels."""

    class_names = ["a", "b", "c"]
    image_size = (4, 4)
    starts = {"train": 0, "val": 1000, "test": 2000}

    def __init__(self, sizes: dict[SplitName, int], **options: Any) -> None:
        super().__init__(**options)
        self.sizes = sizes
        self.loads: list[str] = []

    @property
    def provided_splits(self) -> set[SplitName]:
        return set(self.sizes)

    def load(self, split: SplitName) -> Arrays:
        self.loads.append(split)
        numbers = torch.arange(self.sizes[split]) + self.starts[split]
        pixels = torch.stack([numbers % 256, numbers // 256, torch.full_like(numbers, 7)], dim=-1)
        images = pixels.to(torch.uint8).view(-1, 1, 1, 3).repeat(1, 4, 4, 1)
        # one image in ten is of class 2, three are of class 1
        targets = torch.tensor([0, 1, 0, 1, 2, 0, 0, 1, 0, 0])[numbers % 10]
        return Arrays(images, targets)


def numbers(images: Tensor) -> list[int]:
    """The numbers that uint8 images ``[N, 4, 4, 3]`` show."""
    return (images[:, 0, 0, 0].long() + 256 * images[:, 0, 0, 1].long()).tolist()


def served(loader: Any) -> list[int]:
    return [number for images, *_ in loader for number in numbers(images.permute(0, 2, 3, 1))]


def trainer(**values: Any) -> Any:
    """As much of a trainer as the data looks at."""
    defaults = {"training": True, "overfit_batches": 0, "current_epoch": 0, "global_rank": 0, "world_size": 1}
    step = values.pop("step", 0)
    strategy = SimpleNamespace(root_device=torch.device("cpu"))
    loop = SimpleNamespace(
        batch_idx=step - 1,
        epoch_loop=SimpleNamespace(batch_progress=SimpleNamespace(current=SimpleNamespace(ready=step))),
    )
    return SimpleNamespace(**{**defaults, **values}, strategy=strategy, num_devices=1, fit_loop=loop)


@pytest.fixture(autouse=True)
def seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_GLOBAL_SEED", "3")


# ---- splitting


def unbalanced() -> Tensor:
    counts = torch.tensor([400, 37, 9, 3])
    return torch.arange(4).repeat_interleave(counts)[torch.randperm(int(counts.sum()), generator=keyed_generator(1))]


@pytest.mark.parametrize("fractions", [[0.1], [0.1, 0.1], [0.3, 0.2], [0.45, 0.45], [0.01, 0.01]])
def test_split_is_disjoint_complete_and_has_every_class_in_every_part(fractions: list[float]):
    targets = unbalanced()
    parts = stratified_split(targets, fractions, seed=0)
    assert len(parts) == len(fractions) + 1
    assert torch.cat(parts).sort().values.tolist() == list(range(len(targets)))
    for part in parts:
        assert part.tolist() == sorted(part.tolist())
        assert set(targets[part].tolist()) == {0, 1, 2, 3}


def test_split_divides_each_class_in_the_given_proportions():
    targets = unbalanced()
    _, *parts = stratified_split(targets, [0.3, 0.2], seed=0)
    for part, fraction in zip(parts, [0.3, 0.2], strict=True):
        shares = torch.bincount(targets[part]) - torch.tensor([400, 37, 9, 3]) * fraction
        assert shares.abs().max() <= 0.5, "the second share is of the whole class, not of what the first left"


def test_a_class_too_small_to_split_is_trained_on():
    targets = torch.tensor([0] * 20 + [1] * 2 + [2])
    train, val, test = stratified_split(targets, [0.4, 0.4], seed=0)
    assert {20, 21, 22} <= set(train.tolist())
    assert set(targets[val].tolist()) == set(targets[test].tolist()) == {0}


def test_split_depends_on_its_seed_alone():
    targets = unbalanced()
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = stratified_split(targets, [0.1, 0.1], seed=5)
    assert torch.equal(torch.get_rng_state(), state), "the global generator is left alone"
    torch.manual_seed(2)
    assert all(map(torch.equal, first, stratified_split(targets, [0.1, 0.1], seed=5)))
    assert not torch.equal(first[1], stratified_split(targets, [0.1, 0.1], seed=6)[1])


def test_split_is_the_same_in_a_fresh_process_with_another_global_seed():
    code = (
        "import torch, lightning as L; from lit_project.data.base import stratified_split\n"
        "L.seed_everything(77, verbose=False); torch.rand(3)\n"
        "targets = torch.arange(300) % 7\n"
        "print([part.tolist() for part in stratified_split(targets, [0.1, 0.2], seed=4)])"
    )
    there = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    here = stratified_split(torch.arange(300) % 7, [0.1, 0.2], seed=4)
    assert there.stdout.splitlines()[-1] == str([part.tolist() for part in here])


PROVIDED: list[dict[SplitName, int]] = [
    {"train": 100},
    {"train": 100, "val": 20},
    {"train": 100, "test": 20},
    {"train": 100, "val": 20, "test": 20},
]


@pytest.mark.parametrize("sizes", PROVIDED, ids=lambda sizes: "+".join(sizes))
def test_splits_are_the_same_in_every_stage_order_and_never_overlap(sizes: dict[SplitName, int]):
    seen = []
    for stages in (("fit", "test"), ("test", "fit"), ("validate", "test", "fit"), ("fit", "fit", "test", "test")):
        data = Numbered(sizes)
        for stage in stages:
            data.setup(stage)
            torch.rand(3)
        seen.append({split: numbers(data.splits[split].images) for split in ("train", "val", "test")})
        assert len(data.loads) == len(set(data.loads)), "nothing is loaded twice"
    assert all(other == seen[0] for other in seen[1:])
    together = seen[0]["train"] + seen[0]["val"] + seen[0]["test"]
    assert len(together) == len(set(together)) == sum(sizes.values())


def test_a_provided_test_split_needs_nothing_else():
    data = Numbered({"train": 100, "test": 20})
    data.setup("test")
    assert data.loads == ["test"]


def test_the_split_does_not_follow_the_global_seed(monkeypatch: pytest.MonkeyPatch):
    first, second, third = Numbered({"train": 100}), Numbered({"train": 100}), Numbered({"train": 100}, split_seed=1)
    first.setup("fit")
    monkeypatch.setenv("PL_GLOBAL_SEED", "4")
    second.setup("fit")
    third.setup("fit")
    assert numbers(first.splits["val"].images) == numbers(second.splits["val"].images)
    assert numbers(first.splits["val"].images) != numbers(third.splits["val"].images)


def warned(data: ImageDataModule, stage: str) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        data.setup(stage)
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize(
    ("before", "stage", "sizes", "options", "told"),
    [
        ({"train": 100}, "test", {"train": 100}, {}, ""),
        ({"train": 100}, "validate", {"train": 100}, {}, ""),
        ({"train": 100}, "test", {"train": 100}, {"val_fraction": 0.3}, "data.val_fraction is 0.3, in training 0.2"),
        ({"train": 100}, "validate", {"train": 100}, {"split_seed": 1}, "data.split_seed is 1, in training 0"),
        ({"train": 100}, "test", {"train": 110}, {}, "cut from 110 images, in training 100 others"),
        ({"train": 100}, "test", {"train": 100, "val": 20}, {}, "cut off is test, in training val and test"),
        (
            {"train": 100, "val": 9, "test": 9},
            "test",
            {"train": 100},
            {},
            "cut off is val and test, in training nothing",
        ),
        # a split that the data brings is the same however the other is cut, as with CIFAR-10
        ({"train": 100, "test": 20}, "test", {"train": 100, "test": 20}, {"val_fraction": 0.3}, ""),
        ({"train": 100, "test": 20}, "validate", {"train": 100, "test": 20}, {"val_fraction": 0.3}, "val_fraction"),
    ],
)
def test_a_score_on_images_that_were_trained_on_is_told(
    before: dict[SplitName, int], stage: str, sizes: dict[SplitName, int], options: dict[str, Any], told: str
):
    """In a fit, other settings are refused or meant; and a checkpoint of older code does not say how it was split."""
    options = {"val_fraction": 0.2} | options
    first = Numbered(before, val_fraction=0.2)
    first.setup("fit")
    trained = first.preprocessing()
    older = {key: value for key, value in trained.items() if key != "split"}
    for known, stages, count in ((trained, stage, bool(told)), (trained, "fit", 0), (older, stage, 0)):
        data = Numbered(sizes, **options)
        data.use_preprocessing(known)
        messages = warned(data, stages)
        assert len(messages) == count
        assert all(told in message for message in messages)
    split: SplitName = "test" if stage == "test" else "val"
    overlap = set(numbers(data.splits[split].images)) & set(numbers(first.splits["train"].images))
    assert told or not overlap


def test_images_that_are_prepared_otherwise_than_in_training_are_told_with_both_values():
    data = Numbered({"train": 100, "test": 20})
    data.use_preprocessing({"mean": [0.5] * 3, "std": [1.0] * 3, "image_size": [8, 8], "in_channels": 3})
    (message,) = warned(data, "test")
    assert "data.image_size is [4, 4], in training [8, 8]." in message
    assert data.preprocessing()["mean"] == [0.5] * 3
    assert data.loads == ["test"]


class TwoLabels(Numbered):
    """Each image has the first label or not, and one in five the second beside it."""

    class_names = ["a", "b"]

    def load(self, split: SplitName) -> Arrays:
        arrays = super().load(split)
        counted = torch.arange(len(arrays.targets))
        return arrays._replace(targets=torch.stack([counted % 2, (counted % 5 == 0).long()], dim=1))


def test_several_labels_an_image_are_split_by_their_combination_and_counted_each():
    data = TwoLabels({"train": 100}, val_fraction=0.2)
    data.setup("fit")
    data.setup("test")
    for split, size in (("train", 60), ("val", 20), ("test", 20)):
        targets = data.splits[split].targets
        assert targets.shape == (size, 2)
        assert targets.sum(0).tolist() == [size // 2, size // 5]
        assert (targets.sum(1) == 2).sum() == size // 10
    assert data.class_counts.tolist() == [30, 12]


@pytest.mark.parametrize(("images", "world_size", "expected"), [(40, 1, 10), (40, 2, 5), (3, 1, 1), (1000, 1, 128)])
def test_a_batch_size_of_none_leaves_several_batches_of_few_images(images: int, world_size: int, expected: int):
    data = Numbered({"train": images, "val": 9, "test": 9}, batch_size=None)
    data.setup("fit")
    data.trainer = trainer(world_size=world_size)
    assert data.train_dataloader().batch_size == expected
    assert data.val_dataloader().batch_size == expected


def test_a_resumed_run_keeps_the_batch_size_that_was_chosen_for_fewer_images():
    data = Numbered({"train": 40, "val": 9, "test": 9}, batch_size=None)
    data.setup("fit")
    data.trainer = trainer()
    assert data.train_dataloader().batch_size == 10
    state = data.state_dict()
    # what has too few images now is chosen anew, and a class of one's own may have left the state out
    for images, batch_size, before, expected in (
        (80, None, state, 10),
        (80, 7, state, 7),
        (8, None, state, 2),
        (80, None, {}, 20),
    ):
        more = Numbered({"train": images, "val": 9, "test": 9}, batch_size=batch_size)
        more.load_state_dict(before)
        more.setup("fit")
        more.trainer = trainer()
        assert more.train_dataloader().batch_size == expected


def test_an_epoch_that_is_shorter_than_what_was_done_of_it_is_refused():
    data = Numbered({"train": 40, "val": 9, "test": 9}, batch_size=10)
    data.setup("fit")
    data.trainer = trainer(step=3)
    assert len(list(data.train_dataloader())) == 1
    data.trainer = trainer(step=4)
    with pytest.raises(InputError, match="stopped after batch 4 of an epoch that now has 4"):
        list(data.train_dataloader())


def test_class_counts_are_those_of_the_training_split():
    data = Numbered({"train": 100, "val": 20, "test": 20})
    data.setup("fit")
    assert data.num_classes == 3
    assert data.class_counts.tolist() == [60, 30, 10]


# ---- ranks


def shards(size: int, ranks: int, train: bool, epoch: int = 0, seed: int = 0) -> list[list[int]]:
    dataset = BatchDataset(Arrays(torch.zeros(size, 1, 1, 1, dtype=torch.uint8), torch.zeros(size, dtype=torch.int64)))
    samplers = [ShardedSampler(dataset, rank, ranks, train=train, seed=seed) for rank in range(ranks)]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    parts = [list(sampler) for sampler in samplers]
    assert [len(sampler) for sampler in samplers] == [len(part) for part in parts]
    return parts


@pytest.mark.parametrize("size", [16, 17, 3])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_training_shards_are_disjoint_equal_and_complete_but_for_the_remainder(size: int, ranks: int):
    parts = shards(size, ranks, train=True)
    together = [index for part in parts for index in part]
    assert {len(part) for part in parts} == {size // ranks}
    assert len(together) == len(set(together)) == size - size % ranks
    assert set(together) <= set(range(size))


def test_training_shards_are_reshuffled_together_by_epoch_and_seed():
    orders = {
        (seed, epoch): shards(40, 2, train=True, epoch=epoch, seed=seed) for seed in (0, 1) for epoch in (0, 1, 2)
    }
    flat = {str(parts) for parts in orders.values()}
    assert len(flat) == 6, "every epoch of every seed has another order"
    assert orders[0, 1] != orders[1, 0]
    assert orders[0, 1] == shards(40, 2, train=True, epoch=1, seed=0), "whatever came before"
    assert set(orders[0, 0][0]) != set(orders[0, 1][0]), "ranks do not keep their images"


@pytest.mark.parametrize("size", [16, 17, 5, 1])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_evaluation_shards_hold_every_sample_exactly_once(size: int, ranks: int):
    parts = shards(size, ranks, train=False)
    assert sorted(index for part in parts for index in part) == list(range(size))
    assert parts == shards(size, ranks, train=False, epoch=1)


@pytest.mark.parametrize("batch_size", [1, 2, 3, 4, 7, 100])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_every_rank_has_as_many_batches_to_evaluate(batch_size: int, ranks: int):
    """FSDP gathers weights from all ranks in each forward pass: one that had a batch more would wait for ever."""
    for size in range(ranks, 60):
        used = even_batch_size(batch_size, size, ranks, "val images")
        assert len({math.ceil(len(part) / used) for part in shards(size, ranks, train=False)}) == 1
        assert used == batch_size if size % ranks == 0 else used <= max(batch_size, 5)


@pytest.mark.parametrize("split", ["val", "test"])
def test_batches_of_two_ranks_when_one_has_an_image_more(split: SplitName):
    data = Numbered({"train": 50, "val": 17, "test": 17}, batch_size=4)
    data.setup("fit")
    data.setup("test")
    loaders: list[Any] = []
    for rank in range(2):
        data.trainer = trainer(global_rank=rank, world_size=2)
        loaders.append(getattr(data, f"{split}_dataloader")())
    assert [[len(targets) for _, targets, _ in loader] for loader in loaders] == [[3, 3, 3], [3, 3, 2]]
    assert [len(loader) for loader in loaders] == [3, 3], "what limit_val_batches is taken of"
    assert sorted(served(loaders[0]) + served(loaders[1])) == [data.starts[split] + number for number in range(17)]


def test_fewer_images_than_ranks_to_evaluate_them_are_refused():
    data = Numbered({"train": 50, "val": 3, "test": 4}, batch_size=4)
    data.setup("fit")
    data.setup("test")
    data.trainer = trainer(world_size=4)
    with pytest.raises(InputError, match=r"only 3 val images for 4 devices.*--trainer\.devices"):
        data.val_dataloader()
    assert len(data.test_dataloader()) == 1


def test_loaders_of_two_ranks_share_out_the_data():
    both: dict[str, list[int]] = {"train": [], "val": []}
    for rank in range(2):
        data = Numbered({"train": 41, "val": 13, "test": 5}, batch_size=4)
        data.setup("fit")
        data.trainer = trainer(global_rank=rank, world_size=2)
        train = served(data.train_dataloader())
        assert len(train) == 20, "five full batches on each rank"
        both["train"] += train
        both["val"] += served(data.val_dataloader())
    assert len(set(both["train"])) == 40
    assert sorted(both["val"]) == list(range(1000, 1013))


# ---- loaders


def test_training_batches_are_full_and_evaluation_batches_complete():
    data = Numbered({"train": 50, "val": 13, "test": 7}, batch_size=8)
    data.setup("fit")
    data.setup("test")
    assert [len(targets) for _, targets, _ in data.train_dataloader()] == [8] * 6
    assert [len(targets) for _, targets, _ in data.val_dataloader()] == [8, 5]
    assert served(data.test_dataloader()) == list(range(2000, 2007))


def test_a_batch_is_uint8_channels_last_with_its_own_targets():
    data = Numbered({"train": 50, "val": 10, "test": 10}, batch_size=8)
    data.setup("fit")
    train = data.splits["train"]
    target_of = dict(zip(numbers(train.images), train.targets.tolist(), strict=True))
    for images, targets, indices in data.train_dataloader():
        assert images.shape == (8, 3, 4, 4)
        assert images.dtype == torch.uint8
        assert images.is_contiguous(memory_format=torch.channels_last)
        assert [target_of[number] for number in numbers(images.permute(0, 2, 3, 1))] == targets.tolist()
        assert torch.equal(train.images[indices], images.permute(0, 2, 3, 1))


def test_one_item_is_what_the_batch_holds():
    arrays = Numbered({"train": 20}).load("train")
    dataset = BatchDataset(arrays)
    image, target, index = dataset[13]
    assert torch.equal(image, arrays.images[13].permute(2, 0, 1))
    assert target == arrays.targets[13]
    assert index == 13
    assert torch.equal(dataset[20 + 13][0], image), "in epoch 1"


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_batch_larger_than_the_data_is_refused_with_one_that_fits(ranks: int):
    data = Numbered({"train": 30, "val": 10, "test": 10}, batch_size=31)
    data.setup("fit")
    data.trainer = trainer(world_size=ranks)
    with pytest.raises(InputError, match=r"data\.batch_size is 31.*only 30 training images") as caught:
        data.train_dataloader()
    advised = int(str(caught.value).split("--data.batch_size=")[1].split()[0])
    fitting = Numbered({"train": 30, "val": 10, "test": 10}, batch_size=advised)
    fitting.setup("fit")
    fitting.trainer = trainer(world_size=ranks)
    assert len(fitting.train_dataloader()) >= 1
    assert len(data.val_dataloader()) == 1, "evaluation takes a short batch"


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_batches_are_the_same_for_any_number_of_workers(workers: int):
    def epochs(count: int) -> list[list[int]]:
        data = Numbered({"train": 60, "val": 10, "test": 10}, batch_size=8, num_workers=count)
        data.setup("fit")
        loader = data.train_dataloader()
        assert loader.persistent_workers == (count > 0), "starting them anew each epoch takes seconds"
        orders = []
        for epoch in range(2):
            loader.sampler.set_epoch(epoch)
            orders.append(served(loader))
        return orders

    first, second = epochs(workers)
    assert [first, second] == epochs(0)
    assert first != second
    assert first != sorted(first)


def test_the_order_follows_the_global_seed(monkeypatch: pytest.MonkeyPatch):
    data = Numbered({"train": 60, "val": 10, "test": 10}, batch_size=8)
    data.setup("fit")
    first = served(data.train_dataloader())
    torch.rand(3)
    assert served(data.train_dataloader()) == first
    monkeypatch.setenv("PL_GLOBAL_SEED", "4")
    assert served(data.train_dataloader()) != first


def test_overfitting_scores_the_very_batches_it_trains_on():
    data = Numbered({"train": 60, "val": 10, "test": 10}, batch_size=8)
    data.setup("fit")
    data.trainer = trainer(overfit_batches=2)
    assert served(data.train_dataloader()) == served(data.val_dataloader()) == list(range(60))
    batch = data.splits["train"].images[:8].permute(0, 3, 1, 2), data.splits["train"].targets[:8], torch.arange(8)
    first, second = (data.on_after_batch_transfer(batch, 0)[0] for _ in range(2))
    data.trainer = None
    assert torch.equal(first, data.on_after_batch_transfer(batch, 0)[0]), "and does not augment"
    assert torch.equal(first, second)


def test_overfitting_sorted_data_still_has_several_classes_in_a_batch():
    """An image folder is sorted by class: its first batches would be of one."""

    class Sorted(Numbered):
        def load(self, split: SplitName) -> Arrays:
            arrays = super().load(split)
            return arrays.select(arrays.targets.argsort())

    batches = []
    for _ in range(2):
        data = Sorted({"train": 160, "val": 10, "test": 10}, batch_size=16)
        data.trainer = trainer(overfit_batches=2)
        data.setup("fit")
        batches.append([targets.tolist() for _, targets, _ in data.train_dataloader()])
    assert len(set(batches[0][0])) == len(set(batches[0][1])) == 3
    assert batches[0] == batches[1], "the same ones in each run of a seed"


@pytest.mark.parametrize(
    "options", [{"batch_size": 0}, {"val_fraction": 0.0}, {"val_fraction": 1.0}, {"num_workers": -1}]
)
def test_impossible_settings_are_refused_by_name(options: dict[str, Any]):
    with pytest.raises(InputError, match=rf"data\.{next(iter(options))}"):
        Numbered({"train": 10}, **options)


# ---- normalisation and augmentation


@pytest.mark.parametrize("channels", [1, 3])
def test_statistics_are_those_of_float64_numpy(channels: int):
    # more images than one chunk of the histogram
    values = np.random.default_rng(0).integers(0, 200, (5000, 5, 3, channels), dtype=np.uint8)
    mean, std = channel_statistics(torch.from_numpy(values))
    exact = values.astype(np.float64) / 255
    np.testing.assert_allclose(mean, exact.mean((0, 1, 2)), rtol=0, atol=1e-6)
    np.testing.assert_allclose(std, exact.std((0, 1, 2)), rtol=0, atol=1e-6)


def test_a_constant_channel_does_not_divide_by_zero():
    assert channel_statistics(torch.full((4, 2, 2, 1), 51, dtype=torch.uint8)) == ([0.2], [1.0])


def test_statistics_are_of_the_training_split_alone_and_come_back_from_a_checkpoint():
    data = Numbered({"train": 100, "val": 50, "test": 50})
    data.setup("fit")
    assert data.preprocessing()["mean"][1] == 0, "no number of the training split reaches 256"
    state = data.preprocessing()
    assert state == {
        "image_size": [4, 4],
        "in_channels": 3,
        "mean": channel_statistics(data.splits["train"].images)[0],
        "std": channel_statistics(data.splits["train"].images)[1],
        "class_names": ["a", "b", "c"],
        "split": None,
    }
    restored = Numbered({"train": 100, "val": 50, "test": 50})
    restored.use_preprocessing({**state, "mean": [0.1, 0.2, 0.3], "std": [1.0, 2.0, 3.0]})
    images, targets = torch.zeros(2, 3, 4, 4, dtype=torch.uint8), torch.zeros(2)
    out = restored.on_after_batch_transfer((images, targets, torch.arange(2)), 0)[0]
    torch.testing.assert_close(out[0, :, 0, 0], torch.tensor([-0.1, -0.1, -0.1]))
    assert restored.loads == [], "a restored normalisation needs no training data"


def augmented(data: ImageDataModule, **where: Any) -> Tensor:
    """One batch of noise as it reaches the model at a place in training."""
    images = torch.randint(0, 256, (32, 3, 12, 12), generator=keyed_generator(0)).to(torch.uint8)
    data.trainer = trainer(**where)
    return data.on_after_batch_transfer((images, torch.zeros(32), torch.arange(32)), 0)[0]


def test_augmentation_is_keyed_by_seed_epoch_step_and_rank(monkeypatch: pytest.MonkeyPatch):
    data = Numbered({"train": 100, "val": 10, "test": 10})
    data.setup("fit")
    place = {"current_epoch": 2, "step": 5, "global_rank": 1}
    first = augmented(data, **place)
    torch.rand(9)
    augmented(data, **{**place, "step": 6})
    other = Numbered({"train": 100, "val": 10, "test": 10})
    other.setup("fit")
    assert torch.equal(augmented(other, **place), first), "not by what was drawn before"
    results = [first]
    for change in ({"current_epoch": 5}, {"step": 2}, {"global_rank": 0}, {"current_epoch": 5, "step": 2}):
        results.append(augmented(data, **{**place, **change}))
    monkeypatch.setenv("PL_GLOBAL_SEED", "4")
    results.append(augmented(data, **place))
    assert len({result.numpy().tobytes() for result in results}) == len(results)


def test_evaluation_and_an_empty_list_do_not_augment():
    data = Numbered({"train": 100, "val": 10, "test": 10})
    data.setup("fit")
    plain = augmented(data, training=False)
    assert torch.equal(plain, augmented(data, training=False, step=3))
    assert not torch.equal(plain, augmented(data))
    none = Numbered({"train": 100, "val": 10, "test": 10}, augment=[])
    none.setup("fit")
    assert torch.equal(augmented(none), plain)


class Recorder(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.seen: dict[tuple[int, int], Tensor] = {}
        self.evaluated: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.seen[self.current_epoch, batch_idx] = batch[0]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.evaluated.append(batch[0])

    def configure_optimizers(self) -> None:
        return None


@pytest.mark.filterwarnings("ignore:.*no optimizer")
@pytest.mark.parametrize("workers", [0, 2])
def test_a_real_trainer_augments_step_by_step_as_the_key_says(tmp_path: Any, workers: int):
    data = Numbered({"train": 24, "val": 10, "test": 10}, batch_size=8, num_workers=workers)
    model = Recorder()
    L.Trainer(max_epochs=2, default_root_dir=tmp_path, **QUIET).fit(model, datamodule=data)
    mean, std = map(torch.tensor, channel_statistics(data.splits["train"].images))
    data.trainer = None
    loader = data.train_dataloader()
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        for step, (images, _, indices) in enumerate(loader):
            generator = keyed_generator(3, epoch, step, 0)
            for transform in (RandomCrop(4), RandomHorizontalFlip()):
                images = transform(images, Draw(generator, epoch, indices))
            assert torch.equal(model.seen[epoch, step], to_float(images, mean, std))
    assert len(model.seen) == 6
    val = to_float(data.splits["val"].images.permute(0, 3, 1, 2), mean, std)
    # the sanity check, then two epochs of two batches
    assert torch.equal(torch.cat(model.evaluated[-2:]), val)


# ---- starting anywhere


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_goes_on_where_the_trainer_is_although_its_iterator_was_made_before(workers: int):
    data = Numbered({"train": 60, "val": 10, "test": 10}, batch_size=8, num_workers=workers)
    data.setup("fit")
    loader = data.train_dataloader()
    loader.sampler.set_epoch(4)
    whole = served(loader)
    data.trainer = trainer()
    loader = data.train_dataloader()
    iterator = iter(loader)  # as Lightning does, before it has restored epoch and position
    loader.sampler.set_epoch(4)
    data.trainer.fit_loop.epoch_loop.batch_progress.current.ready = 3
    assert served(iterator) == whole[3 * 8 :]
    assert len(loader) == 7, "the length is the whole epoch's"
    data.trainer.fit_loop.epoch_loop.batch_progress.current.ready = 0
    assert served(loader) == whole


# ---- transforms of single images, and mixing


class Noise(v2.Transform):
    """Adds what each of the global generators gives."""

    def forward(self, image: Tensor) -> Tensor:
        draw = int(torch.randint(50, ())) + np.random.randint(50) + random.randrange(50)
        return torch.full_like(image, draw)


def noise(workers: int, epochs: int = 2) -> list[list[int]]:
    data = Numbered({"train": 48, "val": 10, "test": 10}, batch_size=8, num_workers=workers, transforms=[Noise()])
    data.setup("fit")
    loader = data.train_dataloader()
    drawn = []
    for epoch in range(epochs):
        loader.sampler.set_epoch(epoch)
        values = {
            int(i): int(image[0, 0, 0])
            for images, _, indices in loader
            for image, i in zip(images, indices, strict=True)
        }
        drawn.append([values[index] for index in sorted(values)])
    return drawn


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_each_image_has_its_own_randomness_in_each_epoch_for_any_number_of_workers():
    torch.manual_seed(0)
    first, second = noise(0)
    assert first != second
    assert len(set(first)) > 20, "images of a batch, and batches of different workers, differ"
    torch.manual_seed(1)
    before = torch.get_rng_state()
    assert [first, second] == noise(0)
    assert torch.equal(torch.get_rng_state(), before), "the process's own generator is left alone"
    assert [first, second] == noise(2)


def test_only_training_images_are_transformed_and_workers_are_started_for_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("lit_project.data.base.usable_cpus", lambda: 3)
    data = Numbered({"train": 48, "val": 10, "test": 10}, batch_size=8, transforms=[Noise()])
    data.setup("fit")
    assert data.train_dataloader().num_workers == 3
    assert data.val_dataloader().num_workers == 0
    assert served(data.val_dataloader()) == list(range(1000, 1010))


@pytest.mark.parametrize(
    ("transform", "found"), [(v2.ToDtype(torch.float32, scale=True), "float32"), (v2.ToPILImage(), "Image")]
)
def test_a_transform_that_does_not_return_uint8_is_named(transform: v2.Transform, found: str):
    data = Numbered({"train": 48, "val": 10, "test": 10}, batch_size=8, num_workers=0, transforms=[transform])
    data.setup("fit")
    with pytest.raises(InputError, match=rf"data\.transforms turn an image into .*{found}"):
        next(iter(data.train_dataloader()))


def test_mixing_makes_soft_targets_that_depend_on_the_step_alone():
    def mixed(step: int) -> tuple[Tensor, Tensor]:
        data = Numbered({"train": 48, "val": 10, "test": 10}, augment=[], mix=[v2.MixUp(), v2.MixUp(alpha=0.5)])
        data.setup("fit")
        data.trainer = trainer(step=step)
        batch = data.splits["train"].images[:8].permute(0, 3, 1, 2), data.splits["train"].targets[:8], torch.arange(8)
        plain = data.on_after_batch_transfer(batch, 0)
        data.trainer.training = False
        assert data.on_after_batch_transfer(batch, 0)[1] is batch[1], "training only"
        return plain

    images, targets = mixed(0)
    assert targets.shape == (8, 3)
    torch.testing.assert_close(targets.sum(1), torch.ones(8))
    assert ((targets > 0) & (targets < 1)).any()
    torch.manual_seed(99)
    assert torch.equal(mixed(0)[0], images)
    assert not torch.equal(mixed(1)[0], images)


def test_mix_takes_nothing_else():
    with pytest.raises(InputError, match=r"data\.mix"):
        Numbered({"train": 10}, mix=[v2.RandomHorizontalFlip()])


# ---- placement


class Mapped(Numbered):
    """Images that lie in a file."""

    is_mapped = True


def test_data_without_a_file_cannot_stay_on_disk():
    with pytest.raises(InputError, match=r"data\.placement is disk, but Numbered has no file"):
        Numbered({"train": 48, "val": 10, "test": 10}, placement="disk").setup("fit")


@pytest.mark.parametrize("options", [{"num_workers": 2}, {"transforms": [Noise()]}])
def test_workers_cannot_read_from_the_device(options: dict[str, Any]):
    with pytest.raises(InputError, match=r"data\.placement=device"):
        Numbered({"train": 10}, placement="device", **options)


@pytest.mark.parametrize(
    ("free", "expected", "workers"), [(10_000, "memory", 0), (5_000, "disk", 3), (None, "memory", 0)]
)
def test_what_does_not_fit_into_half_of_the_free_memory_stays_on_disk(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    free: int | None,
    expected: str,
    workers: int,
):
    monkeypatch.setattr("lit_project.data.base.available_memory", lambda: free)
    monkeypatch.setattr("lit_project.data.base.usable_cpus", lambda: 3)
    data = Mapped({"train": 80, "test": 10}, batch_size=8)  # 80 images of 4 x 4 x 3 bytes
    data.setup("fit")
    assert f"kept in: {expected} (" in caplog.text
    assert data.train_dataloader().num_workers == workers
    in_memory = Numbered({"train": 80, "test": 10}, batch_size=8)
    in_memory.setup("fit")
    assert data.preprocessing() == in_memory.preprocessing()
    assert data.fingerprint() == in_memory.fingerprint()
    with IsolatedRandomness():
        data.num_workers = 0
        for ours, theirs in zip(data.train_dataloader(), in_memory.train_dataloader(), strict=True):
            assert all(map(torch.equal, ours, theirs)), "one batch contract for every placement"


# ---- fingerprint


def test_a_fingerprint_tells_other_images_targets_order_and_splits() -> None:
    def prints(change: Callable[[Numbered], None] = lambda data: None, **arguments: Any) -> dict[str, Any]:
        data = Numbered({"train": 100, "test": 10}, **arguments)
        data.setup("fit")
        change(data)
        return data.fingerprint()

    def pixel(data: Numbered) -> None:
        data.splits["train"].images[40, 3, 3, 1] ^= 1

    def target(data: Numbered) -> None:
        data.splits["train"].targets[40] ^= 1

    def order(data: Numbered) -> None:
        data.splits["train"] = data.splits["train"].select(torch.arange(len(data.splits["train"].targets)).flip(0))

    same = prints()
    assert same == prints()
    assert {name: split["images"] for name, split in same.items()} == {"train": 90, "val": 10}
    for other in (prints(pixel), prints(target), prints(order), prints(split_seed=1)):
        assert other["train"]["images"] == 90
        assert other["train"]["sha256"] != same["train"]["sha256"]
    assert prints(split_seed=1)["val"] != same["val"] == prints(pixel)["val"]
