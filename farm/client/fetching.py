"""Fetching: which artifacts of a ref are meant, and their files in a folder, each whole or not there."""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import json
import os
import shutil
import stat
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Literal

from farm.artifacts.sidecar import SidecarDocument, blobs_of
from farm.client.family import INDEX, FamilyIndex, FamilyMember, family_index
from farm.client.transport import file_name
from farm.errors import ArtifactGone, NotFound, UsageError
from farm.files import read_plain, replacing
from farm.jobs.order import WorkOrder
from farm.models.shapes import PACK
from farm.spec import FileReference

if TYPE_CHECKING:
    from farm.artifacts.refs import SnapshotCell
    from farm.packs.writing import Pack

Download = Callable[[FileReference, Path], Path]
"""Writes a sidecar's blob into a folder, under its own name, and returns its path."""

SIDECAR = "artifact.json"
LARGEST_SIDECAR = 16 << 20
SUFFIXES = (".json", ".mxr", ".npz", ".onnx", ".txt", ".zip")
"""How the files of artifacts end. A farm that nobody should trust names no `Makefile`, no `conftest.py`."""
LARGEST_KERNELS = 4 << 30
"""Bytes of kernel binaries that are unpacked at most."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """What `fetch` wrote: the program, its sidecar, and the log if it was requested."""

    folder: Path
    program: Path
    sidecar: Path
    log: Path | None
    artifact: SidecarDocument
    texts: tuple[Path, ...] = ()
    """The program's text before and after compilation, if the log was requested and a manifest's `debug` kept it."""
    kernels: Path | None = None
    """The folder of MIOpen's kernel binaries, if they were requested and the artifact has some."""
    sample: Path | None = None
    """One input with its expected outputs, an `.npz` with arrays by their names, if it was requested."""
    pack: Pack | None = None
    """What was written for a serving stack, if another layout than the plain one was requested."""


@dataclass(frozen=True, slots=True)
class FetchedFamily:
    """What `fetch_family` wrote: a folder for each member, and the index."""

    folder: Path
    index: Path
    document: FamilyIndex
    left_out: list[str]
    """Cells that the ref names too, but of another model file or toolchain."""


def choose(
    cells: Sequence[SnapshotCell],
    name: str,
    target: str,
    precision: str,
    shape: str | None = None,
    toolchain: str = "",
    *,
    ref: str = "latest",
    packed: bool = False,
) -> list[SnapshotCell]:
    """Return the cells of a ref that fit; they differ in nothing but their shape and toolchain.

    With `packed`, those that were compiled for packs take the place of their twins; else only an exact `shape` names
    one.

    Raises NotFound with what is there, UsageError if the device would have to be guessed.
    """
    of_model = [cell for cell in cells if cell["model"] == name]
    if not of_model:
        names = sorted({str(cell["model"]) for cell in cells})
        near = difflib.get_close_matches(name, names, 3) or names[:10]
        raise NotFound(f"{ref} has no model {name}", hint=f"it has {', '.join(near)}" if near else "it is empty")
    targets = {target, f"migraphx/{target}"}
    fitting = [
        cell
        for cell in of_model
        if cell["target"] in targets
        and _plain(cell["precision"]) == _plain(precision)
        and _fits(str(cell["shape"]), shape, packed=packed)
        and str(cell["toolchain"]).startswith(toolchain)
    ]
    if not fitting:
        there = sorted({str(cell["identifier"]) for cell in of_model})
        wanted = "/".join(filter(None, (name, target, precision, shape)))
        if toolchain:
            wanted += f" made by {toolchain}"
            there = sorted({f"{cell['identifier']} ({cell['toolchain']})" for cell in of_model})
        raise NotFound(f"{ref} has no {wanted}", hint=f"it has {', '.join(there[:10])}")
    require_one(fitting, "device", "--target")
    made_for_packs = {cell["shape"] for cell in fitting}
    return [cell for cell in fitting if not (packed and f"{cell['shape']}{PACK}" in made_for_packs)]


