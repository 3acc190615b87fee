"""The accuracy of a quantized model against the one it was made from: that one computes the expected outputs, here."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from farm.compiling.child_process import Seal, run_child
from farm.compiling.failures import ChildLimits, classify
from farm.errors import UsageError
from farm.models.data import FrozenData, freeze_data
from farm.models.model import FrozenModel
from farm.models.shapes import BATCH
from farm.runner.documents import InputSpec, Request, TensorInfo

if TYPE_CHECKING:
    import numpy as np

LIMITS = ChildLimits(time=3600.0, memory=32 << 30, hang=600.0, disk=8 << 30, processes=512)
"""What the runs of the unquantized model may use."""


def with_expected_outputs(
    samples: tuple[FrozenData, Path],
    model: FrozenModel,
    symbolic: Mapping[str, TensorInfo],
    unquantized: tuple[str, FrozenModel, Path],
    folder: Path,
) -> tuple[FrozenData, Path]:
    """Return samples with what the model `unquantized` (name, content, file) makes of them in ONNX Runtime.

    `symbolic` are the inputs of the `model` that is compiled. What comes is frozen into `folder`. Raises UsageError.
    """
    data, file = samples
    name, other, path = unquantized
    _require_twins(data, model, name, other)
    request: Request = {
        "action": "reference",
        "compiler": "onnxruntime",
        "device": "cpu",
        "model": {"path": str(path.resolve()), "format": "onnx"},
        "inputs": {tensor["name"]: _of_one_sample(data, tensor) for tensor in symbolic.values()},
        "options": {},
        "samples": {"path": str(file.resolve())},
        "min_samples": max(array["shape"][0] if array["shape"] else 1 for array in data["arrays"].values()),
    }
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(suffix=".part", dir=folder) as scratch:
        made = Path(scratch) / "made"
        made.mkdir()
        request["reference"] = str(made / "runs.npz")
        try:
            end = run_child(
                request,
                log_path=Path(scratch) / "log.txt",
                limits=LIMITS,
                folder=Path(scratch),
                seal=Seal(read=[path.resolve().parent, file.resolve()], write=[made]),
            )
        except OSError as error:
            raise UsageError(f"the unquantized model `{name}` cannot be run: {error}") from None
        if not end.ok:
            failure = classify(end)
            why = failure.message if failure else "interrupted"
            raise UsageError(f"the unquantized model `{name}` does not run: {why}", hint="pip install onnxruntime")
        _join(file, made / "runs.npz", Path(scratch) / "joined.npz")
        return freeze_data(Path(scratch) / "joined.npz", model, symbolic, folder)


def _require_twins(data: FrozenData, model: FrozenModel, name: str, other: FrozenModel) -> None:
    """Refuse a model that another one cannot stand for, and samples that know the answer already."""
    theirs = {tensor["name"]: tensor["dtype"] for tensor in other["inputs"]}
    if theirs != {tensor["name"]: tensor["dtype"] for tensor in model["inputs"]}:
        listed = ", ".join(f"{name} {dtype}" for name, dtype in theirs.items())
        raise UsageError(f"the unquantized model `{name}` has other inputs: {listed}")
    outputs = {tensor["name"] for tensor in model["outputs"]}
    if missing := sorted(outputs - {tensor["name"] for tensor in other["outputs"]}):
        raise UsageError(f"the unquantized model `{name}` has no output `{missing[0]}`")
    if there := sorted(outputs & data["arrays"].keys()):
        hint = "leave out the samples' outputs, or `reference`"
        raise UsageError(f"the samples bring the expected output `{there[0]}` already", hint=hint)


def _of_one_sample(data: FrozenData, tensor: TensorInfo) -> InputSpec:
    if tensor["name"] not in data["arrays"]:
        raise UsageError(f"the samples have no array for input `{tensor['name']}`", hint="`reference` needs them all")
    shape = list(data["arrays"][tensor["name"]]["shape"])
    if tensor["shape"] is not None and BATCH in tensor["shape"]:
        axis = tensor["shape"].index(BATCH)
        return {"dtype": tensor["dtype"], "shape": [*shape[:axis], 1, *shape[axis + 1 :]], "batch_axis": axis}
    stacked = tensor["shape"] is not None and len(shape) == len(tensor["shape"]) + 1
    return {"dtype": tensor["dtype"], "shape": shape[1:] if stacked else shape}


def _join(samples: Path, runs: Path, joined: Path) -> None:
    """Write the arrays of the samples with the outputs of all runs, one sample after the other."""
    import numpy as np

    from farm.runner.samples import load_runs, write_npz

    inputs, outputs, _ = load_runs(str(runs))
    with np.load(samples, allow_pickle=False) as archive:
        arrays: dict[str, np.ndarray[Any, Any]] = {name: archive[name] for name in archive.files}
    for name in outputs[0]:
        found = [run[name] for run in outputs]
        if len({array.shape for array in found}) > 1:
            raise UsageError(f"output `{name}` has another shape for each sample: {found[0].shape}, {found[-1].shape}")
        # Of a model with a batch each run has a batch of 1; of another one it is a sample as it is.
        batched = found[0].ndim and found[0].shape[0] == 1 and _has_batch(inputs[0], arrays)
        arrays[name] = np.concatenate(found) if batched else np.stack(found)
    write_npz(str(joined), arrays)


def _has_batch(run: Mapping[str, Any], arrays: Mapping[str, Any]) -> bool:
    """Whether samples stack on an axis that the inputs have, and not on a new one."""
    return any(array.ndim == arrays[name].ndim for name, array in run.items())
