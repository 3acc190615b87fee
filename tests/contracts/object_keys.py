"""Where things lie in object storage and in Redis: the keys that the code makes for sample arguments."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import MagicMock

from farm import __file__ as FARM
from farm.app import Farm
from farm.artifacts.inventory import MARKS, documents, rebuild
from farm.artifacts.refs import Refs
from farm.artifacts.storage import (
    BLOBS,
    QUARANTINE,
    UPLOADS,
    Object,
    artifacts_prefix,
    blob_key,
    readable,
    reference_key,
    sidecar_key,
    statements_key,
    upload_key,
)
from farm.artifacts.tokens import Role, Tokens
from farm.errors import FarmError
from farm.results.ref_rules import LATEST
from farm.settings import load_settings
from farm.store.link import key
from farm.tuning.database import TuningDatabase, databases
from farm.tuning.records import Snapshot
from tests.support.places import ROOT

DIGEST = "ab" + "0123456789abcdef" * 3 + "0123456789abcd"
BUILD = "b-0123456789abcdef"
POOL = "migraphx-gfx942-304cu.rocm7.2-migraphx2.15-1a2b3c4d"

Document = dict[str, Any]


class FakeArtifactsThatNoteKeys:
    """Keeps documents in memory, and notes every key that it is asked for, behind the verb."""

    def build_id_of(self, *parts: str) -> str:
        return f"b-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:16]}"

    def with_patience(self, seconds: float) -> FakeArtifactsThatNoteKeys:
        return self

    def __init__(self, **there: bytes) -> None:
        self.asked: list[str] = []
        self.there = there

    def get_object(self, key: str) -> Object | None:
        self._note("get", key)
        return Object(key, self.there[key], "etag") if key in self.there else None

    def put_object(self, key: str, data: bytes, **_: Any) -> str:
        self._note("put", key)
        self.there[key] = data
        return "etag"

    def put_blob_bytes(self, data: bytes) -> tuple[str, int]:
        return DIGEST, len(data)

    def delete_object(self, key: str, **_: Any) -> None:
        self._note("delete", key)
        self.there.pop(key, None)

    def list_objects(self, prefix: str) -> Iterator[str]:
        self._note("list", prefix)
        return iter(sorted(key for key in self.there if key.startswith(prefix)))

    def list_entries(self, prefix: str) -> Iterator[Any]:
        self._note("list", prefix)
        return iter(())

    def list_folders(self, prefix: str) -> list[str]:
        self._note("list", prefix)
        return sorted({key.removeprefix(prefix).partition("/")[0] for key in self.there if key.startswith(prefix)})

    def _note(self, verb: str, key: str) -> None:
        if f"{verb} {key}" not in self.asked:
            self.asked.append(f"{verb} {key}")


def object_storage() -> Document:
    """Keys of every kind of object, and what each part of the farm asks for."""
    return {
        "keys": {
            "blob": blob_key(DIGEST),
            "blobs": BLOBS,
            "upload": upload_key("pr-7", DIGEST),
            "uploads": UPLOADS,
            "quarantine": QUARANTINE,
            "marks": MARKS,
            "sidecar": sidecar_key("pr-7", DIGEST),
            "sidecars": artifacts_prefix("pr-7"),
            "reference outputs": reference_key("pr-7", DIGEST),
            "statements": statements_key("pr-7", DIGEST),
        },
        "readable": {"main": readable("main"), "pr-7": readable("pr-7")},
        "ref of finished builds": LATEST,
        "asked": {
            "refs": _asked_by_refs(),
            "index": _asked_by(lambda store: list(rebuild(store, "pr-7"))),
            "tokens": _asked_by(lambda store: Tokens(store).find("secret"), lambda store: Tokens(store).list()),
            "tuning": _asked_by_tuning(),
            "garbage": _asked_by(documents),
            "builds": _asked_by_builds(),
        },
        "token": sorted(_token()),
    }


def _asked_by(*actions: Any, **there: bytes) -> list[str]:
    store = FakeArtifactsThatNoteKeys(**there)
    for action in actions:
        with suppress(FarmError):
            action(store)
    return sorted(store.asked)


def _asked_by_refs() -> list[str]:
    return _asked_by(lambda store: Refs(store).find("pr-7", "v1.0"), lambda store: list(Refs(store).list("pr-7")))


def _asked_by_tuning() -> list[str]:
    def database(store: Any) -> TuningDatabase:
        return TuningDatabase(store, "pr-7", POOL, "mi300x", "quick")

    return _asked_by(
        lambda store: database(store).head(),
        lambda store: database(store).since(frozenset()),
        lambda store: list(databases(store, ["pr-7"])),
    ) + [re.sub(r"[0-9a-f]{64}", "<digest>", each) for each in _asked_by(lambda s: database(s).commit(Snapshot()))]


def _asked_by_builds() -> dict[str, list[str]]:
    """What builds ask for, with a store that has forgotten them; one that ended has its report written."""
    plan = {"build": {"id": BUILD, "name": "net", "namespace": "pr-7", "max_parallel": None}, "cells": []}
    there = {
        f"ns/pr-7/builds/{BUILD}/plan.json": json.dumps(plan).encode(),
        f"ns/pr-7/builds/{BUILD}/manifest.yaml": b"version: 1",
        f"ns/pr-7/open/{BUILD}": b"{}",
    }
    ended = {"id": BUILD, "namespace": "pr-7", "state": "ended", "accepted": 0, "cells": 0, "max_parallel": None}
    ended |= {
        "name": "net",
        "labels": {},
        "verdict": None,
        "paused": False,
        "created_at": 1.0,
        "ended_at": 2.0,
        "counts": {"failed": 0, "cancelled": 0},
    }

    def asked(do: Any, row: Document | None = None) -> list[str]:
        store = MagicMock()
        store.builds.get.side_effect = lambda build_id: row if build_id == BUILD else None
        store.builds.list.return_value = []
        store.builds.cells.return_value = []
        store.workers.pools.return_value = []
        store.workers.pool_names.return_value = {POOL}
        store.history.builds.return_value = []

        def in_farm(artifacts: Any) -> None:
            with TemporaryDirectory() as folder:
                farm = Farm(load_settings({}, data_dir=Path(folder)))
                farm.store, farm.artifacts = store, artifacts
                do(farm)

        return _asked_by(in_farm, **there)

    return {
        "report": asked(lambda farm: farm.build_reader.report("pr-7", BUILD)),
        "retry": asked(lambda farm: farm.builds.retry("pr-7", BUILD, "b-1", failed=False, by="me")),
        "cancel": asked(lambda farm: farm.builds.cancel("pr-7", BUILD)),
        "resume": asked(lambda farm: farm.admission.resume()),
        "pause pool": asked(lambda farm: farm.builds.pause_pool(POOL, paused=True)),
        "resume pool": asked(lambda farm: farm.builds.pause_pool(POOL, paused=False)),
        "finish": asked(lambda farm: farm.build_finisher.finish(BUILD), ended),
    }


def _token() -> Document:
    """A token's document, without its secret."""
    store = FakeArtifactsThatNoteKeys()
    Tokens(store).create("ci", Role.SUBMITTER, "pr-7")  # type: ignore[arg-type]
    [document] = store.there.values()
    found: Document = json.loads(document)
    return found


