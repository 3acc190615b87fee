"""Which precision to ship, as the pages draw it."""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn

import pytest

from farm.pages import drawing
from farm.pages.drawing import PlotAxis, sweeps, tradeoffs
from farm.pages.quantities import duration
from farm.results.verdict import CellLine


def line(precision: str, latency: float | None = None, error: float | None = None, **more: Any) -> CellLine:
    known: dict[str, Any] = {
        "look": "compiled",
        "published": True,
        "latency": latency,
        "error": error,
        "size": 4_000_000,
    }
    known |= {"rules": '{"tolerance *": 0.05, "budget latency": 0.005}', "p99": 0.009} | more
    return CellLine(f"net/cpu/{precision}/b1", "net", "cpu", precision, "b1", **known)


CELLS = [
    line("fp32", 0.004, 2e-7),
    line("fp16", 0.002, 3e-4, baseline=0.003),
    line("bf16", 0.003, 4e-3, marks="shared", size=1_000_000),
    line("int8", look="failed", published=False, kind="compiler_crash"),
    line("fp8", 0.001, None, marks="unverified"),
]


def test_a_point_has_its_numbers_and_leads_to_its_cell() -> None:
    (found,) = tradeoffs(CELLS, "/cells/{}".format)
    links = re.findall(
        r'<a href="([^"]+)"><title>([^<]+)</title>\s*<circle class="(\w+)"[^>]* r="([0-9.]+)"', found.draw()
    )
    assert links == [
        (
            "/cells/net/cpu/bf16/b1",
            "bf16: 3 ms median, p99 9 ms, error 4.0e-03, 1 MB, shared",
            "beaten",
            "8.0",
        ),
        (
            "/cells/net/cpu/fp16/b1",
            "fp16: 2 ms median, p99 9 ms, error 3.0e-04, 4 MB, on the Pareto front",
            "point",
            "16.0",
        ),
        (
            "/cells/net/cpu/fp32/b1",
            "fp32: 4 ms median, p99 9 ms, error 2.0e-07, 4 MB, on the Pareto front",
            "point",
            "16.0",
        ),
    ]
    assert found.advice == "Ship fp16: 2.00 times fp32’s speed, error 3.0e-04, 4 MB; the fastest of those that passed."
    (front,) = re.findall(r'<polyline class="line" points="([^"]+)"', found.draw())
    assert len(front.split()) == 2
    assert found.draw().count('class="range"') == 1, "the tail of the one that has a baseline"


def test_what_is_not_drawn_is_said_with_its_reason() -> None:
    (found,) = tradeoffs(CELLS, str)
    assert found.undrawn == [
        ("net/cpu/int8/b1", "int8 failed: compiler_crash"),
        ("net/cpu/fp8/b1", "fp8 has no error: its outputs were compared with nothing"),
    ]
    unmeasured = [line("fp32", 0.004, 1e-7), line("fp16"), line("int8", look="queued", published=False)]
    (found,) = tradeoffs(unmeasured, str)
    assert [why for _, why in found.undrawn] == ["fp16 was not measured", "int8 is queued"]


def test_limits_are_lines_where_the_programs_are_and_words_everywhere() -> None:
    (found,) = tradeoffs(CELLS, str)
    assert found.limits == "the budget is 5 ms; the tolerance is 5.0e-02"
    assert [found.draw().count(word) for word in ("budget 5 ms", "tolerance 0.05", 'class="change"')] == [1, 0, 1]
    (near,) = tradeoffs([line("fp32", 0.0004, 0.03), line("fp16", 0.0002, 0.04)], str)
    assert [near.draw().count(word) for word in ("budget", "tolerance 0.05", 'class="change"')] == [0, 1, 1]
    own = [
        line(name, 0.0004, 0.03, rules=f'{{"tolerance *": {each}}}') for name, each in (("fp32", 0.04), ("int8", 0.2))
    ]
    (found,) = tradeoffs(own, str)
    assert found.limits == "the tolerance is 4.0e-02 for fp32, 2.0e-01 for int8"
    assert 'class="change"' not in found.draw(), "no line refuses what passed its own tolerance"


def test_a_single_precision_is_no_choice() -> None:
    assert tradeoffs([line("fp32", 0.004, 1e-7)], str) == []
    assert tradeoffs([line("fp32"), line("fp16", look="queued")], str) == []


