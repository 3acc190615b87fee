"""Atomic writes, and safe reading and removal of what others left: no links followed, sizes bounded.

Also where the shipped files are.
"""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_PIECE = 1 << 20  # Bytes of a file that are copied at once.
SHOWN_LOG = 64 << 20  # Most bytes of a log that are shown, from its end; a compiler with traces writes more.
DEEPEST = 32  # Levels of folders in a child's folder; compilers' caches have three or four.
LONGEST_PATH = 2000  # Bytes of a path; the kernel takes 4095.
MOST_FILES = 100_000  # Entries in a child's folder; MIOpen's kernel cache has hundreds.


def left_out(size: int, blob: str) -> bytes:
    """Return the line that stands before the end of a log: so many bytes of it are only in its blob."""
    return b"(%d bytes before this are in blob %s)\n" % (size, blob.encode())


def configs_folder() -> Path:
    """Return the folder of the shipped configuration: inside the package, or next to it in a checkout."""
    packaged = Path(__file__).parent / "configs"
    return packaged if packaged.is_dir() else Path(__file__).parent.parent / "configs"


def shipped_users() -> str:
    """Return Redis' users, one for each role, as a file of access rules."""
    packaged = configs_folder() / "users.acl"
    kept = packaged if packaged.is_file() else configs_folder().parent / "deploy" / "redis" / "users.acl"
    return kept.read_text(encoding="utf-8")


def write_new(path: Path, text: str | bytes) -> None:
    """Write a file in a folder in which others write, and replace whatever they left in its place, even a folder.

    No link is followed. A reader sees what was there before, or all of the new file. Raises OSError.
    """
    if path.is_dir() and not path.is_symlink():
        remove_tree(path)
    with replacing(path) as part:
        part.write_bytes(text.encode() if isinstance(text, str) else text)


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


class NotPlain(OSError):
    """A file that others left is missing, is not a regular file with one name, lies behind a link or is too large."""


