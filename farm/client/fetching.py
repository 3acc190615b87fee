"""Fetching: which artifacts of a ref are meant, and their files in a folder, each whole or not there."""

from __future__ import annotations

import contextlib
import difflib
import json
import os
import re
import shutil
import stat
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol, TypeVar, cast

from pydantic import TypeAdapter
from typing_extensions import TypedDict

from farm.artifacts import sidecar as sidecars
from farm.client import packs
from farm.client.inspection import inspect_if_small, wrong_card
from farm.errors import ArtifactGone, NotFound, Untrusted, UsageError
from farm.files import hash_file, read_plain, replacing
from farm.jobs.rows import ReproductionDocument
from farm.jobs.state import WorkOrder, keys_of
from farm.models.shapes import BATCH, PACK
from farm.runner.documents import MeasuredPoint, TensorInfo
from farm.runner.protocol import Amount, Bound, Digest, relative
from farm.spec import (
    SUFFIXES,
    FileReference,
    JsonSchema,
    PlainSize,
    digest_of,
    model_digest,
    program_extension,
    program_name,
)
from farm.units import by_number, view_of
from farm.wire.checking import read
from farm.wire.program import Sidecar

if TYPE_CHECKING:
    from farm.artifacts.refs import ShownRef, SnapshotCell
    from farm.client.client import FarmClient


T = TypeVar("T")
Bring = Callable[[FileReference, Path], None]  # Writes a blob to a place whose folder exists, checked byte by byte.
INDEX = "family.json"  # File name of the index. `docs/object-storage.md` describes its fields.

SIDECAR_SUFFIX = ".artifact.json"
"""How the name of a sidecar's file ends, after that of its program: they may share a folder with others."""

RESERVED = (packs.SIDECAR, packs.PACK, INDEX)
"""Names that no file of an artifact may have: a pack's index says which files the next pack may replace."""
LARGEST_SIDECAR = 16 << 20
IMPORTABLE = (".py", ".pyc", ".so")
"""How files end that Python imports: a pack's `use.py` imports what lies next to it before what is installed."""
LARGEST_KERNELS = 4 << 30  # Bytes of kernel binaries that are unpacked at most.


@dataclass(frozen=True, slots=True)
class Fetched:
    """What `fetch` wrote: the program, its sidecar, and the log if it was requested."""

    folder: Path
    program: Path
    sidecar: Path
    log: Path | None
    artifact: Sidecar
    texts: tuple[Path, ...] = ()
    """The program's text before and after compilation, if the log was requested and a manifest's `debug` kept it."""
    kernels: Path | None = None
    """The folder of MIOpen's kernel binaries, if they were requested and the artifact has some."""
    sample: Path | None = None
    """One input with its expected outputs, an `.npz` with arrays by their names, if it was requested."""
    pack: packs.Pack | None = None
    """What was written for a serving stack, if another layout than the plain one was requested."""


@dataclass(frozen=True, slots=True)
class FetchedFamily:
    """What `fetch_family` wrote: a folder for each member, and the index."""

    folder: Path
    index: Path
    document: Family
    left_out: list[str]  # Cells that the ref names too, but of another model file or toolchain.


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
    one: bool = False,
) -> list[SnapshotCell]:
    """Return the cells of a ref that fit; they differ in nothing but their shape (unless `one`) and toolchain.

    Programs of a superseded toolchain are only for those who name it.

    With `packed`, those that were compiled for packs take the place of their twins; else only an exact `shape` names
    one.

    Raises NotFound with what is there, UsageError if the device, or the shape of `one`, would have to be guessed.
    """
    from farm.targets.pools import begins

    of_model = [cell for cell in cells if cell["model"] == name]
    if not of_model:
        names = sorted({str(cell["model"]) for cell in cells})
        near = difflib.get_close_matches(name, names, 3) or names[:10]
        raise NotFound(f"{ref} has no model {name}", hint=f"it has {', '.join(near)}" if near else "it is empty")
    targets = {target, f"migraphx/{target}"}
    fitting = [
        cell
        for cell in (of_model if shape or packed else may_run(of_model))
        if (cell["target"] in targets or cell["identifier"].split("/")[1:2] == [target])
        and cell["precision"].replace("+", "-") == precision.replace("+", "-")
        and shape in (None, cell["shape"], *([cell["shape"].removesuffix(PACK)] if packed else []))
        and begins(cell["toolchain"], toolchain)
        and (toolchain or not cell.get("superseded"))
    ]
    if not fitting:
        there = {str(cell["identifier"]): str(cell["identifier"]) for cell in of_model}
        wanted = "/".join(filter(None, (name, target, precision, shape)))
        if toolchain:
            wanted += f" made by {toolchain}"
            there = {f"{cell['identifier']} ({cell['toolchain']})": cell["identifier"] for cell in of_model}
        raise NotFound(f"{ref} has no {wanted}", hint=f"it has {_nearest(wanted, there)}")
    require_one(fitting, "device", "--target")
    chosen = may_run(fitting, packed=True) if packed else fitting
    if one:
        require_one(chosen, "shape", "--shape")
    return chosen


