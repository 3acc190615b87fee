"""Tuner: takes one model through tuning, slice by slice, and keeps what is learnt whatever happens to the attempt.

    restore the database into a private folder
    for each slice that the database does not have: tune it in a child, commit what is new
    compile the whole model from what is known; what that still tunes is committed too

Slices are tuned in spare slots of the worker too, at the same time; each slot has a private folder. A minute's work at
most lies in these folders alone. An attempt that dies leaves its finished slices behind, and the next one, wherever it
runs, begins with the slices in hand.
"""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from farm.comparison import Comparison, Rounds, compare, distribution
from farm.compilers import COMPILERS, OFF
from farm.errors import FarmFault
from farm.fan_out import FanOut
from farm.jobs.state import FailureKind, Phase
from farm.logging import get_logger
from farm.slots import FreeSlots, Slot
from farm.spec import digest_of
from farm.steps import (
    StepEnded,
    Steps,
    bench_request,
    compile_request,
    inputs_of,
    slice_request,
    tune_request,
    tuning_mode,
)
from farm.tuning.collecting import Collector
from farm.tuning.database import Learning
from farm.tuning.files import read_folder, write_folder
from farm.tuning.records import Source, Work

log = get_logger(__name__)

ROUNDS = 10
"""In which the tuned program and the untuned one take turns."""
NOISE = 0.05
"""How much two processes may differ that run the same program: their memory lies elsewhere, and they take no turns."""
COLLECT_SECONDS = 60.0
"""Between two looks for what a running child has learnt."""

_REFUSED = frozenset(
    {
        FailureKind.BAD_MODEL,
        FailureKind.UNSUPPORTED_OPERATOR,
        FailureKind.BAD_CALIBRATION,
        FailureKind.NOTHING_QUANTIZED,
        FailureKind.COMPILER_ERROR,
    }
)
"""What a compiler may say of one slice without the whole being wrong."""


class Published(NamedTuple):
    """A program of the same cell that is out already: its cache key, its file, and what its compile said of it."""

    key: str
    program: Path
    compiled: Mapping[str, Any]


Evaluate = Callable[[Mapping[str, Any], "Tuner | None"], dict[str, Any]]


def slice_key(spec: Mapping[str, Any], signature: str) -> str:
    """Return the name of a slice in the database: what it is, and what it is compiled with. The mode is the database's.

    64 hex digits. Names and weights are no part of it, so equal layers of different models share one.
    """
    fields = {name: spec[name] for name in ("precision", "options", "quantization", "env")}
    extra = {name: value for name, value in spec["tuning"].items() if name != "mode"}
    return digest_of({"schema": 1, "signature": signature, **fields, **extra})


class Slice(NamedTuple):
    """A part of the model: its name in the database, how many operations all its copies have, and what was cut."""

    key: str
    operations: int
    cut: Mapping[str, Any]


@dataclass
class Lane:
    """A slot that tunes for the attempt: its steps, its folder, and how many records were learnt there."""

    steps: Steps
    folder: Path
    learnt: int = 0


