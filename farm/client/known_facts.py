"""Known facts: what models and data sets hold, by their digests.

To read a model takes the import of onnx and a walk through all its nodes; to hash it tells as much if it was read
before. Facts are kept in the client's cache (`facts/`), and count as long as the code that found them is the same.
"""

from __future__ import annotations

import hashlib
import json
import stat
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from farm.files import hash_file, replacing
from farm.models import data as reading_data
from farm.models.data import FrozenData
from farm.models.model import ModelCheck, check_here
from farm.spec import FileReference, digest_of

if TYPE_CHECKING:
    from farm.runner.documents import CheckAnswer

RUNNER = Path(__file__).parent.parent / "runner"


class KnownFacts:
    """Facts in a folder, one file each; a folder that cannot be written keeps none."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def model(self, path: Path, format: str, outputs: Sequence[str]) -> tuple[ModelCheck, FileReference | None]:
        """Return how to check a model, and its file's reference if that is known, for `farm.models.model.read_model`.

        The check says what is known about the model. Else it looks, and keeps what it finds.
        """
        if not path.is_file():
            return check_here, None
        try:
            before, (digest, size) = _identity(path), hash_file(path)
        except OSError:
            return check_here, None  # Reading says what is wrong.
        key = _key("model", digest, format, outputs, _rules(RUNNER / f"{format}_check.py"))
        known = self._get(key)

        def check(path: Path, format: str, outputs: Sequence[str]) -> CheckAnswer:
            if known and all(_is_plain(path.parent, name, size) for name, size in known["external"].items()):
                answer: CheckAnswer = known["found"]
                return answer
            found = check_here(path, format, outputs)
            sizes = {name: (path.parent / name).stat().st_size for name in found.get("external_files", ())}
            if _identity(path) == before:
                self._put(key, {"found": found, "external": sizes})
            return found

        return check, {"path": path.name, "digest": digest, "size": size}

    def data(
        self, path: Path, kept: Path | None, asked: object, freeze: Callable[[], tuple[FrozenData, Path]]
    ) -> tuple[FrozenData, Path]:
        """Return what `freeze` makes of the file at `path`, and the canonical file.

        `asked` is all else that it depends on. With `kept`, the folder of canonical files, the file has to be there.
        """
        if not path.is_file():
            return freeze()
        try:
            before, (digest, _) = _identity(path), hash_file(path)
        except OSError:
            return freeze()  # It says what is wrong.
        key = _key("data", digest, asked, _rules(Path(reading_data.__file__)))
        if known := self._get(key):
            data = FrozenData.from_dict(known)
            file = (kept or path.parent) / f"{data.digest}.npz"
            if kept is None or (file.is_file() and file.stat().st_size == data.size):
                return data, file
        data, file = freeze()
        if _identity(path) == before:
            self._put(key, data.as_dict())
        return data, file

    def _get(self, key: str) -> Any:
        try:
            return json.loads((self._folder / f"{key}.json").read_bytes())
        except (OSError, ValueError):
            return None

    def _put(self, key: str, facts: object) -> None:
        with suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            with replacing(self._folder / f"{key}.json") as part:
                part.write_text(json.dumps(facts))


def _identity(path: Path) -> tuple[int, ...]:
    """Return what changes if a file does: facts about other bytes than those that were hashed must not be kept."""
    status = path.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _key(*parts: object) -> str:
    return digest_of(json.loads(json.dumps(parts)))


@cache
def _rules(module: Path) -> str:
    """Return the digest of the code that reads a kind of files."""
    return hashlib.sha256(module.read_bytes()).hexdigest() if module.is_file() else ""


def _is_plain(folder: Path, name: str, size: int) -> bool:
    """Whether external data is still what it was as far as the folder says: no link, no second name, of this size."""
    place = folder
    try:
        for part in Path(name).parts[:-1]:
            place /= part
            if place.is_symlink():
                return False
        status = (folder / name).lstat()
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_nlink == 1 and status.st_size == size
