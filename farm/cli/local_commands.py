"""Commands that compile and measure on this machine, without a farm: optimize, bench."""

from __future__ import annotations

import re
import signal
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from typer import Argument, Option

from farm.cli import connection, output, render
from farm.cli.artifact_commands import sidecar_and_program, sidecars_in
from farm.cli.connection import connect, offering
from farm.client.inspection import inspect_if_small, wrong_card
from farm.client.transfers import default_cache, note_use, trim
from farm.errors import ArtifactGone, CompileFailed, FarmError, FarmFault, GateFailed, NotFound, UsageError
from farm.files import hash_file
from farm.inert import one_line
from farm.jobs.state import AttemptLimits, Fault, Phase, policy_of
from farm.results.pictures import curves
from farm.results.speed import ComparisonDocument, MeasuredDocument, compare
from farm.units import parse_size

if TYPE_CHECKING:
    from farm.client.client import FarmClient
    from farm.compiling.pipeline import OnPhase
    from farm.local.bench import Contestant, Measured
    from farm.local.optimize import Wanted
    from farm.node.gpus import Usage
    from farm.node.survey import Findings
    from farm.settings import Settings
    from farm.wire.program import Sidecar


@contextmanager
def here() -> Iterator[tuple[Settings, Path, OnPhase]]:
    """Yield settings for one compile at a time on all cores, a temporary folder, and a callback for phases.

    A failed step becomes an error with its exit code; SIGTERM counts as Ctrl-C.
    """
    from farm.compiling.pipeline import StepEnded
    from farm.settings import load_settings

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    settings = load_settings(cpu_slots=1)
    output.quiet_logs(settings)
    told: set[str] = set()

    def say_phase(phase: Phase, _progress: float | None, detail: str) -> None:
        words = f"{phase}{f': {detail}' if detail and not detail.startswith('run ') else ''}"
        if words not in told and f"{phase}: {detail}" not in told:
            told.add(words)
            output.note(f"  {words}")

    with output.if_interrupted("no file was written"), tempfile.TemporaryDirectory(prefix="farm-") as work:
        try:
            yield settings, Path(work), say_phase
        except StepEnded as ended:
            if ended.failure is None:
                raise KeyboardInterrupt from None
            kind, message, detail, _ = ended.failure
            for line in detail.splitlines():
                output.note(f"  | {one_line(line)}")
            policy = policy_of(kind)
            error = FarmFault if policy.fault is Fault.FARM else CompileFailed
            raise error(f"{kind}: {one_line(message)}", hint=policy.advice) from None


def latency(measured: MeasuredDocument) -> str:
    """Return a program's latency for people: median and tail."""
    found = measured["latency"]
    spread = f"p90 {render.duration(found['p90'])}, p99 {render.duration(found['p99'])}"
    return f"{render.duration(found['p50'])}, {spread}"


def compared(comparison: ComparisonDocument) -> str:
    """Return a program's speed as a multiple of another's, for people."""
    figures = (comparison["ratio"], *comparison["interval"])
    ratio, low, high = (f"{value:.2f}" if value >= 0.1 else f"{value:.2g}" for value in figures)
    return f"{ratio}x the speed of the other [{low}, {high}]: {comparison['verdict']}"


# --- optimize: one model compiled -------------------------------------------------------------------------------------


def spelled(name: str, *short: str, **options: Any) -> Any:
    """Return an option whose name may have underscores too, as MIGraphX's own driver spells it."""
    return Option(name, f"--{name[2:].replace('-', '_')}", *short, **options)


