"""Children: run requests in sealed child processes, one after the other, under the limits of one attempt."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from farm.compiling.alone import Clock, host_at
from farm.compiling.child_process import Seal, run_child
from farm.compiling.failures import ChildLimits, Failure, classify
from farm.compiling.installations import Installation
from farm.compiling.slots import ANYWHERE, Slot
from farm.compiling.templates import Templates
from farm.files import tree_size
from farm.jobs.state import AttemptLimits, Phase
from farm.runner.documents import PhaseMessage, Request
from farm.wire.program import Conditions

OnPhase = Callable[[Phase, float | None, str], None]
"""Hears what an attempt does: its phase, its progress as a share of 1 (None if unknown), and a detail."""


LARGEST = 1 << 62
"""Largest size of a file without a limit."""


@dataclass(frozen=True, slots=True)
class StepSettings:
    """The settings of a machine that steps use; the farm's settings have the same names. 0 means no limit."""

    threads_per_slot: int = 1
    measure_seconds: float = 3.0
    """How long a program is run again and again."""
    lock_dir: str = ""
    """Folder of the lock files by which what measures on a host is alone; empty: the system's temporary one."""
    hang_seconds: float = 0.0
    """How long a child may show no sign of life."""
    disk_limit: int = 0
    """Bytes that the children of an attempt may write together."""
    process_limit: int = 0
    """Processes and threads of a child."""
    migraphx_path: str = ""
    """Where MIGraphX's Python module is, if that is not where the interpreter looks."""
    migraphx_python: str = ""
    """Interpreter for MIGraphX's children; empty: this one."""

    @classmethod
    def of(cls, settings: object) -> StepSettings:
        """Return those of the farm's settings."""
        return cls(**{each.name: getattr(settings, each.name) for each in fields(cls)})


class StepEnded(Exception):
    """A step did not finish: `failure` says why; None if it was cancelled."""

    def __init__(self, failure: Failure | None) -> None:
        super().__init__(f"{failure.kind}: {failure.message}" if failure else "cancelled")
        self.failure = failure


