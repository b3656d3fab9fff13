"""What a result depends on besides its config: the code, the packages and the machine, as plain values."""

import os
import platform
import subprocess
from functools import cache
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, NamedTuple

import torch

#: The packages that a checkpoint names; ``run.json`` has all that are installed.
MAIN_PACKAGES = (
    "lit-project",
    "torch",
    "torchvision",
    "lightning",
    "torchmetrics",
    "numpy",
)

# what an untracked file must be to go into a patch: source, neither data nor somebody's keys
_SOURCE, _MOST_FILES, _MOST_BYTES = (".py", ".yaml", ".yml", ".toml", ".sh"), 100, 100_000


class Git(NamedTuple):
    """The state of a working tree: ``patch`` turns ``commit`` into it, and is empty where nothing was changed."""

    commit: str
    patch: str


@cache
def git_state() -> Git | None:
    """The repository that this package lies in, else the working directory's; None without git or a commit."""
    return repository_state(Path(__file__).parent) or repository_state(Path.cwd())


def repository_state(folder: Path) -> Git | None:
    """The state of the repository that ``folder`` lies in, with new source files in the patch."""
    top, commit = _git(folder, "rev-parse", "--show-toplevel"), _git(folder, "rev-parse", "--verify", "HEAD")
    if top is None or commit is None:
        return None
    root = Path(top.rstrip("\n"))
    patch = _git(root, "diff", "--no-ext-diff", "--no-color", "HEAD") or ""
    untracked = (_git(root, "ls-files", "-z", "--others", "--exclude-standard") or "").split("\0")
    sources = [name for name in untracked if name.endswith(_SOURCE) and (root / name).is_file()]
    for name in sources[:_MOST_FILES]:
        if (root / name).stat().st_size <= _MOST_BYTES:
            patch += _git(root, "diff", "--no-ext-diff", "--no-color", "--no-index", os.devnull, name, status=1) or ""
    return Git(commit.strip(), patch)


def _git(folder: Path, *arguments: str, status: int = 0) -> str | None:
    """What git prints; None if there is no git, or it ends with another ``status``."""
    try:
        done = subprocess.run(
            ["git", "-C", folder, *arguments],
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
            capture_output=True,
            text=True,
            errors="replace",
            timeout=30,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == status else None


@cache
def versions() -> dict[str, str]:
    """The version of Python and of each installed package, by name."""
    packages = {distribution.name: distribution.version for distribution in distributions()}
    return {"python": platform.python_version(), **dict(sorted(packages.items(), key=lambda item: item[0].lower()))}


def machine() -> dict[str, Any]:
    """Processor, memory, GPUs and operating system; ``threads`` are those of one operation of torch on the CPU."""
    cuda = torch.cuda.is_available()
    return {
        "host": platform.node(),
        "system": platform.platform(),
        "cpu": _cpu_model(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
        if hasattr(os, "sysconf")
        else None,
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())] if cuda else [],
        "cuda": torch.version.cuda if cuda else None,
        "cudnn": torch.backends.cudnn.version() if cuda else None,  # type: ignore[no-untyped-call]
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())
