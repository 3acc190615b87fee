"""Stored manifests: what is kept under a name, and what the API says of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NotRequired

from typing_extensions import TypedDict

from farm.jobs.order import ChosenGates
from farm.matrix.planned import BlobSize, SubmissionDocument
from farm.models.data import FrozenDataDocument
from farm.models.model import FrozenModelDocument


class FrozenDocument(TypedDict):
    """A submission without its build: the manifest's text, and everything that it names, frozen to digests.

    Models in buckets (`s3:`) are not in it: each build reads them.
    """

    manifest: str
    file: str
    models: Mapping[str, FrozenModelDocument]
    data: Mapping[str, FrozenDataDocument]
    files: Mapping[str, BlobSize]
    labels: Mapping[str, str]
    gates: NotRequired[ChosenGates | None]


class ManifestVersion(TypedDict):
    """One version of a stored manifest. `digest` is that of its content, `pushed` is in Unix seconds."""

    version: int
    digest: str
    pushed: float
    by: str


class BuildWish(TypedDict):
    """What to build of a stored manifest: a version (None: the newest), labels, and gates laid over its own."""

    version: int | None
    labels: Mapping[str, str]
    gates: ChosenGates | None


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
    content: FrozenDocument


def as_submission(content: FrozenDocument, build_id: str, labels: Mapping[str, str]) -> SubmissionDocument:
    """Return the submission that a version's content stands for, with these labels in addition."""
    return {**content, "build_id": build_id, "labels": {**content["labels"], **labels}}
