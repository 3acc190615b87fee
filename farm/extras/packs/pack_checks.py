"""Verifying packs: each file is signed, or follows from what is signed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath

from farm.client.fetching import read_sidecar, require_model, statements_path
from farm.client.packs import PACK, SIDECAR, Layout, PackIndex
from farm.client.transfers import Downloads
from farm.errors import ArtifactGone, FarmError, NotFound
from farm.extras.packs.layouts import require_fit
from farm.extras.packs.question import CacheFile
from farm.extras.packs.writing import SCRATCH, fixed_model, model_path, named, small_files
from farm.extras.signing.judging import Standing, TrustCheck
from farm.extras.signing.verifying import (
    LARGEST_SIDECAR,
    Trust,
    file_digest,
    read_document,
    read_statements,
    sha256_of,
)
from farm.files import NotPlain, read_plain
from farm.wire.program import Sidecar


def verify(folder: Path, trust: Trust, tag: str, cache: Path | None) -> Iterator[TrustCheck]:
    """Yield the checks of a pack: its files, who signed what it was made of, and who signed the files.

    A file that nobody signed is made again from what is signed, and compared.
    """
    index = _index(folder)
    found: dict[str, str] = {}
    for file in index["files"]:
        parts = PurePosixPath(file["path"]).parts
        try:
            if not parts or parts[0] == "/" or ".." in parts or "\0" in file["path"]:
                raise NotPlain(0, "leads out of the pack")
            found[file["path"]] = file_digest(folder.joinpath(*parts), within=folder)
        except OSError as error:
            yield TrustCheck(Standing.REFUSED, "sha256", f"{file['path']}: {error.strerror}")
    said = {file["path"]: file["digest"] for file in index["files"]}
    if wrong := [name for name, digest in found.items() if digest != said[name]]:
        yield TrustCheck(Standing.REFUSED, "sha256", f"changed since the pack was written: {', '.join(wrong[:5])}")
    elif len(found) == len(index["files"]):
        yield TrustCheck(Standing.OK, "sha256", f"{len(found)} files as {PACK} says")
    own = {PACK, SIDECAR, statements_path(folder / SIDECAR).name}
    if others := sorted(_files_in(folder) - own - {str(PurePosixPath(name)) for name in said}):
        yield TrustCheck(Standing.REFUSED, "pack", f"{PACK} does not name what is there: {', '.join(others[:5])}")
    text = read_document(folder / SIDECAR)
    sidecar = read_sidecar(text, str(folder / SIDECAR))
    judged = trust.judge(text, read_statements(statements_path(folder / SIDECAR)), tag=tag)
    yield from judged.checks
    if sidecar["blobs"]["program"]["digest"] not in found.values():
        yield TrustCheck(Standing.REFUSED, "pack", "it does not hold the program")
    if judged.refused or not judged.accepted:
        return  # Said already, or nothing of this namespace need be signed.
    covered = {sidecar["blobs"]["program"]["digest"], sha256_of(text)}
    for each in judged.accepted:
        if each.statement.kind == "pack":
            covered |= set(each.statement.subjects.values())
    bare = [name for name, digest in found.items() if digest not in covered]
    yield _unsigned(bare, found, _made_again(index, sidecar, found, cache) if bare else {})


def _files_in(folder: Path) -> set[str]:
    """Return what there is but folders, however deep: Triton serves the highest version that it finds.

    What a fetch left that was killed, nothing finds.
    """
    found = (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    return {name for path in found if not (name := path.relative_to(folder).as_posix()).startswith(SCRATCH)}


def _unsigned(names: Sequence[str], found: Mapping[str, str], again: Mapping[str, str]) -> TrustCheck:
    """Judge the files of a pack that nobody signed by those that were made again here."""
    if not names:
        return TrustCheck(Standing.OK, "pack", "all its files are signed")
    if wrong := [name for name in names if name in again and again[name] != found[name]]:
        text_of = f"nobody trusted has signed {', '.join(wrong[:5])}, and other bytes follow from what is signed"
        return TrustCheck(Standing.REFUSED, "pack", text_of)
    if rest := [name for name in names if name not in again]:
        text_of = f"nobody trusted has signed {', '.join(rest[:5])}, and it cannot be made again from this cache"
        return TrustCheck(Standing.REFUSED, "pack", text_of)
    return TrustCheck(Standing.OK, "pack", f"the same as made again from what is signed: {', '.join(names[:5])}")


def _made_again(index: PackIndex, sidecar: Sidecar, found: Mapping[str, str], cache: Path | None) -> dict[str, str]:
    """Return the SHA-256 of the files of a pack that follow from its signed sidecar, by their paths.

    The model is one of them if the client's cache still has what the program was compiled from.
    """
    made: dict[str, str] = {}
    with suppress(FarmError, KeyError, ValueError):
        layout = Layout(index["layout"])
        sidecar = named(layout, sidecar, str(index["identifier"]))
        require_fit(layout, sidecar)
        names = [path.removeprefix("cache/") for path in found if path.startswith("cache/")]
        cached = CacheFile(names[0], str(index["onnxruntime"])) if len(names) == 1 else None
        # They go into scripts: nothing but what a provider says.
        if cached and not re.fullmatch(r"[A-Za-z0-9._-]+\.mxr [0-9][A-Za-z0-9.+]*", f"{cached.name} {cached.version}"):
            return {}
        made |= {path: sha256_of(data) for path, data in small_files(layout, sidecar, cached).items()}
        if cached and cache:
            place = PurePosixPath(model_path(layout, sidecar))
            source, data = _model_of(sidecar, Downloads(cache))
            made |= {str(place.parent / path): digest for path, digest in data.items()}
            made[str(place)] = sha256_of(fixed_model(source, sidecar))
    return made


def _model_of(sidecar: Sidecar, downloads: Downloads) -> tuple[Path, dict[str, str]]:
    """Return the model of a signed sidecar, as it is kept here, and its external data's SHA-256 by their paths.

    Raises FarmError if it is not here.
    """

    def kept(digest: str, size: int) -> Path:
        found = downloads.find(digest, size)
        if found is None:
            raise NotFound("it is not in the client's cache")
        return found

    blob = sidecar["blobs"]["reproduction"]
    if blob is None:
        raise NotFound("it was published without its work order")
    order = json.loads(kept(blob["digest"], blob["size"]).read_bytes())["order"]
    require_model(order, sidecar)
    model, *others = order["model"]["files"]
    return kept(model["digest"], model["size"]), {file["path"]: file["digest"] for file in others}


def _index(folder: Path) -> PackIndex:
    try:
        index: PackIndex = json.loads(read_plain(folder / PACK, LARGEST_SIDECAR))
        if not all(isinstance(file["path"], str) and isinstance(file["digest"], str) for file in index["files"]):
            raise TypeError
        return index
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ArtifactGone(f"{folder / PACK} is not an index of a pack: {type(error).__name__}") from None
