"""Gates: how right a program is, how it compares with its baseline, and with its budgets. Pure.

Errors are facts that its attempt left; tolerances are each build's own.

Three sorts of numbers are compared in three ways, so that noise fails no build:

- *in turns* (latency, throughput): a worker ran both programs in rounds, when it had compiled the new one or, if that
  was there already, for the build's gate. Only such rounds count, never numbers of two nodes or of two days.
- *exact* (size): a property of the file.
- *once* (compile and tuning time, load time, memory): one number for each program. It counts as an interval, which is
  wide if another attempt ran on the node, and it is compared only with a number of the same node.

Only a number whose whole interval is beyond the limit fails its cell.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NotRequired

from typing_extensions import TypedDict

from farm.jobs.facts import ArtifactFacts
from farm.jobs.state import FailureKind, State, is_gate
from farm.matrix.planned import Baseline, CellGates, CellPlan, Values
from farm.results.speed import BAND, Comparison
from farm.runner.documents import Evidence
from farm.units import by_number, duration, rate, size
from farm.wire.program import Against

if TYPE_CHECKING:
    from farm.results.report import JudgedCell


SHORT = 0.25  # Seconds by which a time measured once may differ whatever the share: a process's luck makes as much.

How = Literal["in turns", "exact", "once"]
Outcome = Literal["worse", "better", "within", "unclear", "not compared", "new"]
"""`new`: the baseline's tag has no such cell, so there is nothing to judge."""

DECIDED: frozenset[Outcome] = frozenset({"worse", "better", "within"})
OPEN: Sequence[Outcome] = ("unclear", "not compared")
"""What could not be judged: it is said, so that nobody believes it was."""

ALONE = 0.1  # By how much a number measured once may be wrong if nothing else ran on the node, as a share of it.
BESIDE_OTHERS = 0.5  # The same, if another attempt ran on the node or others used the GPU.


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
    a number that is measured once, by assumption). `ranges` are those of both (`ArtifactFacts`), for a latency.
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
    ranges: NotRequired[Sequence[Sequence[float | None]]]


class Movement(NamedTuple):
    """A number before and after, in words: median and range, the change and its interval, what it is `against`."""

    name: str
    before: str
    after: str
    change: str
    verdict: str = ""
    against: str = ""


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
        "card": facts.get("card", ""),
        "cpu": facts.get("cpu", ""),
        "clocks": facts.get("clocks", {}),
        "range": facts.get("range", []),
        "shared": bool(facts.get("shared")),
    }


def gate_rows(planned: CellPlan, facts: ArtifactFacts, *, hit: bool) -> list[GateRow]:
    """Compare a program with the limits and budgets of its planned cell; `hit`: no attempt of this build made it."""
    gates, baseline = planned["gates"], planned.get("baseline")
    if not (gates.get("limits") or gates.get("budgets")):
        return []
    values = values_of(facts)
    rows = [
        _limited(name, limit, values, facts, baseline, gates.get("baseline", ""), hit=hit)
        for name, limit in gates.get("limits", {}).items()
    ]
    return rows + [_budgeted(name, budget, values, facts, hit=hit) for name, budget in gates.get("budgets", {}).items()]


def judge_gates(planned: CellPlan, rows: Sequence[GateRow]) -> Judgement | None:
    """Return why the gates refuse a program that was compared so (`gate_rows`)."""
    gates, baseline = planned["gates"], planned.get("baseline")
    if worse := [row for row in rows if row["outcome"] == "worse"]:
        kind = FailureKind.REGRESSION if worse[0]["against"] else FailureKind.BUDGET
        return Judgement(kind, "; ".join(map(sentence, worse)))
    absent = bool(baseline and baseline.get("absent"))
    fails = gates.get("undecided") == "fail"
    texts = sentences([row for row in rows if fails or (absent and row["against"])], *OPEN)
    return Judgement(FailureKind.UNDECIDED, f"cannot judge: {'; '.join(texts)}") if texts else None


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
        why = f" ({row['why']})" if row["why"] else ""
        return f"{rule(row)}: {name} is {amount(row['measure'], row['value'])}{why}"
    assert row["change"] is not None
    text = f"{rule(row)}: {name} is {_moved(row['change'])} {row['against']}'s"
    if row["interval"] and row["interval"][0] != row["interval"][1]:
        text += f" ({_percent(row['interval'][0])} to {_percent(row['interval'][1])})"
    return text + (f"; {row['why']}" if row["why"] else "")