def optimize(
    model: Annotated[
        Path, Argument(metavar="MODEL", help="ONNX, a frozen graph (.pb), a SavedModel, .pt2 or TorchScript.")
    ],
    target: Annotated[
        str, Option("--target", "-t", help="gpu, cpu, ref (MIGraphX's), or any target; default: the best one here.")
    ] = "",
    nchw: Annotated[bool, Option("--nchw", help="TensorFlow: the model's layout is NCHW, not NHWC.")] = False,
    disable_fast_math: Annotated[bool, spelled("--disable-fast-math", "-d", help="No approximate functions.")] = False,
    offload_copy_off: Annotated[
        bool, spelled("--offload-copy-off", "-o", help="The caller copies to and from the GPU.")
    ] = False,
    fp32: Annotated[bool, Option("--fp32", help="No conversion (the default for a plain model).")] = False,
    tf32: Annotated[bool, Option("--tf32", help="NVIDIA: fp32 that may compute in TF32.")] = False,
    fp16: Annotated[bool, Option("--fp16", "-f", help="Convert to fp16; combines with --int8 and --fp8.")] = False,
    bf16: Annotated[bool, Option("--bf16", help="Convert to bf16; combines with --int8.")] = False,
    fp8: Annotated[bool, Option("--fp8", help="Quantize to fp8; needs --calibration.")] = False,
    int8: Annotated[bool, Option("--int8", "-i", help="Quantize to int8; needs --calibration.")] = False,
    calibration: Annotated[str, Option(metavar="PATH", help="Real inputs: .npz, .npy, folder, module:function.")] = "",
    exhaustive_tune: Annotated[bool, spelled("--exhaustive-tune", help="Try all kernels; slow.")] = False,
    inputs: Annotated[
        list[str] | None,
        Option("--input", metavar="NAME=SHAPE", help="An input's shape, such as x=1x3x224x224 or x=batch,128."),
    ] = None,
    input_files: Annotated[
        list[str] | None,
        spelled("--input-file", metavar="[NAME=]FILE", help="Run, verify and measure on this array (.npy)."),
    ] = None,
    batch: Annotated[int | None, Option(min=1, metavar="N", help="Size of the open batch; default: 1.")] = None,
    samples: Annotated[
        Path | None, Option(metavar="PATH", help="Real inputs (and expected outputs) to verify with.")
    ] = None,
    tolerance: Annotated[
        float | None, Option(metavar="E", help="Largest accepted relative error; default: the precision's.")
    ] = None,
    memory_limit: Annotated[
        str, spelled("--memory-limit", metavar="SIZE", help="Memory limit of the compile, such as 8GiB.")
    ] = "",
    gpu_memory_limit: Annotated[
        str,
        spelled(
            "--gpu-memory-limit",
            metavar="SIZE",
            help="Memory limit of the GPU, checked at the end; on NVIDIA also what ONNX Runtime may allocate.",
        ),
    ] = "",
    workspace: Annotated[str, Option(metavar="SIZE", help="TensorRT: most GPU memory for one layer.")] = "",
    json_program: Annotated[
        bool, Option("-j", "--json-program", help="Save the program as JSON, not as msgpack.")
    ] = False,
    output_path: Annotated[
        str, spelled("--output-path", "-p", metavar="PATH", help="A file, a folder, or a bare name.")
    ] = "",
) -> None:
    """Compile one model on this machine, and show what it gained.

    Needs no server. Writes the program to saved_models/<model> with its sidecar, but only if the
    program loads from its file, runs, and agrees with the original model.

    Makes one size, on one GPU, and keeps no tuning results: use `farm run` for int4, ranges of sizes, all GPUs at once
    and tuning databases.
    """
    from farm.local.optimize import Wanted

    flags = {"fp32": fp32, "tf32": tf32, "fp16": fp16, "bf16": bf16, "fp8": fp8, "int8": int8}
    options: dict[str, bool | int | str] = {"fast_math": False} if disable_fast_math else {}
    options |= {"offload_copy": False} if offload_copy_off else {}
    options |= {"nhwc": False} if nchw else {}
    options |= {"format": "json"} if json_program else {}
    options |= {"trt_max_workspace_size": _size("--workspace", workspace)} if workspace else {}
    read = [_input(text) for text in inputs or ()]
    wanted = Wanted(
        model=model,
        target=target,
        precisions=[name for name, given in flags.items() if given],
        options=options,
        tuning="exhaustive" if exhaustive_tune else "off",
        inputs={name: shape for name, shape, _ in read},
        dtypes={name: dtype for name, _, dtype in read if dtype},
        input_files={name: Path(path) for name, path in (_named_file(text) for text in input_files or ())},
        batch=batch,
        calibration=calibration,
        samples=samples,
        tolerance=tolerance,
        memory_limit=_size("--memory-limit", memory_limit),
        gpu_memory_limit=_size("--gpu-memory-limit", gpu_memory_limit),
        output=output_path,
    )
    place, sidecar, found = _make(wanted)
    files = {"program": str(place), "sidecar": str(sidecar)}
    output.result({**files, **found}, [*_report_lines(found), *render.align([*files.items()], "  ")])


