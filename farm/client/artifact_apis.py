"""What a client asks about artifacts: `client.refs` and `client.artifacts`, from a farm or from its storage alone."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, cast

from farm.artifacts.refs import ListedRefs, RefView, ShownRef, SnapshotCell
from farm.artifacts.storage import SignedSidecar
from farm.client.transfers import Downloads, OnDownload
from farm.client.transport import Api, named
from farm.errors import ArtifactGone, Conflict, FarmFault, NotFound, Untrusted
from farm.units import by_number
from farm.wire.checking import checked

if TYPE_CHECKING:
    from farm.client.fetching import FamilyMember, SignedArtifact
    from farm.jobs.rows import ReproductionDocument
    from farm.spec import FileReference
    from farm.wire.program import Sidecar


class RefsApi(Api):
    """The refs of a namespace: names that point to artifacts, one for each cell."""

    def all(self) -> list[str]:
        """Return the tags of the refs."""
        return self._transport.items("/v1/refs", str)

    def moves(self) -> list[RefView]:
        """Return where each ref points, since when, and which namespace has it."""
        found = self._transport.get("/v1/refs", ListedRefs, moves=True)["refs"] or []
        return sorted(found, key=lambda ref: by_number(ref["tag"]))

    def get(self, tag: str) -> ShownRef:
        """Return a ref and the cells that it names. Raises NotFound."""
        return self._trusted(tag, lambda: self.unchecked(tag))

    def unchecked(self, tag: str) -> ShownRef:
        """Return a ref as the farm answers it, whatever this client trusts. Raises NotFound."""
        return self._transport.ref(tag)

    def _trusted(self, tag: str, ask: Callable[[], ShownRef]) -> ShownRef:
        trust = self._client.trust
        return trust.ref(tag, ask) if trust else ask()

    def cells(self, tag: str = "latest") -> list[SnapshotCell]:
        """Return the cells that a ref names, each with cache key and program. Raises NotFound.

        If the farm is away, what it answered last counts (`FarmClient.kept`).
        """
        kept = self._client.kept
        found = self._trusted(tag, lambda: cast("ShownRef", kept.ask(f"ref {tag}", lambda: self.unchecked(tag))))
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
        signed, generation = self._promised(tag, source, generation, previous=previous)
        body, path = {"source": source, "previous": previous, **signed}, f"/v1/refs/{named('ref', tag)}"
        try:
            return self._transport.ask("PUT", path, RefView, json=body, params=_condition(generation))
        except Conflict:
            now = self.get(tag) if rolls_back else None
            if not before or not now or (now["generation"] - 1, now["snapshot"]) != (generation, before["previous"]):
                raise
            return now  # It was us: the answer to the first request was lost.

    def remove(self, tag: str, *, generation: int | None = None) -> None:
        """Forget a ref; the artifacts that it names stay. Raises as `move`."""
        with contextlib.suppress(ArtifactGone):  # What cannot be read can be deleted.
            self.unchecked(tag)
        signed, generation = self._promised(tag, "", generation)
        path, condition = f"/v1/refs/{named('ref', tag)}", _condition(generation)
        with contextlib.suppress(NotFound):  # Deleted meanwhile, perhaps by our first request, whose answer was lost.
            self._transport.request("DELETE", path, params=condition, json=signed or None)

    def _promised(
        self, tag: str, source: str, generation: int | None, *, previous: bool = False
    ) -> tuple[dict[str, str], int | None]:
        """Return what a promoter sends with a move, and the generation from which the ref moves."""
        trust = self._client.trust
        promise = trust.promise(self._client, tag, source, previous=previous) if trust else None
        if promise is None:
            return {}, generation
        return {"signed": promise[0]}, promise[1] if generation is None else generation


class ArtifactsApi(Api):
    """Artifacts by their cache keys: sidecars, what is signed about them, and their files."""

    on_download: OnDownload | None = None
    """Called while a blob is downloaded."""

    any_name = False
    """Whether a trust policy may be met by what was signed under another model's name: a hit of the same cell."""

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
        """Return what reruns the attempt that made an artifact. Raises NotFound if that was not kept, ArtifactGone."""
        from farm.client.fetching import read_work_order

        blob = sidecar["blobs"].get("reproduction")
        if not blob:
            raise NotFound(f"the artifact {sidecar['key']} was published without its work order")
        return read_work_order(self._read(blob), sidecar, self._transport.url)

    def _read(self, blob: FileReference) -> bytes:
        with tempfile.TemporaryDirectory() as folder:
            return self.download(blob, Path(folder)).read_bytes()

    # --- signatures ---------------------------------------------------------------------------------------------

    def signed(self, key: str, *, tag: str = "") -> SignedArtifact | None:
        """Return the sidecar of a cache key as it is stored, and what is signed about it; None if nothing is.

        `tag` is the ref by which it was found.

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
        if trust and asks:
            trust.admit(signed, key=key, tag=tag)
        return signed

    def stored(self, key: str) -> SignedSidecar:
        """Return the sidecar of a cache key as it is stored, and the statements about it. Raises NotFound."""
        found = self._client.kept.ask(f"statements {key}", lambda: self._transport.statements(key))
        return checked(found, SignedSidecar, self._transport.url)

    def described(self, member: FamilyMember, ref: str) -> tuple[Sidecar, SignedArtifact | None]:
        """Return the sidecar of a ref's cell, the signed one if there is one, and what is signed, as `signed`.

        Raises ArtifactGone if it describes other bytes or another compile than the ref names, Untrusted if another
        cell's name is signed.
        """
        from farm.client.fetching import require_asked, require_named, require_spec

        cell, sidecar = member
        try:
            signed = self.signed(cell["key"], tag=ref)
        except Untrusted as error:
            raise Untrusted(error.message.replace(cell["key"], cell["identifier"]), hint=error.hint) from None
        sidecar = signed.sidecar if signed else sidecar
        require_named(cell, sidecar, ref)
        if self._client.trust and self._client.trust.asks:
            require_asked(cell, sidecar, any_name=self.any_name)
        require_spec(cell, sidecar, ref)
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
        location, lock = "", Lock()

        def reads(start: int, end: int, write: Callable[[bytes], None]) -> None:
            nonlocal location
            with lock:
                url = location = location or self._transport.location(blob["digest"], place.name)
            try:
                self._transport.read(url, place.name, start, end, write, whole=end - start == blob["size"])
            except FarmFault:
                location = ""  # It may have expired.
                raise

        self._downloads.bring({**blob, "path": place.name}, place, reads, self.on_download)


def _condition(generation: int | None) -> dict[str, int]:
    return {} if generation is None else {"generation": generation}
