"""Models that the farm itself reads: `s3:` sources, in buckets that the operator lists, checked in a sealed child."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import cast

from farm.artifacts.ownership import lacking
from farm.artifacts.s3 import S3Store
from farm.compiling.child_process import Seal, run_child
from farm.compiling.failures import ChildLimits, classify
from farm.compiling.requests import check_of
from farm.errors import UsageError
from farm.jobs.state import Fault
from farm.models.model import FrozenModel, UnreadableModel, read_model
from farm.runner.documents import CheckAnswer

SIZE_LIMIT = 16 << 30
"""Bytes of one model at most, with its external data."""

MAX_PARTS = 1000
"""Files of external data of one model."""

CHECK_LIMITS = ChildLimits(time=300.0, memory=32 << 30)


class BucketModels:
    """Freezes models in buckets; unchanged models are not read again."""

    def __init__(self, artifacts: S3Store, buckets: tuple[str, ...]) -> None:
        """Read only from `buckets`: the operator's list, never a name that a manifest brings."""
        self._artifacts = artifacts
        self._buckets = buckets
        self._read = lru_cache(maxsize=256)(self._bring)

    def freeze(self, url: str, format: str, sha256: str = "", outputs: tuple[str, ...] = ()) -> FrozenModel:
        """Copy a model (`s3://bucket/key`) into the farm's blobs and return it.

        Raises UsageError for a bucket that is not listed and a missing or unexpected object, UnreadableModel for an
        object that is not a model.
        """
        bucket, _, key = url.removeprefix("s3://").partition("/")
        if bucket not in self._buckets:
            allowed = ", ".join(self._buckets) or "none"
            raise UsageError(
                f"the farm reads no models from bucket {bucket}",
                hint=f"the operator allows: {allowed} (setting s3_sources); or upload the file with `path:`",
            )
        wanted = (bucket, key, self._artifacts.sources.version(bucket, key), format, outputs)
        model, parts = self._read(*wanted)
        if lacking(self._artifacts, {file["digest"]: file["size"] for file in model["files"]}) or any(
            self._artifacts.sources.version(bucket, part) != version for part, version in parts.items()
        ):
            self._read.cache_clear()
            model, _ = self._read(*wanted)
        if sha256 and model["files"][0]["digest"] != sha256:
            raise UsageError(f"{url} does not have the promised SHA-256", hint=f"it has {model['files'][0]['digest']}")
        return model

    def _bring(
        self, bucket: str, key: str, version: str, format: str, outputs: tuple[str, ...]
    ) -> tuple[FrozenModel, dict[str, str]]:
        """Return the model, and the keys of its external data with the versions that were read.

        External data is below the model's own prefix, so that no key leaves it.
        """
        prefix, slash, name_of_model = key.rpartition("/")
        parts: dict[str, str] = {}
        with tempfile.TemporaryDirectory(prefix="farm-source-") as name:
            folder = Path(name)
            path = folder / "model" / (name_of_model or "model")
            path.parent.mkdir()
            self._artifacts.sources.get(bucket, key, version, path, limit=SIZE_LIMIT)
            left = SIZE_LIMIT - path.stat().st_size
            for location in self._external(path, format, outputs):
                file, part = path.parent / location, f"{prefix}{slash}{location}"
                parts[part] = self._artifacts.sources.version(bucket, part)
                file.parent.mkdir(parents=True, exist_ok=True)
                self._artifacts.sources.get(bucket, part, parts[part], file, limit=left)
                left -= file.stat().st_size
            model = read_model(path, format, outputs, check=_checked_in_child)
            for reference in model["files"]:
                self._artifacts.put_blob_file(path.parent / reference["path"], digest=reference["digest"])
            return model, parts

    @staticmethod
    def _external(path: Path, format: str, outputs: Sequence[str]) -> Sequence[str]:
        """Return the paths of external data that a model names."""
        locations = _checked_in_child(path, format, outputs, alone=True)["external_files"]
        if len(locations) > MAX_PARTS:
            raise UnreadableModel(f"{path.name} has external data in more than {MAX_PARTS} files")
        return locations


def _checked_in_child(path: Path, format: str, outputs: Sequence[str], *, alone: bool = False) -> CheckAnswer:
    """Check an untrusted model: its parser runs in a child, never in the farm's own process."""
    scratch = path.parent.parent
    end = run_child(
        check_of(path, format, outputs, alone=alone),
        log_path=scratch / "log.txt",
        folder=scratch,
        limits=CHECK_LIMITS,
        seal=Seal(read=[path.parent]),
    )
    if end.result is not None and end.ok:
        return cast(CheckAnswer, end.result)
    failure = classify(end)
    if failure is None or failure.kind.policy.fault is Fault.FARM:
        raise UsageError(f"{path.name} could not be checked: {failure.message if failure else 'interrupted'}")
    raise UnreadableModel(f"{path.name}: {failure.message}", failure.kind)
