"""Loading: the artifact of a ref that fits this machine, checked and ready to run."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from farm.artifacts.refs import SnapshotCell
from farm.artifacts.sidecar import serving_of
from farm.client.client import FarmClient
from farm.client.fetching import batch_range, may_run, require_one
from farm.client.inspection import require_as_described, wrong_card
from farm.client.transfers import default_cache
from farm.client.transport import split_ref
from farm.errors import ArtifactGone, NotFound, UsageError
from farm.results.ref_rules import last, readers_order
from farm.settings import load_settings
from farm.targets.pools import Pool, bare, same_arch, version_of
from farm.units import grouped
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
    sidecar: Sidecar = field(repr=False)  # It takes pages.
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
) -> list[Fit]:
    """Return which of a model's artifacts run on this machine, the best first (see `best_fit`).

    `here` is what `this_machine` found.

    Raises NotFound if there is none, with the reasons; UsageError if the precision would have to be guessed.
    """
    there = [cell for cell in client.ls(ref) if cell["model"] == name]
    wanted = precision.replace("+", "-")
    there = [cell for cell in may_run(there, packed=packed) if wanted in ("", cell["precision"])]
    there = [cell for cell in there if shape in ("", cell["shape"])]
    if not there:
        named = "/".join(filter(None, (name, wanted, shape)))
        raise NotFound(f"{ref} has no {named}", hint="`farm ls` lists what it has")
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

    Raises NotFound if nothing fits, ArtifactGone if the file is not what ref and sidecar say, UsageError if its kernels
    are for another card or the runtime cannot be imported here.
    """
    own = client or FarmClient.from_settings(load_settings())
    try:
        model, ref = split_ref(name)
        found = here or this_machine()
        fits = fitting(own, model, precision, ref=ref or "latest", shape=shape, batch=batch, here=found)
        best, cell = fits[0], fits[0].cell
        sidecar, _ = own.artifacts.described((cell, own.artifacts.sidecar_of(cell)), ref or "latest")
        if (sidecar["device"], sidecar["toolchain"]) != (best.sidecar["device"], best.sidecar["toolchain"]):
            raise ArtifactGone(f"{sidecar['identifier']}: the farm describes it in two ways", hint="fetch it again")
        folder = default_cache() / "artifacts" / cell["key"]
        folder.mkdir(parents=True, exist_ok=True)
        path = own.artifacts.download(sidecar["blobs"]["program"], folder)
    finally:
        if client is None:
            own.close()
    cards = {pool.device.arch for pool in found.pools if pool.target.kind.maker == "amd" and not pool.untuned}
    if why := wrong_card(require_as_described(sidecar, path), cards):
        hint = "build for this card: name it in full, with its features (sramecc, xnack), not as `:any`"
        raise UsageError(f"{sidecar['identifier']} does not run here: {why}", hint=hint)
    program = _load(sidecar, path, found.migraphx_path)
    return Loaded(program, path, sidecar, best.why, said(fits))


def said(fits: list[Fit]) -> str:
    """Return what would have come after the best: `net/onnxruntime-cpu/fp32/b8 (for cpu, …)`; empty if nothing."""
    return f"{fits[1].cell['identifier']} ({fits[1].why})" if len(fits) > 1 else ""


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


MOST_REASONS = 5


@dataclass(frozen=True, slots=True)
class Fit:
    """An artifact that runs here: `why` it was chosen, or comes after another; `rank` is smaller for what is better."""

    cell: SnapshotCell
    sidecar: Sidecar
    why: str
    rank: tuple[float, ...]


def why_not(cell: SnapshotCell, pools: Iterable[Pool]) -> str:
    """Return why a cell's program cannot run with any of these pools; empty if it may, as far as the ref tells."""
    compiler, _, device = cell["target"].partition("/")
    here = [pool for pool in pools if pool.target.compiler == compiler]
    if not here:
        return f"{compiler} cannot be used here"
    there = [pool for pool in here if _same_device(cell, device, pool)]
    if not there:
        found = sorted({pool.device.arch if pool.target.kind.maker else pool.target.device for pool in here})
        return f"it is for {cell['device']}, here is {', '.join(found)}"
    if all(_toolchain_rank(cell["toolchain"], pool.toolchain) is None for pool in there):
        return f"{cell['toolchain']} made it, here is {', '.join(sorted({pool.toolchain for pool in there}))}"
    return ""


