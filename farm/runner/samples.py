"""Samples: what a model is fed with for calibration and verification, in runs of its static batch; the right outputs.

Data comes as one array per input. An array with the input's own rank stacks samples on the batch axis; one with
one dimension more is `[N, *shape]`. The last batch wraps around.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np

from .protocol import RequestFailed, blamed_on_compiler, reason_of

if TYPE_CHECKING:
    from .documents import Array, Arrays, DataRecipe, DeclaredValues, InputSpec, Request, RunsHeader, SamplePoint, Size
    from .launcher import Messages
    from .measuring import Program

MAX_SAMPLES = 64  # Samples of the user's that verification runs at most.
MOST_UNPACKED = 32 << 20  # Bytes of compressed arrays, which are unpacked in memory; the farm stores them as they are.

LEADING = -1  # Samples are stacked on an axis of their own, before those of the input.


class Samples(Sequence["Arrays"]):
    """Samples cut into runs: each is one set of inputs, made when it is asked for, since all may not fit in memory."""

    def __init__(self, number: int, make: Callable[[int], Arrays], expected: list[Arrays], batch: int) -> None:
        """`expected[i]` is what the user expects of run `i`; one run holds `batch` samples."""
        self.number, self.make, self.expected, self.batch = number, make, expected, batch

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < self.number:
            raise IndexError(index)
        return self.make(index)

    def distinct(self, inputs: Mapping[str, InputSpec]) -> int:
        """Return how many different samples there are."""
        seen = set()
        for run in self:
            for index in range(self.batch):
                digest = hashlib.sha256()
                for name, array in run.items():
                    axis = inputs[name].get("batch_axis")
                    part = array if axis is None or self.batch == 1 else array.take(index, axis=axis)
                    digest.update(np.ascontiguousarray(part).tobytes())
                seen.add(digest.digest())
        return len(seen)


def points_of(inputs: Mapping[str, InputSpec], batch: Size | None) -> list[tuple[dict[str, InputSpec], int | None]]:
    """Return the inputs and batches at which a program is verified and measured: one point if all sizes are static.

    Dynamic sizes (`{"min", "max", "optimals"}`) have a point for the smallest, one for the first optimals, one for the
    second and so on, and at last one for the largest. A dimension with fewer optimals has its largest in their place.
    """
    sizes = [batch, *(size for spec in inputs.values() for size in spec["shape"])]
    optimals = max((len(size["optimals"]) for size in sizes if isinstance(size, Mapping)), default=0)

    def at(size: Size, index: int) -> int:
        if isinstance(size, int):
            return size
        if index < 0:
            return size["min"]
        return size["optimals"][index] if index < len(size["optimals"]) else size["max"]

    found: list[tuple[dict[str, InputSpec], int | None]] = []
    for index in range(-1, optimals + 1):
        point: dict[str, InputSpec] = {
            name: {**spec, "shape": [at(size, index) for size in spec["shape"]]} for name, spec in inputs.items()
        }
        chosen = None if batch is None else at(batch, index)
        if (point, chosen) not in found:
            found.append((point, chosen))
    return found


def make_samples(
    source: DataRecipe,
    inputs: Mapping[str, InputSpec],
    batch: int | None,
    *,
    what: str,
    output_ranks: Mapping[str, int | None] | None = None,
    limit: int = 0,
) -> Samples:
    """Return the samples that a request describes: `{"path"}` of an .npz, or `{"generate", "seed", "ranges"}`.

    `inputs` has `{"dtype", "shape"}` by name, all sizes static; the batch axis is added to it if the data shows it.
    Arrays in the data that are named in `output_ranks` are expected outputs. `limit` bounds the samples taken (0: all).

    Raises RequestFailed (`bad_calibration`) that names the array and what is wrong with it; `what` names the data.
    """
    if "path" not in source:
        return _generated(source, inputs, batch)
    arrays = _read(source["path"], what)
    ranges = source.get("ranges") or {}
    counts: dict[str, int] = {}
    axes: dict[str, int] = {}
    for name, spec in inputs.items():
        arrays[name] = _of_input(name, spec, arrays, ranges.get(name) or {}, batch, what)
        axes[name], counts[name] = _stacking(name, arrays[name].shape, spec, what)
    if empty := [name for name, count in counts.items() if not count]:
        raise RequestFailed("bad_calibration", f"{what}: array '{empty[0]}' holds no sample")
    if len(set(counts.values()) - {1}) > 1:
        named = ", ".join(f"'{name}' {count}" for name, count in counts.items())
        raise RequestFailed("bad_calibration", f"{what}: arrays hold different numbers of samples: {named}")
    total = max(counts.values(), default=1)
    sizes = {static_shape(inputs[name])[axis] for name, axis in axes.items() if axis != LEADING}
    if len(sizes) > 1:
        raise RequestFailed("bad_calibration", f"{what}: inputs have different batches: {sorted(sizes)}")
    size = sizes.pop() if sizes else 1
    for name, axis in axes.items():
        if axis != LEADING:
            inputs[name]["batch_axis"] = axis
    number = -(-(min(total, limit) if limit else total) // size)

    def make(index: int) -> Arrays:
        return {name: _part(arrays[name], axes[name], index * size, size, counts[name]) for name in inputs}

    known = {name: rank for name, rank in (output_ranks or {}).items() if name in arrays and name not in inputs}
    return Samples(number, make, _expected(known, arrays, total, size, number, what), size)


# --- generated -------------------------------------------------------------------------------------------------


def _generated(source: DataRecipe, inputs: Mapping[str, InputSpec], batch: int | None) -> Samples:
    size = batch or 1
    for spec in inputs.values():
        shape = static_shape(spec)
        if "batch_axis" not in spec and batch and batch in shape:
            spec["batch_axis"] = shape.index(batch)
    ranges, seed = source.get("ranges") or {}, int(source.get("seed") or 0)

    def make(index: int) -> Arrays:
        return {
            name: fill(
                static_shape(spec),
                spec["dtype"],
                ranges.get(name) or {},
                # By name and number, so that a sample does not depend on what other inputs there are.
                np.random.default_rng([seed, zlib.crc32(name.encode()), index]),
            )
            for name, spec in inputs.items()
        }

    # Two runs at least: the outputs may not show which samples of one batch differ.
    number = max(2, -(-int(source["generate"]) // size))
    return Samples(number, make, [{} for _ in range(number)], size)


def fill(shape: tuple[int, ...], dtype_name: str, declared: DeclaredValues, random: Any) -> Array:
    """Return one seeded array: a declared constant `value`, or values in a declared `range` (integers: both ends
    included). Undeclared: normally distributed floats, integers 0 and 1 (which are valid indices everywhere)."""
    if dtype_name == "string":
        raise RequestFailed("bad_calibration", "inputs of text cannot be generated; give samples")
    dtype = numpy_dtype(dtype_name)
    if declared.get("value") is not None:
        constant: Array = np.full(shape, declared["value"]).astype(dtype)
        return constant
    low, high = declared.get("range") or (None, None)
    values: Array
    if dtype.kind == "b":
        values = random.integers(0, 2, size=shape)
    elif dtype.kind in "iu":
        values = random.integers(
            0 if low is None else low, 1 if high is None else high, size=shape, endpoint=True, dtype=np.int64
        )
    else:
        values = random.standard_normal(shape) if low is None else random.uniform(low, high, shape)
    return values.astype(dtype)


# --- given -----------------------------------------------------------------------------------------------------


def _of_input(
    name: str, spec: InputSpec, arrays: Arrays, declared: DeclaredValues, batch: int | None, what: str
) -> Array:
    """Return an input's array, samples stacked; a declared constant needs none. Says in `spec` where the batch is."""
    shape = static_shape(spec)
    if name in arrays:
        array = arrays[name]
    elif declared.get("value") is not None:
        array = fill((1, *shape), spec["dtype"], declared, None)
    else:
        there = ", ".join(sorted(arrays)) or "none"
        raise RequestFailed("bad_calibration", f"{what}: no array for input '{name}'; there are {there}")
    array = _cast(array, spec["dtype"], f"{what}: array '{name}'")
    if array.shape == shape and "batch_axis" not in spec:
        if batch and batch in shape:
            spec["batch_axis"] = shape.index(batch)
        else:
            array = array[np.newaxis]  # a single sample
    return array


