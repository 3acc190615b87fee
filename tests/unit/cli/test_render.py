"""What people read: plans, progress, the final table, failures. All from recorded JSON."""

from __future__ import annotations

import io
import re
import time
from typing import Any

import pytest
import typer
from rich.console import Console

from farm.artifacts.sidecar import validate
from farm.cli import render
from farm.cli.artifact_commands import describe
from farm.cli.cell_commands import added, rows
from farm.cli.output import Lines, Screen
from farm.inert import inert, one_line
from farm.results.gates import UNCHANGED
from farm.wire.program import Conditions, Processes


def facts(size: int, latency: float | None, error: float, **more: Any) -> dict[str, Any]:
    return {
        "key": "ab" * 32,
        "program": {"path": "model.onnx", "digest": "cd" * 32, "size": size},
        "toolchain": "onnxruntime1.31.1-1a2b3c4d",
        "device": "cpu",
        "errors": {"label": error / 2, "score": error},
        "equal": {},
        "nonfinite": [],
        "weak": False,
        "latency": latency,
        "shared": False,
        **more,
    }


def cell(precision: str, state: str = "succeeded", *, model: str = "magika", **more: Any) -> dict[str, Any]:
    return {
        "identifier": f"{model}/onnxruntime-cpu/{precision}/b1",
        "model": model,
        "target": "onnxruntime/cpu",
        "precision": precision,
        "shape": "b1",
        "state": state,
        "hit": False,
        "kind": None,
        "message": "",
        "advice": "",
        "detail": "",
        "fault": None,
        "expected": False,
        "as_expected": False,
        "phase": None,
        "progress": None,
        "job": "j-1",
        "attempt": 1,
        "worker": "node1.42",
        "elapsed": 3.21,
        "facts": None,
        "log": None,
        "waiting": "",
        "warning": "",
        **more,
    }


def plain(lines: list[str]) -> list[str]:
    return [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in lines]


COMPILED = [
    cell("fp32", facts=facts(3_160_000, 0.0043, 2e-7), hit=True),
    cell("fp16", facts=facts(1_590_000, 0.0045, 2e-3)),
    cell("int8", facts=facts(900_000, 0.0021, 0.08, weak=True, shared=True)),
]


def test_table_compares_each_cell_with_its_fp32_sibling() -> None:
    lines = plain(render.table(COMPILED))
    assert lines[0].split() == ["cell", "state", "size", "latency", "error", "time"]
    assert re.split(r"  +", lines[1]) == [
        "magika/onnxruntime-cpu/fp32/b1", "succeeded", "3.16 MB", "100%", "4.3 ms", "1.00x", "2.0e-07", "hit",
    ]  # fmt: skip
    assert "1.59 MB  50%" in lines[2]
    assert "4.5 ms  0.96x" in lines[2]
    assert "2.1 ms  ~2.0x shared" in lines[3]
    assert "8.0e-02 weak" in lines[3]
    assert lines[3].endswith("3.21 s")


def test_table_has_aligned_columns() -> None:
    lines = plain(render.table(COMPILED))
    column = lines[0].index("size")
    assert all(line[column - 2 : column] == "  " and line[column] != " " for line in lines)


def test_table_without_facts_or_sibling_leaves_room() -> None:
    lines = plain(render.table([cell("int8", "failed", facts=None), cell("int4", facts=facts(10, None, 0.1))]))
    assert "failed" in lines[1]
    assert "10 B" in lines[2]
    assert "%" not in "".join(lines)


def test_worst_output_counts_and_unequal_integers_are_errors() -> None:
    whole = facts(10, None, 0.0, errors={}, equal={"label": 0.75})
    assert "2.5e-01" in render.table([cell("int8", facts=whole)])[1]
    assert "not verified" in render.table([cell("int8", facts=facts(10, None, 0, errors={}))])[1]
    assert "not finite" in render.table([cell("int8", facts=facts(10, None, 0, nonfinite=["y"]))])[1]


def test_gains_say_what_a_precision_brings_and_why_not_more() -> None:
    fp16, int8 = render.gains(COMPILED)
    assert fp16.startswith("fp16 on onnxruntime/cpu: 50% of the fp32 size, 0.96x the fp32 speed; ")
    assert "casts to fp32" in fp16
    # It was measured during another attempt: no speed is claimed.
    assert int8 == "int8 on onnxruntime/cpu: 28% of the fp32 size"


def test_gains_take_the_median_of_several_models() -> None:
    cells = [cell("fp32", model=name, facts=facts(100, 1.0, 0)) for name in "abc"]
    cells += [
        cell("int8", model=name, facts=facts(size, 0.5, 0)) for name, size in zip("abc", (10, 25, 90), strict=True)
    ]
    assert render.gains(cells) == [
        "int8 on onnxruntime/cpu: 25% of the fp32 size, 2.00x the fp32 speed (median of 3 cells)"
    ]


