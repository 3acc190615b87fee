"""What a client asks about artifacts: `client.refs` and `client.artifacts`, from a farm or from its storage alone."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, cast

from farm.artifacts.refs import ListedRef, ListedRefs, RefView, ShownRef, SnapshotCell
from farm.artifacts.storage import SignedSidecar
from farm.client.paths import named
from farm.client.topic import Api
from farm.client.transfers import Downloads, OnDownload, WantedBlob
from farm.errors import ArtifactGone, Conflict, FarmFault, NotFound, Untrusted
from farm.units import by_number
from farm.wire.checking import checked, parsed

if TYPE_CHECKING:
    from farm.client.family import FamilyMember
    from farm.client.fetching import SignedArtifact
    from farm.jobs.rows import ReproductionDocument
    from farm.spec import FileReference
    from farm.wire.program import Sidecar


class RefsApi(Api):
    """The refs of a namespace: names that point to artifacts, one for each cell."""

    def all(self) -> list[str]:
        """Return the tags of the refs."""
        return self._transport.items("/v1/refs", str)

    def moves(self) -> list[ListedRef]:
        """Return where each ref points, since when, and which namespace has it."""
        return self._transport.get("/v1/refs", ListedRefs, moves=True)["refs"] or []

    def get(self, tag: str) -> ShownRef:
        """Return a ref and the cells that it names. Raises NotFound."""
        return self._transport.ref(tag)

    def cells(self, tag: str = "latest") -> list[SnapshotCell]:
        """Return the cells that a ref names, each with cache key and program. Raises NotFound.

        If the farm is away, what it answered last counts (`FarmClient.kept`).
        """
        found: ShownRef = self._client.kept.ask(f"ref {tag}", lambda: self.get(tag))
        return sorted(found["cells"].values(), key=lambda cell: by_number(cell["identifier"]))

    def move(self, tag: str, source: str, *, previous: bool = False, generation: int | None = None) -> RefView:
        """Let a ref point to what `source` names, or with `previous` named before its last move; return it.

        `generation` makes it conditional: only if the ref has that one (0: if there is none).

        Raises NotFound without such a source, Conflict if the condition does not hold.
        """
        rolls_back = previous and source == tag
        before = self.get(tag) if rolls_back else None
        if before and generation is None:
            # Else a request that is repeated, because its answer was lost, would roll forward again.
            generation = before["generation"]
        body = {"source": source, "previous": previous}
        path = f"/v1/refs/{named('ref', tag)}"
        try:
            return self._transport.ask("PUT", path, RefView, json=body, params=_condition(generation))
        except Conflict:
            now = self.get(tag) if rolls_back else None
            if not before or not now or (now["generation"] - 1, now["snapshot"]) != (generation, before["previous"]):
                raise
            return now  # It was us: the answer to the first request was lost.

    def remove(self, tag: str, *, generation: int | None = None) -> None:
        """Forget a ref; the artifacts that it names stay. Raises as `move`."""
        self.get(tag)
        with contextlib.suppress(NotFound):  # Deleted meanwhile, perhaps by our first request, whose answer was lost.
            self._transport.request("DELETE", f"/v1/refs/{named('ref', tag)}", params=_condition(generation))


class ArtifactsApi(Api):
    """Artifacts by their cache keys: sidecars, what is signed about them, and their files."""

    on_download: OnDownload | None = None
    """Called while a blob is downloaded."""

    _refreshed = False

    @cached_property
    def _downloads(self) -> Downloads:
        return Downloads(self._client.cache)

    def get(self, key: str) -> Sidecar:
        """Return the sidecar of a cache key. Raises NotFound, or ArtifactGone if it is damaged."""
        return self._transport.sidecar(key)

    def sidecar_of(self, cell: SnapshotCell) -> Sidecar:
        """Return the sidecar of a ref's cell, kept as `client.refs.cells` does it. Raises ArtifactGone."""
        try:
            found: Sidecar = self._client.kept.ask(f"artifact {cell['key']}", lambda: self.get(cell["key"]))
            return found
        except NotFound as error:
            raise ArtifactGone(f"{cell['identifier']}: {error.message}", hint=error.hint) from None

    def log(self, key: str) -> bytes:
        """Return the log of the attempt that made an artifact. Raises NotFound if none was kept."""
        blob = self.get(key)["blobs"].get("log")
        if not blob:
            raise NotFound(f"the artifact {key} was published without a log")
        return self._read(blob)

    def work_order(self, sidecar: Sidecar) -> ReproductionDocument:
        """Return what reruns the attempt that made an artifact. Raises NotFound if that was not kept."""
        from farm.jobs.order import WorkOrder

        blob = sidecar["blobs"].get("reproduction")
        if not blob:
            raise NotFound(f"the artifact {sidecar['key']} was published without its work order")
        url = self._transport.url
        found = checked(parsed(self._read(blob), url), dict[str, Any], url)
        checked(found["order"], WorkOrder, url)
        return cast("ReproductionDocument", found)

    def _read(self, blob: FileReference) -> bytes:
        with tempfile.TemporaryDirectory() as folder:
            return self.download(blob, Path(folder)).read_bytes()

    # --- signatures ---------------------------------------------------------------------------------------------

    def signed(self, key: str, *, tag: str = "", needs: tuple[str, ...] = ()) -> SignedArtifact | None:
        """Return the sidecar of a cache key as it is stored, and what is signed about it; None if nothing is.

        `tag` is the ref by which it was found, `needs` are kinds of statements that it needs besides the policy's.

        Raises Untrusted with the reasons if this client has a trust policy that refuses it.
        """
        from farm.client.fetching import SignedArtifact

        trust = self._client.trust
        asks = trust is not None and trust.asks
        try:
            found = self.stored(key)
        except FarmFault:  # It is away, and has never said any.
            if asks:
                raise
            return None
        if not (asks or found["statements"]):
            return None
        signed = SignedArtifact(found["sidecar"].encode(), [each.encode() for each in found["statements"]])
        return trust.admit(signed, self._transport, key=key, tag=tag, needs=needs) if trust and asks else signed

    def stored(self, key: str) -> SignedSidecar:
        """Return the sidecar of a cache key as it is stored, and the statements about it. Raises NotFound."""
        found = self._client.kept.ask(f"statements {key}", lambda: self._transport.statements(key))
        return checked(found, SignedSidecar, self._transport.url)

    def described(
        self, member: FamilyMember, ref: str, needs: tuple[str, ...] = ()
    ) -> tuple[Sidecar, SignedArtifact | None]:
        """Return the sidecar of a ref's cell, the signed one if there is one, and what is signed, as `signed`.

        Raises ArtifactGone if it describes other bytes than the ref names.
        """
        from farm.client.fetching import require_named

        cell, sidecar = member
        try:
            signed = self.signed(cell["key"], tag=ref, needs=needs)
        except Untrusted as error:
            raise Untrusted(error.message.replace(cell["key"], cell["identifier"]), hint=error.hint) from None
        sidecar = signed.sidecar if signed else sidecar
        require_named(cell, sidecar, ref)
        return sidecar, signed

    # --- files --------------------------------------------------------------------------------------------------

    def download(self, blob: FileReference, folder: Path) -> Path:
        """Write a sidecar's blob into a folder, under its own name, and return its path. Raises as `bring`."""
        from farm.client.fetching import file_name

        place = folder / file_name(blob["path"])
        self.bring(blob, place)
        return place

    def bring(self, blob: FileReference, place: Path) -> None:
        """Write a blob, which a sidecar or a work order names, to `place`; its folder exists.

        Raises ArtifactGone if it is not in object storage, or damaged there.
        """
        wanted = WantedBlob(blob["digest"], blob["size"], place.name)
        location, lock = "", Lock()

        def reads(start: int, end: int, write: Callable[[bytes], None]) -> None:
            nonlocal location
            with lock:
                url = location = location or self._transport.location(wanted.digest, wanted.name)
            try:
                self._transport.read(url, wanted.name, start, end, write, whole=end - start == wanted.size)
            except FarmFault:
                location = ""  # It may have expired.
                raise

        self._downloads.bring(wanted, place, reads, self.on_download)


def _condition(generation: int | None) -> dict[str, int]:
    return {} if generation is None else {"generation": generation}