def test_what_a_page_does_not_show_is_not_drawn_and_shapes_are_not_compared_with_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    places: list[str] = []

    def place(each: CellLine) -> tuple[str, str]:
        places.append(each.identifier)
        return each.target, each.shape

    def plot(*_: object) -> NoReturn:
        raise AssertionError("drawn")

    cells = [
        line(precision, 0.002, 1e-3)._replace(identifier=f"net/cpu/{precision}/b{batch}", shape=f"b{batch}")
        for batch in range(100)
        for precision in ("fp32", "fp16")
    ]
    monkeypatch.setattr(CellLine, "place", property(place))
    monkeypatch.setattr(drawing, "plot", plot)
    assert len(tradeoffs(cells, str)) == 100
    assert len(sweeps([swept(1, 0.001)], str)) == 1
    assert len(places) < 10 * len(cells), "a build may have 50,000 cells of one model"


def test_programs_of_a_ref_are_drawn_from_their_facts() -> None:
    facts: Any = {
        "latency": 0.002,
        "errors": {"y": 1e-3},
        "equal": {},
        "program": {"size": 7},
        "shared": False,
        "weak": 1,
    }
    cells: Any = [
        {"identifier": f"net/cpu/{each}/b1", "model": "net", "target": "cpu", "precision": each, "shape": "b1"}
        for each in ("fp32", "fp16")
    ]
    (found,) = tradeoffs([CellLine.named(cell, facts) for cell in cells], str)
    assert (found.model, found.place, found.limits) == ("net", "cpu b1", "")
    assert found.advice == "Nothing to recommend: every program that passed is weak."
    assert "fp16 ?" in found.draw()


@pytest.mark.parametrize(
    ("values", "ticks"),
    [
        ([0.002, 0.004], ["0 s", "1 ms", "2 ms", "3 ms", "4 ms"]),
        ([2e-4, 0.02], ["100 µs", "1 ms", "10 ms", "100 ms"]),
    ],
)
def test_an_axis_is_logarithmic_where_its_values_span_decades(values: list[float], ticks: list[str]) -> None:
    place, found, _ = PlotAxis("latency", duration).scaled(values)
    assert [text for _, text in found] == ticks
    assert all(0 < place(value) < 100 for value in values)


def test_an_error_of_zero_lies_below_all_decades() -> None:
    place, ticks, _ = PlotAxis("error", "{:g}".format).scaled([0.0, 1e-5, 1e-3])
    assert [text for _, text in ticks] == ["0", "1e-05", "0.0001", "0.001", "0.01"]
    assert place(0.0) == 0 < place(1e-5) < place(1e-3)
    assert PlotAxis("error", str).scaled([0.0])[0](0.0) == 0


def swept(batch: int, latency: float | None, **more: Any) -> CellLine:
    point = {"identifier": f"net/cpu/fp32/b{batch}", "batch": batch, "latency": latency, "shared": False}
    point |= {"throughput": latency and batch / latency} | more
    part: dict[str, Any] = {
        "model": "net",
        "target": "cpu",
        "precision": "fp32",
        "sizes": {},
        "metric": "throughput",
        "best": None,
    }
    part |= {"max_latency": 0.005, "points": [point], "weak": False}
    return line("fp32", latency)._replace(identifier=str(point["identifier"]), sweep=json.dumps(part))


def test_a_sweep_has_its_curves_and_its_best_batch() -> None:
    cells = [swept(32, 0.02), swept(1, 0.001), swept(8, 0.004, shared=True), swept(64, None), line("fp32")]
    ((title, said, curves),) = sweeps(cells, "/cells/{}".format)
    throughput, latency = (draw() for draw in curves)
    assert title == "net cpu fp32"
    assert said == (
        "Best throughput within 5 ms: batch 8. Weak: some were not measured alone (≈). Not drawn, without a speed: 64."
    )
    points = re.findall(r'<a href="([^"]+)"><title>([^<]+)</title>', throughput)
    assert sorted(points)[2] == ("/cells/net/cpu/fp32/b8", "batch 8: 4 ms, 2,000 samples a second")
    assert throughput.count(">≈ best</text>") == 1 == latency.count(">≈ best</text>")
    assert [re.findall(">(1|8|32|64)</text>", each) for each in (throughput, latency)] == [["1", "8", "32"]] * 2
    assert "at most 5 ms" in latency and "at most" not in throughput
    assert max(float(at) for at in re.findall(r'<circle [^>]*cx="([0-9.]+)%"', latency)) > 90, "no empty half"
    assert sweeps([swept(1, None), line("fp32", 0.1)], str) == []