def _make(wanted: Wanted) -> tuple[Path, Path, dict[str, Any]]:
    """Make the program; return its place, that of its sidecar, and the report. Raises GateFailed if it is not right."""
    from farm.local.optimize import destination, make, plan, report, store

    with here() as (settings, work, say_phase):
        planned = plan(wanted, settings, work)
        place = destination(wanted, planned.extension)
        output.note(f"{planned.cell.identifier}, {planned.cell.spec['toolchain']} ({planned.why})")
        if place.exists():
            output.note(f"{place} will be replaced{_what_it_is(place)}; --output-path names another file")
        if wanted.tuning != "off" and planned.cell.spec["tuning"]["mode"] == "off":
            output.note(f"{planned.cell.target} has nothing to tune: --exhaustive-tune changes nothing here")
        made = make(wanted, planned, settings, work, say_phase)
        found = report(planned, made)
        if made.judgement:
            for line in _report_lines(found):
                output.note(line)
            accuracy = "--tolerance accepts a larger error, --samples shows the error on real inputs"
            hint = f"nothing was written; {accuracy}" if made.judgement.kind == "accuracy" else "nothing was written"
            raise GateFailed(made.judgement.message, hint=hint)
        with output.writing(place):
            sidecar = store(made, place)
    return place, sidecar, found


def _what_it_is(place: Path) -> str:
    try:
        sidecar, _ = sidecar_and_program(place)
    except FarmError:
        return ""
    return f": it is {one_line(sidecar['identifier'])}" if sidecar else ""


# --- how they do it -------------------------------------------------------------------------------------------------


def _input(text: str) -> tuple[str, list[int | str], str]:
    """Read NAME=SHAPE[:DTYPE]: `x=1x3x224x224`, `x=batch,3,224,224`, `x=` for a scalar."""
    name, equals, rest = text.rpartition("=")
    shape, _, dtype = rest.partition(":")
    numbers = re.fullmatch(r"(?:batch|[0-9]+)(?:x(?:batch|[0-9]+))*", shape)
    parts = [part.strip() for part in shape.split("x" if numbers else ",")] if shape else []
    if not (name and equals) or not all(re.fullmatch(r"[0-9]+|[A-Za-z_]\w*", part) for part in parts):
        raise UsageError(f"--input {text}: not NAME=SHAPE", hint="such as --input x=1x3x224x224 or --input x=batch,128")
    return name, [int(part) if part.isdigit() else part for part in parts], dtype


def _named_file(text: str) -> tuple[str, str]:
    name, equals, path = text.partition("=")
    return (name, path) if equals and not Path(text).exists() else ("", text)


def _size(option: str, text: str) -> int:
    try:
        return parse_size(text) if text else 0
    except ValueError as error:
        raise UsageError(f"{option}: {error}") from None


# --- how they look ----------------------------------------------------------------------------------------------------


