"""Random numbers that depend on where they are used, never on what was drawn before.

A generator keyed by (seed, epoch, step, rank) gives the same draw whatever was drawn before and with any number of
workers, and nothing of it has to be saved in a checkpoint.
"""

import os
import random
import signal

import numpy as np
import torch
from torch.utils.data import get_worker_info


def global_seed() -> int:
    """The run's seed: what ``seed_everything`` stored, or 0 when no seed was set."""
    return int(os.environ.get("PL_GLOBAL_SEED", 0))


def derive_seed(*keys: int) -> int:
    """Hash non-negative integer keys to one well-mixed 63-bit seed.

    Each use has its own number of keys, so no two of them share a stream: 1 for a split, 2 for the order of an epoch,
    3 for the embedded images and the workers, 4 for the augmentation of a step. 5, of which the last tells the use:
    0 for what a training step draws from the global generators, such as dropout, 1 for the transforms of one image, 2
    for mixing the images of a batch, 3 for the order of an epoch where a loader draws it from the global generator.

    Unlike ``seed + epoch``, neighbouring keys give unrelated streams, and seed 1 at epoch 0 is not seed 0 at epoch 1.
    Source: NumPy's ``SeedSequence`` (https://numpy.org/doc/stable/reference/random/bit_generators).
    """
    # SeedSequence pads with zeros: without their number in front, (1,) and (1, 0) would be the same stream
    return int(np.random.SeedSequence((len(keys), *keys)).generate_state(1, np.uint64)[0] >> 1)


def keyed_generator(*keys: int, device: torch.device | str = "cpu") -> torch.Generator:
    """A ``torch.Generator`` on ``device`` whose stream is determined by ``keys`` alone."""
    generator = torch.Generator(device=device)
    generator.manual_seed(derive_seed(*keys))
    return generator


def seed_everywhere(seed: int) -> None:
    """Seed torch's, NumPy's and Python's global generators, for code that draws from them."""
    torch.default_generator.manual_seed(seed)
    # torch.manual_seed also notes it for devices that are not in use yet, with a stack trace, a hundred times slower
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(seed)
    if torch.backends.mps.is_available():
        torch.mps.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


class IsolatedRandomness:
    """Gives the global generators back as they were."""

    def __enter__(self) -> None:
        self.states = torch.get_rng_state(), np.random.get_state(), random.getstate()

    def __exit__(self, *_: object) -> None:
        torch.set_rng_state(self.states[0])
        np.random.set_state(self.states[1])
        random.setstate(self.states[2])


class WorkerSeeder:
    """``worker_init_fn`` that seeds Python, NumPy and torch in a worker, differently for each worker and rank.

    It also has the worker leave it to the trainer to react to Ctrl-C and to SIGTERM, which schedulers send to all
    processes: the trainer still needs batches, up to the step after which it writes its checkpoint.

    A class rather than a closure, so that it can be pickled where workers are spawned (macOS, Windows).

    Args:
        seed: the run's seed.
        rank: this process's rank among all training processes.
    """

    def __init__(self, seed: int, rank: int) -> None:
        self.seed = seed
        self.rank = rank

    def __call__(self, worker_id: int) -> None:
        info = get_worker_info()
        num_workers = info.num_workers if info else 1
        seed = derive_seed(self.seed, self.rank * num_workers + worker_id, num_workers)
        seed_everywhere(seed)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # a second one ends it: such as from the trainer, if the worker does not end when it is told to
        signal.signal(signal.SIGTERM, lambda number, frame: signal.signal(number, signal.SIG_DFL))
