"""Gates besides accuracy: how a program compares with its baseline, and with its budgets. Pure.

Three sorts of numbers are compared in three ways, so that noise fails no build:

- *in turns* (latency, throughput): a worker ran both programs in rounds, when it had compiled the new one or, if that
  was there already, for the build's gate. Only such rounds count, never numbers of two nodes or of two days.
- *exact* (size): a property of the file.
- *once* (compile and tuning time, load time, memory): one number for each program. It counts as an interval, which is
  wide if another attempt ran on the node, and it is compared only with a number of the same node.

Only a number whose whole interval is beyond the limit fails its cell.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from typing_extensions import TypedDict

from farm.jobs.facts import ArtifactFacts
from farm.jobs.state import FailureKind
from farm.matrix.planned import Baseline, CellPlan, Values
from farm.results.speed import BAND, Comparison
from farm.units import duration, rate, size
from farm.wire.program import Against

SHORT = 0.25
"""Seconds by which a time that is measured once may differ whatever the share: a process's luck makes as much."""

How = Literal["in turns", "exact", "once"]
Outcome = Literal["worse", "better", "within", "unclear", "not compared", "new"]
"""`new`: the baseline's tag has no such cell, so there is nothing to judge."""

DECIDED: frozenset[Outcome] = frozenset({"worse", "better", "within"})

ALONE = 0.1
"""By how much a number that is measured once may be wrong if nothing else ran on the node, as a share of it."""
BESIDE_OTHERS = 0.5
"""The same, if another attempt ran on the node or others used the GPU."""


class Measure(NamedTuple):
    """A number that a gate judges: what it is called, how two of them are compared, whether more of it is better."""

    name: str
    how: How
    more_is_better: bool = False


MEASURES: Mapping[str, Measure] = {
    "latency": Measure("latency", "in turns"),
    "throughput": Measure("throughput", "in turns", more_is_better=True),
    "size": Measure("size", "exact"),
    "memory": Measure("memory", "once"),
    "load": Measure("load time", "once"),
    "compile_time": Measure("compile time", "once"),
    "tuning_time": Measure("tuning time", "once"),
}


_TIMES = ("load", "compile_time", "tuning_time")
_OF_THE_COMPILE = ("memory", "compile_time", "tuning_time")
"""Two compiles may differ in these although their programs are the same."""


class GateRow(TypedDict):
    """One number of one cell against its limit (`against` is the baseline's tag) or its budget (`against` is empty).

    `change` is by which share `value` is above `base`, `interval` in which range that is with 99 % confidence (or, for
    a number that is measured once, by assumption).
    """

    measure: str
    against: str
    value: float | None
    base: float | None
    change: float | None
    interval: tuple[float, float] | None
    limit: float
    outcome: Outcome
    why: str


class Judged(NamedTuple):
    """What the gates say about a cell: all rows, and the failure that follows, if one does."""

    rows: list[GateRow]
    kind: FailureKind | None = None
    message: str = ""


def is_suspicious(found: Comparison, limit: float) -> bool:
    """Whether a program may take longer than another by more than `limit`: it is measured again before it fails."""
    return 1 / found.low - 1 > limit


def values_of(facts: ArtifactFacts) -> Values:
    """Return the numbers in a program's facts (`farm.artifacts.sidecar.facts`); an older farm wrote fewer."""
    tuning = facts.get("tuning")
    return {
        "latency": facts.get("latency"),
        "throughput": facts.get("throughput"),
        "size": facts["program"]["size"],
        "memory": facts.get("peak_memory"),
        "load": facts.get("load"),
        "compile_time": facts.get("compile_seconds"),
        "tuning_time": tuning.get("seconds") if tuning else None,
        "node": facts.get("node") or "",
        "driver": facts.get("driver") or "",
        "shared": bool(facts.get("shared")),
    }


def judge_gates(planned: CellPlan, facts: ArtifactFacts, *, hit: bool) -> Judged:
    """Judge a program by the limits and budgets of its planned cell; `hit`: no attempt of this build made it."""
    gates = planned["gates"]
    values = values_of(facts)
    baseline = planned.get("baseline")
    rows = [
        _limited(name, limit, values, facts, baseline, gates.get("baseline", ""), hit=hit)
        for name, limit in gates.get("limits", {}).items()
    ]
    rows += [_budgeted(name, budget, values, facts, hit=hit) for name, budget in gates.get("budgets", {}).items()]
    if worse := [row for row in rows if row["outcome"] == "worse"]:
        kind = FailureKind.REGRESSION if worse[0]["against"] else FailureKind.BUDGET
        return Judged(rows, kind, "; ".join(map(sentence, worse)))
    absent = bool(baseline and baseline.get("absent"))
    open_ones = [
        row for row in rows if _is_open(row) and (gates.get("undecided") == "fail" or (absent and row["against"]))
    ]
    if open_ones:
        return Judged(rows, FailureKind.UNDECIDED, "cannot judge: " + "; ".join(map(sentence, open_ones)))
    return Judged(rows)


