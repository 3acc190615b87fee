"""A build as spans: the build, its jobs, their attempts, and the phases of these."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Sequence

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from farm import __version__
from farm.extras.telemetry import LABEL, PARENT
from farm.jobs.rows import JobView
from farm.jobs.state import State
from farm.logging import get_logger
from farm.pages.job_view import REST, attempts_of
from farm.results.report import Report
from farm.store import Store

log = get_logger(__name__)

MOST = 2000  # Jobs of a build that are sent, in the order of its manifest.
AT_ONCE = 500  # Spans of one request.
SECONDS = 5.0  # For which a receiver may let the end of a build wait, all requests together.
RESOURCE = Resource({"service.name": "migraphx-farm", "service.version": __version__})


def jobs_of(store: Store, report: Report) -> list[JobView]:
    """Return the jobs of a build."""
    names = dict.fromkeys(name for cell in report["cells"] if (name := cell["job"]))
    return [job for name in list(names)[:MOST] if (job := store.jobs.get(name))]


def of_build(report: Report, jobs: Sequence[JobView]) -> Iterator[ReadableSpan]:
    """Yield the spans of a build that has ended; the same ones for the same build, so that it may be sent twice."""
    build = report["build"]
    parent = PARENT.fullmatch(build["labels"].get(LABEL, ""))
    trace = int(parent[1], 16) if parent else _number(build["id"], 16)
    above = _context(trace, int(parent[2], 16)) if parent else None
    ended = build["ended_at"] or time.time()

    def span(
        name: str, start: float, end: float, above: SpanContext | None, failed: str = "", **facts: str | int
    ) -> ReadableSpan:
        own = _number(f"{build['id']} {above.span_id if above else ''} {name} {facts}", 8)
        return ReadableSpan(
            name,
            context=_context(trace, own),
            parent=above,
            resource=RESOURCE,
            attributes={f"farm.{key}": value for key, value in facts.items()},
            kind=SpanKind.INTERNAL,
            status=Status(StatusCode.ERROR, failed) if failed else Status(StatusCode.OK),
            start_time=round(start * 1e9),
            end_time=round(max(start, end) * 1e9),
        )

    verdict = build["verdict"]
    said = verdict["text"] if verdict and verdict["exit_code"] else ""
    whole = span(
        build["name"], build["created_at"], ended, above, said, build=build["id"], namespace=build["namespace"]
    )
    yield whole
    for job in jobs:
        queued = job["created_at"] or build["created_at"]
        of_job = span(
            job["order"]["identifier"],
            queued,
            job["ended_at"] or ended,
            whole.context,
            job["message"] or job["kind"] or (State.CANCELLED if job["state"] == State.CANCELLED else ""),
            job=job["id"],
            state=job["state"],
            pool=job["pool"],
        )
        yield of_job
        for attempt in attempts_of(job, ended):
            row = attempt.row
            if (began := row["started_at"]) is None:
                continue
            failed = (row["message"] or row["kind"] or row["end"] or "") if attempt.failed else ""
            number, where = row["number"], row["worker"] or ""
            of_attempt = span(
                "attempt", began, began + (attempt.seconds or 0), of_job.context, failed, number=number, worker=where
            )
            yield of_attempt
            for part in attempt.parts():
                if part.name != REST:
                    start = began + part.start
                    yield span(part.name, start, start + part.seconds, of_attempt.context)


def send(spans: Iterator[ReadableSpan]) -> None:
    """Send spans; a receiver that does not take them is logged, and the build ends all the same."""
    found, until = list(spans), time.monotonic() + SECONDS
    for start in range(0, len(found), AT_ONCE):
        left, some = until - time.monotonic(), found[start : start + AT_ONCE]
        if left <= 0 or OTLPSpanExporter(timeout=left).export(some) is not SpanExportResult.SUCCESS:
            log.warning("the receiver of spans did not take a build", spans=len(found) - start)
            return


def _context(trace: int, span: int) -> SpanContext:
    return SpanContext(trace, span, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))


def _number(text: str, size: int) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:size]) or 1