class Tuner:
    """Tunes and compiles the model of one cell against the database of its pool, device and mode."""

    def __init__(
        self,
        steps: Steps,
        database: Learning,
        *,
        session: str,
        worker: str = "",
        job: str = "",
        budget: float = 0.0,
        collect_seconds: float = COLLECT_SECONDS,
        published: Published | None = None,
        free: FreeSlots | None = None,
    ) -> None:
        """`session` names this attempt, for ever; `budget` is in seconds, 0 is none.

        `published` is a program that takes turns with this one too. Slots that are `free` help to tune.
        """
        self.steps, self.children, self.order = steps, steps.children, steps.order
        self.spec: Mapping[str, Any] = steps.order["spec"]
        compiler = COMPILERS[self.spec["compiler"]["name"]]
        self.mode = tuning_mode(self.order)
        enforce = self.spec["tuning"].get("miopen_find_enforce")
        self.overrides = {compiler.find_enforce: str(enforce)} if enforce is not None and compiler.find_enforce else {}
        self.folder = self.children.folder / "tuning"
        self.work = Work()
        """What was done so far."""
        self.cut = False
        """Whether the budget ended before the tuning did."""
        self.slices: list[dict[str, Any]] = []
        """The model's slices, `{key, count}`."""
        self._deadline = time.monotonic() + budget if budget else None
        self._database = database
        self._session = {"session": session, "worker": worker, "job": job, "identifier": self.order["identifier"]}
        self._collect_seconds = collect_seconds
        self.proof = self.children.folder / "proof"
        """Empty databases, with which the tuned program is measured: it must need none, and leave none."""
        self.measuring = self.mode.reading(str(self.proof))
        """The environment of the children that measure."""
        self.untuned = self.children.folder / "untuned" / steps.program.name
        self.untuned_compiled: dict[str, Any] = {}
        self.measured: list[dict[str, Any]] = []
        self.comparison: Comparison | None = None
        self._published = published
        self._against: Comparison | None = None
        self._alone: Comparison | None = None
        self._left_over = 0
        self._written = 0
        self._free = free or FreeSlots()
        self._lock = threading.RLock()
        """Held by who counts work, or talks to the collector."""
        self._lanes = {self.children.slot: Lane(self.steps, self.folder)}
        """By slot, the attempt's own first."""

    def make(self, model: Path, calibration: Path | None, samples: Path | None, evaluate: Evaluate) -> dict[str, Any]:
        """Tune, and return what the sidecar says of the faster program: the tuned one, or that without tuning.

        `evaluate` returns what it says of a program, from what its child said; it is given this tuner where the program
        is the tuned one. Raises StepEnded; what was learnt until then is kept.
        """
        before = self.children.conditions()
        compiled = self.compile(model, calibration)
        after = self.children.conditions()
        record = evaluate(compiled, self)
        is_faster = self.prove(compiled, samples)
        if not is_faster:
            # With what lies beside it: its texts, where they are asked for.
            shutil.rmtree(self.steps.program.parent)
            self.untuned.parent.rename(self.steps.program.parent)
            record = evaluate(self.untuned_compiled, None)
        record["tuning"] |= self.report(published=is_faster)
        record["tuning"]["conditions"] = [found for found in (before, after) if found]
        record["measurements"] |= self.figures()
        return record

    def compile(self, model: Path, calibration: Path | None) -> dict[str, Any]:
        """Tune what is not known yet, compile, and return what the compiling child says of the program.

        Raises StepEnded; what was learnt until then is kept.
        """
        self._model, self._calibration = self.steps.prepare(model), calibration
        self._inputs = inputs_of(self._model, calibration)
        restored = self._database.restore(self.folder)
        self._collector = Collector(
            self._database, self.folder, restored, toolchain=self.spec["toolchain"], **self._session
        )
        with self._collecting():
            with self.children.phase(Phase.TUNING):
                self._tune()
            with self.children.phase(Phase.COMPILING):
                return self._compile()

    def prove(self, compiled: Mapping[str, Any], samples: Path | None) -> bool:
        """Measure the untuned program beside the tuned one, in one process, in turns; say whether tuned is faster.

        True also where there is no untuned program to compare with. Its file is `untuned`, what its child said of it
        `untuned_compiled`. The tuned one has been measured alone before. A published program takes turns with both.
        """
        # Now, before the other program leaves something there too.
        self._written = len(read_folder(self.proof, Source("")).snapshot)
        programs = [(self.steps.program, compiled)]
        if self._compile_untuned():
            programs.append((self.untuned, self.untuned_compiled))
        if self._published:
            programs.append((self._published.program, self._published.compiled))
        if len(programs) == 1:
            return True
        with self.children.phase(Phase.MEASURING):
            request = bench_request(
                self.order, programs, samples, rounds=ROUNDS, seconds=self.children.settings.measure_seconds
            )
            read = [*(path for path, _ in programs), *([samples] if samples else [])]
            answer = self.steps.ask(request, self.measuring, read=read, write=[self.proof])
        rounds = [each["rounds"] for each in answer["programs"]]
        best = rounds[0]
        if self.untuned_compiled:
            self.measured = answer["programs"][:2]
            self.comparison = compare(rounds[0], rounds[1])
            best = rounds[0 if self.comparison.ratio >= 1 else 1]
        if self._published:
            self._against = compare(best, rounds[-1])
        if best is rounds[0] and self.mode.stores:
            self._alone = compare(rounds[0], self._with_databases(compiled, samples))
        return best is rounds[0]

    def _with_databases(self, compiled: Mapping[str, Any], samples: Path | None) -> Rounds:
        """Measure the tuned program in a process that has all that tuned it."""
        with self.children.phase(Phase.MEASURING):
            seconds = self.children.settings.measure_seconds
            request = bench_request(
                self.order, [(self.steps.program, compiled)], samples, rounds=ROUNDS, seconds=seconds
            )
            read = [self.steps.program, *([samples] if samples else [])]
            answer = self.steps.ask(request, self.mode.reading(str(self.folder)), read=read, write=[self.folder])
        rounds: Rounds = answer["programs"][0]["rounds"]
        return rounds

    def _compile_untuned(self) -> bool:
        request = compile_request(self.order, self._model, self._calibration, self.untuned)
        with self.children.phase(Phase.COMPILING):
            try:
                self.untuned_compiled = self.steps.ask(
                    {**request, "tuning": {"mode": OFF}}, read=self._inputs, write=[self.untuned.parent]
                )
            except StepEnded as ended:
                if ended.failure is None or ended.failure.kind not in _REFUSED:
                    raise
                log.warning("the untuned program does not compile", reason=ended.failure.message)
        return bool(self.untuned_compiled)

    def kernels(self) -> list[Path]:
        """Return MIOpen's kernel binaries that the program took when it was measured alone."""
        return sorted(path for path in (self.proof / "kernels").rglob("*.ukdb") if path.is_file())

    def report(self, *, published: bool) -> dict[str, Any]:
        """Return what the sidecar says of the tuning; `published` is whether it is the tuned program."""
        work = self.work
        return {
            "mode": self.spec["tuning"]["mode"],
            "operations": work.known + work.tuned + work.untunable + self._left_over,
            **{name: getattr(work, name) for name in ("known", "tuned", "untunable", "seconds", "saved")},
            "finished": not self.cut,
            "published": "tuned" if published else "untuned",
            "written": self._written,
            **self._carried(),
        }

    def _carried(self) -> dict[str, Any]:
        """Say whether the file carries its tuning: as fast with empty databases, and nothing written into them."""
        if self._alone is None:
            return {}
        as_fast = self._alone.high >= 1 / (1 + NOISE)
        if not as_fast or self._written:
            log.warning("the program does not carry its tuning", ratio=self._alone.ratio, written=self._written)
        return {
            "carried": as_fast and not self._written,
            "alone": {"ratio": self._alone.ratio, "interval": [self._alone.low, self._alone.high]},
        }

    def figures(self) -> dict[str, Any]:
        """Return what the sidecar's measurements say of the programs that took turns."""
        against = (
            {"against": {"key": self._published.key, **self._against.as_dict()}}
            if self._published and self._against
            else {}
        )
        if self.comparison is None:
            return against
        tuned, baseline = (distribution([run for runs in each["rounds"] for run in runs]) for each in self.measured)
        return {
            "tuned": _latency(tuned),
            "baseline": _latency(baseline),
            "ratio": self.comparison.ratio,
            "interval": [self.comparison.low, self.comparison.high],
            **against,
        }

    def first_run_warm(self) -> float:
        """Return the seconds of the tuned program's first run in a process that found its kernel binaries."""
        return float(self.measured[0]["first"][0])

    # --- slices -------------------------------------------------------------------------------------------------

    def _tune(self) -> None:
        missing = []
        for cut in self._cut():
            piece = Slice(slice_key(self.spec, cut["signature"]), cut["operations"] * cut["count"], cut)
            self.slices.append({"key": piece.key, "count": cut["count"]})
            if not self._is_known(piece):
                missing.append(piece)
        # In an order of its own, an attempt that tunes the same slices elsewhere meanwhile leaves most of them to us.
        missing.sort(key=lambda piece: digest_of([self._session["session"], piece.key]))
        self._fan_out = FanOut(self._free, self.children.slot, self._tune_slice)
        self._begun, self._count = 0, len(missing)
        try:
            self._fan_out.run(missing)
        finally:
            self._gather_logs()

    def _is_known(self, piece: Slice) -> bool:
        """Say whether the database has a slice by now; count it where it does."""
        entry = self._collector.slices.get(piece.key)
        if entry:
            self.work += Work(known=piece.operations, saved=float(json.loads(entry[0])["seconds"]))
        return entry is not None

    def _cut(self) -> list[dict[str, Any]]:
        """Return the model's slices; none where it cannot be cut, which is then tuned as a whole."""
        if self.order["model"]["format"] != "onnx":
            return []
        folder = self.folder.with_name("slices")
        folder.mkdir()
        try:
            found = self.steps.ask(slice_request(self.order, self._model, folder), read=self._inputs, write=[folder])
        except StepEnded as ended:
            if ended.failure is None or ended.failure.kind not in _REFUSED:
                raise
            log.warning("model cannot be cut into slices, tuning it as a whole", reason=ended.failure.message)
            return []
        slices: list[dict[str, Any]] = found["slices"]
        return slices

    def _tune_slice(self, slot: Slot, piece: Slice) -> None:
        """Tune a slice in a slot; called by a thread for each slot."""
        with self._lock:
            lane = self._lane(slot)
            self._begun += 1
            self._prepare(lane)
            if self._is_known(piece):
                return
            if self._out_of_budget():
                self._leave(piece)
                return
            self._say(piece.operations)
            anything, before = bool(self._collector.slices), lane.learnt
        request = tune_request(self.order, piece.cut, database=lane.folder, key=piece.key)
        ended: StepEnded | None = None
        began = time.monotonic()
        try:
            self._ask(lane, request, read=[Path(piece.cut["path"]).parent], quiet=True)
        except StepEnded as error:
            ended = error
        seconds = round(time.monotonic() - began, 3)
        finished = {} if ended else {piece.key: {"operations": piece.operations, "seconds": seconds}}
        with self._lock:
            self.work = replace(self.work, seconds=round(self.work.seconds + seconds, 3))
            self._collect(lane, finished)
            if ended:
                self._tidy(lane)
                self._judge(piece, ended)
            elif lane.learnt > before:
                self.work += Work(tuned=piece.operations)
            elif anything:
                self.work += Work(known=piece.operations)  # Slices of another cut had the same operations.
            else:
                self.work += Work(untunable=piece.operations)

    def _judge(self, piece: Slice, ended: StepEnded) -> None:
        """Count a slice that was not tuned to its end. Raises StepEnded where the whole cannot go on."""
        if self._out_of_budget() and _is_time_limit(ended):
            self._leave(piece)
        elif ended.failure is not None and ended.failure.kind in _REFUSED:
            log.info("slice cannot be tuned", slice=piece.key, reason=ended.failure.message)
            self.work += Work(untunable=piece.operations)
        else:
            self._begun -= 1  # The attempt's own slot does it again.
            raise ended

    def _leave(self, piece: Slice) -> None:
        """Leave a slice untuned: the budget is over."""
        self.cut = True
        self._left_over += piece.operations

    def _lane(self, slot: Slot) -> Lane:
        """Return what tunes in a slot."""
        if slot not in self._lanes:
            steps = self.steps.beside(slot, self.children.folder / f"beside-{len(self._lanes)}")
            self._lanes[slot] = Lane(steps, steps.children.folder / "tuning")
        return self._lanes[slot]

    def _gather_logs(self) -> None:
        """Add what children in borrowed slots said to the attempt's log."""
        with self.children.log_path.open("ab") as whole:
            for slot, lane in [*self._lanes.items()][1:]:
                whole.write(f"\nslices that were tuned on {_place(slot)}:\n".encode())
                with lane.steps.children.log_path.open("rb") as log_:
                    shutil.copyfileobj(log_, whole)

    # --- the whole ----------------------------------------------------------------------------------------------

    def _compile(self) -> dict[str, Any]:
        def request(database: Path, **tuning: Any) -> dict[str, Any]:
            whole = compile_request(self.order, self._model, self._calibration, self.steps.program)
            tuning = {**whole["tuning"], "slices": self.slices, **tuning}
            return {**whole, "tuning": tuning, "database": str(database)}

        own = self._lanes[self.children.slot]
        with self._lock:
            self._prepare(own)
            self._tidy(own)
        if not self.cut:
            try:
                return self._ask(own, request(self.folder), read=self._inputs, write=[self.steps.program.parent])
            except StepEnded as ended:
                if not (self._out_of_budget() and _is_time_limit(ended)):
                    raise
                self.cut = True
        # From a copy: what the compiler now chooses in a hurry would stop every later search for something better.
        copy = self.folder.with_name("tuning-copy")
        write_folder(read_folder(self.folder, Source("")).snapshot, copy)
        return self.steps.ask(
            request(copy, **dict.fromkeys(self.mode.arguments, False)),
            self.mode.reading(str(copy)),
            read=self._inputs,
            write=[self.steps.program.parent, copy],
        )

    # --- tools --------------------------------------------------------------------------------------------------

    def _ask(
        self,
        lane: Lane,
        request: Mapping[str, Any],
        *,
        read: Sequence[Path],
        write: Sequence[Path] = (),
        quiet: bool = False,
    ) -> dict[str, Any]:
        """Ask a child that tunes into a lane's folder, within the budget."""
        return lane.steps.ask(
            request,
            {**self.mode.searching(str(lane.folder)), **self.overrides},
            read=read,
            write=[*write, lane.folder],
            seconds=max(self._deadline - time.monotonic(), 0.001) if self._deadline else 0.0,
            quiet=quiet,
        )

    def _out_of_budget(self) -> bool:
        return self._deadline is not None and time.monotonic() >= self._deadline

    def _say(self, operations: int) -> None:
        known, done = self.work.known, self.work.known + self.work.tuned + self.work.untunable
        detail = f"slice {self._begun} of {self._count}: {operations} operations; {done} done, {known} known before"
        if self._fan_out.slots > 1:
            kind = "GPUs" if self.children.slot.gpu else "slots"
            detail += f"; {self._fan_out.slots} {kind} at work"
        self.children.on_phase(Phase.TUNING, (self._begun - 1) / self._count, detail)

    def _tidy(self, lane: Lane) -> None:
        """Write a folder anew where a child left something broken or undecided, on which the next would trip."""
        found = read_folder(lane.folder, Source(""))
        if found.dropped.nulls or found.dropped.broken:
            for path in lane.folder.iterdir():
                if path.is_file():
                    path.unlink()
            write_folder(found.snapshot, lane.folder)

    def _prepare(self, lane: Lane) -> None:
        """Bring what other slots and other attempts learnt into a lane's folder."""
        with self._patiently():
            self._collector.follow()
        self._collector.prepare(lane.folder)

    @contextmanager
    def _collecting(self) -> Iterator[None]:
        """Commit what children learn, every minute while the block runs and when it ends, however it ends."""
        ended = threading.Event()

        def collect() -> None:
            while not ended.wait(self._collect_seconds):
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
            with self._patiently():
                self._collector.finish(self.work)

    def _collect(self, lane: Lane, finished: Mapping[str, Any] | None = None) -> None:
        """Commit what is new in a lane's folder, and which slices were finished there."""
        lane.learnt += self._collector.look(lane.folder, self.work, finished)
        with self._patiently():
            self._collector.commit(self.work)

    @contextmanager
    def _patiently(self) -> Iterator[None]:
        """Go on where storage is away: that costs nothing yet, the next call does the same again."""
        try:
            yield
        except FarmFault as error:
            log.warning("the tuning database is away, going on without it", error=error.message)


def _place(slot: Slot) -> str:
    return slot.gpu or f"CPUs {', '.join(map(str, slot.cpus))}"


def _latency(measured: Mapping[str, Any]) -> dict[str, Any]:
    names = {"p50": "median", "p90": "p90", "p99": "p99", "minimum": "minimum", "repeats": "repeats"}
    return {names[name]: value for name, value in measured.items() if name in names}


def _is_time_limit(ended: StepEnded) -> bool:
    return ended.failure is not None and ended.failure.kind is FailureKind.TIME_LIMIT
