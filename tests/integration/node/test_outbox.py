"""The node's outbox, and what the supervisor delivers from it: on the real object storage and job store."""

from __future__ import annotations

import errno
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from botocore.exceptions import EndpointConnectionError

from farm.app import Farm
from farm.artifacts.s3 import S3Store
from farm.artifacts.storage import sidecar_key
from farm.compiling.attempt import Attempt, FreeSlots, Slot
from farm.errors import StorageUnavailable
from farm.extras.signing.signing_keys import new_key
from farm.extras.signing.trust import policy_of_keys
from farm.extras.signing.verifying import Trust
from farm.jobs.state import AttemptEnd, Outcome, Phase
from farm.node.disk import Deliveries, Outbox, Parcel
from farm.tuning.database import Collector, databases
from tests.support.api_farm import MANIFEST, POOL, freeze_manifest
from tests.support.helpers import wait_until

CELL = MANIFEST + "    precisions: [fp32]\n    inputs: {x: {shape: [batch, 4]}}\n    batches: [2]\n"


@pytest.fixture
def box(farm: Farm) -> Outbox:
    return Outbox(farm.settings.data_dir.resolve() / "outbox")


def claimed(farm: Farm, folder: Path, tuning: str = "off") -> Attempt:
    """An attempt of a job of its own."""
    frozen = freeze_manifest(folder, f"{CELL}    tuning: {{mode: {tuning}}}\n", batch="N")
    for path in frozen.files.values():
        farm.artifacts.put_blob_file(path)
    farm.builds.submit("main", frozen.submission, by="test")
    ((job_id, number),) = farm.store.jobs.hand_out(POOL.name, 1)
    claim = farm.store.jobs.claim(job_id, number, nonce="n", worker="w1", node="n1")
    named = (claim.token, claim.order, claim.limits, claim.namespace, claim.key)
    return Attempt(job_id, number, *named, worker="w1")


class Outage:
    """Storage refuses every connection from when an attempt reaches a phase (at once where that is empty).

    Notes what the attempt says about it.
    """

    def __init__(self, farm: Farm, monkeypatch: pytest.MonkeyPatch, phase: str) -> None:
        self._session = farm.artifacts.s3._endpoint.http_session  # type: ignore[attr-defined]
        self._send = self._session.send
        self._phase = phase
        self.said: list[bool] = []
        self.found = threading.Event()
        monkeypatch.setattr("farm.artifacts.s3_bucket.UNREACHABLE_SECONDS", 0.1)
        monkeypatch.setattr("farm.node.executor.AWAY_PAUSES", (0.01, 0.02))
        self.on_phase("")

    def on_phase(self, phase: str, *_: Any) -> None:
        if phase == self._phase:
            self._session.send = self._refuse

    def on_away(self, kept: bool, /) -> None:
        self.said.append(kept)
        self.found.set()

    def end(self) -> None:
        self._phase, self._session.send = "over", self._send

    def _refuse(self, request: Any) -> Any:
        raise EndpointConnectionError(endpoint_url=request.url)


