"""What a reader of foreign bytes is to the fuzz test. What once broke a promise lies in `corpus/READER/`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from farm.errors import FarmError

CORPUS = Path(__file__).with_name("corpus")
Seeds = Callable[[Path], Sequence[bytes]]


@dataclass(frozen=True)
class Reader:
    """A reader: the name of the file that it is given, what reads it, and what it may raise.

    `seeds` makes genuine inputs, with an empty folder to work in.
    """

    name: str
    read: Callable[[Path], object]
    seeds: Seeds
    file: str = "input"
    errors: tuple[type[Exception], ...] = (FarmError,)

    def corpus(self, folder: Path) -> list[bytes]:
        """Return the genuine inputs, and those that found something."""
        made = folder / "seeds"
        made.mkdir()
        found = sorted((CORPUS / self.name).glob("*"))
        return [*self.seeds(made), *(path.read_bytes() for path in found)]
