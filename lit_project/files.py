"""Files that survive a crash, a full disk, and other processes."""

import glob
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from filelock import FileLock, Timeout


def user_folder(given: str | None, variable: str, name: str) -> Path:
    """A folder's path: as given, or of the environment, or ``lit_project/name`` in the user's cache folder.

    Args:
        given: what the user says; ``~`` is the home folder, here and in the environment.
        variable: the environment variable that may name the folder.
        name: its name in the cache folder, which is ``$XDG_CACHE_HOME`` or ``~/.cache``.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "lit_project")
    return Path(given or os.environ.get(variable) or cache / name).expanduser().absolute()


def write_atomically(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Have ``write`` fill a file of another name in the same folder, then give it the name ``path``.

    When this returns, the new content is on the disk; before, or after an error, the old one is.

    Raises:
        OSError: no space, no permission, a fault of the disk.
    """
    for litter in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):  # of a process that was killed while writing
        litter.unlink(missing_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except RuntimeError as error:  # torch.save hides what the disk said behind one of its own
        reason = os_error_behind(error)
        if reason is None:
            raise
        raise reason from None
    finally:
        temporary.unlink(missing_ok=True)
    if os.name == "posix":  # the new name, too, must survive a power cut
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def os_error_behind(error: BaseException | None) -> OSError | None:
    """The ``OSError`` that an error was raised from, or while handling, if there is one."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


@contextmanager
def locked(path: Path, waiting: str) -> Iterator[None]:
    """Hold the lock file ``path``; say ``waiting`` if another process has it and must be waited for.

    Raises:
        OSError: the file cannot be made.
    """
    from lightning.pytorch.utilities import rank_zero_info  # seconds, which not every command has to spend

    lock = FileLock(path)
    try:
        held = lock.acquire(timeout=0)
    except Timeout:
        rank_zero_info(waiting)
        held = lock.acquire()
    with held:
        yield


def short_path(path: Path | None) -> str:
    """A path as one would type it, relative when it lies below the working directory; this one for ``None``."""
    path = Path(path or ".").absolute()
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