def may_run(cells: Sequence[SnapshotCell], *, packed: bool = False) -> list[SnapshotCell]:
    """Return the cells to look at; if `packed`, programs that were compiled for packs take the place of their twins."""
    if not packed:
        return [cell for cell in cells if not cell["shape"].endswith(PACK)]
    made = {cell["identifier"] for cell in cells}
    return [cell for cell in cells if f"{cell['identifier']}{PACK}" not in made]


def _nearest(wanted: str, there: Mapping[str, str]) -> str:
    """Return what exists, the most similar to what is wanted first; `there` has identifiers by what is shown."""
    plain = wanted.replace("/", "-")

    def unlike(shown: str) -> tuple[float, list[tuple[int, str]]]:
        name = there[shown].replace("/", "-")
        return -difflib.SequenceMatcher(None, plain, name, autojunk=False).ratio(), by_number(shown)

    found = sorted(there, key=unlike)
    more = f" and {len(found) - NEAREST} more: `farm ls {found[0].partition('/')[0]}`" if len(found) > NEAREST else ""
    return ", ".join(found[:NEAREST]) + more


NEAREST = 6  # Artifacts that are named if none is what was asked for.


def split_name(name: str) -> tuple[str, str, str, str]:
    """Return model, target, precision and shape of a cell's name, as builds print it; what it lacks is empty.

    Raises UsageError for more parts than a name has.
    """
    parts = name.split("/")
    if len(parts) > 4:
        raise UsageError(f"{name!r} is not a cell's name", hint="they look like net/onnxruntime-cpu/fp16/b8")
    model, target, precision, shape = [*parts, "", "", ""][:4]
    return model, target, precision, shape


def require_one(cells: Sequence[SnapshotCell], what: Literal["shape", "device", "precision"], option: str) -> None:
    """Raise UsageError if the cells differ in a field, which `option` of the command line would settle."""
    found = sorted({cell[what] for cell in cells}, key=by_number)
    if len(found) > 1:
        all_of_them = ", or --family for all" if what == "shape" else ""
        hint = f"add {option}, one of {', '.join(found)}{all_of_them}"
        raise UsageError(f"{cells[0]['model']} exists for {len(found)} {what}s", hint=hint)


def write_artifact(
    bring: Bring,
    cell: SnapshotCell,
    sidecar: Sidecar,
    folder: Path,
    *,
    log: bool,
    sample: bool = False,
    force: bool = False,
    signed: SignedArtifact | None = None,
) -> Fetched:
    """Write one artifact into a folder, which may hold others: the program, and next to it `<program>.artifact.json`.

    The program is named after the cell. The other files have its name before their own; what is `signed` about it lies
    next to its sidecar.

    Raises UsageError for a file in its way that no fetch has written (unless `force`).
    """
    with into(folder):
        places = _places(folder, cell, sidecar)
        if not force:
            _require_room(sidecar, places)

        def written(name: str) -> Path | None:
            blob = cast(Mapping[str, FileReference | None], sidecar["blobs"]).get(name)
            if not blob:
                return None
            bring(blob, places[name])
            return places[name]

        path = written("program")
        assert path
        _require_kernels(sidecar, path)
        log_path = written("log") if log else None
        texts = [written("before"), written("after")] if log else []
        sample_path = written("sample") if sample else None
        document = sidecar_path(path)
        _write_statements(document, signed, force=force)
        with replacing(document) as part:
            # What is signed are its bytes.
            part.write_bytes(signed.text if signed else json.dumps(sidecar, indent=2).encode() + b"\n")
    found = tuple(text for text in texts if text)
    return Fetched(folder, path, document, log_path, sidecar, found, sample=sample_path)


