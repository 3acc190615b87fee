"""`farm fetch --layout`: a pack is written as a whole, into a folder of its own, with an index of its files.

ONNX Runtime's MIGraphX provider is asked under which name it looks for a model's program.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated

from farm.artifacts.sidecar import of_cell, text
from farm.client.fetching import FamilyMember, Fetched, SignedArtifact, bring_model, bundle_lines, into, write_artifact
from farm.client.packs import PACK, SIDECAR, Layout, Pack, PackIndex
from farm.compiling.child_process import Seal, ask_once
from farm.compiling.failures import ChildLimits, Failure
from farm.errors import ArtifactGone, UsageError
from farm.extras.packs import layouts
from farm.extras.packs.layouts import CACHED, require_fit
from farm.extras.signing.verifying import file_digest
from farm.files import hash_file, read_plain, remove_tree
from farm.runner.documents import Answer, ChildRequest
from farm.runner.protocol import Bound, Label, RequestFailed
from farm.spec import FileReference
from farm.wire.program import Sidecar

if TYPE_CHECKING:
    from farm.client.client import FarmClient

_LIMITS = ChildLimits(time=900.0, memory=32 << 30, hang=300.0, disk=4 << 30, processes=512)


class CacheNamesRequest(ChildRequest, total=False):
    """What a child is asked that asks ONNX Runtime's MIGraphX provider for names."""

    model: str  # The file.
    arch: str  # Of the card that will run it, in full.
    cache: str  # An empty folder to write to.


class CacheNamesAnswer(Answer):
    """Which files of its cache a provider looks for."""

    version: Label  # Of ONNX Runtime.
    names: Annotated[
        Sequence[Annotated[str, Bound(longest=256, pattern=r"[A-Za-z0-9][A-Za-z0-9._-]*\.mxr")]], Bound(longest=1000)
    ]
    found: bool  # Whether it loads files of these names and compiles nothing.


@dataclass(frozen=True, slots=True)
class CacheFile:
    """The provider's answer: the file of its cache, and which ONNX Runtime (its version) looks for it."""

    name: str
    version: str


def ask_provider(model: Path, arch: str, python: str = "") -> CacheFile:
    """Return the name under which the provider of an interpreter (empty: this one) looks for a model's program.

    `arch` is the card's, in full (`gfx942:sramecc+:xnack-`). The provider runs in a sealed child and reaches no GPU.

    Raises UsageError if there is no provider, if it does not take the model as a whole, or does not find its own file.
    """
    with tempfile.TemporaryDirectory(prefix="farm-ask-") as written:
        request: CacheNamesRequest = {
            "action": "cache_names",
            "extension": "onnxruntime-cache",
            "model": str(model.resolve()),
            "arch": arch,
            "cache": written,
        }
        seal = Seal(read=[model.resolve().parent], write=[Path(written)])
        try:
            found = ask_once(request, _LIMITS, python=python, seal=seal, answer=CacheNamesAnswer)
        except OSError as error:
            raise UsageError(f"the provider cannot be asked: {error}", hint="`--python` names an interpreter") from None
    if isinstance(found, Failure):
        raise UsageError(found.message, hint=found.detail.strip()[-300:])
    names = found["names"]
    if len(names) > 1:
        message = f"ONNX Runtime {found['version']} cuts the model into {len(names)} parts"
        raise UsageError(message, hint="a program of the farm is the whole model: serve it without ONNX Runtime")
    if not found["found"]:
        message = f"ONNX Runtime {found['version']} does not load {names[0]}, which it wrote itself"
        raise UsageError(message, hint="fetch with `--layout onnxruntime`, for the plug-in")
    return CacheFile(names[0], found["version"])


STATEMENTS = "artifact.sigstore.jsonl"
SCRATCH = ".pack-"  # How the name of a folder begins in which a pack is made; one stays if its writer was killed.
_LARGEST_INDEX = 1 << 20
_CACHE = "cache/"

BringModel = Callable[[Path], Path]
"""Writes the model that a program was compiled from, with its external data, into a folder; returns the model."""


def fetch(
    client: FarmClient, member: FamilyMember, folder: Path, layout: str, *, ref: str, python: str, force: bool
) -> Fetched:
    """Write a pack of a ref's cell into `folder`; as `FarmClient.fetch`."""
    cell, sidecar = member
    artifacts, wanted = client.artifacts, Layout(layout)
    sidecar, signed = artifacts.described(member, ref)
    require_fit(wanted, sidecar)
    with into(folder), tempfile.TemporaryDirectory() as scratch:
        found = write_artifact(artifacts.bring, cell, sidecar, Path(scratch), log=False)

        def model(place: Path) -> Path:
            return bring_model(artifacts.bring, artifacts.work_order(sidecar)["order"], place)

        name = cell["identifier"]
        pack = write_pack(
            wanted, sidecar, found.program, folder, model, identifier=name, python=python, force=force, signed=signed
        )
    program = next(path for path in pack.files if path.suffix == found.program.suffix)
    return replace(found, folder=folder, program=program, sidecar=folder / SIDECAR, pack=pack)


