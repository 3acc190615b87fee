"""The tuning that ONNX Runtime has: how far the graph is rewritten, and how a session runs it.

A candidate is spelt `level/threads` or `level/threads/spin`: the graph optimisation level, the intra-op threads, and
whether waiting threads spin. On CUDA it is `level/threads/search`, with `/nhwc`, `/graph` or both: how cuDNN's
convolutions are chosen when the program is loaded, whether they work in NHWC, and whether the card replays the run as a
CUDA graph; threads decide nothing there. On TensorRT it is `level/threads/builder5`, with `/graph`: how long the
builder looks for an engine.

Each slice is timed under every candidate; what was measured is kept in `onnxruntime.json` in the database's folder:
`{slice key: {candidate: median seconds}}`. A program's choice is the candidate with the smallest sum over its slices.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from .documents import SessionChoice, SlicePart
    from .protocol import Messages

RECORDS = "onnxruntime.json"
_LEVELS = {"quick": ("basic", "all"), "exhaustive": ("basic", "extended", "all")}
_SECONDS = {"quick": 0.05, "exhaustive": 0.25}
"""How long one candidate is timed on one slice."""
_MIN_REPEATS = 3
_AT_ONCE = 8
"""Candidates that are timed before others on the host may measure or compile."""


class Candidate(NamedTuple):
    """One way to run a program."""

    level: str
    threads: int
    spinning: bool = False
    search: str = ""
    """On CUDA: how convolutions are chosen. Empty: as the cell's options say."""
    nhwc: bool = False
    graph: bool = False
    builder: int = -1
    """On TensorRT: the builder's optimisation level. Negative: as the cell's options say."""

    @classmethod
    def parse(cls, text: str) -> Candidate:
        """Read back what `str` writes."""
        level, threads, *more = text.split("/")
        search = next((word for word in more if word.isupper()), "")
        builder = next((int(word.removeprefix("builder")) for word in more if word.startswith("builder")), -1)
        return cls(level, int(threads), "spin" in more, search, "nhwc" in more, "graph" in more, builder)

    def __str__(self) -> str:
        words = [self.level, str(self.threads), "spin" * self.spinning, self.search]
        words += ["nhwc" * self.nhwc, "graph" * self.graph, f"builder{self.builder}" * (self.builder >= 0)]
        return "/".join(filter(None, words))

    @classmethod
    def of_session(cls, session: SessionChoice) -> Candidate:
        """Read back what `session` gives."""
        search, nhwc = session.get("cudnn_conv_algo_search", ""), session.get("prefer_nhwc") == "1"
        graph = "1" in (session.get("enable_cuda_graph"), session.get("trt_cuda_graph_enable"))
        builder = int(session.get("trt_builder_optimization_level", -1))
        return cls(session["level"], session["threads"], session["spinning"], search, nhwc, graph, builder)

    @property
    def session(self) -> SessionChoice:
        """What a sidecar says about how to run the program."""
        found: SessionChoice = {"level": self.level, "threads": self.threads, "spinning": self.spinning}
        found.update(self.provider_options)  # type: ignore[typeddict-item]
        return found

    @property
    def provider_options(self) -> dict[str, str]:
        """What it sets of a card's provider."""
        found = {}
        if self.search:
            found = {"cudnn_conv_algo_search": self.search, "prefer_nhwc": str(int(self.nhwc))}
        if self.builder >= 0:
            found = {"trt_builder_optimization_level": str(self.builder)}
        if self.graph:
            found["trt_cuda_graph_enable" if self.builder >= 0 else "enable_cuda_graph"] = "1"
        return found


def default(threads: int) -> Candidate:
    """Return how an untuned program is run."""
    return Candidate("all", threads)


def candidates(mode: str, threads: int) -> list[Candidate]:
    """Return what a mode tries with at most so many threads of a CPU."""
    counts = sorted({1, threads} if mode == "quick" else {*range(1, threads + 1)})
    # One thread waits for nobody, so it never spins.
    return [
        Candidate(level, count, spinning)
        for level in _LEVELS[mode]
        for count in counts
        for spinning in ((False, True) if count > 1 else (False,))
    ]


def time_candidates(
    mode: str, tried: Sequence[Candidate], load: Callable[[Candidate], Callable[[], Any] | None], messages: Messages
) -> dict[str, float]:
    """Return the median seconds of each candidate; `load` gives what runs a slice once, None if it cannot run so."""
    seconds = {}
    for start in range(0, len(tried), _AT_ONCE):
        with messages.alone():
            for candidate in tried[start : start + _AT_ONCE]:
                if run := load(candidate):
                    seconds[str(candidate)] = _median(run, _SECONDS[mode])
    return seconds


def _median(run: Callable[[], Any], seconds: float) -> float:
    """Return the median of runs that take so many seconds together; the first one does not count."""
    run()
    times: list[float] = []
    start = time.perf_counter()
    while len(times) < _MIN_REPEATS or time.perf_counter() - start < seconds:
        before = time.perf_counter()
        run()
        times.append(time.perf_counter() - before)
    return statistics.median(times)


def read_records(folder: Path) -> dict[str, dict[str, float]]:
    """Return what is known; nothing if no slice was measured yet."""
    try:
        records: dict[str, dict[str, float]] = json.loads((folder / RECORDS).read_text())
    except FileNotFoundError:
        return {}
    return records


def add_record(folder: Path, key: str, seconds: Mapping[str, float]) -> None:
    """Keep what was measured of one slice. A reader sees the file before or after, never half of it."""
    records = read_records(folder)
    records[key] = {**records.get(key, {}), **seconds}
    partial = folder / f"{RECORDS}.partial"
    partial.write_text(json.dumps(records, sort_keys=True))
    os.replace(partial, folder / RECORDS)  # noqa: PTH105


def choose(folder: Path, slices: Sequence[SlicePart], threads: int, *, graph: bool = True) -> Candidate:
    """Return the best candidate for a program of these slices (`{key, count}`).

    Only candidates measured on every known slice and for no more threads count; without any it is the default. `graph`
    is whether the program can be replayed as a CUDA graph.
    """
    records = read_records(folder)
    known = [(records[piece["key"]], piece["count"]) for piece in slices if piece["key"] in records]
    common = set.intersection(*(set(times) for times, _ in known)) if known else set()
    parsed = {text: Candidate.parse(text) for text in sorted(common)}
    fitting = [text for text, each in parsed.items() if each.threads <= threads and (graph or not each.graph)]
    totals = {text: sum(times[text] * count for times, count in known) for text in fitting}
    return Candidate.parse(min(totals, key=totals.__getitem__)) if totals else default(threads)
