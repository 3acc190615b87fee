"""What a client asks about stored manifests: `client.manifests`."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Mapping

from farm.client.client import SubmittedBuild
from farm.client.freezing import Frozen
from farm.client.transfers import OnUpload
from farm.client.transport import Api, named
from farm.errors import InputsMissing, NotFound
from farm.extras.triggers.stored_manifests import ShownManifest, StoredManifest
from farm.manifest.parsing import parse_manifest
from farm.matrix.planned import ShownPlan
from farm.results.report import BuildView
from farm.wire.asked import ChosenGates


class ManifestsApi(Api):
    """The stored manifests of the namespace."""

    def all(self) -> list[StoredManifest]:
        """Return the stored manifests of the namespace."""
        return self._transport.items("/v1/manifests", StoredManifest)

    def get(self, name: str, version: int | None = None) -> ShownManifest:
        """Return a stored manifest with the content of a version, by default of the newest. Raises NotFound."""
        return self._transport.get(_manifest(name), ShownManifest, **_version(version))

    def push(self, frozen: Frozen, *, version: int | None = None, progress: OnUpload | None = None) -> StoredManifest:
        """Store a manifest under its own name, upload what the farm lacks, and return it with its versions.

        With `version` only if that is the newest one (0: if there is none). Raises Conflict if it is not.
        """
        content = {name: value for name, value in frozen.submission.items() if name != "build_id"}
        path = f"/v1/manifests/{parse_manifest(frozen.submission['manifest'], frozen.submission['file']).name}"

        def push() -> StoredManifest:
            return self._transport.ask(
                "PUT", path, StoredManifest, json=content, params=_version(version), timeout=300.0
            )

        try:
            return push()
        except InputsMissing as error:
            self._client.upload(frozen.files_of(error.blobs), progress)
        return push()

    def remove(self, name: str, *, version: int | None = None) -> None:
        """Remove a stored manifest with all versions; with `version` only if that is the newest. Raises NotFound."""
        self.get(name)
        with contextlib.suppress(NotFound):  # Removed meanwhile, perhaps by our first request, whose answer was lost.
            self._transport.request("DELETE", _manifest(name), params=_version(version))

    def build(
        self,
        name: str,
        *,
        version: int | None = None,
        labels: Mapping[str, str] | None = None,
        gates: ChosenGates | None = None,
        key: str = "",
    ) -> SubmittedBuild:
        """Build a stored manifest and return the build. The same `key` again is answered with the same build.

        Raises NotFound, and Conflict if the key was used for another wish.
        """
        body = _wish(version, labels, gates)
        headers = {"Idempotency-Key": key or secrets.token_hex(16)}
        found = self._transport.post(f"{_manifest(name)}/builds", BuildView, body, headers=headers, timeout=300.0)
        return SubmittedBuild(self._client, found)

    def plan(
        self,
        name: str,
        *,
        version: int | None = None,
        labels: Mapping[str, str] | None = None,
        gates: ChosenGates | None = None,
    ) -> ShownPlan:
        """Return what `build` would do now; as `FarmClient.plan`. Raises NotFound."""
        body = _wish(version, labels, gates)
        return self._transport.post(f"{_manifest(name)}/plan", ShownPlan, body, timeout=300.0)


def _manifest(name: str) -> str:
    return f"/v1/manifests/{named('manifest', name)}"


def _wish(version: int | None, labels: Mapping[str, str] | None, gates: ChosenGates | None) -> dict[str, object]:
    return {"version": version, "labels": dict(labels or {}), "gates": gates}


def _version(version: int | None) -> dict[str, int]:
    return {} if version is None else {"version": version}
