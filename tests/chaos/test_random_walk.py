"""A random walk over a whole farm: two control planes, five workers, bad object storage, and a model of the ends.

The seed decides every draw; when each takes effect is the machine's doing, so a seed that failed may have to be tried
again: `make chaos PYTEST="-k random_walk --chaos-seed N"`. The model is not what has to happen in which order, but what
must hold at the end, whatever the order was.
"""

from __future__ import annotations

import json
import random
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import pytest

from farm.app import Farm
from farm.control import loops
from farm.errors import Conflict, StoreUnavailable
from farm.jobs.state import POLICIES, FailureKind
from farm.jobs.state import Fault as Blame
from farm.spec import Device
from farm.targets.pools import Pool, Target
from tests.chaos.conftest import Rigs
from tests.chaos.proxy import Proxy
from tests.chaos.report import Fault
from tests.chaos.rig import ENDED, Rig, pause
from tests.support.helpers import wait_until
from tests.support.walking_worker import Fate, Notes, WalkingWorker

LEASE = 0.6
POOLS = [
    Pool(Target("onnxruntime", "cpu"), f"onnxruntime{release}-0000000{release}", Device("cpu"), recipe=recipe)
    for release, recipe in ((1, 1), (2, 1), (2, 2))
]
"""Two releases of a compiler, the second with an old and a new module of the farm's: upgrades that roll on and back."""

TOOLCHAINS = sorted({pool.toolchain for pool in POOLS})

AT_ONCE = 12
"""Builds that are open at a time; with more of them, fewer of their actions meet."""

STAYS = (
    "epoch",
    "namespaces",
    "builds:",
    "pools",
    "pool:",
    "workers",
    "planes",
    "unserved",
    "history:",
    "index:",
    "broker:",
)
"""Keys that never expire, by docs/job-store.md."""

AT_WORK = (":waiting", ":handed", ":running", ":levels", ":row")
"""Lists of a pool that are gone when nothing is left to do."""


Quarantined = Sequence[tuple[str, float]]
"""Keys that lost three workers, and when: until one of its jobs succeeds, one loss more is enough."""


@dataclass
class Asked:
    """A build as it was asked for."""

    build_id: str
    cells: int
    fail_fast: bool
    cancelled: bool = False


