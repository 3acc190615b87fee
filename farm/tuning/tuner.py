"""Tuner: tunes one model slice by slice, and keeps all results, whatever happens to the attempt.

    restore the database into a private folder
    for each slice that the database does not have: tune it in a child, commit the new records
    compile the whole model with these records; commit what this compile still tunes

If an attempt dies, its finished slices stay in the database, and the next attempt on any node starts with them.
The untuned and the tuned program are measured in turns, and the faster one is published.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from farm.compiling.asking import MadeProgram, compile_request
from farm.compiling.failures import REFUSED
from farm.compiling.pipeline import Databases, StepEnded, inputs_of, is_shared
from farm.files import is_plain, remove_tree, take
from farm.jobs.state import Phase
from farm.logging import get_logger
from farm.results.speed import Comparison, compare
from farm.runner.documents import CompileAnswer, Request, TimedProgram, TuningWish
from farm.targets.compilers import OFF
from farm.tuning.formats import read_folder
from farm.tuning.records import RecordSource
from farm.tuning.search import Search
from farm.wire.program import Conditions, Measurements, ProgramRecord, TuningFacts

log = get_logger(__name__)

ROUNDS = 10  # In which the tuned program and the untuned one take turns.
NOISE = 0.05  # How far one program's speed differs in two processes: memory lies elsewhere, and they take no turns.

_KERNELS = re.compile(r"\w[\w.+-]{0,127}", re.ASCII)
"""What MIOpen calls its kernel binaries: names for an archive that others unpack."""


class Tuner:
    """Tunes and compiles the model of one cell against the database of its pool, device and mode."""

    def __init__(self, search: Search, *, published: MadeProgram | None = None) -> None:
        """`published` is a program that takes turns with this one too."""
        self.search = search
        self.steps, self.children, self.order, self.spec = search.steps, search.children, search.order, search.spec
        self.mode, self.folder = self.search.mode, self.search.folder
        self.proof = self.children.folder / "proof"
        """Empty databases, with which the tuned program is measured: it must need none, and leave none."""
        self.measuring = Databases(self.mode.reading(str(self.proof)), [self.proof])  # Those of children that measure.
        self.untuned = self.children.folder / "untuned" / self.steps.program.name
        self.untuned_compiled: CompileAnswer | None = None
        self.measured: Sequence[TimedProgram] = []
        self.comparison: Comparison | None = None
        self._published = published
        self._against: Comparison | None = None
        self._alone: Comparison | None = None
        self._written = 0
        self.kernel_cache: Path | None = None  # The archive of MIOpen's kernels that the chosen program takes, if any.
        self._is_faster = True
        self._conditions: list[Conditions] = []
        self._turns: Conditions | None = None

    def compile(self, model: Path, calibration: Path | None) -> CompileAnswer:
        """Tune what is not known yet, compile, and return the compiling child's answer.

        Raises StepEnded; results until then are kept.
        """
        before = self.children.look("before tuning")
        self._model, self._calibration = self.steps.prepare(model), calibration
        self._inputs = inputs_of(self._model, calibration)
        with self.search.open():
            with self.children.phase(Phase.TUNING):
                self.search.tune(self._model, self._inputs)
            with self.children.phase(Phase.COMPILING):
                compiled = self._compile()
        after = self.children.look("after tuning")
        self._conditions = [found for found in (before, after) if found]
        return compiled

    def choose(self, compiled: CompileAnswer, samples: Path | None, *, runs: bool) -> CompileAnswer | None:
        """Put the untuned program in the place of the tuned one if it is faster; return its child's answer, else None.

        The tuned one stays if it cannot be run from here (`runs`). Raises StepEnded, OSError.
        """
        kernels = self.kernels()  # Before other programs leave theirs in the same folder.
        self.kernel_cache = self._pack(kernels) if kernels else None
        self._is_faster = self.prove(MadeProgram.of(self.steps.program, compiled), samples) if runs else True
        self._turns = self.children.look("after the turns of measuring")
        if self._is_faster:
            return None
        self.kernel_cache = None
        # The folder also has the program's texts, if `debug` asked for them.
        remove_tree(self.steps.program.parent)
        self.untuned.parent.rename(self.steps.program.parent)
        return self.untuned_compiled

    def describe(self, record: ProgramRecord) -> None:
        """Add to the record of the chosen program what the tuning found, and how the two programs compare."""
        record["tuning"] |= self.report(published=self._is_faster)
        record["tuning"]["conditions"] = self._conditions
        measured: Measurements = {**record["measurements"], **self.figures()}
        measured["shared"] = measured["shared"] or self.children.shared
        record["measurements"] = measured
        if self._turns:
            measured["conditions"] = [*measured.get("conditions", ()), self._turns]
            measured["shared"] = measured["shared"] or is_shared(self._turns)

    def _compile(self) -> CompileAnswer:
        def request(database: Path, **changed: Any) -> Request:
            whole = compile_request(self.order, self._model, self._calibration, self.steps.program)
            wish: TuningWish = {**whole["tuning"], "slices": self.search.slices, **changed}  # type: ignore[typeddict-item]
            return {**whole, "tuning": wish, "database": str(database)}

        write = [self.steps.program.parent]
        compiled: CompileAnswer | None = self.search.ask(request(self.folder), read=self._inputs, write=write)
        if compiled:
            return compiled
        # From a copy: what the compiler now chooses in a hurry would stop every later search for something better.
        copy = self.folder.with_name("tuning-copy")
        self.search.copy(copy)
        compiled = self.steps.ask(
            request(copy, **dict.fromkeys(self.mode.arguments, False)),
            self.mode.reading(str(copy)),
            read=self._inputs,
            write=[*write, copy],
        )
        assert compiled
        return compiled

    def prove(self, tuned: MadeProgram, samples: Path | None) -> bool:
        """Measure the tuned and the untuned program in turns, in one process; return whether the tuned one is faster.

        It counts as faster if there is no untuned program, whose file is `untuned` and whose child's answer is
        `untuned_compiled`. A published program takes turns with both.
        """
        # Now, before the other program leaves something there too.
        self._written = len(read_folder(self.proof, RecordSource("")).snapshot)
        programs = [tuned]
        if untuned := self._compile_untuned():
            programs.append(MadeProgram.of(self.untuned, untuned))
        if self._published:
            programs.append(self._published)
        if len(programs) == 1:
            return True
        bench = partial(self.steps.bench, rounds=ROUNDS, seconds=self.children.settings.measure_seconds)
        with self.children.phase(Phase.MEASURING):
            timed = bench(programs, samples, databases=self.measuring)
        rounds = [each["rounds"] for each in timed]
        best = rounds[0]
        if self.untuned_compiled:
            self.measured = timed[:2]
            self.comparison = compare(rounds[0], rounds[1])
            best = rounds[0 if self.comparison.ratio >= 1 else 1]
        if self._published:
            self._against = compare(best, rounds[-1])
        if best is rounds[0] and self.mode.stores:
            whole = Databases(self.mode.reading(str(self.folder)), [self.folder])  # All that tuned it.
            with self.children.phase(Phase.MEASURING):
                self._alone = compare(rounds[0], bench([tuned], samples, databases=whole)[0]["rounds"])
        return best is rounds[0]

    def _compile_untuned(self) -> CompileAnswer | None:
        request = compile_request(self.order, self._model, self._calibration, self.untuned)
        with self.children.phase(Phase.COMPILING):
            try:
                self.untuned_compiled = self.steps.ask(
                    {**request, "tuning": {"mode": OFF}}, read=self._inputs, write=[self.untuned.parent]
                )
            except StepEnded as ended:
                if ended.failure is None or ended.failure.kind not in REFUSED:
                    raise
                log.warning("the untuned program does not compile", reason=ended.failure.message)
        return self.untuned_compiled

    def kernels(self) -> list[Path]:
        """Return MIOpen's kernel binaries that the program took when it was measured alone."""
        found = (self.proof / "kernels").rglob("*.ukdb")
        return sorted(path for path in found if _KERNELS.fullmatch(path.name) and is_plain(path.lstat()))

    def _pack(self, kernels: Sequence[Path]) -> Path:
        """Put kernel binaries, which a child has written, into one archive by their names. Raises OSError."""
        path, part = self.children.folder / "kernels.zip", self.children.folder / "kernel"
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for kernel in kernels:
                take(kernel, part, self.children.largest, within=self.children.folder)
                archive.write(part, kernel.name)
                part.unlink()
        return path

    def report(self, *, published: bool) -> TuningFacts:
        """Return the sidecar's entry for the tuning; `published` is whether the tuned program is published."""
        work = self.search.work
        counts: Any = {name: getattr(work, name) for name in ("known", "tuned", "untunable", "seconds", "saved")}
        return {
            "mode": self.spec["tuning"]["mode"],
            "operations": work.known + work.tuned + work.untunable + self.search.left_over,
            **counts,
            "database": self.search.database,
            "rows": self.search.rows,
            "finished": not self.search.cut,
            "published": "tuned" if published else "untuned",
            "written": self._written,
            **self._carried(),
        }

    def _carried(self) -> TuningFacts:
        """Return whether the file carries its tuning: as fast with empty databases, and nothing written into them."""
        if self._alone is None:
            return {}
        as_fast = self._alone.high >= 1 / (1 + NOISE)
        if not as_fast or self._written:
            log.warning("the program does not carry its tuning", ratio=self._alone.ratio, written=self._written)
        return {
            "carried": as_fast and not self._written,
            "alone": {"ratio": self._alone.ratio, "interval": [self._alone.low, self._alone.high]},
        }

    def figures(self) -> Measurements:
        """Return the sidecar's figures of the programs that took turns."""
        from farm.runner.measuring import latency_of

        figures: Measurements = {}
        if self._published and self._against:
            figures["against"] = {"key": self._published.key, **self._against.as_dict()}
        if self.comparison is not None:
            tuned, baseline = (latency_of([run for runs in each["rounds"] for run in runs]) for each in self.measured)
            figures |= {"tuned": tuned, "baseline": baseline, "ratio": self.comparison.ratio}
            figures["interval"] = [self.comparison.low, self.comparison.high]
        return figures
