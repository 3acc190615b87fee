"""Models that the farm itself reads: `s3:` sources, in buckets that the operator lists, checked in a sealed child."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from farm.artifacts import ArtifactStore
from farm.child import Limits, Seal, classify, run_child
from farm.errors import UsageError
from farm.jobs.state import Fault
from farm.models import FrozenModel, UnreadableModel, read_model

SIZE_LIMIT = 8 << 30
"""Bytes of one model at most."""

CHECK_LIMITS = Limits(time=300.0, memory=32 << 30)


class BucketModels:
    """Freezes models that lie in buckets; what did not change there is not read again."""

    def __init__(self, artifacts: ArtifactStore, buckets: tuple[str, ...]) -> None:
        """Read only from `buckets`: the operator's list, never a name that a manifest brings."""
        self._artifacts = artifacts
        self._buckets = buckets
        self._read = lru_cache(maxsize=256)(self._bring)

    def freeze(self, url: str, format: str, sha256: str = "", outputs: tuple[str, ...] = ()) -> FrozenModel:
        """Bring a model (`s3://bucket/key`) into the farm's blobs and return what it is.

        Raises UsageError for a bucket that is not listed, an object that is not there or not the promised one, and
        UnreadableModel for one that is no model.
        """
        bucket, _, key = url.removeprefix("s3://").partition("/")
        if bucket not in self._buckets:
            allowed = ", ".join(self._buckets) or "none"
            raise UsageError(
                f"the farm reads no models from bucket {bucket}",
                hint=f"the operator allows: {allowed} (setting s3_sources); or bring the file by `path:`",
            )
        model = self._read(bucket, key, self._artifacts.source_version(bucket, key), format, outputs)
        if sha256 and model.files[0]["digest"] != sha256:
            raise UsageError(f"{url} does not have the promised SHA-256", hint=f"it has {model.files[0]['digest']}")
        return model

    def _bring(self, bucket: str, key: str, version: str, format: str, outputs: tuple[str, ...]) -> FrozenModel:
        with tempfile.TemporaryDirectory(prefix="farm-source-") as name:
            folder = Path(name)
            path = folder / "model" / (key.rpartition("/")[2] or "model")
            path.parent.mkdir()
            self._artifacts.get_source(bucket, key, version, path, limit=SIZE_LIMIT)
            model = read_model(path, format, outputs, check=_checked_in_child)
            self._artifacts.put_blob_file(path, digest=model.files[0]["digest"])
            return model


def _checked_in_child(path: Path, format: str, outputs: Sequence[str]) -> Mapping[str, Any]:
    """Check a model that nobody vouches for: its parser runs in a child, never in the farm's own process."""
    request = {"action": "check", "compiler": "onnxruntime", "device": "cpu"}
    scratch = path.parent.parent
    end = run_child(
        {**request, "model": {"path": str(path), "format": format, "outputs": list(outputs)}},
        log_path=scratch / "log.txt",
        folder=scratch,
        limits=CHECK_LIMITS,
        seal=Seal(read=[path.parent]),
    )
    if end.result is not None and end.ok:
        return end.result
    failure = classify(end)
    if failure is None or failure.kind.policy.fault is Fault.FARM:
        raise UsageError(f"{path.name} could not be checked: {failure.message if failure else 'interrupted'}")
    raise UnreadableModel(f"{path.name}: {failure.message}", failure.kind)
