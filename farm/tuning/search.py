"""Search: tunes the slices of one model into the database, each in a child, in the attempt's slot and in free ones.

Each slot has a private folder. New records go to the database every minute, and when a child has ended in any way, so
at most a minute's work is in these folders alone.
"""

from __future__ import annotations

import json
import shutil
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from farm.compiling.asking import slice_request, tune_request, tuning_mode
from farm.compiling.attempt import FreeSlots, Slot
from farm.compiling.failures import REFUSED
from farm.compiling.pipeline import StepEnded, Steps
from farm.errors import FarmFault
from farm.jobs.state import FailureKind, Phase
from farm.logging import get_logger
from farm.runner.documents import CompileAnswer, Request, SliceAnswer, SlicedModel, SlicePart
from farm.spec import SpecDocument, digest_of
from farm.targets.compilers import compilers
from farm.tuning.database import Collector, Learning
from farm.tuning.formats import write_folder
from farm.tuning.records import RecordSource, RecordStore, Snapshot, TuningWork

log = get_logger(__name__)

Piece = TypeVar("Piece")


class FanOut(Generic[Piece]):
    """Gives each piece to one slot: to the attempt's own, or to one that it borrows for this piece alone.

    So an attempt that waits for a slot waits for one piece at most.
    """

    def __init__(
        self, free: FreeSlots, own: Slot, work: Callable[[Slot, Piece], None], cancelled: threading.Event
    ) -> None:
        """`work` does a piece in a slot; it is called by several threads, one for each slot.

        Once `cancelled` is set, that it raises says nothing of the slot.
        """
        self._free, self._own, self._work, self._cancelled = free, own, work, cancelled
        self._change = threading.Condition()
        self._waiting: deque[Piece] = deque()
        self._returned: list[Piece] = []  # Pieces that failed in a borrowed slot.
        self._borrowed = 0  # Borrowed slots that work at the moment.

    @property
    def slots(self) -> int:
        """How many slots are at work."""
        return 1 + self._borrowed

    def run(self, pieces: Sequence[Piece]) -> None:
        """Do all pieces, the own slot's by the calling thread.

        A piece that fails in a borrowed slot is done again in the own one, and the slot is borrowed no more. Raises
        what `work` raises in the own slot, once the pieces that others have in hand are done.
        """
        self._waiting.extend(pieces)
        ended = threading.Event()
        try:
            for slot in self._free.others(self._own) if len(pieces) > 1 else ():
                run = copy_context().run  # The log's lines name the attempt in these threads too.
                threading.Thread(target=run, args=(self._help, slot, ended), name="fan-out", daemon=True).start()
            while piece := self._next():
                self._work(self._own, piece[0])
        finally:
            ended.set()
            with self._change:
                self._waiting.clear()
                self._change.wait_for(lambda: not self._borrowed)

    def _next(self) -> tuple[Piece] | None:
        with self._change:
            self._change.wait_for(lambda: self._waiting or self._returned or not self._borrowed)
            if self._waiting:
                return (self._waiting.popleft(),)
            return (self._returned.pop(),) if self._returned else None

    def _help(self, slot: Slot, ended: threading.Event) -> None:
        """Do pieces in a slot that is borrowed for each, until none waits or one fails."""
        failed: list[Piece] = []
        while not failed:
            with self._free.borrow(slot, ended) as borrowed:
                with self._change:
                    if not borrowed or not self._waiting:
                        return
                    failed = [self._waiting.popleft()]
                    self._borrowed += 1
                try:
                    self._work(slot, failed[0])
                    failed = []
                except Exception as error:
                    if not self._cancelled.is_set():
                        log.warning("a borrowed slot failed", slot=slot.gpu or slot.cpus, reason=repr(error))
                finally:
                    with self._change:
                        self._returned += failed
                        self._borrowed -= 1
                        self._change.notify_all()


COLLECT_SECONDS = 60.0  # Seconds between two looks for new records of a running child.


def slice_key(spec: SpecDocument, signature: str, threads: int) -> str:
    """Return the name of a slice in the database: what it is, and what it is compiled with. The mode is the database's.

    64 hex digits. Names and weights are not part of it, so equal layers of different models share one. If the number
    of threads decides what can be tried, it is part of it.
    """
    fields = {name: spec[name] for name in ("precision", "options", "quantization", "env")}
    extra: dict[str, object] = {name: value for name, value in spec["tuning"].items() if name != "mode"}
    if compilers()[spec["compiler"]["name"]].tuning_binds:
        extra["threads"] = threads
    return digest_of({"schema": 1, "signature": signature, **fields, **extra})


