"""What pages show, without a server: quantities, comparisons, logs, drawings."""

from __future__ import annotations

import json
import re
from typing import Any
from xml.etree import ElementTree

import pytest
from markupsafe import Markup

from farm.pages import drawing, job_view, page_answers, quantities
from farm.pages.build_view import (
    Across,
    CellFilter,
    CellPast,
    ShownBuild,
    across,
    compare,
    figures,
    matrix,
    past_of,
    said,
)
from farm.pages.job_view import AttemptLine, ingredients_of
from farm.results.verdict import CellEnd, CellLine


def cell(identifier: str, state: str = "succeeded", **changes: Any) -> dict[str, Any]:
    """A judged cell, as a report has it."""
    model, target, precision, shape = identifier.split("/")
    facts = {"key": identifier, "program": {"size": 1000}, "latency": 0.002, "shared": False, "device": "gfx942"}
    known = {
        "identifier": identifier,
        "model": model,
        "target": target.replace("-", "/"),
        "precision": precision,
        "shape": shape,
        "state": state,
        "hit": False,
        "kind": None if state != "failed" else "compiler_error",
        "fault": None if state != "failed" else "user",
        "message": "",
        "detail": "",
        "advice": "",
        "phase": None,
        "worker": None,
        "elapsed": None,
        "waiting": "",
        "warning": "",
        "job": "j-1",
        "key": identifier,
        "as_expected": False,
        "facts": {**facts, **changes.pop("facts", {})} if state == "succeeded" else None,
    }
    return {**known, **changes}


def view(*cells: dict[str, Any], state: str = "reported", **build: Any) -> ShownBuild:
    return ShownBuild({"id": "b-1", "state": state, **build}, [CellLine.of(each) for each in cells])


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "–"),
        (0, "0 s"),
        (3.59e-5, "35.9 µs"),
        (0.00026, "260 µs"),
        (0.0042, "4.2 ms"),
        (0.9996, "1 s"),
        (13.84, "13.8 s"),
        (200, "3 min 20 s"),
        (7800, "2 h 10 min"),
        (273600, "3 d 4 h"),
    ],
)
def test_times_have_few_digits_and_a_unit(seconds: float | None, text: str) -> None:
    assert quantities.duration(seconds) == text


def test_columns_in_milliseconds_keep_three_digits() -> None:
    assert [quantities.milliseconds(each) for each in (0.188, 0.0042, 0.00026, 3.59e-5)] == [
        "188", "4.20", "0.260", "0.0359",
    ]  # fmt: skip
    assert [quantities.size(each) for each in (0, 999, 999_600, 3_200_000, None)] == [
        "0 B", "999 B", "1 MB", "3.2 MB", "–",
    ]  # fmt: skip
    assert [quantities.percent(each) for each in (0.342, -0.03, 0.0)] == ["+34 %", "−3.0 %", "+0.0 %"]


# --- builds ---------------------------------------------------------------------------------------------------------


def test_the_matrix_has_a_place_for_every_cell_and_room_for_those_that_are_missing() -> None:
    cells = view(
        cell("a/cpu-x/fp32/b1"), cell("a/cpu-x/int8/b1"), cell("b/gpu-y/fp32/b1"), cell("a/cpu-x/fp32/b8")
    ).cells
    found = matrix(cells)
    assert found.targets == [("cpu/x", 2), ("gpu/y", 1)]
    assert found.precisions == ["fp32", "int8", "fp32"]
    assert [(row.model, row.shape, [len(place) for place in row.places]) for row in found.rows] == [
        ("a", "b1", [1, 1, 0]),
        ("b", "b1", [0, 0, 1]),
        ("a", "b8", [1, 0, 0]),
    ]


def test_the_matrix_marks_what_was_not_measured_alone() -> None:
    facts = {"latency": 0.0042, "shared": False}
    cells = view(cell("a/cpu-x/fp32/b1", facts=facts), cell("a/cpu-x/int8/b1", facts={**facts, "shared": True})).cells
    assert [said(each) for each in cells] == ["✓ 4.20", "✓ ≈4.20"]


