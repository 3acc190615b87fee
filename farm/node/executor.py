"""Executor: the steps of one attempt, from claim to published artifact, and the turns that its program takes with the
one that it is judged by. Knows neither Redis nor Celery.
"""

from __future__ import annotations

import errno
import json
import math
import os
import random
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

from farm.artifacts.planned_orders import require_planned
from farm.artifacts.s3 import S3Store
from farm.artifacts.sidecar import facts
from farm.artifacts.storage import readable, reference_key
from farm.compiling.asking import MadeProgram, ReferenceRecipe, after_a_crash, reference_recipe
from farm.compiling.attempt import Attempt, by_toolchain, is_same_build
from farm.compiling.failures import FULL_DISK, Failure
from farm.compiling.pipeline import (
    NO_DATABASES,
    Children,
    Databases,
    InputFiles,
    OnPhase,
    Pipeline,
    StepEnded,
    Steps,
    StepSettings,
    is_shared,
)
from farm.compiling.templates import Templates
from farm.errors import ArtifactGone, FarmFault, StorageAway, StorageUnavailable, Untrusted, UsageError
from farm.extension import publishing
from farm.files import NotPlain, open_plain
from farm.jobs.state import AttemptEnd, FailureKind, Outcome, Phase, keys_of
from farm.logging import get_logger
from farm.node.disk import NodeCache, Outbox, Parcel, WorkFolder
from farm.node.gpus import conditions
from farm.results.gates import is_suspicious
from farm.results.speed import MIN_PAIRS, Comparison, compare_pairs
from farm.settings import Settings
from farm.spec import FileReference, cut_short, digest_of
from farm.targets.compilers import OFF
from farm.tuning.database import TuningDatabase, database_of
from farm.tuning.search import Search
from farm.tuning.tuner import Tuner
from farm.wire.program import Against, ProgramRecord, Sidecar

log = get_logger(__name__)

PATIENCE = 30.0  # Seconds for which a request is repeated before storage counts as away.
LONGEST_TEXT = 64 << 20  # Bytes of a program's text that go into the log of a failed attempt.

AWAY_PAUSES = (1.0, 3.0)
"""Seconds between two tries while storage is away; random, so that the attempts of a farm do not try all at once."""

ONE_NAME_SECONDS = 3600.0
"""Seconds that an attempt waits for one object while storage answers for others, and for room in the outbox."""

LOOK_SECONDS = 60.0  # Between two checks whether storage answers other requests.


class Executor:
    """Runs attempts. One serves all slots of a worker; each attempt works in a folder of its own."""

    def __init__(self, artifacts: S3Store, settings: Settings) -> None:
        self.artifacts = artifacts
        self.settings = settings
        self.outbox = Outbox(settings.data_dir.resolve() / "outbox", publishing(settings))
        self.work = WorkFolder(settings.data_dir.resolve() / "work")
        self.installations = by_toolchain(settings.other_toolchains)
        """Where the node has other toolchains than its own."""
        self.templates = Templates()

    def execute(self, attempt: Attempt, *, on_phase: OnPhase, cancelled: threading.Event) -> Outcome:
        """Run one attempt and return how it ended, soon after `cancelled` is set. The log is uploaded in any case."""
        try:
            with self.work.place(f"{attempt.job_id}-{attempt.number}-") as folder:
                cold = any(fnmatchcase(attempt.namespace, name) for name in self.settings.cold_children)
                children = Children(
                    folder,
                    StepSettings.of(self.settings),
                    attempt.limits,
                    on_phase,
                    cancelled,
                    attempt.slot,
                    after_a_crash(attempt.previous),
                    partial(conditions, attempt.slot),
                    clock=attempt.clock,
                    templates=None if cold else self.templates,
                )
                return _AttemptRun(self, attempt, children).outcome()
        except OSError as error:
            return _disk_failed(error)