def _report_lines(found: Mapping[str, Any]) -> list[str]:
    """Return the result of `farm optimize` for people."""
    size, after, accuracy = found["size"], found["after"], found["accuracy"]
    before, firsts, gpu = found["before"], after["first_runs"], found["gpu"]
    samples, passed = render.plural(accuracy["samples"], "sample"), "ok" if accuracy["passed"] else "FAIL"
    unverified = f"{accuracy['unverified']}; use --samples with expected outputs" if accuracy["unverified"] else ""
    is_compared = accuracy["outputs"] or not unverified
    weak = "weak: outputs hardly differ between samples, a constant would pass; vary the --samples"
    rows = [
        ("target", f"{found['target']}, {found['toolchain']}"),
        ("size", f"{render.size(size['after'])}, the model has {render.size(size['before'])}"),
        ("quantized", ", ".join(f"{count} {name}" for name, count in sorted(found["quantized"].items()))),
        ("accuracy", unverified),
        ("accuracy", f"{passed}, {samples} against {accuracy['reference']}" if is_compared else ""),
        *[("", f"{name}: {_output(value)}") for name, value in accuracy["outputs"].items()],
        ("", weak if accuracy["weak"] else ""),
        ("latency", latency(after)),
        ("", f"the model before ({before['target']}): {latency(before)}" if before else ""),
        ("", compared(before["comparison"]) if before else ""),
        ("tuning", _tuned(found["tuning"]) if found["tuning"] else ""),
        ("load", render.duration(after["load"])),
        ("first run", render.duration(firsts[0])),
        (f"first {len(firsts)}", ", ".join(render.duration(seconds) for seconds in firsts)),
        ("memory", f"{render.size(found['peak_memory'])} to compile, {render.size(after['peak_memory'])} to run"),
        ("", f"{render.size(gpu['memory'])} of the GPU" if gpu["memory"] is not None else ""),
        *render.not_alone(gpu["conditions"], "measuring"),
        ("took", render.duration(found["seconds"])),
    ]
    return [found["identifier"], *output.facts(rows)]


def _output(value: Mapping[str, float]) -> str:
    if "equal" in value:
        return f"{value['equal']:.2%} equal, {value['needed']:.0%} needed"
    return f"{value['error']:.2g} (rel_l2), tolerance {value['tolerance']:.2g}"


def _tuned(tuning: Mapping[str, Any]) -> str:
    """Describe what tuning gained; without figures, the untuned program does not compile."""
    took = f"{tuning['mode']}, {render.duration(tuning['seconds'])}"
    if not tuning["baseline"]:
        return took
    medians = [render.duration(tuning[name]["median"]) for name in ("tuned", "baseline")]
    low, high = tuning["interval"]
    gain = f"{tuning['ratio']:.2f}x the untuned speed [{low:.2f}, {high:.2f}]"
    return f"{took}: {medians[0]}, untuned {medians[1]}, {gain}; this is the {tuning['published']} program"


# --- bench: how fast compiled programs are, alone and compared with others --------------------------------------------

PERCENTILES = (0, 5, 10, 20, 30, 40, 50, 60, 70, 80, 90, 95, 99, 100)


class BenchedProgram(NamedTuple):
    """A program on this machine with its sidecar, ready to be measured; `stored` if it came from a farm."""

    program: Path
    sidecar: Sidecar
    contestant: Contestant
    stored: bool = False