_VERDICTS: dict[Outcome, str] = {
    "worse": "worse than",
    "unclear": "too close to tell from",
    "better": "better than",
    "within": "within the limit of",
}


def moved(row: GateRow, how: str = "") -> Movement | None:
    """Return a number that was compared, in words; None for one that was not. `how` follows the change."""
    if row["change"] is None:
        return None
    low, high = row["interval"] or (0.0, 0.0)
    change = f"{row['change']:+.1%}{how}" + (f" ({low:+.1%} to {high:+.1%})" if low != high else "")
    values = zip((row["base"], row["value"]), row.get("ranges") or ([], []), strict=True)
    before, after = (
        amount(row["measure"], value)
        + (f" ({duration(found[0])} to {duration(found[1])})" if found and all(found) else "")
        for value, found in values
    )
    verdict = f"{_VERDICTS[row['outcome']]} {row['against']}'s" if row["against"] else ""
    return Movement(MEASURES[row["measure"]].name, before, after, change, verdict, row["against"])


def moved_latency(before: ArtifactFacts, after: ArtifactFacts, turns: Against | None = None) -> Movement | None:
    """Return how two programs' latencies differ, in words; `turns`: how they compared, if the facts do not have it.

    Without turns the change has no interval: medians of different times differ without a cause. None without latencies.
    """
    row, base = _row("latency", "", after["latency"], 0.0), before["latency"]
    row = {**row, "base": base, "ranges": [each.get("range", []) for each in (before, after)]}
    known = (turns, after.get("turns"), after.get("against"))
    if found := next((each for each in known if each and each["key"] == before["key"]), None):
        shared = after.get("shared") if found is after.get("against") else found.get("shared")
        return moved(_turned(row, found), f" in turns{' shared' * bool(shared)}")
    return moved({**row, "change": after["latency"] / base - 1}) if base and after["latency"] else None


def movements(cells: Sequence[JudgedCell]) -> list[tuple[str, Movement]]:
    """Return what is worse or better than a baseline's number, or too close to tell, with its cell; the worst first."""
    order = [*_VERDICTS][:3]
    rows = [
        ((order.index(row["outcome"]), -abs(row["change"] or 0.0), by_number(name)), (name, said))
        for cell in cells
        for row in cell.get("compared") or ()
        if row["outcome"] in order and row["against"] and (name := cell["identifier"]) and (said := moved(row))
    ]
    return [found for _, found in sorted(rows, key=lambda each: each[0])]


def amount(measure: str, value: float | None) -> str:
    """Return a number of a measure with its unit."""
    if measure == "throughput":
        return rate(value)
    return size(value) if measure in ("size", "memory") else duration(value)


def sentences(rows: Sequence[GateRow], *outcomes: Outcome) -> list[str]:
    """Return a sentence for each number with one of these outcomes."""
    return [sentence(row) for row in rows if row["outcome"] in outcomes]


# --- how they do it -------------------------------------------------------------------------------------------------


def _limited(
    name: str, limit: float, values: Values, facts: ArtifactFacts, baseline: Baseline | None, ref: str, *, hit: bool
) -> GateRow:
    measure = MEASURES[name]
    row = _row(name, ref, _value(values, name), limit)
    if baseline is None or not baseline["values"]:
        is_new = baseline is None or not (baseline["key"] or baseline.get("absent"))
        why = baseline.get("absent", "its program is gone") if baseline else ""
        return {**row, "outcome": "new"} if is_new else {**row, "why": why}
    row["base"] = _value(baseline["values"], name)
    if name == "latency":
        row["ranges"] = [each.get("range", []) for each in (baseline["values"], values)]
    if baseline["key"] == facts["key"] or (name not in _OF_THE_COMPILE and runs_alike(facts, baseline)):
        return {**row, "change": 0.0, "outcome": "within", "why": "it is the same program"}
    if measure.how == "in turns":
        return _in_turns(row, facts, baseline, hit=hit)
    if measure.how == "exact":
        return _apart(row, values, baseline["values"])
    node = values.get("node", "")
    here = baseline["values"] if baseline["values"].get("node") == node else baseline["by_node"].get(node)
    row = _apart(row, values, here, baseline.get("unread", ""))
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
    row = _turned(row, against)
    earlier = baseline.get("turns") if against is baseline.get("turns") else None
    why = _of_a_hit(facts, earlier["measured"] if earlier else "") if hit and against is not facts.get("turns") else ""
    disturbed = facts.get("shared") if against is facts.get("against") else against.get("shared")
    why = "; ".join(filter(None, (why, "others ran on the host or used the GPU meanwhile" if disturbed else "")))
    return {**_decided(row), "why": why}


