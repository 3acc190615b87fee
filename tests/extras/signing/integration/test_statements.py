"""What is signed about an artifact, in object storage: added by many, and bounded."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from farm.app import Farm
from farm.artifacts import sidecar
from farm.artifacts.storage import statements_key
from farm.extras.signing import statements
from farm.extras.signing.notary import KEPT, Notary, add
from tests.support.signed import key_in, sidecar_of


def builds_of(lines: list[bytes]) -> list[str]:
    found = [statements.read(statements.read_bundle(line).payload).predicate.get("gates") for line in lines]
    return [gates["build"] for gates in found if gates]


def test_statements_of_many_writers_are_all_kept_and_each_once(farm: Farm, tmp_path: Path) -> None:
    made = sidecar_of()
    text = sidecar.text(made)
    notaries = [Notary(key_in(tmp_path, f"key{number}")) for number in range(6)]
    with ThreadPoolExecutor(6) as threads:
        list(threads.map(lambda notary: notary.attest(farm.artifacts, made, text), notaries))
    assert len(farm.artifacts.statements(["main"], made["key"])) == 12
    notaries[0].attest(farm.artifacts, made, text)
    again = farm.artifacts.statements(["main"], made["key"])
    assert len(again) == 12, "what is said again takes the place of the first time"
    assert hashlib.sha256(text).hexdigest() in str(statements.read(statements.read_bundle(again[-1]).payload))


def test_verdicts_of_gates_do_not_grow_without_end(farm: Farm, tmp_path: Path) -> None:
    made, notary = sidecar_of(), Notary(key_in(tmp_path, "farm"))
    notary.attest(farm.artifacts, made, sidecar.text(made))
    found = {"key": made["key"], "program": made["blobs"]["program"]}
    # As after many builds that hit it.
    for number in range(KEPT + 4):
        named = {found["program"]["path"]: found["program"]["digest"]}
        predicate = statements.gate_results(f"b-{number}", {}, [], "urn:example")
        add(farm.artifacts, "main", made["key"], [notary.sign("test-results", named, predicate)])
    lines = farm.artifacts.statements(["main"], made["key"])
    assert builds_of(lines) == [f"b-{number}" for number in range(4, KEPT + 4)]
    assert len(lines) == KEPT + 2, "what the worker said stays"


def test_damaged_lines_are_left_out_by_the_next_writer(farm: Farm, tmp_path: Path) -> None:
    made, notary = sidecar_of(), Notary(key_in(tmp_path, "farm"))
    farm.artifacts.put_object(statements_key("main", made["key"]), b"{}\nnothing\n\xff\n")
    notary.attest(farm.artifacts, made, sidecar.text(made))
    assert len(farm.artifacts.statements(["main"], made["key"])) == 2
