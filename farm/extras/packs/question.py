"""The question to ONNX Runtime's MIGraphX provider: under which name does it look for a model's program?"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from farm.compiling.child_process import Seal, run_child
from farm.compiling.failures import ChildLimits, classify
from farm.errors import UsageError
from farm.runner.bounds import Bound, Label
from farm.runner.documents import Answer, ChildRequest

_LIMITS = ChildLimits(time=900.0, memory=32 << 30, hang=300.0, disk=4 << 30, processes=512)


class CacheNamesRequest(ChildRequest, total=False):
    """What a child is asked that asks ONNX Runtime's MIGraphX provider for names."""

    model: str
    """The file."""
    arch: str
    """Of the card that will run it, in full."""
    cache: str
    """An empty folder to write to."""


class CacheNamesAnswer(Answer):
    """Which files of its cache a provider looks for."""

    version: Label
    """Of ONNX Runtime."""
    names: Annotated[
        Sequence[Annotated[str, Bound(longest=256, pattern=r"[A-Za-z0-9][A-Za-z0-9._-]*\.mxr")]], Bound(longest=1000)
    ]
    found: bool
    """Whether it loads files of these names and compiles nothing."""


@dataclass(frozen=True, slots=True)
class CacheFile:
    """The provider's answer: the file of its cache, and which ONNX Runtime (its version) looks for it."""

    name: str
    version: str


def ask_provider(model: Path, arch: str, python: str = "") -> CacheFile:
    """Return the name under which the provider of an interpreter (empty: this one) looks for a model's program.

    `arch` is the card's, in full (`gfx942:sramecc+:xnack-`). The provider runs in a sealed child and reaches no GPU.

    Raises UsageError if there is no provider, if it does not take the model as a whole, or does not find its own file.
    """
    with tempfile.TemporaryDirectory(prefix="farm-ask-") as name:
        folder = Path(name)
        written = folder / "written"
        written.mkdir()
        request: CacheNamesRequest = {
            "action": "cache_names",
            "extension": "onnxruntime-cache",
            "model": str(model.resolve()),
            "arch": arch,
            "cache": str(written),
        }
        seal = Seal(read=[model.resolve().parent], write=[written])
        try:
            end = run_child(
                request,
                log_path=folder / "log.txt",
                python=python,
                limits=_LIMITS,
                folder=folder,
                seal=seal,
                answer=CacheNamesAnswer,
            )
        except OSError as error:
            raise UsageError(f"the provider cannot be asked: {error}", hint="`--python` names an interpreter") from None
    if not end.ok or end.result is None:
        failure = classify(end)
        detail = failure.detail.strip()[-300:] if failure else ""
        raise UsageError(failure.message if failure else "interrupted", hint=detail)
    names = end.result["names"]
    if len(names) > 1:
        message = f"ONNX Runtime {end.result['version']} cuts the model into {len(names)} parts"
        raise UsageError(message, hint="a program of the farm is the whole model: serve it without ONNX Runtime")
    if not end.result["found"]:
        message = f"ONNX Runtime {end.result['version']} does not load {names[0]}, which it wrote itself"
        raise UsageError(message, hint="fetch with `--layout onnxruntime`, for the plug-in")
    return CacheFile(names[0], end.result["version"])