def test_remarks_are_explained_where_they_occur() -> None:
    shared, weak = render.legend(COMPILED)
    assert shared.startswith("shared: ")
    assert weak.startswith("weak: ")
    assert render.legend(COMPILED[:2]) == []


def test_a_table_warns_of_others_on_the_gpu() -> None:
    seen = ({"count": 2, "memory": 1_500_000_000}, {"count": 1, "memory": 9}, {"count": 0, "memory": 0}, None)
    cells = [cell("fp32", facts=facts(100, 1.0, 0, processes=each)) for each in seen]
    [line] = render.legend(cells)
    assert line.startswith("not alone: other processes, up to 2 with 1.5 GB of its memory, used the GPU ")
    assert "2 cells were" in line
    assert line.endswith("measure again when it is idle")
    assert render.legend(cells[2:]) == []


def test_a_sidecar_says_when_others_used_the_gpu() -> None:
    looks = [Conditions(processes=Processes(count=count, memory=2_000_000)) for count in (0, 1)]
    assert render.not_alone(looks, "tuning") == [("not alone", "1 process with 2 MB after tuning")]


def test_a_failure_takes_at_most_eight_lines_and_says_whose_turn_it_is() -> None:
    failed = cell(
        "int8",
        "failed",
        kind="bad_calibration",
        phase="quantizing",
        message="calibration has no array `bytes`",
        advice="compare names with `farm lint`",
        detail="\n".join(f"line {number}" for number in range(40)),
        fault="user",
    )
    page = "https://farm.example/ui/ns/main/builds/b-0123456789abcdef"
    lines = plain(render.failures([{**failed, "job": "j-1"}, cell("fp32")], "b-0123456789abcdef", page))
    assert len(lines) <= 8
    assert lines[0] == "failed magika/onnxruntime-cpu/int8/b1 while quantizing: bad_calibration (yours to fix)"
    assert lines[1] == "  calibration has no array `bytes`"
    assert "  try: compare names with `farm lint`" in lines
    assert lines[-3:] == [
        "  log: farm logs b-0123456789abcdef magika/onnxruntime-cpu/int8/b1",
        "  alone: farm reproduce j-1 -o DIR",
        f"  page: {page}/cells/magika/onnxruntime-cpu/int8/b1",
    ]


def test_cells_that_failed_alike_are_one_failure() -> None:
    same = {"kind": "bad_model", "message": "no opset", "fault": "user", "job": "j-1"}
    cells = [{**cell("fp16", "failed", **same), "identifier": name} for name in "abcde"]
    cells.append({**cell("fp16", "failed", **{**same, "message": "no node"}), "identifier": "f"})
    lines = plain(render.failures(cells, "b-1"))
    assert lines[:3] == [
        "failed 5 cells (a, b, c, …): bad_model (yours to fix)", "  no opset", "  log: farm logs b-1 a",
    ]  # fmt: skip
    assert [line for line in lines if line.startswith("failed")][1] == "failed f: bad_model (yours to fix)"
    many = [{**each, "message": "x" * number} for number, each in enumerate(cells * 4)] + cells[:5]
    assert plain(render.failures(many, "b-1"))[-1] == "and 9 more failed cells: farm status b-1 --json"
    found = {"improvements": [], "undecided": [], "fixed": [{"identifier": name, "text": "was bad"} for name in "ab"]}
    warned = [{**each, "warning": "rough"} for each in cells]
    assert render.remarks(warned, found) == ["warning: 6 cells (a, b, c, …): rough", "fixed: 2 cells (a, b): was bad"]
    slow = {"kind": "budget", "message": "latency is 1.04 ms"}
    cells = [{**cells[0], **slow}, {**cells[1], **slow, "message": "latency is 820 µs (8 %)"}, {**cells[2], **slow}]
    assert plain(render.failures(cells, "b-1"))[:3] == [
        "failed 2 cells (a, c): budget (yours to fix)", "  latency is 1.04 ms", "  log: farm logs b-1 a",
    ]  # fmt: skip
    cells[1]["message"] = "latency is 820 µs"
    assert plain(render.failures(cells, "b-1"))[:3] == [
        "failed 3 cells (a, b, c): budget (yours to fix)",
        "  2 cells (a, c): latency is 1.04 ms",
        "  b: latency is 820 µs",
    ]


