"""The tuning that ONNX Runtime has: how far the graph is rewritten, and how a session runs it.

A candidate is spelt `level/threads` or `level/threads/spin`: the graph optimisation level, the intra-op threads, and
whether waiting threads spin. On CUDA it is `level/threads/search` or `level/threads/search/nhwc`: how cuDNN's
convolutions are chosen when the program is loaded, and whether they work in NHWC; threads decide nothing there.

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

RECORDS = "onnxruntime.json"
_LEVELS = {"quick": ("basic", "all"), "exhaustive": ("basic", "extended", "all")}
_SECONDS = {"quick": 0.05, "exhaustive": 0.25}
"""How long one candidate is timed on one slice."""
_MIN_REPEATS = 3
_SEARCHES = {"quick": ("EXHAUSTIVE", "HEURISTIC"), "exhaustive": ("EXHAUSTIVE", "HEURISTIC", "DEFAULT")}
_CUDA_LEVELS = {"quick": ("all",), "exhaustive": ("basic", "extended", "all")}


class Candidate(NamedTuple):
    """One way to run a program."""

    level: str
    threads: int
    spinning: bool = False
    search: str = ""
    """On CUDA: how convolutions are chosen. Empty: as the cell's options say."""
    nhwc: bool = False

    @classmethod
    def parse(cls, text: str) -> Candidate:
        """Read back what `str` writes."""
        level, threads, *more = text.split("/")
        search = next((word for word in more if word.isupper()), "")
        return cls(level, int(threads), "spin" in more, search, "nhwc" in more)

    def __str__(self) -> str:
        words = [self.level, str(self.threads), "spin" * self.spinning, self.search, "nhwc" * self.nhwc]
        return "/".join(filter(None, words))

    @classmethod
    def of_session(cls, session: SessionChoice) -> Candidate:
        """Read back what `session` gives."""
        search, nhwc = session.get("cudnn_conv_algo_search", ""), session.get("prefer_nhwc") == "1"
        return cls(session["level"], session["threads"], session["spinning"], search, nhwc)

    @property
    def session(self) -> SessionChoice:
        """What a sidecar says of how to run the program."""
        found: SessionChoice = {"level": self.level, "threads": self.threads, "spinning": self.spinning}
        if self.search:
            found["cudnn_conv_algo_search"] = self.search
            found["prefer_nhwc"] = str(int(self.nhwc))
        return found

    @property
    def provider_options(self) -> dict[str, str]:
        """What it sets of CUDA's provider."""
        return {"cudnn_conv_algo_search": self.search, "prefer_nhwc": str(int(self.nhwc))} if self.search else {}


def default(threads: int) -> Candidate:
    """Return how an untuned program is run."""
    return Candidate("all", threads)


def candidates(mode: str, threads: int, *, cuda: bool = False) -> list[Candidate]:
    """Return what a mode tries with at most so many threads, or on a card."""
    if cuda:
        return [
            Candidate(level, threads, search=search, nhwc=nhwc)
            for level in _CUDA_LEVELS[mode]
            for search in _SEARCHES[mode]
            for nhwc in (False, True)
        ]
    counts = sorted({1, threads} if mode == "quick" else {*range(1, threads + 1)})
    # One thread waits for nobody, so it never spins.
    return [
        Candidate(level, count, spinning)
        for level in _LEVELS[mode]
        for count in counts
        for spinning in ((False, True) if count > 1 else (False,))
    ]


def time_candidates(
    mode: str, tried: Sequence[Candidate], load: Callable[[Candidate], Callable[[], Any]]
) -> dict[str, float]:
    """Return the median seconds of each candidate; `load` gives what runs a slice once."""
    seconds = {}
    for candidate in tried:
        run = load(candidate)
        run()
        times: list[float] = []
        start = time.perf_counter()
        while len(times) < _MIN_REPEATS or time.perf_counter() - start < _SECONDS[mode]:
            before = time.perf_counter()
            run()
            times.append(time.perf_counter() - before)
        seconds[str(candidate)] = statistics.median(times)
    return seconds


def read_records(folder: Path) -> dict[str, dict[str, float]]:
    """Return what is known; nothing where no slice was measured yet."""
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


def choose(folder: Path, slices: Sequence[SlicePart], threads: int) -> Candidate:
    """Return the best candidate for a program of these slices (`{key, count}`).

    Only candidates measured on every known slice and for no more threads count; without any it is the default.
    """
    records = read_records(folder)
    known = [(records[piece["key"]], piece["count"]) for piece in slices if piece["key"] in records]
    common = set.intersection(*(set(times) for times, _ in known)) if known else set()
    fitting = sorted(text for text in common if Candidate.parse(text).threads <= threads)
    totals = {text: sum(times[text] * count for times, count in known) for text in fitting}
    return Candidate.parse(min(totals, key=totals.__getitem__)) if totals else default(threads)
