"""The sizes at which a dynamic program is verified and measured, and what several comparisons come to."""

from __future__ import annotations

from farm.runner.measuring import worst
from farm.runner.samples import points_of

SEQ = {"min": 1, "max": 16, "optimals": [4]}
INPUTS = {
    "ids": {"dtype": "int64", "shape": [2, SEQ]},
    "mask": {"dtype": "int64", "shape": [2, {"min": 9, "max": 24, "optimals": [12]}]},
}


def shapes(inputs: object, batch: object) -> list[tuple[object, list[list[int]]]]:
    return [(size, [spec["shape"] for spec in point.values()]) for point, size in points_of(inputs, batch)]  # type: ignore[arg-type]


def test_static_sizes_are_one_point() -> None:
    assert shapes({"x": {"dtype": "float32", "shape": [4, 3]}}, 4) == [(4, [[4, 3]])]


def test_the_smallest_the_optimals_and_the_largest_go_together() -> None:
    """`mask` is `past+seq`: at every point it has to be the sum."""
    assert shapes(INPUTS, 2) == [(2, [[2, 1], [2, 9]]), (2, [[2, 4], [2, 12]]), (2, [[2, 16], [2, 24]])]


def test_a_range_without_optimals_is_at_its_largest_there_and_no_point_is_twice() -> None:
    batch = {"min": 1, "max": 8, "optimals": []}
    inputs = {"x": {"dtype": "float32", "shape": [batch, {"min": 2, "max": 4, "optimals": [2, 4]}]}}
    assert shapes(inputs, batch) == [(1, [[1, 2]]), (8, [[8, 2]]), (8, [[8, 4]])]


def test_a_dynamic_program_is_as_good_as_at_its_worst_size() -> None:
    def found(error: float, equal: float, spread: float, nonfinite: list[str], weak: bool) -> dict[str, object]:
        return {
            "errors": {"y": error},
            "rms": {"y": error},
            "equal": {"i": equal},
            "spread": {"y": spread},
            "nonfinite": nonfinite,
            "weak": weak,
        }

    assert worst([found(0.1, 1.0, 0.5, ["y"], False), found(0.2, 0.9, 0.7, ["y"], True)]) == found(
        0.2, 0.9, 0.5, ["y"], True
    )
