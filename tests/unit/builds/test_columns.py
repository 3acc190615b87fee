"""Tables as columns."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as some

from farm.builds.columns import pack, unpack

VALUES = some.one_of(some.none(), some.booleans(), some.integers(0, 2), some.floats(0, 2), some.text(max_size=2))


@given(some.lists(some.tuples(VALUES, some.dictionaries(some.text(max_size=1), VALUES, max_size=2)), max_size=8))
def test_columns_come_back_as_they_were(rows: list[tuple[object, object]]) -> None:
    columns = {"plain": [row[0] for row in rows], "nested": [row[1] for row in rows]}
    found, more = unpack(pack(columns, build={"id": "b-1"}))
    assert {name: list(values) for name, values in found.items()} == columns
    assert [repr(value) for value in found["plain"]] == [repr(value) for value in columns["plain"]]
    assert more == {"build": {"id": "b-1"}}


@pytest.mark.parametrize("data", [b"", b"{}", pack({"a": [1, 2]})[:-9], pack({})[:9]])
def test_damaged_bytes_are_refused(data: bytes) -> None:
    with pytest.raises((ValueError, KeyError)):
        unpack(data)