def rule(row: GateRow) -> str:
    """Return the rule that a row is judged by, as a command line has it: `gate latency=5%`, `budget size=50MB`."""
    return written("gate" if row["against"] else "budget", row["measure"], row["limit"])


def written(sort: str, measure: str, limit: float) -> str:
    """Return a rule as a command line has it; `sort` is `gate` or `budget`."""
    if sort == "gate":
        text = _percent(limit).replace(" ", "")
    elif measure == "throughput":
        text = f"{limit:g}"
    elif measure in ("size", "memory"):
        text = size(limit).replace(" ", "")
    else:
        text = f"{limit:g}s" if limit >= 1 else f"{limit * 1e3:g}ms"
    return f"{sort} {measure.replace('_', '-')}={text}"


def sentence(row: GateRow) -> str:
    """Return what a row says, for people: `gate latency=5%: latency is 12 % above prod's (9 % to 15 %)`."""
    name = MEASURES[row["measure"]].name
    if row["outcome"] == "new":
        return f"{rule(row)}: {row['against']} has no such cell yet"
    if row["outcome"] == "not compared":
        what = f"{name} is not compared with {row['against']}" if row["against"] else f"{name} is not judged"
        return f"{rule(row)}: {what}: {row['why']}"
    if not row["against"]:
        return f"{rule(row)}: {name} is {amount(row['measure'], row['value'])}" + (
            f" ({row['why']})" if row["why"] else ""
        )
    assert row["change"] is not None
    text = f"{rule(row)}: {name} is {_moved(row['change'])} {row['against']}'s"
    if row["interval"] and row["interval"][0] != row["interval"][1]:
        text += f" ({_percent(row['interval'][0])} to {_percent(row['interval'][1])})"
    return text + (f"; {row['why']}" if row["why"] else "")


def amount(measure: str, value: float | None) -> str:
    """Return a number of a measure with its unit."""
    if measure == "throughput":
        return rate(value)
    return size(value) if measure in ("size", "memory") else duration(value)


def improvements(rows: Sequence[GateRow]) -> list[str]:
    """Return a sentence for each number that is better than the baseline's."""
    return [sentence(row) for row in rows if row["outcome"] == "better"]


def undecided(rows: Sequence[GateRow]) -> list[str]:
    """Return a sentence for each number that could not be judged, so that nobody believes it was."""
    return [sentence(row) for row in rows if _is_open(row)]


def new(rows: Sequence[GateRow]) -> list[str]:
    """Return a sentence for each number that has nothing to be compared with yet."""
    return [sentence(row) for row in rows if row["outcome"] == "new"]


# --- how they do it -------------------------------------------------------------------------------------------------


def _is_open(row: GateRow) -> bool:
    return row["outcome"] in ("unclear", "not compared")


def _limited(
    name: str,
    limit: float,
    values: Values,
    facts: ArtifactFacts,
    baseline: Baseline | None,
    ref: str,
    *,
    hit: bool,
) -> GateRow:
    measure = MEASURES[name]
    row = _row(name, ref, _value(values, name), limit)
    if baseline is None or not baseline["values"]:
        is_new = baseline is None or not (baseline["key"] or baseline.get("absent"))
        why = baseline.get("absent", "its program is gone") if baseline else ""
        return {**row, "outcome": "new"} if is_new else {**row, "why": why}
    row["base"] = _value(baseline["values"], name)
    if baseline["key"] == facts["key"] or (name not in _OF_THE_COMPILE and runs_alike(facts, baseline)):
        return {**row, "change": 0.0, "outcome": "within", "why": "it is the same program"}
    if measure.how == "in turns":
        return _in_turns(row, facts, baseline, hit=hit)
    if measure.how == "exact":
        return _apart(row, values, baseline["values"])
    row = _apart(row, values, _on_this_node(baseline, values), baseline.get("unread", ""))
    return {**row, "why": "; ".join(filter(None, (row["why"], _of_a_hit(facts) if hit else "")))}


def runs_alike(facts: ArtifactFacts, baseline: Baseline) -> bool:
    """Whether a program and its baseline are the same bytes, run with the same settings under the same toolchain."""
    return bool(ours := facts.get("runs_as")) and ours == baseline.get("runs_as")