def test_a_program_that_a_gate_refused_is_named_by_its_build_and_cell_not_by_a_key_of_64_digits() -> None:
    refused = cell("fp16", "failed", kind="regression", fault="user", job=None, facts=facts(9, 0.004, 0, key="k" * 64))
    said = render.failures([refused], "b-1")
    assert "  alone: farm reproduce b-1 magika/onnxruntime-cpu/fp16/b1 -o DIR" in said
    assert "k" * 64 not in "\n".join(said)


def test_cells_that_failed_otherwise_are_failures_of_their_own() -> None:
    how = {"kind": "hang", "message": "it took 3 s", "fault": "user", "phase": "tuning"}
    cells = [cell("fp16", "failed", **how)]
    for name, other in {"kind": "crash", "fault": "farm", "phase": "compiling", "message": "it waits"}.items():
        cells += [cell("int8", "failed", **{**how, name: other})]
    heads = [line for line in plain(render.failures(cells, "b-1")) if line.startswith("failed")]
    assert heads == [
        f"failed magika/onnxruntime-cpu/{what}"
        for what in (
            "fp16/b1 while tuning: hang (yours to fix)",
            "int8/b1 while tuning: crash (yours to fix)",
            "int8/b1 while tuning: hang (the farm's fault)",
            "int8/b1 while compiling: hang (yours to fix)",
            "int8/b1 while tuning: hang (yours to fix)",
        )
    ]


def test_of_many_numbers_it_is_said_how_many_are_left_out() -> None:
    names, more = [f"c{number:02}" for number in range(25)], "5 more"
    slow = [
        {**cell("fp16", "failed", kind="budget", message=f"took {name[1:]} s"), "identifier": name} for name in names
    ]
    lines = plain(render.failures(slow, "b-1"))
    assert [lines[0], lines[20], lines[21]] == [
        "failed 25 cells (c00, c01, c02, …): budget (yours to fix)", "  c19: took 19 s", f"  and {more} messages",
    ]  # fmt: skip
    silent = [{**each, "message": ""} for each in slow]
    assert "" not in [line.strip() for line in plain(render.failures(silent, "b-1"))]
    warned = [{**each, "warning": each["message"]} for each in slow] * 2
    assert plain(render.remarks(warned, None))[20:] == ["warning: 10 more cells (--json has all)"]
    pair = {"left": cell("fp16"), "right": cell("fp16"), "changes": [], "effect": "same", "share": None}
    moved = [{**pair, "identifier": name, "around": [f"clock sm 1000 -> {name} MHz"]} for name in names]
    found = {"left": {"id": "b-1"}, "right": {"id": "b-2"}, "same": 0, "cells": moved}
    changed = [line for line in plain(render.differences(found)) if "also changed" in line]
    assert (len(changed), changed[-1]) == (21, f"  also changed: {more} (--json has all)")


@pytest.mark.parametrize(
    ("after", "said"),
    [
        ({"turns": {"key": "k", "shared": True}, "shared": False}, "in turns shared ("),
        ({"turns": {"key": "k", "shared": False}, "shared": True}, "in turns ("),
        ({"against": {"key": "k"}, "shared": True}, "in turns shared ("),
        ({"against": {"key": "other"}}, "+25.0%"),
    ],
)
def test_turns_with_another_program_count_for_nothing_and_disturbed_ones_have_a_mark(
    after: dict[str, Any], said: str
) -> None:
    ran = {"ratio": 0.8, "interval": [0.79, 0.81]}
    after = {name: value | ran if isinstance(value, dict) else value for name, value in after.items()}
    sides = cell("fp16", facts=facts(9, 0.004, 0, key="k")), cell("fp16", facts=facts(9, 0.005, 0) | after)
    one = {"identifier": "a", "left": sides[0], "right": sides[1], "changes": [], "effect": "worse", "share": 0.25}
    lines = plain(render.differences({"left": {"id": "b-1"}, "right": {"id": "b-2"}, "same": 0, "cells": [one]}))
    assert lines[1] == f"  {UNCHANGED}"
    assert said in lines[3]


