"""Evidence: how far a program's outputs are from the reference, and whether the samples could show it at all."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from .protocol import RequestFailed

if TYPE_CHECKING:
    from .documents import Arrays, Evidence, Verification


def compare(
    references: Sequence[Arrays],
    outputs: Sequence[Arrays],
    *,
    batch: int = 1,
    tolerance: float,
    equal_share: float,
) -> Evidence:
    """Compare outputs with the reference, over all runs.

    By output: `errors` (float outputs; rel_l2 = |y - r| / |r|, if r is all zero: |y|), `rms` (MIGraphX's
    measure, |y - r| / (sqrt(n) max|.|)), `equal` (share of equal values of all others), `nonfinite` (outputs
    with inf or NaN where the reference has something else), `spread` (|r - mean over samples| / |r|; of other
    outputs 1 - the share that the best constant answer gets right). `weak` is whether a program that always
    gives that mean would pass.
    """
    errors: dict[str, float] = {}
    rms: dict[str, float] = {}
    equal: dict[str, float] = {}
    spread: dict[str, float] = {}
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
            spread[name] = _float_spread([reference for reference, _ in pairs], batch)
        else:
            equal[name] = _equal_share(pairs)
            spread[name] = _discrete_spread([reference for reference, _ in pairs], batch)
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
    raise RequestFailed(
        "compiler_error",
        f"output '{name}' of the program has shape {list(output.shape)}, the reference {list(reference.shape)}",
    )


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


def _equal_share(pairs: Sequence[tuple[Any, Any]]) -> float:
    equal = sum(int(np.count_nonzero(output == reference)) for reference, output in pairs)
    count = sum(int(reference.size) for reference, _ in pairs)
    return equal / count if count else 1.0


def _samples(arrays: Sequence[Any], batch: int) -> list[Any]:
    """Cut the runs of an output into samples if its first axis is the batch; else each run is one sample."""
    if batch > 1 and all(array.ndim and array.shape[0] == batch for array in arrays):
        return [sample for array in arrays for sample in array]
    return list(arrays)


def _float_spread(references: Sequence[Any], batch: int) -> float:
    samples = [np.nan_to_num(_wide(sample), posinf=0, neginf=0) for sample in _samples(references, batch)]
    if len({sample.shape for sample in samples}) > 1:
        return 1.0  # the shape itself depends on the input: no constant would pass
    mean = sum(samples) / len(samples)
    total = sum(float(np.sum(np.abs(sample) ** 2)) for sample in samples)
    around = sum(float(np.sum(np.abs(sample - mean) ** 2)) for sample in samples)
    return _finite(math.sqrt(around / total)) if total else 0.0


def _discrete_spread(references: Sequence[Any], batch: int) -> float:
    samples = _samples(references, batch)
    if len({sample.shape for sample in samples}) > 1:
        return 1.0
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
