"""OpenTelemetry: which spans a build becomes, when they are sent, and how long the end of a build waits for that."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan

from farm.extras.telemetry import ENDPOINTS, extension, labels, otlp
from farm.extras.telemetry.otlp import of_build
from tests.support.stand_in_otlp_receiver import Received, receiver_of_spans

PARENT = f"00-{'a' * 32}-{'b' * 16}-01"


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Received]:
    for name in ENDPOINTS:
        monkeypatch.delenv(name, raising=False)
    with receiver_of_spans() as received:
        yield received


def report(**more: Any) -> Any:
    build = {"id": "b-1", "name": "nightly", "namespace": "main", "labels": {}, "created_at": 100.0, "ended_at": 200.0}
    return {"build": {**build, "verdict": {"text": "1 of 2 cells", "exit_code": 0}} | more, "cells": []}


def attempt(end: str | None = "succeeded", **more: Any) -> dict[str, Any]:
    phases = {"compiling": 3.0, "fetching": 2.0}
    return {
        "number": 1, "worker": "w-1", "started_at": 110.0, "ended_at": 117.0, "end": end, "kind": None, "message": "",
        "phases": phases,
    } | more  # fmt: skip


def job(*attempts: dict[str, Any], **more: Any) -> Any:
    return {
        "id": "j-1", "state": "succeeded", "pool": "cpu", "kind": None, "message": "", "created_at": 105.0,
        "ended_at": 120.0, "order": {"identifier": "net/cpu/fp32/b1"}, "attempts": list(attempts),
    } | more  # fmt: skip


def times(span: ReadableSpan) -> tuple[str, float, float]:
    assert span.start_time and span.end_time
    return span.name, span.start_time / 1e9, span.end_time / 1e9


def test_spans_are_where_the_time_went() -> None:
    whole, of_job, *rest = of_build(report(), [job(attempt())])
    assert [times(span) for span in (whole, of_job, *rest)] == [
        ("nightly", 100.0, 200.0),
        ("net/cpu/fp32/b1", 105.0, 120.0),
        ("attempt", 110.0, 117.0),
        ("fetching", 110.0, 112.0),
        ("compiling", 112.0, 115.0),
    ], "without the rest of an attempt, which is not a phase"
    assert dict(whole.attributes or {}) == {"farm.build": "b-1", "farm.namespace": "main"}
    assert dict(of_job.attributes or {}) == {"farm.job": "j-1", "farm.state": "succeeded", "farm.pool": "cpu"}
    assert dict(rest[0].attributes or {}) == {"farm.number": 1, "farm.worker": "w-1"}


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({}, None),
        ({"state": "failed", "kind": "hang", "message": "it hung"}, "it hung"),
        ({"state": "failed", "kind": "hang"}, "hang"),
        ({"state": "cancelled"}, "cancelled"),
    ],
)
def test_what_did_not_succeed_is_an_error_also_without_a_message(more: dict[str, Any], said: str | None) -> None:
    whole, of_job = of_build(report(), [job(**more)])
    assert (of_job.status.is_ok, of_job.status.description) == (said is None, said)
    assert whole.status.is_ok


def test_an_attempt_that_was_lost_says_so_and_one_without_a_beginning_is_left_out() -> None:
    found = list(
        of_build(report(), [job(attempt("lost", phases={}), attempt(None, started_at=None), attempt(phases={}))])
    )
    assert [(span.name, span.status.description) for span in found[2:]] == [("attempt", "lost"), ("attempt", None)]


@pytest.mark.parametrize(
    "parent", ["", "not one", f"00-{'0' * 32}-{'b' * 16}-01", f"00-{'a' * 32}-{'0' * 16}-01", PARENT.replace("a", "A")]
)
def test_what_is_no_parent_begins_a_trace_of_its_own(parent: str) -> None:
    assert labels({"TRACEPARENT": parent}) == {}
    (whole,) = of_build(report(labels={"traceparent": parent}), [])
    assert whole.parent is None and whole.context and whole.context.is_valid
    (again,) = of_build(report(labels=labels({"TRACEPARENT": PARENT})), [])
    assert again.parent and f"{again.parent.trace_id:x} {again.parent.span_id:x}" == f"{'a' * 32} {'b' * 16}"


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_spans_are_sent_where_one_of_the_variables_says(
    endpoint: str, receiver: Received, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert extension.on_finished
    monkeypatch.setattr(otlp, "send", lambda spans: pytest.fail("sent to nowhere"))
    extension.on_finished(None, report())
    monkeypatch.undo()
    for name in ENDPOINTS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(endpoint, receiver.url)
    farm: Any = type("Farm", (), {"store": None})
    extension.on_finished(farm, report())
    assert [span.name for span in receiver.spans] == ["nightly"]


def test_all_spans_are_sent_in_several_requests_as_long_as_they_are_taken(
    receiver: Received, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENDPOINTS[0], receiver.url)
    monkeypatch.setattr(otlp, "AT_ONCE", 2)
    otlp.send(of_build(report(), [job(attempt())]))
    assert len(receiver.spans) == 5
    receiver.spans.clear()
    monkeypatch.setattr(otlp, "SECONDS", 0.0)
    otlp.send(of_build(report(), [job(attempt())]))
    assert receiver.spans == [], "the end of a build waits for all requests together so long"