def _expected(
    ranks: Mapping[str, int | None], arrays: Arrays, total: int, size: int, number: int, what: str
) -> list[Arrays]:
    """Return the expected outputs of each run; of `total` samples, each run takes `size`."""
    expected: list[Arrays] = [{} for _ in range(number)]
    for name, rank in ranks.items():
        array = arrays[name]
        stacked = rank == array.ndim if rank is not None else size > 1 or array.shape[:2] != (total, 1)
        if not array.ndim or array.shape[0] != total:
            said = f"expected output '{name}' has shape {list(array.shape)}, not {total} samples first"
            raise RequestFailed("bad_calibration", f"{what}: {said}")
        for index, outputs in enumerate(expected):
            outputs[name] = _part(array, 0 if stacked else LEADING, index * size, size, total)
    return expected


def _read(path: str, what: str) -> Arrays:
    """Return an archive's arrays, mapped from the file if they are stored as they are.

    For hostile bytes numpy and zipfile raise almost anything, MemoryError too.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            packed = sum(each.file_size for each in archive.infolist() if each.compress_type != zipfile.ZIP_STORED)
            if packed > MOST_UNPACKED:
                raise ValueError(f"more than {MOST_UNPACKED >> 20} MiB in it are compressed: numpy.savez stores them")
            return {
                member.filename.removesuffix(".npy"): _mapped(path, archive, member) for member in archive.infolist()
            }
    except Exception as error:
        said = f"{what}: not an .npz file of plain arrays: {reason_of(error)}"
        raise RequestFailed("bad_calibration", said) from None


def _mapped(path: str, archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> Any:
    npy = np.lib.format
    with archive.open(member) as stream:
        if member.compress_type != zipfile.ZIP_STORED:
            return npy.read_array(stream, allow_pickle=False)
        reader = npy.read_array_header_1_0 if npy.read_magic(stream) == (1, 0) else npy.read_array_header_2_0
        shape, fortran, dtype = reader(stream)
        header = stream.tell()
    if dtype.hasobject:
        raise ValueError("it holds Python objects")
    if header + dtype.itemsize * math.prod(shape) != member.file_size:
        raise ValueError(f"{member.filename} is cut short")
    with open(path, "rb") as file:  # noqa: PTH123
        file.seek(member.header_offset + 26)
        # The archive's own record of a member: what precedes its bytes has a name and extra fields of these lengths.
        name, extra = struct.unpack("<HH", file.read(4))
    offset = member.header_offset + 30 + name + extra + header
    order: Any = "F" if fortran else "C"
    return np.memmap(path, dtype, "r", offset, shape, order) if math.prod(shape) else np.empty(shape, dtype)


def _cast(array: Array, dtype_name: str, where: str) -> Array:
    dtype = numpy_dtype(dtype_name)
    if array.dtype == dtype:
        return array
    if array.dtype.kind == "V" and array.dtype.itemsize == dtype.itemsize:
        return array.view(dtype)  # how numpy stores bfloat16 and the like
    if not np.can_cast(array.dtype, dtype, "same_kind"):
        raise RequestFailed("bad_calibration", f"{where} is {array.dtype}, the model wants {dtype_name}")
    return array.astype(dtype)


def _stacking(name: str, found: tuple[int, ...], spec: InputSpec, what: str) -> tuple[int, int]:
    """Return the axis that samples are stacked on (or LEADING) and how many there are."""
    shape = static_shape(spec)
    if len(found) == len(shape) + 1 and found[1:] == shape:
        return LEADING, found[0]
    if len(found) == len(shape):
        axis = spec.get("batch_axis")
        differing = [index for index in range(len(shape)) if found[index] != shape[index]]
        if axis is None and len(differing) == 1:
            axis = differing[0]
        if axis is not None and differing in ([], [axis]):
            return axis, found[axis]
    raise RequestFailed(
        "bad_calibration",
        f"{what}: array '{name}' has shape {list(found)}; input '{name}' is {list(shape)}, so that N samples "
        f"are that shape with N on its batch axis, or {['N', *shape]}",
    )


def _part(array: Any, axis: int, start: int, size: int, count: int) -> Any:
    """Return one run's part of an array; the last batch wraps around."""
    if axis == LEADING:
        # Not `ascontiguousarray`: it would make a scalar an array of one element.
        return np.asarray(array[start % count], order="C")
    if start + size <= count:
        return np.ascontiguousarray(array[(slice(None),) * axis + (slice(start, start + size),)])
    return np.ascontiguousarray(array.take([(start + index) % count for index in range(size)], axis=axis))


