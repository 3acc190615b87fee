"""Builds as pages show them: the verdict in one sentence, groups, the matrix; compared; one cell over time. Pure."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime
from functools import cached_property
from itertools import groupby, pairwise, takewhile
from operator import attrgetter
from statistics import median
from typing import Literal, NamedTuple

from farm.pages import quantities
from farm.pages.quantities import digits, duration, error, milliseconds, size
from farm.results.report import BuildView, PastCell
from farm.results.tradeoff import gains
from farm.results.verdict import BAND, SAME, CellChange, CellEnd, CellLine, Look, change, is_quiet, look_of
from farm.units import grouped, plural

SIGNS: Mapping[Look, tuple[str, str]] = {
    "compiled": ("✓", "compiled in this build"),
    "hit": ("≡", "hit: the program was there already"),
    "failed": ("✗", "failed"),
    "expected": ("~", "failed as expected"),
    "running": ("▸", "running"),
    "queued": ("·", "queued"),
    "cancelled": ("–", "cancelled"),
}
"""The sign of each look, and what it means: no state is shown by its colour alone."""

ORDER: Sequence[Look] = ("failed", "running", "queued", "cancelled", "expected", "compiled", "hit")
"""What is looked at first."""

METRICS: Mapping[str, tuple[str, str]] = {
    "latency": ("Median latency in ms", "shared"),
    "p99": ("Latency in ms that 99 % of the runs keep", "shared noisy"),
    "throughput": ("Samples a second", "shared noisy"),
    "error": ("Largest relative error of an output", "weak unverified"),
    "size": ("Size of the program", ""),
    "x fp32": ("Speed in terms of the fp32 program’s of the same target and shape", "shared noisy"),
    "list": ("One cell in a row: click a title to sort", "shared"),
}
"""What a matrix can show: in words, and what makes such figures weak."""

WEAK = {
    "shared": ("≈", "was not measured alone"),
    "noisy": ("!", "had a p99 of more than twice the median"),
    "weak": ("?", "would have passed with a constant answer"),
    "unverified": ("?", "has outputs that were compared with nothing"),
}
"""What stands before a weak figure, and what it says of a program."""

PAGE = 1000  # Cells on one page.


def said(cell: CellLine | CellEnd) -> str:
    """Return what a cell's place in the matrix says: its sign, and its failure, phase or latency in ms."""
    match cell.look:
        case "failed" | "expected":
            words = cell.kind
        case "running":
            words = cell.phase
        case _:
            words = WEAK["shared"][0] * cell.shared + milliseconds(cell.latency) if cell.latency else ""
    return f"{SIGNS[cell.look][0]} {words}".rstrip()


def figures(cells: Sequence[CellLine], metric: str) -> dict[str, str]:
    """Return what the places of cells say, with one of `METRICS`; of a model, all cells are given."""
    if metric == "latency":
        return {cell.identifier: said(cell) for cell in cells}
    gained = gains(cells)
    bases = [cell for cell in cells if cell.precision == "fp32" and metric == "x fp32"]
    rough = {(cell.model, cell.target, cell.shape): cell.marks.split() for cell in bases}
    texts = {}
    for cell in cells:
        text = _figure(cell, gained.get(cell.identifier), metric) if cell.succeeded else ""
        marks = {*cell.marks.split(), *rough.get((cell.model, cell.target, cell.shape), ())}
        weak = dict.fromkeys(WEAK[each][0] for each in METRICS[metric][1].split() if each in marks)
        texts[cell.identifier] = (
            f"{SIGNS[cell.look][0]} {''.join(weak)}{text}" if text else said(cell._replace(latency=None))
        )
    return texts


def _figure(each: CellLine, gain: float | None, metric: str) -> str:
    """Return a program's number; empty if there is none."""
    texts = {
        "p99": each.p99 and milliseconds(each.p99),
        "throughput": each.throughput and digits(each.throughput),
        "error": None if each.error is None else error(each.error),
        "size": size(each.size),
        "x fp32": gain and f"{gain:.2f}x",
    }
    return texts[metric] or ""


