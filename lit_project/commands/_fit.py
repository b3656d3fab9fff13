"""How commands start ``fit`` in a process of its own."""

import os
import subprocess
import sys

from lit_project.errors import InputError

#: Before the name of a subcommand.
CLI = [sys.executable, "-m", "lit_project.cli"]


def require_posix(command: str) -> None:
    """Refuse to begin on Windows, which has neither the signals nor the locks that stop and guard several fits.

    Raises:
        InputError: this is Windows.
    """
    if sys.platform == "win32":
        raise InputError(f"{command} needs Linux or macOS: on Windows, use WSL, the Windows Subsystem for Linux.")


def environment() -> dict[str, str]:
    """This process's environment, for one that it starts.

    In a requeued job, ``fit`` goes on from the job's newest checkpoint by itself. One that is started by a command is
    told what to go on from, and could take the checkpoint of another for one of its own.
    """
    return {name: value for name, value in os.environ.items() if name != "SLURM_RESTART_COUNT"}


def resolved(options: list[str], cwd: str | None = None) -> str:
    """The whole config, as YAML, that ``fit`` would run with ``options`` in the folder ``cwd``.

    Raises:
        InputError: it takes no such options; with what it says of them.
    """
    command = [*CLI, "fit", *options, "--print_config"]
    done = subprocess.run(command, cwd=cwd, env=environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        raise InputError(f"fit does not take these options: {error_in(done.stderr)}")
    return done.stdout


def error_in(output: str) -> str:
    """The message at the end of what ``fit`` has written, or else its last line."""
    _, found, message = f"\n{output}".rpartition("\nerror: ")
    if found:
        return message.split("\nAll options: ")[0].strip()
    return (output.strip().splitlines() or ["it has written nothing"])[-1]
