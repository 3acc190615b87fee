"""Conversions: the client turns models that no compiler reads into ONNX or a frozen graph.

A conversion has a key of its own (converter, versions, options, source) under which its outcome is kept, and goes into
the model's reference as a record. The cell's model is the converted file: what counts for the cache key is its digest.
"""

from __future__ import annotations

import json
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

from farm.client.transfers import adopt, note_use
from farm.compiling.child_process import Seal, ask_once
from farm.compiling.failures import ChildLimits, Failure
from farm.errors import UsageError
from farm.files import NotPlain, take
from farm.manifest.entries import ModelEntry
from farm.models.frozen import UnreadableModel, file_reference
from farm.models.shapes import Span
from farm.runner.documents import Answer, ChildRequest, ConvertedInput, Libraries
from farm.spec import digest_of, model_digest
from farm.wire.program import ConversionContent, ConversionRecord

RECIPE = 1  # Number of this module's way to convert; goes up when what comes out changes.

LIMITS = ChildLimits(time=3600.0, memory=32 << 30, hang=600.0, disk=256 << 30, processes=8192)
"""What a conversion may use."""

EXTRAS = {"pt2": "torch", "torchscript": "torch", "saved-model": "tensorflow"}
"""The farm's extra that installs what converts a kind of model."""

OPEN_SIZE = 2  # Stands for a dimension without a size in the example that a TorchScript model is exported with.

_EXPORT = "torch.export.save(torch.export.export(model, (example,)), 'net.pt2'), or torch.onnx.export(model, …)"


class ConvertRequest(ChildRequest, total=False):
    """What a child is asked that converts a model: from the file `source` to the file `output`."""

    kind: str  # `pt2`, `torchscript`, `saved-model`.
    options: Mapping[str, object]  # `to` (`onnx`, `tf`), `opset`, and the `signature` of a SavedModel.
    inputs: Sequence[ConvertedInput]
    source: str
    output: str


class LibrariesAnswer(Answer):
    """What converts, or has converted: versions by name."""

    libraries: Libraries


def kind_of(path: Path, format: str) -> str:
    """Return what a model to be converted is: `pt2`, `torchscript` or `saved-model`; nothing of it is loaded.

    Raises UnreadableModel, also for pickled modules and weights: unpickling runs whatever is in the file.
    """
    if format == "saved-model":
        if path.is_dir() and any((path / name).is_file() for name in ("saved_model.pb", "saved_model.pbtxt")):
            return "saved-model"
        hint = "name the folder that holds saved_model.pb; a frozen graph (.pb) is `format: tf`"
        raise UnreadableModel(f"{path} is not a SavedModel", hint=hint)
    if not zipfile.is_zipfile(path):
        pickled = path.is_file() and path.read_bytes()[:1] == b"\x80"
        what = "is a pickle" if pickled else "is neither a .pt2 nor a TorchScript archive"
        raise UnreadableModel(f"{path} {what}", hint=f"export the model where its code is: {_EXPORT}")
    with zipfile.ZipFile(path) as archive:
        names = {name.partition("/")[2] for name in archive.namelist()} | set(archive.namelist())
    if any(name.startswith("data/aotinductor/") for name in names):
        hint = f"compiled machine code cannot be converted; export the program itself: {_EXPORT}"
        raise UnreadableModel(f"{path} is a package of AOTInductor", hint=hint)
    if "serialized_exported_program.json" in names or any(
        name.startswith("models/") and name.endswith(".json") for name in names
    ):
        return "pt2"
    if "constants.pkl" in names and any(name.startswith("code/") for name in names):
        return "torchscript"
    if "data.pkl" in names:
        hint = f"pickles can run any code and are never loaded; export the model where its code is: {_EXPORT}"
        raise UnreadableModel(f"{path} holds a pickled module or weights (torch.save)", hint=hint)
    raise UnreadableModel(f"{path} is neither a .pt2 nor a TorchScript archive", hint=f"export it again: {_EXPORT}")