def bench(
    artifact: Annotated[
        str,
        offering("ARTIFACT", "A program, a folder of fetched programs, or MODEL/TARGET/…[@REF].", connection.stored),
    ],
    against: Annotated[str, Option(metavar="OTHER", help="Another artifact, @REF, onnxruntime or torch.")] = "",
    model: Annotated[
        Path | None, Option(metavar="FILE", help="The original model, for --against onnxruntime or torch.")
    ] = None,
    seconds: Annotated[float, Option(min=0.01, metavar="S", help="Seconds for each program's runs.")] = 5.0,
    picture: Annotated[Path | None, Option(metavar="FILE.svg", help="Draw the measurements.")] = None,
) -> None:
    """Measure a compiled program here, alone or against another.

    Shows latency, throughput by batch, load time and memory. Two programs are measured in turns, and the verdict says
    if the difference is more than chance.
    """
    from farm.local.bench import at_points
    from farm.node.survey import survey

    if model and against not in ("onnxruntime", "torch"):
        raise UsageError("--model is the original model", hint="add --against onnxruntime, or torch")
    documents: list[dict[str, Any]] = []
    drawn: list[list[Measured]] = []
    with here() as (settings, work, say_phase):
        findings = survey(settings)
        for one in _artifacts(artifact, settings):
            contestants = _contestants(one, against, model, settings)
            for turns in zip(*map(at_points, contestants), strict=True):
                measured, usage = _measure(turns, seconds, settings, findings, work / str(len(drawn)), say_phase)
                drawn.append(measured)
                first, *others = measured
                document = {name: one.sidecar[name] for name in ("identifier", "key", "toolchain")}
                documents.append({**document, **first.as_dict(), "gpu": usage, "against": None})
                for other in others:
                    compared_with = compare(first.rounds, other.rounds).as_dict()
                    documents[-1]["against"] = {**other.as_dict(), "comparison": compared_with}
    if picture:
        with output.writing(picture):
            _draw(picture, drawn)
    drawn_to = [str(picture)] if picture else []
    said = [*(line for document in documents for line in _lines(document)), *drawn_to]
    output.result({"artifacts": documents, "picture": next(iter(drawn_to), None)}, said)


# --- which ------------------------------------------------------------------------------------------------------------


def _artifacts(text: str, settings: Settings) -> list[BenchedProgram]:
    """Return what a text names: a file or folder here, or cells of a ref, which are downloaded to the cache."""
    if Path(text).exists():
        return _local(Path(text).resolve())
    if text.count("/") not in (2, 3):
        hint = "name a file, a folder, or MODEL/TARGET/PRECISION[/SHAPE][@REF] as `farm ls` lists them"
        raise NotFound(f"{text!r} is neither a file nor the name of an artifact", hint=hint)
    from farm.client.transport import split_ref
    from farm.results.ref_rules import given

    identifier, ref = split_ref(text)
    with connect(settings) as client:
        there = client.ls(ref or "latest")
        cells = [cell for cell in there if identifier in (cell["identifier"], cell["identifier"].rpartition("/")[0])]
        if not cells:
            names = ", ".join(sorted({str(cell["identifier"]) for cell in there})[:10])
            raise NotFound(f"{ref or 'latest'} has no {identifier}", hint=f"it has {names}" if names else "it is empty")
        found = [(cell, client.artifacts.sidecar_of(cell)) for cell in given(cells).values()]
        described = [client.artifacts.described(member, ref or "latest")[0] for member in found]
        return sorted((_brought(client, each) for each in described), key=lambda one: one.contestant.batch)


def _brought(client: FarmClient, sidecar: Sidecar) -> BenchedProgram:
    """Bring a stored artifact's program and sample, from the cache if they are there and complete."""
    folder = _cache(sidecar)
    for blob in filter(None, (sidecar["blobs"]["program"], sidecar["blobs"].get("sample"))):
        folder.mkdir(parents=True, exist_ok=True)
        client.artifacts.download(blob, folder)
    note_use(default_cache(), [folder])
    trim(default_cache())
    return _runnable(folder / str(sidecar["blobs"]["program"]["path"]), sidecar, stored=True)


def _cache(sidecar: Sidecar) -> Path:
    return default_cache() / "artifacts" / str(sidecar["key"])


