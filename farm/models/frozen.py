"""Model files, calibration data and samples, as the submitting side reads, checks and freezes them.

Data becomes one canonical `.npz`. Nothing is unpickled, nothing is unpacked before its declared size is known to be
bounded, and arrays go from file to file: no data set is in memory as a whole. Libraries raise almost anything, also
MemoryError, for hostile bytes.
"""

from __future__ import annotations

import math
import mmap
import re
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NotRequired

from pydantic import ConfigDict, with_config
from typing_extensions import TypedDict

from farm.errors import UsageError, suggestion
from farm.files import hash_file
from farm.models.shapes import BATCH, Extent, Input, shown_shape
from farm.runner.documents import CheckAnswer, TensorInfo
from farm.runner.protocol import Bound, Digest, Size, reason_of
from farm.spec import FileReference, model_digest
from farm.units import view_of
from farm.wire.program import ConversionRecord

if TYPE_CHECKING:
    import numpy as np


@with_config(ConfigDict(extra="ignore"))
class FrozenModel(TypedDict):
    """A model as it was read and hashed: all that the farm needs to know without opening it.

    `files` are the model itself, then its external data; `size` is their sum in bytes; `weight_dtypes` has the one with
    most bytes first. Clients of other releases leave out some fields.
    """

    digest: Digest
    format: Annotated[str, Bound(pattern="onnx|tf")]
    files: Annotated[Sequence[FileReference], Bound(shortest=1, longest=10_000)]
    inputs: Annotated[Sequence[TensorInfo], Bound(longest=10_000)]
    outputs: Annotated[Sequence[TensorInfo], Bound(longest=10_000)]
    opset: NotRequired[int]
    operators: NotRequired[Mapping[str, int]]
    weight_dtypes: NotRequired[Sequence[str]]
    size: Size
    conversion: NotRequired[ConversionRecord | None]
    """How the model was made from one of another format (an extension does it), if it was."""
    doubts: NotRequired[Sequence[str]]
    """Sentences about parts of the model that its format does not allow and that some compiler accepts anyway."""


def is_what_it_says(model: FrozenModel) -> FrozenModel:
    """Check the digest, which the cache key contains: nobody may have a file compiled under the key of another."""
    if model["digest"] != model_digest({file["path"]: file["digest"] for file in model["files"]}):
        raise ValueError("the digest is not that of the files")
    return model


_LOWER_DTYPES = frozenset({"float16", "bfloat16", "float8e4m3fn", "float8e4m3fnuz", "float8e5m2", "float8e5m2fnuz"})
_LOWER_OPERATORS = frozenset(
    {
        "QuantizeLinear", "DequantizeLinear", "QLinearConv", "QLinearMatMul", "ConvInteger", "MatMulInteger",
        "com.microsoft.MatMulNBits", "com.microsoft.QGemm", "com.microsoft.QLinearAdd",
    }
)  # fmt: skip


