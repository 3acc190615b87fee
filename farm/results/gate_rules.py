"""Which rules refused a cell, and which it passed: a refusal holds until the program passes the same rule. Pure.

A rule has a name and a number: `gate latency prod` (the baseline's tag), `budget size`, `tolerance y` (an output),
`unverifiable`, `fallback`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from farm.jobs.state import GATES, FailureKind, State
from farm.matrix.planned import CellGates
from farm.results.accuracy import OTHERS
from farm.results.gates import written
from farm.results.report import JudgedCell

Rules = Mapping[str, float]

REMEMBERED = ("gate ", "budget ")
"""How the rules begin whose refusals `latest` remembers. The others apply to every build, by default as the farm has
them; who accepts a larger error says so in the manifest, where it is reviewed."""


def rules_of(cell: JudgedCell) -> Rules:
    """Return the rules that refused a judged cell or, if it succeeded, those that it passed.

    A number that could not be judged passes nothing.
    """
    return dict(_rules(cell)) if cell["state"] in (State.SUCCEEDED, State.FAILED) else {}


def _rules(cell: JudgedCell) -> Iterator[tuple[str, float]]:
    gates, kind = cell.get("gate", _NONE), cell["kind"]
    passed = not kind
    if passed or kind in GATES:
        outcomes = {"within", "better"} if passed else {"worse"}
        outcomes |= {"unclear", "not compared"} if kind == FailureKind.UNDECIDED else set()
        for row in cell.get("compared") or []:
            if row["outcome"] in outcomes:
                yield (
                    f"{'gate' if row['against'] else 'budget'} {row['measure']} {row['against']}".strip(),
                    row["limit"],
                )
    if gates["on_fail"] == "fail" and (passed or kind == FailureKind.ACCURACY):
        yield from ((f"tolerance {output}", limit) for output, limit in gates["tolerance"].items())
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