def _require_kernels(sidecar: Sidecar, path: Path) -> None:
    """Remove a program of MIGraphX's with kernels for another card than its sidecar says, and raise ArtifactGone."""
    device = sidecar.get("device")
    if path.suffix not in (".mxr", ".json") or not device:
        return
    try:
        why = wrong_card(inspect_if_small(path), [device["arch"]])
    except UsageError as error:
        why = error.message
    if why:
        path.unlink()
        raise ArtifactGone(f"{path.name} is not the program that its sidecar describes: {why}", hint=_REBUILD)


_REBUILD = "tell the farm's operator, and submit the manifest again"


def require_asked(cell: SnapshotCell, sidecar: Sidecar, *, any_name: bool) -> None:
    """Refuse a signed sidecar of another cell than the one that was asked for; with `any_name` its model may differ.

    Each statement about another program is as valid, so only the signed name tells them apart. Raises Untrusted.
    """
    asked = [cell["model"], re.sub("[/:]", "-", cell["target"]), cell["precision"], cell["shape"]]
    signed = sidecar["identifier"].split("/")
    if len(signed) == len(asked):
        # A target's name ends with the toolchain if its manifest names several.
        signed[1] = asked[1] if signed[1].startswith(f"{asked[1]}.") else signed[1]
    if asked == signed or (any_name and asked[1:] == signed[1:]):
        return
    hint = "--any-name takes what was compiled under another name" if asked[1:] == signed[1:] else ""
    raise Untrusted(f"{'/'.join(asked)} was asked for, and {sidecar['identifier']} is signed", hint=hint)


def require_same(cell: SnapshotCell, sidecar: Sidecar, ref: str, *, any_name: bool | None = None) -> None:
    """Refuse a sidecar of other bytes, or of another compile, than a ref's cell names: by each field that both have.

    Its key must be the digest of its spec: else a program could count for what it was not made from. If it is signed,
    `any_name` is as in `require_asked`. Raises ArtifactGone, Untrusted.
    """
    if sidecar["blobs"]["program"]["digest"] != cell["program"]["digest"]:
        wrong = f"{cell['identifier']}: the artifact was repaired after {ref} moved to it, and its bytes differ"
        raise ArtifactGone(wrong, hint="submit the manifest again: then the ref moves to the current artifact")
    if any_name is not None:
        require_asked(cell, sidecar, any_name=any_name)
    spec: Mapping[str, Any] = sidecar["spec"]
    try:
        arch, device = spec["device"]["arch"], sidecar["device"]["arch"]
        there = {
            "compiler.name": (cell["target"].partition("/")[0], spec["compiler"]["name"]),
            "device.arch": (cell["device"], device if arch == f"{device.partition(':')[0]}:any" else arch),
            "toolchain": (cell["toolchain"], spec["toolchain"]),
            "precision": (cell["precision"], spec["precision"]),
            "batch": (cell["sizes"].get(BATCH), spec["batch"]),
            "key": (cell["key"], digest_of(spec)),
        }
    except (LookupError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise ArtifactGone(f"{cell['identifier']}: the spec of its artifact is not one: {error!r:.200}") from None
    for field, (asked, made) in there.items():
        if asked != made:
            wrong = f"{ref} names one with {field} {asked}, and its spec has {made}"
            raise ArtifactGone(f"{cell['identifier']}: the artifact is of another compile: {wrong}", hint=_REBUILD)


@dataclass(frozen=True, slots=True)
class SignedArtifact:
    """A sidecar as it is stored, byte by byte, with the bundles that came with it."""

    text: bytes
    statements: Sequence[bytes]

    @property
    def sidecar(self) -> Sidecar:
        """The sidecar. Raises ArtifactGone if it is none."""
        return read_sidecar(self.text, "the farm's sidecar")


class ReaderTrust(Protocol):
    """What decides which artifacts a client takes: an extension's (entry points `farm.trust`)."""

    @property
    def asks(self) -> bool:
        """Whether it judges; else it refuses nothing."""

    def ref(self, tag: str, ask: Callable[[], ShownRef]) -> ShownRef:
        """Return what `ask` answers about a ref, if it may be used. Raises Untrusted. It may ask again."""

    def promise(self, client: FarmClient, tag: str, source: str, *, previous: bool) -> tuple[str, int] | None:
        """Return what is signed about a move that a client will ask for, and the generation from which the ref moves.

        Without a `source` the ref is deleted. None if nobody but the farm signs this ref. Raises as `client.refs.get`.
        """

    def admit(self, signed: SignedArtifact, *, key: str, tag: str) -> None:
        """Raise Untrusted, with the reasons, unless an artifact may be used; its bytes are fetched after it."""


def read_sidecar(text: bytes, what: str) -> Sidecar:
    """Return a sidecar as it is stored. Raises ArtifactGone if it is none."""
    try:
        return sidecars.read(text)
    except ValueError as error:
        raise ArtifactGone(f"{what} is not valid: {error}", hint="fetch it again") from None


def bundle_lines(bundles: Iterable[bytes]) -> bytes:
    """Return bundles as a file of JSON lines, as other tools keep them next to what they are about."""
    # No string of JSON holds a line break: it is written as an escape there.
    return b"".join(bundle.replace(b"\n", b" ").replace(b"\r", b" ") + b"\n" for bundle in bundles)


def sidecar_path(program: Path) -> Path:
    """Return where the sidecar of a program lies: `net.mxr.artifact.json` for `net.mxr`."""
    return program.with_name(f"{program.name}{SIDECAR_SUFFIX}")


def program_path(sidecar: Path, stored: str, digest: str) -> Path:
    """Return where the program of a sidecar's file lies: it has the sidecar's name, or a pack's index names it.

    In any other folder it has the name that the sidecar has `stored`.

    Raises ArtifactGone if its name is not one.
    """
    name = sidecar.name.removesuffix(SIDECAR_SUFFIX)
    if name not in (sidecar.name, ""):
        return sidecar.with_name(name)
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError, RecursionError):
        index: packs.PackIndex = json.loads(read_plain(sidecar.with_name(packs.PACK), LARGEST_SIDECAR))
        named = [file["path"] for file in index["files"] if file["digest"] == digest]
        return sidecar.parent / relative(named[0])
    return sidecar.with_name(file_name(stored))