class UnreadableModel(UsageError):
    """A model file cannot be used; `kind` is the farm's failure kind for it."""

    def __init__(self, message: str, kind: str = "bad_model", *, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.kind = kind


def lowered(model: FrozenModel) -> str:
    """Return why a model is below fp32 already (`float16 weights`, `QDQ nodes`), or an empty string."""
    lower = [dtype for dtype in model.get("weight_dtypes", ()) if dtype in _LOWER_DTYPES]
    if lower:
        return f"{lower[0]} weights"
    quantized = sorted(_LOWER_OPERATORS & set(model.get("operators", ())))
    return f"{quantized[0]} nodes" if quantized else ""


ModelCheck = Callable[[Path, str, Sequence[str]], "CheckAnswer"]
"""Takes a model's file, its format and the wanted outputs; returns the content. Raises BadModel."""


def check_here(path: Path, format: str, outputs: Sequence[str]) -> CheckAnswer:
    """Check a model in this process: for models of the user who runs it. Raises BadModel."""
    if format == "tf":
        from farm.runner.tf_check import check_tf

        return check_tf(path, outputs)
    from farm.runner.onnx_models import check_onnx

    return check_onnx(path)


def read_model(
    path: Path,
    format: str = "onnx",
    outputs: Sequence[str] = (),
    *,
    check: ModelCheck = check_here,
    hashed: FileReference | None = None,
) -> FrozenModel:
    """Check a model file (ONNX, or with `format` "tf" a frozen TensorFlow graph), and hash it with its external data.

    `outputs` are the nodes that a TensorFlow graph is cut at; without them its ends are. `check` says what is in the
    model; `hashed` is the file's own reference, if it is known.

    Raises UnreadableModel; its sentence names the tensor or node that is wrong.
    """
    from farm.runner.onnx_models import BadModel

    try:
        found = check(path, format, outputs)
        others = [file_reference(path.parent / name, name) for name in found.get("external_files", ())]
        files = [hashed or file_reference(path, path.name), *others]
    except BadModel as error:
        hint = next((hint for words, hint in _WAYS_OUT.items() if words in error.message), "")
        raise UnreadableModel(f"{path}: {error.message}", error.kind, hint=hint) from None
    except OSError as error:
        raise UnreadableModel(f"{path}: {error.strerror or error}") from None
    # An empty list of doubts would make of a stored manifest, which older farms wrote without, another version.
    said = {name: value for name, value in found.items() if value or name != "doubts"}
    return {
        **view_of(FrozenModel, said),
        "digest": model_digest({file["path"]: file["digest"] for file in files}),
        "format": format,
        "files": files,
        "size": sum(file["size"] for file in files),
        "conversion": None,
    }


_WAYS_OUT = {
    "external data": "keep it as a plain file in its folder: onnx.save(model, path, save_as_external_data=True)",
    "is empty": "export or download it again",
    "not an ONNX model": "export or download it again; a frozen TensorFlow graph needs `format: tf`",
    "of unknown domain": "no compiler here has it: export the model without custom operators, or `exclude:` it",
    "not a regular file": "name the model file itself",
}
"""What to do about a model that cannot be read, by words of the sentence that says why."""


def file_reference(path: Path, name: str) -> FileReference:
    """Return the reference of a file, read in pieces, under this name."""
    digest, size = hash_file(path)
    return {"path": name, "digest": digest, "size": size}


MAX_BYTES = 2 * 2**30  # All arrays of one data set together, unpacked.
MAX_ARRAYS = 1000
MAX_PARTS = 100_000  # Files of one folder.
_BLOCK = 64 << 20  # Bytes of an array that are in memory at once.
_PIECE = 1 << 20
_NPY = b"\x93NUMPY"  # How an `.npy` begins.
_ONNX_FILE = re.compile(r"(input|output)_([0-9]{1,4})\.pb")
_KINDS = "biufV"  # numpy's letters for bool, integers, floats, and the raw bytes in which bfloat16 is stored.


class DataError(UsageError):
    """Data cannot be used for this model."""


class ArrayDocument(TypedDict):
    """The type of an array."""

    dtype: str
    shape: Sequence[int]


@with_config(ConfigDict(extra="ignore"))
class FrozenData(TypedDict):
    """A data set as a blob: its digest and size, and the type of each array.

    Arrays named like outputs of the model are expected outputs, the others are inputs.
    """

    digest: Digest
    size: Size
    arrays: Mapping[str, ArrayDocument]


# --- checks -------------------------------------------------------------------------------------------------------


def check_data(data: FrozenData, inputs: Mapping[str, Input], outputs: Sequence[TensorInfo]) -> None:
    """Check that data fits a model's inputs in one shape.

    An input with a batch axis stacks samples on that axis; others are `[N, *shape]`, or one sample as it is. An
    array that holds one sample goes with every sample of the others.

    Raises DataError that names the array, what it is and what it should be.
    """
    known = {*inputs, *(tensor["name"] for tensor in outputs)}
    for name in data["arrays"]:
        if name not in known:
            message = f"array `{name}` is neither an input nor an output of the model"
            raise DataError(message, hint=suggestion(name, known))
    counts = {name: _samples(data, tensor) for name, tensor in inputs.items()}
    if len(set(counts.values()) - {1}) > 1:
        listed = ", ".join(f"`{name}` {count}" for name, count in counts.items())
        raise DataError(f"the arrays hold different numbers of samples: {listed}")
    total = max(counts.values(), default=1)
    for output in outputs:
        shape = data["arrays"][output["name"]]["shape"] if output["name"] in data["arrays"] else [total]
        if not shape or shape[0] != total:
            message = f"expected output `{output['name']}` has shape {shown_shape(shape)}, not {total} samples first"
            raise DataError(message, hint="one expected output for each sample")


def _samples(data: FrozenData, tensor: Input) -> int:
    """Return how many samples the array of an input holds. Raises DataError if it does not fit."""
    name = tensor.name
    if name not in data["arrays"]:
        there = ", ".join(sorted(data["arrays"])) or "none"
        raise DataError(f"there is no array for input `{name}`", hint=f"the arrays there are: {there}")
    found = data["arrays"][name]
    if found["dtype"] != tensor.dtype:
        message = f"array `{name}` is {found['dtype']}, the model wants {tensor.dtype}"
        raise DataError(message, hint=f"save it as array.astype({tensor.dtype!r})")
    axis, count = tensor.batch_axis, _count(tuple(found["shape"]), tensor)
    if count is None:
        stacked: list[Extent | str] = list(tensor.shape) if axis is not None else ["N", *tensor.shape]
        if axis is not None:
            stacked[axis] = "N"
        message = f"array `{name}` has shape {shown_shape(found['shape'])}, N samples would be {shown_shape(stacked)}"
        hint = f"input `{name}` is {shown_shape(tensor.shape)} here"
        if axis is None and tensor.shape[:1] == (1,) and tuple(found["shape"][1:]) == tensor.shape[1:]:
            sizes = ", ".join(str(size) for size in tensor.shape[1:])
            hint = f"to stack them on the first axis, write `shape: [{BATCH}, {sizes}]` and `batches: [1]`"
        raise DataError(message, hint=hint)
    if not count:
        raise DataError(f"array `{name}` holds no sample", hint="at least one is needed")
    return count


def _count(found: tuple[int, ...], tensor: Input) -> int | None:
    """Return how many samples an array of this shape holds, or None if it does not fit."""
    if tensor.batch_axis is not None:
        axis = tensor.batch_axis
        fits = len(found) == len(tensor.shape) and _without(found, axis) == _without(tensor.shape, axis)
        return found[axis] if fits else None
    if found == tensor.shape:
        return 1
    return found[0] if found[1:] == tensor.shape and found else None


# --- reading ------------------------------------------------------------------------------------------------------


def freeze_data(
    path: Path, model: FrozenModel, symbolic: Mapping[str, TensorInfo], folder: Path
) -> tuple[FrozenData, Path]:
    """Read an `.npz`, an `.npy`, a folder of `.npz`, or an ONNX folder; write one canonical `.npz` into `folder`.

    `symbolic` are the model's inputs with the manifest's names for dimensions (`farm.models.shapes.symbolic_inputs`).
    Equal arrays make equal bytes. Returns the data and the file, which is named by its digest.

    Raises DataError that names the file and array.
    """
    parts = _parts(path, model)
    names = list(dict.fromkeys(name for part in parts for name in part.sizes))
    for part in parts:
        missing = [name for name in names if name not in part.sizes]
        if missing:
            raise DataError(f"{part.path}: there is no array `{missing[0]}`, which other samples have")
    total = sum(size for part in parts for size in part.sizes.values())
    if total > MAX_BYTES:
        raise DataError(f"{path}: {total} bytes of arrays, more than {MAX_BYTES}", hint="a few hundred samples do")
    folder.mkdir(parents=True, exist_ok=True)
    arrays: dict[str, ArrayDocument] = {}
    with tempfile.TemporaryDirectory(suffix=".part", dir=folder) as scratch:
        made = Path(scratch) / "data.npz"
        with zipfile.ZipFile(made, "w", zipfile.ZIP_STORED) as archive:
            for name in sorted(names):
                file = Path(scratch) / "array.npy"
                array = _joined(parts, name, symbolic.get(name), file)
                if name in symbolic and _has_nan(array):
                    hint = "a single NaN makes every scale and error NaN: leave that sample out"
                    raise DataError(f"{path}: array `{name}` holds NaN", hint=hint)
                arrays[name] = {"dtype": _dtype_name(array, symbolic.get(name)), "shape": list(array.shape)}
                del array
                member = zipfile.ZipInfo(f"{name}.npy", date_time=(1980, 1, 1, 0, 0, 0))
                member.create_version = member.extract_version = zipfile.ZIP64_VERSION
                with file.open("rb") as source, archive.open(member, "w", force_zip64=True) as target:
                    shutil.copyfileobj(source, target, _PIECE)
                file.unlink()
        with made.open("r+b") as written:
            for member in archive.infolist():
                # Python before 3.11.4 writes sizes here, which would make another digest: they stand behind the name.
                written.seek(member.header_offset + 18)
                written.write(b"\xff" * 8)
        digest, size = hash_file(made)
        place = made.replace(folder / f"{digest}.npz")
    return {"digest": digest, "size": size, "arrays": arrays}, place


def _parts(path: Path, model: FrozenModel) -> list[_Part]:
    if path.is_file():
        with path.open("rb") as stream:
            single = stream.read(len(_NPY)) == _NPY
        return [_Npy(path, model) if single else _Npz(path)]
    if not path.is_dir():
        raise DataError(f"{path}: there is no such file or folder")
    files = sorted(path.glob("*.npz"))
    if len(files) > MAX_PARTS:
        raise DataError(f"{path}: more than {MAX_PARTS} files", hint="join the samples in one .npz")
    if files:
        return [_Npz(file) for file in files]
    sets = [path, *(entry for entry in sorted(path.iterdir()) if entry.is_dir())]
    parts: list[_Part] = [_Onnx(entry, model) for entry in sets if any(entry.glob("input_*.pb"))]
    if not parts:
        hint = "it needs *.npz files, or input_0.pb and so on (also in folders such as test_data_set_0)"
        raise DataError(f"{path}: this folder holds no samples", hint=hint)
    return parts


class _Npy:
    """An `.npy` file: the array of a model's only input."""

    def __init__(self, path: Path, model: FrozenModel) -> None:
        if len(model["inputs"]) != 1:
            names = ", ".join(f"`{tensor['name']}`" for tensor in model["inputs"])
            hint = f"write an .npz with numpy.savez, one array for each of {names}"
            raise DataError(f"{path}: an .npy holds one array, the model has {len(model['inputs'])} inputs", hint=hint)
        self.path = path
        self.sizes = {model["inputs"][0]["name"]: path.stat().st_size}

    def load(self, name: str, scratch: Path) -> np.ndarray[Any, Any]:
        """Return an array, a large one mapped from a file; `scratch` is a folder for what has to be unpacked."""
        import numpy as np

        with _reading(f"{self.path}: cannot be read", hint="save a plain array of numbers"):
            array: np.ndarray[Any, Any] = np.load(self.path, mmap_mode="r", allow_pickle=False)
        _require_numbers(f"{self.path}", array.dtype)
        return array


class _Npz:
    """An `.npz` file; only headers are read until an array is asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with _reading(f"{path}: not an .npz file", hint="write it with numpy.savez, one array for each input"):
            archive = zipfile.ZipFile(path)
        with archive:
            members = archive.infolist()
            if len(members) > MAX_ARRAYS:
                raise DataError(f"{path}: more than {MAX_ARRAYS} arrays")
            self.sizes: dict[str, int] = {}
            for member in members:
                name = member.filename.removesuffix(".npy")
                if name == member.filename or name in self.sizes:
                    raise DataError(f"{path}: {member.filename!r} is not an array, or is there twice")
                self.sizes[name] = self._declared(archive, member)

    def _declared(self, archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> int:
        """Return an array's bytes as its header declares them, which must be those in the archive."""
        from numpy.lib import format as npy

        where = f"{self.path}: array `{member.filename.removesuffix('.npy')}`"
        with _reading(f"{where} cannot be read"), archive.open(member) as stream:
            version = npy.read_magic(stream)
            reader = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
            shape, _, dtype = reader(stream)
            header = stream.tell()
        _require_numbers(where, dtype)
        size = math.prod(shape, start=dtype.itemsize)
        if size < 0 or header + size != member.file_size:
            raise DataError(f"{where}: its header declares {size} bytes, the archive has {member.file_size - header}")
        return size

    def load(self, name: str, scratch: Path) -> np.ndarray[Any, Any]:
        import numpy as np
        from numpy.lib import format as npy

        with (
            _reading(f"{self.path}: array `{name}` cannot be read"),
            zipfile.ZipFile(self.path) as archive,
            archive.open(f"{name}.npy") as stream,
        ):
            if self.sizes[name] <= _BLOCK:
                return npy.read_array(stream, allow_pickle=False)
            unpacked = scratch / "unpacked.npy"
            with unpacked.open("wb") as file:
                shutil.copyfileobj(stream, file, _PIECE)
            array: np.ndarray[Any, Any] = np.load(unpacked, mmap_mode="r", allow_pickle=False)
            unpacked.unlink()  # Its bytes stay as long as the array.
            return array


class _Onnx:
    """A folder of ONNX tensors, one sample: `input_0.pb`, `output_0.pb`, in the model's order."""

    def __init__(self, path: Path, model: FrozenModel) -> None:
        self.path = path
        self.files: dict[str, Path] = {}
        for kind, tensors in (("input", model["inputs"]), ("output", model["outputs"])):
            for file in sorted(path.glob(f"{kind}_*.pb")):
                match = _ONNX_FILE.fullmatch(file.name)
                if match and int(match[2]) >= len(tensors):
                    raise DataError(f"{file}: the model has only {len(tensors)} {kind}s")
                if match:
                    self.files[tensors[int(match[2])]["name"]] = file
        self.sizes = {name: file.stat().st_size for name, file in self.files.items()}

    def load(self, name: str, scratch: Path) -> np.ndarray[Any, Any]:
        import onnx
        from onnx import numpy_helper

        file = self.files[name]
        tensor = onnx.TensorProto()
        with _reading(f"{file}: not an ONNX tensor"):
            tensor.ParseFromString(file.read_bytes())
            if tensor.data_location == onnx.TensorProto.EXTERNAL:
                raise DataError(f"{file}: the tensor's bytes are in another file", hint="store them in the tensor")
            array: np.ndarray[Any, Any] = numpy_helper.to_array(tensor)
        _require_numbers(f"{file}: the tensor", array.dtype)
        return array


_Part = _Npy | _Npz | _Onnx  # One file, or one folder of tensors, with every array once; `sizes` has the bytes of each.


@contextmanager
def _reading(failed: str, hint: str = "") -> Iterator[None]:
    """Turn whatever a library raises for hostile bytes into a DataError that begins with what failed."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"{failed}: {reason_of(error)}", hint=hint) from None


def _require_numbers(where: str, dtype: np.dtype[Any]) -> None:
    """Refuse arrays of a type that are not numbers, such as raw bytes of no length. Raises DataError."""
    if dtype.hasobject or dtype.kind not in _KINDS or not dtype.itemsize:
        raise DataError(f"{where} holds {dtype}, not numbers", hint="save plain arrays of numbers")


def _joined(parts: Sequence[_Part], name: str, tensor: TensorInfo | None, file: Path) -> np.ndarray[Any, Any]:
    """Write what the parts have of an array into one `.npy`, little-endian and in C order; return it, mapped."""
    import numpy as np

    # The axis on which several parts are joined, and the rank of a sample that lacks it.
    place, rank, several = 0, -1, len(parts) > 1
    if several and tensor and tensor["shape"] is not None:
        place, rank = (tensor["shape"].index(BATCH), -1) if BATCH in tensor["shape"] else (0, len(tensor["shape"]))

    def load(part: _Part) -> np.ndarray[Any, Any]:
        array = part.load(name, file.parent)
        # An input without a batch axis, and an output that is a single number, get an axis for the samples.
        return array[np.newaxis] if several and (array.ndim == rank or not array.ndim) else array

    found = [((array := load(part)).shape, array.dtype) for part in parts]
    shape = list(found[0][0])
    for other, _ in found[1:]:
        if len(other) != len(shape) or place >= len(shape) or _without(other, place) != _without(shape, place):
            shapes = f"{shown_shape(found[0][0])} and {shown_shape(other)}"
            raise DataError(f"the samples of array `{name}` have different shapes: {shapes}")
        shape[place] += other[place]
    dtype = np.result_type(*{dtype for _, dtype in found}).newbyteorder("<")
    whole: np.ndarray[Any, Any] = np.lib.format.open_memmap(
        file, mode="w+", dtype=dtype, shape=tuple(shape), version=(1, 0)
    )
    start = 0
    for part in parts:
        array = load(part)
        end = start + array.shape[place] if shape else 0
        target = whole[(slice(None),) * place + (slice(start, end),)] if shape else whole
        for block in _blocks(array):
            target[block] = array[block]
            _let_go(whole, array)
        start = end
    return whole


def _without(shape: Sequence[Extent], axis: int) -> list[Extent]:
    return [*shape[:axis], *shape[axis + 1 :]]


def _blocks(array: np.ndarray[Any, Any]) -> Iterator[Any]:
    """Yield indices that together take a whole array, a bounded number of bytes at once."""
    if not array.size or not array.ndim:
        yield ...
        return
    rows = max(1, _BLOCK // (array.nbytes // array.shape[0]))
    for start in range(0, array.shape[0], rows):
        yield slice(start, start + rows)


def _let_go(*arrays: np.ndarray[Any, Any]) -> None:
    """Give back the memory in which files are mapped; what was written stays with the system."""
    for array in arrays:
        base: Any = array
        while getattr(base, "base", None) is not None:
            base = base.base
        if isinstance(base, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
            base.madvise(mmap.MADV_DONTNEED)


def _has_nan(array: np.ndarray[Any, Any]) -> bool:
    import numpy as np

    if array.dtype.kind != "f" or not array.size:
        return False
    for block in _blocks(array):
        if np.isnan(np.min(array[block])):
            return True
        _let_go(array)
    return False


def _dtype_name(array: np.ndarray[Any, Any], tensor: TensorInfo | None) -> str:
    raw = array.dtype.kind == "V"
    if raw and tensor is not None and array.dtype.itemsize == {"bfloat16": 2}.get(tensor["dtype"], 1):
        return tensor["dtype"]
    return str(array.dtype.newbyteorder("="))
