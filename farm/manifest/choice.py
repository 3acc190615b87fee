"""Gates and budgets of a command line: `latency=5%`, `size=50MB`. They are read as those of a manifest are."""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import ValidationError

from farm.errors import UsageError, suggestion
from farm.manifest.entries import Budgets, Gates
from farm.wire.asked import ChosenGates


def read_gates(
    limits: Iterable[str], budgets: Iterable[str], baseline: str = "", *, first: bool = False
) -> ChosenGates | None:
    """Return the gates that texts of the form NAME=VALUE ask for, `off` as None; None if there are none.

    `first`: the baseline need not exist yet.

    Raises UsageError for a name that no gate has, and for an invalid value.
    """
    chosen: ChosenGates = {"baseline": baseline, "limits": {}, "budgets": {}}
    if first:
        chosen["first"] = True
    for text in limits:
        chosen["limits"] |= _read(Gates, text, "--gate", "latency=5%")
    for text in budgets:
        chosen["budgets"] |= _read(Budgets, text, "--budget", "latency=10ms")
    if baseline:
        _checked(Gates, {"baseline": baseline}, f"--baseline {baseline}")
    return chosen if any(chosen.values()) else None


def _read(kind: type[Gates | Budgets], text: str, option: str, example: str) -> dict[str, float | None]:
    name, equals, value = text.partition("=")
    field = name.replace("-", "_")
    if not equals or field not in Budgets.model_fields:
        known = [each.replace("_", "-") for each in Budgets.model_fields]
        hint = suggestion(name, known) if equals else f"such as {option} {example}"
        raise UsageError(f"{option} {text}: not NAME=VALUE of a gate", hint=hint)
    if value == "off":
        return {field: None}
    number = float(value) if field == "throughput" and kind is Budgets and _is_number(value) else value
    return {field: float(getattr(_checked(kind, {name.replace("_", "-"): number}, f"{option} {text}"), field))}


def _checked(kind: type[Gates | Budgets], values: dict[str, str | float], where: str) -> Gates | Budgets:
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        problem = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise UsageError(f"{where}: {problem}") from None


def _is_number(text: str) -> bool:
    return text.replace(".", "", 1).isdecimal()
