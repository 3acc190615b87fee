"""Commands about artifacts: fetch, ls, tag, inspect."""

from __future__ import annotations

import difflib
import re
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast, get_args

import typer
from typer import Option

from farm.cli import connection, output, render
from farm.cli.connection import connect_or_start, offering
from farm.client.inspection import TooLarge, disagreements, faults, inspect_program
from farm.client.packs import SIDECAR, Layout
from farm.errors import ArtifactGone, ExitCode, NotFound, UsageError
from farm.inert import one_line

if TYPE_CHECKING:
    from farm.artifacts.refs import SnapshotCell
    from farm.client.client import FarmClient
    from farm.client.fetching import Fetched
    from farm.runner.documents import Verification
    from farm.runner.mxr import ProgramContent, StoredPort
    from farm.wire.program import FoundDevice, Measurements, Port, Sidecar, TuningFacts


Listing = Literal["artifacts", "refs", "builds", "workers", "pools"]
Order = Literal["name", "latency", "error", "size", "age"]  # Of artifacts: the least first, of ages the newest.
Storage = Annotated[
    str, Option("--from", metavar="STORAGE", help="Without the farm's API: s3://BUCKET, or a public URL.")
]


# --- fetch ------------------------------------------------------------------------------------------------------------


def fetch(
    name: Annotated[
        str,
        offering("NAME[@REF]", "A model, or a cell as builds print it; REF: a tag or a build.", connection.artifacts),
    ],
    target: Annotated[
        str,
        Option(
            "--target",
            "-t",
            help="Such as gfx942, onnxruntime/cpu; `auto`: what fits here.",
            autocompletion=connection.targets,
        ),
    ] = "",
    precision: Annotated[
        str, Option("--precision", "-p", help="Such as fp16, int8+fp16.", autocompletion=connection.precisions)
    ] = "",
    shape: Annotated[
        str | None,
        Option("--shape", "-s", help="Such as b8; needed if there are several.", autocompletion=connection.shapes),
    ] = None,
    folder: Annotated[Path, Option("--output", "-o", metavar="DIR", help="Where to write the files.")] = Path(),
    toolchain: Annotated[str, Option(help="The start of its id; default: the newest.")] = "",
    log: Annotated[bool, Option("--log", help="Also fetch the compiler's log, and what `debug` kept.")] = False,
    with_kernels: Annotated[bool, Option("--with-kernels", help="Also fetch MIOpen's kernel binaries.")] = False,
    sample: Annotated[bool, Option("--sample", help="Also fetch one input with its expected outputs.")] = False,
    family: Annotated[bool, Option("--family", help="Fetch every shape, and family.json, which lists them.")] = False,
    force: Annotated[bool, Option("--force", help="Overwrite files that no fetch has written.")] = False,
    batch: Annotated[int | None, Option(min=1, metavar="N", help="With `auto`: samples that a run is to take.")] = None,
    layout: Annotated[Layout, Option(help="Write what a serving stack loads.")] = Layout.PLAIN,
    python: Annotated[
        str, Option(metavar="FILE", help="Interpreter whose ONNX Runtime will serve; default: this.")
    ] = "",
    any_name: Annotated[
        bool, Option("--any-name", help="With a trust policy: also take what was signed under another model's name.")
    ] = False,
    source: Storage = "",
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
        with connect_or_start(source) as client:
            client.artifacts.any_name, ref = any_name, _ref(client, named)
            made = client.fetch_family(
                model, target, precision, ref=ref, folder=folder, toolchain=toolchain, log=log, force=force
            )
        for identifier in () if output.as_json() else made.left_out:
            output.note(f"left out: {identifier} has another model file or toolchain")
        checked = f"{made.index}  {render.plural(len(made.document['members']), 'program')}, checked"
        document = {"index": str(made.index), **made.document, "left_out": made.left_out}
        output.result(document, [*render.family(made.document), checked])
        return
    with output.if_interrupted(KEPT), connect_or_start(source) as client:
        client.artifacts.on_download, client.artifacts.any_name = output.progress("fetching"), any_name
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
    _say_fetched(found)
    if sample and not found.sample and not output.as_json():
        output.note("the artifact has no sample: it was not verified")
    if with_kernels and not found.kernels and not output.as_json():
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


KEPT = "no file is half written; what was downloaded is kept, and the next fetch goes on from there"
AUTO = "auto"  # Stands for the target that fits this machine best.


def _say_fetched(found: Fetched) -> None:
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
    output.result({**paths, "key": found.artifact["key"], "identifier": found.artifact["identifier"], **pack}, said)


def _listings(incomplete: str) -> list[str]:
    return [each for each in get_args(Listing) if each.startswith(incomplete)]


def ls(
    what: Annotated[
        str, offering("WHAT|TEXT", "artifacts, refs, builds, workers or pools; or part of a name.", _listings)
    ] = "artifacts",
    ref: Annotated[str, Option(help="List the artifacts of this ref.", autocompletion=connection.refs)] = "latest",
    sort: Annotated[Order, Option(help="Sort artifacts by it, the least first, or the newest.")] = "name",
    limit: Annotated[int | None, Option("--limit", "-n", min=1, metavar="N", help="How many to list.")] = None,
    source: Storage = "",
) -> None:
    """List artifacts, refs, builds, workers or pools.

    Any other word lists the artifacts with it in their names. Without the API there are artifacts only.
    """
    listing: Listing = cast("Listing", what) if what in get_args(Listing) else "artifacts"
    with connect_or_start(source) as client:
        ref = _ref(client, ref) if listing == "artifacts" else ref
        items = _SOURCES[listing](client, ref)
        for line in client.workers.troubles() if listing == "workers" else ():
            output.note(one_line(line))
    if what != listing:
        names = sorted({str(cell["model"]) for cell in items})
        items = [cell for cell in items if what in cell["identifier"]]
        if not items:
            near = difflib.get_close_matches(what, [*get_args(Listing), *names], 1)
            hint = f"did you mean `{near[0]}`?" if near else f"it has {', '.join(names[:10]) or 'nothing'}"
            raise NotFound(f"no artifact of {ref} has {what!r} in its name", hint=hint)
    if listing == "artifacts" and sort != "name":
        items = sorted(items, key=_ORDERS[sort])
    items = items[:limit]
    # As the API answers: the tags, and where each points.
    tags = {"items": [ref["tag"] for ref in items], "refs": items} if listing == "refs" else {}
    listed = [_ROWS[listing](item) for item in items] if listing != "builds" else []
    rows = [*map(tuple, listed[:1]), *(tuple(row.values()) for row in listed)] or render.builds(items)
    how = ": farm submit MANIFEST" if listing == "builds" else ""
    output.table(rows, f"no {listing} yet{how}", {"items": items, **tags})


def tag(
    name: Annotated[str, offering("REF", "Such as prod.", connection.refs)],
    source: Annotated[str, offering("SOURCE", "Point REF to what this ref or build names.", connection.refs)] = "",
    previous: Annotated[bool, Option("--previous", help="Point REF to what it named before.")] = False,
    delete: Annotated[bool, Option("--delete", help="Delete REF; the artifacts that it names stay.")] = False,
    generation: Annotated[
        int | None, Option(min=0, metavar="N", help="Only if REF has this generation; 0: only if REF is new.")
    ] = None,
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
            output.result({"tag": name, "deleted": True}, f"{name} is deleted")
            return
        if source or previous:
            client.refs.move(name, _ref(client, source) if source else name, previous=previous, generation=generation)
        found = client.refs.get(name)
    cells = render.plural(len(found["cells"]), "cell")
    output.result(found, f"{name}: {cells}, generation {found['generation']}, moved {found['moved']}")


def _ref(client: FarmClient, named: str) -> str:
    """Return a tag or a build's id; `@latest`, a label (K=V) and a git commit name builds."""
    if named.startswith("@") or "=" in named or re.fullmatch(r"[0-9a-f]{17,64}", named):
        return client.find_build(named)
    return named or "latest"


_SOURCES: dict[Listing, Callable[[FarmClient, str], Sequence[Any]]] = {
    "artifacts": lambda client, ref: client.ls(ref),
    "refs": lambda client, _: client.refs.moves(),
    "builds": lambda client, _: client.builds(),
    "workers": lambda client, _: client.workers.all(),
    "pools": lambda client, _: client.pools.all(),
}

_ORDERS: dict[Order, Callable[[SnapshotCell], float]] = {
    "latency": lambda cell: cell.get("latency") or inf,
    "error": lambda cell: inf if (error := cell.get("error")) is None else error,
    "size": lambda cell: cell["program"]["size"],
    "age": lambda cell: -cell["submitted"],
}

_ROWS: dict[Listing, Callable[[Any], dict[str, str]]] = {
    "artifacts": lambda cell: {
        "ARTIFACT": cell["identifier"],
        "LATENCY": "~" * bool(cell.get("shared")) + render.duration(cell["latency"]) if cell.get("latency") else "",
        "ERROR": render.error(cell.get("error")),
        "SIZE": render.size(cell["program"]["size"]),
        "SUBMITTED (UTC)": render.when(cell.get("submitted")),
        "TOOLCHAIN": cell["toolchain"],
        "KEY": cell["key"][:12],
    },
    "refs": lambda ref: {
        "REF": str(ref["tag"]),
        "GENERATION": str(ref["generation"]),
        "MOVED (UTC)": "damaged" if ref.get("damaged") else render.minute(str(ref["moved"])),
        "NAMESPACE": str(ref["namespace"]),
    },
    "workers": lambda worker: {
        "WORKER": str(worker["id"]),
        "SLOTS": str(worker["slots"]),
        "RUNNING": str(len(worker["running"]) + worker.get("running_others", 0)),
        "POOLS": ", ".join(worker["pools"]),
        "": "draining" if worker["draining"] else f"fenced: {why}" if (why := worker["fenced"]) else worker["resting"],
    },
    "pools": lambda pool: {
        "POOL": str(pool["name"]),
        "LIVE WORKERS": str(pool["live_workers"]),
        "SLOTS": str(pool["slots"]),
        "RUNNING": str(pool["running"]) + f", {pool['uploading']} uploading" * bool(pool["uploading"]),
        "WAITING": str(pool["waiting"]),
        "": "paused" if pool["paused"] else "",
    },
}
"""What a list says of each item, by the titles of the columns."""


# --- inspect: what a compiled program is ------------------------------------------------------------------------------


def inspect(
    what: Annotated[
        str, offering("FILE|KEY|CELL", "A program, an artifact.json, or a stored artifact.", connection.stored)
    ],
    program: Annotated[
        bool, Option("--program", help="Download the program of a stored artifact, and show its content.")
    ] = False,
    source: Storage = "",
) -> None:
    """Show what a compiled program is; its compiler is not needed.

    A file (.mxr, MIGraphX's .json, .onnx) is compared with the <program>.artifact.json next to it; any disagreement
    ends with exit code 39. An artifact.json, a cache key (or its start) or a cell of a ref (`net/migraphx-cpu/fp16/b8`,
    `…@prod`) shows what the farm recorded about the artifact.
    """
    path = Path(what)
    if path.exists():
        _show_inspected(*sidecar_and_program(path))
        return
    if path.suffix in (".mxr", ".json", ".onnx"):
        raise NotFound(f"no file {what}", hint="name a program or an artifact.json")
    with connect_or_start(source) as client:
        sidecar = client.artifacts.get(key_of(client, what))
        if not program:
            _show_inspected(sidecar, None)
            return
        with tempfile.TemporaryDirectory() as folder:
            file = client.artifacts.download(sidecar["blobs"]["program"], Path(folder))
            _show_inspected(sidecar, file)


def key_of(client: FarmClient, what: str) -> str:
    """Return the cache key for a key, the start of a key, or a cell of a ref."""
    if re.fullmatch(r"[0-9a-f]{64}", what):
        return what
    from farm.client.transport import split_ref

    name, ref = split_ref(what)
    cells = client.ls(ref or "latest") if "/" in name or re.fullmatch(r"[0-9a-f]{4,63}", name) else []
    keys = sorted({cell["key"] for cell in cells if cell["identifier"] == name or cell["key"].startswith(name)})
    if not keys:
        hint = "name a file, a cell, or the start of a cache key, as `farm ls --json` lists them"
        raise NotFound(f"no file {what}, and {ref or 'latest'} has no such cell or key", hint=hint)
    if len(keys) > 1:
        raise UsageError(f"{what} matches {len(keys)} artifacts", hint=", ".join(key[:16] for key in keys[:5]))
    return keys[0]


def sidecar_and_program(path: Path) -> tuple[Sidecar | None, Path | None]:
    """Return the sidecar at a path or next to it, and the program; either may be missing."""
    from farm.client.fetching import LARGEST_SIDECAR, program_path, sidecar_path

    if path.is_dir():
        found = sorted(path.glob(f"*{SIDECAR}"))
        if len(found) > 1:
            raise UsageError(f"{path} holds {len(found)} programs", hint=f"name one of them: {found[0]}")
        path = found[0] if found else path / SIDECAR
    if path.name.endswith(SIDECAR):
        return _read_sidecar(path), None
    if path.suffix == ".json" and path.stat().st_size <= LARGEST_SIDECAR:
        # MIGraphX writes programs as .json too, and a sidecar may have another name.
        with suppress(ArtifactGone):
            return _read_sidecar(path), None
    own = sidecar_path(path)
    document = own if own.exists() else path.with_name(SIDECAR)  # In a pack.
    if not document.exists():
        return None, path
    sidecar = _read_sidecar(document)
    program = sidecar["blobs"]["program"]
    described = program_path(document, program["path"], program["digest"])
    if described != path:
        output.note(f"{document} describes {described.name}, not {path.name}: not compared")
        return None, path
    return sidecar, path


def sidecars_in(folder: Path) -> list[Path]:
    """Return the sidecars in a folder and in the folders below it, as `fetch` writes families."""
    return sorted([*folder.glob(f"*{SIDECAR}"), *folder.glob(f"*/*{SIDECAR}")])


def _read_sidecar(path: Path) -> Sidecar:
    from farm.client.fetching import read_sidecar

    try:
        return read_sidecar(path.read_bytes(), str(path))
    except FileNotFoundError:
        raise NotFound(f"no {path}", hint="`farm fetch` writes it next to the program") from None


def _show_inspected(sidecar: Sidecar | None, file: Path | None) -> None:
    found, wrong = None, []
    if file:
        try:
            found = inspect_program(file)
        except UsageError as error:
            if sidecar is None:
                raise
            if isinstance(error, TooLarge):
                output.note(error.message)
            else:
                wrong.append(error.message)
        wrong += disagreements(sidecar, found, file) if sidecar else []
    broken = faults(found) if found else []
    lines = describe(sidecar) if sidecar and not output.as_json() else []
    if found and file:
        lines += [*([""] if lines else []), *describe_program(file.name, found)]
    inside = {"found": found, "disagreements": wrong, "faults": broken} if file else {}
    output.result({**(sidecar or {}), **inside}, lines)
    for line in [*wrong, *broken]:
        output.note(f"wrong: {one_line(line)}")
    if wrong or broken:
        raise typer.Exit(int(ExitCode.ARTIFACT_GONE))


def describe(sidecar: Sidecar) -> list[str]:
    """Return a sidecar for people."""
    spec, blobs, measured, tuning = sidecar["spec"], sidecar["blobs"], sidecar["measurements"], sidecar["tuning"]
    checked, latency = sidecar["verification"], measured["latency"]
    tail = f", p99 {render.duration(latency['p99'])}" if latency and latency["p99"] else ""
    shared = ", not measured alone" if measured["shared"] else ""
    firsts = {"cold": measured["first_run_cold"], "warm": measured["first_run_warm"]}
    texts = {"before": blobs["before"], "after": blobs["after"]}
    build = f", build {sidecar['build']}" if sidecar["build"] else ""
    rows = [
        ("program", f"{blobs['program']['path']}, {render.size(blobs['program']['size'])}"),
        ("sha256", blobs["program"]["digest"]),
        ("key", sidecar["key"]),
        ("model", f"{spec['model'].get('format', '')} {spec['model'].get('digest', '')}".strip()),
        ("compiler", f"{spec['compiler'].get('name', '')}, {sidecar['toolchain']}"),
        ("device", _device(sidecar["device"])),
        ("precision", spec["precision"]),
        *[("input", _port(port)) for port in sidecar["inputs"]],
        *[("output", _port(port)) for port in sidecar["outputs"]],
        ("quantized", ", ".join(f"{count} {name}" for name, count in sorted(sidecar["quantized"].items()))),
        ("latency", f"{render.duration(latency['median'])}{tail}{shared}" if latency else ""),
        *(_tuning_rows(tuning, measured) if tuning["operations"] is not None else ()),
        *render.not_alone(tuning["conditions"], "tuning"),
        *render.not_alone(measured["conditions"], "measuring"),
        ("load", render.duration(measured["load"])),
        ("first run", ", ".join(f"{render.duration(each)} {how}" for how, each in firsts.items() if each is not None)),
        *(_checked_rows(checked) if checked else [("verified", "no")]),
        ("memory", f"{render.size(sidecar['peak_memory'])} to compile" if sidecar["peak_memory"] else ""),
        *[("pass", f"{render.duration(took)}  {name}") for name, took in list(sidecar["passes"].items())[:PASS_ROWS]],
        *[
            (f"text {when}", f"{blob['path']}, {render.size(blob['size'])}; `farm fetch --log` downloads it")
            for when, blob in texts.items()
            if blob
        ],
        ("made", f"{sidecar['created']} in {render.duration(sidecar['seconds'])}{build}"),
    ]
    return [sidecar["identifier"], *output.facts(rows)]


def _checked_rows(checked: Verification) -> list[tuple[str, str]]:
    """Return what the program was compared with, and how it compares."""
    weak = ", weak evidence" if checked["weak"] else ""
    who = ", ".join(dict.fromkeys(checked["origin"].values())) or checked["reference"] or "a reference"
    is_checked = checked["errors"] or checked["equal"] or not checked["unverified"]
    return [
        ("checked", f"against {who}, {render.plural(checked['samples'], 'sample')}{weak}" if is_checked else ""),
        *[("refused", f"{name}: {why}") for name, why in checked["refused"].items()],
        *[("unverified", f"{name}: {why}") for name, why in checked["unverified"].items()],
        *[("doubted", f"{name}: {why}") for name, why in checked.get("doubted", {}).items()],
        *[("error", f"{name}: {error:.2e}") for name, error in checked["errors"].items()],
        *[("equal", f"{name}: {share:.2%}") for name, share in checked["equal"].items()],
    ]


def _device(device: FoundDevice) -> str:
    """Return a device as one line: `AMD Instinct MI300X, gfx942:sramecc+:xnack-, 304 CUs, SPX, 206 GB, driver 6.12`."""
    words = [
        device["model"],
        device["arch"],
        f"{device['compute_units']} CUs" if device["compute_units"] else "",
        device["partition"],
        render.size(device["memory"]) if device["memory"] else "",
        f"driver {device['driver']}" if device["driver"] else "",
    ]
    return ", ".join(filter(None, words))


def _tuning_rows(tuning: TuningFacts, measured: Measurements) -> list[tuple[str, str]]:
    """Describe what was tuned, and the gain."""
    ended = "" if tuning["finished"] else ", cut short by its budget"
    rows = [("tuning", f"{tuning['mode']}: {render.tuned(tuning)}{ended}")]
    if tuning["rows"]:
        rows.append(("tuning rows", f"{', '.join(digest[:12] for digest in tuning['rows'])} of {tuning['database']}"))
    if measured["ratio"] and measured["interval"]:
        low, high = measured["interval"]
        published = "" if tuning["published"] == "tuned" else "; the untuned program is published"
        rows.append(("gain", f"{measured['ratio']:.2f}x the untuned program ({low:.2f} to {high:.2f}){published}"))
    if alone := tuning["alone"]:
        low, high = alone["interval"]
        text = f"{'yes' if tuning['carried'] else 'no'}: without the databases {alone['ratio']:.2f}x the speed"
        rows.append(("carried", f"{text} ({low:.2f} to {high:.2f}), {tuning['written']} records written"))
    if against := measured["against"]:
        low, high = against["interval"]
        text = f"{against['ratio']:.2f}x the program {against['key'][:12]} ({low:.2f} to {high:.2f})"
        rows.append(("against", f"{text}: {against['verdict']}"))
    if tuning["session"]:
        rows.append(("run with", ", ".join(f"{name} {value}" for name, value in tuning["session"].items())))
    return rows


PASS_ROWS = 10
OPERATOR_ROWS = 30


def describe_program(name: str, program: ProgramContent) -> list[str]:
    """Return the content of a program's file for people."""
    rows = [("format", f"{program['format']}, {render.size(program['size'])}")]
    if program["format"] == "onnx":
        opsets = [f"{domain or 'ai.onnx'} {opset}" for domain, opset in program["opsets"].items()]
        rows.append(("opset", ", ".join(opsets)))
    else:
        rows.append(("made by", f"MIGraphX {program['migraphx_version']}, file version {program['file_version']}"))
        copies = {True: ", copies its inputs and outputs", False: ", leaves copies to the caller", None: ""}
        state = f"{', '.join(program['targets'])}{copies[program['offload_copy']]}" if program["compiled"] else "none"
        rows.append(("compiled for", state))
    rows += [("input", _port(port)) for port in program["inputs"]]
    rows += [("output", _port(port)) for port in program["outputs"]]
    weights = program["weights"]
    parts = ", ".join(f"{render.size(count)} {dtype}" for dtype, count in weights.items())
    total = f"{render.size(sum(weights.values()))}{f': {parts}' if len(weights) > 1 else ''}"
    rows.append(("weights", total if weights else "none"))
    for code in program.get("code_objects", ()):
        kernels = f"{render.plural(code['count'], 'code object')} for {', '.join(code['arches'])}"
        waves = " and ".join(map(str, code["wave_sizes"]))
        rows.append(("kernels", f"{kernels}{waves and f', wave{waves}'}, {render.size(code['size'])}"))
    for solution in program.get("solutions", ()):
        rows.append(("library", f"{solution['operator']} solution {solution['solution']}, {solution['count']} times"))
    rows.append(("behind it", f"{program['trailing']} bytes after the program" if program.get("trailing") else ""))
    for module, content in program["modules"].items():
        counts = sorted(content["operators"].items(), key=lambda item: (-item[1], item[0]))
        rows += [(f"in {module}", f"{count} {operator}") for operator, count in counts[:OPERATOR_ROWS]]
        if len(counts) > OPERATOR_ROWS:
            rows.append((f"in {module}", f"and {len(counts) - OPERATOR_ROWS} more: --json lists all"))
    return [name, *output.facts(rows)]


def _port(port: Port | StoredPort) -> str:
    sizes = "of any shape" if port["shape"] is None else f"[{', '.join(map(str, port['shape']))}]"
    return f"{port.get('name', '-')}: {port['dtype']} {sizes}"
