"""Loading: the artifact of a ref that fits this machine, checked and ready to run."""

from __future__ import annotations

import importlib
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from farm.artifacts.serving import serving_of
from farm.client.cache import default_cache
from farm.client.client import FarmClient
from farm.client.fetching import require_one
from farm.client.fitting import Fits, best_fit, may_run, nothing_fits, why_not
from farm.client.inspection import TooLarge, disagreements, faults, inspect_program
from farm.client.paths import split_ref
from farm.errors import ArtifactGone, NotFound, UsageError
from farm.settings import load_settings
from farm.wire.program import Sidecar

if TYPE_CHECKING:
    from farm.node.survey import Findings


@dataclass(frozen=True, slots=True)
class Loaded:
    """A program that is ready to run, with what it is.

    `program` is a `migraphx.program` or an `onnxruntime.InferenceSession`; `why` says why this artifact was chosen,
    `next_best` which would have come after it.
    """

    program: Any
    path: Path
    sidecar: Sidecar
    why: str
    next_best: str


def this_machine() -> Findings:
    """Return what is here: GPUs, compilers, toolchains. Compilers are asked in child processes, for a second or two."""
    from farm.node.survey import survey

    return survey(load_settings())


def fitting(
    client: FarmClient,
    name: str,
    precision: str = "",
    *,
    ref: str = "latest",
    shape: str = "",
    batch: int | None = None,
    packed: bool = False,
    here: Findings | None = None,
) -> Fits:
    """Return which of a model's artifacts fits this machine best (see `best_fit`); `here` is what `this_machine` found.

    Raises NotFound if there is none, with the reasons; UsageError if the precision would have to be guessed.
    """
    there = [cell for cell in client.ls(ref) if cell["model"] == name]
    wanted = precision.replace("+", "-")
    there = [cell for cell in may_run(there, packed=packed) if wanted in ("", cell["precision"])]
    there = [cell for cell in there if shape in ("", cell["shape"])]
    if not there:
        raise NotFound(
            f"{ref} has no {'/'.join(filter(None, (name, wanted, shape)))}", hint="`farm ls` lists what it has"
        )
    require_one(there, "precision", "--precision")
    pools = (here or this_machine()).pools
    possible = [cell for cell in there if not why_not(cell, pools)]
    if not possible:
        raise nothing_fits({cell["identifier"]: why_not(cell, pools) for cell in there})
    return best_fit([(cell, client.artifacts.sidecar_of(cell)) for cell in possible], pools, batch)


def load(
    name: str,
    precision: str = "",
    *,
    shape: str = "",
    batch: int | None = None,
    client: FarmClient | None = None,
    here: Findings | None = None,
) -> Loaded:
    """Fetch the program of `MODEL[@REF]` that fits this machine best, check it and load it into this process.

    Before anything is loaded, device, compute units, toolchain, SHA-256 and what the file itself says are compared, and
    signatures checked if the client has a trust policy. The file stays in the user's cache. Without a `client` the
    settings name the farm.

    Raises NotFound if nothing fits, ArtifactGone if the file is not what ref and sidecar say, UsageError if the runtime
    cannot be imported here.
    """
    own = client or FarmClient.from_settings(load_settings())
    try:
        model, ref = split_ref(name)
        found = here or this_machine()
        fits = fitting(own, model, precision, ref=ref or "latest", shape=shape, batch=batch, here=found)
        cell = fits.best.cell
        sidecar, _ = own.artifacts.described((cell, own.artifacts.sidecar_of(cell)), ref or "latest")
        if (sidecar["device"], sidecar["toolchain"]) != (fits.best.sidecar["device"], fits.best.sidecar["toolchain"]):
            raise ArtifactGone(f"{sidecar['identifier']}: the farm describes it in two ways", hint="fetch it again")
        folder = default_cache() / "artifacts" / cell["key"]
        folder.mkdir(parents=True, exist_ok=True)
        path = own.artifacts.download(sidecar["blobs"]["program"], folder)
    finally:
        if client is None:
            own.close()
    require_as_described(sidecar, path)
    program = _load(sidecar, path, found.migraphx_path)
    return Loaded(program, path, sidecar, fits.best.why, said(fits))


def said(fits: Fits) -> str:
    """Return what would have come after the best: `net/onnxruntime-cpu/fp32/b8 (for cpu, …)`; empty if nothing."""
    return f"{fits.next.cell['identifier']} ({fits.next.why})" if fits.next else ""


def require_as_described(document: Sidecar, path: Path) -> None:
    """Compare a program's file with its sidecar before anything loads it. Raises ArtifactGone."""
    try:
        inside = inspect_program(path)
    except TooLarge:
        inside = None
    except UsageError as error:
        raise ArtifactGone(error.message, hint="fetch it again") from None
    wrong = [*disagreements(document, inside, path), *(faults(inside) if inside else [])]
    if wrong:
        raise ArtifactGone(f"{path} is not what its sidecar says: {'; '.join(wrong)}", hint="fetch it again")


def _load(sidecar: Sidecar, path: Path, migraphx_path: str) -> Any:
    # By name: a client is installed without them, and a user who loads a program has its runtime.
    if sidecar["spec"]["compiler"]["name"] == "migraphx":
        if migraphx_path and migraphx_path not in sys.path:
            sys.path.append(migraphx_path)
        return _runtime("migraphx").load(str(path), format="json" if path.suffix == ".json" else "msgpack")
    onnxruntime = _runtime("onnxruntime")
    options, how = onnxruntime.SessionOptions(), serving_of(sidecar)
    os.environ.update(how.environment)
    if sidecar["device"]["arch"].startswith("sm_") and hasattr(onnxruntime, "preload_dlls"):
        onnxruntime.preload_dlls()  # CUDA's libraries from the wheels `nvidia-*`, if they are installed.
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, f"ORT_ENABLE_{how.level.upper()}")
    if how.threads:
        options.intra_op_num_threads = how.threads
    if how.spinning is not None:
        options.add_session_config_entry("session.intra_op.allow_spinning", str(int(how.spinning)))
    session = onnxruntime.InferenceSession(str(path), options, providers=how.providers)
    if session.get_providers()[0] != (provider := how.providers[0][0]):
        raise UsageError(f"ONNX Runtime has no {provider} here", hint="install the build of it that has")
    return session


def _runtime(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UsageError(f"cannot import {name}: {error}", hint="run this in the interpreter that serves") from None
