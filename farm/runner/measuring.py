"""Programs that run: their outputs against the reference, their speed alone and in turns with others.

*Evidence* says how far outputs are from the reference, and whether the samples could show it at all.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from .protocol import CannotRun, RequestFailed
from .samples import make_samples, points_of

if TYPE_CHECKING:
    from . import documents
    from .documents import Array, Arrays, Evidence, Request, SamplePoint, TimedProgram, Verification
    from .launcher import Messages

MAX_RUNS = 2_000  # Runs of one program in one round at most.
MAX_TOLD = 40_000  # Runs of all programs in all rounds at most: so many fit into an answer.
FIRST_SECONDS = 60.0  # No first run is begun after so long: one of a small net takes half a minute on MIGraphX's `ref`.
MAX_REPEATS = 10_000
_MAX_RUNS = {"ref": 2}  # Runs that verification takes at most of a device on which one run can last minutes.


class Program(ABC):
    """Something that runs: a compiled program from its file, or an original model."""

    outputs: list[str]  # Names of the outputs in the model's order.

    def prepare(self, feeds: Arrays) -> Any:
        """Return the inputs in the compiler's own form; arrays by input name come in."""
        return feeds

    @abstractmethod
    def run(self, prepared: Any) -> list[Array]:
        """Run once, with the copies from and to the host, and return the outputs in order."""

    def run_on_device(self, prepared: Any) -> Callable[[], None] | None:
        """Return what runs once without host copies, or None if that is the same."""
        return None


def evaluate(
    request: Request,
    messages: Messages,
    load: Callable[[Request], Program],
    runs: Sequence[Arrays],
    references: Sequence[Arrays],
    meta: documents.RunsHeader,
) -> documents.EvaluateAnswer:
    """Load the program, compare its outputs with those of a reference's runs (`load_runs`), and measure it.

    Its first runs and its loading are figures too.
    """
    points = meta["points"]
    most = _MAX_RUNS.get(request["device"], len(runs))
    starts = accumulate([point["runs"] for point in points], initial=0)
    parts = [range(start, start + min(most, point["runs"])) for start, point in zip(starts, points, strict=False)]
    total = sum(len(part) for part in parts)
    started = time.perf_counter()
    program = load(request)
    loading = time.perf_counter() - started
    times: list[list[float]] = []
    found = []
    try:
        for point, part in zip(points, parts, strict=True):
            outputs = []
            times.append([])
            for index in part:
                messages.phase("verifying", sum(map(len, times)) / total)
                prepared = program.prepare(runs[index])
                began = time.perf_counter()
                values = program.run(prepared)
                times[-1].append(time.perf_counter() - began)
                outputs.append(dict(zip(program.outputs, values, strict=True)))
            found.append(_compare(request, point, meta["minimum"], [references[index] for index in part], outputs))
    except RequestFailed as failure:
        # Samples that no reference accepts prove nothing against the program.
        if not (isinstance(failure, CannotRun) or (meta.get("refused") and not references[0])):
            raise
        print(f"the program was not run: {failure.message}", flush=True)  # noqa: T201 (the log)
        nothing: Verification = {
            **worst([_compare(request, points[0], 0, [{}], [{}])]),  # Figures of no output.
            "origin": {},
            "samples": 0,
            "runs": 0,
            "unverified": dict.fromkeys(program.outputs, failure.message),
        }
        return {"verification": nothing, "measurements": {"load": loading}}
    samples = min(min(point["samples"], len(part) * point["batch"]) for point, part in zip(points, parts, strict=True))
    messages.phase("measuring", 0.0)
    budget = float(request.get("measure_seconds") or 0) / len(points)
    measured: list[documents.MeasuredPoint] = []
    for point, part, verifying in zip(points, parts, times, strict=True):
        prepared = program.prepare(runs[part[0]])
        # Verification was the warm-up. If its last run took longer than the whole budget, that is the only one.
        several = verifying[-1] < budget
        repeats = times_of(partial(program.run, prepared), budget, messages=messages) if several else verifying[-1:]
        on_device = program.run_on_device(prepared)
        device_repeats = times_of(on_device, budget, messages=messages) if on_device and several else []
        verifying.extend(repeats)
        latency, shapes = latency_of(repeats), {name: list(array.shape) for name, array in runs[part[0]].items()}
        throughput = point["batch"] / latency["median"] if latency["median"] else None
        measured.append({"batch": point["batch"], "shapes": shapes, "latency": latency, "throughput": throughput})
    return {
        "verification": {
            **worst(found),
            "samples": samples,
            "runs": total,
            "origin": meta["origin"],
            "unverified": meta.get("unverified", {}),
            "doubted": meta.get("doubted", {}),
        },
        # Of a dynamic program the figures are those of its largest sizes; all of them are in `points`.
        "measurements": {
            "load": loading,
            "first_run_cold": times[0][0],
            "first_run_warm": times[0][1],
            "latency": latency,
            "device_latency": latency_of(device_repeats) if device_repeats else None,
            "throughput": throughput,
            "points": measured if len(measured) > 1 else [],
        },
    }


