"""A cache of ONNX Runtime's MIGraphX provider: is each program in it the one that its sidecar says?

The names of the files say nothing of precision, weights and tuning: the provider loads whatever has the name.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

from farm.artifacts.sidecar import read
from farm.client.fetching import sidecar_path
from farm.client.inspection import disagreements, inspect_if_small, wrong_card
from farm.errors import NotFound, UsageError
from farm.files import read_plain
from farm.wire.program import Sidecar

_LARGEST_SIDECAR = 16 << 20


def wrong_files(folder: Path, cards: Collection[str] = ()) -> Iterator[tuple[str, str]]:
    """Yield each file of a cache that should not be trusted, and why; one line for each reason.

    `cards` are the AMD GPUs of this machine; a program that none of them runs is wrong here.

    A file's sidecar is `FILE.artifact.json`, else `artifact.json` in the folder or above it, as packs have it.

    Raises NotFound if there is no such folder.
    """
    if not folder.is_dir():
        raise NotFound(f"no folder {folder}", hint="name the folder that ORT_MIGRAPHX_MODEL_CACHE_PATH names")
    for file in sorted(folder.glob("*.mxr")):
        found = _sidecar_of(file)
        if found is None:
            yield file.name, "no sidecar says what it is"
            continue
        what = f"{found['identifier']} made by {found['toolchain']}"
        try:
            inside = inspect_if_small(file)
        except UsageError as error:
            yield file.name, error.message
            continue
        for reason in disagreements(found, inside, file):
            yield file.name, f"it is not {what}: {reason}"
        if why := wrong_card(inside, cards):
            yield file.name, f"the provider cannot load it here: {why}"


def _sidecar_of(file: Path) -> Sidecar | None:
    for path in (sidecar_path(file), file.parent / "artifact.json", file.parent.parent / "artifact.json"):
        with suppress(OSError, ValueError):
            return read(read_plain(path, _LARGEST_SIDECAR))
    return None
