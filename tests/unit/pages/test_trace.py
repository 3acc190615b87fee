"""A build over time: tracks of slots, and the rules of the Chrome trace event format."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from farm.pages.job_view import timeline, trace_events
from tests.support.places import ROOT


def job(name: str, created: float, *attempts: tuple[str, float, float | None, str | None], **more: Any) -> Any:
    """A job with its attempts: worker, begin, end and how it ended."""
    return {
        "id": name, "order": {"identifier": f"net/cpu/fp32/{name}"}, "created_at": created, "state": "succeeded",
        "ended_at": None,
        "attempts": [
            {
                "number": number, "worker": worker, "started_at": begun, "ended_at": ended, "end": end,
                "kind": "lost" if end == "lost" else None, "message": "",
                "phases": {"compiling": 3.0, "fetching": 1.0, "measuring": 100.0 if end == "lost" else 0.5},
            }
            for number, (worker, begun, ended, end) in enumerate(attempts, 1)
        ],
        **more,
    }  # fmt: skip


JOBS = [
    job("a", 100.0, ("w1", 101.0, 106.0, "succeeded")),
    job("b", 100.0, ("w1", 102.0, 108.0, "lost"), ("w2", 110.0, 115.0, "succeeded")),
    job("c", 100.0, ("w1", 106.0, None, None), state="running"),
    job("d", 104.0, state="queued"),
]
FOUND = timeline(JOBS, 120.0)


def test_attempts_lie_in_slots_one_after_the_other() -> None:
    slots = [(each.worker, each.slot, [span.job for span in each.spans]) for each in FOUND.tracks]
    assert slots == [("w1", 1, ["a", "c"]), ("w1", 2, ["b"]), ("w2", 1, ["b"])]
    waits = [(span.job, span.waited) for track in FOUND.tracks for span in track.spans]
    assert waits == [("a", 1.0), ("c", 6.0), ("b", 2.0), ("b", 2.0)]


def test_an_attempt_that_publishes_has_left_its_slot_to_the_next() -> None:
    jobs = [job("a", 100.0, ("w1", 101.0, 106.0, "succeeded")), job("b", 100.0, ("w1", 105.5, 110.0, "succeeded"))]
    assert [len(track.spans) for track in timeline(jobs, 120.0).tracks] == [1, 1]
    jobs[0]["attempts"][0]["phases"] = {"compiling": 4.2, "uploading": 0.7}
    (track,) = timeline(jobs, 120.0).tracks
    assert [(span.start, span.end) for span in track.spans] == [(1.0, 5.5), (5.5, 10.0)]
    assert [(each.name, each.start + each.seconds) for each in track.spans[0].parts()][-1][1] <= 4.5


def test_the_queue_counts_what_waits_also_between_two_attempts() -> None:
    assert FOUND.queue == [(0.0, 3), (1.0, 2), (2.0, 1), (4.0, 2), (6.0, 1), (8.0, 2), (10.0, 1)]
    assert FOUND.seconds == 20.0


def test_a_job_that_was_cancelled_while_it_waited_was_in_the_queue() -> None:
    running = job("a", 100.0, ("w1", 101.0, 106.0, "succeeded"), ended_at=106.1)
    found = timeline([running, job("b", 100.0, state="cancelled", ended_at=109.0)], 120.0)
    assert found.queue == [(0.0, 2), (1.0, 1), (9.0, 0)]
    assert found.seconds == 9.0


def test_an_attempt_that_another_clock_saw_before_its_job_lies_in_the_picture() -> None:
    found = timeline([job("a", 100.0, ("w1", 98.0, 103.0, "succeeded"))], 120.0)
    assert [(span.start, span.waited) for track in found.tracks for span in track.spans] == [(0.0, 0.0)]
    assert (found.origin, found.seconds) == (98.0, 5.0)


def test_the_trace_keeps_the_rules_of_the_format() -> None:
    """Trace Event Format, Google: phases X, M and C, their fields, microseconds; slices nest by their times."""
    document = json.loads(json.dumps(trace_events(FOUND, "b-1"), allow_nan=False))
    assert document["displayTimeUnit"] in ("ms", "ns")
    assert document.keys() <= {"traceEvents", "displayTimeUnit", "otherData"}, "others become metadata of the trace"
    slices: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in document["traceEvents"]:
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        assert event["ts"] >= 0
        assert {type(event[name]) for name in ("ts", "dur", "pid", "tid") if name in event} == {int}
        assert isinstance(event["args"], dict)
        match event["ph"]:
            case "X":
                assert isinstance(event["tid"], int)
                assert event["dur"] > 0
                slices.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
            case "M":
                assert event["name"] in ("process_name", "thread_name")
                assert isinstance(event["args"]["name"], str)
            case "C":
                assert all(isinstance(count, int) and count >= 0 for count in event["args"].values())
            case other:
                raise AssertionError(other)
    assert len(slices) == 3
    threads = {(event["pid"], event["tid"]) for event in document["traceEvents"] if event["name"] == "thread_name"}
    assert slices.keys() == threads, "each track has a name"
    processes = {event["pid"] for event in document["traceEvents"] if event["name"] == "process_name"}
    numbers = [*processes, *(tid for _, tid in threads)]
    assert len(set(numbers)) == len(numbers), "Perfetto shows a thread with its process's number first, as the main one"
    for track in slices.values():
        stack: list[float] = []
        for begin, end in sorted(track, key=lambda each: (each[0], -each[1])):
            while stack and stack[-1] <= begin + 1e-3:
                stack.pop()
            assert not stack or end <= stack[-1] + 1e-3, "a slice crosses the end of the one that it lies in"
            stack.append(end)
    named = [event["args"]["name"] for event in document["traceEvents"] if event["ph"] == "M"]
    assert named == ["b-1", "w1", "w2", "slot 1", "slot 2", "slot 1"]


@pytest.mark.skipif("PERFETTO" not in os.environ, reason="PERFETTO names no folder for tests/support/perfetto.mjs")
def test_perfetto_reads_slots_phases_and_the_queue(tmp_path: Path) -> None:
    (tmp_path / "trace.json").write_text(json.dumps(trace_events(FOUND, "b-1")))
    slices = "select process.name, thread.name, is_main_thread, count(*), max(depth) from slice join thread_track"
    queries = [
        f"{slices} on track_id = thread_track.id join thread using (utid) join process using (upid) group by 1, 2",
        "select name, sum(dur) / 1e9 from slice where depth = 1 group by 1",
        "select process.name, process_counter_track.name, ts / 1e9, value from counter join process_counter_track"
        " on track_id = process_counter_track.id join process using (upid) order by 3 limit 2",
        "select name, value from stats where value > 0 and severity != 'info'",
    ]
    command = ["node", str(ROOT / "tests/support/perfetto.mjs"), os.environ["PERFETTO"], "trace.json", *queries]
    said = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True).stdout
    tracks, phases, queue, complaints = map(json.loads, said.splitlines())
    assert tracks == [["w1", "slot 1", 0, 10, 1], ["w1", "slot 2", 0, 4, 1], ["w2", "slot 1", 0, 5, 1]]
    assert phases == [["compiling", 12.0], ["fetching", 4.0], ["measuring", 3.5], ["rest", 10.5]]
    assert queue == [["b-1", "waiting jobs", 0.0, 3.0], ["b-1", "waiting jobs", 1.0, 2.0]]
    assert complaints == []


def test_workers_are_in_their_natural_order() -> None:
    jobs = [job(name, 100.0, (name, 101.0, 106.0, "succeeded")) for name in ("gpu10", "gpu2")]
    assert [track.worker for track in timeline(jobs, 120.0).tracks] == ["gpu2", "gpu10"]


def test_perfetto_drops_no_slice_that_ends_with_the_one_in_which_it_lies() -> None:
    """Its importer reads nanoseconds, cut off, and drops what partly overlaps an open slice (`slice_tracker.cc`)."""
    jobs = [job(str(at), 100.0, ("w1", 100 + at / 7.1, 109 + at / 7.3, "succeeded")) for at in range(1, 900, 7)]
    for number, each in enumerate(jobs):
        each["attempts"][0]["phases"] = {"fetching": number / 17, "compiling": 3.7 + number / 13}
    open_ones: dict[int, list[int]] = {}
    for event in trace_events(timeline(jobs, 999.0), "b-1")["traceEvents"]:
        if event["ph"] == "X":
            begin, end = int(event["ts"] * 1000), int(event["ts"] * 1000) + int(event["dur"] * 1000)
            stack = open_ones.setdefault(event["tid"], [])
            while stack and stack[-1] <= begin:
                stack.pop()
            assert not stack or end <= stack[-1], event
            stack.append(end)
    assert open_ones