@dataclass(frozen=True, slots=True)
class CellFilter:
    """What a reader wants to see of a build: filters, which are all in the URL."""

    looks: tuple[str, ...] = ()
    model: str = ""
    target: str = ""
    precision: str = ""
    text: str = ""

    def __bool__(self) -> bool:
        return self != CellFilter()

    def takes(self, cell: CellLine) -> bool:
        """Whether a cell passes."""
        return (
            (not self.looks or cell.look in self.looks)
            and (not self.model or cell.model == self.model)
            and (not self.target or cell.target == self.target)
            and (not self.precision or cell.precision == self.precision)
            and (not self.text or self.text in cell.identifier)
        )


class Group(NamedTuple):
    """The cells of one model, by target: how many look how."""

    model: str
    total: int
    looks: Mapping[Look, int]
    places: Mapping[str, Mapping[Look, int]]  # The cells of each target that it has.


class MatrixRow(NamedTuple):
    """One model and shape, with its cells by column; a place can hold several, or none."""

    model: str
    shape: str
    places: Sequence[Sequence[CellLine]]


class Matrix(NamedTuple):
    """Cells by model and shape (rows), target and precision (columns)."""

    targets: Sequence[tuple[str, int]]  # Each target, with the number of its columns.
    precisions: Sequence[str]  # The precision of each column.
    rows: Sequence[MatrixRow]


class Reason(NamedTuple):
    """Why something is so, and for how many cells."""

    cells: int
    text: str


@dataclass(frozen=True, eq=False)
class ShownBuild:
    """A build with its cells. It equals only itself, so what is remembered for it holds as long as it is kept."""

    build: BuildView
    cells: Sequence[CellLine]
    position: str = ""
    """The event after which this was read: updates go on from there."""
    judged: bool = True
    """False while only the states of its cells are known: no speeds, and nothing of what its gates say."""

    def updated(self, changed: Iterable[CellLine], position: str) -> ShownBuild:
        """Return the view with some cells as they are after a later event."""
        lines = {line.identifier: line for line in changed}
        return replace(self, cells=[lines.get(cell.identifier, cell) for cell in self.cells], position=position)

    @property
    def is_open(self) -> bool:
        """Whether more will happen to it."""
        return bool(self.build["state"] != "reported")

    @cached_property
    def looks(self) -> Mapping[Look, int]:
        """How many cells look how, those that are looked at first in front."""
        return dict(ranked(Counter(cell.look for cell in self.cells)))

    @cached_property
    def groups(self) -> list[Group]:
        """Its cells by model."""
        return by_model(self.cells)

    @cached_property
    def targets(self) -> list[str]:
        """The targets of its cells."""
        return list(dict.fromkeys(cell.target for cell in self.cells))

    @cached_property
    def precisions(self) -> list[str]:
        """The precisions of its cells."""
        return list(dict.fromkeys(cell.precision for cell in self.cells))

    @cached_property
    def by_identifier(self) -> Mapping[str, CellLine]:
        """Its cells by their names."""
        return {cell.identifier: cell for cell in self.cells}

    @cached_property
    def failed(self) -> list[CellLine]:
        """What failed unexpectedly, by the farm's fault first, then what is not a gate."""
        found = [cell for cell in self.cells if cell.look == "failed"]
        return sorted(found, key=lambda cell: (not cell.by_farm, cell.is_gate))

    @cached_property
    def running(self) -> list[CellLine]:
        """What runs now."""
        return [cell for cell in self.cells if cell.look == "running"]

    def wanted(self, wanted: CellFilter) -> list[CellLine]:
        """Return the cells that pass a reader's filters."""
        return [cell for cell in self.cells if wanted.takes(cell)] if wanted else list(self.cells)

    def reasons(self) -> list[Reason]:
        """Return why cells wait, once for each reason; without the numbers that differ by one."""
        # How many jobs are ahead differs from cell to cell.
        texts = (re.sub(r"^\d+ jobs? ahead", "other jobs are ahead", cell.waiting) for cell in self.cells)
        found = Counter(filter(None, texts))
        known = [Reason(count, text) for text, count in found.most_common()]
        explained = sum(cell.look == "queued" and bool(cell.waiting) for cell in self.cells) if known else 0
        unexplained = self.looks.get("queued", 0) - explained
        return [*known, Reason(unexplained, "behind them")] if known and unexplained else known

    @cached_property
    def causes(self) -> list[Reason]:
        """What made cells be compiled, by how many; of hits it says nothing."""
        found = Counter(cell.reason for cell in self.cells if cell.reason and cell.look != "hit")
        return [Reason(count, text) for text, count in found.most_common()]

    def headline(self) -> str:
        """Return the single most important thing about the build, in one sentence."""
        build, looks = self.build, self.looks
        total = len(self.cells)
        if not self.is_open:
            return build["verdict"]["text"] if build["verdict"] else ""
        if build.get("paused"):
            return f"Paused: {plural(looks.get('queued', 0), 'cell')} of {total:,} wait until the build is resumed"
        outlook = build.get("outlook")
        if looks.get("queued") and outlook and outlook["unserved"]:
            waiting = f"{plural(looks['queued'], 'cell')} {'waits' if looks['queued'] == 1 else 'wait'}"
            if paused := outlook.get("paused"):
                return f"{waiting}: {', '.join(paused[:3])} {'is' if len(paused) == 1 else 'are'} paused"
            return f"{waiting}: no worker takes jobs of {', '.join(outlook['unserved'][:3])} now"
        if looks.get("failed"):
            start = f"{plural(looks['failed'], 'cell')} of {total:,} failed so far"
        else:
            done = sum(count for look, count in looks.items() if look not in ("running", "queued"))
            start = f"{done:,} of {plural(total, 'cell')} are done"
        eta = outlook["eta"] if outlook else None
        return f"{start}; the rest takes about {duration(eta['expected'])} more" if eta and eta["expected"] else start


