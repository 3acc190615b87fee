"""What every reader gets of refs, on a real farm, is what the rules of `docs/refs.md` say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastapi import FastAPI

from farm.settings import Settings
from tests.support.ref_machine import CALM, QUICK, STRICT, Wish, World

OLD, NEW, NEWEST = "onnxruntime1.3", "onnxruntime1.30", "onnxruntime1.31"

WALK: list[tuple[str, dict[str, Any]]] = [
    ("fleet", {"versions": ("1.3", "1.30")}),
    # A pull request reads what `main` has: its toolchain of two, and its baseline.
    ("build", {"namespace": "pr", "wish": Wish(commit=2, batches=(1,), baseline="prod"), **CALM}),
    # One toolchain's name begins as the other's does.
    ("shadow", {"namespace": "main", "ref": "prod", "named": NEW, "is_promoted": True, **CALM}),
    # Readers lost the old one by a submission, and get it again.
    ("build", {"namespace": "main", "wish": Wish(toolchain=NEW), **CALM}),
    ("tag", {"namespace": "main", "tag": "prod", "source": "latest", "which": 0, "previous": False}),
    ("roll_back", {"namespace": "main", "ref": "prod", "named": ""}),
    # The ref has what is promoted, but readers do not get it.
    ("shadow", {"namespace": "main", "ref": "prod", "named": NEW, "is_promoted": True, **CALM}),
    ("roll_back", {"namespace": "main", "ref": "prod", "named": OLD}),
    # The build of the later submission ends first.
    ("submit", {"namespace": "main", "wish": Wish(commit=3, batches=(1,), toolchain=NEW)}),
    ("build", {"namespace": "main", "wish": Wish(commit=2, batches=(1,), toolchain=NEW), **CALM}),
    # What was made first is submitted last.
    ("build", {"namespace": "main", "wish": Wish(batches=(8,), toolchain=NEW), **CALM}),
    ("tighten", {"namespace": "main", "at_once": True}),
    ("insist", {"namespace": "main", "word": "promote"}),
    # A ref that was made again is not the one of the first shadow build.
    ("forget", {"namespace": "main", "tag": "prod"}),
    ("tag", {"namespace": "main", "tag": "prod", "source": "latest", "which": 0, "previous": False}),
    ("promote", {"which": 0, "force": True}),
    # A person's word ends a refusal.
    ("insist", {"namespace": "main", "word": "tag"}),
    # What failed as expected is not tried again.
    ("acknowledge", {"namespace": "pr", "batch": 1, "kind": "budget"}),
    ("build", {"namespace": "pr", "wish": Wish(commit=7, batches=(1,), budget=QUICK), **CALM, "seconds": 20.0}),
    ("retry", {"which": -1, "failed": True}),
    # What a shadow build says against a program is not kept.
    ("fleet", {"versions": ("1.3", "1.30", "1.31")}),
    ("build", {"namespace": "main", "wish": Wish(commit=5, batches=(1,), toolchain=OLD, tolerance=STRICT), **CALM}),
    ("shadow", {"namespace": "main", "ref": "latest", "named": NEW, "is_promoted": False, **CALM, "error": 0.01}),
    ("build", {"namespace": "main", "wish": Wish(commit=5, batches=(1,), toolchain=NEW), **CALM}),
    # Of three toolchains, readers get what they lost last, or the one that is named.
    ("build", {"namespace": "main", "wish": Wish(commit=5, batches=(1,), toolchain=NEWEST), **CALM}),
    ("roll_back", {"namespace": "main", "ref": "latest", "named": ""}),
    ("roll_back", {"namespace": "main", "ref": "latest", "named": OLD}),
    ("roll_back", {"namespace": "main", "ref": "latest", "named": ""}),
    # Of two model files that one build compiled, the family is that of the first shape.
    ("build", {"namespace": "main", "wish": Wish(commit=9, batches=(8,), toolchain=NEW), **CALM}),
    ("build", {"namespace": "main", "wish": Wish(commit=8, batches=(1,), toolchain=NEW), **CALM}),
    ("shadow", {"namespace": "main", "ref": "latest", "named": NEWEST, "is_promoted": False, **CALM}),
    ("tag", {"namespace": "main", "tag": "prod", "source": "build", "which": -1, "previous": False}),
]


def test_readers_get_what_the_rules_say_whatever_builds_and_people_do(
    settings: Settings, api: tuple[FastAPI, str], s3_client: Any, tmp_path: Path
) -> None:
    """On one way past each fault that refs had; fault 41 takes ways at random."""
    World(settings, *api, s3_client, tmp_path).walk(WALK)
