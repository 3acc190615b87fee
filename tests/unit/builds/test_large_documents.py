"""Large JSON that is read piece by piece says what `json.loads` says, and refuses what that refuses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farm.builds import large_documents
from farm.builds.large_documents import loads_in_turns

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@pytest.fixture(autouse=True, scope="module")
def everything_is_large() -> Iterator[None]:
    small, large_documents.SMALL = large_documents.SMALL, -1
    yield
    large_documents.SMALL = small


@settings(max_examples=40, deadline=None)
@given(VALUES, st.sampled_from([None, 1]))
def test_it_reads_what_json_reads(document: Any, indent: int | None) -> None:
    assert loads_in_turns(json.dumps(document, indent=indent).encode()) == document


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "{}x",
        '{"a"',
        '{"a":',
        '{"a": [',
        '{"a": [1',
        '{"a": [1,',
        '{"a": [1,]}',
        '{"a": [1] 2}',
        "{1: 2}",
        '{"a": 1,}',
    ],
)
def test_it_refuses_what_json_refuses(text: str) -> None:
    with pytest.raises(ValueError):
        json.loads(text)
    with pytest.raises(ValueError):
        loads_in_turns(text.encode())
