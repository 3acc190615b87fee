"""The command that shows what a compiled program is: inspect."""

from __future__ import annotations

import re
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from farm.cli import completion, output, render
from farm.cli.artifact_commands import Storage, connected
from farm.errors import ArtifactGone, ExitCode, NotFound, UsageError
from farm.inert import one_line

if TYPE_CHECKING:
    from farm.client.client import FarmClient
    from farm.runner.documents import Verification
    from farm.runner.mxr import ProgramContent, StoredPort
    from farm.wire.program import FoundDevice, Measurements, Port, Sidecar, TuningFacts


def inspect(
    what: Annotated[
        str,
        typer.Argument(
            metavar="FILE|KEY|CELL",
            help="A program, an artifact.json, or a stored artifact.",
            autocompletion=completion.stored,
        ),
    ],
    program: Annotated[
        bool, typer.Option("--program", help="Download the program of a stored artifact, and show its content.")
    ] = False,
    source: Storage = "",
    as_json: output.Json = False,
) -> None:
    """Show what a compiled program is; its compiler is not needed.

    A file (.mxr, MIGraphX's .json, .onnx) is compared with the <program>.artifact.json next to it; any disagreement
    ends with exit code 39. An artifact.json, a cache key (or its start) or a cell of a ref (`net/migraphx-cpu/fp16/b8`,
    `…@prod`) shows what the farm recorded about the artifact.
    """
    path = Path(what)
    if path.exists():
        _show_inspected(*sidecar_and_program(path), as_json=as_json)
        return
    if path.suffix in (".mxr", ".json", ".onnx"):
        raise NotFound(f"no file {what}", hint="name a program or an artifact.json")
    with connected(source) as client:
        sidecar = client.artifacts.get(key_of(client, what))
        if not program:
            _show_inspected(sidecar, None, as_json=as_json)
            return
        with tempfile.TemporaryDirectory() as folder:
            file = client.artifacts.download(sidecar["blobs"]["program"], Path(folder))
            _show_inspected(sidecar, file, as_json=as_json)


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

    if path.is_dir() or path.name.endswith(_SIDECAR):
        return _read_sidecar(_only_sidecar(path) if path.is_dir() else path), None
    if path.suffix == ".json" and path.stat().st_size <= LARGEST_SIDECAR:
        # MIGraphX writes programs as .json too, and a sidecar may have another name.
        with suppress(ArtifactGone):
            return _read_sidecar(path), None
    own = sidecar_path(path)
    document = own if own.exists() else path.with_name(_SIDECAR)  # In a pack.
    if not document.exists():
        return None, path
    sidecar = _read_sidecar(document)
    program = sidecar["blobs"]["program"]
    described = program_path(document, program["path"], program["digest"])
    if described != path:
        output.note(f"{document} describes {described.name}, not {path.name}: not compared")
        return None, path
    return sidecar, path


_SIDECAR = "artifact.json"
"""How the names of sidecars end; a pack has one with this name alone."""


def sidecars_in(folder: Path) -> list[Path]:
    """Return the sidecars in a folder and in the folders below it, as `fetch` writes families."""
    return sorted([*folder.glob(f"*{_SIDECAR}"), *folder.glob(f"*/*{_SIDECAR}")])


def _only_sidecar(folder: Path) -> Path:
    found = sorted(folder.glob(f"*{_SIDECAR}"))
    if len(found) > 1:
        raise UsageError(f"{folder} holds {len(found)} programs", hint=f"name one of them: {found[0]}")
    return found[0] if found else folder / _SIDECAR


def _read_sidecar(path: Path) -> Sidecar:
    from farm.client.fetching import read_sidecar

    try:
        return read_sidecar(path.read_bytes(), str(path))
    except FileNotFoundError:
        raise NotFound(f"no {path}", hint="`farm fetch` writes it next to the program") from None


def _show_inspected(sidecar: Sidecar | None, file: Path | None, *, as_json: bool) -> None:
    from farm.client.inspection import TooLarge, disagreements, faults, inspect_program

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
    lines = describe(sidecar) if sidecar and not as_json else []
    if found and file:
        lines += [*([""] if lines else []), *describe_program(file.name, found)]
    inside = {"found": found, "disagreements": wrong, "faults": broken} if file else {}
    output.result({**(sidecar or {}), **inside}, lines, as_json=as_json)
    for line in [*wrong, *broken]:
        output.note(f"wrong: {one_line(line)}")
    if wrong or broken:
        raise typer.Exit(int(ExitCode.ARTIFACT_GONE))