def statements_path(sidecar: Path) -> Path:
    """Return where what is signed about a sidecar lies: `net.mxr.artifact.sigstore.jsonl`."""
    return sidecar.with_suffix(".sigstore.jsonl")


def file_name(name: object) -> str:
    """Return the farm's name of a file if it is a valid file name: it becomes part of a path here."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", str(name)):
        raise ArtifactGone(f"the farm names a file {name!r}, which the client refuses")
    return str(name)


def _blobs_of(sidecar: Sidecar) -> dict[str, FileReference]:
    """Return all blobs of a sidecar, also those that only a newer farm knows."""
    blobs = cast(Mapping[str, FileReference | None], sidecar["blobs"])
    return {kind: blob for kind, blob in blobs.items() if blob}


def _places(folder: Path, cell: SnapshotCell, sidecar: Sidecar) -> dict[str, Path]:
    """Return where the blobs of a cell's artifact go. Raises ArtifactGone for names that no artifact has.

    All names are checked, not only those of files that are written now: the next fetch takes files that the sidecar
    names for fetched ones.
    """
    names = {kind: file_name(blob["path"]) for kind, blob in _blobs_of(sidecar).items()}
    extension = program_extension(names["program"], sidecar.get("identifier", ""))
    program = file_name(program_name(cell["identifier"], extension))
    for name in (program, *names.values()):
        if not name.endswith(SUFFIXES) or name in RESERVED or name.endswith(SIDECAR_SUFFIX):
            raise ArtifactGone(f"the farm names a file {name!r}, which no artifact has")
    if len(set(names.values())) < len(names):
        raise ArtifactGone("the farm gives two files of the artifact one name")
    return {kind: folder / (program if kind == "program" else f"{program}.{name}") for kind, name in names.items()}


def _write_statements(document: Path, signed: SignedArtifact | None, *, force: bool) -> None:
    """Write the bundles about a sidecar next to it; those of an earlier fetch go."""
    path = statements_path(document)
    if not force:
        _left(path, lambda data: [json.loads(line)["mediaType"] for line in data.splitlines()])
    if signed and signed.statements:
        with replacing(path) as part:
            part.write_bytes(bundle_lines(signed.statements))
    else:
        path.unlink(missing_ok=True)


def read_work_order(data: bytes, sidecar: Sidecar, source: str) -> ReproductionDocument:
    """Return a stored work order, if it is the one of a sidecar. Raises UsageError if it is none, ArtifactGone."""
    found = read(data, ReproductionDocument, source)
    order = found["order"]
    digest = model_digest({file["path"]: file["digest"] for file in order["model"]["files"]})
    made_of = [order["spec"]["model"]["digest"], *keys_of(order, digest_of(order["spec"]))]
    if digest != made_of[0] or sidecar["key"] not in made_of[1:]:
        raise ArtifactGone(f"the work order of {sidecar['identifier']} is of another compile than its sidecar")
    return found


def bring_model(bring: Bring, order: WorkOrder, folder: Path) -> Path:
    """Write the model of a work order into a folder, with its external data if it names any; return its path."""
    model, *others = order["model"]["files"]
    for file in others:
        try:
            place = folder / relative(file["path"])
        except ValueError:
            raise ArtifactGone(f"the farm names a file {file['path']!r} outside the model's folder") from None
        if place.name.endswith(IMPORTABLE):
            raise ArtifactGone(f"the farm names a file {file['path']!r} as data of a model, and Python would import it")
        place.parent.mkdir(parents=True, exist_ok=True)
        bring(file, place)
    bring(model, folder / model["digest"])
    return folder / model["digest"]


def write_family(
    bring: Bring,
    members: Sequence[tuple[SnapshotCell, Sidecar, SignedArtifact | None]],
    folder: Path,
    *,
    ref: str,
    log: bool,
    force: bool = False,
) -> tuple[Path, Family]:
    """Write members, and what is signed of each, into `folder/<shape>`, then the index; return its path and content."""
    document, index = family_index(ref, [(cell, sidecar) for cell, sidecar, _ in members]), folder / INDEX
    if not force:
        _left(index, lambda data: json.loads(data)["members"])
    for cell, sidecar, signed in members:
        own = folder / file_name(cell["shape"])
        if own.is_symlink():
            raise UsageError(f"{own} is a link, and may lead anywhere", hint="remove it, or choose another")
        write_artifact(bring, cell, sidecar, own, log=log, force=force, signed=signed)
    # Last, so that a serving program that finds the index finds all that it names.
    with into(folder), replacing(index) as part:
        part.write_text(json.dumps(document, indent=2) + "\n")
    return index, document


def place_kernels(bring: Bring, packed: FileReference, kernels: Path) -> None:
    """Unpack kernel binaries into the folder `kernels`, under their bare names: paths in the archive are ignored.

    Raises UsageError if something else is there, ArtifactGone for an archive that is damaged or too large.
    """
    with into(kernels), tempfile.TemporaryDirectory(prefix=".kernels-", dir=kernels.parent) as scratch:
        if kernels.is_symlink() or not all(
            entry.name.endswith(".ukdb") and entry.is_file(follow_symlinks=False) for entry in os.scandir(kernels)
        ):
            raise UsageError(f"{kernels} holds files that no fetch has written", hint="choose another folder")
        try:
            bring(packed, Path(scratch) / "packed")
            with zipfile.ZipFile(Path(scratch) / "packed") as archive:
                items = [item for item in archive.infolist() if item.filename.endswith(".ukdb")]
                # No more than it declares is read of a member.
                if sum(item.file_size for item in items) > LARGEST_KERNELS:
                    raise ArtifactGone(f"the kernel binaries are more than {LARGEST_KERNELS >> 30} GiB")
                for item in items:
                    if item.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                        raise zipfile.BadZipFile(f"{item.filename!r} is packed in a way that no farm uses")
                    place = kernels / file_name(Path(item.filename).name)
                    with archive.open(item) as source, replacing(place) as part, part.open("wb") as file:
                        shutil.copyfileobj(source, file)
        except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError) as error:
            raise ArtifactGone(f"the kernel binaries cannot be unpacked: {error}") from None


@contextlib.contextmanager
def into(folder: Path) -> Iterator[None]:
    """Make a folder and write into it. Raises UsageError if that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        message = f"cannot write into {folder}: {error.strerror or error}"
        raise UsageError(message, hint="choose another folder") from None


