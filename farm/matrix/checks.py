"""Checks of what a matrix asks for, each with its place in the manifest: before a worker finds out. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from farm.matrix.combinations import Combination
from farm.matrix.layers import CellSettings
from farm.matrix.lookup import Lookup
from farm.models.model import FrozenModel
from farm.models.shapes import Span
from farm.spec import OptionValue
from farm.targets.compilers import OFF, TUNING_MODES, DeviceKind
from farm.targets.pools import Pool


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