def test_what_else_changed_is_said_before_what_did() -> None:
    ran = [facts(9, 0.004, 0, key="k"), facts(9, 0.005, 0)]
    pair = {side: cell("fp16", facts=each) for side, each in zip(("left", "right"), ran, strict=True)}
    pair |= {"changes": [], "effect": "worse", "share": 0.25}
    cells = [{**pair, "identifier": name, "around": ["node n1 -> n2"]} for name in "ab"]
    lines = plain(render.differences({"left": {"id": "b-1"}, "right": {"id": "b-2"}, "same": 0, "cells": cells}))
    assert lines[1] == "  also changed: node n1 -> n2: 2 cells (a, b)"
    assert lines[3].endswith("  +25.0%")
    turns = {"key": "k", "ratio": 0.8, "interval": [0.79, 0.81]}
    ran = [facts(9, 0.004, 0, key="k"), facts(9, 0.005, 0, turns=turns)]
    pair |= {side: cell("fp16", facts=each) for side, each in zip(("left", "right"), ran, strict=True)}
    found = {"left": {"id": "b-1"}, "right": {"id": "b-2"}, "same": 0, "cells": [{**pair, "identifier": "a"}]}
    assert "+25.0% in turns (+23.5% to +26.6%)" in plain(render.differences(found))[3]
    build = {"id": "b-2", "name": "n", "verdict": {"text": "x"}}
    row: dict[str, Any] = {"measure": "latency", "against": "prod", "value": 0.002, "base": 0.001, "outcome": "worse"}
    row |= {"change": 1.0, "interval": (0.9, 1.1), "ranges": [[0.0009, 0.0012], [0.0018, 0.0025]]}
    report = {"build": build, "cells": [{**cell("fp16"), "around": ["node n1 -> n2"], "compared": [row]}], "sweeps": []}
    lines = plain(render.outcome(report))
    start = lines.index("  also changed: node n1 -> n2: magika/onnxruntime-cpu/fp16/b1")
    said = "1 ms (900 µs to 1.2 ms)  2 ms (1.8 ms to 2.5 ms)  +100.0% (+90.0% to +110.0%)  worse than prod's"
    assert lines[start + 2] == f"  magika/onnxruntime-cpu/fp16/b1  latency  {said}"
    alone = plain(render.outcome({**report, "cells": [{**report["cells"][0], "around": []}]}))
    assert alone == [f"  {UNCHANGED}" if line == lines[start] else line for line in lines]
    assert not any(UNCHANGED in line for line in plain(render.outcome({**report, "cells": [cell("fp16")]})))


def test_the_farms_fault_is_said_and_expected_failures_are_no_failures() -> None:
    lost = cell("fp16", "failed", kind="worker_lost", fault="farm", message="the worker was lost")
    known = cell("int8", "failed", kind="accuracy", as_expected=True, expected=True)
    lines = plain(render.failures([lost, known], "b-1"))
    assert "(the farm's fault)" in lines[0]
    assert not any("int8" in line for line in lines)
    assert "failed as expected" in plain(render.table([known]))[1]


def test_what_uploads_is_not_counted_as_running() -> None:
    cells = [
        cell("fp32", "running", phase="measuring"),
        cell("fp16", "running", phase="uploading"),
        cell("int8", "queued"),
    ]
    assert render.counts(cells) == "1 running, 1 uploading, 1 queued"


def test_what_failed_as_expected_is_said_everywhere_and_red_nowhere() -> None:
    known = cell("int8", "failed", kind="accuracy", message="off by 2", as_expected=True, expected=True)
    red, said = typer.style("failed", fg="red")[:5], "failed as expected"
    for lines in (render.table([known]), render.under_way([known]), [render.change(known)], [render.counts([known])]):
        assert said in "\n".join(lines) and red not in "\n".join(lines)
    console = Console(record=True, width=120, height=20, force_terminal=True, color_system="standard")
    for one, is_red in ((known, False), ({**known, "as_expected": False}, True)):
        screen = Screen()
        screen.show([one])
        console.print(screen)
        assert (red[:-1] in console.export_text(styles=True)) is is_red
        assert (red in "\n".join(render.table([one]))) is is_red
    past = {"ended": 0.0, "build": "b", "hit": False, "kind": "accuracy", "state": "failed", "error": None,
            "node": "", "toolchain": "", "values": {}, "expected": True}  # fmt: skip
    assert red not in "\n".join(render.align(rows([past])))


def test_foreign_text_cannot_drive_the_terminal() -> None:
    hostile = cell(
        "int8", "failed", kind="compiler_error", message="\x1b]0;owned\x07\x1b[2Jred\nnext\x9b31m", detail="\x1b[31mx"
    )
    text = "\n".join(plain(render.failures([hostile], "b-1")))
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", text)
    assert "red next" in text


