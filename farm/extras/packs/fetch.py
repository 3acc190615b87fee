"""`farm fetch --layout`: a pack of a ref's cell, from what the farm has of it."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from farm.client.fetching import Fetched, bring_model, into, require_model, write_artifact
from farm.client.packs import SIDECAR, Layout
from farm.extras.packs.layouts import require_fit
from farm.extras.packs.writing import write_pack

if TYPE_CHECKING:
    from farm.client.client import FarmClient
    from farm.client.family import FamilyMember


def fetch(
    client: FarmClient, member: FamilyMember, folder: Path, layout: str, *, ref: str, python: str, force: bool
) -> Fetched:
    """Write a pack of a ref's cell into `folder`; as `FarmClient.fetch`."""
    cell, sidecar = member
    artifacts, wanted = client.artifacts, Layout(layout)
    # The wrapper that the farm signed; the files of the other layouts depend on what is installed here.
    own = wanted is Layout.ONNXRUNTIME and sidecar["spec"]["compiler"]["name"] == "migraphx"
    sidecar, signed = artifacts.described(member, ref, ("pack",) if own else ())
    require_fit(wanted, sidecar)
    with into(folder), tempfile.TemporaryDirectory() as scratch:
        found = write_artifact(artifacts.bring, cell, sidecar, Path(scratch), log=False)

        def model(place: Path) -> Path:
            order = artifacts.work_order(sidecar)["order"]
            require_model(order, sidecar)
            return bring_model(artifacts.bring, order, place)

        name = cell["identifier"]
        pack = write_pack(
            wanted, sidecar, found.program, folder, model, identifier=name, python=python, force=force, signed=signed
        )
        if signed and client.trust:
            from farm.extras.packs.signing import sign_pack

            sign_pack(client.trust, pack, signed)
    program = next(path for path in pack.files if path.suffix == found.program.suffix)
    return replace(found, folder=folder, program=program, sidecar=folder / SIDECAR, pack=pack)