@dataclass
class Children:
    """Runs requests in children, one after the other, in one folder; the time limit holds for all of them together.

    They run in `slot`; `environment` is added to theirs. `in_slot` returns children that run in another slot.
    """

    folder: Path
    settings: StepSettings
    limits: AttemptLimits
    on_phase: OnPhase
    cancelled: threading.Event
    slot: Slot = ANYWHERE
    environment: Mapping[str, str] = field(default_factory=dict)
    conditions: Callable[[], Conditions | None] = lambda: None
    """Returns the state of the slot's GPU; `look` calls it."""
    began: float = field(default_factory=time.monotonic)
    """When it all began; later by the time for which it waited for object storage."""
    clock: Clock = field(default_factory=Clock)
    """Stands still while its child is paused."""
    shared: bool = False
    """Whether a child of this slot measured while others ran on the host, or may have."""
    memory: list[int] = field(default_factory=list)
    """Peaks in bytes, of every child."""
    written: set[Path] = field(default_factory=set)
    """The folders in which children wrote."""
    within: Path | None = None
    """The folder in which all children of the attempt write; None: `folder`."""
    templates: Templates | None = None
    """What children are forked from; None: they start cold."""

    def __post_init__(self) -> None:
        self.within = self.within or self.folder
        self.log_path = self.folder / "log.txt"
        self.phases: dict[str, float] = {}
        self.started_at = datetime.now(UTC)
        self.log_path.touch()

    def in_slot(self, slot: Slot, folder: Path) -> Children:
        """Return children of the same attempt that run in another slot at the same time, with a log of their own.

        The time limit holds for all of them together, the memory limit for each.
        """
        folder.mkdir()
        return replace(self, slot=slot, folder=folder, clock=Clock(self.clock.lost))

    @property
    def seconds(self) -> float:
        """Seconds since it all began, without those in which its children were paused."""
        return round(time.monotonic() - self.began - self.clock.lost, 3)

    @property
    def largest(self) -> int:
        """Bytes of a file that a child may have made."""
        return self.settings.disk_limit or LARGEST

    @property
    def peak_memory(self) -> int:
        """The most memory that a child took, in bytes."""
        return max(self.memory, default=0)

    def look(self, when: str) -> Conditions | None:
        """Return the state of the slot's GPU while no child runs; log that others use it, at the moment `when`."""
        found = self.conditions()
        processes = found["processes"] if found else None
        if processes and processes["count"]:
            with self.log_path.open("a") as log:
                held = f"processes: {processes['count']}, memory: {processes['memory'] / 1e6:.0f} MB"
                log.write(f"{when}: others use the GPU ({held}); times are rough, measure again when it is idle\n")
        return found

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """Report that a phase begins, and measure its time."""
        if self.cancelled.is_set():
            raise StepEnded(None)
        self.on_phase(phase, None, "")
        with self.log_path.open("a") as log:
            log.write(f"== {phase} ==\n")
        start = self.seconds
        try:
            yield
        finally:
            with self.log_path.open("a") as log:
                log.write(f"-- {phase}: {self.seconds - start:.2f} s --\n")
            self.phases[phase] = round(self.phases.get(phase, 0) + self.seconds - start, 3)

    def ask(
        self,
        request: Request,
        *,
        read: Sequence[Path] = (),
        write: Sequence[Path] = (),
        environment: Mapping[str, str] | None = None,
        seconds: float = 0.0,
        quiet: bool = False,
        threads: int = 0,
        installation: Installation | None = None,
    ) -> Any:
        """Run one request in a sealed child; return its answer: the document of the request's action, checked.

        The child may read the files and folders in `read` and write to those in `write`, which are made if they are
        missing. `environment` is added to that of all children. The child gets `seconds` at most (0: what is left) and
        `threads` (0: those of a slot). With `quiet` its progress is not reported. `installation` is used
        instead of the compiler's own. Raises StepEnded if there is no answer.
        """
        for folder in write:
            folder.mkdir(parents=True, exist_ok=True)
        others = sum(map(tree_size, self.written.difference(write)))
        self.written.update(write)
        left = max(self.limits["time"] - self.seconds, 0.001) if self.limits["time"] else seconds
        left = min(left, seconds) if seconds else left
        chosen = installation or self._installation(request["compiler"])
        whole: Request = {
            **request,
            "threads": threads or self.settings.threads_per_slot,
            "gpu": self.slot.gpu,
            "maker": self.slot.maker,
            "cpus": self.slot.cpus,
            "search": [chosen.folder] if chosen.folder else [],
        }
        end = run_child(
            whole,
            log_path=self.log_path,
            python=chosen.python,
            environment={**self.environment, **(environment or {})},
            limits=ChildLimits(
                time=left,
                whole=0.0 if left == seconds else self.limits["time"],
                memory=self.limits["memory"],
                hang=self.settings.hang_seconds,
                waiting=1.0 if self.slot.gpu else 0.0,
                disk=self.settings.disk_limit,
                written=others,
                processes=self.settings.process_limit,
            ),
            folder=self.folder,
            on_message=None if quiet else self._report,
            cancelled=self.cancelled,
            seal=Seal(read=read, write=write, within=self.within),
            host=host_at(self.settings.lock_dir),
            clock=self.clock,
            templates=self.templates,
        )
        self.shared = self.shared or end.shared
        self.memory.append(end.memory)
        if end.result is not None and end.ok:
            return end.result
        raise StepEnded(classify(end))

    def _installation(self, compiler: str) -> Installation:
        """Return the node's own installation of a compiler."""
        if compiler != "migraphx":
            return Installation("")
        return Installation(self.settings.migraphx_python, self.settings.migraphx_path)

    def _report(self, message: PhaseMessage) -> None:
        self.on_phase(Phase(message["phase"]), message["progress"], message["detail"])