def test_plan_shows_misses_with_their_reason() -> None:
    planned = {
        "name": "demo",
        "cells": [
            {**_planned("hit"), "identifier": "a/onnxruntime-cpu/fp32/b1"},
            {**_planned("miss"), "reason": "toolchain: onnxruntime1.30 -> onnxruntime1.31"},
            {**_planned("joined"), "identifier": "a/onnxruntime-cpu/int8/b1"},
            {
                **_planned("miss"),
                "identifier": "a/migraphx-gfx942/fp16/b1",
                "live_workers": 0,
                "reason": "first compile",
            },
        ],
        "outlook": {
            "eta": {"low": 21.0, "expected": 42.0, "high": 84.0},
            "slot_seconds": {"low": 21.0, "expected": 42.0, "high": 84.0},
            "gpu_hours": None,
            "spent_seconds": 0,
            "unknown": 2,
            "unserved": [],
        },
        "warnings": ["no live worker serves x"],
    }
    lines = plain(render.plan(planned))
    assert lines[0] == "demo: 4 cells, 1 hit, 2 misses, 1 joined"
    assert not any("fp32" in line for line in lines)
    assert re.search(r"miss +a/onnxruntime-cpu/fp16/b1 +toolchain: onnxruntime1.30 -> onnxruntime1.31", lines[1])
    assert re.search(r"joined +a/onnxruntime-cpu/int8/b1 +another build compiles it now", lines[2])
    assert lines[3].endswith("first compile; waits: no live worker")
    assert (
        "done in about 42 s (21 s to 84 s); about 42 s (21 s to 84 s) of compiling to come; "
        "2 cells of unknown duration: nothing like that was compiled yet"
    ) in lines
    assert lines[-1] == "warning: no live worker serves x"


def test_a_long_plan_is_cut_and_says_so() -> None:
    cells = [{**_planned("miss"), "identifier": f"m{number}"} for number in range(100)]
    lines = render.plan({"name": "demo", "cells": cells, "warnings": []})
    assert len(lines) == render.ROWS + 2
    assert "and 60 more" in lines[-1]


def _planned(state: str) -> dict[str, Any]:
    return {
        "identifier": "a/onnxruntime-cpu/fp16/b1",
        "state": state,
        "reason": "",
        "live_workers": 1,
        "expected_seconds": None,
    }


def test_plain_progress_is_one_line_for_each_change_of_state(capsys: pytest.CaptureFixture[str]) -> None:
    lines = Lines()
    lines.show([cell("fp32", "queued", attempt=0), cell("int8", hit=True, attempt=0)])
    lines.show([cell("fp32", "running", phase="fetching"), cell("int8", hit=True, attempt=0)])
    lines.show([cell("fp32", "running", phase="compiling"), cell("int8", hit=True, attempt=0)])
    lines.show([cell("fp32", "queued", attempt=1), cell("int8", hit=True, attempt=0)])
    lines.show([cell("fp32", "running", attempt=2), cell("int8", hit=True, attempt=0)])
    lines.show(
        [cell("fp32", "failed", attempt=2, kind="hang", message="no progress"), cell("int8", hit=True, attempt=0)]
    )
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "magika/onnxruntime-cpu/int8/b1 succeeded (hit)",
        "magika/onnxruntime-cpu/fp32/b1 running on node1.42",
        "magika/onnxruntime-cpu/fp32/b1 queued",
        "magika/onnxruntime-cpu/fp32/b1 running on node1.42 (attempt 2)",
        "magika/onnxruntime-cpu/fp32/b1 failed hang: no progress",
    ]


@pytest.mark.parametrize("width", [80, 200])
def test_live_display_fits_the_terminal(width: int) -> None:
    from rich.console import Console

    screen = Screen()
    screen.show(
        [cell("fp32", "queued", model=f"m{number}") for number in range(20)]
        + [cell("fp16", "succeeded", model=f"m{number}") for number in range(20)]
        + [cell("int8", "running", phase="compiling", progress=0.4, elapsed=67.0)]
    )
    console = Console(width=width, height=20, force_terminal=True, color_system=None, legacy_windows=False)
    with console.capture() as capture:
        console.print(screen)
    lines = capture.get().splitlines()
    assert len(lines) <= 20
    assert all(len(line) <= width for line in lines)
    assert re.search(r"magika/onnxruntime-cpu/int8/b1 +running +compiling 40% +1:07 +node1.42", lines[0])
    assert "20 succeeded, 1 running, 20 queued (5 not shown)" in lines[-1]
    assert not any("queued" in line for line in lines[:-1]), "what waits has no line of its own"
    assert lines[-2].strip() == "━" * (60 * 20 // 41) + "╸" * (60 * 2 * 20 // 41 % 2)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.00082, "820 µs"),
        (0.00431, "4.31 ms"),
        (12.0, "12 s"),
        (200, "3 min 20 s"),
        (240, "4 min"),
        (7800, "2 h 10 min"),
        (None, ""),
        (0, "0 s"),
    ],
)
def test_durations(seconds: float | None, text: str) -> None:
    assert render.duration(seconds) == text


TUNED = {"operations": 26, "known": 0, "tuned": 26, "untunable": 0, "seconds": 19.0, "saved": 0.0, "finished": True}


