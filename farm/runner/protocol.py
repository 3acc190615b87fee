"""Requests and messages between worker and child.

Messages, one JSON object a line, on the file descriptor MESSAGES_FD
    {"phase": "compiling", "progress": 0.5 or null, "detail": "text"}
    {"result": {…}}
    {"error": {"kind": failure kind or "", "message": sentence, "detail": text}}
and from the guard, on GUARD_FD
    {"usage": {"cpu": seconds, "memory": bytes}}            of the child and its descendants, once a second
    {"ended": {"exit": code or null, "signal": number or null, "killed": "memory", "disk", "files", "processes" or "",
               "memory": peak in bytes, "stuck": [pids]}}    when nothing of the child is left but what cannot be killed

A request is a JSON object: `action`, `compiler` (`onnxruntime`, `migraphx`), `device` (`cpu`, `ref`, `gfx…`, `cuda`),
`threads`, `gpu` (what the child is pinned to), `maker` (of that GPU: `amd`, `nvidia`), `cpus` (numbers of the CPUs to
stay on; none = all), `search` (folders to import the compiler from), `memory` (bytes, 0 = no limit), `dying`
(seconds that what was killed gets to be gone), `processes` (how many processes and threads; 0 = no limit), `disk`
(bytes that `folders` may grow to; 0 = no limit), `folders` (in which it writes), `files` (how many may be there),
`group` ({join, events, refused?}: files of the control group that holds the limits of memory and processes; or {})
and `seal` ({read: [paths], write: [paths]}, or null; `folders`, `group` and `seal` set by `run_child`) and, by action:

probe       rocm (version of the installation, or empty)
    -> available, reason, fix, label, toolchain, version, libraries {name: version}, parts [[soname, build id]],
    features [names], targets [devices], cpu_family, lowest (compute capability that CUDA's libraries serve, times 10)
libraries   converter (`torch`, `tensorflow`)
    -> libraries {name: version}
convert     converter, kind (`pt2`, `torchscript`, `saved-model`), source (path), output (path to write), options
            {to, opset, signature}, inputs of a TorchScript archive [{name, dtype, sizes, axes {axis: name}}]
    -> size
check       model {path, format, outputs (names of a TensorFlow graph's nodes; empty: its ends), alone (whether its
            external data is not there yet), names? (of the model's outputs, by which the parent checks the answer)}
    -> what `onnx_check.check_onnx` or `tf_check.check_tf` returns
reference   model, inputs {name: {dtype, shape, batch_axis?}}, batch (number or null), samples ({path} of an
            .npz, or {generate: N, seed: S, ranges: {name: {range: [low, high]} or {value: v}}}), min_samples,
            options, reference (path to write), unverified (why no reference can run the model; else empty); the
            compiler is who computes: also "onnx", the onnx package's own evaluator, "expected" (nobody: what the
            samples expect is taken, and the rest is not verified), and "none" (samples without outputs)
    -> samples, runs, origin {output: "expected" or the compiler's name}, unverified {output: why it is not compared},
    outputs [{name, dtype, shape}]; fails as `unverifiable` where the compiler cannot run the model
pack        model, quantization {block_size, symmetric}, packed (path to write: the model with int4 weights)
    -> quantized {operator: count}
slice       model, inputs, slices (folder to write to)
    -> slices [{path, signature, operations, count, inputs}], operations; see `slicing.py`
tune        as compile, of one slice: without program, with database (the private folder of the job's tuning
            databases) and key (what ONNX Runtime's records of the slice are kept under)
    -> {}
compile     model, inputs, batch, precision, options, quantization, tuning {mode, exhaustive_tune?, slices?
            [{key, count}]}, calibration (as samples, or null), program (path to write), database (folder, where
            it was tuned), cross ({arch, compute_units, xcc} of a GPU that is not here, or null), debug? {level,
            before?, after?} (how much to log; where to write the program's text), expected? {toolchain, recipe,
            libraries, cpu_family, arch} (what the cache key says of who compiles: another fails, and compiles nothing)
    -> inputs and outputs [{name, dtype, shape, strides}] in order, weight_dtypes {dtype: bytes},
    compute_dtypes {dtype: nodes}, quantized {operator: count}, operators {operator: count}, size,
    offload_copy, output_parameters, session (how to run it best, where that was tuned), symbolic_shapes (why static
    ones were refused, if the program keeps the model's own; else empty; only ONNX Runtime), placement (on a GPU of ONNX
    Runtime's: nodes {provider: {operator: count}}, on_purpose and fallback {operator: [names of nodes on the CPU]})
evaluate    program (path), model {format}, reference (path), outputs [names in the model's order], options, precision,
            tolerance, equal, measure_seconds, sample (path to write, or null), session (optional)
    -> verification {errors, rms, equal, nonfinite, spread, weak, samples, runs, origin, unverified},
    measurements {load (and no more, if the program could not be run), cold_run, warm_run, latency, device_latency
    {median, repeats} or null (without host copies), p50, p90, p99, repeats, throughput, batch, shapes, points [the
    same, at every size of a dynamic program]}, peak_memory
bench       programs [{compiler (also `torch`, for a PyTorch model as it is), device, program (path, or null: the
            original model), model {path, format, outputs, order (of a TorchScript archive's inputs)}, inputs, batch,
            options, outputs, samples}], first (runs to time one by one), rounds, seconds (of each program in all
            rounds)
    -> programs [{load, first [seconds], rounds [[seconds of each run]]}], peak_memory
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Request = dict[str, Any]
Result = dict[str, Any]


_PLACE = re.compile(
    r"\S+\.[ch]pp:\d+: .*?: "  # MIGraphX
    r"|\[ONNXRuntimeError\] : \d+ : \w+ : |Load model from \S+ failed:"
    r"|/onnxruntime_src/\S+:\d+ [^()]*(?:\([^()]*\)[^() ]*)+ (?:\[with [^\]]*\] )?"
)
"""Where in a compiler's source an error comes from; kept in the detail, of no use in a sentence."""