def test_filters_narrow_each_other() -> None:
    found = view(cell("a/cpu-x/fp32/b1"), cell("a/cpu-x/int8/b1", "failed"), cell("b/cpu-x/fp32/b1"))
    assert [each.identifier for each in found.wanted(CellFilter(model="a", precision="int8"))] == ["a/cpu-x/int8/b1"]
    assert [each.identifier for each in found.wanted(CellFilter(looks=("failed",)))] == ["a/cpu-x/int8/b1"]
    assert len(found.wanted(CellFilter())) == 3


def test_the_headline_is_what_matters_most() -> None:
    waits = cell("a/cpu-x/fp32/b1", "queued", waiting="3 jobs ahead for 1 slot of p")
    done = cell("b/cpu-x/fp32/b1")
    stuck = view(waits, done, state="open", outlook={"unserved": ["p"], "eta": None})
    assert stuck.headline() == "1 cell waits: no worker takes jobs of p now"
    paused = {"unserved": ["p"], "paused": ["p"], "eta": None}
    assert view(waits, done, state="open", outlook=paused).headline() == "1 cell waits: p is paused"
    assert view(waits, done, state="open", paused=True).headline().startswith("Paused: 1 cell of 2")
    eta = {"unserved": [], "eta": {"expected": 300}}
    assert (
        view(waits, done, state="open", outlook=eta).headline()
        == "1 of 2 cells are done; the rest takes about 5 min more"
    )
    assert "1 cell of 2 failed so far" in view(cell("c/cpu-x/fp32/b1", "failed"), waits, state="open").headline()


@pytest.mark.parametrize(
    ("metric", "said"),
    [
        ("latency", ["✓ ≈4.00", "✓ 2.00", "✗ compiler_error", "✓", "✓ 8.00"]),
        ("p99", ["✓ ≈5.00", "✓ !8.00", "✗ compiler_error", "✓", "✓ 9.00"]),
        ("throughput", ["✓ ≈250", "✓ !500", "✗ compiler_error", "✓", "✓ 125"]),
        ("error", ["✓ 1.0e-04", "✓ ?3.1e-02", "✗ compiler_error", "✓", "✓ 1.0e-04"]),
        ("size", ["✓ 1 kB", "✓ 500 B", "✗ compiler_error", "✓ 1 kB", "✓ 1 kB"]),
        ("x fp32", ["✓ ≈1.00x", "✓ ≈!2.00x", "✗ compiler_error", "✓", "✓ 1.00x"]),
    ],
)
def test_a_matrix_shows_one_metric_and_marks_what_is_weak(metric: str, said: list[str]) -> None:
    cells = [
        measured("net/cpu/fp32/b1", 0.004, p99=0.005, shared=True),
        measured("net/cpu/fp16/b1", 0.002, p99=0.008, errors={"y": 0.031}, weak=True, program={"size": 500}),
        cell("net/cpu/int8/b1", "failed"),
        measured("net/cpu/bf16/b1", None, errors={}),
        measured("other/cpu/fp32/b1", 0.008, p99=0.009),
    ]
    assert list(figures(view(*cells).cells, metric).values()) == said


def measured(identifier: str, latency: float | None, **facts: Any) -> dict[str, Any]:
    known = {
        "latency": latency,
        "throughput": latency and 1 / latency,
        "errors": {"y": 1e-4},
        "program": {"size": 1000},
    }
    return cell(identifier, facts={**known, **facts})


def test_reasons_are_said_once() -> None:
    cells = [
        cell(f"a/cpu-x/fp32/b{n}", "queued", waiting=f"{n} jobs ahead for 1 slot of p" if n < 4 else "")
        for n in range(6)
    ]
    assert [tuple(each) for each in view(*cells, state="open").reasons()] == [
        (4, "other jobs are ahead for 1 slot of p"),
        (2, "behind them"),
    ]


def side_by_side(*builds: dict[str, float | str]) -> Across:
    """Builds next to each other; a cell is given by its latency in ms, or by its state."""
    views = [
        view(
            *(
                cell(f"{name}/migraphx-gfx942/fp16/b1", facts={"key": f"{name}-{number}", "latency": end / 1e3})
                if isinstance(end, float)
                else cell(f"{name}/migraphx-gfx942/fp16/b1", end)
                for name, end in build.items()
            )
        )
        for number, build in enumerate(builds)
    ]
    return across([(each.build, list(map(CellEnd.of, each.cells))) for each in views])