def _require_room(sidecar: Sidecar, places: Mapping[str, Path]) -> None:
    """Refuse to overwrite files that no fetch has written."""

    def digests(data: bytes) -> dict[str, str]:
        return {kind: str(blob["digest"]) for kind, blob in json.loads(data)["blobs"].items() if blob}

    before = _left(sidecar_path(places["program"]), digests) or {}
    for kind, blob in _blobs_of(sidecar).items():
        path = places[kind]
        if os.path.lexists(path):
            # Which the cache may know by another name.
            digest = hash_file(path)[0] if stat.S_ISREG(path.lstat().st_mode) else ""
            if digest not in (blob["digest"], before.get(kind)):
                raise _in_the_way(path)


def _left(path: Path, read: Callable[[bytes], T]) -> T | None:
    """Return what an earlier fetch left in a file; None if there is none. Raises UsageError for a file of others."""
    try:
        return read(read_plain(path, LARGEST_SIDECAR)) if os.path.lexists(path) else None
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise _in_the_way(path) from None


def _in_the_way(path: Path) -> UsageError:
    return UsageError(f"{path} exists, and no fetch has written it", hint="choose another folder, or --force")


class BatchRange(TypedDict):
    """The batches that a program takes."""

    min: Annotated[int, Bound(least=1)]
    max: Annotated[int, Bound(least=1)]


