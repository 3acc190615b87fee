"""What a client asks about toolchains: `client.toolchains`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from farm.artifacts.refs import RefView
from farm.client.transport import Api, build_named
from farm.errors import Conflict
from farm.extras.radar.radar import RadarDocument
from farm.jobs.rows import ToolchainLine
from farm.results.report import BuildView

if TYPE_CHECKING:
    from farm.wire.asked import ChosenGates


class ToolchainsApi(Api):
    """The toolchains of each target, and what a ref gives readers of them."""

    def all(self, ref: str = "prod") -> list[ToolchainLine]:
        """Return the toolchains of each target, the oldest first, with what a ref names of them."""
        return self._transport.items("/v1/toolchains", ToolchainLine, ref=ref)

    def shadow(
        self,
        ref: str = "prod",
        toolchain: str = "",
        *,
        cells: Sequence[str] = (),
        gates: ChosenGates | None = None,
        against: str = "",
        defaults: bool = True,
        new_id: str = "",
    ) -> BuildView:
        """Create a build that compiles what a ref names under another toolchain, and return it. It moves no ref.

        `toolchain` is the start of its id; without it, it is the newest that has a worker. `cells` are patterns of
        identifiers (all if there are none), `gates` are laid over those that the cells have, `against` is an ended
        build to compare with in place of the ref. Without `defaults` only `gates` count, not those of the manifest.

        Raises NotFound if no such toolchain is known.
        """
        from farm.client.client import new_build_id

        body = {
            "build_id": new_id or new_build_id(),
            "ref": ref,
            "toolchain": toolchain,
            "cells": list(cells),
            "gates": gates,
            "against": against,
            "defaults": defaults,
        }
        return self._transport.post("/v1/toolchains/shadows", BuildView, body, timeout=300.0)

    def radar(self, build_id: str) -> RadarDocument:
        """Return what a shadow build found. Raises NotFound for another build."""
        return self._transport.get(f"/v1/builds/{build_named(build_id)}/radar", RadarDocument)

    def promote(self, build_id: str, *, force: bool = False) -> RefView:
        """Let the ref of a shadow build give readers its programs, and return the ref.

        Raises GateFailed if something speaks against it, unless `force` is set; Conflict if the ref has moved since.
        """
        whole_id = self._transport.get(f"/v1/builds/{build_named(build_id)}", BuildView)["id"]
        return self._transport.post("/v1/toolchains/promote", RefView, {"build_id": whole_id, "force": force})

    def roll_back(self, ref: str = "prod", toolchain: str = "", *, generation: int | None = None) -> RefView:
        """Let a ref give readers the programs of a toolchain that it has kept, by default the one before.

        With `generation` only if the ref has that one. Raises NotFound, Conflict.
        """
        before = None if toolchain else self._client.refs.get(ref)
        if before and generation is None:
            # Else a request that is repeated, because its answer was lost, would swap the programs again.
            generation = before["generation"]
        query = "" if generation is None else f"?generation={generation}"
        body = {"ref": ref, "toolchain": toolchain}
        try:
            return self._transport.post(f"/v1/toolchains/rollback{query}", RefView, body)
        except Conflict:
            if not before:
                raise
            now, swapped = self._client.refs.get(ref), (generation, before["snapshot"], before["cells"].keys())
            if (now["generation"] - 1, now["previous"], now["cells"].keys()) != swapped:
                raise
            return now  # It was us: the answer to the first request was lost.