def describe(sidecar: Sidecar) -> list[str]:
    """Return a sidecar for people."""
    spec, blobs, measured = sidecar["spec"], sidecar["blobs"], sidecar["measurements"]
    checked = sidecar["verification"]
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
    ]
    if sidecar["quantized"]:
        rows.append(("quantized", ", ".join(f"{count} {name}" for name, count in sorted(sidecar["quantized"].items()))))
    if measured["latency"]:
        tail = f", p99 {render.duration(measured['latency']['p99'])}" if measured["latency"]["p99"] else ""
        shared = ", not measured alone" if measured["shared"] else ""
        rows.append(("latency", f"{render.duration(measured['latency']['median'])}{tail}{shared}"))
    if sidecar["tuning"]["operations"] is not None:
        rows += _tuning_rows(sidecar["tuning"], measured)
    rows += render.not_alone(sidecar["tuning"]["conditions"], "tuning")
    rows += render.not_alone(measured["conditions"], "measuring")
    if measured["load"] is not None:
        rows.append(("load", render.duration(measured["load"])))
    firsts = {"cold": measured["first_run_cold"], "warm": measured["first_run_warm"]}
    if runs := [f"{render.duration(seconds)} {how}" for how, seconds in firsts.items() if seconds is not None]:
        rows.append(("first run", ", ".join(runs)))
    rows += _checked_rows(checked) if checked else [("verified", "no")]
    if sidecar["peak_memory"]:
        rows.append(("memory", f"{render.size(sidecar['peak_memory'])} to compile"))
    for name, seconds in list(sidecar["passes"].items())[:PASS_ROWS]:
        rows.append(("pass", f"{render.duration(seconds)}  {name}"))
    for when, blob in (("before", blobs["before"]), ("after", blobs["after"])):
        if blob:
            how = f"{blob['path']}, {render.size(blob['size'])}; `farm fetch --log` downloads it"
            rows.append((f"text {when}", how))
    build = f", build {sidecar['build']}" if sidecar["build"] else ""
    rows.append(("made", f"{sidecar['created']} in {render.duration(sidecar['seconds'])}{build}"))
    return [sidecar["identifier"], *render.align([(name, one_line(text)) for name, text in rows], "  ")]


def _checked_rows(checked: Verification) -> list[tuple[str, str]]:
    """Return what the program was compared with, and how it compares."""
    weak = ", weak evidence" if checked["weak"] else ""
    who = ", ".join(dict.fromkeys(checked["origin"].values())) or checked["reference"] or "a reference"
    rows = []
    if checked["errors"] or checked["equal"] or not checked["unverified"]:
        rows.append(("checked", f"against {who}, {render.plural(checked['samples'], 'sample')}{weak}"))
    rows += [("refused", f"{name}: {why}") for name, why in checked["refused"].items()]
    rows += [("unverified", f"{name}: {why}") for name, why in checked["unverified"].items()]
    rows += [("doubted", f"{name}: {why}") for name, why in checked.get("doubted", {}).items()]
    rows += [("error", f"{name}: {error:.2e}") for name, error in checked["errors"].items()]
    rows += [("equal", f"{name}: {share:.2%}") for name, share in checked["equal"].items()]
    return rows


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
    if program.get("trailing"):
        rows.append(("behind it", f"{program['trailing']} bytes after the program"))
    for module, content in program["modules"].items():
        counts = sorted(content["operators"].items(), key=lambda item: (-item[1], item[0]))
        rows += [(f"in {module}", f"{count} {operator}") for operator, count in counts[:OPERATOR_ROWS]]
        if len(counts) > OPERATOR_ROWS:
            rows.append((f"in {module}", f"and {len(counts) - OPERATOR_ROWS} more: --json lists all"))
    return [name, *render.align([(one_line(what, 40), one_line(text)) for what, text in rows], "  ")]


def _port(port: Port | StoredPort) -> str:
    sizes = "of any shape" if port["shape"] is None else f"[{', '.join(map(str, port['shape']))}]"
    return f"{port.get('name', '-')}: {port['dtype']} {sizes}"
