"""Pipeline: takes one cell from its model to a measured program, and returns what is known of that program.

The executor of a worker, `farm optimize`, the health probe and `farm reproduce` all use it. They differ in where the
inputs come from and in what happens to the program; both stay outside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from farm.compiling.program_record import ProgramRecord
from farm.compiling.steps import ReferenceCache, Steps
from farm.jobs.state import Phase
from farm.runner.documents import CompileAnswer


@dataclass(frozen=True, slots=True)
class InputFiles:
    """The files that a cell is made from, where its children can read them.

    `reference` has the reference outputs if they were made before.
    """

    model: Path
    calibration: Path | None = None
    samples: Path | None = None
    reference: Path | None = None


@dataclass(slots=True)
class Company:
    """Whether other attempts ran on the machine while a program was measured."""

    shared: bool = False


@contextmanager
def alone() -> Iterator[Company]:
    """Measure without looking for other attempts."""
    yield Company()


class ProgramTuner(Protocol):
    """Searches for a faster program: `farm.tuning.tuner.Tuner`. The pipeline calls it; it never calls back."""

    @property
    def measuring(self) -> Mapping[str, str]:
        """The environment of the child that measures the tuned program."""

    @property
    def proof(self) -> Path:
        """The folder in which that child may write."""

    def compile(self, model: Path, calibration: Path | None) -> CompileAnswer:
        """Tune, compile with what was found, and return the child's answer."""

    def choose(self, compiled: CompileAnswer, samples: Path | None, *, runs: bool) -> CompileAnswer | None:
        """Return None if the tuned program stays.

        If the untuned program is faster, put it in the place of the tuned one and return its child's answer.
        """

    def describe(self, record: ProgramRecord) -> None:
        """Add to a program's record what the tuning found."""


@dataclass
class Pipeline:
    """One cell on its way from the model to a program. Every method raises StepEnded if a child gives no answer."""

    steps: Steps
    inputs: InputFiles
    tuner: ProgramTuner | None = None
    references: ReferenceCache | None = None
    """Reference outputs of earlier attempts."""
    measuring: Callable[[], AbstractContextManager[Company]] = alone
    """Opened around each measurement."""
    _reference: Path | None = field(default=None, init=False)

    def run(self) -> ProgramRecord:
        """Make and measure the program; return what its sidecar says of it. The program is at `steps.program`."""
        if self.steps.order.get("cross"):
            # The GPU is not here: nothing can load the program, so nothing is measured or compared.
            return self.steps.record(self.compile(), None, shared=False)
        reference = self.reference()
        if self.tuner:
            return self._tune(self.tuner, reference)
        return self._measure(self.compile(), reference)

    def reference(self) -> Path:
        """Return the sample inputs with their right outputs; make them once if they are not among the inputs."""
        path = self._reference or self.inputs.reference
        if path is None:
            with self.steps.children.phase(Phase.VERIFYING):
                path = self.steps.reference(self.inputs.model, self.inputs.samples, self.references)
        self._reference = path
        return path

    def compile(self) -> CompileAnswer:
        """Compile the model without tuning it first, and return the child's answer."""
        with self.steps.children.phase(Phase.COMPILING):
            return self.steps.compile(self.inputs.model, self.inputs.calibration)

    def _tune(self, tuner: ProgramTuner, reference: Path) -> ProgramRecord:
        compiled = tuner.compile(self.inputs.model, self.inputs.calibration)
        record = self._measure(compiled, reference, tuner)
        runs = record["measurements"]["latency"] is not None
        untuned = tuner.choose(compiled, self.inputs.samples, runs=runs)
        if untuned:
            record = self._measure(untuned, reference)
        tuner.describe(record)
        return record

    def _measure(self, compiled: CompileAnswer, reference: Path, tuner: ProgramTuner | None = None) -> ProgramRecord:
        """Load, verify and measure the program, and return its record."""
        with self.measuring() as company, self.steps.children.phase(Phase.MEASURING):
            evaluated = self.steps.evaluate(
                compiled, reference, tuner.measuring if tuner else None, write=[tuner.proof] if tuner else ()
            )
        return self.steps.record(compiled, evaluated, shared=company.shared)
