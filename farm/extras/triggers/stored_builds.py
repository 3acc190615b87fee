"""Builds of stored manifests."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from farm.extras.triggers.stored import BuildWish, as_submission
from farm.extras.triggers.stored_manifests import StoredManifests
from farm.matrix.planned import ShownPlan, SubmissionDocument
from farm.results.report import BuildView
from farm.spec import digest_of

if TYPE_CHECKING:
    from farm.app import Farm


class StoredBuilds:
    """Builds what is stored under a name."""

    def __init__(self, farm: Farm) -> None:
        self._manifests, self._builds = farm.part(StoredManifests), farm.builds

    def build(
        self,
        namespace: str,
        name: str,
        wish: BuildWish,
        build_id: str,
        *,
        by: str,
        max_cells: int = 0,
        warnings: Sequence[str] = (),
        unattended: bool = False,
    ) -> BuildView:
        """Build a stored manifest. A known build id is answered with its build, whatever was pushed since.

        The build has the label `manifest`, `NAME@VERSION`. `max_cells`, `warnings` and `unattended` as in
        `BuildService.submit`.

        Raises NotFound, and as `BuildService.submit`.
        """
        request = digest_of({"manifest": name, **wish})
        if before := self._builds.accepted_before(namespace, build_id, request):
            return before
        submission = self._submission(namespace, name, wish, build_id)
        return self._builds.submit(
            namespace,
            submission,
            by=by,
            max_cells=max_cells,
            request=request,
            warnings=warnings,
            unattended=unattended,
        )

    def plan(self, namespace: str, name: str, wish: BuildWish, build_id: str) -> ShownPlan:
        """Return what `build` would do now. Changes nothing. Raises NotFound, and as `BuildService.plan`."""
        return self._builds.plan(namespace, self._submission(namespace, name, wish, build_id))

    def _submission(self, namespace: str, name: str, wish: BuildWish, build_id: str) -> SubmissionDocument:
        number, content = self._manifests.content(namespace, self._manifests.head(namespace, name), wish["version"])
        submission = as_submission(content, build_id, {**wish["labels"], "manifest": f"{name}@{number}"})
        if wish["gates"]:
            submission["gates"] = wish["gates"]
        return submission


def build_id_of(*parts: str) -> str:
    """Return the build id that these texts stand for, always the same: what is asked for twice is built once."""
    return f"b-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:16]}"