def best_fit(
    found: Sequence[tuple[SnapshotCell, Sidecar]], pools: Sequence[Pool], batch: int | None = None
) -> list[Fit]:
    """Return the artifacts of one model and precision that run here, the best first, of their cells and sidecars.

    A GPU comes first, then what no other toolchain's program has superseded, then of one cell what was submitted last,
    as for all readers, then what this very toolchain made, then the smallest program that takes `batch` samples (the
    largest if none does, or if nobody says how many there are), then the fastest.

    Raises NotFound with the reasons if none runs here.
    """
    running, others = [], {}
    for cell, sidecar in found:
        reasons = [(pool, _against(sidecar, pool)) for pool in pools if not why_not(cell, [pool])]
        if good := [pool for pool, reason in reasons if not reason]:
            running.append((cell, sidecar, good))
        else:
            others[cell["identifier"]] = why_not(cell, pools) or reasons[0][1]
    if not running:
        raise nothing_fits(others)
    of_cell = grouped((cell for cell, _, _ in running), lambda cell: cell["identifier"])
    fits = []
    for cell, sidecar, good in running:
        given = last(of_cell[cell["identifier"]])
        fits.append(min((_fit(cell, sidecar, pool, batch, given) for pool in good), key=attrgetter("rank")))
    return sorted(fits, key=attrgetter("rank"))


def nothing_fits(reasons: dict[str, str]) -> NotFound:
    """Return the error for a model without an artifact for this machine."""
    shown = "; ".join(f"{name}: {why}" for name, why in list(reasons.items())[:MOST_REASONS])
    more = f"; and {len(reasons) - MOST_REASONS} more" if len(reasons) > MOST_REASONS else ""
    return NotFound(f"no artifact runs here: {shown}{more}", hint="`farm doctor` says what this machine has")


def _same_device(cell: SnapshotCell, device: str, pool: Pool) -> bool:
    if pool.target.kind.maker is None:
        return pool.target.device == device
    return same_arch(pool.device.arch, bare(cell["device"]) if device.endswith(":any") else cell["device"])


def _against(sidecar: Sidecar, pool: Pool) -> str:
    """Return what the sidecar says against a pool of the right device; empty if nothing."""
    device = sidecar["spec"].get("device")
    units, family = (device.get("compute_units"), device.get("cpu_family")) if device else (None, None)
    if units and pool.device.compute_units and units != pool.device.compute_units:
        return f"it is tuned for {units} compute units, here are {pool.device.compute_units}"
    if family and family != pool.cpu_family:
        return f"it is tuned for CPUs of the family {family}, here is {pool.cpu_family or 'another'}"
    return ""


def _fit(cell: SnapshotCell, sidecar: Sidecar, pool: Pool, batch: int | None, given: SnapshotCell) -> Fit:
    toolchain = _toolchain_rank(cell["toolchain"], pool.toolchain) or 0
    smallest, largest = batch_range(cell)["min"], batch_range(cell)["max"]
    latency = sidecar["measurements"]["latency"]["median"] if sidecar["measurements"]["latency"] else None
    on_gpu = pool.target.kind.maker is not None
    takes = batch is not None and largest >= batch
    rank = (
        not on_gpu,
        bool(cell.get("superseded")),
        readers_order(cell) < readers_order(given),
        toolchain,
        not takes,
        # A range takes the batch as it is; of fixed batches the smallest wastes least.
        (max(smallest, batch or 0) if takes else -largest),
        latency / largest if latency is not None else float("inf"),
    )
    made = ("this toolchain made it", "another build of this release made it", "an older release made it")[toolchain]
    words = [f"for {cell['device']}, which is here", made]
    if cell.get("superseded"):
        words.append("another toolchain's program has its place in the ref, and does not run here")
    if batch is not None:
        words.append(f"takes batch {largest}" if takes else f"takes {largest} of {batch} samples at once")
    return Fit(cell, sidecar, ", ".join(words), rank)


def _toolchain_rank(made_by: str, here: str) -> int | None:
    """0: the same; 1: another build of the same release; 2: an older release whose programs are read; None: no use."""
    if made_by == here:
        return 0
    one, other = (name.rpartition("-")[0].removesuffix("-cross") for name in (made_by, here))
    if one == other:
        return 1
    are_read = made_by.startswith("onnxruntime") and here.startswith("onnxruntime")
    return 2 if are_read and version_of(made_by)[:2] <= version_of(here)[:2] else None