def _turned(row: GateRow, against: Against) -> GateRow:
    low, high = against["interval"]
    if MEASURES[row["measure"]].more_is_better:
        return {**row, "change": against["ratio"] - 1, "interval": (low - 1, high - 1)}
    return {**row, "change": 1 / against["ratio"] - 1, "interval": (1 / high - 1, 1 / low - 1)}


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


# --- accuracy --------------------------------------------------------------------------------------------------------

OTHERS = "*"  # The name under which tolerances hold for every output that has none of its own.
_WEAK = "weak evidence"  # How the message begins if no output is too far off.


class Judgement(NamedTuple):
    """Why a build does not accept a program: the gate's kind, and one sentence that names the output."""

    kind: FailureKind
    message: str


def judge_program(planned: CellPlan, cell: JudgedCell, facts: ArtifactFacts) -> None:
    """Fail a cell that succeeded and does not pass a gate, or warn of what a gate would refuse."""
    gates = cell["gate"]
    from farm.targets.compilers import default_equal_share  # Who lists builds needs no targets.

    share = default_equal_share(cell["precision"])
    judgement = judge(facts, gates["tolerance"], gates["weak"], equal_share=share)
    unverified = judge_unverified(facts.get("unverified", ""), facts, gates["tolerance"], equal_share=share)
    failed = [judgement] if gates["on_fail"] == "fail" else []
    failed += [unverified] if gates.get("unverifiable") == "fail" else []
    fallback = judge_fallback(facts) if gates.get("fallback", "warn") != "allow" else None
    failed += [fallback] if gates.get("fallback") == "fail" else []
    cell["compared"] = gate_rows(planned, facts, hit=cell["hit"])
    if cell["compared"] and (baseline := planned.get("baseline")):
        cell["around"] = between({"toolchain": baseline["toolchain"], **baseline["values"]}, facts)
    failed.append(judge_gates(planned, cell["compared"]))
    if reason := next(filter(None, failed), None):
        cell.update({"state": State.FAILED, "kind": reason.kind, "message": reason.message})
    else:
        cell["warning"] = "; ".join(found.message for found in (judgement, unverified, fallback) if found)


def judge(
    facts: Evidence, tolerances: Mapping[str, float], weak: str = "warn", *, equal_share: float = 0.99
) -> Judgement | None:
    """Return why a program is not accurate enough, or None. Of doubted outputs `judge_unverified` speaks.

    `facts` are those of the artifact's sidecar (`errors`, `equal`, `nonfinite`, `spread`, `weak`); without any
    of them there was no verification, and nothing to judge. `tolerances` are the largest rel_l2 by output name,
    `*` for all others. `weak` is what follows weak evidence: `fail`, or `warn` and `ok`, which pass.
    `equal_share` is what integer and bool outputs need.
    """
    doubted = facts.get("doubted", {})
    certain = _only(facts, lambda name: name not in doubted) if doubted else facts
    if differs := _difference(certain, tolerances, equal_share):
        return differs
    if weak == "fail" and (weak_ones := weak_outputs(facts, tolerances, equal_share=equal_share)):
        name = weak_ones[0]
        return _refused(
            f"{_WEAK}: output `{name}` varies by {facts['spread'][name]:.2g} over the samples, so that "
            "always giving their mean would pass"
            if name
            else f"{_WEAK}: the samples are too few, or the outputs do not depend on them"
        )
    return None


