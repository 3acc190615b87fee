"""Jobs as pages show them: attempts, what a key is made of, what came out, the log, how to use a program. Pure."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from farm.artifacts.sidecar import serving_of
from farm.inert import inert
from farm.jobs.rows import AttemptView, JobView
from farm.jobs.state import Phase
from farm.runner.documents import Latency, Verification
from farm.units import by_number, view_of
from farm.wire.program import Sidecar

_NOTHING: Sequence[object] = (None, "", {}, [], ())

PHASES: Sequence[str] = [phase.value for phase in Phase]  # In the order in which an attempt goes through them.
REST = "rest"  # The time of an attempt outside of its phases.


class AttemptPart(NamedTuple):
    """A phase of an attempt, in seconds since the attempt began."""

    name: str
    start: float
    seconds: float

    @property
    def look(self) -> str:
        """Its class in the style sheet."""
        return self.name if self.name in (*PHASES, REST) else "other"


class AttemptLine(NamedTuple):
    """One attempt, and the seconds that it took; so far, while it runs."""

    row: AttemptView
    seconds: float | None

    @property
    def failed(self) -> bool:
        """Whether it did not do what it should."""
        return self.row["end"] in ("failed", "lost")

    @property
    def rest(self) -> float:
        """The seconds outside of its phases: preparing, waiting for a device, cleaning up."""
        return max(0.0, (self.seconds or 0.0) - sum(self.row["phases"].values()))

    def parts(self) -> Iterator[AttemptPart]:
        """Yield its phases in their order, those that are not known here behind them, and the rest last."""
        phases, at = self.row["phases"], 0.0
        order = sorted(phases, key=lambda name: PHASES.index(name) if name in PHASES else len(PHASES))
        for name, seconds in [*((name, phases[name]) for name in order), (REST, self.rest)]:
            if seconds > 0:
                yield AttemptPart(name, at, seconds)
                at += seconds


def attempts_of(job: JobView, now: float) -> list[AttemptLine]:
    """Return the attempts of a job, oldest first; `now` in Unix seconds."""
    return [
        AttemptLine(row, max(0.0, (row["ended_at"] or now) - row["started_at"]) if row["started_at"] else None)
        for row in job["attempts"]
    ]


def attempt_of(made: Sidecar) -> AttemptLine:
    """Return the attempt that made a program."""
    begun = datetime.fromisoformat(made["created"]).timestamp() - made["seconds"]
    known = {**made, "number": made["attempt"], "started_at": begun, "ended_at": None, "end": "succeeded", "kind": None}
    known |= {"message": "", "detail": "", "log": None, "limits": {"time": 0.0, "memory": 0}}
    return AttemptLine(view_of(AttemptView, known), made["seconds"])


def ingredients_of(value: object, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield the fields of a spec with their values as text, in the order of their names; what is empty is left out."""
    if value in _NOTHING:
        return
    match value:
        case Mapping():
            for name in sorted(value):
                yield from ingredients_of(value[name], f"{path}.{name}" if path else str(name))
        case list() | tuple():
            yield path, ", ".join(str(item) for item in value)
        case bool():
            yield path, str(value).lower()
        case _:
            yield path, str(value)


def outputs_of(found: Verification) -> list[str]:
    """Return the outputs of a program that were to be compared with the reference, the worst first."""

    def distance(name: str) -> float:
        error = found["errors"].get(name)
        return 1 - (found["equal"].get(name) or 0) if error is None else error

    return sorted(dict.fromkeys([*found["errors"], *found["equal"], *found["unverified"]]), key=distance, reverse=True)


def runs_of(sidecar: Sidecar) -> list[tuple[str, Latency]]:
    """Return what was measured of each kind of run."""
    measured = sidecar["measurements"]
    kinds = {
        "whole run": measured["latency"],
        "device only": measured["device_latency"],
        "tuned": measured["tuned"],
        "untuned": measured["baseline"],
    }
    return [(label, each) for label, each in kinds.items() if each]


# --- a log: numbered lines with their colours, opened at the first error ----------------------------------------------

LINES = 2000  # Lines on one page.
BEFORE = 200  # Lines that are shown before the first error.
FOUND = 500  # Lines that a search shows at most.
LONGEST = 4000  # Characters of a line that are shown; the raw log has all.
STYLED = 20_000
"""Changes of style that a page shows; its lines after these are plain. A page of nothing else took nine seconds."""

FOLDED = 12  # Lines of a stage that is worth folding.

