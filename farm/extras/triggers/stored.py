"""Stored manifests: what is kept under a name, and what the API says about it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import ConfigDict, Field, with_config
from typing_extensions import TypedDict

from farm.matrix.planned import FrozenManifest, SubmissionDocument
from farm.wire.asked import ChosenGates, Labels


class ManifestVersion(TypedDict):
    """One version of a stored manifest. `digest` is that of its content, `pushed` is in Unix seconds."""

    version: int
    digest: str
    pushed: float
    by: str


@with_config(ConfigDict(extra="forbid"))
class BuildWish(TypedDict):
    """What to build of a stored manifest: a version (default: the newest), labels, and gates laid over its own."""

    version: Annotated[int | None, Field(ge=1, default=None)]
    labels: Annotated[Labels, Field(default={})]
    gates: Annotated[ChosenGates | None, Field(default=None)]


class TriggerRun(TypedDict):
    """What came of a trigger: the build that it made of a version at a time (Unix seconds), or why it made none."""

    at: float
    why: str
    version: int
    build: str
    error: str


class TriggerView(TypedDict):
    """A trigger of a stored manifest.

    `text` is what it waits for: a schedule, an object, a target. `next` is when a schedule is due (Unix seconds).
    `problem` says what keeps it from firing now, `last` what came of it when it last fired.
    """

    kind: str
    text: str
    timezone: str
    next: float | None
    problem: str
    last: TriggerRun | None


class StoredManifest(TypedDict):
    """A stored manifest: its newest version is `version`; `versions` has those that are kept, the oldest first."""

    name: str
    version: int
    versions: list[ManifestVersion]
    triggers: list[TriggerView]


class ShownManifest(StoredManifest):
    """A stored manifest with the content of one version: `shown` is its number."""

    shown: int
    content: FrozenManifest


def as_submission(content: FrozenManifest, build_id: str, labels: Mapping[str, str]) -> SubmissionDocument:
    """Return the submission that a version's content stands for, with these labels in addition."""
    return {**content, "build_id": build_id, "labels": {**content["labels"], **labels}}
