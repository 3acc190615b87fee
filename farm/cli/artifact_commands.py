"""Commands about artifacts: fetch, ls, tag."""

from __future__ import annotations

import difflib
import re
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from enum import StrEnum
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from farm.cli import completion, output, render
from farm.cli.connection import connect_or_start
from farm.client.packs import Layout
from farm.errors import NotFound, UsageError
from farm.inert import one_line

if TYPE_CHECKING:
    from farm.artifacts.refs import SnapshotCell
    from farm.client.client import FarmClient
    from farm.client.fetching import Fetched


Storage = Annotated[
    str, typer.Option("--from", metavar="STORAGE", help="Without the farm's API: s3://BUCKET, or a public URL.")
]


class Listing(StrEnum):
    """What `farm ls` lists."""

    ARTIFACTS = "artifacts"
    REFS = "refs"
    BUILDS = "builds"
    WORKERS = "workers"
    POOLS = "pools"


class Order(StrEnum):
    """By what `farm ls` sorts artifacts: the least first, of ages the newest."""

    NAME = "name"
    LATENCY = "latency"
    ERROR = "error"
    SIZE = "size"
    AGE = "age"


# --- fetch ------------------------------------------------------------------------------------------------------------


def fetch(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME[@REF]",
            help="A model, or a cell as builds print it; REF: a tag or a build.",
            autocompletion=completion.artifacts,
        ),
    ],
    target: Annotated[
        str,
        typer.Option(
            "--target",
            "-t",
            help="Such as gfx942, onnxruntime/cpu; `auto`: what fits here.",
            autocompletion=completion.targets,
        ),
    ] = "",
    precision: Annotated[
        str, typer.Option("--precision", "-p", help="Such as fp16, int8+fp16.", autocompletion=completion.precisions)
    ] = "",
    shape: Annotated[
        str | None,
        typer.Option(
            "--shape", "-s", help="Such as b8; needed if there are several.", autocompletion=completion.shapes
        ),
    ] = None,
    folder: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="Where to write the files.")] = Path(),
    toolchain: Annotated[str, typer.Option("--toolchain", help="The start of its id; default: the newest.")] = "",
    log: Annotated[bool, typer.Option("--log", help="Also fetch the compiler's log, and what `debug` kept.")] = False,
    with_kernels: Annotated[bool, typer.Option("--with-kernels", help="Also fetch MIOpen's kernel binaries.")] = False,
    sample: Annotated[bool, typer.Option("--sample", help="Also fetch one input with its expected outputs.")] = False,
    family: Annotated[
        bool, typer.Option("--family", help="Fetch every shape, and family.json, which lists them.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite files that no fetch has written.")] = False,
    batch: Annotated[
        int | None, typer.Option("--batch", min=1, metavar="N", help="With `auto`: samples that a run is to take.")
    ] = None,
    layout: Annotated[Layout, typer.Option("--layout", help="Write what a serving stack loads.")] = Layout.PLAIN,
    python: Annotated[
        str, typer.Option("--python", metavar="FILE", help="Interpreter whose ONNX Runtime will serve; default: this.")
    ] = "",
    any_name: Annotated[
        bool,
        typer.Option("--any-name", help="With a trust policy: also take what was signed under another model's name."),
    ] = False,
    source: Storage = "",
    as_json: output.Json = False,
) -> None:
    """Download a compiled program and check every byte.

    Writes the program and its sidecar, <program>.artifact.json, which says what it is; models and shapes may share a
    folder. With --layout it writes a pack: the files that ONNX Runtime or Triton loads, and what starts it.
    """
    from farm.client.fetching import split_name
    from farm.client.transport import split_ref

    cell, named = split_ref(name)
    model, *rest = split_name(cell)
    given = {"--target": target, "--precision": precision, "--shape": shape}
    for (option, value), part in zip(given.items(), rest, strict=True):
        plain = re.sub(r"[/+]", "-", value or "")
        if part and plain not in ("", part.replace("+", "-"), part.removeprefix("migraphx-")):
            raise UsageError(f"{cell} names {part}, and {option} says {value}", hint="leave out one of them")
    target, precision, shape = target or rest[0], precision or rest[1], shape or rest[2] or None
    for option, value in (("--target", target), ("--precision", precision)):
        if not value:
            raise UsageError(f"which {option.strip('-')}? add {option}", hint=f"or a whole name: `farm ls {model}`")
    if layout is not Layout.PLAIN and (family or log or with_kernels or sample):
        raise UsageError(f"--layout {layout} is one program: leave out --family, --log, --with-kernels and --sample")
    if batch is not None and (target != AUTO or shape or family):
        raise UsageError("--batch chooses a shape, only together with --target auto", hint="name the --shape")
    if family and (shape or with_kernels or sample):
        raise UsageError("--family fetches every shape: leave out --shape, --with-kernels and --sample")
    if family:
        with connected(source) as client:
            client.artifacts.any_name, ref = any_name, _ref(client, named)
            made = client.fetch_family(
                model, target, precision, ref=ref, folder=folder, toolchain=toolchain, log=log, force=force
            )
        for identifier in () if as_json else made.left_out:
            output.note(f"left out: {identifier} has another model file or toolchain")
        checked = f"{made.index}  {render.plural(len(made.document['members']), 'program')}, checked"
        document = {"index": str(made.index), **made.document, "left_out": made.left_out}
        output.result(document, [*render.family(made.document), checked], as_json=as_json)
        return
    with output.if_interrupted(KEPT), connected(source) as client:
        client.artifacts.on_download, client.artifacts.any_name = _Downloading(), any_name
        ref = _ref(client, named)
        if target == AUTO:
            best = _best_here(client, model, precision, ref=ref, shape=shape or "", batch=batch, layout=layout)
            target, shape, toolchain = best["target"], best["shape"], best["toolchain"]
        found = client.fetch(
            model,
            target,
            precision,
            shape,
            ref=ref,
            folder=folder,
            toolchain=toolchain,
            log=log,
            with_kernels=with_kernels,
            sample=sample,
            force=force,
            layout=layout,
            python=python,
        )
    _say_fetched(found, as_json=as_json)
    if not as_json and sample and not found.sample:
        output.note("the artifact has no sample: it was not verified")
    if not as_json and with_kernels and not found.kernels:
        output.note("the artifact has no kernel binaries: its first run used none of MIOpen's")


