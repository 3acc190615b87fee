"""OpenTelemetry: what a receiver gets of a build, from the pipeline that submitted it to the phases of its attempts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from farm.app import Farm
from farm.cli import main
from farm.client.client import FarmClient
from farm.extras.telemetry.otlp import jobs_of, of_build
from farm.jobs.state import FailureKind, Outcome
from tests.support.api_farm import MANIFEST, commands, freeze_manifest, succeed, work
from tests.support.stand_in_otlp_receiver import Received, receiver_of_spans

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Received]:
    with receiver_of_spans() as received:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", received.url)
        yield received


@pytest.fixture
def build(
    farm: Farm, url: str, client: FarmClient, receiver: Received, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> str:
    """A build of a pipeline that has a trace: one cell of two failed."""
    freeze_manifest(tmp_path, MANIFEST)
    monkeypatch.setenv("TRACEPARENT", f"00-{TRACE}-{PARENT}-01")
    with commands(farm, url, tmp_path, monkeypatch):
        assert main(["submit", "farm.yaml", "--detach"]) == 0
    refused = Outcome.failure(FailureKind.COMPILER_ERROR, "no")
    refused.phases["compiling"] = 0.25
    work(farm, lambda job, order, key: refused if "/fp16/" in order["identifier"] else succeed(farm)(job, order, key))
    (found,) = farm.store.builds.ended_unreported()
    farm.build_finisher.finish(found)
    return found


def test_a_build_is_one_trace_below_the_span_that_submitted_it(
    build: str, farm: Farm, client: FarmClient, receiver: Received
) -> None:
    assert {span.trace_id.hex() for span in receiver.spans} == {TRACE}
    by_id = {span.span_id: span for span in receiver.spans}
    assert len(by_id) == len(receiver.spans)
    whole = receiver.spans[0]
    assert whole.parent_span_id.hex() == PARENT
    assert whole.status.code == Status.STATUS_CODE_ERROR
    assert "1 of 2 cells succeeded" in whole.status.message

    def path(span: Span) -> list[str]:
        above = by_id.get(span.parent_span_id)
        return [*(path(above) if above else []), span.name]

    name = client.build(build)["name"]
    paths = [path(span) for span in receiver.spans]
    fp16 = [name, "net/onnxruntime-cpu/fp16/static", "attempt"]
    assert [*fp16, "compiling"] in paths
    assert [name, "net/onnxruntime-cpu/fp32/static", "attempt"] in paths
    failed = next(span for span in receiver.spans if path(span) == fp16)
    assert (failed.status.code, failed.status.message) == (Status.STATUS_CODE_ERROR, "no")
    for span in receiver.spans:
        above = by_id.get(span.parent_span_id, whole)
        assert span.start_time_unix_nano >= above.start_time_unix_nano
        assert span.end_time_unix_nano >= span.start_time_unix_nano


def test_a_build_that_is_sent_again_has_the_same_spans(
    build: str, farm: Farm, client: FarmClient, receiver: Received
) -> None:
    report = client.report(build)
    again = [span.context.span_id.to_bytes(8) for span in of_build(report, jobs_of(farm.store, report))]
    assert again == [span.span_id for span in receiver.spans]


def test_a_receiver_that_refuses_does_not_keep_a_build_from_its_end(
    farm: Farm, url: str, client: FarmClient, receiver: Received, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver.status = 400
    freeze_manifest(tmp_path, MANIFEST)
    monkeypatch.setenv("TRACEPARENT", "not a parent")
    with commands(farm, url, tmp_path, monkeypatch):
        assert main(["submit", "farm.yaml", "--detach"]) == 0
    work(farm)
    (found,) = farm.store.builds.ended_unreported()
    farm.build_finisher.finish(found)
    assert client.build(found)["state"] == "reported"
    assert client.build(found)["labels"] == {}
    assert receiver.spans[0].parent_span_id == b""
