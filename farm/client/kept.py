"""Answers that a client keeps: what a ref named and what an artifact is, for the time when the farm is away."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from farm.client.cache import note_use
from farm.errors import FarmFault
from farm.files import replacing


class KeptAnswer(NamedTuple):
    """A document, and when the farm gave it, in Unix seconds."""

    document: Any
    given: float


class KeptAnswers:
    """The last answers of one farm to one caller, in a `cache`; without a cache nothing is kept."""

    def __init__(self, cache: Path | None, farm: str, token: str = "") -> None:
        """`farm` is its address with the namespace; `token` says who asks, and is not kept."""
        whose = hashlib.sha256(f"{farm}\n{token}".encode()).hexdigest()
        self._cache = cache
        self._folder = cache / "answers" / whose[:32] if cache else None
        self._away = False
        self.on_away: Callable[[str, float], None] | None = None
        """Called once if the farm cannot answer: with the reason, and how old the first kept answer is, in seconds."""

    def ask(self, name: str, ask: Callable[[], Any]) -> Any:
        """Return what `ask` does, else what it returned last under this `name`. Raises what `ask` does without either.

        Only for what a farm that is away would have answered: not for what it refuses.
        """
        if self._away and (kept := self._read(name)):
            return kept.document
        try:
            document = ask()
        except FarmFault as fault:
            kept = self._read(name)
            if kept is None:
                raise
            if self.on_away and not self._away:
                self.on_away(fault.message, max(0.0, time.time() - kept.given))
            self._away = True
            return kept.document
        self._keep(name, document)
        return document

    def _place(self, name: str) -> Path | None:
        return self._folder / f"{hashlib.sha256(name.encode()).hexdigest()}.json" if self._folder else None

    def _read(self, name: str) -> KeptAnswer | None:
        place = self._place(name)
        if place is None:
            return None
        try:
            found = json.loads(place.read_bytes())
            return KeptAnswer(found["document"], float(found["given"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _keep(self, name: str, document: Any) -> None:
        place = self._place(name)
        if place is None or self._cache is None:
            return
        with suppress(OSError):  # A cache that cannot be written is done without.
            place.parent.mkdir(parents=True, exist_ok=True)
            with replacing(place) as part:
                part.write_text(json.dumps({"given": time.time(), "name": name, "document": document}))
            note_use(self._cache, [place])