class Member(TypedDict):
    """A program of the family; `program` and `sidecar` are paths relative to the index.

    `sizes` are those of the named dimensions, `{"min", "max", "optimals"}` of a range, which was measured at several
    `points`. `latency` is the median in seconds, `throughput` samples a second, null where nothing was measured.
    """

    shape: str
    sizes: Mapping[str, PlainSize]
    batch: BatchRange
    program: str
    sidecar: str
    key: Digest
    inputs: Sequence[TensorInfo]
    latency: Amount | None
    throughput: float | None
    points: Sequence[MeasuredPoint]
    shared: bool


class Family(TypedDict):
    """`family.json`: the members by the largest batch that they take, all of one toolchain and device."""

    schema: Literal[1]
    ref: str
    model: str
    target: str
    precision: str
    device: str
    toolchain: str
    members: Annotated[Sequence[Member], Bound(shortest=1)]


FamilyMember = tuple["SnapshotCell", Sidecar]  # A cell of a ref, and its sidecar.


def family_schema() -> JsonSchema:
    """Return the index's JSON Schema (draft 2020-12)."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **TypeAdapter(Family).json_schema(),
        "title": "Family index of the MIGraphX compile farm",
    }


def family_index(ref: str, members: Iterable[FamilyMember]) -> Family:
    """Return the index of a family whose members are (a ref's cell, its sidecar), all of one toolchain and device.

    The members are in the order in which a serving program asks them: by the largest batch that they take.
    """
    pairs = sorted(members, key=lambda pair: (batch_range(pair[0])["max"], pair[0]["shape"]))
    cell = pairs[0][0]
    return {
        "schema": 1,
        "ref": ref,
        "model": cell["model"],
        "target": cell["target"],
        "precision": cell["precision"],
        "device": cell["device"],
        "toolchain": cell["toolchain"],
        "members": [_member(cell, sidecar) for cell, sidecar in pairs],
    }


def _member(cell: SnapshotCell, sidecar: Sidecar) -> Member:
    measured, own = sidecar["measurements"], sidecars.of_cell(sidecar, cell["identifier"])
    program = f"{cell['shape']}/{own['blobs']['program']['path']}"
    return {
        "shape": cell["shape"],
        "sizes": cell["sizes"],
        "batch": batch_range(cell),
        "program": program,
        "sidecar": f"{program}{SIDECAR_SUFFIX}",
        "key": cell["key"],
        "inputs": [view_of(TensorInfo, port) for port in sidecar["inputs"]],
        "latency": measured["latency"]["median"] if measured["latency"] else None,
        "throughput": measured["throughput"],
        "points": measured["points"],
        "shared": measured["shared"],
    }


def batch_range(cell: SnapshotCell) -> BatchRange:
    """Return the batches that a cell's program takes; 1 if its model names no batch."""
    size = cell["sizes"].get(BATCH, 1)
    return {"min": size, "max": size} if isinstance(size, int) else {"min": size["min"], "max": size["max"]}
