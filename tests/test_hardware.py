"""What the machine offers: precision, memory, and how the allocator is told to keep it."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lit_project import hardware
from lit_project.hardware import available_memory, best_precision, threads_each, usable_cpus

MIB = 1024**2


@pytest.mark.parametrize(
    ("capability", "precision"), [((7, 5), "32-true"), ((8, 0), "bf16-mixed"), ((9, 0), "bf16-mixed")]
)
def test_a_gpu_computes_in_bfloat16_from_capability_8(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], precision: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    found, reason = best_precision(torch.device("cuda"))
    assert found == precision
    assert f"{capability[0]}.{capability[1]}" in reason


@pytest.mark.parametrize(
    ("amx", "avx512", "precision"),
    [(True, False, "bf16-mixed"), (False, True, "bf16-mixed"), (False, False, "32-true")],
)
def test_a_cpu_computes_in_bfloat16_if_it_does_so_natively(
    monkeypatch: pytest.MonkeyPatch, amx: bool, avx512: bool, precision: str
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512)
    assert best_precision(torch.device("cpu"))[0] == precision


def test_other_devices_get_float32() -> None:
    assert best_precision(torch.device("mps"))[0] == "32-true"


# ---- cores


def test_the_cores_are_those_of_the_affinity_mask_and_are_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 4, 9}, raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    assert usable_cpus() == 3
    assert [threads_each(processes) for processes in (1, 2, 3, 4)] == [3, 1, 1, 1]


# ---- memory


def write(root: Path, files: dict[str, object]) -> None:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{content}\n")


def machine(root: Path, groups: str) -> None:
    write(root, {"proc/meminfo": f"MemTotal: 9 kB\nMemAvailable: {8 * 1024 * 1024} kB", "proc/self/cgroup": groups})


def test_available_memory_is_the_machines_where_nothing_limits_it(tmp_path: Path) -> None:
    machine(tmp_path, "0::/")
    assert available_memory(tmp_path) == 8192 * MIB
    write(tmp_path, {"sys/fs/cgroup/memory.max": "max", "sys/fs/cgroup/memory.current": 5 * MIB})
    assert available_memory(tmp_path) == 8192 * MIB


def test_available_memory_is_what_a_container_is_allowed(tmp_path: Path) -> None:
    """Version 2, seen from within: its own group is the topmost. Cached files do not count as used."""
    machine(tmp_path, "0::/")
    own = "sys/fs/cgroup/memory"
    write(tmp_path, {f"{own}.max": 1000 * MIB, f"{own}.current": 600 * MIB})
    assert available_memory(tmp_path) == 400 * MIB
    write(tmp_path, {f"{own}.stat": f"anon 7\ninactive_file {150 * MIB}\nslab 3"})
    assert available_memory(tmp_path) == 550 * MIB
    write(tmp_path, {f"{own}.current": 1200 * MIB})
    assert available_memory(tmp_path) == 0


def test_the_tightest_group_above_a_job_counts(tmp_path: Path) -> None:
    machine(tmp_path, "0::/slurm/job_7/step_0")
    job = "sys/fs/cgroup/slurm/job_7"
    write(tmp_path, {f"{job}/step_0/memory.max": "max", f"{job}/step_0/memory.current": 5 * MIB})
    write(tmp_path, {f"{job}/memory.max": 300 * MIB, f"{job}/memory.current": 100 * MIB})
    write(tmp_path, {"sys/fs/cgroup/slurm/memory.max": 900 * MIB, "sys/fs/cgroup/slurm/memory.current": 100 * MIB})
    assert available_memory(tmp_path) == 200 * MIB


@pytest.mark.parametrize("folder", ["", "/docker/abc"])
def test_control_groups_of_version_1_count_too(tmp_path: Path, folder: str) -> None:
    """Without a name space of its own a container has the name of a folder that it does not see."""
    machine(tmp_path, "9:name=systemd:/\n4:cpu,memory:/docker/abc\n3:cpuset:/\n0::/")
    own = f"sys/fs/cgroup/memory{folder}/memory"
    write(tmp_path, {f"{own}.limit_in_bytes": 500 * MIB, f"{own}.usage_in_bytes": 200 * MIB})
    write(tmp_path, {f"{own}.stat": f"inactive_file 1\ntotal_inactive_file {50 * MIB}"})
    assert available_memory(tmp_path) == 350 * MIB


def test_available_memory_is_unknown_where_the_system_does_not_say(tmp_path: Path) -> None:
    assert available_memory(tmp_path) is None


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux says it")
def test_available_memory_of_this_machine() -> None:
    found = available_memory()
    assert found is not None
    assert 10 * MIB < found < 2**50


FAULTS = """
import resource, sys
import torch
from lit_project.hardware import keep_freed_memory
torch.set_num_threads(1)
if sys.argv[1] == "kept":
    keep_freed_memory()
def use():
    torch.empty(2**26, dtype=torch.uint8).fill_(1)  # 64 MiB, freed at once
    for size in (2**25, 2**23, 2**25):  # as the layers of a network: sizes that differ
        torch.empty(size, dtype=torch.uint8).fill_(1)
for _ in range(8):  # until the heap has found its form
    use()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(3):
    use()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is told")
def test_freed_memory_is_used_again_without_page_faults() -> None:
    def faults(how: str) -> int:
        done = subprocess.run([sys.executable, "-c", FAULTS, how], capture_output=True, text=True, check=True)
        return int(done.stdout)

    assert faults("kept") < 100
    assert faults("given back") > 100


def test_no_library_is_told_elsewhere_than_with_glibc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    monkeypatch.setattr("ctypes.CDLL", lambda name: pytest.fail("there is no mallopt there"))
    hardware.keep_freed_memory()
