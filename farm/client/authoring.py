"""Help for people who write manifests: check one without a server, and begin one from a model."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from farm.client.freezing import FrozenInputs, ManifestReader
from farm.client.transfers import default_cache
from farm.errors import ManifestError, Problem, UsageError
from farm.manifest.parsing import read_manifest, valid_name
from farm.manifest.yaml import in_yaml
from farm.matrix.cells import check
from farm.matrix.combinations import Combinations, combine
from farm.models.frozen import FrozenModel, lowered, read_model
from farm.models.shapes import BATCH
from farm.runner.documents import TensorInfo
from farm.targets.pools import understand_target

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.]{0,63}")
_PLAIN = re.compile(r"(?!(?:null|true|false)$)[a-z_].*", re.IGNORECASE)
"""Names and dimensions that YAML reads as text also without quotes; `1.5` and `null` need them."""
RANGES = {"uint8": "[0, 255]", "int8": "[-128, 127]"}
"""Values of random samples by type; of indices nobody knows more than that 0 is one."""
_PICTURE, _SEQUENCE = 224, 128  # Initial sizes for a model's open dimensions.


def lint(path: str | Path, *, models: bool = True) -> list[Problem]:
    """Return every problem of a manifest that shows without a server; none if it is fine.

    With `models`, local models and data are read and checked as well; what takes a download, a conversion or a run of
    the user's code is left out.
    """
    return _read(path, models=models)[1]


def name_cells(path: str | Path, only: Sequence[str] = ()) -> tuple[str, list[str]]:
    """Return a manifest's name and the identifiers of its cells, without a server and without running anything.

    `only` are patterns, as `freeze` takes. Raises ManifestError with every problem that `lint` finds, NotFound if no
    cell fits.
    """
    matrix, problems = _read(path, models=True, only=only)
    if matrix is None or problems:
        raise ManifestError(problems)
    return matrix.manifest.name, [combination.identifier for combination in matrix.combinations]


def _read(path: str | Path, *, models: bool, only: Sequence[str] = ()) -> tuple[Combinations | None, list[Problem]]:
    """Return the matrix of a manifest, if it can be made, and every problem."""
    matrix, problems, found = None, list[Problem](), FrozenInputs()
    try:
        manifest, problems = read_manifest(path)
        if manifest is None:
            return None, problems
        matrix = combine(manifest, only)
        if models:
            with tempfile.TemporaryDirectory() as cache:
                folder = Path(path).parent
                reader = ManifestReader(matrix, folder, cache=Path(cache), quick=True, facts=default_cache())
                found = reader.read()
        # What the matrix would be without an unknown field is not what was meant.
        problems = [*problems, *found.problems, *(() if problems else check(matrix, found.models, found.data))]
    except ManifestError as error:
        problems = [*problems, *error.problems]
    return matrix, sorted(dict.fromkeys(problems), key=lambda problem: (problem.line, problem.column))


def init_manifest(
    model_path: str | Path, folder: str | Path = ".", schema: str = "", targets: Sequence[str] = ("onnxruntime/cpu",)
) -> str:
    """Return a commented manifest for an ONNX model, to be stored in `folder`: complete, and without problems.

    `schema` is the file with the manifest's JSON Schema, for editors: its name as the manifest sees it.

    Raises UnreadableModel, UsageError for an unknown target.
    """
    for target in targets:
        try:
            understand_target(target)
        except ValueError as error:
            raise UsageError(str(error)) from None
    path = Path(model_path)
    model = read_model(path)
    name = valid_name(title(path)) or "model"
    shown = os.path.relpath(path.resolve(), Path(folder).resolve())
    renamed = _renamed(model)
    sizes = _sizes(renamed)
    others = {dimension: size for dimension, size in sizes.items() if dimension != BATCH}
    native = bool(lowered(model))
    lines = [
        *([f"# yaml-language-server: $schema={schema}"] if schema else []),
        "# What to compile, and for what. `farm lint` checks this file, `farm run` builds it here, `farm submit` sends",
        "# it to a farm. `farm schema` prints all fields.",
        "version: 1",
        f"name: {_scalar(name)}",
        "# GPUs by profile (mi300x, rx7900xtx) or architecture (gfx942), if a worker has one.",
        f"targets: [{', '.join(targets)}]",
        f"# {'Exported below fp32 already: native keeps it as it is.' if native else 'Also bf16, int8, …'}",
        f"precisions: [{'native' if native else 'fp32, fp16'}]",
        "models:",
        f"  - name: {_scalar(name)}",
        f"    source: {{path: {in_yaml(shown)}}}",
    ]
    if renamed:
        lines.append("    inputs:")
        unknown = {tensor["name"] for tensor in model["inputs"] if tensor["shape"] is None}
        lines += [
            _input_line(tensor) + ("; the model does not give its shape: write it" if tensor["name"] in unknown else "")
            for tensor in renamed
        ]
    if others:
        lines.append("    # Sizes of the other named dimensions; a list compiles every one.")
        lines.append(f"    dims: {{{', '.join(f'{dimension}: {size}' for dimension, size in others.items())}}}")
    if BATCH in sizes:
        lines.append("    batches: [1]")
    lines += [
        "    # Real data: an .npz with one array for each input, samples stacked. int8 and fp8 need calibration,",
        "    # and accuracy on real samples says more than on random ones.",
        "    # calibration: {path: calibration.npz}",
        "    # samples: {path: samples.npz}",
    ]
    return "\n".join(lines) + "\n"


def title(path: Path) -> str:
    """Return what a model is called: its file's name, or its folder's, since most exporters call each `model`."""
    return path.resolve().parent.name if path.stem.lower() == "model" else path.stem


def _renamed(model: FrozenModel) -> list[TensorInfo]:
    """Return the inputs with every open dimension named as a manifest can: the first one `batch`."""
    first = {
        tensor["shape"][0]
        for tensor in model["inputs"]
        if tensor["shape"] and isinstance(tensor["shape"][0], str) and "+" not in tensor["shape"][0]
    }
    result: list[TensorInfo] = []
    for tensor in model["inputs"]:
        shape: list[int | str | None] = []
        for axis, dimension in enumerate((None,) if tensor["shape"] is None else tensor["shape"]):
            if isinstance(dimension, int):
                shape.append(dimension)
            elif dimension in first or (axis == 0 and dimension is None):
                shape.append(BATCH)
            elif dimension and all(_NAME.fullmatch(part.strip()) for part in dimension.split("+")):
                shape.append(dimension)
            else:
                shape.append(f"dim{axis}")
        result.append({**tensor, "shape": tuple(shape)})
    return result


def _sizes(tensors: Iterable[TensorInfo]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for tensor in tensors:
        shape = tensor["shape"] or ()
        for dimension in shape:
            for part in dimension.split("+") if isinstance(dimension, str) else ():
                open_size = _PICTURE if len(shape) == 4 else _SEQUENCE
                sizes.setdefault(part.strip(), 1 if part.strip() == BATCH else open_size)
    return sizes


def _scalar(text: str) -> str:
    return text if _PLAIN.fullmatch(text) else in_yaml(text)


def _input_line(tensor: TensorInfo) -> str:
    shape = ", ".join(_scalar(dim) if isinstance(dim, str) else str(dim) for dim in tensor["shape"] or ())
    fields = [f"shape: [{shape}]"]
    if tensor["dtype"].startswith(("int", "uint")):
        fields.append(f"range: {RANGES.get(tensor['dtype'], '[0, 1]')}")
    note = f"  # {tensor['dtype']}"
    if tensor["dtype"] in RANGES:
        note += "; its values in random samples"
    elif len(fields) > 1:
        note += "; its random samples are 0 and 1: write the largest index"
    return f"      {in_yaml(tensor['name'])}: {{{', '.join(fields)}}}{note}"
