"""Models: model files as the submitting side reads them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NotRequired

from pydantic import ConfigDict, with_config
from typing_extensions import TypedDict

from farm.errors import UsageError
from farm.files import hash_file
from farm.runner.bounds import Bound, Digest, Size
from farm.runner.documents import TensorInfo
from farm.spec import FileReference, model_digest
from farm.wire.program import ConversionRecord

if TYPE_CHECKING:
    from farm.runner.documents import CheckAnswer

Dimension = int | str | None
"""A number, a name or sum of names, or None if the model does not say."""


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
        raise UnreadableModel(f"{path}: {error.message}", error.kind, hint=_way_out(error.message)) from None
    except OSError as error:
        raise UnreadableModel(f"{path}: {error.strerror or error}") from None
    model: FrozenModel = {
        "digest": model_digest({file["path"]: file["digest"] for file in files}),
        "format": format,
        "files": files,
        "inputs": found["inputs"],
        "outputs": found["outputs"],
        "opset": found["opset"],
        "operators": found["operators"],
        "weight_dtypes": found["weight_dtypes"],
        "size": sum(file["size"] for file in files),
        "conversion": None,
    }
    if doubts := found.get("doubts"):
        model["doubts"] = doubts
    return model


_WAYS_OUT = {
    "external data": "keep it as a plain file in its folder: onnx.save(model, path, save_as_external_data=True)",
    "is empty": "export or download it again",
    "not an ONNX model": "export or download it again; a frozen TensorFlow graph needs `format: tf`",
    "of unknown domain": "no compiler here has it: export the model without custom operators, or `exclude:` it",
    "not a regular file": "name the model file itself",
}
"""What to do about a model that cannot be read, by words of the sentence that says why."""


def _way_out(message: str) -> str:
    return next((hint for words, hint in _WAYS_OUT.items() if words in message), "")


def file_reference(path: Path, name: str) -> FileReference:
    """Return the reference of a file, read in pieces, under this name."""
    digest, size = hash_file(path)
    return {"path": name, "digest": digest, "size": size}