def shown_rows(found: Across, *, everything: bool = False) -> list[tuple[str, list[str]]]:
    return [
        (row.identifier.partition("/")[0], ["" if end is None else said(end) for end in row.ends])
        for row in found.rows(found.found(everything=everything))
    ]


def test_builds_next_to_each_other_show_what_differs() -> None:
    found = side_by_side(
        {"same": 2.0, "moved": 2.0, "breaks": 2.0, "mended": "failed", "gone": 1.0},
        # In another order, and with a cell more: the last build's order counts.
        {"moved": 3.0, "same": 2.1, "mended": 1.0, "breaks": "failed", "new": 1.0},
    )
    assert shown_rows(found) == [
        ("moved", ["✓ 2.00", "✓ 3.00"]),
        ("mended", ["✗ compiler_error", "✓ 1.00"]),
        ("breaks", ["✓ 2.00", "✗ compiler_error"]),
    ]
    assert (found.same, found.partly, found.worse, found.unended) == (1, 2, 2, 0)
    assert [row[0] for row in shown_rows(found, everything=True)] == [
        "moved",
        "same",
        "mended",
        "breaks",
        "new",
        "gone",
    ]
    assert shown_rows(found, everything=True)[-1] == ("gone", ["✓ 1.00", ""])
    assert len(found.found("mo")) == 1 and not found.found("same")
    ((moved,),) = [row.shares[1:] for row in found.rows(found.found("moved"))]
    assert moved == pytest.approx(0.5)


def test_a_change_is_judged_from_one_build_to_the_next() -> None:
    found = side_by_side({"net": 2.0}, {"net": 2.15}, {"net": 2.3})
    assert (found.found(), found.same, found.worse) == ([], 1, 0), "each step is noise"
    found = side_by_side({"net": 2.0, "same": 1.0}, {"same": 1.0}, {"net": 3.0, "same": 1.0})
    assert [name for name, _ in shown_rows(found)] == ["net"], "a build of chosen cells hides no change of others"
    assert found.rows(found.found())[0].shares == [None, None, pytest.approx(0.5)]
    found = side_by_side({"net": 2.0}, {"net": 3.0}, {"net": 2.0})
    assert found.rows([0])[0].shares == [None, pytest.approx(0.5), pytest.approx(-1 / 3)]
    assert found.worse == 0


def test_a_comparison_says_what_it_left_out() -> None:
    names = [
        f"{name}/gpu-y/fp32/b1" for name in ("same", "near", "slow", "fast", "shared", "moved", "unmeasured", "gone")
    ]
    new = {"key": "new"}
    before = view(*(cell(name) for name in names))
    after = view(
        cell(names[0]),
        cell(names[1], facts={**new, "latency": 0.00215}),
        cell(names[2], facts={**new, "latency": 0.0023}),
        cell(names[3], facts={**new, "latency": 0.0015}),
        cell(names[4], facts={**new, "latency": 0.009, "shared": True}),
        cell(names[5], facts={**new, "latency": 0.009, "device": "gfx1201"}),
        cell(names[6], facts={**new, "latency": None}),
        cell("born/gpu-y/fp32/b1"),
    )
    found = compare(before, after)
    assert [pair.after.model for pair in found.pairs["slower"]] == ["slow"]
    assert [pair.after.model for pair in found.pairs["faster"]] == ["fast"]
    assert found.same == 2
    assert {out.text: out.cells for out in found.left_out} == {
        "not measured alone": 1,
        "measured on different devices": 1,
        "not measured in both builds": 1,
    }
    assert [each.model for each in found.only_before] == ["gone"]
    assert [each.model for each in found.only_after] == ["born"]


def test_what_still_runs_is_not_compared() -> None:
    name = "a/gpu-y/fp32/b1"
    assert not compare(view(cell(name)), view(cell(name, "running"), state="open"))


def test_ingredients_leave_out_what_is_empty() -> None:
    found = ingredients_of(
        {"env": {}, "salt": "", "batch": None, "inputs": {"x": {"shape": [1, 4]}}, "tuning": {"mode": "off"}}
    )
    assert [tuple(each)[:2] for each in found] == [("inputs.x.shape", "1, 4"), ("tuning.mode", "off")]


