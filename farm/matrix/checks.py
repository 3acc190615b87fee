"""Checks of what a matrix asks for, each with its place in the manifest: before a worker finds out. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from farm.matrix.combinations import CellSettings, Combination
from farm.matrix.lookup import Lookup
from farm.models.model import FrozenModel
from farm.models.shapes import Input, Span
from farm.spec import OptionValue
from farm.targets.compilers import OFF, TUNING_MODES, DeviceKind
from farm.targets.pools import Pool, Target


def kind_of(lookup: Lookup, combination: Combination) -> DeviceKind | None:
    """Return the kind of a combination's device; None, with a complaint, if it does not have the precision."""
    choice, precision = combination.choice, combination.precision
    kind = combination.compiler.device(choice.served.device)
    if kind and precision in kind.precisions:
        return kind
    has = ", ".join(kind.precisions) if kind else "none"
    hint = f"it has {has}; or `exclude: [{{target: {choice.text}, precision: {precision}}}]`"
    lookup.complain(f"{choice.target} has no precision {precision}", combination.places["precision"], hint)
    return None


def check_model(lookup: Lookup, combination: Combination, model: FrozenModel) -> None:
    """Complain of a model that the compiler does not read, or does not have in this precision."""
    name, place, compiler = combination.model.name, combination.places["precision"], combination.compiler
    if model.format not in compiler.formats:
        message = f"{compiler.name} does not read {model.format} files (model `{name}`)"
        lookup.complain(message, combination.places["target"], f"it reads {', '.join(compiler.formats)}")
    if compiler.packs(combination.precision) and model.format != "onnx":
        message = f"{combination.precision} of model `{name}`: int4 needs an ONNX model"
        lookup.complain(message, place, "convert it to ONNX, or leave the precision out")
    if combination.precision == "fp32" and model.lowered:
        hint = f"write `precisions: [native]` for model `{name}`: it is compiled as it was exported"
        lookup.complain(f"fp32 for model `{name}`, which is lower already ({model.lowered})", place, hint)


def check_background(lookup: Lookup, combination: Combination, settings: CellSettings) -> None:
    """Complain of background tuning that is not more thorough than what goes before it."""
    mode, background = settings.tuning.mode, settings.tuning.background
    if background != OFF and TUNING_MODES.index(background) <= TUNING_MODES.index(mode):
        message = f"`background: {background}` finds nothing that `mode: {mode}` does not"
        hint = f"more thorough is: {', '.join(TUNING_MODES[TUNING_MODES.index(mode) + 1 :]) or 'nothing'}"
        lookup.complain(f"{message} (model `{combination.model.name}`)", combination.places["cell"], hint)


def check_pool(
    lookup: Lookup,
    combination: Combination,
    pool: Pool,
    settings: CellSettings,
    options: Mapping[str, OptionValue],
) -> None:
    """Complain of what the installed compiler or the card lacks, and of work that needs a GPU which nobody has."""
    compiler, text = combination.compiler, combination.choice.text
    if old := compiler.too_old(pool.target.device, pool.device.arch, combination.precision):
        hint = "`exclude` the cell, or choose another card"
        lookup.complain(f"{old} ({text})", combination.places["precision"], hint)
    for feature, what in compiler.lacks(pool.features, combination.precision, options).items():
        since = compiler.features.get(feature, "another release")
        message = f"toolchain_mismatch: {pool.toolchain} has no {feature}, which {what} needs"
        hint = f"{since} and newer have it; `exclude` the cell, or choose by `toolchains`"
        place = combination.places["precision" if what.startswith("precision") else "target"]
        lookup.complain(f"{message} ({text})", place, hint)
    if not pool.untuned:
        return
    asked = [f"tuning {mode}" for mode in (settings.tuning.mode, settings.tuning.background) if mode != OFF]
    asked += ["verification"] * (settings.verify.mode != "off")
    if asked:  # Nobody may believe that it was done.
        message = f"no worker has a `{text}`, those that compile for it cannot do this: {', '.join(asked)}"
        hint = "write `tuning: {mode: off}` and `verify: off` for it, or start `farm worker` on a node with one"
        lookup.complain(message, combination.places["target"], hint)


def takes_packs(lookup: Lookup, combination: Combination, format: str) -> bool:
    """Whether a program of the cell can go into its packs; complain of those that it cannot go into."""
    sizes = [name for name, size in combination.sizes.items() if isinstance(size, Span)]
    reading = [layout for layout in combination.packs if layout != "onnxruntime"]
    hint = f"write `packs: []` for model `{combination.model.name}`"
    if sizes:
        message = f"`packs` of model `{combination.model.name}`: ONNX Runtime's provider takes fixed sizes only"
        place = lookup.inputs.place_of_size(combination, sizes[0])
        lookup.complain(f"{message}, and `{sizes[0]}` is a range", place, f"{hint}, or list the sizes")
    elif format != "onnx" and reading:
        message = f"`packs: [{reading[0]}]` of model `{combination.model.name}`: ONNX Runtime does not read {format}"
        lookup.complain(message, ("models", combination.index, "name"), f"{hint}, or `packs: [onnxruntime]`")
    else:
        return True
    return False


# --- dynamic dimensions ------------------------------------------------------------------------------------------


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
