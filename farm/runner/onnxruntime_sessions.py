"""Sessions of ONNX Runtime: how one runs a program, which of the ways tuning tries, and the providers that it gets.

A candidate is spelt `level/threads` or `level/threads/spin`: the graph optimisation level, the intra-op threads, and
whether waiting threads spin. On CUDA it is `level/threads/search`, with `/nhwc`, `/graph` or both: how cuDNN's
convolutions are chosen when the program is loaded, whether they work in NHWC, and whether the card replays the run as a
CUDA graph; threads decide nothing there. On TensorRT it is `level/threads/builder5`, with `/graph`: how long the
builder looks for an engine.

Each slice is timed under every candidate; what was measured is kept in `onnxruntime.json` in the database's folder:
`{slice key: {candidate: median seconds}}`. A program's choice is the candidate with the smallest sum over its slices.

The providers follow one rule for the child that verifies and measures a program, and for users who load it.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from .documents import SessionChoice, SlicePart
    from .launcher import Messages


RECORDS = "onnxruntime.json"
_LEVELS = {"quick": ("basic", "all"), "exhaustive": ("basic", "extended", "all")}
_SECONDS = {"quick": 0.05, "exhaustive": 0.25}  # How long one candidate is timed on one slice.
_MIN_REPEATS = 3
_AT_ONCE = 8  # Candidates that are timed before others on the host may measure or compile.


class Candidate(NamedTuple):
    """One way to run a program."""

    level: str
    threads: int
    spinning: bool = False
    search: str = ""  # On CUDA: how convolutions are chosen. Empty: as the cell's options say.
    nhwc: bool = False
    graph: bool = False
    builder: int = -1  # On TensorRT: the builder's optimisation level. Negative: as the cell's options say.

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
    from .measuring import times_of

    seconds = {}
    for start in range(0, len(tried), _AT_ONCE):
        with messages.alone():
            for candidate in tried[start : start + _AT_ONCE]:
                if run := load(candidate):
                    run()
                    seconds[str(candidate)] = statistics.median(times_of(run, _SECONDS[mode], least=_MIN_REPEATS))
    return seconds


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

    Only candidates measured on every known slice and for no more threads count; without any it is an untuned program's.
    `graph` is whether the program can be replayed as a CUDA graph.
    """
    records = read_records(folder)
    known = [(records[piece["key"]], piece["count"]) for piece in slices if piece["key"] in records]
    common = set.intersection(*(set(times) for times, _ in known)) if known else set()
    parsed = {text: Candidate.parse(text) for text in sorted(common)}
    fitting = [text for text, each in parsed.items() if each.threads <= threads and (graph or not each.graph)]
    totals = {text: sum(times[text] * count for times, count in known) for text in fitting}
    return Candidate.parse(min(totals, key=totals.__getitem__)) if totals else Candidate("all", threads)


CUDA = "CUDAExecutionProvider"
TENSORRT = "TensorrtExecutionProvider"
CPU = "CPUExecutionProvider"

ON_CARDS = {"cuda": CUDA, "tensorrt": TENSORRT}  # The provider of each device that is a card.

_CUDA = ("gpu_mem_limit", "arena_extend_strategy", "cudnn_conv_algo_search", "prefer_nhwc")
_TENSORRT = ("trt_max_workspace_size", "trt_builder_optimization_level", "trt_sparsity_enable")


def device_of(arch: str, toolchain: str) -> str:
    """Return the device (`cpu`, `cuda`, `tensorrt`) of a program of ONNX Runtime's, by what its key says."""
    if not arch.startswith("sm_"):
        return "cpu"
    return "tensorrt" if "-tensorrt" in toolchain else "cuda"


def environment_of(device: str, precision: str) -> dict[str, str]:
    """Return the variables of a process that runs a program: TensorRT takes TF32 if none of them forbids it."""
    return {"NVIDIA_TF32_OVERRIDE": "0"} if device == "tensorrt" and precision != "tf32" else {}


def providers_of(
    device: str, precision: str, options: Mapping[str, Any], found: Mapping[str, Any]
) -> list[tuple[str, dict[str, str]]]:
    """Return the providers of a session in order, with their options, for a program of a device and precision.

    `options` are the cell's; what tuning `found` best comes before them. A CUDA graph is not among it: such a session
    reads and writes the same memory at every run, so it is right only for callers that bind it. What TensorRT does not
    take, CUDA runs.
    """
    if device == "cpu":
        return [(CPU, {})]
    # TF32 is on for the precision of that name and off for all others, whatever the provider's default.
    cuda = {"use_tf32": str(int(precision == "tf32")), **_asked(_CUDA, options, found)}
    chosen = [(CUDA, cuda), (CPU, {})]
    return [(TENSORRT, _asked(_TENSORRT, options, found)), *chosen] if device == "tensorrt" else chosen


def _asked(names: Sequence[str], options: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, str]:
    """Return what is set of a provider. What is off, or 0 but for a level, stays its default: it need not know it."""
    asked = {name: options[name] for name in names if options.get(name) or (name in options and "level" in name)}
    chosen = {name: "1" if value is True else str(value) for name, value in asked.items()}
    return chosen | {name: str(found[name]) for name in names if found.get(name)}