# --- logs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    [
        "error: unsupported layout",
        "E   something",
        "Traceback (most recent call last):",
        "terminate called after throwing",
        "MIGraphX: Assertion failed: x",
        "RuntimeError: no",
        "[ERROR] it broke",
        "pass: fatal: out of memory: 3 GB",
    ],
)
def test_the_first_error_is_found(line: str) -> None:
    assert job_view.first_error(["parsed", "0 errors: fine", "no failures (yet)", line, "error: a later one"]) == 4


@pytest.mark.parametrize(
    "line", ["0 errors", "errors_allowed = 3", "loading error_model.onnx", "tolerance of error is 0.1"]
)
def test_what_only_names_errors_is_none(line: str) -> None:
    assert job_view.first_error([line]) == 0


def test_what_the_farm_took_out_of_the_log_is_where_it_went_wrong() -> None:
    lines = ["error: harmless", "node_38: layout unsupported"]
    assert job_view.first_error(lines, "node_38: layout unsupported\nmore") == 2


def test_colours_become_classes_and_everything_else_text() -> None:
    text = "\x1b[1;31mred\x1b[0m <b>plain</b> \x1b[38;5;1mx\x1b[0m \x1b]0;title\x07end\n"
    text += "\x1b[32mgreen\nstill\x1b[39m not\x1b[2J"
    lines = job_view.page(text).lines
    assert lines[0].markup == Markup(
        '<span class="bold c1">red</span> &lt;b&gt;plain&lt;/b&gt; <span class="bold">x</span> end'
    )
    assert [str(line.markup) for line in lines[1:]] == [
        '<span class="c2">green</span>', '<span class="c2">still</span> not',
    ]  # fmt: skip


def test_a_long_log_is_shown_around_its_first_error_and_paged() -> None:
    text = "\n".join("error: here" if number == 50_000 else f"line {number}" for number in range(1, 100_001))
    page = job_view.page(text)
    assert len(page.lines) == job_view.LINES
    assert page.lines[0].number == 50_000 - job_view.BEFORE
    assert [line.number for line in page.lines if line.is_first_error] == [50_000]
    assert (page.before, page.after) == (page.lines[0].number - job_view.LINES, page.lines[-1].number + 1)
    assert job_view.page(text, start=page.after).lines[0].number == page.after


def test_a_search_goes_through_all_parts_and_says_where_each_line_is() -> None:
    found = job_view.search(["line 1\nLINE 2\n", "other\r\n\x1b[1mli\x1b[0mne 3"], "line")
    assert [(line.part, line.number) for line in found.lines] == [(0, 1), (0, 2), (1, 2)]
    assert (found.total, found.left_out) == (4, 0)
    assert job_view.search(["same\n" * 400] * 3, "same").left_out == 1200 - job_view.FOUND


@pytest.mark.parametrize("text", ["", "\n", "\x1b[m", "\x1b[999999999999m", "x" * 100_000, "\x1b[31" * 1000, "\udcff"])
def test_odd_logs_are_shown(text: str) -> None:
    for start in (0, 1, 10**9):
        job_view.page(text, start=start)


# --- history --------------------------------------------------------------------------------------------------------


def past(*latencies: float | None, **changes: dict[int, Any]) -> CellPast:
    """A cell that was built once a day; None failed. `changes` has by field which builds differ."""
    rows = []
    for day, latency in enumerate(latencies):
        values = {"latency": latency, "shared": False, "driver": "6.8"}
        row: Any = {
            "identifier": "a/gpu-y/fp32/b1", "ended": day * 86_400.0, "build": f"b-{day}", "manifest": "m",
            "state": "succeeded" if latency else "failed", "kind": "" if latency else "compiler_error",
            "expected": False, "hit": False, "key": str(day), "toolchain": "rocm7.1" if latency else "",
            "device": "gfx942" if latency else "", "node": "n1", "error": None, "values": values if latency else {},
        }  # fmt: skip
        for name, by_day in changes.items():
            if day in by_day:
                (values if name in values else row)[name] = by_day[day]
        rows.append(row)
    return past_of(reversed(rows))


NOISE = [1.0, 1.01, 0.99, 1.005, 0.995, 1.0, 1.01, 0.99]


def test_a_step_is_found_and_noise_is_not() -> None:
    found = past(*[each * 0.004 for each in NOISE], 0.0046)
    assert [point.moved for point in found.points] == [""] * 8 + ["slower"]
    assert found.look == "failed" and "slower" in found.headline
    assert not [point for point in past(*[each * 0.004 for each in NOISE], 0.00403).points if point.moved]
    assert past(*NOISE, 0.8).points[-1].moved == "faster"