class SearchedSlice(NamedTuple):
    """A part of the model: its name in the database, how many operations all its copies have, and what was cut."""

    key: str
    operations: int
    cut: SlicedModel


@dataclass
class Lane:
    """A slot that tunes for the attempt: its steps and its folder, and the results and times of its latest child."""

    steps: Steps
    folder: Path
    learnt: Snapshot = field(default_factory=Snapshot)
    began: float | None = None  # In seconds of its children, without pauses; None also once its seconds were taken.
    ended: float | None = None

    @property
    def seconds(self) -> float:
        """What the child took until now, or until it ended; 0 once that was taken."""
        began, ended = self.began, self.ended  # Another thread changes them at any time.
        return 0.0 if began is None else round((ended or self.steps.children.seconds) - began, 3)

    def take_seconds(self) -> float:
        """Return what a child took that has ended, for once."""
        seconds, self.began = self.seconds, None
        return seconds

    @property
    def operations(self) -> int:
        """How many operations left a record."""
        counts = self.learnt.counts()
        return counts[RecordStore.PROBLEM_CACHE] + counts[RecordStore.FIND_DB]


class Search:
    """Tunes the slices of one model that the database does not have, within a budget, and keeps the results."""

    def __init__(
        self,
        steps: Steps,
        database: Learning,
        *,
        session: str,
        patient: Learning | None = None,
        worker: str = "",
        job: str = "",
        budget: float = 0.0,
        free: FreeSlots | None = None,
    ) -> None:
        """`session` names this attempt, for ever; `budget` is in seconds, 0 means none. Slots that are `free` help.

        `patient` is the same database, but its requests wait while storage is away.
        """
        self.steps, self.children, self.order = steps, steps.children, steps.order
        self.spec = steps.order["spec"]
        self.mode = tuning_mode(self.order)
        self.folder = self.children.folder / "tuning"  # The private folder of the attempt's own slot.
        self._slices = self.folder.with_name("slices")  # The folder of the model's slices.
        self.work = TuningWork()  # The work so far.
        self.cut = False  # Whether the budget ended before the tuning did.
        self.left_over = 0  # Operations that were left untuned then.
        self.slices: list[SlicePart] = []  # The model's slices, `{key, count}`.
        compiler = steps.compiler
        enforce = self.spec["tuning"].get("miopen_find_enforce")
        self._overrides = {compiler.find_enforce: str(enforce)} if enforce is not None and compiler.find_enforce else {}
        self._budget = budget
        self._deadline: float | None = None
        self._database, self._patient = database, patient or database
        self.database = database.name
        self.rows = list[str]()  # SHA-256 of the snapshots and deltas that it read or added; known at its end.
        self.unsaved: Snapshot | None = None
        """What could not be committed at the end of the tuning: `save` does it, unless somebody else has by then."""
        self._session, self._source = session, RecordSource("", worker, job, self.spec["toolchain"])
        self._fan_out = FanOut(free or FreeSlots(), self.children.slot, self._tune_slice, self.children.cancelled)
        self._begun, self._count = 0, 0
        self._lock = threading.RLock()  # Held while work is counted, or the collector is used.
        self._lanes = {self.children.slot: Lane(self.steps, self.folder)}  # By slot, the attempt's own first.

    @contextmanager
    def open(self) -> Iterator[None]:
        """Restore the database; commit what children learn while the block runs and when it ends, however it ends."""
        self._collector = Collector(self._database, self.folder, self._session, self._source, patient=self._patient)
        ended = threading.Event()

        def collect() -> None:
            while not ended.wait(COLLECT_SECONDS):
                with self._lock:
                    for lane in self._lanes.values():
                        self._collect(lane)

        thread = threading.Thread(target=collect, name="collect", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            try:
                self._collector.finish(self.work)
            except FarmFault as error:
                self.unsaved = self._collector.delta(self.work)
                log.warning("the tuning database is away, trying again at the end", error=error.message)
            self.rows = sorted(filter(None, self._collector.seen))

    def tune(self, model: Path, inputs: Sequence[Path]) -> None:
        """Tune each slice of a model that is not known; `inputs` are what its compile reads. Raises StepEnded."""
        pieces = [
            SearchedSlice(self._key(cut["signature"]), cut["operations"] * cut["count"], cut)
            for cut in self._cut(model, inputs)
        ]
        missing = [piece for piece in pieces if not self._is_known(piece)]
        self.slices = [{"key": piece.key, "count": piece.cut["count"]} for piece in pieces]
        # Each attempt has its own order, so that attempts with the same slices share them.
        missing.sort(key=lambda piece: digest_of([self._session, piece.key]))
        self._count = len(missing)
        self._deadline = self.children.seconds + self._budget if self._budget else None
        try:
            self._fan_out.run(missing)
        finally:
            self._gather_logs()

    def ask(self, request: Request, *, read: Sequence[Path], write: Sequence[Path]) -> CompileAnswer | None:
        """Compile the whole model in a child that tunes what is left; None if the budget is over before its end.

        `folder` then has all records that are known. Raises StepEnded.
        """
        own = self._lanes[self.children.slot]
        with self._lock:
            self._prepare(own)
            self._collector.tidy(own.folder)
        if self.cut:
            return None
        finished = False
        try:
            answer: CompileAnswer = self._ask(own, request, read=read, write=write)
            finished = True
            return answer
        except StepEnded as ended:
            if not self._was_cut(ended):
                raise
            self.cut = True
            return None
        finally:
            with self._lock:
                self._collect(own)
                seconds = own.take_seconds()
                if own.learnt or self.cut:  # Else there was nothing to tune: it did nothing but compile.
                    self._spend(seconds)
                if not self.slices:
                    self._count_whole(own, seconds, finished=finished)

    def _count_whole(self, own: Lane, seconds: float, *, finished: bool) -> None:
        """Count the operations of a model that could not be cut: as a slice of its own, which is the whole model."""
        key = self._key(digest_of({name: self.spec[name] for name in ("model", "inputs", "batch")}))
        tuned = own.operations
        self.work += TuningWork(tuned=tuned)
        if entry := self._collector.slices.get(key):
            before = json.loads(entry[0])
            known = max(int(before["operations"]) - tuned, 0)
            share = known / before["operations"]
            self.work += TuningWork(known=known, saved=round(before["seconds"] * share, 3))
        elif finished and tuned:
            self._collect(own, {key: {"operations": tuned, "seconds": seconds}})

    def copy(self, folder: Path) -> None:
        """Write all that is known into another folder, whatever a child that was ended left of ours."""
        with self._lock:
            write_folder(self._collector.known, folder)

    def save(self) -> None:
        """Commit what is unsaved. Call it when the attempt is done.

        Raises what the patient database raises, and StepEnded if the attempt is cancelled.
        """
        if self.unsaved:
            if self.children.cancelled.is_set():
                raise StepEnded(None)
            self._patient.commit(self.unsaved)
            self.unsaved = None

    def _key(self, signature: str) -> str:
        return slice_key(self.spec, signature, self.steps.threads)

    def _is_known(self, piece: SearchedSlice) -> bool:
        entry = self._collector.slices.get(piece.key)
        if entry:
            self.work += TuningWork(known=piece.operations, saved=float(json.loads(entry[0])["seconds"]))
        return entry is not None

    def _cut(self, model: Path, inputs: Sequence[Path]) -> list[SlicedModel]:
        """Return the model's slices; none if it cannot be cut, which is then tuned as a whole."""
        if self.order["model"]["format"] != "onnx":
            return []
        folder = self._slices
        folder.mkdir()
        try:
            found: SliceAnswer = self.steps.ask(slice_request(self.order, model, folder), read=inputs, write=[folder])
        except StepEnded as ended:
            if ended.failure is None or ended.failure.kind not in REFUSED:
                raise
            log.warning("model cannot be cut into slices, tuning it as a whole", reason=ended.failure.message)
            return []
        return list(found["slices"])

    def _tune_slice(self, slot: Slot, piece: SearchedSlice) -> None:
        """Tune a slice in a slot; called by a thread for each slot."""
        with self._lock:
            if slot not in self._lanes:
                steps = self.steps.in_slot(slot, self.children.folder / f"lane-{len(self._lanes)}")
                self._lanes[slot] = Lane(steps, steps.children.folder / "tuning")
            lane = self._lanes[slot]
            self._begun += 1
            self._prepare(lane)
            if self._is_known(piece):
                return
            if self._out_of_budget():
                self._leave(piece)
                return
            self._say(piece.operations)
            others = self._collector.others
        request = tune_request(self.order, piece.cut, database=lane.folder, key=piece.key)
        ended: StepEnded | None = None
        try:
            self._ask(lane, request, read=[self._slices], quiet=True)
        except StepEnded as error:
            ended = error
        with self._lock:
            seconds = lane.take_seconds()
            self._spend(seconds)
            finished = {"operations": piece.operations, "seconds": seconds}
            self._collect(lane, {} if ended else {piece.key: finished})
            if ended:
                self._collector.tidy(lane.folder)
                self._judge(piece, ended)
            else:
                self.work += self._tuned(piece, lane, others=others)

    def _tuned(self, piece: SearchedSlice, lane: Lane, *, others: bool) -> TuningWork:
        """Count the operations of a slice that a lane has tuned to its end.

        If `others` had left records before, operations without a new record were known: others cut slices otherwise.
        """
        tuned = piece.operations if lane.learnt else 0
        if others and (RecordStore.ONNXRUNTIME, "") not in lane.learnt.tables:  # It has one record for all.
            tuned = min(tuned, lane.operations * int(piece.cut["count"]))
        rest = piece.operations - tuned
        if not others:
            return TuningWork(tuned=tuned, untunable=rest)
        return TuningWork(tuned=tuned, known=rest, saved=round(self._collector.seconds(rest), 3))

    def _spend(self, seconds: float) -> None:
        self.work = replace(self.work, seconds=round(self.work.seconds + seconds, 3))

    def _judge(self, piece: SearchedSlice, ended: StepEnded) -> None:
        """Count a slice that was not tuned to its end. Raises StepEnded if the whole cannot go on."""
        if self._was_cut(ended):
            self._leave(piece)
        elif ended.failure is not None and ended.failure.kind in REFUSED:
            log.info("slice cannot be tuned", slice=piece.key, reason=ended.failure.message)
            self.work += TuningWork(untunable=piece.operations)
        else:
            self._begun -= 1  # The attempt's own slot does it again.
            raise ended

    def _leave(self, piece: SearchedSlice) -> None:
        self.cut = True
        self.left_over += piece.operations

    def _gather_logs(self) -> None:
        """Add what children in borrowed slots said to the attempt's log."""
        with self.children.log_path.open("ab") as whole:
            for slot, lane in [*self._lanes.items()][1:]:
                place = slot.gpu or f"CPUs {', '.join(map(str, slot.cpus))}"
                whole.write(f"\nslices that were tuned on {place}:\n".encode())
                with lane.steps.children.log_path.open("rb") as log_:
                    shutil.copyfileobj(log_, whole)

    def _ask(
        self, lane: Lane, request: Request, *, read: Sequence[Path], write: Sequence[Path] = (), quiet: bool = False
    ) -> Any:
        """Ask a child that tunes into a lane's folder, within the budget."""
        began = lane.steps.children.seconds
        lane.ended, lane.began = None, began
        try:
            return lane.steps.ask(
                request,
                {**self.mode.reading(str(lane.folder), searching=True), **self._overrides},
                read=read,
                write=[*write, lane.folder],
                seconds=max(self._deadline - began, 0.001) if self._deadline else 0.0,
                quiet=quiet,
            )
        finally:
            lane.ended = lane.steps.children.seconds

    def _out_of_budget(self) -> bool:
        return self._deadline is not None and self.children.seconds >= self._deadline

    def _was_cut(self, ended: StepEnded) -> bool:
        is_time_limit = ended.failure is not None and ended.failure.kind is FailureKind.TIME_LIMIT
        return is_time_limit and self._out_of_budget()

    def _say(self, operations: int) -> None:
        known, done = self.work.known, self.work.known + self.work.tuned + self.work.untunable
        detail = f"slice {self._begun} of {self._count}: {operations} operations; {done} done, {known} known before"
        if self._fan_out.slots > 1:
            kind = "GPUs" if self.children.slot.gpu else "slots"
            detail += f"; {self._fan_out.slots} {kind} at work"
        self.children.on_phase(Phase.TUNING, (self._begun - 1) / self._count, detail)

    def _prepare(self, lane: Lane) -> None:
        """Bring what other slots and other attempts learnt into a lane's folder, for the next child."""
        with self._patiently():
            self._collector.follow()
        self._collector.prepare(lane.folder)
        # Under the lock: else the collector would count the records of this child as those of the next.
        lane.learnt = Snapshot()

    def _collect(self, lane: Lane, finished: Mapping[str, object] | None = None) -> None:
        """Commit the new records of a lane's folder, and the slices that were finished there."""
        running = sum(each.seconds for each in self._lanes.values())
        work = replace(self.work, seconds=round(self.work.seconds + running, 3))
        lane.learnt = lane.learnt.join(self._collector.look(lane.folder, work, finished))
        with self._patiently():
            self._collector.commit(work)

    @contextmanager
    def _patiently(self) -> Iterator[None]:
        """Continue if storage is away: nothing is lost yet, and the next call tries again."""
        try:
            yield
        except FarmFault as error:
            log.warning("the tuning database is away, going on without it", error=error.message)
