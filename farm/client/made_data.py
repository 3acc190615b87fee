"""Samples that the client makes itself: what a user's own function yields, and what the unquantized model answers."""

from __future__ import annotations

import importlib
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from farm.compiling.child_process import Seal, ask_once
from farm.compiling.failures import ChildLimits, Failure
from farm.errors import UsageError
from farm.models.frozen import MAX_BYTES, DataError, FrozenData, FrozenModel, freeze_data
from farm.models.shapes import BATCH
from farm.runner.documents import InputSpec, Request, TensorInfo
from farm.runner.samples import load_runs, write_npz

MAX_SAMPLES = 10_000  # What one generator may yield.


def spool(
    name: str, folder: Path, inputs: Mapping[str, TensorInfo], outputs: Sequence[TensorInfo], spooled: Path
) -> None:
    """Run the function `module:function` and write each dict of arrays that it yields to an `.npz` in `spooled`.

    The module is looked for in `folder` (the manifest's) before what is installed. An array is one sample, or several
    on the batch axis; `inputs` are the model's with the manifest's names for dimensions.

    Raises DataError that names function, sample and array.
    """
    total = 0
    with _imports_from(folder):
        for index, sample in enumerate(_samples(name, _function(name, folder))):
            where = f"{name}, sample {index}"
            if index == MAX_SAMPLES:
                hint = "a few hundred samples are enough: itertools.islice ends a generator"
                raise DataError(f"{name} yields more than {MAX_SAMPLES} samples", hint=hint)
            arrays = _checked(sample, inputs, {tensor["name"] for tensor in outputs}, where)
            total += sum(array.nbytes for array in arrays.values())
            if total > MAX_BYTES:
                hint = "a few hundred samples are enough"
                raise DataError(f"{where}: more than {MAX_BYTES} bytes of arrays", hint=hint)
            write_npz(str(spooled / f"{index:05}.npz"), arrays)
    if not total:
        raise DataError(f"{name} yields no sample", hint="at least one is needed")


@contextmanager
def _imports_from(folder: Path) -> Iterator[None]:
    """Let modules be imported from a folder; forget them after, since another manifest has others of that name."""
    known = set(sys.modules)
    place = str(folder.resolve())
    # Bytecode is taken for current if its source has the same second and size: an edit could be missed.
    writes_no_bytecode, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    sys.path.insert(0, place)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(place)
        sys.dont_write_bytecode = writes_no_bytecode
        for name in set(sys.modules) - known:
            if str(getattr(sys.modules[name], "__file__", None) or "").startswith(f"{place}/"):
                del sys.modules[name]


def _function(name: str, folder: Path) -> Any:
    module_name, _, function_name = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name and f"{module_name}.".startswith(f"{error.name}."):
            hint = f"it is searched as {folder / module_name.replace('.', '/')}.py, then among installed packages"
            raise DataError(f"there is no module `{module_name}`", hint=hint) from None
        raise DataError(f"module `{module_name}` cannot be imported: {_told(error)}") from None
    function = getattr(module, function_name, None)
    if not callable(function):
        there = ", ".join(key for key, value in vars(module).items() if callable(value) and key[0] != "_") or "none"
        raise DataError(f"module `{module_name}` has no function `{function_name}`", hint=f"it has: {there}")
    return function


def _samples(name: str, function: Any) -> Iterator[Any]:
    """Yield what the function yields; whatever its code raises becomes a DataError with the user's own line."""
    count = 0
    try:
        for sample in function():
            yield sample
            count += 1
    except Exception as error:
        raise DataError(f"{name}, sample {count}: {_told(error)}") from error


def _told(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    last = next((frame for frame in reversed(frames) if not frame.filename.startswith("<")), None)
    place = f" ({Path(last.filename).name}, line {last.lineno})" if last else ""
    return f"{type(error).__name__}: {error}{place}"


def _checked(
    sample: Any, inputs: Mapping[str, TensorInfo], outputs: set[str], where: str
) -> dict[str, np.ndarray[Any, Any]]:
    """Return a sample's arrays, those of inputs with a batch axis."""
    if not isinstance(sample, Mapping):
        hint = 'yield {"input": array}'
        raise DataError(f"{where} is {type(sample).__name__}, not a dict of arrays by input name", hint=hint)
    missing = [name for name in inputs if name not in sample]
    unknown = [str(name) for name in sample if name not in inputs and name not in outputs]
    if missing or unknown:
        wrong = f"there is no array for input `{missing[0]}`" if missing else f"the model has no `{unknown[0]}`"
        raise DataError(f"{where}: {wrong}", hint=f"the model's inputs are {', '.join(inputs)}")
    arrays = {str(name): np.asarray(value) for name, value in sample.items()}
    for name, tensor in inputs.items():
        arrays[name] = _fitting(arrays[name], tensor, f"{where}, input `{name}`")
    return arrays


def _fitting(array: np.ndarray[Any, Any], tensor: TensorInfo, where: str) -> np.ndarray[Any, Any]:
    if str(array.dtype) != tensor["dtype"]:
        hint = f"yield array.astype({tensor['dtype']!r})"
        raise DataError(f"{where} is {array.dtype}, the model wants {tensor['dtype']}", hint=hint)
    if not array.size:
        raise DataError(f"{where} is empty, its shape is {list(array.shape)}")
    if tensor["shape"] is None:
        return array
    axis = tensor["shape"].index(BATCH) if BATCH in tensor["shape"] else None
    if axis is not None and array.ndim == len(tensor["shape"]) - 1:
        array = np.expand_dims(array, axis)
    sizes = array.shape[1:] if axis is None and array.ndim == len(tensor["shape"]) + 1 else array.shape
    if len(sizes) != len(tensor["shape"]) or any(
        isinstance(wanted, int) and wanted != size for size, wanted in zip(sizes, tensor["shape"], strict=True)
    ):
        wanted = ", ".join("?" if size is None else str(size) for size in tensor["shape"])
        raise DataError(f"{where} has shape {list(array.shape)}, the model wants [{wanted}]")
    return array


# --- expected outputs of the model that a quantized one was made from -------------------------------------------------

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
            seal = Seal(read=[path.resolve().parent, file.resolve()], write=[made])
            found = ask_once(request, LIMITS, folder=Path(scratch), seal=seal)
        except OSError as error:
            raise UsageError(f"the unquantized model `{name}` cannot be run: {error}") from None
        if isinstance(found, Failure):
            message = f"the unquantized model `{name}` does not run: {found.message}"
            raise UsageError(message, hint="pip install onnxruntime")
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
    inputs, outputs, _ = load_runs(str(runs))
    with np.load(samples, allow_pickle=False) as archive:
        arrays: dict[str, np.ndarray[Any, Any]] = {name: archive[name] for name in archive.files}
    for name in outputs[0]:
        found = [run[name] for run in outputs]
        if len({array.shape for array in found}) > 1:
            raise UsageError(f"output `{name}` has another shape for each sample: {found[0].shape}, {found[-1].shape}")
        # Of a model with a batch each run has a batch of 1, and samples stack on that axis, not on a new one.
        stacks = any(array.ndim == arrays[name].ndim for name, array in inputs[0].items())
        batched = found[0].ndim and found[0].shape[0] == 1 and stacks
        arrays[name] = np.concatenate(found) if batched else np.stack(found)
    write_npz(str(joined), arrays)
