"""Searching among versions: how many tries it takes, with and without versions that cannot be judged."""

from __future__ import annotations

import random

import pytest

from farm.extras.radar.toolchains_api import Bisection, TryVerdict


def searched(count: int, first_bad: int, broken: frozenset[int] = frozenset(), *, ends: bool = True) -> Bisection:
    """Search to the end; `broken` versions cannot be judged, `ends`: the first and the last one are known."""
    search = Bisection("net", [str(version) for version in range(count)])
    if ends:
        search.note("0", TryVerdict.GOOD)
        search.note(str(count - 1), TryVerdict.BAD)
    while (version := search.next()) is not None:
        assert version not in [tried["toolchain"] for tried in search.tried], "a version is tried once"
        good = TryVerdict.GOOD if int(version) < first_bad else TryVerdict.BAD
        search.note(version, TryVerdict.SKIPPED if int(version) in broken else good, compiled=True)
    return search


def suspects(search: Bisection) -> list[int]:
    return [int(version) for version in search.suspects]


@pytest.mark.parametrize(("count", "most"), [(64, 6), (65, 6), (66, 7), (2, 0), (3, 1)])
def test_it_takes_as_many_tries_as_the_versions_have_bits(count: int, most: int) -> None:
    for first_bad in range(1, count):
        known, unknown = searched(count, first_bad), searched(count, first_bad, ends=False)
        assert suspects(known) == suspects(unknown) == [first_bad]
        assert known.found()["last_good"] == str(first_bad - 1)
        assert known.found()["compiles"] <= most
        assert len(unknown.tried) <= most + 2, "and the two ends if they are not known"


def test_where_nothing_is_wrong_or_all_is_two_tries_say_so() -> None:
    for first_bad in (0, 64):
        search = searched(64, first_bad, ends=False)
        assert search.suspects == []
        assert len(search.tried) == 2


def test_versions_that_cannot_be_judged_are_passed_over_and_named_if_they_may_be_the_first() -> None:
    chance = random.Random(3)
    for _ in range(300):
        first_bad = chance.randrange(1, 64)
        broken = frozenset(chance.sample(range(64), chance.randrange(40)))
        search = searched(64, first_bad, broken, ends=False)
        judged = [version for version in range(64) if version not in broken]
        if not any(version < first_bad for version in judged) or not any(version >= first_bad for version in judged):
            assert search.suspects == []
            continue
        assert first_bad in suspects(search)
        assert set(suspects(search)) - broken <= {min(version for version in judged if version >= first_bad)}
    row = searched(64, 40, frozenset(range(20, 60)), ends=False)
    assert suspects(row) == list(range(20, 61))
    assert len(row.tried) < 50
    assert searched(3, 1, frozenset({0, 1, 2}), ends=False).suspects == []
