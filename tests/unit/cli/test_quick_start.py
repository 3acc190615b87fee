"""What a command does not compile at its start works as if it were compiled."""

from __future__ import annotations

import dataclasses
import sys
import typing
from typing import TypedDict

import pytest

from farm.cli.quick_start import compile_less


@pytest.fixture(autouse=True)
def as_in_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataclasses, "_frozen_get_del_attr", dataclasses._frozen_get_del_attr)  # type: ignore[attr-defined]
    monkeypatch.setitem(vars(typing), "compile", compile)
    del vars(typing)["compile"]
    compile_less()


def test_a_frozen_dataclass_refuses_changes() -> None:
    @dataclasses.dataclass(frozen=True)
    class Point:
        x: int

    class Named(Point):
        name: str

    slotted = dataclasses.make_dataclass("Slotted", [("x", int)], frozen=True, slots=True)(1)
    point, named = Point(1), Named(2)
    for held in (point, named, slotted):
        with pytest.raises(dataclasses.FrozenInstanceError, match=r"^cannot assign to field 'x'$"):
            held.x = 3
        with pytest.raises(dataclasses.FrozenInstanceError, match=r"^cannot delete field 'x'$"):
            del held.x
    named.name = "n"
    assert (point, dataclasses.replace(point, x=4).x, named.x, named.name) == (Point(1), 4, 2, "n")
    del named.name
    assert not hasattr(named, "name")


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="Python compiles less itself")
def test_frozen_dataclasses_share_code() -> None:
    one, two = (dataclasses.make_dataclass(name, [(name, int)], frozen=True) for name in ("one", "two"))
    assert one.__setattr__.__code__ is two.__setattr__.__code__
    assert one.__delattr__.__code__ is two.__delattr__.__code__


def test_annotations_are_evaluated_when_somebody_asks() -> None:
    class Row(TypedDict):
        size: int | None

    assert Row.__annotations__["size"].__forward_code__ == "int | None"
    assert typing.get_type_hints(Row) == {"size": int | None}
