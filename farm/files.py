"""Files that come whole or not at all, and folders that others filled: read without being led astray, and removed."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a new path in the folder of `path`. The file that is made there becomes `path` when the block ends.

    Other processes see what was at `path` before, or all of the new file. If the block fails, the new file is removed.
    Raises OSError.
    """
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        yield part
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def read_plain(path: Path, limit: int) -> bytes:
    """Return the bytes of a regular file that somebody else may exchange at any moment; links are not followed.

    A pipe does not make the reader wait. Raises OSError, also for anything but a regular file with one name, and for
    one of more than `limit` bytes (EFBIG).
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:  # noqa: PTH123 - it is a descriptor
        found = os.fstat(descriptor)
        if not is_plain(found):
            raise OSError(errno.EINVAL, "not a regular file with one name", str(path))
        data = file.read(limit + 1)
    if len(data) > limit:
        raise OSError(errno.EFBIG, f"more than {limit} bytes", str(path))
    return data


def is_plain(found: os.stat_result) -> bool:
    """Whether it is a regular file that has no other name: what is read there is what was written there."""
    return stat.S_ISREG(found.st_mode) and found.st_nlink == 1


def remove_tree(folder: Path) -> None:
    """Remove a folder with all that is in it, however deep; nothing that links in it point to is touched.

    Goes on when something cannot be removed; whoever needs to know looks whether the folder is gone.
    `shutil.rmtree` calls itself for each level, so a thousand nested folders end it, and with it whoever called.
    """
    try:
        if not folder.is_symlink():
            folder.chmod(0o700)
        root = os.open(folder, _FOLDER)
    except FileNotFoundError:
        return
    except OSError:
        with suppress(OSError):
            folder.unlink()
        return
    try:
        todo = _names(root)
        while todo:
            todo += _remove_entry(todo.pop(), root)
    finally:
        os.close(root)
    with suppress(OSError):
        folder.rmdir()


def _remove_entry(name: str, root: int) -> list[str]:
    """Remove an entry of a folder; what folders it holds are moved up to it first, and their new names returned."""
    moved: list[str] = []
    with suppress(OSError):
        if not _is_folder(name, root):
            os.unlink(name, dir_fd=root)
            return moved
        os.chmod(name, 0o700, dir_fd=root)
        inner = os.open(name, _FOLDER, dir_fd=root)
        try:
            for entry in _names(inner):
                with suppress(OSError):
                    if _is_folder(entry, inner):
                        os.chmod(entry, 0o700, dir_fd=inner)
                        above = f".{secrets.token_hex(8)}"
                        os.rename(entry, above, src_dir_fd=inner, dst_dir_fd=root)
                        moved.append(above)
                    else:
                        os.unlink(entry, dir_fd=inner)
        finally:
            os.close(inner)
        os.rmdir(name, dir_fd=root)
    return moved


def _is_folder(name: str, parent: int) -> bool:
    return stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode)


def _names(folder: int) -> list[str]:
    with os.scandir(folder) as entries:
        return [entry.name for entry in entries]
