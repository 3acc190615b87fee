"""The cache key is what its document says: recomputed here from the document alone, by other code."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farm.spec import SpecDocument, cache_key, canonical_json, model_digest
from tests.support.places import ROOT

TEXT = (ROOT / "docs" / "cache-key.md").read_text(encoding="utf-8")
VECTORS = re.findall(
    r"^### (.+?)\n.*?```json\n(.*?)\n```.*?```text\n(.*?)\n```.*?```text\n([0-9a-f]{64})\n```",
    TEXT,
    re.DOTALL | re.MULTILINE,
)
ESCAPES = {'"': '\\"', "\\": "\\\\", "\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r"}


def spelt(value: Any) -> str:
    """Canonical JSON after the document's rules, written without the json module."""
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case int():
            return str(value)
        case float():
            return f'"{value!r}"'
        case str():
            return '"' + "".join(ESCAPES.get(c) or (f"\\u{ord(c):04x}" if ord(c) < 32 else c) for c in value) + '"'
        case dict():
            ordered = sorted(value, key=lambda key: [ord(c) for c in key])
            return "{" + ",".join(f"{spelt(key)}:{spelt(value[key])}" for key in ordered) + "}"
        case _:
            return "[" + ",".join(spelt(item) for item in value) + "]"


def test_the_document_has_vectors() -> None:
    assert len(VECTORS) >= 3


@pytest.mark.parametrize(("name", "spec", "canonical", "key"), VECTORS, ids=[vector[0] for vector in VECTORS])
def test_a_vector_can_be_recomputed_from_the_document_alone(name: str, spec: str, canonical: str, key: str) -> None:
    document = json.loads(spec)
    assert spelt(document) == canonical
    assert hashlib.sha256(canonical.encode()).hexdigest() == key
    assert cache_key(document) == key


def test_the_documents_own_code_gives_the_keys() -> None:
    code = re.search(r"```python\n(.*?)```", TEXT, re.DOTALL)
    assert code
    names: dict[str, Any] = {}
    exec(code[1], names)
    for _, spec, _, key in VECTORS:
        assert names["cache_key"](json.loads(spec)) == key


def test_the_document_names_every_field() -> None:
    fields = re.findall(r"^\| `([a-z_]+)` \|", TEXT, re.MULTILINE)
    assert sorted(fields) == sorted(SpecDocument.__annotations__)


def test_a_model_of_several_files_is_hashed_as_the_document_says() -> None:
    files = {"weights/block.bin": "e" * 64, "block.onnx": "d" * 64}
    listed = f'[["block.onnx","{"d" * 64}"],["weights/block.bin","{"e" * 64}"]]'
    digest = hashlib.sha256(listed.encode()).hexdigest()
    assert model_digest(files) == digest
    assert digest in TEXT
    assert model_digest({"net.onnx": "a" * 64}) == "a" * 64


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(JSON)
def test_canonical_json_is_as_documented_for_any_value(value: Any) -> None:
    assert canonical_json(value) == spelt(value)


@given(JSON)
def test_canonical_json_survives_a_journey_through_json(value: Any) -> None:
    assert canonical_json(json.loads(json.dumps(value))) == canonical_json(value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), [{"a": float("-inf")}]])
def test_numbers_that_are_not_finite_have_no_key(value: Any) -> None:
    with pytest.raises(ValueError, match="no place in a cache key"):
        canonical_json(value)
