"""The command optimize: one model compiled on this machine, without a farm."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from farm.cli import output, render
from farm.cli.on_this_machine import compared, here, latency
from farm.errors import FarmError, GateFailed, UsageError
from farm.inert import one_line

if TYPE_CHECKING:
    from farm.local.optimize import Wanted


def optimize(
    model: Annotated[
        Path, typer.Argument(metavar="MODEL", help="ONNX, a frozen graph (.pb), a SavedModel, .pt2 or TorchScript.")
    ],
    target: Annotated[
        str,
        typer.Option("--target", "-t", help="gpu, cpu, ref (MIGraphX's), or any target; default: the best one here."),
    ] = "",
    nchw: Annotated[bool, typer.Option("--nchw", help="TensorFlow: the model's layout is NCHW, not NHWC.")] = False,
    disable_fast_math: Annotated[
        bool, typer.Option("--disable-fast-math", "--disable_fast_math", "-d", help="No approximate functions.")
    ] = False,
    offload_copy_off: Annotated[
        bool,
        typer.Option("--offload-copy-off", "--offload_copy_off", "-o", help="The caller copies to and from the GPU."),
    ] = False,
    fp32: Annotated[bool, typer.Option("--fp32", help="No conversion (the default for a plain model).")] = False,
    tf32: Annotated[bool, typer.Option("--tf32", help="NVIDIA: fp32 that may compute in TF32.")] = False,
    fp16: Annotated[
        bool, typer.Option("--fp16", "-f", help="Convert to fp16; combines with --int8 and --fp8.")
    ] = False,
    bf16: Annotated[bool, typer.Option("--bf16", help="Convert to bf16; combines with --int8.")] = False,
    fp8: Annotated[bool, typer.Option("--fp8", help="Quantize to fp8; needs --calibration.")] = False,
    int8: Annotated[bool, typer.Option("--int8", "-i", help="Quantize to int8; needs --calibration.")] = False,
    calibration: Annotated[
        str, typer.Option("--calibration", metavar="PATH", help="Real inputs: .npz, .npy, folder, module:function.")
    ] = "",
    exhaustive_tune: Annotated[
        bool, typer.Option("--exhaustive-tune", "--exhaustive_tune", help="Try all kernels; slow.")
    ] = False,
    inputs: Annotated[
        list[str] | None,
        typer.Option("--input", metavar="NAME=SHAPE", help="An input's shape, such as x=1x3x224x224 or x=batch,128."),
    ] = None,
    input_files: Annotated[
        list[str] | None,
        typer.Option(
            "--input-file", "--input_file", metavar="[NAME=]FILE", help="Run, verify and measure on this array (.npy)."
        ),
    ] = None,
    batch: Annotated[
        int | None, typer.Option("--batch", min=1, metavar="N", help="Size of the open batch; default: 1.")
    ] = None,
    samples: Annotated[
        Path | None,
        typer.Option("--samples", metavar="PATH", help="Real inputs (and expected outputs) to verify with."),
    ] = None,
    tolerance: Annotated[
        float | None,
        typer.Option("--tolerance", metavar="E", help="Largest accepted relative error; default: the precision's."),
    ] = None,
    memory_limit: Annotated[
        str,
        typer.Option(
            "--memory-limit", "--memory_limit", metavar="SIZE", help="Memory limit of the compile, such as 8GiB."
        ),
    ] = "",
    gpu_memory_limit: Annotated[
        str,
        typer.Option(
            "--gpu-memory-limit",
            "--gpu_memory_limit",
            metavar="SIZE",
            help="Memory limit of the GPU, checked at the end; on NVIDIA also what ONNX Runtime may allocate.",
        ),
    ] = "",
    workspace: Annotated[
        str, typer.Option("--workspace", metavar="SIZE", help="TensorRT: most GPU memory for one layer.")
    ] = "",
    json_program: Annotated[
        bool, typer.Option("-j", "--json-program", help="Save the program as JSON, not as msgpack.")
    ] = False,
    output_path: Annotated[
        str,
        typer.Option("--output-path", "--output_path", "-p", metavar="PATH", help="A file, a folder, or a bare name."),
    ] = "",
    as_json: output.Json = False,
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
    output.result({**files, **found}, [*_report_lines(found), *render.align([*files.items()], "  ")], as_json=as_json)


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
            sidecar, _ = store(made, place)
    return place, sidecar, found


def _what_it_is(place: Path) -> str:
    """Return what a program is, as its sidecar says."""
    from farm.cli.inspect_command import sidecar_and_program

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
    from farm.units import parse_size

    try:
        return parse_size(text) if text else 0
    except ValueError as error:
        raise UsageError(f"{option}: {error}") from None


# --- how they look ----------------------------------------------------------------------------------------------------


def _report_lines(found: Mapping[str, Any]) -> list[str]:
    """Return the result of `farm optimize` for people."""

    size, after, accuracy = found["size"], found["after"], found["accuracy"]
    rows = [
        ("target", f"{found['target']}, {found['toolchain']}"),
        ("size", f"{render.size(size['after'])}, the model has {render.size(size['before'])}"),
    ]
    if found["quantized"]:
        counts = ", ".join(f"{count} {name}" for name, count in sorted(found["quantized"].items()))
        rows.append(("quantized", counts))
    samples = render.plural(accuracy["samples"], "sample")
    if accuracy["unverified"]:
        rows.append(("accuracy", f"{accuracy['unverified']}; use --samples with expected outputs"))
    if accuracy["outputs"] or not accuracy["unverified"]:
        passed = "ok" if accuracy["passed"] else "FAIL"
        rows.append(("accuracy", f"{passed}, {samples} against {accuracy['reference']}"))
    rows += [("", f"{name}: {_output(value)}") for name, value in accuracy["outputs"].items()]
    if accuracy["weak"]:
        rows.append(("", "weak: outputs hardly differ between samples, a constant would pass; vary the --samples"))
    rows.append(("latency", latency(after)))
    if before := found["before"]:
        rows.append(("", f"the model before ({before['target']}): {latency(before)}"))
        rows.append(("", compared(before["comparison"])))
    if tuning := found["tuning"]:
        rows.append(("tuning", _tuned(tuning)))
    firsts = after["first_runs"]
    rows.append(("load", render.duration(after["load"])))
    rows.append(("first run", render.duration(firsts[0])))
    rows.append((f"first {len(firsts)}", ", ".join(render.duration(seconds) for seconds in firsts)))
    memory = f"{render.size(found['peak_memory'])} to compile, {render.size(after['peak_memory'])} to run"
    rows.append(("memory", memory))
    if found["gpu"]["memory"] is not None:
        rows.append(("", f"{render.size(found['gpu']['memory'])} of the GPU"))
    looks = found["gpu"]["conditions"]
    rows += render.not_alone(looks, "measuring")
    rows.append(("took", render.duration(found["seconds"])))
    return [found["identifier"], *render.align([(name, one_line(text)) for name, text in rows], "  ")]


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
