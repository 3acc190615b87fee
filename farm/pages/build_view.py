"""A build as its page shows it: the verdict in one sentence, groups, the matrix. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from farm.pages.quantities import digits, duration, error, milliseconds, plural, size
from farm.results.lines import CellEnd, CellLine, Look
from farm.results.report import BuildView
from farm.results.tradeoff import Contender, weighed

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

PAGE = 1000
"""Cells on one page."""


def sign(cell: CellLine | CellEnd) -> str:
    """Return the sign of a cell's look."""
    return SIGNS[cell.look][0]


def said(cell: CellLine | CellEnd) -> str:
    """Return what a cell's place in the matrix says: its sign, and its failure, phase or latency in ms."""
    match cell.look:
        case "failed" | "expected":
            words = cell.kind
        case "running":
            words = cell.phase
        case _:
            words = WEAK["shared"][0] * cell.shared + milliseconds(cell.latency) if cell.latency else ""
    return f"{sign(cell)} {words}".rstrip()


def figures(cells: Sequence[CellLine], metric: str) -> dict[str, str]:
    """Return what the places of cells say, with one of `METRICS`; of a model, all cells are given."""
    if metric == "latency":
        return {cell.identifier: said(cell) for cell in cells}
    models: dict[str, list[Contender]] = {}
    for cell in cells:
        models.setdefault(cell.model, []).append(cell.contender)
    found = {each.identifier: each for model in models.values() for each in weighed(model)}
    bases = [cell for cell in cells if cell.precision == "fp32" and metric == "x fp32"]
    rough = {(cell.model, cell.target, cell.shape): cell.marks.split() for cell in bases}
    texts = {}
    for cell in cells:
        text = _figure(found[cell.identifier], metric) if cell.succeeded else ""
        marks = {*cell.marks.split(), *rough.get((cell.model, cell.target, cell.shape), ())}
        weak = dict.fromkeys(WEAK[each][0] for each in METRICS[metric][1].split() if each in marks)
        texts[cell.identifier] = f"{sign(cell)} {''.join(weak)}{text}" if text else said(cell._replace(latency=None))
    return texts


def _figure(each: Contender, metric: str) -> str:
    """Return a program's number; empty if there is none."""
    texts = {
        "p99": each.p99 and milliseconds(each.p99),
        "throughput": each.throughput and digits(each.throughput),
        "error": None if each.error is None else error(each.error),
        "size": size(each.size),
        "x fp32": each.gain and f"{each.gain:.2f}x",
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
    places: Mapping[str, Mapping[Look, int]]
    """The cells of each target that it has."""


class MatrixRow(NamedTuple):
    """One model and shape, with its cells by column; a place can hold several, or none."""

    model: str
    shape: str
    places: Sequence[Sequence[CellLine]]


class Matrix(NamedTuple):
    """Cells by model and shape (rows), target and precision (columns)."""

    targets: Sequence[tuple[str, int]]
    """Each target, with the number of its columns."""
    precisions: Sequence[str]
    """The precision of each column."""
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
        return grouped(self.cells)

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

    @property
    def done(self) -> int:
        """How many cells have ended."""
        return sum(count for look, count in self.looks.items() if look not in ("running", "queued"))

    def wanted(self, wanted: CellFilter) -> list[CellLine]:
        """Return the cells that pass a reader's filters."""
        return [cell for cell in self.cells if wanted.takes(cell)] if wanted else list(self.cells)

    def reasons(self) -> list[Reason]:
        """Return why cells wait, once for each reason; without the numbers that differ by one."""
        found = Counter(_reason(cell.waiting) for cell in self.cells if cell.waiting)
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
            start = f"{self.done:,} of {plural(total, 'cell')} are done"
        eta = outlook["eta"] if outlook else None
        return f"{start}; the rest takes about {duration(eta['expected'])} more" if eta and eta["expected"] else start


def _reason(text: str) -> str:
    """Return a reason without how many jobs are ahead, which differs from cell to cell."""
    return re.sub(r"^\d+ jobs? ahead", "other jobs are ahead", text)


def grouped(cells: Iterable[CellLine]) -> list[Group]:
    """Return cells by model: those with failures first, then in the order of the manifest."""
    counts = Counter((cell.model, cell.target, cell.look) for cell in cells)
    models: dict[str, dict[str, Counter[Look]]] = {}
    for (model, target, look), count in counts.items():
        models.setdefault(model, {}).setdefault(target, Counter())[look] += count
    groups = []
    for model, places in models.items():
        looks = sum(places.values(), Counter[Look]())
        groups.append(Group(model, looks.total(), looks, places))
    return sorted(groups, key=lambda group: not group.looks["failed"])


def matrix(cells: Iterable[CellLine]) -> Matrix:
    """Return cells as a matrix, in their order."""
    cells = list(cells)
    targets = Counter(target for target, _ in dict.fromkeys((cell.target, cell.precision) for cell in cells))
    place = list(targets).index
    columns = sorted(dict.fromkeys((cell.target, cell.precision) for cell in cells), key=lambda each: place(each[0]))
    rows: dict[tuple[str, str], dict[tuple[str, str], list[CellLine]]] = {}
    for cell in cells:
        places = rows.setdefault((cell.model, cell.shape), {})
        places.setdefault((cell.target, cell.precision), []).append(cell)
    return Matrix(
        list(targets.items()),
        [precision for _, precision in columns],
        [
            MatrixRow(model, shape, [places.get(column, ()) for column in columns])
            for (model, shape), places in rows.items()
        ],
    )


def ranked(looks: Mapping[Look, int]) -> Iterator[tuple[Look, int]]:
    """Yield looks with their counts, what is looked at first in front."""
    return ((look, looks[look]) for look in ORDER if looks.get(look))