_STAGE = re.compile(r"== ([a-z]{3,20}) ==")
"""How the farm begins a stage in the log of an attempt (`farm.compiling.pipeline`)."""
_STYLE = re.compile(r"\x1b\[([0-9;]*)m")
_WRONG = re.compile(
    r"^\s*(traceback \(most recent|terminate called|panic:|fatal\b|error\b|e\s{2,})"
    r"|\b(error|exception|failure|fatal|assertion failed|segmentation fault|out of memory|aborted)\b\s*[:(!]"
    r"|\b(\w+Error|\w+Exception)\b"
    r"|\[(error|fatal)\]",
    re.IGNORECASE,
)
_FINE = re.compile(r"\b(0|no) (errors?|failures?)\b", re.IGNORECASE)
_CLASSES = {
    1: "bold", 2: "dim", 3: "italic", 4: "under",
    **{code: f"c{code - 30}" for code in range(30, 38)},
    **{code: f"c{code - 90}" for code in range(90, 98)},
}  # fmt: skip
_COLOURS = {f"c{number}" for number in range(8)}


class LogLine(NamedTuple):
    """One line, from 1 on."""

    number: int
    markup: Markup
    is_first_error: bool
    part: int = 0  # The part of the log that has it, from 0; its number counts from that part's beginning.


class LogStage(NamedTuple):
    """The lines of one stage of an attempt; those before the first stage have no name."""

    name: str
    lines: Sequence[LogLine]
    folded: bool


class LogPage(NamedTuple):
    """Some lines of a log. `before` and `after` are the first lines of the pages around it, 0 if there is none."""

    lines: Sequence[LogLine]
    total: int
    first_error: int
    before: int
    after: int
    left_out: int  # Lines that a search found and that are not shown.


def page(text: str, *, start: int = 0, known: str = "") -> LogPage:
    """Return the lines of a log, or of a part of it, from `start` on, or around the first error.

    `known` is what the farm already took out of the log as the useful lines: its first line is where it went wrong.
    """
    lines = _lines(text)
    wrong = first_error(lines, known)
    if not start:
        start = wrong - BEFORE if wrong else len(lines) - LINES + 1
    start = max(1, min(start, max(1, len(lines))))
    if start <= BEFORE and wrong <= LINES:
        start = 1 if wrong else start
    end = min(len(lines), start + LINES - 1)
    styled = dict(_styled(lines, set(range(start, end + 1))))
    chosen = [LogLine(number, styled[number], number == wrong) for number in range(start, end + 1)]
    before = max(1, start - LINES) if start > 1 else 0
    after = end + 1 if end < len(lines) else 0
    return LogPage(chosen, len(lines), wrong, before, after, 0)


def search(parts: Iterable[str], wanted: str, first: int = 0) -> LogPage:
    """Return the lines of a log that contain a text, in letters of any case; its parts from `first` on come in turn."""
    chosen, total, left_out = list[LogLine](), 0, 0
    for part, text in enumerate(parts, first):
        total += text.count("\n") + (text[-1:] not in ("", "\n"))
        plain = _STYLE.sub("", text).lower()
        if wanted.lower() not in plain:
            continue
        found = [number for number, line in enumerate(_lines(plain), 1) if wanted.lower() in line]
        shown = found[: FOUND - len(chosen)]
        left_out += len(found) - len(shown)
        if shown:  # Styles are for what is shown: they take five times as long as the search.
            styled = dict(_styled(_lines(text), set(shown)))
            chosen += [LogLine(number, styled[number], False, part) for number in shown]
    return LogPage(chosen, total, 0, 0, 0, left_out)


def _lines(text: str) -> list[str]:
    lines = text.replace("\r\n", "\n").split("\n")
    return lines if lines[-1] else lines[:-1]


def stages(page: LogPage) -> list[LogStage]:
    """Return the lines of a page by stage. If one has the error, the others are folded unless they are short."""
    found: list[tuple[str, list[LogLine]]] = []
    for line in page.lines:
        head = _STAGE.fullmatch(str(line.markup))
        if head or not found:
            found.append((head[1] if head else "", []))
        found[-1][1].append(line)
    has_error = [any(line.is_first_error for line in lines) for _, lines in found]
    return [
        LogStage(name, lines, any(has_error) and not wrong and len(lines) > FOLDED)
        for (name, lines), wrong in zip(found, has_error, strict=True)
    ]


