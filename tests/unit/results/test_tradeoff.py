"""Which program to ship: the front of latency and error, what is not sure, and what is recommended."""

from __future__ import annotations

from typing import Any

import pytest

from farm.cli.cell_commands import lines, weighed
from farm.results.tradeoff import NOISY
from farm.results.verdict import BAND, CellLine


def program(precision: str, latency: float | None, error: float | None, **more: Any) -> CellLine:
    """The line of a cell with these facts."""
    facts = {
        "latency": latency,
        "p99": latency and latency * more.pop("tail", 1.2),
        "throughput": latency and 1 / latency,
        "errors": {} if error is None else {"y": error},
        "program": {"size": more.pop("size", 1000)},
        "shared": more.pop("shared", False),
    }
    shape, passed = more.pop("shape", "b1"), more.pop("passed", True)
    cell: Any = {"identifier": f"net/onnxruntime-cpu/{precision}/{shape}", "model": "net"}
    cell |= {"target": "onnxruntime-cpu", "precision": precision, "shape": shape}
    known: Any = {**facts, **more}
    return CellLine.named(cell, known)._replace(look="compiled" if passed else "failed")


def said(*cells: CellLine) -> list[str]:
    """The recommendations for them."""
    return lines(weighed("b-1", "net", cells))[len(cells) + 2 :]


PLACE = "onnxruntime-cpu b1"


def test_the_front_has_what_nothing_else_beats_in_both() -> None:
    found = weighed("b-1", "net", [
        program("fp32", 0.010, 1e-7), program("fp16", 0.006, 1e-3), program("bf16", 0.007, 1e-2),
        program("int8", 0.004, 2e-2), program("int4", 0.001, 3e-1, passed=False), program("tf32", None, 1e-4),
        program("fp32", 0.020, 0.0, shape="b8"),
    ])  # fmt: skip
    assert [each["precision"] + "/" + each["shape"] for each in found["cells"] if each["on_front"]] == [
        "fp32/b1", "fp16/b1", "int8/b1", "fp32/b8",
    ]  # fmt: skip
    assert [each["gain"] and round(each["gain"], 2) for each in found["cells"]] == [
        1.0,
        1.67,
        1.43,
        2.5,
        10.0,
        None,
        1.0,
    ]


def test_of_programs_that_are_alike_in_one_number_the_better_in_the_next_is_on_the_front() -> None:
    found = weighed("b-1", "net", [
        program("fp16", 0.01, 1e-3, size=2), program("fp32", 0.01, 1e-3, size=1), program("int8", 0.01, 1e-2, size=0),
        program("bf16", 0.02, 1e-3, size=0),
    ])  # fmt: skip
    assert [each["precision"] for each in found["cells"] if each["on_front"]] == ["fp32"]
    assert said(program("fp16", 0.01, 1e-3, size=2), program("fp32", 0.01, 1e-3, size=1))[0].startswith(
        f"{PLACE}: ship fp32"
    )


def test_the_fastest_that_passed_is_recommended_for_each_shape() -> None:
    assert said(
        program("fp32", 0.01, 1e-7, size=4000), program("int8", 0.004, 2e-2), program("int4", 1e-3, 0.3, passed=False),
        program("fp32", 0.08, 1e-7, shape="b8"),
    ) == [
        f"{PLACE}: ship int8: 2.50x fp32, error 2.0e-02, 1 kB; the fastest of those that passed",
        "onnxruntime-cpu b8: ship fp32: error 1.0e-07, 1 kB; the only one that passed and is sure",
    ]  # fmt: skip


@pytest.mark.parametrize("doubt", [{"unverified": "output `z` was not verified: it is random"}, {"nonfinite": ["z"]}])
def test_one_output_that_was_not_compared_is_enough_to_recommend_another(doubt: dict[str, Any]) -> None:
    assert said(program("fp32", 0.01, 1e-7), program("fp16", 0.004, 1e-3, **doubt)) == [
        f"{PLACE}: ship fp32: error 1.0e-07, 1 kB; the only one that passed and is sure"
    ]


def test_a_gain_that_two_measurements_may_differ_by_is_not_worth_an_error() -> None:
    for slower, name in ((1 + BAND, "fp32"), (1.01 + BAND, "fp16")):
        assert said(program("fp32", 0.01 * slower, 1e-7), program("fp16", 0.01, 1e-3))[0].startswith(
            f"{PLACE}: ship {name}"
        )
    assert said(program("fp32", 0.0100, 1e-7), program("fp16", 0.0095, 1e-3)) == [
        f"{PLACE}: ship fp32: error 1.0e-07, 1 kB; fp16 is not faster by more than 10%, and this has the smaller error"
    ]


def test_what_is_not_sure_is_marked_and_never_recommended() -> None:
    cells = [
        program("fp32", 0.01, 1e-7, tail=9.0),
        program("fp16", 0.001, 1e-3, shared=True),
        program("bf16", 0.001, None),
    ]
    found = weighed("b-1", "net", [*cells, program("int8", 0.01, 1e-7, tail=NOISY)])
    assert [each["marks"] for each in found["cells"]] == [["noisy"], ["shared"], ["unverified"], []]
    assert said(*cells)[0].startswith(f"{PLACE}: ship fp32")
    assert said(*cells[1:]) == [f"{PLACE}: nothing to recommend: every program that passed is shared or unverified"]
    assert said(program("fp32", None, 1e-7)) == [f"{PLACE}: nothing to recommend: no program that passed was measured"]


def test_the_table_marks_the_front_and_says_what_is_rough() -> None:
    found = weighed("b-1", "net", [program("fp32", 0.01, 0.0), program("fp16", 0.005, 1e-3, shared=True, weak=True)])
    assert [" ".join(line.split()) for line in lines(found)[2:4]] == [
        "* onnxruntime-cpu/fp32/b1 10 ms 12 ms 100/s 1.00x 0 1 kB",
        "* onnxruntime-cpu/fp16/b1 ~5 ms 6 ms 200/s ~2.00x 1.0e-03 1 kB shared, weak",
    ]