@dataclass
class Walk:
    """The walker: draws what to do next, and has it done by hands that may be kept waiting by bad storage."""

    rig: Rig
    line: Proxy
    chance: random.Random
    late: Farm
    """Whose submissions die when half of their cells are in the store."""
    planes: list[tuple[Farm, threading.Event, threading.Thread]] = field(default_factory=list)
    asked: list[Asked] = field(default_factory=list)
    accepted: list[Asked] = field(default_factory=list)
    did: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.hands = ThreadPoolExecutor(6)
        self._open: list[Asked] = []
        self._done: list[Future[None]] = []
        self._frozen = self.rig.freeze(1)
        self._salt = 0
        self._restarting: Future[None] | None = None

    # --- control planes -----------------------------------------------------------------------------------------

    def start_plane(self) -> None:
        farm, stop = Farm(self.rig.settings), threading.Event()
        thread = threading.Thread(target=loops.run_loops, args=(farm, stop))
        thread.start()
        self.planes.append((farm, stop, thread))

    def stop_plane(self) -> None:
        """Its farm is left alone: hands may still submit by it."""
        _, stop, thread = self.planes.pop(0)
        stop.set()
        thread.join()

    # --- steps --------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Do one thing, drawn at random."""
        steps: dict[Callable[[], None], int] = {
            self.submit: 40 if len(self.open()) < AT_ONCE else 0,
            self.cancel: 3,
            self.pause_build: 8,
            self.pause_pool: 6,
            self.fence: 2,
            self.unfence: 6,
            self.drain: 1,
            self.break_storage: 3,
            self.mend_storage: 6,
            self.restart_plane: 1,
        }
        (step,) = self.chance.choices(list(steps), list(steps.values()))
        self.did[step.__name__] += 1
        step()

    def open(self) -> list[Asked]:
        """The builds that have not ended, and those that are not accepted yet."""
        for future in [future for future in self._done if future.done()]:
            future.result()
            self._done.remove(future)
        known = {asked.build_id: self.rig.store.builds.get(asked.build_id) for asked in self._open}
        self._open = [asked for asked in self._open if not (row := known[asked.build_id]) or row["state"] == "open"]
        return self._open

    def submit(self) -> None:
        """A few cells, many of which other builds want too; some come twice, some only by half."""
        self._salt += self.chance.random() < 0.3
        salt = f"{self.chance.random()}" if self.chance.random() < 0.2 else f"walk {self._salt}"
        batches = self.chance.sample(range(1, 6), self.chance.randint(1, 4))
        toolchains = self.chance.sample(TOOLCHAINS, self.chance.randint(1, 2))
        fail_fast = self.chance.random() < 0.2
        text = (
            f"version: 1\nname: walk\ntargets: [onnxruntime/cpu]\ntoolchains: {json.dumps(toolchains)}\n"
            f"salt: {json.dumps(salt)}\nfail-fast: {json.dumps(fail_fast)}\n"
            + (f"max-parallel: {self.chance.randint(1, 2)}\n" if self.chance.random() < 0.2 else "")
            + f"models: [{{name: net1, source: {{path: net.onnx}}, batches: {batches}}}]\n"
        )
        build_id = f"b-{self.chance.getrandbits(64):016x}"
        asked = Asked(build_id, len(batches) * len(toolchains), fail_fast)
        self.asked.append(asked)
        self._open.append(asked)
        submission = {**self._frozen.submission, "manifest": text, "build_id": build_id}
        by = [farm for farm, *_ in self.planes]
        first = self.late if self.chance.random() < 0.1 else self.chance.choice(by)
        self._soon(self._submit, asked, submission, [first, *by] if self.chance.random() < 0.1 else [first])

    def _submit(self, asked: Asked, submission: Mapping[str, Any], by: Sequence[Farm]) -> None:
        for farm in by:
            try:
                farm.builds.submit("main", submission, by="walk")
            except StoreUnavailable:
                assert farm is self.late
        self.accepted.append(asked)

    def cancel(self) -> None:
        if asked := self._any_build():
            asked.cancelled = True
            self._soon(self._farm().builds.cancel, "main", asked.build_id)

    def pause_build(self) -> None:
        if asked := self._any_build():
            self._soon(self._pause, self._farm(), asked, self.chance.random() < 0.3)

    def _pause(self, farm: Farm, asked: Asked, paused: bool) -> None:
        try:
            farm.builds.pause("main", asked.build_id, paused=paused)
        except Conflict:
            self.did["pause too late"] += 1

    def pause_pool(self) -> None:
        paused = self.chance.random() < 0.2
        self._soon(self._farm().builds.pause_pool, self.chance.choice(POOLS).name, paused=paused)

    def fence(self) -> None:
        if workers := self.rig.store.workers.list():
            worker = self.chance.choice(workers)
            self.rig.store.workers.probed(worker["id"], node=worker["node"], wrong="as drawn", row=0)

    def unfence(self) -> None:
        for worker in self.rig.store.workers.list():
            if worker["fenced"]:
                self.did["was fenced"] += 1
                self.rig.store.workers.unfence(worker["node"])

    def drain(self) -> None:
        if workers := self.rig.store.workers.list():
            self.rig.store.workers.drain(self.chance.choice(workers)["id"])

    def break_storage(self) -> None:
        """Everything is refused, or some of it, and answers are lost: a conditional write may have been done."""
        self.line.errors, self.line.resets, self.line.deaf = self.chance.choice([(1, 0, 0), (0.2, 0.05, 0.05)])
        self.line.latency = self.chance.choice([0.0, 0.05])

    def mend_storage(self) -> None:
        self.line.errors = self.line.resets = self.line.deaf = self.line.latency = 0.0

    def restart_plane(self) -> None:
        if self._restarting is None or self._restarting.done():
            self._restarting = self._soon(self._restart)

    def _restart(self) -> None:
        self.start_plane()
        self.stop_plane()

    # --- the end ------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Mend, resume and let back all; return when every build is reported and nothing runs any more."""
        self.mend_storage()
        for future in self._done:
            future.result(120)
        for pool in POOLS:
            self.rig.farm.builds.pause_pool(pool.name, paused=False)
        for asked in self.open():
            self._pause(self.rig.farm, asked, False)
        wait_until(self._is_settled, timeout=120, message="every build is reported")

    def _is_settled(self) -> bool:
        self.unfence()  # what was fenced since, for failures
        rows = map(self.rig.store.builds.get, [asked.build_id for asked in self.accepted])
        return all(row and row["state"] == "reported" for row in rows) and not self.rig.raw.exists("{farm}:leases")

    # --- tools --------------------------------------------------------------------------------------------------

    def _soon(self, call: Callable[..., Any], *arguments: Any, **options: Any) -> Future[Any]:
        future = self.hands.submit(call, *arguments, **options)
        self._done.append(future)
        return future

    def _farm(self) -> Farm:
        return self.chance.choice(self.planes)[0]

    def _any_build(self) -> Asked | None:
        known = [asked for asked in self.accepted if asked in self._open]
        return self.chance.choice(known) if known else None


