"""What is signed about packs: by the farm about the wrapper of each program, by a client about a pack that it wrote."""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from farm.client.fetching import ReaderTrust, SignedArtifact, bundle_lines, statements_path
from farm.client.packs import PACK, SIDECAR, Layout, Pack
from farm.errors import Untrusted
from farm.extras.packs.layouts import fits
from farm.extras.signing.judging import Accepted
from farm.extras.signing.statements import subjects_of
from farm.extras.signing.verifying import JudgedArtifact, Trust, sha256_of
from farm.wire.program import Sidecar


def attest(sidecar: Sidecar) -> Iterator[tuple[str, dict[str, str], Mapping[str, object]]]:
    """Yield kind, files by their digests, and predicate of what a farm signs about the wrapper of a program."""
    if fits(Layout.ONNXRUNTIME, sidecar) and sidecar["spec"]["compiler"]["name"] == "migraphx":
        from farm.extras.packs.writing import wrapper_files

        files = wrapper_files(sidecar)
        digests = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
        yield "pack", digests, predicate(Layout.ONNXRUNTIME, "", digests, files)


def sign_pack(trust: ReaderTrust, made: Pack, signed: SignedArtifact) -> None:
    """Add a statement of this client's about all files of a pack, if it has a key. Raises OSError."""
    notary = trust.notary if isinstance(trust, Trust) else None
    if notary is None:
        return
    index = made.index
    digests = {file["path"]: file["digest"] for file in index["files"]}
    digests[PACK] = sha256_of((made.folder / PACK).read_bytes())
    subjects = {**subjects_of(signed.sidecar, sha256_of(signed.text)), **digests}
    statement = notary.sign("pack", subjects, predicate(index["layout"], index["onnxruntime"], digests, {}))
    path = statements_path(made.folder / SIDECAR)
    path.write_bytes(bundle_lines([*signed.statements, statement]))


def pack_files(signed: SignedArtifact, layout: str) -> dict[str, bytes]:
    """Return the files of a pack that a trusted statement brings, by their names; empty if none does."""
    for each in reversed(signed.judged.accepted if isinstance(signed, JudgedArtifact) else []):
        if each.statement.kind == "pack" and each.statement.predicate.get("layout") == layout:
            return _contents(each)
    return {}


def predicate(
    layout: str, onnxruntime: str, digests: Mapping[str, str], contents: Mapping[str, bytes]
) -> Mapping[str, object]:
    """Return the predicate of a pack: its files, and the bytes of those that are only there."""
    files = [
        {
            "name": name,
            "digest": {"sha256": digest},
            **({"content": base64.b64encode(contents[name]).decode()} if name in contents else {}),
        }
        for name, digest in digests.items()
    ]
    return {"layout": str(layout), "onnxruntime": onnxruntime, "files": files}


def _contents(each: Accepted) -> dict[str, bytes]:
    """Return the files that a pack's statement brings, checked against its subjects. Raises Untrusted."""
    files: dict[str, bytes] = {}
    try:
        listed: Sequence[Mapping[str, Any]] = each.statement.predicate["files"]
        for file in listed:
            data = base64.b64decode(file["content"], validate=True)
            name = str(file["name"])
            if "/" in name or name.startswith(".") or each.statement.subjects.get(name) != sha256_of(data):
                raise ValueError(name)
            files[name] = data
    except (KeyError, TypeError, ValueError, binascii.Error) as error:
        raise Untrusted(f"the signed pack is damaged: {error!r}") from None
    return files
