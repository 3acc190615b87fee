"""A program and the one that it is judged by, in turns: what the gates on speed need.

Programs of one toolchain take turns in one process. One of another toolchain runs in processes of its own, under that
toolchain, and the processes take turns.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from farm.compiling.installations import is_same_build
from farm.compiling.pipeline import Steps
from farm.compiling.requests import MadeProgram, bench_request
from farm.jobs.state import Phase
from farm.logging import get_logger
from farm.results.gates import is_suspicious
from farm.results.speed import MIN_PAIRS, Comparison, compare_pairs
from farm.runner.documents import BenchAnswer
from farm.tuning.tuner import PublishedProgram, Tuner
from farm.wire.program import Against

log = get_logger(__name__)

ROUNDS = 20
"""Rounds of the first comparison."""
ROUNDS_AGAIN = 60
"""Rounds if the program may be slower than its limit allows: what fails a build needs more proof."""
PAIRS = 8
"""Pairs of processes of the first comparison of two toolchains; each pair counts as one round."""
PAIRS_AGAIN = 24
"""Pairs of processes if the program may be slower than its limit allows."""
LONGEST = 60.0
"""Seconds that the runs of one comparison should take; slow programs get fewer rounds, down to `MIN_PAIRS`."""


class ComparedProgram(NamedTuple):
    """The program that a gate judges, and its median latency in seconds (0: unknown)."""

    program: MadeProgram
    latency: float


def compare_with(
    steps: Steps,
    theirs: Steps,
    ours: ComparedProgram,
    samples: Path | None,
    other: PublishedProgram,
    limit: float,
    tuner: Tuner | None = None,
) -> Against:
    """Return how a program compares with another, as a sidecar says it (`measurements.against`).

    `theirs` are the steps of the cell under the other program's toolchain, `steps` under its own.

    If it may be slower by more than `limit` (a share), it is measured again, in a process of its own with the programs
    loaded in the other order. Only that counts then: a program's place in memory makes some percent. A `tuner` says
    with which databases a tuned program is measured.

    Raises StepEnded if one of the two does not run here (its toolchain is not installed, other inputs), or if the
    attempt is over.
    """
    apart = not is_same_build(other.toolchain, steps.order["spec"]["toolchain"])

    def measured(rounds: int, pairs: int, *, turned: bool) -> Comparison:
        if apart:
            return _process_by_process(steps, theirs, ours, samples, other, pairs, tuner)
        return _in_turns(steps, ours, samples, other, rounds, tuner, turned=turned)

    found = measured(ROUNDS, PAIRS, turned=False)
    if is_suspicious(found, limit):
        log.info("may be slower than its baseline, measuring again", ratio=found.ratio, limit=limit)
        found = measured(ROUNDS_AGAIN, PAIRS_AGAIN, turned=True)
    return {
        "key": other.key,
        "ratio": found.ratio,
        "interval": [found.low, found.high],
        "verdict": found.verdict,
    }


def _in_turns(
    steps: Steps,
    new: ComparedProgram,
    samples: Path | None,
    other: PublishedProgram,
    rounds: int,
    tuner: Tuner | None,
    *,
    turned: bool = False,
) -> Comparison:
    programs = [new.program, other.program]
    if turned:
        programs.reverse()
    # Each round as long as in the first comparison.
    length = steps.children.settings.measure_seconds / ROUNDS
    run = max(length, new.latency)
    rounds = max(MIN_PAIRS, min(rounds, int(LONGEST / 2 / run)))
    with steps.children.phase(Phase.MEASURING):
        request = bench_request(steps.order, programs, samples, rounds=rounds, seconds=length * rounds)
        read = [*(program.path for program in programs), *([samples] if samples else [])]
        environment, write = (tuner.measuring, [tuner.proof]) if tuner else (None, [])
        answer: BenchAnswer = steps.ask(request, environment, read=read, write=write)
    ours, theirs = (each["rounds"] for each in answer["programs"])
    return compare_pairs(theirs, ours) if turned else compare_pairs(ours, theirs)


def _process_by_process(
    steps: Steps,
    theirs: Steps,
    new: ComparedProgram,
    samples: Path | None,
    other: PublishedProgram,
    pairs: int,
    tuner: Tuner | None,
) -> Comparison:
    """Let two toolchains take turns, each in a fresh process; the order turns around with each pair."""
    toolchain = steps.order["spec"]["toolchain"]
    sides = [(steps, new.program, toolchain, tuner), (theirs, other.program, other.toolchain, None)]
    length = max(steps.children.settings.measure_seconds / pairs, new.latency)
    pairs = max(MIN_PAIRS, min(pairs, int(LONGEST / 2 / length)))
    rounds: list[list[list[float]]] = [[], []]
    with steps.children.phase(Phase.MEASURING):
        for number in range(pairs):
            turns = list(enumerate(sides))
            for place, (side, program, made_by, own) in reversed(turns) if number % 2 else turns:
                # Where a program lies in memory is a process's luck, so a process counts once.
                request = bench_request(steps.order, [program], samples, rounds=1, seconds=length, toolchain=made_by)
                read = [program.path, *([samples] if samples else [])]
                environment, write = (own.measuring, [own.proof]) if own else (None, [])
                answer: BenchAnswer = side.ask(request, environment, read=read, write=write)
                rounds[place] += map(list, answer["programs"][0]["rounds"])
    return compare_pairs(*rounds)