def test_what_tuning_came_to_is_said_of_each_cell_that_was_tuned() -> None:
    """A hit was tuned in another build."""
    known = {**TUNED, "known": 20, "tuned": 4, "untunable": 2, "seconds": 3.0, "saved": 15.0, "finished": False}
    first = cell("fp32", facts=facts(1, 1.0, 0.0, tuning={**TUNED, "published": "untuned"}, ratio=0.9))
    second = cell("fp16", facts=facts(1, 1.0, 0.0, tuning={**known, "published": "tuned"}, ratio=1.2))
    hit = {**first, "hit": True}
    assert render.tunings([hit, cell("int8", facts=facts(1, 1.0, 0.0, tuning=None))]) == []
    words = "26 operations, 26 tuned in 19 s; 0.90x the untuned program, which is published"
    assert render.tunings([first, hit]) == [f"tuning: {words}"]
    assert render.tunings([first, second]) == [
        "tuning: 52 operations, 20 known (saved 15 s), 30 tuned in 22 s, 2 not tunable",
        f"  magika/onnxruntime-cpu/fp32/b1  {words}",
        "  magika/onnxruntime-cpu/fp16/b1  26 operations, 20 known (saved 15 s), 4 tuned in 3 s, 2 not tunable, "
        "cut short by its budget; 1.20x the untuned program",
    ]


def test_how_far_tuning_is_shows_while_it_runs() -> None:
    running = cell("fp32", "running", phase="tuning", progress=0.8, detail="slice 13 of 15: 4 operations; 46 done")
    assert render.activity(running)[2:] == (
        "tuning 80%",
        "0:03",
        "node1.42  slice 13 of 15: 4 operations; 46 done",
    )
    assert render.activity({**running, "phase": "compiling"})[4] == "node1.42"


def test_inspect_says_what_the_device_is_and_how_the_first_runs_went() -> None:
    spec = {"model": {}, "compiler": {"name": "migraphx"}, "precision": "fp16"}
    device = {"arch": "gfx942:sramecc+:xnack-", "compute_units": 304}
    sidecar = {
        "identifier": "net/migraphx-gfx942/fp16/b1",
        "key": "ab" * 32,
        "spec": spec,
        "toolchain": "rocm7.2",
        "schema": 1,
        "namespace": "main",
        "created": "2026-01-01T00:00:00Z",
        "blobs": {"program": {"path": "net.mxr", "digest": "cd" * 32, "size": 1}},
        "device": {
            **device,
            "model": "AMD Instinct MI300X",
            "partition": "SPX",
            "memory": 206 * 10**9,
            "driver": "6.12.12",
        },
        "measurements": {"first_run_cold": 8.2, "first_run_warm": 0.04},
    }
    lines = [" ".join(line.split()) for line in describe(validate(sidecar))]
    whole = "device AMD Instinct MI300X, gfx942:sramecc+:xnack-, 304 CUs, SPX, 206 GB, driver 6.12.12"
    assert {whole, "first run 8.2 s cold, 40 ms warm"} <= {*lines}
    bare = describe(validate({**sidecar, "device": {**device, "model": None}, "measurements": {}}))
    assert "device gfx942:sramecc+:xnack-, 304 CUs" in [" ".join(line.split()) for line in bare]


def test_waiting_says_why_once_for_each_reason() -> None:
    cells = [cell("fp32", "queued", waiting="no live worker serves p")] * 3 + [cell("int8", "running", waiting="")]
    assert render.waiting(cells) == ["3 cells waiting: no live worker serves p"]


def test_waiting_in_a_queue_is_one_line_however_long_it_is() -> None:
    ahead = [cell("fp32", "queued", waiting=f"{number} jobs ahead for 2 slots of p") for number in range(3, 23)]
    assert render.waiting([*ahead, *[cell("fp16", "queued", waiting="")] * 9000]) == [
        "20 cells waiting: 3 to 22 jobs ahead for 2 slots of p",
        "9,000 cells waiting behind them",
    ]
    assert render.waiting(ahead[:1]) == ["1 cell waiting: 3 jobs ahead for 2 slots of p"]
    first = cell("int8", "queued", waiting="1 job ahead for 2 slots of p")
    assert render.waiting([first]) == ["1 cell waiting: 1 job ahead for 2 slots of p"]
    assert render.waiting([first, *ahead[:1]]) == ["2 cells waiting: 1 to 3 jobs ahead for 2 slots of p"]


def test_what_is_under_way_is_cut_where_it_would_fill_screens() -> None:
    cells = [cell("fp32", "queued")] * 500 + [cell("int8", "running")] + [cell("fp16", "succeeded")]
    lines = render.under_way(cells)
    assert len(lines) == render.ROWS + 1
    assert "running" in lines[0]
    assert lines[-1] == f"  and {501 - render.ROWS} more (--json has all)"