def test_a_first_measurement_is_compared_with_nothing_and_has_one_date() -> None:
    found = past(0.004)
    assert found.headline == "4 ms, measured for the first time"
    assert drawing.past(found).count("1970-01-01") == 1


def test_after_a_change_of_toolchain_or_driver_the_band_begins_again() -> None:
    found = past(*NOISE, 1.4, 1.41, toolchain={8: "rocm7.2", 9: "rocm7.2"}, driver={9: "6.9"})
    assert [list(point.changes) for point in found.points[7:]] == [
        [], ["toolchain rocm7.1 → rocm7.2"], ["driver 6.8 → 6.9"],
    ]  # fmt: skip
    assert found.points[8].band is None and not found.points[8].moved


def test_a_new_level_is_named_when_it_has_become_usual() -> None:
    found = past(*NOISE, *[1.2 * each for each in NOISE * 2])
    assert not found.points[-1].moved, "by now it is the noise"
    assert found.headline.endswith("noise of those before; 20 % slower since 1970-01-09: 1 s → 1.2 s")
    (mark,) = found.marks
    assert (mark.build, mark.label, mark.moved) == ("b-8", "+20 %", "slower")
    assert found.points[11].band == pytest.approx((1.2 * 0.9, 1.2 * 1.1)), "the band begins again, too"
    assert past(*NOISE, 1.2, *NOISE).marks == [], "an outlier is not a level"


def test_a_mark_says_what_changed_and_if_it_hurt() -> None:
    toolchain = dict.fromkeys(range(8, 24), "rocm7.2-5f3a9c01")
    driver = dict.fromkeys(range(16, 24), "6.10")
    found = past(*NOISE, *NOISE, *[1.1 * each for each in NOISE], toolchain=toolchain, driver=driver)
    first, second = found.marks
    assert (first.label, first.moved, first.change) == ("rocm7.1 → rocm7.2", "", 0.0)
    assert (second.label, second.moved) == ("driver 6.8 → 6.10", "slower")
    assert found.headline.endswith("10 % slower since 1970-01-17 (driver 6.8 → 6.10): 1 s → 1.1 s")


def test_hits_and_crowded_measurements_make_no_band_and_are_not_drawn() -> None:
    found = past(1.0, 9.0, 9.0, 1.0, hit={1: True}, shared={2: True})
    assert [point.latency for point in found.drawn] == [1.0, 1.0]
    assert found.points[3].band == (0.9, 1.1)


def test_a_history_says_since_when_it_fails() -> None:
    assert past(1.0, None, None, build={1: f"b-{'1a' * 8}"}).headline == "Fails with compiler_error since b-1a1a1a1a"
    assert past().headline.startswith("No build") and drawing.past(past()) == ""


@pytest.mark.parametrize(
    ("rules", "limit"),
    [
        ({"gate latency prod": 0.05}, "1.05 s"),
        ({"gate latency prod": 0.05, "budget latency": 1.01, "gate size prod": 0.01}, "1.01 s"),
        ({"gate size prod": 0.01}, ""),
        ({"budget latency": 9.0}, ""),
    ],
)
def test_the_history_draws_the_limit_of_the_newest_gate_unless_it_is_far_away(
    rules: dict[str, float], limit: str
) -> None:
    drawn = drawing.past(past(1.0, 1.01, rules={1: json.dumps(rules)}, baseline={1: 1.0}))
    assert re.findall(r">limit ([^<]+)<", drawn) == [limit] * bool(limit)


def test_what_a_gate_refused_is_drawn_above_its_limit() -> None:
    refused = {
        "state": dict.fromkeys((1, 2), "failed"),
        "rules": {2: '{"gate latency prod": 0.05}'},
        "baseline": {2: 1.0},
    }
    drawn = drawing.past(past(1.0, 1.3, 9.0, None, **refused))
    heights = [float(y) for y in re.findall(r'class="wrong"[^>]* y="([^"]+)"', drawn)]
    (limit,) = re.findall(r'class="change" [^>]*y1="([^"]+)"', drawn)
    assert 42 < heights[1] < heights[0] < float(limit) < heights[2], "far above is at the top, not measured at the foot"