def redis() -> Document:
    """Every sort of key that Python (a tuple) and Lua name; what is not a literal there is `*`."""
    folder = Path(FARM).parent
    python = "\n".join(path.read_text(encoding="utf-8") for path in (folder / "store").glob("*.py"))
    lua = "\n".join(path.read_text(encoding="utf-8") for path in folder.rglob("*.lua"))
    word = partial(re.sub, r'^(?!").*$', "*")
    known = re.findall(r"^\| `([a-z]+)", (ROOT / "docs/job-store.md").read_text(), re.MULTILINE)
    tuples = re.findall(rf'(?<!\w)\(("(?:nothing|{"|".join(known)})"[^()]*)\)', python)
    calls = [
        [part for part in each.split(",") if part] for each in (*tuples, *re.findall(r'\bkey\(("[^()]*)\)', python))
    ]
    # A longer one names the fields of a hash.
    sorts = {":".join(word(part.strip()).strip('"') for part in call) for call in calls if len(call) <= 3}
    term = r'"[^"]*"|\([^()]*\)|[\w.\[\]]+'
    lua = re.sub(r"^local [A-Z, ]+ = FARM.*", "", lua, flags=re.MULTILINE)  # beginnings, not names
    for start, terms in re.findall(rf"\b(FARM|BUILD|JOB|NODE|POOL|WORKER)((?: \.\. (?:{term}))+)", lua):
        parts = [word(part).strip('"') for part in re.findall(term, terms.replace(" .. ", " "))]
        sorts.add("".join(["" if start == "FARM" else f"{start.lower()}:", *parts]).replace("**", "*"))
    return {
        "prefix": key("*"),
        "keys": {name: list(found) for name, found in groupby(sorted(sorts), lambda each: each.partition(":")[0])},
    }