HOSTILE = [
    ("\x1b[31mred\x1b[0m", "red"),
    ("\x1b[2J\x1b[Hcleared", "cleared"),
    ("\x1b]0;a title\x07named", "named"),
    ("\x1b]8;;https://evil.example\x1b\\link\x1b]8;;\x1b\\", "link"),
    ("\x1b]52;c;cm0gLXJmIC8=\x07clipboard", "clipboard"),
    ("\x1bPq#0;2;0;0;0\x1b\\sixel", "sixel"),
    ("\x1b]0;without an end", ""),
    ("\x1bcreset", "reset"),
    ("\x1b(0lqk", "lqk"),
    ("\x9b31mof one byte", " 31mof one byte"),
    ("over\rwritten", "over\nwritten"),
    ("back\b\b\bspace", "back   space"),
    ("bell\x07 nul\x00", "bell  nul "),
    ("re\u202eversed", "re versed"),
    ("::set-output name=a::b", ": :set-output name=a::b"),
    ("fine\n  ::error file=a::b", "fine\n  : :error file=a::b"),
    ("\x1b[0m::stop-commands::x", ": :stop-commands::x"),
    ("a ##[error]b", "a # #[error]b"),
    ("##vso[task.setvariable variable=a]b", "# #vso[task.setvariable variable=a]b"),
    ("##teamcity[buildStatus text='a']", "# #teamcity[buildStatus text='a']"),
    ("\x1b[0Ksection_start:1:a\r\x1b[0K", "section_start:1:a\n"),
    ("std::vector<int> ## a", "std::vector<int> ## a"),
]


@pytest.mark.parametrize(("text", "shown"), HOSTILE)
def test_foreign_text_drives_neither_a_terminal_nor_a_ci_server(text: str, shown: str) -> None:
    assert inert(text) == shown
    assert "\n" not in one_line(text)


def test_our_own_colours_are_kept() -> None:
    assert inert("\x1b[32mok\x1b[0m \x1b[2J\x07", colours=True) == "\x1b[32mok\x1b[0m  "
    assert inert("::error::x", command=True) == "::error::x"


# --- widths ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [60, 80, 100, 200])
def test_tables_fit_the_terminal_and_lose_nothing(columns: int) -> None:
    lines = plain(render.table(COMPILED, columns))
    assert max(map(len, lines)) <= columns
    text = " ".join(lines)
    for words in (
        "magika/onnxruntime-cpu/int8/b1",
        "succeeded",
        "1.59 MB",
        "4.3 ms",
        "2.1 ms",
        "8.0e-02",
        "3.21 s",
    ):
        assert words in text
    assert lines[0].startswith("cell  ")
    assert (lines[2].strip() == "error 2.0e-07, time hit") == (columns == 80)
    styled = render.table(COMPILED, columns)
    assert [render.wrap(line, columns) for line in styled] == styled, "colours take no room"


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_builds_are_listed_with_time_and_labels(columns: int) -> None:
    build = {
        "id": "b-0123456789abcdef", "name": "nightly", "state": "reported", "paused": False, "created_at": 1.8e9,
        "labels": {"team": "x\ny", "commit": "0123456789abcdef0123456789abcdef01234567", "ci": "https://x"},
        "counts": {}, "verdict": {"text": "6 of 6 cells succeeded", "exit_code": 0}, "follows": None, "retries": None,
    }  # fmt: skip
    lines = plain(render.align(render.builds([build]), columns=columns))
    assert max(map(len, lines)) <= max(columns, 130)
    for words in ("2027-01-15 08:00", "nightly", "team=x y", "commit=0123456789abcdef012…", "6 of 6 cells succeeded"):
        assert words in " ".join(line.strip() for line in lines)
    assert "https" not in " ".join(lines)
    red = {**build, "verdict": {"text": "5 of 6 cells succeeded", "exit_code": 3}}
    assert [render.builds([each])[1][1] for each in (build, red)] == ["passed", "failed"]
    assert lines[0].split()[0] == "BUILD"
    assert len(lines) == 2 or columns < 200


def test_a_long_value_goes_on_below_its_beginning() -> None:
    lines = render.wrap("  first 10   519 µs, 79.5 µs, 80.1 µs, 71.9 µs, 90.4 µs", 40).splitlines()
    assert lines == ["  first 10   519 µs, 79.5 µs, 80.1 µs,", "             71.9 µs, 90.4 µs"]


def test_prose_ends_at_words() -> None:
    text = "  shared: others ran on the host or used the GPU while it was measured, so it is rough"
    lines = render.wrap(text, 40).splitlines()
    assert max(map(len, lines)) <= 40
    assert lines[0].startswith("  shared")
    assert all(line.startswith("    ") for line in lines[1:])
    assert " ".join(line.strip() for line in lines) == text.strip()
    assert render.wrap("https://farm.example/ui/" + "x" * 80, 40).count("\n") == 0