def _local(path: Path) -> list[BenchedProgram]:
    from farm.client.fetching import program_path

    if path.is_dir():
        documents = sidecars_in(path)
        if not documents:
            raise NotFound(f"{path} holds no artifact.json", hint="`farm fetch` writes it next to each program")
        found = [one for document in documents for one in _local(document)]
        return sorted(found, key=lambda one: one.contestant.batch)
    sidecar, program = sidecar_and_program(path)
    if sidecar is None:
        hint = "`farm fetch` and `farm optimize` write it; without it the farm does not know how to run the program"
        raise NotFound(f"no sidecar next to {path}", hint=hint)
    stored = sidecar["blobs"]["program"]
    program = program or program_path(path, stored["path"], stored["digest"])
    if not program.is_file() or hash_file(program)[0] != stored["digest"]:
        raise ArtifactGone(f"{program} is not the program that its sidecar describes", hint="fetch or make it again")
    return [_runnable(program, sidecar)]


def _runnable(program: Path, sidecar: Sidecar, *, stored: bool = False) -> BenchedProgram:
    """Refuse a program whose sidecar does not say how to run it: readers of sidecars leave specs unchecked."""
    from farm.local.bench import program_of

    try:
        return BenchedProgram(program, sidecar, program_of(sidecar, program), stored)
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        why = f"has no {error}" if isinstance(error, KeyError) else f"is not one: {error!r:.200}"
        text = f"{program.name} cannot be run: the spec in its sidecar {why}"
        raise ArtifactGone(text, hint="fetch or make it again") from None


def _contestants(one: BenchedProgram, against: str, model: Path | None, settings: Settings) -> list[Contestant]:
    """Return a program, and what it is compared with."""
    from farm.local.bench import original_of

    if not against:
        return [one.contestant]
    if against == "torch":
        return [one.contestant, _in_torch(one, model, settings)]
    if against == "onnxruntime":
        return [one.contestant, original_of(one.sidecar, _original(one, model, settings), one.program)]
    identifier = str(one.sidecar["identifier"])
    name = f"{identifier}{against}" if against.startswith("@") else against
    wanted = one.sidecar["spec"]["inputs"]
    fitting = [other for other in _artifacts(name, settings) if other.sidecar["spec"]["inputs"] == wanted]
    if len(fitting) != 1:
        hint = "programs are compared on the same inputs: name a program of the same model and shape"
        raise UsageError(f"{name} has no program with the inputs of {identifier}", hint=hint)
    other = fitting[0].contestant
    return [one.contestant, replace(other, name=f"{other.name} ({against})")]


def _in_torch(one: BenchedProgram, model: Path | None, settings: Settings) -> Contestant:
    """Return the PyTorch model from which an artifact's model was converted; only its submitter has it."""
    from farm.client.freezing import converter_of
    from farm.local.bench import torch_of

    conversion = one.sidecar.get("conversion")
    if not conversion or conversion["converter"] != "torch":
        hint = "`--against onnxruntime` measures an ONNX model; with `format: torch` the farm converts a PyTorch model"
        raise UsageError(f"--against torch: {one.program.name} was not made from a PyTorch model", hint=hint)
    if not model:
        raise UsageError("--against torch needs the PyTorch model", hint=f"--model {conversion['name']}")
    torch = converter_of("torch")
    if not model.is_file() or torch.source_digest(model) != conversion["source"]:
        raise UsageError(f"{model} is not the PyTorch model that {one.program.name} was made from")
    torch.libraries("torch", settings.torch_python)
    return torch_of(one.sidecar, model.resolve(), one.program, settings.torch_python)


def _original(one: BenchedProgram, model: Path | None, settings: Settings) -> Path:
    """Return the model of an artifact: the given one, else the farm's."""
    from farm.client.fetching import bring_model
    from farm.models.frozen import read_model

    wanted = one.sidecar["spec"]["model"]
    if wanted["format"] != "onnx":
        raise UsageError(f"--against onnxruntime: the model is {wanted['format']}, which ONNX Runtime does not read")
    if model:
        if read_model(model)["digest"] != wanted["digest"]:
            raise UsageError(f"{model} is not the model that {one.program.name} was made from")
        return model.resolve()
    if not one.stored:
        raise UsageError("--against onnxruntime needs the original model", hint="--model FILE.onnx")
    with connect(settings) as client:
        folder = _cache(one.sidecar) / "model"
        folder.mkdir(parents=True, exist_ok=True)
        return bring_model(client.artifacts.bring, client.jobs.reproduction(one.sidecar["key"])["order"], folder)


