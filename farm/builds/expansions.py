"""The last matrices that this process expanded: a build is submitted with the cells that its plan showed."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Callable

from farm.matrix.cells import Cell

KEPT = 4
"""Matrices; one of 10,000 cells takes some 50 MB."""


class Expansions:
    """Expands a matrix once for a plan and for the submission that follows it; safe for threads."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, list[Cell]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, inputs: object, expand: Callable[[], list[Cell]]) -> list[Cell]:
        """Return the cells for these inputs (JSON), which alone decide what `expand` returns. Raises what it raises."""
        key = hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()
        with self._lock:
            if cells := self._kept.get(key):
                self._kept.move_to_end(key)
                return cells
        cells = expand()
        with self._lock:
            self._kept[key] = cells
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        return cells