def write_pack(
    layout: Layout,
    sidecar: Sidecar,
    program: Path,
    folder: Path,
    bring_model: BringModel,
    *,
    identifier: str = "",
    python: str = "",
    force: bool = False,
    signed: SignedArtifact | None = None,
) -> Pack:
    """Write a layout of a program into `folder`; `program` is its file, checked, `signed` what is signed about it.

    `identifier` is the cell that was asked for (empty: the sidecar's). `python` is the interpreter with the ONNX
    Runtime that will serve (empty: this one); it names the cache's file. Only with `force` it writes into a folder that
    holds something else than a pack.

    Raises UsageError if the layout cannot take the program, or the folder holds something else.
    """
    require_fit(layout, sidecar)
    described, sidecar = text(sidecar), of_cell(sidecar, identifier or sidecar["identifier"])
    require_fit(layout, sidecar)
    if not force:
        _require_own(folder, f"{PurePosixPath(model_path(layout, sidecar)).parent.parent}/")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=SCRATCH, dir=folder) as scratch:
        made = Path(scratch) / "pack"
        made.mkdir()
        version = _fill(made, layout, sidecar, program, bring_model, python)
        (made / SIDECAR).write_bytes(signed.text if signed else described)
        index = PackIndex(
            schema=1,
            layout=str(layout),
            identifier=sidecar["identifier"],
            key=sidecar["key"],
            onnxruntime=version,
            files=list(_files(made)),
        )
        (made / PACK).write_text(json.dumps(index, indent=2) + "\n")
        if signed and signed.statements:
            (made / STATEMENTS).write_bytes(bundle_lines(signed.statements))
        _place(made, folder, force=force)
    return Pack(folder, index)


def _fill(made: Path, layout: Layout, sidecar: Sidecar, program: Path, bring_model: BringModel, python: str) -> str:
    """Write all but the index; return the version of the ONNX Runtime that was asked, if one was."""
    model = made / model_path(layout, sidecar)
    model.parent.mkdir(parents=True, exist_ok=True)
    cached = None
    if sidecar["spec"]["compiler"]["name"] != "migraphx":
        shutil.copyfile(program, model if layout is Layout.TRITON else made / sidecar["blobs"]["program"]["path"])
    elif layout not in CACHED:
        shutil.copyfile(program, made / sidecar["blobs"]["program"]["path"])
    else:
        source = bring_model(model.parent)
        content = fixed_model(source, sidecar)
        source.unlink()
        # The provider hashes the file's name, so it is the same in every pack.
        model.write_bytes(content)
        cached = ask_provider(model, sidecar["device"]["arch"], python)
        (made / "cache").mkdir()
        shutil.copyfile(program, made / "cache" / cached.name)
    for name, data in small_files(layout, sidecar, cached).items():
        (made / name).write_bytes(data)
        if name.endswith(".sh"):
            (made / name).chmod(0o755)
    return cached.version if cached else ""


def model_path(layout: Layout, sidecar: Sidecar) -> str:
    """Return where in a pack the file lies that ONNX Runtime opens as `model.onnx`."""
    return f"models/{_triton_name(sidecar)}/1/model.onnx" if layout is Layout.TRITON else "model.onnx"


def _triton_name(sidecar: Sidecar) -> str:
    return PurePosixPath(sidecar["blobs"]["program"]["path"]).stem.replace("--", "_").replace(".", "_")


def fixed_model(source: Path, sidecar: Sidecar) -> bytes:
    """Return a model with its program's sizes; its external data stays where it is. The same model, the same bytes.

    Raises UsageError if it is not a model, or does not have these sizes.
    """
    import onnx
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

    from farm.runner.onnx_models import drop_overridable_constants, fix_shapes

    try:
        model = onnx.load(str(source), load_external_data=False)
        drop_overridable_constants(model)
        fix_shapes(
            model,
            {
                port["name"]: {
                    "dtype": port["dtype"],
                    "shape": [size for size in port["shape"] if isinstance(size, int)],
                }
                for port in sidecar["inputs"]
            },
        )
    except RequestFailed as failure:
        raise UsageError(f"the model does not have the program's sizes: {failure.message}") from None
    except DecodeError as error:
        raise UsageError(f"what the work order calls the model is not one: {error}") from None
    return bytes(model.SerializeToString(deterministic=True))


