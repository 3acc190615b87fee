"""Commands about artifacts: fetch, ls, inspect."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from farm.cli import output, render
from farm.cli.connection import connect
from farm.errors import ArtifactGone, NotFound, UsageError

if TYPE_CHECKING:
    from farm.client import FarmClient


class Listing(StrEnum):
    """What `farm ls` lists."""

    ARTIFACTS = "artifacts"
    REFS = "refs"
    BUILDS = "builds"
    WORKERS = "workers"
    POOLS = "pools"


def fetch(
    name: Annotated[str, typer.Argument(metavar="NAME[@REF]", help="A model's name; REF is `latest`.")],
    target: Annotated[str, typer.Option("--target", "-t", help="Such as gfx942, onnxruntime/cpu.")],
    precision: Annotated[str, typer.Option("--precision", "-p", help="Such as fp16, int8+fp16.")],
    shape: Annotated[str | None, typer.Option("--shape", "-s", help="Such as b8, if there are several.")] = None,
    folder: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="Where to write the files.")] = Path(),
    toolchain: Annotated[str, typer.Option("--toolchain", help="The start of its id; else the newest.")] = "",
    log: Annotated[bool, typer.Option("--log", help="The compiler's log too.")] = False,
    family: Annotated[bool, typer.Option("--family", help="Every shape, and family.json, which lists them.")] = False,
    as_json: output.Json = False,
) -> None:
    """Download a compiled program and check every byte.

    Writes the program and its sidecar, artifact.json, which says what it is.
    """
    model, _, ref = name.partition("@")
    if family:
        if shape:
            raise UsageError("--family is every shape: leave out --shape")
        with connect() as client:
            made = client.fetch_family(
                model, target, precision, ref=ref or "latest", folder=folder, toolchain=toolchain, log=log
            )
        if as_json:
            output.emit({"index": str(made.index), **made.document})
            return
        for line in render.family(made.document):
            output.say(line)
        output.say(f"{made.index}  {render.plural(len(made.document['members']), 'program')}, checked")
        return
    with connect() as client:
        found = client.fetch(
            model, target, precision, shape, ref=ref or "latest", folder=folder, toolchain=toolchain, log=log
        )
    if as_json:
        files = {"program": found.program, "sidecar": found.sidecar, "log": found.log}
        paths = {name: str(path) if path else None for name, path in files.items()}
        output.emit({**paths, "key": found.artifact["key"], "identifier": found.artifact["identifier"]})
        return
    program = found.artifact["blobs"]["program"]
    output.say(f"{found.program}  {render.size(program['size'])}  sha256 {program['digest'][:16]}…  checked")
    output.say(f"{found.sidecar}  {found.artifact['identifier']}, {found.artifact['toolchain']}")
    if found.log:
        output.say(str(found.log))


def ls(
    what: Annotated[Listing, typer.Argument(help="What to list.")] = Listing.ARTIFACTS,
    ref: Annotated[str, typer.Option("--ref", help="The ref whose artifacts are listed.")] = "latest",
    as_json: output.Json = False,
) -> None:
    """List artifacts, refs, builds, workers or pools."""
    with connect() as client:
        items = _SOURCES[what](client, ref)
    if as_json:
        output.emit({"items": items})
    elif items:
        rows = [_ROWS[what](item) for item in items]
        for line in render.align(rows):
            output.say(line)
    else:
        output.note(f"no {what} yet")


def inspect(
    what: Annotated[str, typer.Argument(metavar="KEY|FILE", help="A cache key, an artifact.json, or a program.")],
    as_json: output.Json = False,
) -> None:
    """Show what an artifact is.

    What was compiled and for which device, how fast it is and how accurate. A program is checked against its sidecar.
    """
    path = Path(what)
    if path.exists():
        sidecar = _local_sidecar(path)
    elif re.fullmatch(r"[0-9a-f]{4,64}", what):
        with connect() as client:
            sidecar = client.artifact(_whole_key(client, what))
    else:
        raise NotFound(f"no file {what}, and it is no cache key", hint="a cache key is 64 hex digits; 4 may do")
    if as_json:
        output.emit(sidecar)
        return
    for line in describe(sidecar):
        output.say(line)


# --- how they do it -------------------------------------------------------------------------------------------------


def _whole_key(client: FarmClient, start: str) -> str:
    if len(start) == 64:
        return start
    keys = sorted({str(cell["key"]) for cell in client.ls() if str(cell["key"]).startswith(start)})
    if not keys:
        raise NotFound(f"no key in latest starts with {start}", hint="`farm ls --json` has the keys")
    if len(keys) > 1:
        raise UsageError(f"{start} is the start of {len(keys)} keys", hint=", ".join(key[:16] for key in keys[:5]))
    return keys[0]


def _local_sidecar(path: Path) -> dict[str, Any]:
    """Read a sidecar, or the one beside a program, whose bytes are then checked."""
    folder = path if path.is_dir() else path.parent
    document = path if path.suffix == ".json" else folder / "artifact.json"
    try:
        sidecar: dict[str, Any] = json.loads(document.read_text())
        program = sidecar["blobs"]["program"]
    except FileNotFoundError:
        raise NotFound(f"no {document}", hint="`farm fetch` writes it beside the program") from None
    except (ValueError, KeyError, TypeError):
        raise ArtifactGone(f"{document} is not a sidecar", hint="fetch it again") from None
    if path.is_file() and path != document:
        import hashlib

        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != program["digest"]:
            if path.name != program["path"]:
                raise UsageError(
                    f"{document} describes {program['path']}, not {path.name}",
                    hint="every fetch writes its own artifact.json: fetch each program into a folder of its own",
                )
            raise ArtifactGone(f"{path} is not the program that {document} describes", hint="fetch it again")
    return sidecar


def describe(sidecar: Mapping[str, Any]) -> list[str]:
    """Return a sidecar for people."""
    spec, blobs = sidecar["spec"], sidecar["blobs"]
    measured, checked = sidecar.get("measurements") or {}, sidecar.get("verification")
    latency = measured.get("latency") or {}
    rows = [
        ("program", f"{blobs['program']['path']}, {render.size(blobs['program']['size'])}"),
        ("sha256", blobs["program"]["digest"]),
        ("key", sidecar["key"]),
        ("model", f"{spec['model'].get('format', '')} {spec['model'].get('digest', '')}".strip()),
        ("compiler", f"{spec['compiler'].get('name', '')}, {sidecar['toolchain']}"),
        ("device", sidecar["device"].get("model") or sidecar["device"]["arch"]),
        ("precision", spec["precision"]),
        *[("input", _port(port)) for port in sidecar.get("inputs", [])],
        *[("output", _port(port)) for port in sidecar.get("outputs", [])],
    ]
    if quantized := sidecar.get("quantized"):
        rows.append(("quantized", ", ".join(f"{count} {name}" for name, count in sorted(quantized.items()))))
    if latency.get("median") is not None:
        tail = f", 99 % within {render.duration(latency['p99'])}" if latency.get("p99") else ""
        shared = ", measured beside another attempt" if measured.get("shared") else ""
        rows.append(("latency", f"{render.duration(latency['median'])}{tail}{shared}"))
    if measured.get("load") is not None:
        rows.append(("load", render.duration(measured["load"])))
    if checked:
        weak = ", weak evidence" if checked.get("weak") else ""
        samples = render.plural(checked.get("samples", 0), "sample")
        rows.append(("checked", f"against {checked.get('reference') or 'a reference'}, {samples}{weak}"))
        rows += [("error", f"{name}: {error:.2e}") for name, error in checked.get("errors", {}).items()]
        rows += [("equal", f"{name}: {share:.2%}") for name, share in checked.get("equal", {}).items()]
    else:
        rows.append(("verified", "no"))
    if sidecar.get("peak_memory"):
        rows.append(("memory", f"{render.size(sidecar['peak_memory'])} to compile"))
    build = f", build {sidecar['build']}" if sidecar.get("build") else ""
    rows.append(("made", f"{sidecar.get('created', '')} in {render.duration(sidecar.get('seconds'))}{build}"))
    return [str(sidecar["identifier"]), *render.align([(name, render.one_line(text)) for name, text in rows], "  ")]


def _port(port: Mapping[str, Any]) -> str:
    return f"{port['name']}: {port['dtype']} [{', '.join(map(str, port['shape']))}]"


_SOURCES: dict[Listing, Callable[[FarmClient, str], Sequence[Any]]] = {
    Listing.ARTIFACTS: lambda client, ref: client.ls(ref),
    Listing.REFS: lambda client, _: client.refs(),
    Listing.BUILDS: lambda client, _: client.builds(),
    Listing.WORKERS: lambda client, _: client.workers(),
    Listing.POOLS: lambda client, _: client.pools(),
}

_ROWS: dict[Listing, Callable[[Any], tuple[str, ...]]] = {
    Listing.ARTIFACTS: lambda cell: (
        str(cell["identifier"]),
        render.size(cell["program"]["size"]),
        str(cell["toolchain"]),
        str(cell["key"])[:12],
    ),
    Listing.REFS: lambda tag: (str(tag),),
    Listing.BUILDS: lambda build: (
        str(build["id"]),
        str(build["name"]),
        str(build["state"]),
        str((build["verdict"] or {}).get("text", "")),
    ),
    Listing.WORKERS: lambda worker: (
        str(worker["id"]),
        render.plural(int(worker["slots"]), "slot"),
        f"{len(worker['running'])} running",
        ", ".join(worker["pools"]),
    ),
    Listing.POOLS: lambda pool: (
        str(pool["name"]),
        render.plural(int(pool["live_workers"]), "live worker"),
        render.plural(int(pool["slots"]), "slot"),
        f"{pool['waiting']} waiting",
    ),
}
