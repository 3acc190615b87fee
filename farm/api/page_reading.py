"""Reading builds for pages: a build that takes long to read is not read again for every reader."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache

from farm.app import Farm
from farm.errors import FarmError
from farm.pages.build_view import ShownBuild
from farm.pages.comparison import ComparedBuilds, compare

KEPT_CELLS = 400_000
"""Cells of the builds that are kept in memory, a few hundred bytes each."""

STALE = 2.0
"""An open build that changes all the time is read at most once in so many times what reading it takes."""

UNCHANGED = 1.0
"""Seconds for which a build without new events counts as unchanged; why it waits may change without one."""

LOCKS = 64


@dataclass(frozen=True, slots=True)
class _Kept:
    view: ShownBuild
    read_at: float
    cost: float


class BuildPages:
    """Builds as pages show them, of one farm. Thread-safe."""

    def __init__(self, farm: Farm) -> None:
        self._farm = farm
        self._kept: OrderedDict[tuple[str, str], _Kept] = OrderedDict()
        self._lock = threading.Lock()
        self._reading = [threading.Lock() for _ in range(LOCKS)]
        self._compared = lru_cache(maxsize=8)(_Comparison)

    def view(self, namespace: str, reference: str, *, newest: bool = False) -> ShownBuild:
        """Return a build with its cells; with `newest` after all of its events so far. Raises NotFound."""
        key = (namespace, self._farm.build_reader.resolve(namespace, reference))
        # Whoever asks for a build that is being read waits for it.
        with self._reading[hash(key) % LOCKS]:
            return self._view(key, newest)

    def cost(self, namespace: str, build_id: str) -> float:
        """Return the seconds that reading a build took last."""
        with self._lock:
            kept = self._kept.get((namespace, build_id))
        return kept.cost if kept else 0.0

    def position(self, namespace: str, build_id: str) -> str:
        """Return the id of a build's last event."""
        # An unknown id is answered with the place to go on from.
        return str(self._farm.build_reader.events(namespace, build_id, "newest", 0)["items"][-1]["id"])

    def changes(self, namespace: str, after: ShownBuild) -> ComparedBuilds | None:
        """Return how a build differs from the one of its name before it that ended; None if there is none."""
        build = after.build
        if build.get("follows"):
            return None
        before = next(
            (
                str(row["id"])
                for row in self._farm.build_reader.list(namespace, 1000)
                if row["name"] == build["name"]
                and row["state"] == "reported"
                and not row.get("follows")
                and row["created_at"] < build["created_at"]
            ),
            None,
        )
        if before is None:
            return None
        with suppress(FarmError):  # Its report may be gone: then there is nothing to compare with.
            return self.compared(self.view(namespace, before), after)
        return None

    def compared(self, before: ShownBuild, after: ShownBuild) -> ComparedBuilds:
        """Return how two builds differ."""
        if before.is_open or after.is_open:
            return compare(before, after)
        return self._compared(_Same(before), _Same(after)).changes

    def _view(self, key: tuple[str, str], newest: bool) -> ShownBuild:
        with self._lock:
            kept = self._kept.get(key)
        if kept and not kept.view.is_open:
            return kept.view
        position = self.position(*key)
        age = time.monotonic() - kept.read_at if kept else 0.0
        unchanged = kept is not None and kept.view.position == position
        if kept and age < (UNCHANGED if unchanged else 0.0 if newest else STALE * kept.cost):
            return kept.view
        began = time.monotonic()
        view = ShownBuild.of(self._farm.build_reader.report(*key), position)
        ended = time.monotonic()
        with self._lock:
            self._kept[key] = _Kept(view, ended, ended - began)
            self._kept.move_to_end(key)
            while len(self._kept) > 1 and sum(len(each.view.cells) for each in self._kept.values()) > KEPT_CELLS:
                self._kept.popitem(last=False)
        return view


class _Same:
    """A view that equals only itself: what is remembered for it holds as long as it is kept."""

    def __init__(self, view: ShownBuild) -> None:
        self.view = view

    def __hash__(self) -> int:
        return id(self.view)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.view is self.view


class _Comparison:
    def __init__(self, before: _Same, after: _Same) -> None:
        self.changes = compare(before.view, after.view)