def _compare(
    request: Request, point: SamplePoint, minimum: int, references: Sequence[Arrays], outputs: Sequence[Arrays]
) -> Evidence:
    missing = [name for name in references[0] if name not in outputs[0]]
    if missing:
        raise RequestFailed("compiler_error", f"the program has no output '{missing[0]}'")
    compared = compare(
        references, outputs, batch=point["batch"], tolerance=request["tolerance"], equal_share=request["equal"]
    )
    ran = len(outputs) * point["batch"]
    few = min(point["samples"], ran) < min(minimum, ran)
    return {**compared, "weak": bool(references[0]) and (compared["weak"] or few)}


def latency_of(seconds: Sequence[float]) -> documents.Latency:
    """Return the percentiles of runs."""
    median, p90, p99 = (float(value) for value in np.quantile(seconds, (0.5, 0.9, 0.99)))
    return {"median": median, "p90": p90, "p99": p99, "minimum": float(min(seconds)), "repeats": len(seconds)}


def times_of(
    run: Callable[[], Any], seconds: float, *, least: int = 1, most: int = MAX_REPEATS, messages: Messages | None = None
) -> list[float]:
    """Return the seconds of each run, one after another, until so many are spent; `least` and `most` are of runs.

    `messages` hears each second how far it is.
    """
    times: list[float] = []
    start = said = time.perf_counter()
    while len(times) < least or (time.perf_counter() - start < seconds and len(times) < most):
        began = time.perf_counter()
        run()
        now = time.perf_counter()
        # To a nanosecond: more digits have no meaning, and make the answer longer.
        times.append(round(now - began, 9))
        if messages and now - said > 1:
            said = now
            messages.phase("measuring", min(1.0, (now - start) / seconds))
    return times


# --- turns --------------------------------------------------------------------------------------------------------