def _difference(facts: Evidence, tolerances: Mapping[str, float], equal_share: float) -> Judgement | None:
    """Return which output is too far from the reference."""
    if nonfinite := facts.get("nonfinite"):
        return _refused(f"output `{nonfinite[0]}` is not finite, but the reference is")
    beyond = {
        name: error / limit if limit else float("inf")
        for name, error in (facts.get("errors") or {}).items()
        if error > (limit := tolerance_of(name, tolerances))
    }
    if beyond:
        name = max(beyond, key=beyond.__getitem__)
        limit = tolerance_of(name, tolerances)
        said = f"output `{name}` is off by {facts['errors'][name]:.2g} (rel_l2), the tolerance is {limit:.2g}"
        return _refused(said + _others(beyond))
    unequal = {name: share for name, share in (facts.get("equal") or {}).items() if share < equal_share}
    if unequal:
        name = min(unequal, key=unequal.__getitem__)
        return _refused(
            f"output `{name}` equals the reference in {unequal[name]:.2%} of its values, "
            f"{equal_share:.0%} are needed" + _others(unequal)
        )
    return None


def judge_unverified(
    unverified: str, facts: Evidence, tolerances: Mapping[str, float], *, equal_share: float = 0.99
) -> Judgement | None:
    """Return why a program is not verified, though it was to be: all of it or some outputs.

    They were compared with nothing (`unverified` says why), or differ from a reference that is not known to be right.
    """
    doubted = facts.get("doubted", {})
    differs = _difference(_only(facts, doubted.__contains__), tolerances, equal_share) if doubted else None
    said = f"not verified: {differs.message}, but {next(iter(doubted.values()))}" if differs else ""
    message = "; ".join(filter(None, [unverified, said]))
    return Judgement(FailureKind.UNVERIFIABLE, message) if message else None


def _only(facts: Evidence, wanted: Callable[[str], bool]) -> Evidence:
    return {
        **facts,
        "errors": {name: error for name, error in (facts.get("errors") or {}).items() if wanted(name)},
        "equal": {name: share for name, share in (facts.get("equal") or {}).items() if wanted(name)},
        "nonfinite": [name for name in facts.get("nonfinite") or () if wanted(name)],
    }


def judge_fallback(facts: ArtifactFacts) -> Judgement | None:
    """Return which nodes run elsewhere, mostly on the CPU, because the GPU's provider has no kernel for them."""
    found: Mapping[str, Sequence[str]] = facts.get("fallback") or {}
    on_cuda = {name.removesuffix(_ON_CUDA): nodes for name, nodes in found.items() if name.endswith(_ON_CUDA)}
    on_cpu = {name: nodes for name, nodes in found.items() if not name.endswith(_ON_CUDA)}
    said = [f"runs on the CPU, with no kernel on the GPU: {_named(on_cpu)}"] if on_cpu else []
    said += [f"runs on CUDA, since TensorRT does not take it: {_named(on_cuda)}"] if on_cuda else []
    return Judgement(FailureKind.FALLBACK, "; ".join(said)) if said else None


_ON_CUDA = " on CUDA"  # Ends the name of an operator that TensorRT left to CUDA.


def _named(nodes: Mapping[str, Sequence[str]]) -> str:
    return ", ".join(f"{operator} (`{names[0]}`)" for operator, names in nodes.items())


def weak_outputs(facts: Evidence, tolerances: Mapping[str, float], *, equal_share: float) -> Sequence[str]:
    """Return the outputs whose check could not fail at these tolerances.

    An empty name stands for the whole check: too few samples, or no output depends on the inputs. An output that
    alone does not depend on them is a constant by right.
    """
    spreads: Mapping[str, float] = facts.get("spread") or {}
    errors = facts.get("errors") or {}
    weak_ones = [
        name
        for name, spread in spreads.items()
        if 1e-9 < spread <= (tolerance_of(name, tolerances) if name in errors else 1 - equal_share)
    ]
    if weak_ones:
        return weak_ones
    # The child judged by default tolerances; with wider spreads than these, only its other reasons are left.
    varying = any(spread > 1e-9 for spread in spreads.values())
    return [""] if spreads and not varying else []


def tolerance_of(output: str, tolerances: Mapping[str, float]) -> float:
    """Return the tolerance of one output."""
    return tolerances[output] if output in tolerances else tolerances[OTHERS]


def _refused(message: str) -> Judgement:
    return Judgement(FailureKind.ACCURACY, message)