def first_error(lines: Sequence[str], known: str = "") -> int:
    """Return the number of the line where it went wrong, 0 if none looks so."""
    # All at once: a line at a time takes a second for half a million of them.
    plain = list(enumerate(_STYLE.sub("", "\n".join(lines)).split("\n")[: len(lines)], 1))
    wanted = next((line.strip() for line in known.splitlines() if len(line.strip()) > 8), "")
    named = (number for number, line in plain if wanted and wanted in line)
    shown = ((number, line[:LONGEST]) for number, line in plain)
    wrong = (number for number, line in shown if _WRONG.search(line) and not _FINE.search(line))
    return next(chain(named, wrong), 0)


def _styled(lines: Sequence[str], wanted: set[int]) -> Iterator[tuple[int, Markup]]:
    """Yield lines as markup; a colour that was turned on holds until it is turned off, over lines too."""
    active: list[str] = []
    left = STYLED
    for number, line in enumerate(lines, 1):
        if number in wanted:
            shown = line[:LONGEST]
            left -= shown.count("\x1b[")
            markup, active = _markup(shown if left > 0 else _STYLE.sub("", shown), active)
            if len(line) > LONGEST:
                markup += Markup('<span class="dim"> … {} characters more</span>').format(len(line) - LONGEST)
            yield number, markup
        elif "\x1b[" in line:
            for found in _STYLE.finditer(line):
                active = _after(active, found[1])


def _markup(line: str, active: list[str]) -> tuple[Markup, list[str]]:
    parts, at = [], 0
    for found in [*_STYLE.finditer(line), None]:
        piece = inert(line[at : found.start() if found else len(line)])
        if piece:
            shown = Markup('<span class="{}">{}</span>').format(" ".join(active), piece) if active else escape(piece)
            parts.append(shown)
        if found:
            active, at = _after(active, found[1]), found.end()
    return Markup("").join(parts), active


def _after(active: list[str], codes: str) -> list[str]:
    """Return the styles after a control sequence; what is not known changes nothing."""
    # No compiler sends more at once.
    for text in codes[:40].split(";") if codes else ["0"]:
        code = int(text[:4]) if text else 0
        if code == 0:
            active = []
        elif code == 39:
            active = [name for name in active if name not in _COLOURS]
        elif code == 22:
            active = [name for name in active if name not in ("bold", "dim")]
        elif name := _CLASSES.get(code):
            active = [each for each in active if each != name and not ({each, name} <= _COLOURS)] + [name]
    return active


# --- a build over time: attempts on tracks, one for each slot, and how many jobs waited -------------------------------

MICROSECONDS = 1e6


class AttemptSpan(NamedTuple):
    """One attempt of a job, in seconds since the first of the build's jobs was queued, with its phases."""

    job: str
    cell: str
    attempt: AttemptLine
    start: float
    waited: float
    """How long it was queued before: its job's first attempt, since the job is there; another one, since the last."""
    next: float = math.inf
    """When the next attempt began in its slot, which an attempt leaves before it publishes."""

    @property
    def end(self) -> float:
        """When it ended; of one that runs, now. No later than the next one in its slot began."""
        return min(self.start + (self.attempt.seconds or 0.0), self.next)

    @property
    def left(self) -> float:
        """When it left its slot: at its end, or in the seconds before for which it published."""
        published = self.attempt.row["phases"].get(Phase.UPLOADING)
        return self.end - published - self.attempt.rest if published else self.end

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
        free = next((slot for slot in slots if slot.spans[-1].left <= span.start), None)
        if free is None:
            slots.append(free := SlotTrack(worker, len(slots) + 1, []))
        else:
            free.spans[-1] = free.spans[-1]._replace(next=span.start)
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
                name, waited = job["order"]["identifier"], max(0.0, begun - queued)
                spans.append(AttemptSpan(job["id"], name, attempt, begun - origin, waited))
                steps[queued - origin] += 1
                steps[max(begun, queued) - origin] -= 1
                queued = attempt.row["ended_at"] or now
                last = max(last, spans[-1].end)
        if job["state"] == "queued" or not job["attempts"]:  # Such a job waits, or waited until it was cancelled.
            steps[queued - origin] += 1
            if job["ended_at"]:
                steps[job["ended_at"] - origin] -= 1
            last = max(last, (job["ended_at"] or now) - origin)
    queue, waiting = [], 0
    for at in sorted(steps):
        waiting += steps[at]
        queue.append((at, waiting))
    return BuildTimeline(origin, last, tracks(spans), queue)


