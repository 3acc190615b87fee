"""The attempts of a build on tracks, one for each slot that was used, and how many jobs waited. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from farm.jobs.rows import JobView
from farm.pages.job_view import AttemptLine, AttemptPart, attempts_of
from farm.units import by_number

MICROSECONDS = 1e6


class AttemptSpan(NamedTuple):
    """One attempt of a job, in seconds since the first of the build's jobs was queued, with its phases."""

    job: str
    cell: str
    attempt: AttemptLine
    start: float
    waited: float
    """How long it was queued before: its job's first attempt, since the job is there; another one, since the last."""

    @property
    def end(self) -> float:
        """When it ended; of one that runs, now."""
        return self.start + (self.attempt.seconds or 0.0)

    def parts(self) -> Iterator[AttemptPart]:
        """Yield its phases, none beyond its end: clocks of two machines may disagree about it."""
        for part in self.attempt.parts():
            if (seconds := min(part.seconds, self.end - self.start - part.start)) > 0:
                yield part._replace(seconds=seconds)


class SlotTrack(NamedTuple):
    """A slot of a worker, with what ran there, one after the other."""

    worker: str
    slot: int
    spans: list[AttemptSpan]


def tracks(spans: Iterable[AttemptSpan]) -> list[SlotTrack]:
    """Return spans on tracks by worker: each goes to the first slot of its worker that is free by then."""
    found: dict[str, list[SlotTrack]] = {}
    for span in sorted(spans, key=lambda span: span.start):
        worker = span.attempt.row["worker"] or "unknown"
        slots = found.setdefault(worker, [])
        free = next((slot for slot in slots if slot.spans[-1].end <= span.start), None)
        if free is None:
            slots.append(free := SlotTrack(worker, len(slots) + 1, []))
        free.spans.append(span)
    return [track for worker in sorted(found, key=by_number) for track in found[worker]]


class BuildTimeline(NamedTuple):
    """A build over time: `queue` has the moments at which another number of its jobs waits, with that number."""

    origin: float
    seconds: float
    tracks: Sequence[SlotTrack]
    queue: Sequence[tuple[float, int]]


def timeline(jobs: Sequence[JobView], now: float) -> BuildTimeline:
    """Return when the jobs of a build waited and ran; `now` in Unix seconds."""
    begins = [at for job in jobs for at in (job["created_at"], *(each["started_at"] for each in job["attempts"])) if at]
    origin = min(begins, default=now)
    spans, steps, last = [], Counter[float](), 0.0
    for job in jobs:
        queued = job["created_at"] or origin
        for attempt in attempts_of(job, now):
            if begun := attempt.row["started_at"]:
                spans.append(
                    AttemptSpan(
                        job["id"], job["order"]["identifier"], attempt, begun - origin, max(0.0, begun - queued)
                    )
                )
                steps[queued - origin] += 1
                steps[max(begun, queued) - origin] -= 1
                queued = attempt.row["ended_at"] or now
                last = max(last, spans[-1].end)
        if job["state"] == "queued":
            steps[queued - origin] += 1
            last = max(last, now - origin)
    queue, waiting = [], 0
    for at in sorted(steps):
        waiting += steps[at]
        queue.append((at, waiting))
    return BuildTimeline(origin, last, tracks(spans), queue)


def trace_events(found: BuildTimeline, name: str) -> dict[str, Any]:
    """Return a timeline in the Chrome trace event format, which Perfetto opens.

    Processes are workers, threads are their slots, slices are attempts with their phases in them. The process 0 is the
    build: it has the counter of waiting jobs. Times are in microseconds since the first of the build's jobs was queued,
    and whole ones: Perfetto drops a slice that ends a nanosecond after the one in which it lies.
    """
    workers = {worker: number for number, worker in enumerate(dict.fromkeys(each.worker for each in found.tracks), 1)}
    events: list[dict[str, Any]] = [_named("process_name", 0, 0, name)]
    events += [_named("process_name", number, 0, worker) for worker, number in workers.items()]
    events += [
        {
            "name": "waiting jobs",
            "cat": "queue",
            "ph": "C",
            "ts": round(at * MICROSECONDS),
            "pid": 0,
            "args": {"jobs": count},
        }
        for at, count in found.queue
    ]
    for track in found.tracks:
        place = {"pid": workers[track.worker], "tid": track.slot}
        events.append(_named("thread_name", place["pid"], track.slot, f"slot {track.slot}"))
        for span in track.spans:
            row = span.attempt.row
            facts = {"job": span.job, "attempt": row["number"], "end": row["end"] or "running", "waited": span.waited}
            facts |= {name: row[name] for name in ("kind", "message") if row[name]}
            events.append(_slice(span.cell, "attempt", span.start, span.end, place, facts))
            for each in span.parts():
                start = span.start + each.start
                events.append(_slice(each.name, "phase", start, min(start + each.seconds, span.end), place))
    return {"displayTimeUnit": "ms", "traceEvents": events, "otherData": {"build": name, "began": found.origin}}


def _named(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "ts": 0, "args": {"name": name}}


def _slice(
    name: str, category: str, start: float, end: float, place: dict[str, int], args: dict[str, Any] | None = None
) -> dict[str, Any]:
    begun, ended = round(start * MICROSECONDS), round(end * MICROSECONDS)
    times = {"ts": begun, "dur": ended - begun}
    return {"name": name, "cat": category, "ph": "X", **times, **place, "args": args or {}}