def first_half(whole: Callable[..., int]) -> Callable[..., int]:
    """A submitter that dies: later lots never come."""

    def create(build: Mapping[str, Any], rows: Iterable[Mapping[str, Any]]) -> int:
        cells = list(rows)
        whole(build, cells[: len(cells) // 2])
        raise StoreUnavailable("the submitter died")

    return create


def end_of(attempts: Sequence[Mapping[str, Any]], losses: int) -> tuple[str, str | None]:
    """What a job's attempts lead to by the policy of each kind, after losses of another job: its state and kind."""
    charged = 0
    for one in attempts:
        if one["end"] in ("succeeded", "cancelled"):
            return one["end"], None
        if one["end"] != "released":
            charged += 1
            kind = one["kind"] if one["end"] == "failed" else FailureKind.WORKER_LOST
            losses += kind == FailureKind.WORKER_LOST
            if charged >= POLICIES[FailureKind(kind)].attempts or losses >= 3:
                return "failed", kind
    return "queued", None


def wrong_of_job(job: Mapping[str, Any], fate: Fate, notes: Notes, quarantined: Quarantined) -> Iterator[str]:
    """What is not as the fate of its key and the policies of failures have it."""
    again = any(key == job["key"] and at <= job["created_at"] for key, at in quarantined)
    state, kind = end_of(job["attempts"], losses=2 if again else 0)
    # A job that waits for its next attempt, or whose worker was lost, ends when nobody wants it any more.
    if state != job["state"] and job["state"] != "cancelled":
        yield f"job {job['id']} is {job['state']}, and its attempts lead to {state}: {job['attempts']}"
    if state == job["state"] == "failed" and kind != job["kind"]:
        yield f"job {job['id']} failed with {job['kind']}, and its attempts lead to {kind}"
    for one in job["attempts"]:
        taken = notes.ended.get((job["id"], one["number"]))
        if one["end"] != taken if taken else one["end"] not in ("lost", "superseded"):
            yield f"attempt {one['number']} of job {job['id']} is {one['end']}, and its worker heard {taken}"
    failed = [(one["number"], one["kind"]) for one in job["attempts"] if one["end"] == "failed"]
    drawn = [kind for number, kind in failed if (job["id"], number) not in notes.storage]
    if set(drawn) - {fate.kind} or len(drawn) > fate.times:
        yield f"job {job['id']} failed by {drawn}, and its fate was {fate}"


def wrong_of_build(rig: Rig, asked: Asked, notes: Notes, quarantined: Quarantined) -> Iterator[str]:
    """What is not as the model has it."""
    name = f"build {asked.build_id}"
    found = rig.artifacts.get_object(f"ns/main/builds/{asked.build_id}/report.json")
    assert found, name
    report = json.loads(found.data)
    cells = report["cells"]
    states = Counter(cell["state"] for cell in cells)
    if len(cells) != asked.cells or set(states) - ENDED:
        yield f"{name} has {len(cells)} cells of {asked.cells}: {dict(states)}"
    if states["cancelled"] and not asked.cancelled and not (asked.fail_fast and states["failed"]):
        yield f"{name} has cancelled cells, and nobody cancelled it"
    for cell in cells:
        job = rig.store.jobs.get(cell["job"]) if cell["job"] else None
        if job is None:
            if cell["state"] == "failed" or (cell["state"] == "succeeded" and not cell["hit"]):
                yield f"{name}: {cell['identifier']} {cell['state']} without a job"
            continue
        if cell["state"] != "cancelled" and (cell["state"], cell["kind"]) != (job["state"], job["kind"]):
            yield f"{name}: {cell['identifier']} {cell['state']}, and its job is {job['state']}"
        yield from wrong_of_job(job, notes.fates.get(job["id"], Fate()), notes, quarantined)
    by_farm = any(cell["kind"] and POLICIES[FailureKind(cell["kind"])].fault is Blame.FARM for cell in cells)
    code = 6 if by_farm else 1 if states["failed"] or states["cancelled"] else 0
    if report["build"]["verdict"]["exit_code"] != code:
        yield f"{name} has the verdict {report['build']['verdict']}, which should be {code}: {dict(states)}"
    events = rig.store.events.read(asked.build_id)["items"]
    ends = Counter(one["state"] for one in events if one["type"] == "build" and one["state"] != "open")
    if ends != {"ended": 1, "reported": 1}:
        yield f"{name} ended and was reported so often: {dict(ends)}"


def without_expiry(rig: Rig) -> list[str]:
    """Keys that no work is left for, and that stay for ever."""
    left = [key.removeprefix("{farm}:") for key in rig.raw.scan_iter(count=1000) if rig.raw.ttl(key) == -1]
    return [key for key in left if not key.startswith(STAYS) or key.endswith(AT_WORK) or ":ready:" in key]


@pytest.mark.fault("walk")
def test_a_random_walk(fault: Fault, rig: Rigs, pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shared keys, pauses, fail-fast, deaths, fences, messages lost and doubled, calls repeated, late lots, cancels."""
    seed = pytestconfig.getoption("chaos_seed") or secrets.randbelow(1 << 32)
    fault.measured(seed=seed)
    print(f"--chaos-seed {seed}")  # pytest shows it of a failure
    monkeypatch.setattr(loops, "SWEEP_SECONDS", 0.1)
    monkeypatch.setattr("farm.control.loops.STRAY_SECONDS", 0.5)
    monkeypatch.setattr("farm.control.loops.LATE_LOTS_SECONDS", 0.5)
    place, notes = urlsplit(rig.s3["s3_endpoint"]), Notes()
    with Proxy(str(place.hostname), int(place.port or 80), seed=seed) as line:
        farm = rig(s3_endpoint=f"http://127.0.0.1:{line.port}", lease_seconds=LEASE, renew_seconds=LEASE / 6)
        for path in farm.freeze(1).files.values():
            farm.artifacts.put_blob_file(path)
        late = Farm(farm.settings)
        monkeypatch.setattr(late.store.builds, "create", first_half(late.store.builds.create))
        walk = Walk(farm, line, random.Random(seed), late)
        nodes = [f"n{number}" for number in range(5)]
        workers = [
            WalkingWorker(farm.farm, farm.raw, node, POOLS, seed=f"{seed}", lease=LEASE, notes=notes) for node in nodes
        ]
        try:
            for _ in range(2):
                walk.start_plane()
            for worker in workers:
                worker.start()
            wait_until(lambda: {pool["name"] for pool in farm.store.workers.pools()} == {pool.name for pool in POOLS})
            while len(walk.asked) < fault.count.builds and not notes.wrong:
                walk.step()
                pause(0.01)
            walk.settle()
            with suppress(AssertionError):  # It would not say which.
                wait_until(lambda: not without_expiry(farm), timeout=20)
            left = without_expiry(farm)
        finally:
            line.errors = line.resets = line.deaf = line.latency = 0.0
            for worker in workers:
                worker.over.set()
            walk.hands.shutdown(cancel_futures=True)
            while walk.planes:
                walk.stop_plane()
            for worker in workers:
                worker.join()
        farm.builds += [asked.build_id for asked in walk.accepted]
        tried = [job for job_id in list(notes.fates) if (job := farm.store.jobs.get(job_id))]
        quarantined = [(job["key"], job["ended_at"]) for job in tried if job["quarantined"]]
        found = [text for asked in walk.accepted for text in wrong_of_build(farm, asked, notes, quarantined)]
        wrong = [*notes.wrong, *found]
        twice = [key for key, count in notes.published.items() if count > 1]
        fault.measured(
            steps=dict(walk.did), workers=dict(notes.did), requests=dict(line.done), published=len(notes.published),
            quarantined=len(quarantined),
            wrong=len(wrong), without_expiry=left,
        )  # fmt: skip
        assert not wrong, "\n".join(wrong[:20])
        assert (left, twice) == ([], [])
        fault.measured(**farm.ledger())