def by_model(cells: Iterable[CellLine]) -> list[Group]:
    """Return cells by model: those with failures first, then in the order of the manifest."""
    groups = []
    for model, some in grouped(cells, lambda cell: cell.model).items():
        places = grouped(some, lambda cell: cell.target).items()
        looks = {target: Counter(cell.look for cell in each) for target, each in places}
        groups.append(Group(model, len(some), sum(looks.values(), Counter[Look]()), looks))
    return sorted(groups, key=lambda group: not group.looks["failed"])


def matrix(cells: Iterable[CellLine]) -> Matrix:
    """Return cells as a matrix, in their order."""
    cells = list(cells)
    known = dict.fromkeys((cell.target, cell.precision) for cell in cells)
    targets = Counter(target for target, _ in known)
    place = list(targets).index
    columns = sorted(known, key=lambda each: place(each[0]))
    rows = grouped(cells, lambda cell: (cell.model, cell.shape)).items()
    places = [grouped(some, lambda cell: (cell.target, cell.precision)) for _, some in rows]
    return Matrix(
        list(targets.items()),
        [precision for _, precision in columns],
        [
            MatrixRow(*name, [found.get(column, ()) for column in columns])
            for (name, _), found in zip(rows, places, strict=True)
        ],
    )


def ranked(looks: Mapping[Look, int]) -> Iterator[tuple[Look, int]]:
    """Yield looks with their counts, what is looked at first in front."""
    return ((look, looks[look]) for look in ORDER if looks.get(look))


# --- builds compared: two, or several next to each other --------------------------------------------------------------


class Pair(NamedTuple):
    """The same cell in both builds, and what changed."""

    before: CellLine
    after: CellLine
    found: CellChange

    @property
    def change(self) -> float:
        """How much longer a run takes now, as a share of before: 0.25 is 25 % slower."""
        return self.found.share or 0.0


@dataclass(frozen=True, slots=True)
class ComparedBuilds:
    """How a build differs from the one before."""

    before: ShownBuild
    pairs: Mapping[str, Sequence[Pair]]
    """Cells by what happened to them; `unjudged`: a rule refused them before, and this time did not judge them."""
    same: int  # Cells that ended alike, with speeds that differ by less than the band.
    ended: int  # Cells that ended in both.
    only_before: Sequence[CellLine]
    only_after: Sequence[CellLine]
    left_out: Sequence[Reason]  # Why cells or speeds were not compared.

    def __bool__(self) -> bool:
        return any(pairs for name, pairs in self.pairs.items() if name != "still-failed")