class _StoredReferences:
    """Reference outputs in object storage: made once for a model and its samples, and used by all its cells."""

    def __init__(self, run: _AttemptRun) -> None:
        self._run = run
        self._uploader = ThreadPoolExecutor(1)
        self._uploading: Future[None] | None = None
        self.file: FileReference | None = None
        """Where object storage has the reference outputs of this attempt."""

    def _recipe(self, used: str) -> tuple[ReferenceRecipe, str]:
        """Return what decides a reference's outputs, and the key of their record."""
        recipe = reference_recipe(self._run.order, used)
        return recipe, reference_key(self._run.attempt.namespace, digest_of(recipe))

    def bring(self, used: str, path: Path) -> bool:
        """Write to `path` what a reference made for another attempt; return whether there was something."""
        _, key = self._recipe(used)
        if known := self._run.artifacts.get_object(key):
            try:
                document = json.loads(known.data)
                file: FileReference = {"path": path.name, "digest": document["digest"], "size": document["size"]}
                self._run.cache.copy(file, path)
            except (ArtifactGone, ValueError, KeyError, TypeError) as error:
                log.warning("reference is gone or damaged, making it again", key=key, error=str(error))
            else:
                self.file = file
                return True
        return False

    def keep(self, used: str, path: Path) -> None:
        """Begin to upload new reference outputs, while the compiler works."""
        self._uploading = self._uploader.submit(self._upload, used, path)

    def finish(self) -> None:
        """Wait until the upload is done. Repeatable."""
        if self._uploading:
            self._uploading.result()

    def close(self) -> None:
        """Wait for the upload, however it ends, and end its thread."""
        self._uploader.shutdown()

    def _upload(self, used: str, path: Path) -> None:
        """Upload reference outputs. If that fails, another attempt makes them again."""
        recipe, key = self._recipe(used)
        try:
            copy, digest, size = self._run.cache.add(path, self._run.children.largest, within=self._run.folder)
            self._run.impatient.put_blob_file(copy, digest=digest)
            kept = {"digest": digest, "size": size, "recipe": recipe}
            self._run.impatient.put_object(key, json.dumps(kept).encode())
        except (StorageUnavailable, UsageError, OSError) as error:
            log.warning("reference not kept", error=str(error))
        else:
            self.file = {"path": path.name, "digest": digest, "size": size}