def refusing(farm: Farm, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Let storage refuse what has a name in its key, and nothing else."""
    session = farm.artifacts.s3._endpoint.http_session  # type: ignore[attr-defined]
    send = session.send

    def damaged(request: Any) -> Any:
        if name in request.url:
            raise EndpointConnectionError(endpoint_url=request.url)
        return send(request)

    monkeypatch.setattr(session, "send", damaged)


@contextmanager
def waiting(farm: Farm, attempt: Attempt, outage: Outage) -> Iterator[tuple[threading.Event, list[Outcome]]]:
    """An attempt that has found storage away, from there to its end: what cancels it, and how it ends."""
    outcomes: list[Outcome] = []
    cancelled = threading.Event()

    def work() -> None:
        outcomes.append(farm.executor.execute(attempt, on_phase=outage.on_phase, cancelled=cancelled))

    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert outage.found.wait(60)
        yield cancelled, outcomes
    finally:
        thread.join()


@pytest.fixture
def stopped(farm: Farm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Attempt, Outage]:
    """An attempt that was stopped while its finished program waits for storage, which is still away."""
    attempt = claimed(farm, tmp_path)
    outage = Outage(farm, monkeypatch, "uploading")
    with waiting(farm, replace(attempt, on_away=outage.on_away), outage) as (cancelled, outcomes):
        cancelled.set()
    assert [one.end for one in outcomes] == [AttemptEnd.CANCELLED]
    return attempt, outage


def test_an_attempt_leaves_its_slot_for_its_publication_and_measures_when_no_other_publishes(
    farm: Farm, tmp_path: Path
) -> None:
    phases: list[str] = []
    seen: list[tuple[str, int, int]] = []

    class Noted(FreeSlots):
        def until_quiet(self, slot: Slot, cancelled: threading.Event) -> bool:
            seen.append(("quiet", len(phases), -1))
            super().until_quiet(slot, cancelled)
            return False

    def leave() -> None:
        published = len(list(farm.artifacts.list_objects("ns/main/artifacts/")))
        seen.append(("left", published, len(list((farm.settings.data_dir / "outbox").iterdir()))))

    attempt = replace(claimed(farm, tmp_path), free=Noted(), leave=leave)
    outcome = farm.executor.execute(
        attempt, on_phase=lambda phase, *_: phases.append(phase), cancelled=threading.Event()
    )
    assert outcome.end is AttemptEnd.SUCCEEDED, outcome.message
    assert [what for what, *_ in seen] == ["quiet", "left"]
    assert phases[: seen[0][1]][-1] == "compiling", "it asked before it measured"
    assert seen[1][1:] == (0, 1), "its program lay in the outbox, and not in storage yet"
    assert outcome.facts
    assert outcome.facts["shared"], "another upload went on"


def job_of(farm: Farm, attempt: Attempt) -> dict[str, Any]:
    job = farm.store.jobs.get(attempt.job_id)
    assert job
    return dict(job)


def raising(error: Exception) -> Callable[..., Any]:
    """A function that does nothing but raise."""

    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


def look(farm: Farm) -> str:
    """Have the supervisor's thread look once, as it does when an attempt met an outage."""
    watch = Deliveries(farm.store, farm.settings, lambda: None)
    return watch._look(farm.artifacts)


@pytest.mark.parametrize("phase", ["", "fetching", "verifying", "uploading"])
def test_an_attempt_waits_in_each_phase_and_goes_on(
    farm: Farm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    attempt = claimed(farm, tmp_path)
    outage = Outage(farm, monkeypatch, phase)
    with waiting(farm, replace(attempt, on_away=outage.on_away), outage) as (_, outcomes):
        outage.end()
    (outcome,) = outcomes
    assert (outcome.end, outcome.hit, bool(outcome.log)) == (AttemptEnd.SUCCEEDED, False, True)
    assert set(outage.said) == {phase == "uploading"}, "it says whether its program is finished"
    assert farm.artifacts.lookup(["main"], attempt.key)


class AnHourLater:
    """The clock of the rooms that watch the time limit; the API's server in this process keeps the real one."""

    def __getattr__(self, name: str) -> object:
        return getattr(time, name)

    def monotonic(self) -> float:
        return time.monotonic() + 3600


def test_waiting_does_not_count_against_the_time_limit(
    farm: Farm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = claimed(farm, tmp_path)
    attempt.limits["time"] = 600.0
    outage = Outage(farm, monkeypatch, "")
    with waiting(farm, replace(attempt, on_away=outage.on_away), outage) as (_, outcomes):
        for module in ("farm.compiling.pipeline", "farm.node.executor"):
            monkeypatch.setattr(f"{module}.time", AnHourLater())
        tries = len(outage.said)
        wait_until(lambda: len(outage.said) > tries + 1)
        outage.end()
    assert [one.end for one in outcomes] == [AttemptEnd.SUCCEEDED]


def test_a_stopped_attempt_leaves_its_program_and_the_supervisor_delivers_it(
    farm: Farm, box: Outbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And signs it, as the attempt would have."""
    private, public, _ = new_key("farm", tmp_path)
    farm.settings = farm.settings.model_copy(update={"signing_key": str(private)})
    attempt = claimed(farm, tmp_path)
    outage = Outage(farm, monkeypatch, "uploading")
    with waiting(farm, replace(attempt, on_away=outage.on_away), outage) as (cancelled, outcomes):
        assert not list(box.left()), "its attempt holds it"
        cancelled.set()
    assert [one.end for one in outcomes] == [AttemptEnd.CANCELLED]
    Deliveries(farm.store, farm.settings, lambda: None).keep_left()
    assert farm.store.workers.died("w1", "died") == [], "the job waits for its program"
    assert look(farm).startswith("object storage is away: cannot reach s3://")
    outage.end()
    assert look(farm) == ""
    job = job_of(farm, attempt)
    assert (job["state"], job["charged"], [one["end"] for one in job["attempts"]]) == ("succeeded", 0, ["succeeded"])
    assert "compiling" in job["attempts"][0]["phases"]
    assert farm.artifacts.lookup(["main"], attempt.key)
    text = farm.artifacts.get_object(sidecar_key("main", attempt.key)).data
    judged = Trust(policy_of_keys([public], "main")).judge(text, farm.artifacts.statements(["main"], attempt.key))
    assert [check.name for check in judged.checks] == ["provenance", "test-results"]
    assert judged.refused == []
    assert box.size == 0


def test_a_program_that_was_published_before_its_end_was_reported_is_not_uploaded_again(
    farm: Farm, box: Outbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = claimed(farm, tmp_path)
    outage = Outage(farm, monkeypatch, "uploading")
    with waiting(farm, replace(attempt, on_away=outage.on_away), outage) as (_, outcomes):
        outage.end()
    monkeypatch.setattr(farm.artifacts, "put_blob_file", None)
    assert look(farm) == ""
    job = job_of(farm, attempt)
    assert (job["state"], job["facts"], job["log"]) == ("succeeded", outcomes[0].facts, outcomes[0].log)
    assert [cell["hit"] for cell in farm.store.builds.cells(job["cells"][0]["build"])] == [False]
    assert box.size == 0


@pytest.mark.parametrize("alive", [True, False], ids=["worker alive", "worker dead"])
def test_a_program_that_nobody_wants_any_more_is_there_for_the_next_who_does(
    farm: Farm, box: Outbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alive: bool
) -> None:
    attempt = claimed(farm, tmp_path)
    outage = Outage(farm, monkeypatch, "uploading")
    with waiting(farm, replace(attempt, on_away=outage.on_away), outage) as (cancelled, _):
        (build,) = farm.store.builds.list("main")
        farm.store.builds.cancel(build["id"])
        cancelled.set()
    if alive:
        assert farm.store.jobs.finish(attempt.job_id, attempt.token, Outcome.cancelled()) == "ok"
    outage.end()
    assert look(farm) == ""
    assert farm.artifacts.lookup(["main"], attempt.key)
    assert [cell["state"] for cell in farm.store.builds.cells(build["id"])] == ["cancelled"]
    assert box.size == 0


def test_a_program_that_storage_never_takes_keeps_no_other_and_rests_no_worker(
    farm: Farm,
    box: Outbox,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stopped: tuple[Attempt, Outage],
) -> None:
    """A server that has lost a part of its disk answers 500 to some names, and all else as ever."""
    attempt, outage = stopped
    outage.end()
    (tmp_path / "log").write_text("log")
    first = replace(attempt, job_id="", token="1-other", key="0" * 64)
    box.put(first, made_in(tmp_path), {"key": first.key}, {"log": tmp_path / "log"}).close()
    refusing(farm, monkeypatch, first.key)
    assert look(farm) == ""
    job = job_of(farm, attempt)
    assert job["state"] == "succeeded"
    assert [parcel.token for parcel in box.left()] == ["1-other"], "it is tried again"


def test_a_program_that_storage_never_takes_fails_its_job_in_the_end(
    farm: Farm, box: Outbox, monkeypatch: pytest.MonkeyPatch, stopped: tuple[Attempt, Outage]
) -> None:
    attempt, outage = stopped
    farm.store.jobs.renew(attempt.token, attempt.job_id, phase=Phase.UPLOADING, kept=True)
    watch = Deliveries(farm.store, farm.settings.model_copy(update={"outbox_hours": 1e-9}), lambda: None)
    for _ in range(3):
        assert watch._look(farm.artifacts).startswith("object storage is away"), "however long that takes"
    outage.end()
    refusing(farm, monkeypatch, attempt.key)
    for _ in range(2):
        assert watch._look(farm.artifacts) == ""
    job = job_of(farm, attempt)
    assert (job["charged"], [one["kind"] for one in job["attempts"]]) == (1, ["storage"])
    assert attempt.key in job["attempts"][0]["message"]
    assert box.size == 0


@pytest.mark.parametrize(("tuning", "what"), [("off", "/blobs/"), ("quick", "/tuning/")])
def test_a_name_that_storage_never_answers_fails_the_attempt(
    farm: Farm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tuning: str, what: str
) -> None:
    """A part of it is damaged, and all else is as ever: somebody has to hear of it."""
    monkeypatch.setattr("farm.node.executor.ONE_NAME_SECONDS", 0.2, raising=False)
    monkeypatch.setattr("farm.node.executor.LOOK_SECONDS", 0.1, raising=False)
    attempt = claimed(farm, tmp_path, tuning)
    outage = Outage(farm, monkeypatch, "never")
    name = attempt.order["model"]["files"][0]["digest"] if what == "/blobs/" else what
    refusing(farm, monkeypatch, name)
    outcomes: list[Outcome] = []
    cancelled = threading.Event()
    options = {"on_phase": outage.on_phase, "cancelled": cancelled}
    thread = threading.Thread(target=lambda: outcomes.append(farm.executor.execute(attempt, **options)))
    thread.start()
    try:
        wait_until(lambda: outcomes, 90)
    finally:
        cancelled.set()
        thread.join()
    assert outcomes[0].kind == "storage", outcomes[0]
    assert name in outcomes[0].message
    assert "its operator has to act" in outcomes[0].message


def test_what_tuning_found_outlives_an_outage_that_is_longer_than_the_tuning(
    farm: Farm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = claimed(farm, tmp_path, "quick")
    outage = Outage(farm, monkeypatch, "compiling")
    with waiting(farm, replace(attempt, on_away=outage.on_away), outage) as (_, outcomes):
        outage.end()
    assert [one.end for one in outcomes] == [AttemptEnd.SUCCEEDED]
    (database,) = databases(farm.artifacts, ["main"])
    assert database.read().snapshot.log.total().sessions == 1


def test_what_tuning_found_outlives_an_attempt_that_is_stopped_in_an_outage(
    farm: Farm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = claimed(farm, tmp_path, "quick")
    outage = Outage(farm, monkeypatch, "compiling")
    with waiting(farm, replace(attempt, on_away=outage.on_away), outage) as (cancelled, outcomes):
        wait_until(lambda: outage.said[-1], message="its program is kept")
        cancelled.set()
    assert [one.end for one in outcomes] == [AttemptEnd.CANCELLED]
    outage.end()
    assert look(farm) == ""
    assert job_of(farm, attempt)["state"] == "succeeded"
    (database,) = databases(farm.artifacts, ["main"])
    assert database.read().snapshot.log.total().sessions == 1


def test_what_tuning_found_outlives_a_program_that_storage_refuses(
    farm: Farm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Storage was away at the end of the tuning, so that the parcel has it; and the parcel goes."""
    attempt = claimed(farm, tmp_path, "quick")
    monkeypatch.setattr(Collector, "finish", raising(StorageUnavailable("away")))
    monkeypatch.setattr(Parcel, "publish", raising(StorageUnavailable("refused")))
    outcome = farm.executor.execute(attempt, on_phase=lambda *_: None, cancelled=threading.Event())
    assert (outcome.end, outcome.message) == (AttemptEnd.FAILED, "refused")
    (database,) = databases(farm.artifacts, ["main"])
    assert database.read().snapshot.log.total().sessions == 1


def full_disk(*_: Any) -> None:
    """What no room for a block of metadata comes to."""
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_throws_no_program_away_that_waits(
    farm: Farm, box: Outbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = claimed(farm, tmp_path)
    monkeypatch.setattr("farm.node.disk._sync", full_disk)
    outage = Outage(farm, monkeypatch, "uploading")
    with waiting(farm, replace(attempt, on_away=outage.on_away), outage) as (cancelled, outcomes):
        wait_until(lambda: len(outage.said) > 2)
        cancelled.set()
    assert [one.end for one in outcomes] == [AttemptEnd.CANCELLED]
    outage.end()
    assert look(farm) == ""
    job = job_of(farm, attempt)
    assert job["state"] == "succeeded"
    assert box.size == 0


def test_a_finished_program_waits_for_room_in_the_outbox(
    farm: Farm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = claimed(farm, tmp_path)
    put, tries = Outbox.put, iter(range(3))

    def full_at_first(*arguments: Any, **options: Any) -> Any:
        if next(tries, None) is not None:
            full_disk()
        return put(*arguments, **options)

    monkeypatch.setattr(Outbox, "put", full_at_first)
    monkeypatch.setattr("farm.node.executor.AWAY_PAUSES", (0.01, 0.02))
    outcome = farm.executor.execute(attempt, on_phase=lambda *_: None, cancelled=threading.Event())
    assert outcome.end is AttemptEnd.SUCCEEDED, outcome.message


def test_a_program_for_which_its_job_waits_stays_until_the_store_knows_of_its_end(
    farm: Farm, box: Outbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its publication is refused for good, and its worker is killed before it can say so."""
    attempt = claimed(farm, tmp_path)
    outage = Outage(farm, monkeypatch, "uploading")
    with waiting(farm, replace(attempt, on_away=outage.on_away), outage) as (_, outcomes):
        farm.store.jobs.renew(attempt.token, attempt.job_id, phase=Phase.UPLOADING, kept=True)
        with monkeypatch.context() as until_mended:
            until_mended.setattr(S3Store, "publish", raising(StorageUnavailable("403")))
            outage.end()
            wait_until(lambda: outcomes)
    assert [one.kind for one in outcomes] == ["storage"]
    Deliveries(farm.store, farm.settings, lambda: None).keep_left()
    assert farm.store.workers.died("w1", "died") == [], "the job waits for its program"
    assert look(farm) == ""
    job = job_of(farm, attempt)
    assert (job["state"], job["charged"]) == ("succeeded", 0)
    assert box.size == 0


def test_a_job_waits_for_no_program_that_a_loss_of_power_can_take(
    farm: Farm, box: Outbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process was killed in an ordinary upload, so it was not written through to the disk yet."""
    attempt = claimed(farm, tmp_path)
    (tmp_path / "log").write_text("log")
    box.put(attempt, made_in(tmp_path), {}, {"log": tmp_path / "log"}).close()
    Deliveries(farm.store, farm.settings, lambda: None).keep_left()
    assert farm.store.workers.died("w1", "died") == [], "the job waits"
    (tmp_path / "boot").write_text("the second")
    monkeypatch.setattr("farm.node.disk.BOOT", tmp_path / "boot")
    assert [parcel.job for parcel in box.left()] == [attempt.job_id]


def test_an_object_storage_that_refuses_is_no_outage_that_jobs_wait_for(farm: Farm, tmp_path: Path) -> None:
    """That does not pass by itself: pool_timeout counts, as for all else for which workers take no jobs."""
    attempt = claimed(farm, tmp_path)
    watch = Deliveries(farm.store, farm.settings, lambda: None)
    why = watch._look(S3Store.from_settings(farm.settings.model_copy(update={"s3_bucket": "misspelt"})))
    assert why.startswith("its object storage refuses: cannot reach s3://misspelt")
    worker = {"id": "w1", "node": "n1", "pid": 1, "host": "n1", "slots": 1, "pools": [POOL.as_dict()]}
    farm.store.workers.register(worker, ttl=600, resting=why)
    assert farm.store.jobs.finish(attempt.job_id, attempt.token, Outcome.released()) == "ok"
    assert farm.store.jobs.fail_unserved(POOL.name, 0.0) == 1


def test_a_full_outbox_rests_its_workers(farm: Farm, box: Outbox, tmp_path: Path) -> None:
    attempt = claimed(farm, tmp_path)
    (tmp_path / "program").write_bytes(b"x" * 1000)
    with closing(box.put(attempt, made_in(tmp_path), {}, {"program": tmp_path / "program"})):
        assert look(farm) == ""
        farm.settings = farm.settings.model_copy(update={"outbox_bytes": 1000})
        assert look(farm).startswith("its outbox is full: ")


ATTEMPT = Attempt("j", 1, "1-t", {}, {"time": 0.0, "memory": 0}, "main", "k")


def test_a_full_disk_leaves_nothing_of_a_parcel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its links would keep the disk full, under a lock that only the end of the process opens."""
    (tmp_path / "program").write_bytes(b"x" * 1000)
    box = Outbox(tmp_path / "box")
    with monkeypatch.context() as full:
        full.setattr(Path, "write_text", raising(OSError(errno.ENOSPC, "no space")))
        with pytest.raises(OSError, match="no space"):
            box.put(ATTEMPT, made_in(tmp_path), {}, {"program": tmp_path / "program"})
    assert list((tmp_path / "box").iterdir()) == []


def test_who_looks_for_what_is_left_does_not_disturb_who_begins_a_parcel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "program").write_bytes(b"x")
    box = Outbox(tmp_path / "box")
    mkdir = Path.mkdir

    def looked_at(folder: Path, *arguments: Any, **options: Any) -> None:
        mkdir(folder, *arguments, **options)
        if folder.name.startswith(".j-1"):
            monkeypatch.setattr(Path, "mkdir", mkdir)
            assert not list(box.left())

    monkeypatch.setattr(Path, "mkdir", looked_at)
    box.put(ATTEMPT, made_in(tmp_path), {}, {"program": tmp_path / "program"}).close()
    assert [parcel.job for parcel in box.left()] == ["j"]


def made_in(folder: Path) -> Any:
    """What a parcel knows of the children that wrote its files."""
    return SimpleNamespace(folder=folder, largest=1000, phases={})


KILLED = """
import os, signal, sys
from pathlib import Path
from types import SimpleNamespace
from farm.compiling.attempt import Attempt
from farm.node.disk import Outbox, Parcel
parcel = Outbox(Path(sys.argv[1])).put(
    Attempt("j", 1, "1-t", {}, {"time": 0.0, "memory": 0}, "main", "k"),
    SimpleNamespace(folder=Path(sys.argv[2]).parent, largest=1000, phases={}),
    {},
    {"log": Path(sys.argv[2])},
)
if sys.argv[3] == "settled":
    parcel.settle()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(("how", "after", "left"), [("", 1, 1), ("", 2, 0), ("settled", 2, 1)])
def test_a_parcel_outlives_its_process_and_a_loss_of_power_once_it_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, after: int, left: int
) -> None:
    """After a loss of power the machine runs for the second time: what it may have lost of a file is not published."""
    (tmp_path / "log").write_text("log")
    command = [sys.executable, "-c", KILLED, str(tmp_path / "box"), str(tmp_path / "log"), how]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    if after == 2:
        (tmp_path / "boot").write_text("the second")
        monkeypatch.setattr("farm.node.disk.BOOT", tmp_path / "boot")
    assert [parcel.job for parcel in Outbox(tmp_path / "box").left()] == ["j"] * left


def test_what_is_not_whole_goes_and_what_another_release_wrote_stays(tmp_path: Path) -> None:
    """Whoever was killed while he put a parcel there, or removed it, leaves a folder that is not a parcel."""
    parcels = {".begun": "{}", "broken": "{", "list": "[1]", "newer": '{"schema": 2, "work": "j"}'}
    for name, text in parcels.items():
        (tmp_path / "box" / name).mkdir(parents=True)
        (tmp_path / "box" / name / "parcel.json").write_text(text)
    box = Outbox(tmp_path / "box")
    for _ in range(2):
        assert not list(box.left())
        assert [path.name for path in (tmp_path / "box").iterdir()] == ["newer"]