def compare(before: ShownBuild, after: ShownBuild) -> ComparedBuilds:
    """Compare the ended cells that both builds have."""
    olds = before.by_identifier
    both = [Pair(old, cell, change(old, cell)) for cell in after.cells if (old := olds.get(cell.identifier))]
    found = grouped(both, lambda pair: pair.found.effect)
    ended = [pair for pair in both if pair.before.succeeded and pair.after.succeeded]
    reasons = [pair.found.left_out for pair in ended] + ["cancelled or open in either"] * len(found.get("open", ()))
    return ComparedBuilds(
        before,
        {
            "newly-failed": [pair for pair in found.get("newly failed", ()) if pair.before.succeeded],
            "slower": sorted(found.get("worse", ()), key=lambda pair: -pair.change),
            "fixed": found.get("fixed", ()),
            "faster": sorted(found.get("better", ()), key=lambda pair: pair.change),
            "unjudged": found.get("unjudged", ()),
            "still-failed": found.get("still failing", ()),
        },
        same=sum(pair.found.effect == "same" and pair.found.left_out in ("", SAME) for pair in ended),
        ended=sum(not {old.look, cell.look} & {"queued", "running", "cancelled"} for old, cell, _ in both),
        only_before=[cell for cell in before.cells if cell.identifier not in after.by_identifier],
        only_after=[cell for cell in after.cells if cell.identifier not in before.by_identifier],
        left_out=[Reason(reasons.count(why), why) for why in dict.fromkeys(reasons) if why and why != SAME],
    )


# --- several builds next to each other -------------------------------------------------------------------------------

MOST = 12  # Builds on one page.


class AcrossRow(NamedTuple):
    """One cell in all builds: how it ended in each, None where a build has no such cell.

    `shares` is how much longer it takes than in the build before, if that is more than the noise and can be said.
    """

    identifier: str
    ends: Sequence[CellEnd | None]
    shares: Sequence[float | None]


@dataclass(frozen=True, slots=True)
class Across:
    """Builds next to each other."""

    builds: Sequence[BuildView]
    same: int  # Cells that all builds have, and that are the same in all.
    partly: int  # Cells that only some builds have, and that are the same in those.
    worse: int  # Cells that fail or take longer in the last build, and did not in the one before.
    unended: int  # Cells of the last build that passed in the one before, and were cancelled or are open.
    _names: Sequence[str]
    _differing: Sequence[int]  # The rows of cells that end differently or moved.
    _rows: Sequence[Sequence[CellEnd | None]]

    def found(self, text: str = "", *, everything: bool = False) -> Sequence[int]:
        """Return the rows of cells that differ and have `text` in their names, or of all such cells."""
        rows = range(len(self._names)) if everything else self._differing
        return [row for row in rows if text in self._names[row]] if text else rows

    def name(self, row: int) -> str:
        """Return the cell of a row."""
        return self._names[row]

    def latency(self, build: int, row: int) -> float | None:
        """Return how long a run took in a build; None if it was not measured."""
        return end.latency if (end := self._rows[row][build]) else None

    def rows(self, found: Iterable[int]) -> list[AcrossRow]:
        """Return some rows, as they are shown."""
        return [AcrossRow(self._names[row], self._rows[row], list(_shares(self._rows[row]))) for row in found]


def across(builds: Sequence[tuple[BuildView, Sequence[CellEnd]]]) -> Across:
    """Put builds next to each other, the oldest first; of 12 with 50,000 cells each only what is shown becomes rows."""
    names, rows = _aligned([ends for _, ends in builds])
    differing = [number for number, row in enumerate(rows) if _differs([end for end in row if end])]
    partly = sum(None in row for row in rows) - sum(None in rows[number] for number in differing)
    effects = Counter(_effect(*row[-2:]) for row in rows if len(row) > 1)
    return Across(
        [build for build, _ in builds],
        same=len(names) - len(differing) - partly,
        partly=partly,
        worse=effects["worse"] + effects["newly failed"],
        unended=effects["open"],
        _names=names,
        _differing=differing,
        _rows=rows,
    )


def _aligned(builds: Sequence[Sequence[CellEnd]]) -> tuple[list[str], Sequence[Sequence[CellEnd | None]]]:
    """Return the names of all cells, and each one's ends; most builds of a manifest have the same cells."""
    names = [end.identifier for end in builds[-1]]
    if all([end.identifier for end in each] == names for each in builds):
        return names, list(zip(*builds, strict=True))
    cells = [{end.identifier: end for end in each} for each in builds]
    names = list(dict.fromkeys(name for each in reversed(cells) for name in each))
    return names, [[each.get(name) for each in cells] for name in names]


