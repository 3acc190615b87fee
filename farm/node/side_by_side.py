"""A new program and the one that it is judged by, in turns in one process: what the gates on speed need."""

from __future__ import annotations

from pathlib import Path

from farm.compiling.children import StepEnded
from farm.compiling.program_record import ProgramRecord, RecordedFollowUp
from farm.compiling.requests import MadeProgram, bench_request
from farm.compiling.steps import Steps
from farm.jobs.state import FailureKind, Phase
from farm.logging import get_logger
from farm.results.gates import is_suspicious
from farm.results.speed import MIN_PAIRS, Comparison, compare_pairs
from farm.runner.documents import BenchAnswer
from farm.tuning.tuner import PublishedProgram, Tuner

log = get_logger(__name__)

ROUNDS = 20
"""Rounds of the first comparison."""
ROUNDS_AGAIN = 60
"""Rounds if the program may be slower than its limit allows: what fails a build needs more proof."""
LONGEST = 60.0
"""Seconds that the runs of one comparison should take; slow programs get fewer rounds, down to `MIN_PAIRS`."""

_ATTEMPT_IS_OVER = frozenset({FailureKind.TIME_LIMIT, FailureKind.GPU_LOST, FailureKind.GPU_FAULT})


def compare_with(
    steps: Steps,
    record: ProgramRecord,
    samples: Path | None,
    other: PublishedProgram,
    limit: float,
    tuner: Tuner | None = None,
) -> RecordedFollowUp | None:
    """Return how the program of a record compares with another, as the sidecar says it (`measurements.against`).

    If it may be slower by more than `limit` (a share), it is measured again, in a process of its own with the programs
    loaded in the other order, and only that counts: where a program lies in memory makes some percent. A `tuner` says
    with which databases a tuned program is measured.

    None if the other program does not run here (made by another toolchain, other inputs): the job's log says why.

    Raises StepEnded if the attempt is over.
    """
    try:
        found = _in_turns(steps, record, samples, other, ROUNDS, tuner)
        if is_suspicious(found, limit):
            log.info("may be slower than its baseline, measuring again", ratio=found.ratio, limit=limit)
            found = _in_turns(steps, record, samples, other, ROUNDS_AGAIN, tuner, turned=True)
    except StepEnded as ended:
        if ended.failure is None or ended.failure.kind in _ATTEMPT_IS_OVER:
            raise
        log.warning("the baseline does not run beside the program", reason=ended.failure.message)
        return None
    return {
        "key": other.key,
        "ratio": found.ratio,
        "interval": [found.low, found.high],
        "verdict": found.verdict,
    }


def _in_turns(
    steps: Steps,
    record: ProgramRecord,
    samples: Path | None,
    other: PublishedProgram,
    rounds: int,
    tuner: Tuner | None,
    *,
    turned: bool = False,
) -> Comparison:
    outputs = [output["name"] for output in record["outputs"]]
    programs = [MadeProgram(steps.program, outputs, record["tuning"].get("session")), other.program]
    if turned:
        programs.reverse()
    # Each round as long as in the first comparison.
    length = steps.children.settings.measure_seconds / ROUNDS
    latency = record["measurements"]["latency"]
    run = max(length, latency["median"] if latency else 0.0)
    rounds = max(MIN_PAIRS, min(rounds, int(LONGEST / 2 / run)))
    with steps.children.phase(Phase.MEASURING):
        request = bench_request(steps.order, programs, samples, rounds=rounds, seconds=length * rounds)
        read = [*(program.path for program in programs), *([samples] if samples else [])]
        environment, write = (tuner.measuring, [tuner.proof]) if tuner else (None, [])
        answer: BenchAnswer = steps.ask(request, environment, read=read, write=write)
    ours, theirs = (each["rounds"] for each in answer["programs"])
    return compare_pairs(theirs, ours) if turned else compare_pairs(ours, theirs)