def open_plain(path: Path, limit: int, *, within: Path | None = None, linked: bool = False) -> BufferedReader:
    """Open a regular file with one name, of at most `limit` bytes, that others may replace at any moment.

    With `linked` it may have other names: for who hashes all that is read.

    No link is followed below `within` (default: the file's folder), and a pipe does not make the reader wait. The
    caller must still stop reading at the limit: the file may grow. Raises NotPlain, OSError.
    """
    folder = path.parent if within is None else within
    *folders, name = path.relative_to(folder).parts
    try:
        place = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        for part in folders:
            place = _inside(place, part, _FOLDER)
        file = os.fdopen(_inside(place, name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        raise NotPlain(error.errno, os.strerror(error.errno or 0), str(path)) from None
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # A link, a socket.
            raise NotPlain(errno.EINVAL, "not a regular file with one name", str(path)) from None
        raise
    found = os.fstat(file.fileno())
    fits = stat.S_ISREG(found.st_mode) if linked else is_plain(found)
    wrong = None if fits else (errno.EINVAL, "not a regular file with one name")
    wrong = (errno.ENOENT, "removed or replaced meanwhile") if found.st_nlink == 0 else wrong
    wrong = wrong or ((errno.EFBIG, f"more than {limit} bytes") if found.st_size > limit else None)
    if wrong:
        file.close()
        raise NotPlain(*wrong, str(path))
    return file


def _inside(folder: int, name: str, flags: int) -> int:
    """Open an entry of a folder, and close the folder."""
    try:
        return os.open(name, flags, dir_fd=folder)
    finally:
        os.close(folder)


def disk_of(folder: Path) -> tuple[Path, int]:
    """Return a folder, or the nearest one above it that exists, and the free bytes of its disk."""
    whole = folder.absolute()
    there = next(path for path in (whole, *whole.parents) if path.is_dir())
    return there, shutil.disk_usage(there).free


def hash_file(path: Path) -> tuple[str, int]:
    """Return a file's SHA-256 and its size, read in pieces. Raises OSError."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest(), stream.tell()


def read_plain(path: Path, limit: int, *, linked: bool = False) -> bytes:
    """Return the bytes of a regular file that others may replace at any moment: see `open_plain`.

    Raises NotPlain, with EFBIG for one of more than `limit` bytes and ENOENT for one that is not there; OSError.
    """
    with open_plain(path, limit, linked=linked) as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise NotPlain(errno.EFBIG, f"more than {limit} bytes", str(path))
    return data


def take(path: Path, target: Path, limit: int, *, within: Path | None = None) -> tuple[str, int]:
    """Copy a file that others left (see `open_plain`) to a new one; return the SHA-256 and size of the copy.

    Every byte is read once: what is hashed is what is copied. If it fails, there is no `target`, or a part of it.
    Raises NotPlain for what was left, OSError for the target.
    """
    sha256, size = hashlib.sha256(), 0
    with open_plain(path, limit, within=within) as source, target.open("xb") as copy:
        while piece := source.read(_PIECE):
            size += len(piece)
            if size > limit:
                raise NotPlain(errno.EFBIG, f"more than {limit} bytes", str(path))
            sha256.update(piece)
            copy.write(piece)
    return sha256.hexdigest(), size


def read_private(path: Path, limit: int) -> bytes:
    """Return the bytes, at most `limit`, of a file that only this user can read.

    A folder that came with a copy or a clone may hold a file of the same name, but others may read that one.
    Raises FileNotFoundError, PermissionError for a file that is another user's or open to others, NotPlain, OSError.
    """
    path.lstat()
    with open_plain(path, limit) as file:
        found = os.fstat(file.fileno())
        if found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise PermissionError(errno.EPERM, "another user's, or open to others", str(path))
        return file.read(limit)


def private_folder(folder: Path) -> Path:
    """Make a folder that only its owner can enter, or close an existing one to others. Return it.

    Raises OSError, PermissionError for a link and for a folder of another user, who could open it again.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise PermissionError(errno.EPERM, "a link, or another user's", str(folder))
    if found.st_mode & 0o077:
        folder.chmod(0o700)
    return folder


def is_plain(found: os.stat_result) -> bool:
    """Whether it is a regular file that has no other name: what is read there is what was written there."""
    return stat.S_ISREG(found.st_mode) and found.st_nlink == 1


def tree_size(folder: Path) -> int:
    """Return the bytes of the regular files in a folder, however deep; what cannot be looked at counts as nothing."""
    total, todo = 0, [str(folder)]
    while todo:
        with suppress(OSError), os.scandir(todo.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    todo.append(entry.path)
                elif entry.is_file(follow_symlinks=False):
                    total += entry.stat(follow_symlinks=False).st_size
    return total


def remove_tree(folder: Path) -> None:
    """Remove a folder with all that is in it, however deep; nothing that links in it point to is touched.

    Goes on if something cannot be removed; look whether the folder is gone if you need to know.
    `shutil.rmtree` calls itself for each level, so a thousand nested folders end it, and its caller.
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


def sweep(folder: Path) -> list[str]:
    """Remove everything from a folder except folders and regular files with one name; return what was removed and why.

    A hostile compiler can leave links to the worker's own files, pipes that block a reader for ever, or a thousand
    nested folders. All its processes are gone by then, so nothing changes after the sweep. All
    files are made readable for their owner: a child may have changed their mode.
    """
    found: list[str] = []
    todo = [(folder, 0)]
    count = 0
    while todo:
        place, depth = todo.pop()
        place.chmod(0o700)
        with os.scandir(place) as entries:
            for entry in entries:
                count += 1
                path = Path(entry.path)
                status = entry.stat(follow_symlinks=False)
                is_folder = stat.S_ISDIR(status.st_mode)
                fits = depth < DEEPEST and len(os.fsencode(path)) < LONGEST_PATH and count <= MOST_FILES
                if is_folder and fits:
                    todo.append((path, depth + 1))
                elif is_plain(status) and count <= MOST_FILES:
                    if not status.st_mode & stat.S_IRUSR:
                        path.chmod(0o600)
                else:
                    shown = os.fsencode(path.relative_to(folder)).decode(errors="replace")[:80]
                    found.append(f"{shown} ({_what(status, count)})")
                    remove_tree(path) if is_folder else path.unlink()
    return found


def _what(status: os.stat_result, count: int) -> str:
    if count > MOST_FILES:
        return f"beyond {MOST_FILES} files"
    if stat.S_ISDIR(status.st_mode):
        return f"deeper than {DEEPEST} folders"
    kinds = {stat.S_IFLNK: "a link", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFREG: "a second name"}
    return kinds.get(stat.S_IFMT(status.st_mode), "a device")