def turns_with(baseline: Baseline, facts: ArtifactFacts) -> Against | None:
    """Return how a program compared with its baseline when they last took turns; None if they never did.

    A measurement for this build goes before one of an earlier build, and that before the one of its compile.
    """
    known = (facts.get("turns"), baseline.get("turns"), facts.get("against"))
    return next((each for each in known if each and each["key"] == baseline["key"]), None)


def _on_this_node(baseline: Baseline, values: Values) -> Values | None:
    node = values.get("node", "")
    return baseline["values"] if baseline["values"].get("node") == node else baseline["by_node"].get(node)


def _apart(row: GateRow, values: Values, theirs: Values | None, unread: str = "") -> GateRow:
    """Compare two numbers that were measured apart; None: there is none of this node, as far as that was read."""
    if theirs is None:
        return {**row, "why": "; ".join(filter(None, ("the baseline was made on another node", unread)))}
    value, base = row["value"], _value(theirs, row["measure"])
    row = {**row, "base": base}
    if not value or not base:
        return {**row, "why": "it was not measured"}
    if row["measure"] in _TIMES and abs(value - base) < SHORT:
        why = f"they differ by less than {duration(SHORT)}"
        return {**row, "change": value / base - 1, "outcome": "within", "why": why}
    exact = MEASURES[row["measure"]].how == "exact"
    doubt = 1.0 if exact else (1 + _noise(values)) * (1 + _noise(theirs))
    change = value / base
    return _decided({**row, "change": change - 1, "interval": (change / doubt - 1, change * doubt - 1)})


def _in_turns(row: GateRow, facts: ArtifactFacts, baseline: Baseline, *, hit: bool) -> GateRow:
    against = turns_with(baseline, facts)
    if not against:
        made = f"it is a hit of {_day(facts)}, which" if hit else "the program"
        why = f": {reason}" if (reason := facts.get("unmeasured") or baseline.get("unmeasured")) else ""
        return {**row, "why": f"{made} did not run in turns with this baseline{why}"}
    low, high = against["interval"]
    times = MEASURES[row["measure"]].more_is_better
    change = against["ratio"] - 1 if times else 1 / against["ratio"] - 1
    interval = (low - 1, high - 1) if times else (1 / high - 1, 1 / low - 1)
    earlier = baseline.get("turns") if against is baseline.get("turns") else None
    why = _of_a_hit(facts, earlier["measured"] if earlier else "") if hit and against is not facts.get("turns") else ""
    return {**_decided({**row, "change": change, "interval": interval}), "why": why}


def _decided(row: GateRow) -> GateRow:
    """Return a row with what its interval says; for what should be more, a fall counts as what a rise is for others."""
    assert row["interval"] is not None
    measure = MEASURES[row["measure"]]
    low, high = (-row["interval"][1], -row["interval"][0]) if measure.more_is_better else row["interval"]
    least = row["limit"] if measure.how == "once" else BAND
    outcome: Outcome = "within"
    if low > row["limit"]:
        outcome = "worse"
    elif high > row["limit"]:
        outcome = "unclear" if measure.how == "in turns" else "within"
    elif high < -least:
        outcome = "better"
    return {**row, "outcome": outcome}


def _budgeted(name: str, budget: float, values: Values, facts: ArtifactFacts, *, hit: bool) -> GateRow:
    measure, value = MEASURES[name], _value(values, name)
    row = _row(name, "", value, budget)
    if value is None:
        return {**row, "why": "it was not measured"}
    if values.get("shared") and measure.how == "in turns":
        return {**row, "why": f"{amount(name, value)} was measured while others ran on the node"}
    over = value < budget if measure.more_is_better else value > budget
    why = _of_a_hit(facts) if hit and measure.how != "exact" else ""
    return {**row, "outcome": "worse" if over else "within", "why": why}


def _row(name: str, against: str, value: float | None, limit: float) -> GateRow:
    return {
        "measure": name,
        "against": against,
        "value": value,
        "base": None,
        "change": None,
        "interval": None,
        "limit": limit,
        "outcome": "not compared",
        "why": "",
    }


def _value(values: Values, name: str) -> float | None:
    found = values.get(name)
    assert found is None or isinstance(found, int | float)
    return found


def _noise(values: Values) -> float:
    return BESIDE_OTHERS if values.get("shared") else ALONE


def _day(facts: ArtifactFacts) -> str:
    return str(facts.get("created") or "an unknown day")[:10]


def _of_a_hit(facts: ArtifactFacts, measured: str = "") -> str:
    return f"measured on {measured[:10] or _day(facts)}, it is a hit"


def _moved(change: float) -> str:
    return "the same as" if abs(change) < 5e-4 else f"{_percent(abs(change))} {'above' if change > 0 else 'below'}"


def _percent(share: float) -> str:
    return f"{share * 100:.3g} %" if abs(share) < 10 else f"{share * 100:.0f} %"
