"""A cache of ONNX Runtime's MIGraphX provider: is each program in it the one that its sidecar says?

The names of the files say nothing of precision, weights and tuning: the provider loads whatever has the name.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import cast

from farm.artifacts.sidecar import validate
from farm.client.fetching import sidecar_path
from farm.client.inspection import TooLarge, disagreements, inspect_program
from farm.errors import NotFound, UsageError
from farm.files import read_plain
from farm.wire.program import Sidecar

_LARGEST_SIDECAR = 16 << 20


def wrong_files(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield each file of a cache that should not be trusted, and why; one line for each reason.

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
        document = cast(Sidecar, found)
        what = f"{document['identifier']} made by {document['toolchain']}"
        try:
            inside = inspect_program(file)
        except TooLarge:
            inside = None
        except UsageError as error:
            yield file.name, error.message
            continue
        for reason in disagreements(document, inside, file):
            yield file.name, f"it is not {what}: {reason}"


def _sidecar_of(file: Path) -> object | None:
    for path in (sidecar_path(file), file.parent / "artifact.json", file.parent.parent / "artifact.json"):
        try:
            document: object = json.loads(read_plain(path, _LARGEST_SIDECAR))
            validate(cast(Sidecar, document))
        except (OSError, ValueError, UsageError):
            continue
        return document
    return None