def _others(names: Mapping[str, float]) -> str:
    count = len(names) - 1
    return f"; so {'is' if count == 1 else 'are'} {count} more output{'s' * (count > 1)}" if count else ""


# --- which rules refused a cell, and which it passed -----------------------------------------------------------------

Rules = Mapping[str, float]
"""Limits by the names of rules: `gate latency prod` (the baseline's tag), `budget size`, `tolerance y` (an output),
`weak`, `unverifiable`, `fallback`. A refusal holds until the program passes the same rule."""


def rules_of(cell: JudgedCell) -> Rules:
    """Return the rules that refused a judged cell or, if it succeeded, those that it passed.

    A number that could not be judged passes nothing.
    """
    return dict(_rules(cell)) if cell["state"] in (State.SUCCEEDED, State.FAILED) else {}


def _rules(cell: JudgedCell) -> Iterator[tuple[str, float]]:
    gates, kind = cell.get("gate", _NONE), cell["kind"]
    passed = not kind
    if not kind or is_gate(kind):
        outcomes = {"within", "better"} if passed else {"worse"}
        outcomes |= {"unclear", "not compared"} if kind == FailureKind.UNDECIDED else set()
        for row in cell.get("compared") or []:
            if row["outcome"] in outcomes:
                name = f"{'gate' if row['against'] else 'budget'} {row['measure']} {row['against']}".strip()
                yield name, row["limit"]
    if gates["on_fail"] == "fail" and (passed or kind == FailureKind.ACCURACY):
        is_weak = kind == FailureKind.ACCURACY and cell["message"].startswith(_WEAK)
        if not is_weak:
            yield from ((f"tolerance {output}", limit) for output, limit in gates["tolerance"].items())
        if gates["weak"] == "fail" and (passed or is_weak):
            yield "weak", 0.0
    for sort in (FailureKind.UNVERIFIABLE, FailureKind.FALLBACK):
        if gates.get(sort) == "fail" and (passed or kind == sort):
            yield sort.value, 0.0


_NONE: CellGates = {"tolerance": {}, "weak": "", "on_fail": "", "unverifiable": ""}
"""Gates of a report that has none: an older farm wrote it."""


def left_out(refused: Rules, passed: Rules) -> list[str]:
    """Return the rules that refused a cell and that it has not passed since, neither as they were nor stricter."""
    return [written_rule(name, limit) for name, limit in refused.items() if not _is_passed(name, limit, passed)]


def joined(before: Rules, now: Rules) -> Rules:
    """Return what refused a program twice: of two limits of one rule the stricter one."""
    return {**now, **{name: limit for name, limit in before.items() if not _is_passed(name, limit, now)}}


def _is_passed(name: str, limit: float, passed: Rules) -> bool:
    found = passed.get(name, passed.get(f"tolerance {OTHERS}") if name.startswith("tolerance ") else None)
    if found is None:
        return False
    return found >= limit if name == "budget throughput" else found <= limit


def written_rule(name: str, limit: float) -> str:
    """Return a rule as one writes it: `gate latency=5%`, `tolerance y=0.01`, `unverifiable: fail`."""
    sort, _, rest = name.partition(" ")
    if sort == "tolerance":
        return f"tolerance {'' if rest == OTHERS else f'{rest}='}{limit:g}"
    return written(sort, rest.partition(" ")[0], limit) if rest else f"{sort}: fail"


UNCHANGED = "Nothing else changed, as far as is known: toolchain, card, driver, CPU, node and clocks are the same."
CLOCK_BAND = 0.05  # Relative difference of two clocks below which nothing is said: they are never quite the same.


def between(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Return what differs between two measurements, as the facts or values of their programs tell."""
    names = ("toolchain", "card", "driver", "cpu", "node")
    both = [(name, before.get(name), after.get(name)) for name in names]
    then, now = before.get("clocks") or {}, after.get("clocks") or {}
    clocks = [(label, then[label], now[label]) for label in then if label in now]
    return [f"{name} {old} -> {new}" for name, old, new in both if old and new and old != new] + [
        f"clock {label} {old:.0f} -> {new:.0f} MHz" for label, old, new in clocks if abs(new - old) > CLOCK_BAND * old
    ]