class Held:
    """Arrays that must live as long as a compiler reads them. They are in a file, so that they need no memory."""

    def __init__(self, size: int) -> None:
        """Make room for `size` bytes, each array beginning at a multiple of 64."""
        with tempfile.TemporaryFile() as file:
            self.room = np.memmap(file, np.uint8, "w+", shape=(max(size, 1),))
        self.used = 0

    def keep(self, array: Any) -> Any:
        """Return an equal array that lives as long as this."""
        place = self.room[self.used : self.used + array.nbytes].view(array.dtype).reshape(array.shape)
        place[...] = array
        self.used += aligned(array.nbytes)
        return place


def aligned(size: int) -> int:
    """Return the room that an array of `size` bytes takes."""
    return -(-size // 64) * 64


# --- dtypes and shapes -----------------------------------------------------------------------------------------

_ML_DTYPES = {
    "float8e4m3fn": "float8_e4m3fn",
    "float8e4m3fnuz": "float8_e4m3fnuz",
    "float8e5m2": "float8_e5m2",
    "float8e5m2fnuz": "float8_e5m2fnuz",
    "float8e8m0": "float8_e8m0fnu",
    "float4e2m1": "float4_e2m1fn",
}
"""Its names for what ONNX calls otherwise."""


def numpy_dtype(name: str) -> Any:
    """Return the numpy dtype of a dtype name; bfloat16, float8 and int4 come from ml_dtypes."""
    try:
        return np.dtype("O" if name == "string" else name)
    except TypeError:
        try:
            import ml_dtypes
        except ImportError:
            raise RequestFailed("unsupported_operator", f"inputs or outputs of {name} need ml_dtypes") from None
    kind = getattr(ml_dtypes, _ML_DTYPES.get(name, name), None)
    if kind is None:
        raise RequestFailed("unsupported_operator", f"inputs or outputs of {name} cannot be made here")
    return np.dtype(kind)


def static_shape(spec: InputSpec) -> tuple[int, ...]:
    """Return an input's shape as numbers; of a dynamic dimension its largest value."""
    return tuple(int(size["max"] if isinstance(size, Mapping) else size) for size in spec["shape"])


# --- right outputs ---------------------------------------------------------------------------------------------


def make_reference(request: Request, messages: Messages, load: Callable[[], Program]) -> None:
    """Write samples with their right outputs: expected ones, and those of the original model that `load` returns."""
    ranks, random, doubted = _known_outputs(request)
    minimum = int(request.get("min_samples") or 8)
    source = request["samples"]
    if "generate" in source:
        source = {**source, "generate": max(minimum, int(source["generate"]))}
    runs: list[Arrays] = []
    outputs: list[Arrays] = []
    points: list[SamplePoint] = []
    for inputs, batch in points_of(request["inputs"], request.get("batch")):
        limit = max(minimum, MAX_SAMPLES)
        samples = make_samples(source, inputs, batch, what="samples", output_ranks=ranks, limit=limit)
        runs += samples
        outputs += samples.expected
        points.append({"batch": samples.batch, "runs": len(samples), "samples": samples.distinct(inputs)})
    origin: dict[str, str] = dict.fromkeys(outputs[0], "expected")
    # What the user expects wins, also of a random output.
    wanted = [name for name in ranks if name in origin or name not in random]
    refused = str(request.get("unverified") or "")
    if not refused and any(name not in origin for name in wanted):
        try:
            program = load()
            for index, feeds in enumerate(runs):
                messages.phase("verifying", index / len(runs), "reference outputs")
                made = dict(zip(program.outputs, program.run(program.prepare(feeds)), strict=True))
                # In the model's order.
                outputs[index] = {name: outputs[index].get(name, made[name]) for name in wanted}
        except RequestFailed as failure:
            # What a reference cannot run says nothing of the compiler; one that is not here is another matter.
            kind = failure.kind if failure.kind == "toolchain_mismatch" else "unverifiable"
            raise RequestFailed(kind, failure.message, failure.detail) from None
        origin = {name: origin.get(name, str(request["compiler"])) for name in outputs[0]}
    unverified = {
        name: f"it depends on the random operator {random[name]}" if name in random else refused
        for name in ranks
        if name not in origin
    }
    meta: RunsHeader = {
        "points": points,
        "minimum": minimum,
        "origin": origin,
        "unverified": unverified,
        "doubted": {name: why for name, why in doubted.items() if origin.get(name) == "onnx"},
        "refused": refused,
    }
    save_runs(request["reference"], runs, outputs, meta)


def _known_outputs(request: Request) -> tuple[Mapping[str, int | None], dict[str, str], dict[str, str]]:
    """Return the ranks of the model's outputs by name, where known; the outputs that depend on a random operator, with
    its name; and, if the onnx package's evaluator is asked, those that it may get wrong, with the reason.

    All are empty if no right outputs are wanted. Without onnx the names are known alone.
    """
    if request["compiler"] == "none":
        return {}, {}, {}
    if request["model"]["format"] == "tf" or not find_spec("onnx"):
        return dict.fromkeys(request["model"]["names"]), {}, {}
    import onnx

    from .onnx_models import random_outputs

    with blamed_on_compiler("the model cannot be read", "bad_model"):
        model = onnx.load_model(request["model"]["path"], load_external_data=False)
    doubted: dict[str, str] = {}
    if request["compiler"] == "onnx":  # Else its many modules are not needed.
        from .onnx_evaluator import doubted_outputs

        doubted = doubted_outputs(model)
    types = {value.name: value.type.tensor_type for value in model.graph.output}
    ranks = {name: len(type.shape.dim) if type.HasField("shape") else None for name, type in types.items()}
    return ranks, random_outputs(model), doubted


# --- the file of reference outputs -----------------------------------------------------------------------------


def save_runs(path: str, runs: Sequence[Arrays], outputs: list[Arrays], meta: RunsHeader) -> None:
    """Write inputs and reference outputs of every run to an .npz; `load_runs` reads it back.

    Arrays are stored one by one, since outputs may differ in shape from run to run.
    """
    arrays: Arrays = {}
    dtypes: dict[str, str] = {}
    for kind, sets in (("input", runs), ("output", outputs)):
        for index, values in enumerate(sets):
            for place, array in enumerate(values.values()):
                key = f"{kind}.{place}.{index}"
                if array.dtype.isbuiltin != 1:
                    dtypes[key] = str(array.dtype)
                arrays[key] = array
    header = {**meta, "inputs": list(runs[0]), "outputs": list(outputs[0]), "runs": len(runs), "dtypes": dtypes}
    arrays["meta"] = np.frombuffer(json.dumps(header).encode(), dtype=np.uint8)
    write_npz(path, arrays)


def write_npz(path: str, arrays: Arrays) -> None:
    """Write an .npz; unlike `numpy.savez` it takes every name, `file` too, and every dtype, as `plain` has it."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                np.lib.format.write_array(entry, np.asanyarray(plain(array)), allow_pickle=False)


def load_runs(path: str) -> tuple[list[Arrays], list[Arrays], RunsHeader]:
    """Read what `save_runs` wrote: inputs and outputs of every run, and the rest of the header."""
    with np.load(path, allow_pickle=False) as archive:
        meta = json.loads(archive["meta"].tobytes())

        def restored(key: str) -> Any:
            array = archive[key]
            if key in meta["dtypes"]:
                return array.view(numpy_dtype(meta["dtypes"][key]))
            return array.astype("O") if array.dtype.kind == "U" else array

        def read(kind: str) -> list[Arrays]:
            return [
                {name: restored(f"{kind}.{place}.{index}") for place, name in enumerate(meta[f"{kind}s"])}
                for index in range(meta["runs"])
            ]

        return read("input"), read("output"), meta


def plain(array: Any) -> Any:
    """Return an array in a dtype that .npz files hold: text as unicode, bfloat16 and the like as their bits."""
    if array.dtype.kind == "O":
        return array.astype("U")
    return array if array.dtype.isbuiltin == 1 else array.view(f"u{array.dtype.itemsize}")
