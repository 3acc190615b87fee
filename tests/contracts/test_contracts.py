"""What users and other programs rely on is as it was recorded, so that no refactoring changes it by accident."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from farm.spec import cache_key
from tests.contracts.published import DOCUMENTS, ROOT, without_words
from tests.contracts.record import AGAIN, CONTRACTS, recorded

SHOWN = 20
"""How many differences a message has."""

MEANS = {
    "inputs": "a package has other models now (see the versions of the extra `demo` and of onnx), or data is frozen to "
    "other bytes",
    "cache-keys": "artifacts that users have would be compiled again; docs/cache-key.md says when a key may change",
    "documents": "a checked-in document changed: editors and clients of others are made from it",
    "command-lines": "scripts of users call these commands",
    "exit-codes": "scripts and clients of users judge by these codes",
    "object-storage": "a farm would not find what an older one stored",
    "redis": "a farm would not find what an older one is doing; docs/job-store.md lists the keys",
}


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value that is not an object, with the way to it."""
    if isinstance(value, dict) and value:
        for name, item in value.items():
            yield from leaves(item, f"{path} › {name}" if path else name)
    else:
        yield path, value


def differences(before: Any, after: Any) -> list[str]:
    """Say what changed from one document to another, each place on one line."""
    old, new = dict(leaves(before)), dict(leaves(after))
    absent = "(not there)"
    return [
        f"{path}: {old.get(path, absent)} -> {new.get(path, absent)}"
        for path in dict.fromkeys([*old, *new])
        if path not in old or path not in new or old[path] != new[path]
    ]


def require_none(found: list[str], means: str) -> None:
    if found:
        more = [f"… and {len(found) - SHOWN} more"] if len(found) > SHOWN else []
        said = "\n  ".join([*found[:SHOWN], *more])
        pytest.fail(f"{means}:\n  {said}\nChanged on purpose? Record again with: {AGAIN}", pytrace=False)


@pytest.mark.parametrize("name", CONTRACTS)
def test_a_contract_is_as_recorded(name: str) -> None:
    now = json.loads(json.dumps(CONTRACTS[name]()))
    require_none(differences(recorded(name), now), f"{name} is not as recorded: {MEANS[name]}")


def test_a_recorded_spec_still_has_its_key() -> None:
    """Without any manifest, model or worker: the specs in users' sidecars keep their keys."""
    cells = [
        (f"{name} › {identifier}", cell)
        for name, cells in recorded("cache-keys").items()
        for identifier, cell in cells.items()
    ]
    now = {name: cache_key(cell["spec"]) for name, cell in cells}
    require_none(differences({name: cell["key"] for name, cell in cells}, now), "a recorded spec has another key")


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_checked_in_document_is_the_codes(name: str) -> None:
    """But for words and what frameworks add."""
    document, code = json.loads((ROOT / name).read_text()), json.loads(json.dumps(DOCUMENTS[name]()))
    found = differences(without_words(document), without_words(code))
    require_none(found, f"{name} is not what the code says; `make schemas` writes it")