class _AttemptRun:
    """One attempt under way: lookup, fetch, the pipeline, publish."""

    def __init__(self, executor: Executor, attempt: Attempt, children: Children) -> None:
        self.executor = executor
        self.attempt = attempt
        self.order = attempt.order
        self.children = children
        own = executor.installations.get(attempt.order["spec"]["toolchain"])
        self.steps = Steps(attempt.order, children, keyed=True, installation=own)
        self.folder = children.folder
        self.impatient = executor.artifacts
        """Object storage for what the attempt can do without."""
        self.artifacts = self.impatient.with_patience(PATIENCE, self._wait_for_storage)
        """Object storage for what the attempt needs: requests wait while it is away."""
        self.cache = NodeCache(executor.settings, self.artifacts.get_blob)
        self.parcel: Parcel | None = None
        """The finished program, until storage has it."""
        self.waiting = threading.Lock()
        """Held while the time in which storage is away is counted."""
        self.waited = -math.inf
        """The end of the time that was counted last."""
        self.looked = -math.inf
        """When storage was last checked with another request."""
        self.answers: float | None = None
        """Since when it answers other requests; None if it does not."""
        self.references = _StoredReferences(self)
        self.tuner: Tuner | None = None
        self.database: TuningDatabase | None = None
        """Where its tuning keeps what it learns."""
        self.made_again = False
        """Whether it compiles what it was only to measure."""
        self.key = attempt.key
        """The artifact's cache key; a tuning that its budget cut short changes it."""

    def outcome(self) -> Outcome:
        """Take the steps in order, and return how the attempt ended."""
        try:
            outcome = self._taken()
        finally:
            self.references.close()
        if self.tuner:
            try:
                # Last, since it may wait for hours: the program is safe now.
                self.tuner.search.save()
            except (FarmFault, StepEnded) as error:
                log.warning("the tuning database is away at the end, what was learnt since is lost", error=str(error))
        return outcome

    def _taken(self) -> Outcome:
        """Take the steps in order; decide once how the attempt ended."""
        attempt = self.attempt
        self.children.log_path.write_text(f"{self.order['identifier']} attempt {attempt.number}\n")
        attempt.tail.follow(self.children.log_path)
        try:
            if attempt.claimed:
                require_planned(self.artifacts, attempt.namespace, attempt.build, attempt.key, attempt.order)
            for key in keys_of(self.order, attempt.key):  # Another attempt may have made it since the job was planned.
                if found := self.artifacts.lookup(readable(attempt.namespace), key):
                    return self._of_a_hit(found)
            return self._make()
        except StepEnded as ended:
            outcome = Outcome.cancelled()
            if failed := ended.failure:
                outcome = Outcome.failure(failed.kind, failed.message, detail=failed.detail)
                outcome = replace(outcome, fences=failed.message if failed.fences else "")
        except Untrusted as error:
            log.error("work order refused", error=error.message, hint=error.hint)
            outcome = Outcome.failure(FailureKind.UNPLANNED, error.message)
        except ArtifactGone as error:
            outcome = Outcome.failure(FailureKind.STORAGE, f"an input is damaged or gone: {error.message}")
        except StorageAway as error:
            return Outcome.released(error.message)
        except FarmFault as error:
            outcome = Outcome.failure(FailureKind.STORAGE, error.message)
        except OSError as error:
            outcome = _disk_failed(error)
        except Exception as error:
            log.exception("executor failed")
            with self.children.log_path.open("a") as whole:
                traceback.print_exc(file=whole)
            mistake = f"the farm made a mistake: {type(error).__name__}: {error}"
            outcome = Outcome.failure(FailureKind.INTERNAL, mistake)
        return self._with_log(outcome)

    def _make(self) -> Outcome:
        self.made_again = bool(self.order.get("hit"))
        with self.children.phase(Phase.FETCHING):
            model = self.cache.place(self.order["model"]["files"], self.folder / "model")[0]
            data = {"calibration": self.order["calibration"], "samples": self.order["samples"]}
            inputs = InputFiles(
                model,
                *(self.cache.place([file], self.folder / name)[0] if file else None for name, file in data.items()),
            )
            self.steps.env_files = self._env_files()
            self.tuner = self._tuner()
            if self.tuner:  # Its search times candidates.
                self._wait_for_quiet()
        pipeline = Pipeline(self.steps, inputs, self.tuner, self.references, self._measuring)
        record = pipeline.run()
        if tuner := self.tuner:
            if tuner.kernel_cache and tuner.measured:  # In turns with others it found its kernel binaries.
                record["measurements"]["first_run_warm"] = tuner.measured[0]["first"][0]
            if tuner.search.cut:
                self.key = keys_of(self.order, self.attempt.key)[-1]
                record["spec"] = cut_short(self.order["spec"], self.order["budget"])
        with self.children.phase(Phase.UPLOADING):
            outcome = self._publish(record)
        if outcome.hit:
            return outcome
        # Storage has the program by now: whatever comes of the turns, it is not lost.
        outputs = [output["name"] for output in record["outputs"]]
        made = MadeProgram(self.steps.program, outputs, record["tuning"].get("session")), inputs.samples
        return self._in_turns(outcome, lambda: made)

    # --- steps --------------------------------------------------------------------------------------------------

    def _of_a_hit(self, sidecar: Sidecar) -> Outcome:
        """Return how an attempt ends that found its program: if its build's gate asks for it, after turns."""

        def bring() -> tuple[MadeProgram, Path | None]:
            self.steps.env_files = self._env_files()
            made = self._placed(sidecar, "hit")
            if self.order["samples"] is None:
                return made, None
            # The order's may be gone, since the program exists; the program's own sample is kept with it.
            sample = sidecar["blobs"].get("sample") or self.order["samples"]
            return made, self.cache.place([sample], self.folder / "samples")[0]

        return self._in_turns(Outcome.success(facts(sidecar), hit=True), bring)

    def _in_turns(self, outcome: Outcome, bring: Callable[[], tuple[MadeProgram, Path | None]]) -> Outcome:
        """Let a published program take turns with its build's baseline, if a gate asks for it.

        `bring` returns the program and its samples; None: they are generated. If that fails, by whatever the baseline
        does, the attempt succeeds, and its facts say why nothing was measured. Raises StepEnded if nobody wants it any
        more.
        """
        known, limit, fences = outcome.facts, self.order.get("limit"), ""
        if known is None or limit is None or known["latency"] is None:
            return outcome
        try:
            other = self._published()
            if other is None:
                known["unmeasured"] = "the program to compare with is gone"
            else:
                theirs = self.steps.under(self.executor.installations.get(other.toolchain))
                ours, inputs = bring()
                databases = self.tuner.measuring if self.tuner else NO_DATABASES
                self.children.shared = False  # The program's record has what disturbed its own measurement.
                with self._measuring():
                    found = compare_with(self.steps, theirs, ours, known["latency"], inputs, other, limit, databases)
                look = self.children.look("after the turns with the baseline")
                known["turns"] = {
                    **found,
                    "measured": datetime.now(UTC).isoformat(timespec="seconds"),
                    "node": socket.gethostname(),
                    "shared": self.children.shared or bool(look and is_shared(look)),
                }
        except StepEnded as ended:
            if ended.failure is None:
                raise
            known["unmeasured"] = ended.failure.message
            fences = ended.failure.message if ended.failure.fences else ""
        except (ArtifactGone, FarmFault) as error:
            known["unmeasured"] = error.message
        except OSError as error:
            known["unmeasured"] = _disk_failed(error).message
        if why := known.get("unmeasured"):
            log.warning("no turns with the baseline", reason=why)
        return self._with_log(replace(outcome, fences=fences))

    def _env_files(self) -> dict[str, str]:
        """Bring the files that environment variables name; return their paths by variable."""
        places = {}
        for name, file in self.order.get("env", {}).items():
            path = self.cache.place([file], self.folder / "env")[0]
            path.chmod(0o444)
            places[name] = str(path)
        return places

    def _tuner(self) -> Tuner | None:
        """Return the tuner of this cell; None if tuning is off."""
        attempt = self.attempt
        if self.order["spec"]["tuning"]["mode"] == OFF:
            return None
        impatient, patient = (
            database_of(artifacts, attempt.namespace, self.order) for artifacts in (self.impatient, self.artifacts)
        )
        self.database = patient
        search = Search(
            self.steps,
            impatient,
            patient=patient,
            session=f"{attempt.job_id}-{attempt.number}",
            worker=attempt.worker,
            job=attempt.job_id,
            budget=self.order.get("budget") or 0.0,
            free=attempt.free,
        )
        # With a limit, the program that is published takes the turns: `_in_turns`.
        return Tuner(search, published=self._published() if self.order.get("limit") is None else None)

    def _published(self) -> MadeProgram | None:
        """Bring the program to compare with: a follow-up's, or a gate's baseline. Without it nothing can be shown."""
        key = self.order.get("against")
        found = self.artifacts.lookup(readable(self.attempt.namespace), key) if key else None
        if key and not found:
            log.warning("the program to compare with is gone", key=key)
        if not key or not found:
            return None
        return self._placed(found, "published")

    def _placed(self, sidecar: Sidecar, folder: str) -> MadeProgram:
        """Bring an artifact's program to a folder of the attempt. Raises ArtifactGone."""
        program = self.cache.place([sidecar["blobs"]["program"]], self.folder / folder)[0]
        outputs = [output["name"] for output in sidecar["outputs"]]
        return MadeProgram(program, outputs, sidecar["tuning"]["session"], sidecar["key"], sidecar["toolchain"])

    @contextmanager
    def _measuring(self) -> Iterator[None]:
        """Measure when the slot's uploads have ended, and on a GPU note other attempts: on CPUs none runs meanwhile."""
        self.references.finish()
        self._wait_for_quiet()
        work, gpu = self.executor.work, self.children.slot.gpu
        before = work.at_work()
        yield
        if gpu and (work.at_work() != before or sum(count for count, _ in before.values()) > 1):
            self.children.shared = True

    def _wait_for_quiet(self) -> None:
        """Wait until the slot's last program is uploaded, which counts for no limit; remember if it takes too long."""
        began, attempt = time.monotonic(), self.attempt
        if not attempt.free.until_quiet(attempt.slot, self.children.cancelled):
            self.children.shared = True
        self.children.began += time.monotonic() - began

    def _publish(self, record: ProgramRecord) -> Outcome:
        attempt = self.attempt
        sidecar = {
            **record,
            **{name: getattr(attempt, name) for name in ("namespace", "build", "worker")},
            "key": self.key,
            "job": attempt.job_id,
            "attempt": attempt.number,
        }
        if self.children.cancelled.is_set():
            raise StepEnded(None)
        with closing(self._parcel(sidecar)) as parcel:
            self.parcel, published, stopped = parcel, False, False
            try:
                if self.order.get("limit") is None:
                    self.attempt.leave()
                outcome = parcel.publish(self.artifacts)
                published = True
            except StepEnded:
                stopped = True
                raise
            finally:
                self.parcel = None
                # If the program had to wait, the store keeps its job for the process that publishes it. The parcel
                # must then stay until the store knows how the attempt ended.
                stays = parcel.settled or stopped
                if self.tuner and (published or stays):
                    self.tuner.search.unsaved = None
                if not stays:
                    parcel.drop()
            return replace(outcome, phases=self.children.phases)

    def _parcel(self, sidecar: Mapping[str, object]) -> Parcel:
        """Put the finished program into the outbox; if the disk is full, wait for room. Raises OSError, StepEnded.

        Room comes because the worker takes no jobs in this time, and because other attempts end and free theirs.
        """
        until = time.monotonic() + ONE_NAME_SECONDS
        unsaved = self.tuner.search.unsaved if self.tuner else None
        learnt = self.database.delta_object(unsaved) if self.database and unsaved else None
        while True:
            try:
                return self.executor.outbox.put(self.attempt, self.children, sidecar, self._files(), learnt=learnt)
            except OSError as error:
                if error.errno not in FULL or time.monotonic() >= until:
                    raise
                log.warning("a finished program waits for room in the outbox", error=str(error))
            self.children.on_phase(Phase.UPLOADING, None, "waits for room on the worker's disk")
            if self.children.cancelled.wait(random.uniform(*AWAY_PAUSES)):  # noqa: S311 - keeps no secret
                raise StepEnded(None)

    def _files(self) -> dict[str, Path]:
        """Return the files of the artifact by the names of their blobs. Raises OSError."""
        document = self.folder / "reproduce.json"
        document.write_text(json.dumps(self.attempt.describe(reference=self.references.file), indent=1))
        files = {
            "program": self.steps.program,
            "sample": self.steps.sample,
            **self.steps.texts,
            "reproduction": document,
            "kernel_cache": self.tuner.kernel_cache if self.tuner else None,
            "log": self.children.log_path,
        }
        needed = ("program", "log")
        return {name: path for name, path in files.items() if path and (name in needed or os.path.lexists(path))}

    def _wait_for_storage(self, away: StorageAway) -> None:
        """Report that storage is away, and let the calling thread wait a little. Raises StepEnded.

        That time does not count against the attempt's limit. If storage answers all requests but this one, the attempt
        fails after a while.
        """
        with self.waiting:
            if self.parcel:
                try:
                    self.parcel.settle()
                except OSError as error:  # On a full disk, which may have room later: the program is good all the same.
                    log.warning("the finished program may not outlive a loss of power yet", error=str(error))
            if away.since > self.waited:
                log.warning("waiting for object storage", error=away.message, hint=away.hint)
            now = time.monotonic()
            self.children.began += now - max(away.since, self.waited)
            self.waited = now
        self.attempt.on_away(self.parcel is not None)
        self._require_outage(away)
        if self.children.cancelled.wait(random.uniform(*AWAY_PAUSES)):  # noqa: S311 - keeps no secret
            raise StepEnded(None)

    def _require_outage(self, away: StorageAway) -> None:
        """Raise StepEnded if storage refuses this object for long but answers others: nobody else would report that."""
        now = time.monotonic()
        with self.waiting:
            if now - max(away.since, self.looked) < LOOK_SECONDS:
                return
            self.looked = now
            self.answers = (self.answers or now) if self.impatient.answers() else None
            seconds = self.executor.settings.outbox_hours * 3600 if self.parcel else ONE_NAME_SECONDS
            if self.answers is not None and now - max(away.since, self.answers) >= seconds:
                message = f"{away.message}; so for {seconds / 3600:.3g} h, while the storage answers others"
                raise StepEnded(Failure(FailureKind.STORAGE, f"{message}: its operator has to act"))

    # --- tools --------------------------------------------------------------------------------------------------

    def _with_log(self, outcome: Outcome) -> Outcome:
        """Attach the log. The outcome stays the same if the log cannot be uploaded."""
        if outcome.end is AttemptEnd.CANCELLED:
            return outcome
        try:
            with self.children.log_path.open("ab") as whole:  # A failed attempt has no artifact to keep them in.
                for when, path in self.steps.texts.items():
                    with suppress(NotPlain), open_plain(path, LONGEST_TEXT, within=self.folder) as text:
                        whole.write(f"\nthe program {when} compilation:\n".encode())
                        whole.write(text.read(LONGEST_TEXT))
            digest, _ = self.artifacts.put_blob_file(self.children.log_path)
        except (FarmFault, OSError, StepEnded) as error:
            log.warning("log not uploaded", error=str(error))
            digest = ""
        made_again = self.made_again and outcome.end is AttemptEnd.FAILED
        return replace(outcome, log=digest, phases=self.children.phases, made_again=made_again)