def trace_events(found: BuildTimeline, name: str, left_out: int = 0) -> dict[str, Any]:
    """Return a timeline in the Chrome trace event format, which Perfetto opens.

    Process 1 is the build, with the counter of waiting jobs; the others are workers, threads slots, slices attempts
    with their phases. No two have one number: Perfetto takes a thread with its process's for the main one. Times are
    whole microseconds since the first job was queued: it drops a slice that ends a moment after the one around it.
    """
    workers = {worker: number for number, worker in enumerate(dict.fromkeys(each.worker for each in found.tracks), 2)}
    events: list[dict[str, Any]] = [_named("process_name", 1, 1, name)]
    events += [_named("process_name", number, number, worker) for worker, number in workers.items()]
    counter = {"name": "waiting", "cat": "queue", "ph": "C", "pid": 1}
    events += [{**counter, "ts": round(at * MICROSECONDS), "args": {"jobs": count}} for at, count in found.queue]
    for number, track in enumerate(found.tracks, 2 + len(workers)):
        place = {"pid": workers[track.worker], "tid": number}
        events.append(_named("thread_name", place["pid"], number, f"slot {track.slot}"))
        for span in track.spans:
            row = span.attempt.row
            facts = {"job": span.job, "attempt": row["number"], "end": row["end"] or "running", "waited": span.waited}
            facts |= {name: row[name] for name in ("kind", "message") if row[name]}
            events.append(_slice(span.cell, "attempt", span.start, span.end, place, facts))
            for each in span.parts():
                start = span.start + each.start
                events.append(_slice(each.name, "phase", start, min(start + each.seconds, span.end), place))
    data = {"build": name, "began": found.origin, "left_out": left_out}
    return {"displayTimeUnit": "ms", "traceEvents": events, "otherData": data}


def _named(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "ts": 0, "args": {"name": name}}


def _slice(
    name: str, category: str, start: float, end: float, place: dict[str, int], args: dict[str, Any] | None = None
) -> dict[str, Any]:
    begun, ended = round(start * MICROSECONDS), round(end * MICROSECONDS)
    times = {"ts": begun, "dur": ended - begun}
    return {"name": name, "cat": category, "ph": "X", **times, **place, "args": args or {}}


# --- how to use an artifact: what to type for each way of running it --------------------------------------------------

_WAYS = {
    ".mxr": ["fetch", "curl", *(f"migraphx-{way}" for way in ("python", "cpp", "driver", "triton", "onnxruntime"))],
    "": ["fetch", "curl", *(f"onnxruntime-{way}" for way in ("python", "cpp", "triton"))],
}
"""The ways of a program, by the end of its file's name."""

_TRITON = {
    **{f"float{bits}": f"TYPE_FP{bits}" for bits in (16, 32, 64)},
    **{f"{sign}int{bits}": f"TYPE_{sign.upper()}INT{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)},
    "bfloat16": "TYPE_BF16",
    "bool": "TYPE_BOOL",
    "object": "TYPE_STRING",
}


class Way(NamedTuple):
    """One way to use it: a title, words about it, and what to type."""

    slug: str
    title: str
    words: str
    text: str


def ways(sidecar: Sidecar, url: str) -> list[Way]:
    """Return the ways that fit the artifact's kind of program; `url` is the farm's."""
    model, target, precision, *shape = sidecar["identifier"].split("/")
    program = sidecar["blobs"]["program"]
    target = target.replace("-", "/", 1)
    options = ["--target", target, "--precision", precision, *(["--shape", "/".join(shape)] if shape else [])]
    typed, how = shlex.join([model, *options]), serving_of(sidecar)
    known = {"made": sidecar, "model": model, "name": typed, "program": program, "url": url.rstrip("/"), "how": how}
    found = []
    for name in next(names for end, names in _WAYS.items() if program["path"].endswith(end)):
        title, words, text = _texts().get_template(f"{name}.txt").render(known).split("\n", 2)
        found.append(Way(name.rpartition("-")[2], title, words, text.rstrip("\n")))
    return found


@cache
def _texts() -> Environment:
    folder = FileSystemLoader(Path(__file__).parent / "templates" / "ways")
    # Pages escape what they show of it.
    texts = Environment(loader=folder, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)  # noqa: S701
    texts.filters |= {
        "json": json.dumps,
        "python": repr,
        "shell": shlex.quote,
        "sizes": lambda shape: str(tuple(each if isinstance(each, int) else 1 for each in shape)),
        "dims": lambda shape: ", ".join(str(each) if isinstance(each, int) else "-1" for each in shape),
        "triton": lambda dtype: _TRITON.get(dtype, "TYPE_INVALID"),
    }
    return texts