def _best_here(
    client: FarmClient, model: str, precision: str, *, ref: str, shape: str, batch: int | None, layout: Layout
) -> SnapshotCell:
    """Return the cell that fits this machine best, and say which would have come after it."""
    from farm.client.loading import fitting, said

    packed = layout is not Layout.PLAIN
    fits = fitting(client, model, precision, ref=ref, shape=shape, batch=batch, packed=packed)
    output.note(f"{fits[0].cell['identifier']}: {fits[0].why}")
    if next_best := said(fits):
        output.note(f"next best: {next_best}")
    return fits[0].cell


def connected(source: str) -> AbstractContextManager[FarmClient]:
    """Return a client of the farm's API, or of the object storage that `--from` names."""
    if not source:
        return connect_or_start()
    from farm.cli.connection import connect_to_storage

    return connect_to_storage(source)


KEPT = "no file is half written; what was downloaded is kept, and the next fetch goes on from there"
AUTO = "auto"
"""Stands for the target that fits this machine best."""


class _Downloading:
    """Says how far the download of a large file is, once in a while."""

    def __init__(self) -> None:
        self._next = 0.0

    def __call__(self, done: int, total: int) -> None:
        """Note the bytes that are here."""
        now = time.monotonic()
        self._next = self._next or now + PROGRESS_EVERY
        if now >= self._next:
            self._next = now + PROGRESS_EVERY
            output.note(f"fetching: {render.size(done)} of {render.size(total)}")


PROGRESS_EVERY = 2.0
"""Seconds between two lines about a download."""


