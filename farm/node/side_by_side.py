"""A program and the one that it is judged by, in turns: what the gates on speed need.

Programs of one toolchain take turns in one process. One of another toolchain runs in processes of its own, under that
toolchain, and the processes take turns.
"""

from __future__ import annotations

from pathlib import Path

from farm.compiling.attempt import is_same_build
from farm.compiling.pipeline import Steps
from farm.compiling.requests import MadeProgram
from farm.jobs.state import Phase
from farm.logging import get_logger
from farm.results.gates import is_suspicious
from farm.results.speed import MIN_PAIRS, Comparison, compare_pairs
from farm.tuning.tuner import Tuner, against
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


def compare_with(
    steps: Steps,
    theirs: Steps,
    ours: MadeProgram,
    latency: float,
    samples: Path | None,
    other: MadeProgram,
    limit: float,
    tuner: Tuner | None = None,
) -> Against:
    """Return how a program compares with another, as a sidecar says it (`measurements.against`).

    `latency` is its median in seconds (0: unknown). `theirs` are the steps of the cell under the other program's
    toolchain, `steps` under its own.

    If it may be slower by more than `limit` (a share), it is measured again, in a process of its own with the programs
    loaded in the other order. Only that counts then: a program's place in memory makes some percent. A `tuner` says
    with which databases a tuned program is measured.

    Raises StepEnded if one of the two does not run here (its toolchain is not installed, other inputs), or if the
    attempt is over.
    """
    toolchain = steps.order["spec"]["toolchain"]
    whole = steps.children.settings.measure_seconds

    def in_turns(rounds: int, *, turned: bool) -> Comparison:
        """Let both take turns in one process."""
        programs = [other, ours] if turned else [ours, other]
        # Each round as long as in the first comparison.
        length = whole / ROUNDS
        rounds = max(MIN_PAIRS, min(rounds, int(LONGEST / 2 / max(length, latency))))
        timed = steps.bench(programs, samples, rounds=rounds, seconds=length * rounds, tuner=tuner)
        first, second = (each["rounds"] for each in timed)
        return compare_pairs(second, first) if turned else compare_pairs(first, second)

    def process_by_process(pairs: int) -> Comparison:
        """Let two toolchains take turns, each in a fresh process; the order turns around with each pair."""
        sides = [(steps, ours, toolchain, tuner), (theirs, other, other.toolchain, None)]
        length = max(whole / pairs, latency)
        rounds: list[list[list[float]]] = [[], []]
        for number in range(max(MIN_PAIRS, min(pairs, int(LONGEST / 2 / length)))):
            turns = list(enumerate(sides))
            for place, (side, program, made_by, own) in reversed(turns) if number % 2 else turns:
                # Where a program lies in memory is a process's luck, so a process counts once.
                timed = side.bench([program], samples, rounds=1, seconds=length, toolchain=made_by, tuner=own)
                rounds[place] += map(list, timed[0]["rounds"])
        return compare_pairs(*rounds)

    def measured(rounds: int, pairs: int, *, turned: bool) -> Comparison:
        with steps.children.phase(Phase.MEASURING):
            apart = not is_same_build(other.toolchain, toolchain)
            return process_by_process(pairs) if apart else in_turns(rounds, turned=turned)

    found = measured(ROUNDS, PAIRS, turned=False)
    if is_suspicious(found, limit):
        log.info("may be slower than its baseline, measuring again", ratio=found.ratio, limit=limit)
        found = measured(ROUNDS_AGAIN, PAIRS_AGAIN, turned=True)
    return against(other.key, found)