def convert(path: Path, entry: ModelEntry, cache: Path, pythons: Mapping[str, str]) -> tuple[Path, ConversionRecord]:
    """Convert a model, or find what was converted before; return the converted file and the record of the conversion.

    `cache` is a folder for converted models; `pythons` names interpreters that have a converter, by the extra that
    installs it (this interpreter if there is none).

    Raises UnreadableModel for a model that cannot be converted, UsageError if the converter is not installed.
    """
    kind = kind_of(path, entry.format)
    converter = EXTRAS[kind]
    python = pythons.get(converter, "")
    options = _options(entry, kind)
    record: ConversionContent = {
        "recipe": RECIPE,
        "converter": converter,
        "libraries": libraries(converter, python),
        "kind": kind,
        "options": options,
        "inputs": _examples(entry, path) if kind == "torchscript" else [],
        "source": source_digest(path),
    }
    key = digest_of(record)
    place = cache / "conversions" / key
    model = place / f"model.{'pb' if options['to'] == 'tf' else 'onnx'}"
    note_use(cache, [model])
    if not model.is_file():
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(suffix=".part", dir=place.parent) as made:
            output = Path(made) / "model" / model.name
            output.parent.mkdir()
            request: ConvertRequest = {
                "action": "convert",
                "extension": converter,
                "kind": kind,
                "options": options,
                "inputs": record["inputs"],
                "source": str(path.resolve()),
                "output": str(output),
            }
            _ask(request, path, python, Seal(read=[path.resolve()], write=[output.parent], within=Path(made)))
            # A child may leave a link of any name, or a folder, in its own: nothing is written there.
            kept = Path(made) / "kept"
            kept.mkdir()
            for file in sorted(output.parent.iterdir()):
                try:
                    take(file, kept / file.name, LIMITS.disk)
                except NotPlain as error:
                    raise UnreadableModel(f"the converter left {file.name}: {error.strerror}") from None
            (kept / "conversion.json").write_text(json.dumps({**record, "key": key}, indent=1))
            adopt(kept, place, model)
    return model, {**record, "key": key, "name": path.name}


def _options(entry: ModelEntry, kind: str) -> dict[str, int | str]:
    given = entry.conversion
    if kind == "saved-model":
        to_graph: dict[str, int | str] = {"to": given.to, "signature": given.signature}
        return to_graph if given.to == "tf" else {**to_graph, "opset": given.opset}
    return {"to": "onnx", "opset": given.opset}


def _examples(entry: ModelEntry, path: Path) -> list[ConvertedInput]:
    """Return what a TorchScript archive is exported with: its inputs in order, as the manifest describes them."""
    if not entry.inputs or not all(item.has_shape for item in entry.inputs.values()):
        hint = "`inputs: {x: {shape: [batch, 3, 224, 224]}}`, and `conversion: {dtypes: {x: int64}}` if not float32"
        raise UnreadableModel(
            f"{path}: a TorchScript archive does not describe its inputs: list all, in order", hint=hint
        )
    first = {name: values[0] for name, values in entry.sizes.items()}
    sizes = {name: size.high if isinstance(size, Span) else size for name, size in first.items()}
    return [
        {
            "name": name,
            "dtype": entry.conversion.dtypes.get(name, "float32"),
            "sizes": [_size(dimension, sizes) for dimension in item.shape],
            "axes": {str(axis): size for axis, size in enumerate(item.shape) if isinstance(size, str)},
        }
        for name, item in entry.inputs.items()
    ]


def _size(dimension: int | str, sizes: Mapping[str, int]) -> int:
    parts = [dimension] if isinstance(dimension, int) else dimension.split("+")
    return sum(int(part) if str(part).isdigit() else sizes.get(str(part), OPEN_SIZE) for part in parts)


def libraries(converter: str, python: str) -> dict[str, str]:
    """Return the versions of what an interpreter (empty: this one) has to work with a converter's formats.

    Raises UsageError that says what is missing, and how to install it.
    """
    return dict(_ask({"action": "libraries", "extension": converter}, Path(), python)["libraries"])


def source_digest(path: Path) -> str:
    """Return the digest of a file, or of all files of a folder as of a model with external data."""
    if path.is_file():
        return str(file_reference(path, path.name)["digest"])
    files = sorted(file for file in path.rglob("*") if file.is_file())
    names = {file.relative_to(path).as_posix(): file for file in files}
    return model_digest({name: file_reference(file, name)["digest"] for name, file in names.items()})


def _ask(request: ChildRequest, path: Path, python: str, seal: Seal | None = None) -> LibrariesAnswer:
    """Ask a child that has neither credentials nor this process's environment, nor files or sockets beyond its seal."""
    try:
        found = ask_once(request, LIMITS, python=python, seal=seal, answer=LibrariesAnswer)
    except OSError as error:
        raise UsageError(f"the converter cannot be started: {error}") from None
    if not isinstance(found, Failure):
        return cast(LibrariesAnswer, found)
    if request["action"] == "libraries":
        raise UsageError(found.message)
    raise UnreadableModel(f"{path}: {found.message}", found.kind, hint=found.detail.strip()[-500:])
