"""The content of a compiled program's file, read without its compiler, and its disagreements with the sidecar."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from pathlib import Path

from farm.errors import ArtifactGone, NotFound, UsageError
from farm.files import hash_file
from farm.runner import mxr
from farm.runner.documents import TensorInfo
from farm.runner.mxr import ProgramContent, StoredPort
from farm.wire.program import Port, Sidecar


class TooLarge(UsageError):
    """A program may be as it should, but is too large to look into."""


def inspect_program(path: Path) -> ProgramContent:
    """Return what a program's file holds: `farm.runner.mxr.read`'s answer, or as much of it as an ONNX file has.

    A `.mxr` file is read in passing, whatever its size; MIGraphX's JSON (64 MiB at most) and ONNX (2 GiB) in memory.

    Raises UsageError if it is none of these, TooLarge, NotFound if there is no such file.
    """
    try:
        return _inspect_onnx(path) if path.suffix == ".onnx" else mxr.read(path)
    except mxr.ProgramTooLarge as error:
        hint = "MIGraphX can still load it; an .mxr of any size can be inspected"
        raise TooLarge(f"{path} is too large to inspect: {error}", hint=hint) from None
    except mxr.MalformedProgram as error:
        raise UsageError(f"{path} is not a MIGraphX program: {error}", hint=_HINT) from None
    except FileNotFoundError:
        raise NotFound(f"no file {path}") from None
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from None


def inspect_if_small(path: Path) -> ProgramContent | None:
    """Return what `inspect_program` does; None if the file is too large to look into. Raises as that."""
    try:
        return inspect_program(path)
    except TooLarge:
        return None


_HINT = "a compiled program is .mxr or .json (MIGraphX) or .onnx (ONNX Runtime); is it whole?"


def _inspect_onnx(path: Path) -> ProgramContent:
    from farm.runner.onnx_models import BadModel, check_onnx

    try:
        found = check_onnx(path)
    except BadModel as error:
        raise UsageError(f"{path} is not an ONNX program: {error.message}", hint=_HINT) from None
    return {
        "format": "onnx",
        "size": path.stat().st_size,
        "opsets": found["opsets"],
        "inputs": [_content_port(port) for port in found["inputs"]],
        "outputs": [_content_port(port) for port in found["outputs"]],
        "modules": {"main": {"operators": dict(sorted(found["operators"].items()))}},
        "weights": found["weights"],
    }


def _content_port(tensor: TensorInfo) -> StoredPort:
    return {"name": tensor["name"], "dtype": tensor["dtype"], "shape": tensor["shape"]}


def faults(program: ProgramContent) -> list[str]:
    """Return why a MIGraphX program will not run anywhere, one sentence each."""
    found = []
    if count := program.get("left_over"):
        found.append(f"{count} undecided {mxr.LEFT_OVER}: tuning ended without a solution, so the program does not run")
    if names := program.get("unknown"):
        found.append(f"operators that the parser did not know: {', '.join(names)}; their results are garbage")
    return found


def require_as_described(sidecar: Sidecar, path: Path) -> ProgramContent | None:
    """Compare a program's file with its sidecar before anything loads it; return its content, None if it is too large.

    Raises ArtifactGone.
    """
    try:
        inside = inspect_if_small(path)
    except UsageError as error:
        raise ArtifactGone(error.message, hint="fetch it again") from None
    wrong = [*disagreements(sidecar, inside, path), *(faults(inside) if inside else [])]
    if wrong:
        raise ArtifactGone(f"{path} is not what its sidecar says: {'; '.join(wrong)}", hint="fetch it again")
    return inside


def wrong_card(program: ProgramContent | None, arches: Collection[str]) -> str:
    """Return which kernels of a program none of these cards runs, as a sentence; empty if one of them runs all.

    Cards are named in full (`gfx90a:sramecc+:xnack-`); without any, or without a program, nothing is wrong.
    """
    foreign = [_foreign(program, arch) for arch in arches] if program else []
    return f"it has kernels for {foreign[0]}, not for {' or '.join(sorted(arches))}" if foreign and all(foreign) else ""


def _foreign(program: ProgramContent, arch: str) -> str:
    return ", ".join(mxr.foreign_arches(program.get("code_objects", ()), arch))


def disagreements(sidecar: Sidecar, program: ProgramContent | None, path: Path) -> list[str]:
    """Return how a program's file (None if it cannot be read) differs from its sidecar, one sentence each."""
    blob = sidecar["blobs"]["program"]
    found = []
    digest, size = hash_file(path)
    if size != blob["size"]:
        found.append(f"size: the sidecar says {blob['size']} bytes, the file has {size}")
    if digest != blob["digest"]:
        found.append(f"digest: the sidecar says {blob['digest'][:16]}…, the file has {digest[:16]}…")
    if program:
        found += _ports(sidecar, program)
        if program["format"] != "onnx":
            found += _migraphx(sidecar, program)
    return found


def _migraphx(sidecar: Sidecar, program: ProgramContent) -> Iterator[str]:
    device = sidecar.get("device")
    arch = device["arch"] if device else ""
    wanted = "gpu" if arch.startswith("gfx") else arch
    if not program["compiled"]:
        yield f"target: the sidecar says {wanted}, the file is not compiled"
    elif wanted and wanted not in program["targets"]:
        yield f"target: the sidecar says {wanted}, the file {', '.join(program['targets'])}"
    if foreign := _foreign(program, arch):
        yield f"architecture: the sidecar says {arch}, the file has kernels for {foreign}"
    copies = sidecar.get("offload_copy")
    if None not in (copies, program["offload_copy"]) and copies != program["offload_copy"]:
        yield f"offload_copy: the sidecar says {copies}, the file {program['offload_copy']}".lower()
    said = re.search(r"migraphx(\d+\.\d+)", sidecar.get("toolchain", ""))
    version = program["migraphx_version"]
    if said and version.split(".")[:2] != said[1].split("."):
        yield f"version: the sidecar says MIGraphX {said[1]}, the file {version}"


def _ports(sidecar: Sidecar, program: ProgramContent) -> Iterator[str]:
    said = {port["name"]: port for port in sidecar.get("inputs", ())}
    there = {port.get("name", ""): port for port in program["inputs"]}
    for name in said.keys() | there.keys():
        yield from _port(f"input {name}", said.get(name), there.get(name))
    # MIGraphX keeps no names of outputs: they are compared by position.
    outputs, in_file = sidecar.get("outputs", ()), program["outputs"]
    if len(outputs) != len(in_file):
        yield f"outputs: the sidecar says {len(outputs)}, the file has {len(in_file)}"
        return
    for one, other in zip(outputs, in_file, strict=True):
        yield from _port(f"output {one['name']}", one, other)


def _port(what: str, said: Port | None, there: StoredPort | None) -> Iterator[str]:
    if said is None or there is None:
        yield f"{what}: only {'the file' if said is None else 'the sidecar'} has it"
    elif _described(said) != _described(there):
        yield f"{what}: the sidecar says {_described(said)}, the file {_described(there)}"


def _described(port: Port | StoredPort) -> str:
    shape = port["shape"]
    return f"{port['dtype']} {'of any shape' if shape is None else list(shape)}"