def test_stages_without_the_error_are_folded() -> None:
    text = "x attempt 1\n== fetching ==\n" + "got\n" * 30 + "== compiling ==\n" + "pass\n" * 30 + "error: no\n"
    found = job_view.stages(job_view.page(text))
    assert [(stage.name, len(stage.lines), stage.folded) for stage in found] == [
        ("", 1, False), ("fetching", 31, True), ("compiling", 32, False),
    ]  # fmt: skip
    assert not any(stage.folded for stage in job_view.stages(job_view.page(text.replace("error: no", "fine"))))
    assert job_view.stages(job_view.page("")) == []


# --- drawings and words ---------------------------------------------------------------------------------------------


def test_drawings_are_whole_and_hold_no_foreign_markup() -> None:
    hostile = "<script>'\">"
    zeros = dict.fromkeys(("minimum", "median", "p90", "p99"), 0.0)
    rows: list[Any] = [
        {"number": 1, "started_at": 5.0, "end": "failed", "phases": {hostile: 1.0, "compiling": 8.0}},
        {"number": 2, "started_at": 19.0, "end": None, "phases": {}},
    ]
    attempts = [AttemptLine(rows[0], 13.3), AttemptLine(rows[1], 0.0)]
    for drawn in (
        drawing.timeline(attempts),
        drawing.timeline([]),
        drawing.spreads([(hostile, {"minimum": 1e-3, "median": 2e-3, "p90": 3e-3, "p99": 4e-3}), ("zero", zeros)]),
        page_answers.macro("drawings", "share")([("compiled", 3), ("failed", 0)], hostile),
        page_answers.macro("drawings", "share")([], "nothing"),
        drawing.past(past(*NOISE, None, 1.4, toolchain={9: hostile})),
        drawing.past(past(1.0)),
    ):
        ElementTree.fromstring(drawn)
        assert "<script>" not in drawn and "style=" not in drawn


def test_what_is_to_be_typed_is_marked_and_foreign_text_is_not_markup() -> None:
    page = page_answers.render(
        "problem", title="Gone", detail="<b>`farm <i>` and `", hint="run `farm gc`", namespace="", base="/ui", home="",
        section="", signed_in=False, who="",
    )  # fmt: skip
    assert "&lt;b&gt;<code>farm &lt;i&gt;</code> and `" in page and "run <code>farm gc</code>" in page


def test_every_kind_of_program_has_its_ways() -> None:
    from farm.artifacts.sidecar import validate
    from farm.wire.program import Sidecar

    def made(name: str, arch: str) -> Sidecar:
        return validate(
            {
                "schema": 1,
                "key": "ab" * 32,
                "namespace": "main",
                "identifier": "net/onnxruntime-cpu/fp32/b1",
                "spec": {},
                "blobs": {"program": {"path": name, "digest": "cd" * 32, "size": 1}},
                "toolchain": "t-1",
                "device": {"arch": arch},
                "inputs": [{"name": 'x"\n', "dtype": "float16", "shape": ["n", 4]}],
                "created": "",
            }
        )

    onnx = {way.slug: way.text for way in job_view.ways(made("a.onnx", "cpu"), "https://farm.example/")}
    assert list(onnx) == ["fetch", "curl", "python", "cpp", "triton"]
    assert "farm fetch net --target onnxruntime/cpu --precision fp32 --shape b1" in onnx["fetch"]
    assert "https://farm.example/v1/blobs/" in onnx["curl"] and "--output a.onnx" in onnx["curl"]
    compile(onnx["python"], "python", "exec")
    assert "dims: [ -1, 4 ]" in onnx["triton"] and r'name: "x\"\n"' in onnx["triton"]
    card = {way.slug: way.text for way in job_view.ways(made("a.onnx", "sm_90:h200"), "https://farm.example")}
    compile(card["python"], "python", "exec")
    assert "('CUDAExecutionProvider', {'use_tf32': '0'})" in card["python"], "as it was verified"
    assert 'keys[] = {"use_tf32"}, *values[] = {"0"}' in card["cpp"] and "ORT_ENABLE_ALL" in card["cpp"]
    mxr = {way.slug: way.text for way in job_view.ways(made("a.mxr", "gfx942"), "https://farm.example")}
    assert list(mxr) == ["fetch", "curl", "python", "cpp", "driver", "triton", "onnxruntime"]
    compile(mxr["python"], "python", "exec")
