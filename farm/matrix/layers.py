"""Layers: merges the settings of a manifest for one cell. The more specific layer wins, field by field. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, TypeVar

from farm.manifest.entries import Budgets, Debug, Gates, Limits, Manifest, Tuning, Verify
from farm.manifest.sources import EnvFile
from farm.matrix.combinations import Combination
from farm.matrix.planned import AskedGates
from farm.spec import OptionValue
from farm.targets.compilers import default_tolerance

Layered = TypeVar("Layered", Tuning, Verify, Limits, Debug, Gates, Budgets)


@dataclass(frozen=True, slots=True)
class CellSettings:
    """The manifest's defaults with those of a model, of `include` and of `overrides` laid over them."""

    options: Mapping[str, OptionValue]
    env: Mapping[str, bool | int | str | EnvFile]
    tuning: Tuning
    verify: Verify
    limits: Limits
    debug: Debug
    gates: Gates
    budgets: Budgets
    priority: int
    salt: str


def settings_of(manifest: Manifest, combination: Combination) -> CellSettings:
    """Return the settings of one cell."""
    layers = combination.layers(manifest)
    tolerance: dict[str, dict[str, float]] = {}
    for layer in layers:
        for precision, values in layer.verify.tolerance.items():
            tolerance[precision] = {**tolerance.get(precision, {}), **values}
    verify = _laid_over(Verify, [layer.verify for layer in layers])
    return CellSettings(
        options={name: value for layer in layers for name, value in layer.options.items()},
        env={name: value for layer in layers for name, value in layer.env.items()},
        tuning=_laid_over(Tuning, [layer.tuning for layer in layers]),
        verify=verify.model_copy(update={"tolerance": tolerance}),
        limits=_laid_over(Limits, [layer.limits for layer in layers]),
        debug=_laid_over(Debug, [layer.debug for layer in layers]),
        gates=_laid_over(Gates, [layer.gates for layer in layers]),
        budgets=_laid_over(Budgets, [layer.budgets for layer in layers]),
        priority=_last(layers, "priority", 0),
        salt=_last(layers, "salt", ""),
    )


def tolerances(verify: Verify, precision: str, outputs: Sequence[str]) -> dict[str, float]:
    """Return the tolerance of each output that has its own, and of all others (`*`).

    A precision that is not named has the default. A pair that is not named has the larger tolerance of its halves.
    """
    halves = [precision] if precision in verify.tolerance else precision.split("-")
    given = [
        {"*": default_tolerance(half), **verify.tolerance.get(half, verify.tolerance.get("*", {}))} for half in halves
    ]
    found = {name: max(_tolerance(half, name) for half in given) for name in outputs}
    most = max(half["*"] for half in given)
    named = {pattern for half in given for pattern in half if pattern != "*"}
    return {"*": most, **{name: found[name] for name in outputs if any(fnmatchcase(name, each) for each in named)}}


def _tolerance(given: Mapping[str, float], output: str) -> float:
    own = [number for pattern, number in given.items() if pattern != "*" and fnmatchcase(output, pattern)]
    return max(own, default=given["*"])


def gates_of(gates: Gates, budgets: Budgets) -> AskedGates:
    """Return the limits and budgets that are asked for, as a plan has them."""
    numbers = [name for name in Budgets.model_fields if getattr(gates, name, None) is not None]
    limits = {name: getattr(gates, name) for name in numbers}
    most = {name: value for name, value in budgets.model_dump().items() if value is not None}
    asked = AskedGates()
    if limits:
        asked.update({"limits": limits, "baseline": gates.baseline, "hits": gates.hits})
    if most:
        asked["budgets"] = most
    if asked:
        asked["undecided"] = gates.undecided
    return asked


def _laid_over(kind: type[Layered], layers: Sequence[Layered]) -> Layered:
    given = {name: getattr(layer, name) for layer in layers for name in layer.model_fields_set}
    return kind.model_construct(**given)


def _last(layers: Sequence[Any], name: str, default: Any) -> Any:
    return next((getattr(layer, name) for layer in reversed(layers) if name in layer.model_fields_set), default)