def _differs(row: Sequence[CellEnd]) -> bool:
    return any(not is_quiet(before, now) and change(before, now).is_noticed for before, now in pairwise(row))


def _effect(before: CellEnd | None, now: CellEnd | None) -> str:
    """Return what became of a cell that passed before; empty for others, and if nothing changed."""
    if before is None or now is None or is_quiet(before, now):
        return ""
    effect = change(before, now).effect
    return effect if effect == "worse" or before.look in ("compiled", "hit") else ""


def _shares(row: Sequence[CellEnd | None]) -> Iterator[float | None]:
    before: CellEnd | None = None
    for now in row:
        found = change(before, now) if before and now else None
        yield found.share if found and found.effect in ("worse", "better") else None
        before = now or before


# --- one cell over time -----------------------------------------------------------------------------------------------

LEARNT = 5  # Measurements from which on a cell's own noise is known; before, `BAND` counts.
LOOKED_AT = 10  # Measurements before a point that make its band.
WIDTH = 3 * 1.4826  # Half of the band, in median deviations from the median: three standard deviations of normal noise.
NARROWEST = 0.02  # Half of the band at least, as a share of the median: clocks and temperatures make as much.
STEP = 3  # Points in a row that make a new level: one alone may be an outlier.

Moved = Literal["", "slower", "faster"]

_DIGEST = re.compile(r"-[0-9a-f]{8}(?= →|$)")


class Band(NamedTuple):
    """Latencies (seconds) between which no change is reported."""

    low: float
    high: float


class PastPoint(NamedTuple):
    """A cell in one build, as the history has it. `latency` in seconds; `band` is what was known before it."""

    row: PastCell
    look: Look
    latency: float | None
    measured: bool  # Whether this build measured it: a hit repeats an older number.
    shared: bool
    band: Band | None
    moved: Moved
    changes: Sequence[str]  # What is another one than in the program before: toolchain, driver, device.
    limit: float | None  # The most that its gate or budget allowed, in seconds.

    @property
    def ended(self) -> float:
        """When its build ended, in Unix seconds."""
        return self.row["ended"]


class Mark(NamedTuple):
    """Where toolchain, driver or device changed, or a new level began. Latencies in seconds."""

    ended: float
    build: str
    changes: Sequence[str]  # Empty for a level that began with the same toolchain, driver and device.
    before: float | None  # The median of the measurements before, since the mark before.
    after: float | None  # The median of those from here on, until the next mark.
    moved: Moved

    @property
    def change(self) -> float | None:
        """How much longer it takes than before, as a share; None if that is not known."""
        return self.after / self.before - 1 if self.after and self.before else None

    @property
    def label(self) -> str:
        """What changed, in a few words: `rocm7.1 → rocm7.2`, `driver 6.8 → 6.10`, `+11 %`."""
        short = [_DIGEST.sub("", each).removeprefix("toolchain ") for each in self.changes]
        return ", ".join(short) or quantities.percent(self.change or 0.0)


