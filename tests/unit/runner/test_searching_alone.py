"""A tuning search has the host for itself in short stretches, and times nothing outside of them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from typing import Any

import pytest

from farm.runner import onnxruntime_sessions
from farm.runner.launcher import Messages
from farm.runner.onnxruntime_sessions import Candidate, candidates, time_candidates


def test_a_search_has_the_host_for_eight_candidates_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnxruntime_sessions, "_SECONDS", {"exhaustive": 0.0})
    happened: list[Any] = []

    class Heard(Messages):
        def send(self, message: Any) -> None:
            happened.append(message["alone"])

    def load(candidate: Candidate) -> Callable[[], None]:
        happened.append(str(candidate))
        return lambda: happened.append(str(candidate))

    with open("/dev/zero", "rb") as go:  # noqa: PTH123
        tried = candidates("exhaustive", 4)
        found = time_candidates("exhaustive", tried, load, Heard(-1, go.fileno()))
    assert list(found) == list(map(str, tried))
    stretches = [(alone, list(some)) for alone, some in groupby(happened, key=lambda each: isinstance(each, str))]
    assert [len(set(timed)) for is_timed, timed in stretches if is_timed] == [8, 8, 5]
    assert [words for is_timed, words in stretches if not is_timed] == [[True], [False, True], [False, True], [False]]