FULL = (errno.ENOSPC, errno.EDQUOT)  # Error numbers of a full disk.


def _disk_failed(error: OSError) -> Outcome:
    """Return the outcome for a failed file operation: a full disk, an odd file of a compiler, or a bug of the farm."""
    if isinstance(error, NotPlain):
        left = f"{Path(str(error.filename)).name}: {error.strerror}"
        return Outcome.failure(FailureKind.COMPILER_ERROR, f"it left what is not a plain file: {left}")
    if error.errno in FULL:
        return Outcome.failure(FailureKind.STORAGE, f"{FULL_DISK}: {error}")
    return Outcome.failure(FailureKind.INTERNAL, f"the worker's disk: {error}")


ROUNDS = 20  # Rounds of the first comparison.
ROUNDS_AGAIN = 60  # Rounds if the program may be slower than its limit allows: what fails a build needs more proof.
PAIRS = 8  # Pairs of processes of the first comparison of two toolchains; each pair counts as one round.
PAIRS_AGAIN = 24  # Pairs of processes if the program may be slower than its limit allows.
LONGEST = 60.0
"""Seconds that the runs of one comparison should take; slow programs get fewer rounds, down to `MIN_PAIRS`."""


def compare_with(
    steps: Steps,
    theirs: Steps,
    ours: MadeProgram,
    latency: float,
    samples: Path | None,
    other: MadeProgram,
    limit: float,
    databases: Databases = NO_DATABASES,
) -> Against:
    """Return how a program compares with another, as a sidecar says it (`measurements.against`).

    Programs of one toolchain take turns in one process. One of another toolchain runs in processes of its own, under
    that toolchain, and the processes take turns. `latency` is the program's median in seconds (0: unknown). `theirs`
    are the steps of the cell under the other program's toolchain, `steps` under its own.

    If it may be slower by more than `limit` (a share), it is measured again, in a process of its own with the programs
    loaded in the other order. Only that counts then: a program's place in memory makes some percent. `databases` are
    those that a tuned program is measured with.

    Raises StepEnded if one of the two does not run here (its toolchain is not installed, other inputs), or if the
    attempt is over.
    """
    toolchain = steps.order["spec"]["toolchain"]
    whole = steps.children.settings.measure_seconds

    def in_turns(rounds: int, *, turned: bool) -> Comparison:
        """Let both take turns in one process."""
        programs = [other, ours] if turned else [ours, other]
        # Each round as long as in the first comparison.
        length = whole / ROUNDS
        rounds = max(MIN_PAIRS, min(rounds, int(LONGEST / 2 / max(length, latency))))
        timed = steps.bench(programs, samples, rounds=rounds, seconds=length * rounds, databases=databases)
        first, second = (each["rounds"] for each in timed)
        return compare_pairs(second, first) if turned else compare_pairs(first, second)

    def process_by_process(pairs: int) -> Comparison:
        """Let two toolchains take turns, each in a fresh process; the order turns around with each pair."""
        sides = [(steps, ours, toolchain, databases), (theirs, other, other.toolchain, NO_DATABASES)]
        length = max(whole / pairs, latency)
        rounds: list[list[list[float]]] = [[], []]
        for number in range(max(MIN_PAIRS, min(pairs, int(LONGEST / 2 / length)))):
            turns = list(enumerate(sides))
            for place, (side, program, made_by, own) in reversed(turns) if number % 2 else turns:
                # Where a program lies in memory is a process's luck, so a process counts once.
                timed = side.bench([program], samples, rounds=1, seconds=length, toolchain=made_by, databases=own)
                rounds[place] += map(list, timed[0]["rounds"])
        return compare_pairs(*rounds)

    def measured(rounds: int, pairs: int, *, turned: bool) -> Comparison:
        with steps.children.phase(Phase.MEASURING):
            apart = not is_same_build(other.toolchain, toolchain)
            return process_by_process(pairs) if apart else in_turns(rounds, turned=turned)

    found = measured(ROUNDS, PAIRS, turned=False)
    if is_suspicious(found, limit):
        log.info("may be slower than its baseline, measuring again", ratio=found.ratio, limit=limit)
        found = measured(ROUNDS_AGAIN, PAIRS_AGAIN, turned=True)
    return {"key": other.key, **found.as_dict()}