def _say_fetched(found: Fetched, *, as_json: bool) -> None:
    names = ("program", "sidecar", "log", "kernels", "sample")
    paths = {name: str(path) if (path := getattr(found, name)) else None for name in names}
    pack = {"pack": found.pack.index} if found.pack else {}
    program = found.artifact["blobs"]["program"]
    said = [
        f"{found.program}  {render.size(program['size'])}  sha256 {program['digest'][:16]}…  checked",
        f"{found.sidecar}  {found.artifact['identifier']}, {found.artifact['toolchain']}",
        *map(str, found.pack.files if found.pack else ()),
    ]
    if found.pack and (version := found.pack.index["onnxruntime"]):
        said.append(f"for ONNX Runtime {version}: another version may look for another file, and compile it")
    said += [str(text) for text in (found.log, *found.texts) if text]
    if found.sample:
        said.append(f"{found.sample}  one input with its expected outputs")
    if found.kernels:
        said.append(f"{found.kernels}  if you set MIOPEN_CUSTOM_CACHE_DIR to it, the first run builds no kernels")
    named = {"key": found.artifact["key"], "identifier": found.artifact["identifier"]}
    output.result({**paths, **named, **pack}, said, as_json=as_json)


def ls(
    what: Annotated[
        str,
        typer.Argument(
            metavar="WHAT|TEXT",
            help="artifacts, refs, builds, workers or pools; or part of a name.",
            autocompletion=completion.listings,
        ),
    ] = "artifacts",
    ref: Annotated[
        str, typer.Option("--ref", help="List the artifacts of this ref.", autocompletion=completion.refs)
    ] = "latest",
    sort: Annotated[Order, typer.Option("--sort", help="Sort artifacts by it, the least first, or the newest.")] = (
        Order.NAME
    ),
    limit: Annotated[int | None, typer.Option("--limit", "-n", min=1, metavar="N", help="How many to list.")] = None,
    source: Storage = "",
    as_json: output.Json = False,
) -> None:
    """List artifacts, refs, builds, workers or pools.

    Any other word lists the artifacts with it in their names. Without the API there are artifacts only.
    """
    listing = Listing(what) if what in {each.value for each in Listing} else Listing.ARTIFACTS
    with connected(source) as client:
        ref = _ref(client, ref) if listing is Listing.ARTIFACTS else ref
        items = _SOURCES[listing](client, ref)
        for line in client.workers.troubles() if listing is Listing.WORKERS else ():
            output.note(one_line(line))
    if what != listing:
        names = sorted({str(cell["model"]) for cell in items})
        items = [cell for cell in items if what in cell["identifier"]]
        if not items:
            near = difflib.get_close_matches(what, [*Listing, *names], 1)
            hint = f"did you mean `{near[0]}`?" if near else f"it has {', '.join(names[:10]) or 'nothing'}"
            raise NotFound(f"no artifact of {ref} has {what!r} in its name", hint=hint)
    if listing is Listing.ARTIFACTS and sort is not Order.NAME:
        items = sorted(items, key=_ORDERS[sort])
    items = items[:limit]
    # As the API answers: the tags, and where each points.
    tags = {"items": [ref["tag"] for ref in items], "refs": items} if listing is Listing.REFS else {}
    rows = render.builds(items) if listing is Listing.BUILDS else [_HEADERS[listing], *map(_ROWS[listing], items)]
    how = ": farm submit MANIFEST" if listing is Listing.BUILDS else ""
    output.table(rows, f"no {listing} yet{how}", {"items": items, **tags}, as_json=as_json)