_LONGEST_DETAIL = 1000
"""Characters with which a child says how far it is."""
_KEPT = 20_000
"""Characters of each end of an error's detail: the worker takes no message of more than 1 MiB."""


class RequestFailed(Exception):
    """The child cannot do what was asked. `kind` is a failure kind of the farm, or empty: the worker decides
    from the message."""

    def __init__(self, kind: str, message: str, detail: str = "") -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.detail = detail


class CannotRun(RequestFailed):
    """A program cannot be given its inputs from here, which says nothing against it."""


class Messages:
    """The child's end of the pipe to the worker."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def send(self, message: dict[str, Any]) -> None:
        """Write one message; a worker that is gone is no error here, the guard ends the child."""
        line = json.dumps(message, separators=(",", ":"), allow_nan=False).encode() + b"\n"
        try:
            while line:
                line = line[os.write(self.descriptor, line) :]
        except BrokenPipeError:
            return

    def phase(self, phase: str, progress: float | None = None, detail: str = "") -> None:
        """Say what is being done now, and how much of it is done (0 to 1, where known)."""
        self.send({"phase": phase, "progress": progress, "detail": detail[:_LONGEST_DETAIL]})

    def error(self, kind: str, message: str, detail: str = "") -> None:
        """Say why there is no answer; of a novel the beginning and the end, since the log has all of it."""
        if len(detail) > 2 * _KEPT:
            detail = f"{detail[:_KEPT]}\n[…]\n{detail[-_KEPT:]}"
        self.send({"error": {"kind": kind, "message": message[:_KEPT], "detail": detail}})


@contextmanager
def blamed_on_compiler(what: str, kind: str = "") -> Iterator[None]:
    """Turn whatever a compiler raises into a RequestFailed that begins with what was being done."""
    try:
        yield
    except (RequestFailed, MemoryError):
        raise
    except Exception as error:
        text = str(error).strip() or type(error).__name__
        said = first_line(_PLACE.sub("", text))
        raise RequestFailed(kind, f"{what}: {said}", f"{type(error).__name__}: {text}") from error


def keep_text(request: Request, when: str, text: Callable[[], str]) -> None:
    """Write a program's text `before` or `after` compilation where the request asks for it."""
    path = (request.get("debug") or {}).get(when)
    if path:
        with open(path, "w", encoding="utf-8") as file:  # noqa: PTH123
            file.write(text())


def first_line(text: str) -> str:
    """Return the first line of a text, cut to a length that fits a table."""
    line = text.strip().splitlines()[0] if text.strip() else ""
    return line if len(line) <= 400 else line[:397] + "..."
