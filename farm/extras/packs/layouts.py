"""Layouts: how a serving stack wants a program, and which programs it can take. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from farm.client.fetching import RESERVED
from farm.client.packs import Layout
from farm.errors import ArtifactGone, FarmError, UsageError

if TYPE_CHECKING:
    from farm.wire.program import Sidecar


CACHED = frozenset({Layout.ONNXRUNTIME_CACHE, Layout.TRITON})
"""Layouts for which the provider itself reads the model."""

_FILE = r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}"
_WORDS = r"[A-Za-z0-9][A-Za-z0-9._/:+-]{0,999}"


def require_fit(layout: Layout, sidecar: Sidecar) -> None:
    """Refuse a layout that the program cannot have.

    Raises UsageError with every reason, ArtifactGone for names that no farm gives: they go into scripts and paths.
    """
    words = {sidecar["identifier"]: _WORDS, sidecar["toolchain"]: _WORDS, sidecar["device"]["arch"]: _WORDS}
    words[sidecar["blobs"]["program"]["path"]] = _FILE
    if odd := [word for word, pattern in words.items() if not re.fullmatch(pattern, word) or word in RESERVED]:
        raise ArtifactGone(f"the artifact has a name {odd[0]!r}, which no farm gives")
    reasons = list(_unfit(layout, sidecar))
    if reasons:
        hint = f"write `packs: [{layout}]` in the manifest: then the farm compiles a program for it"
        copies = sidecar["spec"]["compiler"]["name"] == "migraphx" and sidecar["offload_copy"]
        message = f"{sidecar['identifier']} cannot be packed for {layout}: {'; '.join(reasons)}"
        raise UsageError(message, hint=hint if copies else "fetch it with `--layout plain`")


def fits(layout: Layout, sidecar: Sidecar) -> bool:
    """Whether a program can have a layout."""
    try:
        require_fit(layout, sidecar)
    except FarmError:
        return False
    return True


def _unfit(layout: Layout, sidecar: Sidecar) -> Iterator[str]:
    ports = (*sidecar["inputs"], *sidecar["outputs"])
    open_ports = [port["name"] for port in ports if any(isinstance(size, str) for size in port["shape"])]
    if not sidecar["inputs"]:
        yield "its sidecar names no inputs"
    if open_ports:
        yield f"the sizes of {', '.join(open_ports[:5])} are not fixed"
    if sidecar["spec"]["compiler"]["name"] != "migraphx":
        if layout is Layout.ONNXRUNTIME_CACHE:
            yield "it is not a program of MIGraphX's"
        return
    if not sidecar["device"]["arch"].startswith("gfx"):
        yield f"it runs on {sidecar['device']['arch']}, and the provider only on AMD GPUs"
    if sidecar["offload_copy"] is not False:
        yield "it copies its inputs and outputs itself, and the provider hands in places in the GPU's memory"
    if not sidecar["blobs"]["program"]["path"].endswith(".mxr"):
        yield "the provider reads .mxr files only"
    if layout in CACHED and sidecar["spec"]["model"]["format"] != "onnx":
        yield "its model is not ONNX"
