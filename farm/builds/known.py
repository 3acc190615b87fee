"""Which artifacts are there already: what planning asks of the index and of object storage."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

from farm.artifacts.index import rebuild, without_program
from farm.artifacts.keys import readable
from farm.artifacts.s3 import S3Store
from farm.builds.plan import needed_blobs
from farm.errors import UsageError
from farm.jobs.facts import ArtifactFacts
from farm.matrix.planned import CellPlan
from farm.spec import SpecDocument
from farm.store import Store


class KnownArtifacts:
    """The artifacts that a namespace can read: its own and those of `main`."""

    def __init__(self, store: Store, artifacts: S3Store) -> None:
        self._store = store
        self._artifacts = artifacts
        self._filling = threading.Lock()

    def require_index(self, namespace: str) -> None:
        """Fill the index again from object storage if Redis has lost it."""
        for source in readable(namespace):
            # One thread fills it for all: reading every sidecar of a large farm takes a while.
            with self._filling:
                if not self._store.index.complete(source):
                    self._store.index.fill(source, rebuild(self._artifacts, source))

    def facts(self, namespace: str, keys: Sequence[str]) -> dict[str, ArtifactFacts]:
        """Return the facts of the whole artifacts among `keys`; asks `main` first."""
        known: dict[str, ArtifactFacts] = {}
        for source in readable(namespace):
            missing = [key for key in keys if key not in known]
            known |= self._store.index.get_many(source, missing)
        return known

    def whole(self, namespace: str, names: Mapping[str, Sequence[str]]) -> dict[str, ArtifactFacts]:
        """Return the facts of whole artifacts by any name; `names` has the cache keys of each, the best one first."""
        found = self.facts(namespace, [name for all_ in names.values() for name in all_])
        for name in without_program(self._artifacts, found):
            del found[name]  # The index follows within ten minutes.
        return {key: found[name] for key, all_ in names.items() for name in reversed(all_) if name in found}

    def require_inputs(self, cells: Sequence[CellPlan], of: str, remedy: str = "") -> None:
        """Check that object storage has what the planned cells of a build or a ref need. Raises UsageError.

        An earlier plan names these blobs, so marked ones need not be uploaded again. `remedy` says what else helps.
        """
        needed = needed_blobs((cell["state"], cell["order"]) for cell in cells)
        if absent := [digest for digest, size in needed.items() if not self._artifacts.has_blob(digest, size)]:
            raise UsageError(
                f"{len(absent)} inputs of {of} are gone from object storage, the first is {absent[0]}",
                hint=f"submit the manifest again, which uploads them{remedy}",
            )

    def read_spec(self, namespace: str, key: str) -> SpecDocument | None:
        """Return what the sidecar of an artifact says was compiled."""
        artifact = self._artifacts.lookup(readable(namespace), key)
        return artifact.sidecar["spec"] if artifact else None