def _fits(label: str, shape: str | None, *, packed: bool) -> bool:
    if packed:
        return shape in (None, label, label.removesuffix(PACK))
    return label == shape if shape else not label.endswith(PACK)


def require_one(cells: Sequence[SnapshotCell], what: Literal["shape", "device", "precision"], option: str) -> None:
    """Raise UsageError if the cells differ in a field, which `option` of the command line would settle."""
    found = sorted({cell[what] for cell in cells})
    if len(found) > 1:
        all_of_them = ", or --family for all" if what == "shape" else ""
        hint = f"add {option}, one of {', '.join(found)}{all_of_them}"
        raise UsageError(f"{cells[0]['model']} exists for {len(found)} {what}s", hint=hint)


def _plain(precision: str) -> str:
    return precision.replace("+", "-")


def write_artifact(
    download: Download,
    cell: SnapshotCell,
    sidecar: SidecarDocument,
    folder: Path,
    *,
    ref: str,
    log: bool,
    force: bool = False,
) -> Fetched:
    """Write one artifact into a folder of its own.

    Raises UsageError if another is there, or a file in its way that no fetch has written (unless `force`), ArtifactGone
    if its bytes are not those that the ref names.
    """
    program = sidecar["blobs"]["program"]
    if program["digest"] != cell["program"]["digest"]:
        raise ArtifactGone(
            f"{cell['identifier']}: the artifact was repaired after {ref} moved to it, and its bytes differ",
            hint="submit the manifest again: then the ref moves to the current artifact",
        )
    document = folder / SIDECAR
    with into(folder):
        _require_room(folder, sidecar, force=force)
        path = download(program, folder)
        kept_log = sidecar["blobs"].get("log") if log else None
        log_path = download(kept_log, folder) if kept_log else None
        kept = [sidecar["blobs"].get("before"), sidecar["blobs"].get("after")] if log else []
        texts = tuple(download(blob, folder) for blob in kept if blob)
        with replacing(document) as part:
            part.write_text(json.dumps(sidecar, indent=2) + "\n")
    return Fetched(folder, path, document, log_path, sidecar, texts)


def bring_model(download: Download, order: WorkOrder, folder: Path) -> Path:
    """Write the model of a work order into a folder, with its external data where it names it; return its path."""
    model, *others = order["model"]["files"]
    for file in others:
        parts = PurePosixPath(file["path"]).parts
        if not parts or parts[0] == "/" or ".." in parts:
            raise ArtifactGone(f"the farm names a file {file['path']!r} outside the model's folder")
        place = folder.joinpath(*parts)
        place.parent.mkdir(parents=True, exist_ok=True)
        download({**file, "path": file["digest"]}, place.parent).replace(place)
    return download({**model, "path": model["digest"]}, folder)


def write_family(
    download: Download,
    members: Sequence[FamilyMember],
    folder: Path,
    *,
    ref: str,
    log: bool,
    force: bool = False,
) -> tuple[Path, FamilyIndex]:
    """Write each member, a cell and its sidecar, into `folder/<shape>`, and the index; return its path and content."""
    document, index = family_index(ref, members), folder / INDEX
    if not (force or _is_document(index, "members")):
        raise _in_the_way(index)
    for cell, sidecar in members:
        own = folder / file_name(cell["shape"])
        if own.is_symlink():
            raise UsageError(f"{own} is a link, and may lead anywhere", hint="remove it, or choose another")
        write_artifact(download, cell, sidecar, own, ref=ref, log=log, force=force)
    # Last, so that a serving program that finds the index finds all that it names.
    with into(folder), replacing(index) as part:
        part.write_text(json.dumps(document, indent=2) + "\n")
    return index, document