# --- how --------------------------------------------------------------------------------------------------------------


def _measure(
    contestants: Sequence[Contestant],
    seconds: float,
    settings: Settings,
    findings: Findings,
    work: Path,
    say_phase: OnPhase,
) -> tuple[list[Measured], Usage]:
    from farm.compiling.pipeline import Children, StepSettings
    from farm.local.bench import measure
    from farm.node.gpus import watch
    from farm.node.survey import one_slot

    machine = replace(StepSettings.of(settings), migraphx_path=findings.migraphx_path)
    pools = []
    for contestant in contestants:
        if contestant.python is not None:
            continue
        target, program = contestant.target, contestant.request["program"]
        pool = next((pool for pool in findings.pools if str(pool.target) == target and not pool.untuned), None)
        if pool is None:
            known = ", ".join(dict.fromkeys(str(pool.target) for pool in findings.pools)) or "nothing"
            raise UsageError(f"{contestant.name} needs {target}; here is {known}")
        on_card = Path(program) if program and pool.target.compiler == "migraphx" else None
        if on_card and (why := wrong_card(inspect_if_small(on_card), [pool.device.arch])):
            raise UsageError(f"{contestant.name} does not run here: {why}")
        pools.append(pool)
    leading = next((pool for pool in pools if pool.target.kind.maker), pools[0])
    work.mkdir()
    with one_slot(leading, findings.gpus, settings) as slot, watch(slot) as usage:
        children = Children(work, machine, AttemptLimits(time=0, memory=0), say_phase, threading.Event(), slot)
        measured = measure(contestants, children, seconds)
    return measured, usage


# --- how it looks -----------------------------------------------------------------------------------------------------


def _lines(document: Any) -> list[str]:
    busy = document["gpu"]["busy"]
    rows = [("target", f"{document['target']}, {document['toolchain']}"), *_figures(document)]
    lines = [document["identifier"], *output.facts([*rows, ("GPU", "" if busy is None else f"{busy:.0%} busy")])]
    if other := document["against"]:
        lines += [f"  against {other['name']}", *render.align(_figures(other), "    ")]
        lines.append(f"  {compared(other['comparison'])}")
    return lines


def _figures(measured: MeasuredDocument) -> list[tuple[str, str]]:
    found, firsts = measured["latency"], measured["first_runs"]
    return [
        ("latency", f"{latency(measured)}, at least {render.duration(found['minimum'])} ({found['repeats']} runs)"),
        ("throughput", f"{found['throughput']:.4g} samples a second at batch {measured['batch']}"),
        ("load", f"{render.duration(measured['load'])}, then {render.duration(firsts[0])} for the first run"),
        ("memory", render.size(measured["peak_memory"])),
    ]


def _draw(path: Path, rows: Sequence[Sequence[Measured]]) -> None:
    """Draw throughput by batch if there are several batches, else the latency distribution."""
    import numpy as np

    series: dict[str, list[tuple[float, float]]] = {}
    if len({row[0].contestant.batch for row in rows}) > 1:
        for row in rows:
            for place, measured in enumerate(row):
                name = "program" if place == 0 else "against"
                series.setdefault(name, []).append((measured.contestant.batch, measured.latency["throughput"] or 0.0))
        title, rate = rows[0][0].contestant.name, "throughput (samples a second)"
        path.write_bytes(curves(title=title, x="batch", y=rate, series=series))
        return
    for row in rows:
        for measured in row:
            runs = [seconds * 1000 for block in measured.rounds for seconds in block]
            series[measured.contestant.name] = [(each, float(np.percentile(runs, each))) for each in PERCENTILES]
    path.write_bytes(curves(title="Latency of each run", x="percentile", y="latency (ms)", series=series))