@dataclass(frozen=True)
class CellPast:
    """The past of one cell, oldest first."""

    points: Sequence[PastPoint]

    def within(self, until: date, days: int) -> CellPast:
        """Return the past in so many days until the end of a day, UTC; the first bands still know what was before."""
        end = datetime(until.year, until.month, until.day, tzinfo=UTC).timestamp() + 86_400
        return CellPast([point for point in self.points if end - days * 86_400 <= point.ended < end])

    @cached_property
    def drawn(self) -> list[PastPoint]:
        """The points that were measured alone."""
        return [point for point in self.points if point.measured and point.latency and not point.shared]

    @property
    def headline(self) -> str:
        """The single most important thing: how the newest build is, in words."""
        if not self.points:
            return "No build of this time had this cell"
        newest = self.points[-1]
        if newest.look == "failed":
            failed = [*takewhile(lambda point: point.look in ("failed", "expected"), reversed(self.points))]
            since, now = failed[-1].row["build"], newest.row["build"]
            return f"Fails with {newest.row['kind']}" + (f" since {since[:10]}" if since != now else "")
        if not self.drawn:
            return "It was never measured alone"
        last = self.drawn[-1]
        now = quantities.duration(last.latency)
        if last.moved:
            return f"{now}, {last.moved} than the noise of those before explains"
        within = f"{now}, " + ("within the noise of those before" if self.drawn[1:] else "measured for the first time")
        step = next((mark for mark in reversed(self.marks) if mark.moved), None)
        if step and step.change:
            day = datetime.fromtimestamp(step.ended, UTC)
            level = f"{quantities.duration(step.before)} → {quantities.duration(step.after)}"
            why = f" ({step.label})" if step.changes else ""
            return f"{within}; {abs(step.change) * 100:.0f} % {step.moved} since {day:%Y-%m-%d}{why}: {level}"
        return within

    @cached_property
    def marks(self) -> list[Mark]:
        """Where toolchain, driver or device changed, or a new level began, oldest first."""
        steps = {point.row["build"] for point in self._steps()}
        found = [point for point in self.points if point.changes or point.row["build"] in steps]
        edges = [-math.inf, *(point.ended for point in found), math.inf]
        return [self._mark(*each) for each in zip(found, edges, edges[2:], strict=False)]

    def _mark(self, point: PastPoint, begin: float, end: float) -> Mark:
        known = [each.latency or 0.0 for each in self.drawn if begin <= each.ended < point.ended][-LOOKED_AT:]
        new = [each.latency or 0.0 for each in self.drawn if point.ended <= each.ended < end][:LOOKED_AT]
        before, after = median(known) if known else None, median(new) if new else None
        return Mark(point.ended, point.row["build"], point.changes, before, after, _moved(after, _band(known)))

    def _steps(self) -> Iterator[PastPoint]:
        """Yield the first point of each new level: of `STEP` points in a row that moved one way."""
        for moved, points in groupby(self.drawn, key=attrgetter("moved")):
            if moved:
                run = list(points)
                yield from run[: len(run) // STEP * STEP : STEP]

    @property
    def look(self) -> Look:
        """The look of the headline."""
        if not self.points:
            return "queued"
        if self.points[-1].look == "failed" or (self.drawn and self.drawn[-1].moved == "slower"):
            return "failed"
        return self.points[-1].look


def past_of(rows: Iterable[PastCell]) -> CellPast:
    """Return the past of a cell from its rows in the history, in any order."""
    points: list[PastPoint] = []
    before: dict[str, str] = {}
    known: list[float] = []
    run: list[float] = []  # The last measurements, if all of them moved one way.
    way: Moved = ""
    for row in sorted(rows, key=lambda row: (row["ended"], row["build"])):
        values = row["values"]
        now = {"toolchain": row["toolchain"], "driver": values.get("driver") or "", "device": row["device"]}
        changes = [f"{name} {before[name]} → {to}" for name, to in now.items() if to and before.get(name, to) != to]
        before |= {name: to for name, to in now.items() if to}
        latency = values.get("latency")
        measured = row["state"] == "succeeded" and not row["hit"] and latency is not None
        shared = bool(values.get("shared"))
        if changes:
            known, way = [], ""  # What another compiler or driver makes has its own level; the mark says why.
        band = _band(known) if measured else None
        moved: Moved = ""
        if measured and not shared and latency is not None:
            moved = _moved(latency, band)
            run, way = ([*run, latency] if moved == way else [latency]), moved
            known.append(latency)
            if moved and len(run) == STEP:
                known, way = run, ""  # So has what became usual.
        look = look_of(row["state"], hit=row["hit"], expected=row["expected"])
        points.append(PastPoint(row, look, latency, measured, shared, band, moved, changes, _limit(row)))
    return CellPast(points)


def _limit(row: PastCell) -> float | None:
    rules, base = json.loads(row.get("rules") or "{}"), row.get("baseline")
    limits = [base * (1 + limit) for name, limit in rules.items() if base and name.startswith("gate latency ")]
    return min([*limits, *(limit for name, limit in rules.items() if name == "budget latency")], default=None)


def _moved(latency: float | None, band: Band | None) -> Moved:
    if latency is None or band is None:
        return ""
    return "slower" if latency > band.high else "faster" if latency < band.low else ""


def _band(known: Sequence[float]) -> Band | None:
    """Return the band after some measurements; None if there is none yet."""
    recent = known[-LOOKED_AT:]
    if not recent:
        return None
    middle = median(recent)
    half = BAND * middle
    if len(recent) >= LEARNT:
        half = max(WIDTH * median(abs(each - middle) for each in recent), NARROWEST * middle)
    return Band(max(middle - half, 0.0), middle + half)