@pytest.mark.parametrize("columns", [45, 60, 130])
def test_the_live_display_keeps_states_on_narrow_terminals(columns: int) -> None:
    from rich.console import Console

    screen = Screen()
    screen.show(
        [{**cell("fp16", "running", facts=None), "phase": "measuring", "worker": "node-1-cpu", "elapsed": 75.0}]
    )
    console = Console(width=columns, height=10, file=io.StringIO(), force_terminal=True, color_system=None)
    console.print(screen)
    shown = console.file.getvalue()
    assert "running" in shown and "measuring" in shown and "1:15" in shown
    assert ("node-1-cpu" in shown) == (columns == 130)
    assert max(len(line.rstrip()) for line in shown.splitlines()) <= columns


def test_the_live_display_cuts_long_names_where_cells_are_alike() -> None:
    from rich.console import Console

    screen = Screen()
    name = "a-model-with-quite-a-long-name-"
    cells = [cell("fp16", "running", facts=None, phase="measuring", worker="vm-cpu-23831-ca1cdf") for _ in range(2)]
    screen.show([{**each, "identifier": f"{name}{n}/onnxruntime-cpu/fp16/b{n}"} for n, each in enumerate(cells)])
    for columns in (60, 80, 100):
        console = Console(width=columns, height=10, file=io.StringIO(), force_terminal=True, color_system=None)
        console.print(screen)
        shown = console.file.getvalue()
        assert re.findall(r"e-(\d)/on\S*/fp16/b(\d) +running", shown) == [("0", "0"), ("1", "1")]
        assert ("vm-cpu-" in shown) == (columns >= 80)


def test_the_live_display_keeps_what_differs_where_there_is_hardly_room() -> None:
    from rich.console import Console

    screen = Screen()
    names = [f"tinynet/onnxruntime-cpu/fp32/b{n}" for n in (1, 2, 16)]
    screen.show([{**cell("fp32", "running", facts=None, phase="measuring"), "identifier": name} for name in names])
    console = Console(width=40, height=10, file=io.StringIO(), force_terminal=True, color_system=None)
    console.print(screen)
    assert re.findall(r"^(…\S+) +running", console.file.getvalue(), re.M) == ["…/…/…/b1", "…/…/…/b2", "…/…/…/b16"]


def test_a_worker_that_starts_is_no_missing_worker() -> None:
    outlook = {
        "eta": None,
        "unserved": ["x", "y"],
        "slot_seconds": None,
        "gpu_hours": None,
        "spent_seconds": 0,
        "unknown": 0,
    }
    assert render.outlook(outlook) == ["end unknown: no worker takes jobs of x, y now"]
    assert render.outlook(outlook, {"x"}) == ["end unknown: no worker takes jobs of y now"]
    assert render.outlook(outlook, {"x", "y"}) == ["a worker is starting"]
    paused = {**outlook, "paused": ["y"]}
    assert render.outlook(paused) == [
        "end unknown: y is paused (`farm resume y`); end unknown: no worker takes jobs of x now"
    ]
    assert render.outlook({**paused, "unserved": ["y"]}) == ["end unknown: y is paused (`farm resume y`)"]


@pytest.mark.parametrize(
    ("before", "now", "new"),
    [
        (b"", b"a\nb\n", b"a\nb\n"),
        (b"a\nb\n", b"a\nb\nc\n", b"c\n"),
        (b"a\nb\nc\n", b"b\nc\nd\n", b"d\n"),
        (b"b\nc\n", b"a\nb\nc\nd\n", b"d\n"),
        (b"a\n", b"x\ny\n", b"x\ny\n"),
        (b"a\n", b"a\n", b""),
    ],
)
def test_a_followed_log_shows_each_line_once(before: bytes, now: bytes, new: bytes) -> None:
    assert added(before, now) == new


def test_the_end_of_a_long_log_that_was_followed_is_found_at_once() -> None:
    """Each end of what was shown was compared as a copy: of some megabytes that took hours."""
    log = b"".join(b"%9d of a compiler that says much\n" % number for number in range(100_000))
    began = time.monotonic()
    assert added(log[1000:2_000_000], log) == log[2_000_000:]
    assert added(log[1000:2_000_000], log[1_990_000:2_050_000]) == log[2_000_000:2_050_000]
    assert added(b"same\n" * 400_000 + b"other\n", b"same\n" * 500_000 + b"other\nend\n") == b"end\n"
    assert time.monotonic() - began < 20