def tag(
    name: Annotated[str, typer.Argument(metavar="REF", help="Such as prod.", autocompletion=completion.refs)],
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE", help="Point REF to what this ref or build names.", autocompletion=completion.refs
        ),
    ] = "",
    previous: Annotated[bool, typer.Option("--previous", help="Point REF to what it named before.")] = False,
    delete: Annotated[bool, typer.Option("--delete", help="Delete REF; the artifacts that it names stay.")] = False,
    generation: Annotated[
        int | None,
        typer.Option(
            "--generation", min=0, metavar="N", help="Only if REF has this generation; 0: only if REF is new."
        ),
    ] = None,
    as_json: output.Json = False,
) -> None:
    """Show where a ref points, or move it.

    `farm tag prod latest` points `prod` to what `latest` names now; `prod` stays there when `latest` moves on.
    """
    if sum(map(bool, (source, previous, delete))) > 1:
        raise UsageError("choose one of SOURCE, --previous and --delete")
    if generation is not None and not (source or previous or delete):
        raise UsageError("--generation works only together with a move", hint="add SOURCE, --previous or --delete")
    with connect_or_start() as client:
        if delete:
            client.refs.remove(name, generation=generation)
            output.result({"tag": name, "deleted": True}, f"{name} is deleted", as_json=as_json)
            return
        if source or previous:
            client.refs.move(name, _ref(client, source) if source else name, previous=previous, generation=generation)
        found = client.refs.get(name)
    cells = render.plural(len(found["cells"]), "cell")
    said = f"{name}: {cells}, generation {found['generation']}, moved {found['moved']}"
    output.result(found, said, as_json=as_json)


def _ref(client: FarmClient, named: str) -> str:
    """Return a tag or a build's id; `@latest`, a label (K=V) and a git commit name builds."""
    if named.startswith("@") or "=" in named or re.fullmatch(r"[0-9a-f]{17,64}", named):
        return client.find_build(named)
    return named or "latest"


_SOURCES: dict[Listing, Callable[[FarmClient, str], Sequence[Any]]] = {
    Listing.ARTIFACTS: lambda client, ref: client.ls(ref),
    Listing.REFS: lambda client, _: client.refs.moves(),
    Listing.BUILDS: lambda client, _: client.builds(),
    Listing.WORKERS: lambda client, _: client.workers.all(),
    Listing.POOLS: lambda client, _: client.pools.all(),
}

_ORDERS: dict[Order, Callable[[SnapshotCell], float]] = {
    Order.LATENCY: lambda cell: cell.get("latency") or inf,
    Order.ERROR: lambda cell: inf if (error := cell.get("error")) is None else error,
    Order.SIZE: lambda cell: cell["program"]["size"],
    Order.AGE: lambda cell: -cell["submitted"],
}

_HEADERS: dict[Listing, tuple[str, ...]] = {
    Listing.ARTIFACTS: ("ARTIFACT", "LATENCY", "ERROR", "SIZE", "SUBMITTED (UTC)", "TOOLCHAIN", "KEY"),
    Listing.REFS: ("REF", "GENERATION", "MOVED (UTC)", "NAMESPACE"),
    Listing.WORKERS: ("WORKER", "SLOTS", "RUNNING", "POOLS", ""),
    Listing.POOLS: ("POOL", "LIVE WORKERS", "SLOTS", "RUNNING", "WAITING", ""),
}

_ROWS: dict[Listing, Callable[[Any], tuple[str, ...]]] = {
    Listing.ARTIFACTS: lambda cell: (
        cell["identifier"],
        "~" * bool(cell.get("shared")) + render.duration(cell["latency"]) if cell.get("latency") else "",
        render.error(cell.get("error")),
        render.size(cell["program"]["size"]),
        render.when(cell.get("submitted")),
        cell["toolchain"],
        cell["key"][:12],
    ),
    Listing.REFS: lambda ref: (
        str(ref["tag"]),
        str(ref["generation"]),
        "damaged" if ref.get("damaged") else render.minute(str(ref["moved"])),
        str(ref["namespace"]),
    ),
    Listing.WORKERS: lambda worker: (
        str(worker["id"]),
        str(worker["slots"]),
        str(len(worker["running"]) + worker.get("running_others", 0)),
        ", ".join(worker["pools"]),
        "draining" if worker["draining"] else f"fenced: {worker['fenced']}" if worker["fenced"] else worker["resting"],
    ),
    Listing.POOLS: lambda pool: (
        str(pool["name"]),
        str(pool["live_workers"]),
        str(pool["slots"]),
        str(pool["running"]),
        str(pool["waiting"]),
        "paused" if pool["paused"] else "",
    ),
}
