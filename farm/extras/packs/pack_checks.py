"""Verifying packs: each file is signed, or follows from what is signed. And caches of ONNX Runtime's MIGraphX provider.

The names of a cache's files say nothing of precision, weights and tuning: the provider loads whatever has the name.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath

from farm.artifacts.sidecar import of_cell, read
from farm.client.artifact_apis import Downloads
from farm.client.fetching import read_sidecar, read_work_order, sidecar_path, statements_path
from farm.client.inspection import disagreements, inspect_if_small, wrong_card
from farm.client.packs import PACK, SIDECAR, Layout, PackIndex
from farm.errors import FarmError, NotFound, UsageError
from farm.extras.packs.fetch import SCRATCH, CacheFile, fixed_model, model_path, read_index, small_files
from farm.extras.packs.layouts import require_fit
from farm.extras.signing.trust import Standing, TrustCheck
from farm.extras.signing.verifying import LARGEST_SIDECAR, Trust, file_digest, read_document, read_statements, sha256_of
from farm.files import NotPlain, read_plain
from farm.wire.program import Sidecar


def verify(folder: Path, trust: Trust, tag: str, cache: Path | None) -> Iterator[TrustCheck]:
    """Yield the checks of a pack: its files, and who signed what it was made of.

    A file that is not signed itself is made again from what is signed, and compared.
    """
    index = read_index(folder)
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
    yield from _kernels(folder, found, sidecar)
    if judged.refused or not judged.accepted:
        return  # Said already, or nothing of this namespace need be signed.
    covered = {sidecar["blobs"]["program"]["digest"], sha256_of(text)}
    bare = [name for name, digest in found.items() if digest not in covered]
    yield _unsigned(bare, found, _made_again(index, sidecar, found, cache) if bare else {})


def _kernels(folder: Path, found: Mapping[str, str], sidecar: Sidecar) -> Iterator[TrustCheck]:
    """Yield a check for each copy of the program with kernels for another card than the sidecar says."""
    program, arch = sidecar["blobs"]["program"]["digest"], sidecar["device"]["arch"]
    for name in sorted(name for name, digest in found.items() if digest == program and name.endswith(".mxr")):
        try:
            why = wrong_card(inspect_if_small(folder / name), [arch])
        except UsageError as error:
            why = error.message
        if why:
            yield TrustCheck(Standing.REFUSED, "program", f"{name}: {why}")


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
        sidecar = of_cell(sidecar, str(index["identifier"]))
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
    stored = kept(blob["digest"], blob["size"]).read_bytes()
    model, *others = read_work_order(stored, sidecar, "the client's cache")["order"]["model"]["files"]
    return kept(model["digest"], model["size"]), {file["path"]: file["digest"] for file in others}


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
            return read(read_plain(path, LARGEST_SIDECAR))
    return None
