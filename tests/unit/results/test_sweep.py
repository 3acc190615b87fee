"""Batch sweeps: which batch is best, and how sure that is."""

from __future__ import annotations

from typing import Any

import pytest

from farm.cli import render
from farm.results.tradeoff import draw, sweeps_of


def cell(batch: int, latency: float | None, **more: Any) -> dict[str, Any]:
    sought = {"metric": more.pop("metric", "throughput"), "max_latency": more.pop("max_latency", None)}
    sizes = {"batch": batch, **more.pop("sizes", {})}
    facts = {"latency": latency, "shared": more.pop("shared", False)}
    return {
        "identifier": f"net/onnxruntime-cpu/fp32/b{batch}",
        "model": "net",
        "target": "onnxruntime/cpu",
        "precision": "fp32",
        "state": "succeeded",
        "sizes": sizes,
        "sweep": sought,
        "facts": facts,
        **more,
    }


def best(*cells: dict[str, Any]) -> str | None:
    (found,) = sweeps_of(cells)
    return found["best"] and found["best"].rpartition("/")[2]


def test_the_best_batch_by_what_is_sought() -> None:
    curve = {8: 0.004, 1: 0.001, 32: 0.020}
    assert best(*(cell(batch, seconds) for batch, seconds in curve.items())) == "b8"
    assert best(*(cell(batch, seconds, metric="latency") for batch, seconds in curve.items())) == "b1"
    assert best(*(cell(batch, seconds, max_latency=0.003) for batch, seconds in curve.items())) == "b1"
    assert best(*(cell(batch, seconds, max_latency=1e-4) for batch, seconds in curve.items())) is None


def test_of_equal_batches_the_smallest_is_best() -> None:
    assert best(cell(4, 0.004), cell(2, 0.002)) == "b2"


def test_what_failed_its_gate_or_was_not_measured_cannot_be_best() -> None:
    assert best(cell(1, 0.01), cell(8, 0.01, state="failed"), cell(4, None)) == "b1"


def test_other_sizes_and_precisions_are_sweeps_of_their_own() -> None:
    cells = [cell(batch, 0.01, sizes={"seq": seq}) for batch in (1, 2) for seq in (16, 64)]
    found = sweeps_of([*cells, cell(1, 0.01, precision="fp16"), cell(9, 0.01, sweep=None)])
    assert [(sweep["sizes"], len(sweep["points"])) for sweep in found] == [({"seq": 16}, 2), ({"seq": 64}, 2), ({}, 1)]


def test_a_sweep_on_shared_measurements_is_called_weak() -> None:
    lines = render.sweeps(sweeps_of([cell(1, 0.001), cell(8, 0.004, shared=True, max_latency=0.005)]))
    assert lines == [
        "sweep of net onnxruntime/cpu fp32: best throughput",
        "  batch  latency      throughput",
        "  1      1 ms         1,000/s",
        "  8      4 ms shared  2,000/s     best",
        "  weak: others ran at the same time, another may be best",
    ]
    assert "weak" not in "".join(render.sweeps(sweeps_of([cell(1, 0.001), cell(8, 0.004)])))
    assert render.sweeps(sweeps_of([cell(1, 0.5, max_latency=0.01)]))[-1] == "  no batch was measured within 10 ms"


@pytest.mark.parametrize(("metric", "axis"), [("throughput", "samples a second"), ("latency", "latency in ms")])
def test_the_picture_has_a_line_for_every_sweep(metric: str, axis: str) -> None:
    cells = [cell(batch, 0.001 * batch, metric=metric, precision=name) for batch in (1, 4) for name in ("fp32", "int8")]
    picture = draw(sweeps_of(cells), "nightly").decode()
    assert picture.lstrip().startswith("<?xml")
    for text in ("net onnxruntime/cpu fp32", "net onnxruntime/cpu int8", axis, "nightly"):
        assert text in picture


@pytest.mark.parametrize("metric", ["throughput", "latency"])
def test_the_picture_shows_what_was_measured(metric: str) -> None:
    def line(*latencies: float) -> str:
        cells = [cell(2**place, seconds, metric=metric) for place, seconds in enumerate(latencies)]
        picture = draw(sweeps_of(cells), "nightly").decode()
        return "\n".join(row.strip() for row in picture.split("line2d") if "stroke-width: 2" in row or "M " in row)

    assert line(0.001, 0.002, 0.003) != line(0.001, 0.001, 0.003)


def test_a_batch_that_takes_just_as_long_as_allowed_may_be_best() -> None:
    assert best(cell(1, 0.001, max_latency=0.004), cell(8, 0.004, max_latency=0.004)) == "b8"


def test_the_picture_says_what_it_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[dict[str, Any]] = []
    monkeypatch.setattr("farm.results.pictures.curves", lambda **shown: drawn.append(shown) or b"")
    one = [cell(1, 0.001), cell(4, 0.002), cell(8, None)]
    draw(sweeps_of(one), "nightly")
    draw(sweeps_of([cell(batch, seconds, metric="latency") for batch, seconds in ((1, 0.001), (4, 0.002))]), "nightly")
    draw(sweeps_of([*one, cell(1, 0.004, precision="int8", shared=True)]), "nightly")
    assert [(each["title"], each["y"]) for each in drawn] == [
        ("net onnxruntime/cpu fp32: throughput by batch", "samples a second"),
        ("net onnxruntime/cpu fp32: latency by batch", "latency in ms"),
        ("nightly: throughput by batch (not measured alone)", "samples a second"),
    ]
    assert [each["series"]["net onnxruntime/cpu fp32"] for each in drawn] == [
        [(1, 1000.0), (4, 2000.0)],
        [(1, 1.0), (4, 2.0)],
        [(1, 1000.0), (4, 2000.0)],
    ]
    assert drawn[2]["series"]["net onnxruntime/cpu int8"] == [(1, 250.0)]
