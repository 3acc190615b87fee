"""Dynamic dimensions: the cost of a program that takes a range of sizes on a target, or why there is none. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from farm.models.shapes import Input, Span
from farm.targets.pools import Target

FULL_DYNAMIC = "MIGRAPHX_ENABLE_FULL_DYNAMIC"
REFUSED = frozenset({"HardSigmoid", "HardSwish", "LayerNormalization", "Softplus"})
"""ONNX operators for which MIGraphX's parser refuses a dynamic shape on every target (measured, 2.16)."""

REFUSED_ON_CPU = frozenset({
    "Abs", "Add", "AveragePool", "BatchNormalization", "Concat", "Conv", "ConvTranspose", "Div", "Elu", "Erf", "Exp",
    "Gelu", "Gemm", "GlobalAveragePool", "GlobalMaxPool", "InstanceNormalization", "LogSoftmax", "MatMul", "Max",
    "MaxPool", "Mul", "Pow", "ReduceMax", "ReduceMean", "ReduceSum", "Relu", "Softmax", "Sqrt", "Tanh",
})  # fmt: skip
"""Operators for which only its cpu target refuses one (measured, 2.16): most operators that oneDNN runs."""

_TRUE = frozenset({"1", "enable", "enabled", "yes", "true"})


def refusal(target: Target, format: str, inputs: Iterable[Input], env: Mapping[str, str]) -> str:
    """Return why a target cannot have a program of these inputs, and what to do; empty if it can."""
    spans = [_spans(tensor) for tensor in inputs]
    if target.compiler != "migraphx" or not any(spans):
        return ""
    if format == "tf":
        return "MIGraphX supports no dynamic dimensions in TensorFlow graphs; build each size separately"
    if target.device.startswith("gfx") and _several(spans) and env.get(FULL_DYNAMIC, "") not in _TRUE:
        return (
            "MIGraphX compiles for one dynamic dimension on a GPU, these inputs have several; build the others size by "
            f"size, or set {FULL_DYNAMIC}, which compiles kernels when they run"
        )
    return ""


def price(target: Target, precision: str, inputs: Iterable[Input], operators: Iterable[str]) -> list[str]:
    """Return warnings about a dynamic program before it is compiled; `operators` are the model's."""
    spans = [_spans(tensor) for tensor in inputs]
    if target.compiler != "migraphx" or not any(spans):
        return []
    return [text for text in (_refused(target, operators), _cost(target, precision, spans)) if text]


def _refused(target: Target, operators: Iterable[str]) -> str:
    on_cpu = target.device == "cpu"
    found = sorted((REFUSED | REFUSED_ON_CPU if on_cpu else REFUSED) & set(operators))
    names = ", ".join(found[:5]) + (f" and {len(found) - 5} more operators" if len(found) > 5 else "")
    where = "MIGraphX's cpu target" if on_cpu else "MIGraphX"
    # An operator whose shape does not depend on the range is accepted; this does not check which ones depend on it.
    what = "expect `compiler_error` if they depend on it, or build each size separately"
    return f"{where} refuses a range in {names}, which the model has: {what}" if found else ""


def _cost(target: Target, precision: str, spans: list[list[Span]]) -> str:
    if target.device == "cpu":
        return ""
    if target.device == "ref":
        eight_bit = precision.startswith(("int8", "fp8"))
        return "MIGraphX's ref target does not quantize programs with dynamic dimensions" if eight_bit else ""
    if _several(spans):
        return "several dynamic dimensions: MIGraphX compiles kernels when the program runs, not before, and tunes none"
    (span,) = {span for found in spans for span in found}
    count = span.high - span.low + 1
    return (
        f"{count} submodules, one for each size from {span.low} to {span.high}: compile time and program size multiply"
    )


def _spans(tensor: Input) -> list[Span]:
    return [size for size in tensor.shape if isinstance(size, Span)]


def _several(spans: Iterable[list[Span]]) -> bool:
    """Whether MIGraphX sees several dynamic dimensions: those with equal bounds and optimals count as one."""
    found = list(spans)
    return any(len(each) > 1 for each in found) or len({span for each in found for span in each}) > 1
