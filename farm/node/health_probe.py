"""Health of a node: its probe, a program that is known to be good, and room on its disk.

The probe runs a model of a few bytes through the pipeline of a job, in sealed children, on each GPU of a kind of slot,
or on one CPU slot. A node that fails the probe would fail jobs.
"""

from __future__ import annotations

import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import cast

from farm.compiling.children import Children, StepEnded
from farm.compiling.installations import by_toolchain, is_same_build
from farm.compiling.pipeline import InputFiles, Pipeline, Steps
from farm.compiling.slots import FreeSlots, Slot
from farm.errors import FarmError
from farm.jobs.state import AttemptLimits, FailureKind
from farm.manifest.parsing import parse_manifest
from farm.matrix.cells import expand
from farm.matrix.combinations import combine
from farm.models.model import read_model
from farm.node.slot_shares import SlotKind
from farm.node.survey import probe as look_for
from farm.node.work_folder import WorkFolder
from farm.results.accuracy import judge
from farm.runner.documents import Evidence
from farm.settings import Settings
from farm.targets.pools import Pool

PROBE_SECONDS = 300.0
"""Time limit of a probe; the first compile on a GPU fills MIGraphX's caches."""

MANIFEST = """
version: 1
name: health
targets: ["{target}"]
precisions: [fp32]
models: [{{name: probe, source: {{path: probe.onnx}}, samples: {{generate: 2, seed: 0}}}}]
"""


def lacks_room(settings: Settings) -> str:
    """Return why attempts have no room to work in, as one sentence; empty if they have."""
    folder = settings.data_dir.absolute()
    there = next(path for path in (folder, *folder.parents) if path.is_dir())
    free = shutil.disk_usage(there).free
    if free >= settings.min_free_bytes:
        return ""
    return f"its disk is full: {free / 1e9:.2f} GB free at {folder}, {settings.min_free_bytes / 1e9:g} GB are needed"


def probe(settings: Settings, kind: SlotKind) -> str:
    """Return why slots of this kind cannot compile and run a good program, as one sentence; empty if they can.

    Waits for GPUs that attempts hold. The result counts only if `lacks_room` finds nothing.
    """
    pool = next((pool for pool in kind.pools if not pool.untuned), kind.pools[0])
    others = {each.toolchain.rpartition("-")[2]: each for each in kind.pools if not _is_alike(each, pool)}
    if changed := [text for other in others.values() if (text := _changed(settings, other))]:
        return "; ".join(changed)
    slots = list({slot.gpu: slot for slot in kind.slots}.values())
    # Probes work where attempts do: a disk that cannot be written to fails both.
    with (
        closing(WorkFolder(settings.data_dir.resolve() / "work")) as work,
        ThreadPoolExecutor(len(slots)) as threads,
    ):
        found = threads.map(lambda slot: _probe_slot(settings, pool, slot, work), slots)
    return "; ".join(filter(None, found))


def _probe_slot(settings: Settings, pool: Pool, slot: Slot, work: WorkFolder) -> str:
    where = f"GPU {slot.gpu}" if slot.gpu else str(pool.target)
    try:
        with (
            FreeSlots([slot], settings.lock_dir).one(threading.Event()) as held,
            work.place("health-") as folder,
        ):
            assert held
            return _compiled_well(settings, pool, held, folder)
    except StepEnded as ended:
        assert ended.failure
        return f"{where}: {ended.failure.kind}: {ended.failure.message}"
    except (FarmError, OSError) as error:
        return f"{where}: {error}"


def _is_alike(pool: Pool, other: Pool) -> bool:
    return pool.target.compiler == other.target.compiler and is_same_build(pool.toolchain, other.toolchain)


def _changed(settings: Settings, pool: Pool) -> str:
    """Return how the compiler of a pool differs from the registered one; empty if it does not."""
    device = pool.target.device if pool.target.module else ""
    installation = by_toolchain(settings.other_toolchains).get(pool.toolchain)
    found = look_for(pool.target.compiler, settings, device=device, installation=installation)
    here = str(found.get("toolchain") or found.get("reason"))
    # The label may have the version of ROCm, which is not asked for here.
    if is_same_build(here, pool.toolchain):
        return ""
    return f"{pool.target}: {FailureKind.TOOLCHAIN_MISMATCH}: here is {here}, not {pool.toolchain}"


def _compiled_well(settings: Settings, pool: Pool, slot: Slot, folder: Path) -> str:
    model = folder / "model" / "probe.onnx"
    model.parent.mkdir()
    model.write_bytes(_model())
    manifest = parse_manifest(MANIFEST.format(target=pool.target), "the health probe")
    [cell] = expand(combine(manifest), {"probe": read_model(model)}, {}, [pool])
    limits = AttemptLimits(time=PROBE_SECONDS, memory=0)
    once = settings.model_copy(update={"measure_seconds": 1e-3})
    children = Children(folder, once, limits, lambda *_: None, threading.Event(), slot)
    installation = by_toolchain(settings.other_toolchains).get(pool.toolchain)
    steps = Steps(cell.order, children, keyed=True, installation=installation)
    pipeline = Pipeline(steps, InputFiles(model))
    if pool.untuned:
        pipeline.compile()
        return ""
    record = pipeline.run()
    if steps.refused:
        return f"{pool.target}: {next(iter(steps.refused.values()))}"  # Every reference can run this model.
    compared = cast("Evidence | None", record["verification"])
    wrong = judge(compared, cell.gates["tolerance"]) if compared else None
    return f"{pool.target}: {wrong.message}" if wrong else ""


def _model() -> bytes:
    """Return a matrix product and an activation with equal weights: if its outputs are wrong, the node is at fault."""
    from onnx import TensorProto, helper

    size = 16
    tensor = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["xw"]), helper.make_node("Relu", ["xw"], ["y"])],
        "probe",
        [tensor("x", TensorProto.FLOAT, [size, size])],
        [tensor("y", TensorProto.FLOAT, [size, size])],
        [helper.make_tensor("w", TensorProto.FLOAT, [size, size], [0.25] * size**2)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    return bytes(model.SerializeToString())