def bench(request: Request, messages: Messages, load: Callable[[Request], Any]) -> list[TimedProgram]:
    """Load every program of the request, time its first runs, then let them take turns.

    The order turns around with each round (ABBA), so that a drift of the machine meets all alike. `load` returns the
    program that a part of the request describes.
    """
    # What all programs share, and its own fields of each; a model as it is has no program.
    parts: list[Request] = [{**request, **program} for program in request["programs"]]  # type: ignore[typeddict-item]
    loaded = [_load(part, messages, load) for part in parts]
    rounds, seconds = int(request["rounds"]), float(request["seconds"])
    most = max(1, min(MAX_RUNS, MAX_TOLD // max(1, rounds * len(loaded))))
    for number in range(rounds):
        messages.phase("measuring", number / rounds, "rounds")
        for run, timed in reversed(loaded) if number % 2 else loaded:
            if timed["first"] and timed["first"][-1] < seconds / rounds / 4:
                run()  # the caches hold what ran before
            timed["rounds"] = [*timed["rounds"], times_of(run, seconds / rounds, most=most)]
    return [timed for _, timed in loaded]


def _load(
    request: Request, messages: Messages, load: Callable[[Request], Any]
) -> tuple[Callable[[], Any], TimedProgram]:
    """Return what runs a program once, and its times without any round."""
    messages.phase("measuring", None, "loading")
    inputs, batch = points_of(request["inputs"], request.get("batch"))[-1]  # Of dynamic sizes the largest.
    feeds = make_samples(request["samples"], inputs, batch, what="the sample")[0]
    started = time.perf_counter()
    program = load(request)
    seconds = time.perf_counter() - started
    run = partial(program.run, program.prepare(feeds))
    first: list[float] = []
    for number in range(int(request["first"])):
        if sum(first) > FIRST_SECONDS:
            break
        messages.phase("measuring", None, f"run {number + 1}")
        first += times_of(run, 0.0)
    return run, {"load": seconds, "first": first, "rounds": []}


# --- evidence -----------------------------------------------------------------------------------------------------


def compare(
    references: Sequence[Arrays], outputs: Sequence[Arrays], *, batch: int = 1, tolerance: float, equal_share: float
) -> Evidence:
    """Compare outputs with the reference, over all runs, by the figures of `Verification`.

    `errors` is |y| if the reference is all zero, and `rms` is MIGraphX's own measure. The `spread` of what is not float
    is 1 - the share that the best constant answer gets right.
    """
    errors, rms, equal, spread = (dict[str, float]() for _ in range(4))
    nonfinite: list[str] = []
    for name in references[0]:
        pairs = [
            (reference[name], _same_shape(name, output[name], reference[name]))
            for reference, output in zip(references, outputs, strict=True)
        ]
        if pairs[0][0].dtype.kind in "fcV":
            errors[name], rms[name], clean = _float_error(pairs)
            if not clean:
                nonfinite.append(name)
        else:
            same = sum(int(np.count_nonzero(output == reference)) for reference, output in pairs)
            count = sum(int(reference.size) for reference, _ in pairs)
            equal[name] = same / count if count else 1.0
        spread[name] = _spread([reference for reference, _ in pairs], batch)
    return {
        "errors": errors,
        "rms": rms,
        "equal": equal,
        "nonfinite": nonfinite,
        "spread": spread,
        "weak": is_weak(errors, spread, tolerance, equal_share),
    }


def worst(found: Sequence[Evidence]) -> Verification:
    """Return the comparisons at several sizes of a dynamic program as one, which is not better than any of them."""

    def by_output(
        choose: Callable[[Iterator[float]], float], field: Literal["errors", "rms", "equal", "spread"]
    ) -> dict[str, float]:
        return {name: choose(each[field][name] for each in found) for name in found[0][field]}

    return {
        "errors": by_output(max, "errors"),
        "rms": by_output(max, "rms"),
        "equal": by_output(min, "equal"),
        "nonfinite": list(dict.fromkeys(name for each in found for name in each["nonfinite"])),
        "spread": by_output(min, "spread"),
        "weak": any(each["weak"] for each in found),
    }


def is_weak(errors: Mapping[str, float], spreads: Mapping[str, float], tolerance: float, equal_share: float) -> bool:
    """Whether some output's check could not fail: always giving the mean over the samples would pass.

    An output that does not depend on the inputs (spread 0) is a constant by right, unless all are.
    """
    telling = {name: spread for name, spread in spreads.items() if spread > 1e-9}
    if not telling:
        return True
    return any(spread <= (tolerance if name in errors else 1 - equal_share) for name, spread in telling.items())


def _same_shape(name: str, output: Any, reference: Any) -> Any:
    if output.shape == reference.shape:
        return output
    if output.size == reference.size:
        return output.reshape(reference.shape)  # MIGraphX returns a scalar as one element
    shapes = f"{list(output.shape)}, the reference {list(reference.shape)}"
    raise RequestFailed("compiler_error", f"output '{name}' of the program has shape {shapes}")


def _float_error(pairs: Sequence[tuple[Any, Any]]) -> tuple[float, float, bool]:
    difference = total = largest = 0.0
    count, clean = 0, True
    for reference, output in pairs:
        r, y = _wide(reference), _wide(output)
        same = np.isfinite(r) & np.isfinite(y)
        clean = clean and bool(np.array_equal(r[~same], y[~same], equal_nan=True))
        r, y = r[same], y[same]
        difference += float(np.sum(np.abs(y - r) ** 2))
        total += float(np.sum(np.abs(r) ** 2))
        largest = max(largest, float(np.max(np.abs(r), initial=0)), float(np.max(np.abs(y), initial=0)))
        count += r.size
    distance = math.sqrt(difference)
    error = distance / math.sqrt(total) if total else distance
    rms = distance / (math.sqrt(count) * largest) if count and largest else 0.0
    return _finite(error), _finite(rms), clean


def _spread(references: Sequence[Any], batch: int) -> float:
    """Cut the runs of an output into samples if its first axis is the batch, else each is one; return their spread."""
    samples = list(references)
    if batch > 1 and all(array.ndim and array.shape[0] == batch for array in references):
        samples = [sample for array in references for sample in array]
    if len({sample.shape for sample in samples}) > 1:
        return 1.0  # the shape itself depends on the input: no constant would pass
    return _float_spread(samples) if samples[0].dtype.kind in "fcV" else _discrete_spread(samples)


def _float_spread(references: Sequence[Any]) -> float:
    samples = [np.nan_to_num(_wide(sample), posinf=0, neginf=0) for sample in references]
    mean = sum(samples) / len(samples)
    total = sum(float(np.sum(np.abs(sample) ** 2)) for sample in samples)
    around = sum(float(np.sum(np.abs(sample - mean) ** 2)) for sample in samples)
    return _finite(math.sqrt(around / total)) if total else 0.0


def _discrete_spread(samples: Sequence[Any]) -> float:
    if not samples[0].size:
        return 0.0

    def agreement(candidate: Any) -> float:
        return float(np.mean([np.mean(candidate == sample) for sample in samples]))

    return 1.0 - max(agreement(candidate) for candidate in samples)


def _wide(array: Any) -> Any:
    return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)


def _finite(value: float) -> float:
    """JSON has no infinity: the largest float stands for it."""
    return value if math.isfinite(value) else 1.7e308
