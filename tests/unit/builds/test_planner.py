"""How long, and how many, planned submissions are kept."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from farm.builds import planner
from farm.builds.planner import KeptSubmissions, Planner, ReadSubmission
from farm.builds.service import digest_of_request
from farm.manifest.parsing import parse_manifest
from farm.matrix.combinations import combine
from farm.matrix.planned import SubmissionDocument
from tests.support.api_farm import POOL

TEXT = "version: 1\nname: demo\ntargets: [onnxruntime/cpu]\nmodels: [{name: net, source: {path: net.onnx}}]\n"


def read(text: str = TEXT, cells: int = 0) -> ReadSubmission:
    submission: Any = {"build_id": "b-1", "manifest": text, "models": {}, "data": {}}
    return ReadSubmission(
        SubmissionDocument(**submission), combine(parse_manifest(TEXT, "x")), {}, [], [], {}, [None] * cells
    )  # type: ignore[list-item]


def test_a_planned_submission_is_kept_until_it_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, now = KeptSubmissions(), 1000.0
    # Of this module alone: a server's loop in this process would wait until the real clock gets there.
    monkeypatch.setattr(planner, "time", SimpleNamespace(monotonic=lambda: now))
    asked = ("main", "me", "0")
    kept.keep(asked, one := read())
    assert kept.find(asked) is one
    assert kept.find(("main", "me", "1")) is None
    now += planner.KEPT_SECONDS - 1
    assert kept.find(asked) is one
    now += 2
    assert kept.find(asked) is None


def test_the_oldest_submissions_go_if_all_take_too_much_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = KeptSubmissions()
    names = [("main", "me", str(number)) for number in range(4)]
    monkeypatch.setattr(planner, "KEPT_BYTES", 3 * read().weight)
    for name in names:
        kept.keep(name, read())
    assert [kept.find(name) is not None for name in names] == [False, True, True, True]
    kept.keep(names[1], read())
    kept.keep(("main", "me", "9"), read())
    assert [kept.find(name) is not None for name in names] == [False, True, False, True], "what is kept again is young"
    for large in (read(TEXT + "#" * 10_000), read(cells=100)):
        kept.keep(name := ("main", "me", str(large.weight)), large)
        assert kept.find(name), "the last one is kept however large it is"
        assert not any(map(kept.find, names))
        names = [name]


def test_a_large_submission_that_is_read_next_takes_the_place_of_older_ones_before_it_is_expanded() -> None:
    kept, asked = KeptSubmissions(), ("main", "me", "0")
    kept.keep(asked, one := read())
    kept.make_room(planner.KEPT_BYTES - one.weight)
    assert kept.find(asked) is one
    kept.make_room(planner.KEPT_BYTES)
    assert kept.find(asked) is None


def test_a_toolchain_that_no_worker_has_chooses_no_pool() -> None:
    """Readers' newest programs are of a compiler that is gone: builds follow the newest of those that are there."""
    old, new = (replace(POOL, toolchain=name) for name in ("onnxruntime1.0", "onnxruntime3.0"))
    cell = {"target": str(POOL.target), "device": POOL.device.arch, "manifest": "m", "submitted": 1.0}
    given = {"a": {**cell, "toolchain": old.toolchain}, "b": {**cell, "toolchain": "gone", "submitted": 2.0}}
    asked = SimpleNamespace(_given=lambda *_: given)
    assert Planner._as_named(asked, "main", [old, new]) == [old]  # type: ignore[arg-type]


@pytest.mark.parametrize("part", ["manifest", "models", "data", "files", "labels", "gates"])
def test_each_part_of_a_submission_makes_it_another_request(part: str) -> None:
    """What is asked for again under one id has to be the same."""
    asked: Any = {"manifest": "a", "models": {}, "data": {}, "files": {}, "labels": {}, "gates": None}
    other = {"manifest": "b", "labels": {"branch": "b"}, "gates": {}}
    changed = {**asked, part: other.get(part, {"x": {"digest": "d"}})}
    assert digest_of_request(asked) != digest_of_request(changed)
    assert digest_of_request(asked) == digest_of_request({**asked, "labels": None})
