"""Measuring programs: loading, the first runs, and rounds in which several take turns."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from .samples import make_samples, points_of

if TYPE_CHECKING:
    from .documents import Arrays, BenchProgram, Request, TimedProgram
    from .launcher import Messages

MAX_RUNS = 2_000
"""Runs of one program in one round at most."""
MAX_TOLD = 40_000
"""Runs of all programs in all rounds at most: so many fit into an answer."""
FIRST_SECONDS = 60.0
"""After so long no more first runs are begun: one run of a small net takes half a minute on MIGraphX's `ref`."""


class _Loaded(NamedTuple):
    run: Callable[[], Any]
    load: float
    first: list[float]


def bench(request: Request, messages: Messages, load: Callable[[Request], Any]) -> list[TimedProgram]:
    """Load every program of the request, time its first runs, then let them take turns.

    The order turns around with each round (ABBA), so that a drift of the machine meets all alike. `load` returns the
    program that a part of the request describes.
    """
    with messages.alone():
        return _bench(request, messages, load)


def _bench(request: Request, messages: Messages, load: Callable[[Request], Any]) -> list[TimedProgram]:
    loaded = [_load(_joined(request, program), messages, load) for program in request["programs"]]
    rounds, seconds = int(request["rounds"]), float(request["seconds"])
    times: list[list[list[float]]] = [[] for _ in loaded]
    most = max(1, min(MAX_RUNS, MAX_TOLD // max(1, rounds * len(loaded))))
    for number in range(rounds):
        messages.phase("measuring", number / rounds, "rounds")
        turns = list(enumerate(loaded))
        for place, program in reversed(turns) if number % 2 else turns:
            times[place].append(_round(program, seconds / rounds, most))
    return [
        {"load": program.load, "first": program.first, "rounds": blocks}
        for program, blocks in zip(loaded, times, strict=True)
    ]


def _joined(request: Request, program: BenchProgram) -> Request:
    """Return the request of one program: its own fields, and those that all programs share."""
    whole: Request = {**request, **program}  # type: ignore[typeddict-item]  # A model as it is has no program.
    return whole


def _load(request: Request, messages: Messages, load: Callable[[Request], Any]) -> _Loaded:
    messages.phase("measuring", None, "loading")
    feeds = _feeds(request)
    started = time.perf_counter()
    program = load(request)
    seconds = time.perf_counter() - started
    prepared = program.prepare(feeds)
    first: list[float] = []
    for number in range(int(request["first"])):
        if sum(first) > FIRST_SECONDS:
            break
        messages.phase("measuring", None, f"run {number + 1}")
        first.append(_timed(lambda: program.run(prepared)))
    return _Loaded(lambda: program.run(prepared), seconds, first)


def _feeds(request: Request) -> Arrays:
    """Return the arrays to run with: the first of the request's samples; of dynamic sizes the largest."""
    inputs, batch = points_of(request["inputs"], request.get("batch"))[-1]
    samples = make_samples(request["samples"], inputs, batch, what="the sample")
    feeds: Arrays = samples.runs[0]
    return feeds


def _round(program: _Loaded, seconds: float, most: int) -> list[float]:
    """Return the seconds of each run until a round's time is spent; one run at least, and `most` at most."""
    if program.first and program.first[-1] < seconds / 4:
        program.run()  # the caches hold what ran before
    times: list[float] = []
    end = time.perf_counter() + seconds
    while not times or (time.perf_counter() < end and len(times) < most):
        times.append(_timed(program.run))
    return times


def _timed(run: Callable[[], Any]) -> float:
    started = time.perf_counter()
    run()
    # To a nanosecond: more digits have no meaning, and make the answer longer.
    return round(time.perf_counter() - started, 9)
