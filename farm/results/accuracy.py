"""Judge a program by the facts that its attempt left. Errors are facts; tolerances are each build's own. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from farm.jobs.facts import ArtifactFacts
from farm.jobs.state import FailureKind
from farm.runner.documents import Evidence

OTHERS = "*"
"""The name under which tolerances hold for every output that has none of its own."""


class Judgement(NamedTuple):
    """Why a build does not accept a program: the gate's kind, and one sentence that names the output."""

    kind: FailureKind
    message: str


def judge(
    facts: Evidence,
    tolerances: Mapping[str, float],
    weak: str = "warn",
    *,
    equal_share: float = 0.99,
) -> Judgement | None:
    """Return why a program is not accurate enough, or None. Of doubted outputs `judge_unverified` speaks.

    `facts` are those of the artifact's sidecar (`errors`, `equal`, `nonfinite`, `spread`, `weak`); without any
    of them there was no verification, and nothing to judge. `tolerances` are the largest rel_l2 by output name,
    `*` for all others. `weak` is what follows weak evidence: `fail`, or `warn` and `ok`, which pass.
    `equal_share` is what integer and bool outputs need.
    """
    doubted = facts.get("doubted", {})
    if differs := _difference(_only(facts, lambda name: name not in doubted), tolerances, equal_share):
        return differs
    if weak == "fail" and (weak_ones := weak_outputs(facts, tolerances, equal_share=equal_share)):
        name = weak_ones[0]
        return _refused(
            f"weak evidence: output `{name}` varies by {facts['spread'][name]:.2g} over the samples, so that "
            "always giving their mean would pass"
            if name
            else "weak evidence: the samples are too few, or the outputs do not depend on them"
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
        return _refused(
            f"output `{name}` is off by {facts['errors'][name]:.2g} (rel_l2), the tolerance is {limit:.2g}"
            + _others(beyond)
        )
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
    differs = _difference(_only(facts, doubted.__contains__), tolerances, equal_share)
    said = f"not verified: {differs.message}, but {next(iter(doubted.values()))}" if differs else ""
    message = "; ".join(filter(None, [unverified, said]))
    return Judgement(FailureKind.UNVERIFIABLE, message) if message else None


def _only(facts: Evidence, wanted: Callable[[str], bool]) -> Evidence:
    """Return how some of the outputs compare."""
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


_ON_CUDA = " on CUDA"
"""Ends the name of an operator that TensorRT left to CUDA."""


def _named(nodes: Mapping[str, Sequence[str]]) -> str:
    return ", ".join(f"{operator} (`{names[0]}`)" for operator, names in nodes.items())


def weak_outputs(facts: Evidence, tolerances: Mapping[str, float], *, equal_share: float = 0.99) -> Sequence[str]:
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
