"""What the machine is good at, and what it needs to be told for it."""

import ctypes
import os
import platform
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # it takes seconds to import, and the commands that start others ask for no more than the cores
    import torch


def usable_cpus() -> int:
    """CPU cores this process may use, which under SLURM or in a container are fewer than the machine has."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def threads_each(processes: int) -> int:
    """Threads of each of ``processes`` that run at a time and share the cores; at least 1."""
    return max(1, usable_cpus() // processes)


def best_precision(device: "torch.device") -> tuple[str, str]:
    """Lightning's ``precision`` for a device, and the reason.

    bfloat16 keeps float32's range, so it needs no loss scaling; where the processor computes in it natively it doubles
    or triples the speed, elsewhere it is emulated and slower.
    """
    import torch

    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        if major >= 8:
            return "bf16-mixed", f"compute capability {major}.{minor} has bfloat16"
        return "32-true", f"compute capability {major}.{minor} has no bfloat16"
    if device.type == "cpu":
        if torch.cpu._is_amx_tile_supported():
            return "bf16-mixed", "the CPU has AMX"
        if torch.cpu._is_avx512_bf16_supported():
            return "bf16-mixed", "the CPU has AVX512-BF16"
        return "32-true", "the CPU has no native bfloat16"
    return "32-true", f"the safe choice on {device.type}"


def available_memory(root: Path = Path("/")) -> int | None:
    """Bytes that can be allocated without swapping; ``None`` where the system does not say (macOS, Windows).

    A container or a job may be allowed less than the machine has: the limits of its control groups count as well.
    Source: https://docs.kernel.org/admin-guide/cgroup-v2.html

    Args:
        root: where the system's files are.
    """
    lines = _lines(root / "proc/meminfo")
    free = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return min(free + _left_by_control_groups(root)) if free else None


def _left_by_control_groups(root: Path) -> list[int]:
    left = []
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, name = line.split(":", 2)
        if controllers == "":  # version 2
            top, limit, usage, cache = root / "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):  # version 1
            top, limit, usage = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            cache = "total_inactive_file"
        else:
            continue
        # a group is bound by the groups above it as well; a container may see only its own, as the topmost
        group = top / name.strip("/")
        for folder in (group, *group.parents):
            allowed, used = _number(folder / limit), _number(folder / usage)
            if allowed is not None and used is not None:
                words = [line.split() for line in _lines(folder / "memory.stat")]
                cached = sum(int(count) for name, count in words if name == cache)  # given up when memory is asked for
                left.append(max(0, allowed - used + cached))
            if folder == top:
                break
    return left


def _number(file: Path) -> int | None:
    """``None`` for "max", or where there is no such file."""
    text = "".join(_lines(file))
    return int(text) if text.isdigit() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def keep_freed_memory() -> None:
    """Tell glibc to keep freed memory for the next step instead of giving it back to the system.

    By default each large activation is mapped afresh and unmapped again in every step, and the system zeroes its pages
    each time. It costs no more memory than the largest step needs anyway. Does nothing elsewhere than on Linux with
    glibc. Source: https://man7.org/linux/man-pages/man3/mallopt.3.html
    """
    if platform.libc_ver()[0] != "glibc":
        return
    trim_threshold, mmap_max = -1, -4
    libc = ctypes.CDLL(None)
    libc.mallopt(trim_threshold, 2**31 - 1)
    libc.mallopt(mmap_max, 0)