def place_kernels(download: Download, packed: FileReference, folder: Path) -> Path:
    """Unpack kernel binaries into `folder/kernels`, under their bare names: paths in the archive are ignored.

    Raises UsageError if something else is there, ArtifactGone for an archive that is damaged or too large.
    """
    import zipfile

    kernels = folder / "kernels"
    with into(kernels), tempfile.TemporaryDirectory(prefix=".kernels-", dir=folder) as scratch:
        if kernels.is_symlink() or not all(_is_kernels(entry) for entry in os.scandir(kernels)):
            raise UsageError(f"{kernels} holds files that no fetch has written", hint="choose another folder")
        try:
            with zipfile.ZipFile(download(packed, Path(scratch))) as archive:
                items = [item for item in archive.infolist() if item.filename.endswith(".ukdb")]
                # No more than it declares is read of a member.
                if sum(item.file_size for item in items) > LARGEST_KERNELS:
                    raise ArtifactGone(f"the kernel binaries are more than {LARGEST_KERNELS >> 30} GiB")
                for item in items:
                    place = kernels / file_name(Path(item.filename).name)
                    with archive.open(item) as source, replacing(place) as part, part.open("wb") as file:
                        shutil.copyfileobj(source, file)
        except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
            raise ArtifactGone(f"the kernel binaries cannot be unpacked: {error}") from None
    return kernels


def _is_kernels(entry: os.DirEntry[str]) -> bool:
    return entry.name.endswith(".ukdb") and entry.is_file(follow_symlinks=False)


@contextlib.contextmanager
def into(folder: Path) -> Iterator[None]:
    """Make a folder and write into it. Raises UsageError if that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        message = f"cannot write into {folder}: {error.strerror or error}"
        raise UsageError(message, hint="choose another folder") from None


def _require_room(folder: Path, sidecar: SidecarDocument, *, force: bool) -> None:
    """Refuse names that are no artifact's, and to write over what no fetch has written.

    All names count, not only those of what is written now: what stands in the sidecar passes for fetched next time.
    """
    names = [file_name(blob["path"]) for blob in blobs_of(sidecar)]
    if odd := [name for name in names if not name.endswith(SUFFIXES) or name in (SIDECAR, INDEX)]:
        raise ArtifactGone(f"the farm names a file {odd[0]!r}, which no artifact has")
    if len(set(names)) < len(names):
        raise ArtifactGone("the farm gives two files of the artifact one name")
    if force:
        return
    if not _is_document(folder / SIDECAR, "blobs"):
        raise _in_the_way(folder / SIDECAR)
    known = _fetched_before(folder)
    _require_own_folder(folder / SIDECAR, sidecar["blobs"]["program"])
    for blob in blobs_of(sidecar):
        path = folder / blob["path"]
        if os.path.lexists(path) and _digest(path) not in (blob["digest"], known.get(path.name)):
            raise _in_the_way(path)


def _fetched_before(folder: Path) -> dict[str, str]:
    """Return the digests of the files that an earlier fetch may have written here, by their names."""
    try:
        blobs = json.loads(read_plain(folder / SIDECAR, LARGEST_SIDECAR))["blobs"]
        return {str(blob["path"]): str(blob["digest"]) for blob in blobs.values() if blob}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _is_document(path: Path, field: str) -> bool:
    """Whether there is nothing yet, or a document of ours: it has this field."""
    try:
        return not os.path.lexists(path) or field in json.loads(read_plain(path, LARGEST_SIDECAR))
    except (OSError, ValueError, TypeError):
        return False


def _digest(path: Path) -> str:
    """Return the digest of a regular file, which the cache may know by another name; nothing for anything else."""
    if not stat.S_ISREG(path.lstat().st_mode):
        return ""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _in_the_way(path: Path) -> UsageError:
    return UsageError(f"{path} exists, and no fetch has written it", hint="choose another folder, or --force")


def _require_own_folder(document: Path, program: FileReference) -> None:
    """Refuse to write over the sidecar of another program, which nothing would describe any more."""
    try:
        other = str(json.loads(document.read_text())["blobs"]["program"]["path"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return
    if other != program["path"] and (document.parent / other).is_file():
        message = f"{document} describes {other}, in the same folder"
        raise UsageError(message, hint="each artifact needs its own folder: choose another, or fetch the --family")