def small_files(layout: Layout, sidecar: Sidecar, cached: CacheFile | None = None) -> dict[str, bytes]:
    """Return the files of a pack that follow from its sidecar, by their paths: all but programs and models.

    `cached` is what the provider looks for, for a layout that has a cache. The same sidecar gives the same bytes.
    """
    own_program, made = sidecar["spec"]["compiler"]["name"] != "migraphx", dict[str, bytes]()
    if layout is Layout.TRITON:
        name = _triton_name(sidecar)
        start = layouts.text("start_with_cache.sh", version=cached.version) if cached else layouts.plain_start(sidecar)
        texts = {f"models/{name}/config.pbtxt": layouts.triton_config(sidecar, name), "start.sh": start}
    else:
        named = partial(layouts.text, identifier=sidecar["identifier"])
        if own_program:
            use = layouts.for_own_program(sidecar)
        elif cached:
            use = named("use_cache.py.txt", name=cached.name, version=cached.version)
        else:
            use, made = named("use_plugin.py.txt"), {layouts.MODEL: layouts.wrapper(sidecar)}
        texts = {"use.py": use, "use.sh": layouts.text("use.sh")}
    return made | {path: text.encode() for path, text in texts.items()}


def _files(made: Path) -> Iterator[FileReference]:
    for path in sorted(path for path in made.rglob("*") if path.is_file()):
        digest, size = hash_file(path)
        yield FileReference(path=path.relative_to(made).as_posix(), digest=digest, size=size)


def _require_own(folder: Path, models: str) -> None:
    """Refuse a folder that holds something else than an earlier pack, or a Triton repository of another model.

    That one would go: an index is of one program. Raises UsageError.
    """
    if not os.path.lexists(folder):
        return
    if folder.is_dir() and all(entry.name.startswith(SCRATCH) for entry in folder.iterdir()):
        return
    try:
        read_index(folder)
    except ArtifactGone:
        hint = "choose another folder, or --force"
        raise UsageError(f"{folder} holds something else than a pack", hint=hint) from None
    there = [name for name in _named_before(folder) if name.startswith("models/") and not name.startswith(models)]
    if models.startswith("models/") and there:
        hint = "choose another folder (`tritonserver` takes several --model-repository), or --force to replace it"
        raise UsageError(f"{folder} is the repository of another model, {there[0].split('/')[1]}", hint=hint)


def _place(made: Path, folder: Path, *, force: bool) -> None:
    """Let the finished pack take the place of the one before, file by file, the index last; no link is followed.

    What only the pack before had goes, if it is as it was written. Other files stay, but not in a cache: it is replaced
    as a whole, so that it never holds the programs of two packs.

    Raises UsageError, with nothing changed, for a file in the way that no fetch has written, unless `force`.
    """
    before = _named_before(folder)
    wanted = {file["path"]: file["digest"] for file in _files(made)}
    cached = any(name.startswith(_CACHE) for name in wanted)
    if not force:
        foreign = [name for name, digest in wanted.items() if _in_the_way(folder, name, (digest, before.get(name)))]
        if cached and (folder / _CACHE).exists() and not any(name.startswith(_CACHE) for name in before):
            foreign.append(_CACHE)
        if foreign:
            hint = "choose another folder, or --force"
            raise UsageError(f"{folder / foreign[0]} exists, and no fetch has written it", hint=hint)
    for name in before.keys() - wanted.keys():
        if not _in_the_way(folder, name, (before[name],)):
            (folder / name).unlink(missing_ok=True)
            for parent in PurePosixPath(name).parents[:-1]:  # With the folders that it leaves empty.
                with suppress(OSError):
                    (folder / parent).rmdir()
    if cached:
        remove_tree(folder / _CACHE)
    for name in sorted(wanted, key=lambda name: (name == PACK, name)):
        _put(made / name, folder, name)


def _in_the_way(folder: Path, name: str, ours: Sequence[str | None]) -> bool:
    """Whether something lies there, or on the way there, that has none of our digests. An index and statements may."""
    try:
        return file_digest(folder / name, within=folder) not in ours and name not in (PACK, STATEMENTS)
    except OSError as error:
        return error.errno != errno.ENOENT


def _put(source: Path, folder: Path, name: str) -> None:
    """Move a file to its place, whatever is there."""
    for parent in reversed(PurePosixPath(name).parents[:-1]):
        place = folder / parent
        if place.is_symlink() or not place.is_dir():
            place.unlink(missing_ok=True)
            place.mkdir()
    target = folder / name
    if target.is_dir() and not target.is_symlink():
        remove_tree(target)
    source.replace(target)


def _named_before(folder: Path) -> dict[str, str]:
    """Return the digests of the files that the index of the pack in a folder names, by their paths in it."""
    try:
        named = {file["path"]: file["digest"] for file in read_index(folder)["files"]}
    except ArtifactGone:
        return {}
    parts = {name: PurePosixPath(name).parts for name in named}
    return {
        name: named[name] for name in named if parts[name] and not {"/", ".."} & {*parts[name]} and "\0" not in name
    }


def read_index(folder: Path) -> PackIndex:
    """Return the index of the pack in a folder. Raises ArtifactGone if there is none, or it is damaged."""
    try:
        index: PackIndex = json.loads(read_plain(folder / PACK, _LARGEST_INDEX))
        if index["schema"] != 1 or not all(
            isinstance(file["path"], str) and isinstance(file["digest"], str) for file in index["files"]
        ):
            raise TypeError
        return index
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ArtifactGone(f"{folder / PACK} is not an index of a pack: {type(error).__name__}") from None
