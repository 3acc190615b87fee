"""What a run of the chaos suite measured: `chaos-report.json`, the same as a table, and the recovery times drawn."""

from __future__ import annotations

import json
import math
import os
import platform
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from farm.results import pictures

COUNTS = Path(__file__).with_name("counts.toml")


@dataclass
class Fault:
    """One fault: what must hold, the counts of this run, and what it came to."""

    name: str
    title: str
    passes: str
    counts: dict[str, int]
    full: dict[str, int]
    alone: bool = True
    """Whether nothing else runs meanwhile: else how many seconds something took says nothing of the farm."""
    figures: dict[str, Any] = field(default_factory=dict)
    recoveries: list[float] = field(default_factory=list)
    """Seconds from each fault until what it stopped went on."""
    seconds: float = 0.0
    passed: bool = False
    why: str = ""

    @property
    def count(self) -> SimpleNamespace:
        """The counts by name."""
        return SimpleNamespace(**self.counts)

    def measured(self, **figures: Any) -> None:
        """Note what was measured; later figures of a name replace earlier ones."""
        self.figures |= {
            name: round(value, 2) if isinstance(value, float) else value for name, value in figures.items()
        }

    def recovered(self, seconds: Sequence[float], limit: float) -> None:
        """Note recovery times, and require all of them within `limit` seconds where it runs alone."""
        self.recoveries += seconds
        if seconds:
            middle = sorted(seconds)[len(seconds) // 2]
            self.measured(recoveries=len(seconds), recovery_median=middle, recovery_max=max(seconds))
        assert not self.alone or all(value <= limit for value in seconds), (
            f"recovered after {max(seconds):.1f} s, not {limit} s"
        )

    def ended(self, *, passed: bool, why: str) -> None:
        """Note how the test ended, and why it failed; a failure stays one."""
        self.passed = passed and not self.why
        self.why = self.why or why

    @contextmanager
    def timed(self) -> Iterator[None]:
        start = time.monotonic()
        yield
        self.seconds = round(time.monotonic() - start, 1)

    def as_dict(self) -> dict[str, Any]:
        return {
            "fault": self.name,
            "title": self.title,
            "passes": self.passes,
            "counts": self.counts,
            "full_counts": self.full,
            "measured": self.figures,
            "recovery_seconds": [round(value, 3) for value in self.recoveries],
            "seconds": self.seconds,
            "passed": self.passed,
            "why": self.why,
        }


def load_faults(share: float) -> dict[str, Fault]:
    """Read `counts.toml`; with a share of 0 the counts of the slice, which are empty where a fault is not in it.

    The slice runs while other tests do.
    """
    faults = {}
    for name, row in tomllib.loads(COUNTS.read_text()).items():
        part = row.get("slice", {})
        counts = {key: max(math.ceil(value * share), part.get(key, 1)) for key, value in row["full"].items()}
        faults[name] = Fault(name, row["fault"], row["passes"], counts if share else part, row["full"], bool(share))
    return faults


def write_report(folder: Path, faults: Sequence[Fault], *, share: float) -> None:
    """Write `chaos-report.json`, `chaos-report.md` and `recovery.svg`; rows that were not run again stay."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "chaos-report.json"
    rows = {row["fault"]: row for row in json.loads(path.read_text())["faults"]} if path.exists() else {}
    rows |= {fault.name: fault.as_dict() for fault in faults}
    order = list(load_faults(1))
    found = [rows[name] for name in order if name in rows]
    machine = {"system": platform.platform(), "cores": os.cpu_count(), "python": platform.python_version()}
    path.write_text(json.dumps({"share": share, "machine": machine, "faults": found}, indent=1))
    (folder / "chaos-report.md").write_text(table(found))
    series = {f"{row['fault']}: {row['title']}": row["recovery_seconds"] for row in found}
    shares(
        folder / "recovery.svg",
        title="Until work goes on after a fault",
        x="seconds",
        y="share of the faults",
        series=series,
    )


def shares(path: Path, *, title: str, x: str, y: str, series: Mapping[str, Sequence[float]]) -> None:
    """Draw how values are distributed: for each series the share of its values that are at most `x`, as steps.

    The legend names the number of values, their median and the largest. As `curves` of `farm.results.pictures`
    otherwise.
    """
    figure, axes = pictures._figure(title, x, y)
    for name, values in series.items():
        if values:
            ordered = sorted(values)
            middle, count = ordered[(len(ordered) - 1) // 2], len(ordered)
            label = f"{name} ({count}: median {middle:.2f}, largest {ordered[-1]:.2f})"
            steps = [0.0, *((number + 1) / count for number in range(count))]
            axes.step([ordered[0], *ordered], steps, where="post", label=pictures._literal(label))
    axes.set_ylim(0, 1.02)
    axes.set_xlim(left=0)
    if axes.lines:
        # Below the axes: its lines are long, and steps go everywhere.
        figure.legend(loc="outside lower left", frameon=False, fontsize="small")
    path.write_bytes(pictures._written(figure))


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows as a Markdown table."""
    lines = [
        "| # | fault | count | passes when | measured | s | passed |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        count = ", ".join(
            f"{value} {name}" + (f" of {row['full_counts'][name]}" if row["full_counts"].get(name) != value else "")
            for name, value in row["counts"].items()
        )
        figures = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in row["measured"].items())
        passed = "yes" if row["passed"] else f"**no**: {row['why']}".replace("|", "\\|")
        cells = [row["fault"], row["title"], count, row["passes"], figures, f"{row['seconds']:.0f}", passed]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
