"""Patterns of model files: written out by the submitting side, where they stand."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from farm.client.freezing import freeze
from farm.errors import ManifestError
from farm.manifest import parsing
from farm.manifest.parsing import load_manifest, parse_manifest

TEXT = """\
version: 1
name: nightly
targets: [onnxruntime/cpu]
models:
  - name: first
    source: {path: models/Zoo net.onnx}
  - source: {glob: "models/*.onnx"}   # all of them
    precisions: [fp16]
  - name: last
    source: {path: last.onnx}
"""


def save_model(path: Path) -> None:
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 3]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Neg", ["x"], ["y"])], "net", values[:1], values[1:])
    onnx.save_model(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    (tmp_path / "models").mkdir()
    for name in ("models/Zoo net.onnx", "models/beta.onnx", "last.onnx", "models/readme.txt"):
        save_model(tmp_path / name)
    path = tmp_path / "farm.yaml"
    path.write_text(TEXT)
    return path


def test_every_file_is_an_entry_named_by_its_stem(manifest: Path) -> None:
    read = load_manifest(manifest)
    assert [(model.name, model.source.path, model.precisions) for model in read.models] == [
        ("first", "models/Zoo net.onnx", ()),
        ("zoo-net", "models/Zoo net.onnx", ("fp16",)),
        ("beta", "models/beta.onnx", ("fp16",)),
        ("last", "last.onnx", ()),
    ]


def test_what_the_farm_stores_names_the_files_and_keeps_every_line(manifest: Path) -> None:
    text = freeze(manifest).submission["manifest"]
    assert text.splitlines()[6] == (
        '  - source: {glob: {"models/*.onnx": ["models/Zoo net.onnx", "models/beta.onnx"]}}   # all of them'
    )
    assert text.splitlines()[:6] == TEXT.splitlines()[:6]
    assert text.splitlines()[7:] == TEXT.splitlines()[7:]
    # The farm reads it without any of the files, and again gives the same.
    stored = parse_manifest(text)
    assert [model.name for model in stored.models] == ["first", "zoo-net", "beta", "last"]
    assert stored.written.place(("models", 3, "name"))[0] == 9
    assert (
        stored.written.place(("models", 1, "precisions"))[0]
        == stored.written.place(("models", 2, "precisions"))[0]
        == 8
    )


@pytest.mark.parametrize(
    "written",
    [
        'source:\n      glob: "models/*.onnx"\n',
        "source:\n      glob: models/*.onnx\n",
        "source: {glob: &all 'models/*.onnx'}\n",
        'source: {glob: "models/\\\n        *.onnx"}\n',
    ],
)
def test_a_pattern_may_be_written_in_any_way_of_yaml(manifest: Path, written: str) -> None:
    manifest.write_text(TEXT.replace('source: {glob: "models/*.onnx"}   # all of them\n', written))
    read = load_manifest(manifest)
    assert [model.name for model in read.models] == ["first", "zoo-net", "beta", "last"]
    assert read.written.text.count("\n") == manifest.read_text().count("\n")
    assert [model.name for model in parse_manifest(read.written.text).models] == ["first", "zoo-net", "beta", "last"]


def test_a_pattern_of_too_many_files_is_refused(manifest: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest.write_text(TEXT)
    monkeypatch.setattr(parsing, "MAX_FILES", 2)
    assert len(load_manifest(manifest).models) == 4
    monkeypatch.setattr(parsing, "MAX_FILES", 1)
    with pytest.raises(ManifestError, match=r"`models/\*\.onnx` matches more than 1 files"):
        load_manifest(manifest)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("models/*.onnx", "model/*.onnx", "farm.yaml:7:20: no file matches `model/*.onnx`"),
        ("models/*.onnx", "model/*.onnx", "did you mean `models`?"),
        ("models/*.onnx", "*.pb", "patterns start at the manifest"),
        ("models/*.onnx", "../**/*.pb", "`../**/*.pb` would search outside the manifest's folder"),
        ("models/*.onnx", "models/b*", None),
        ("models/*.onnx", "../**/*.onnx", "farm.yaml:7:20: `../**/*.onnx` would search outside the manifest's folder"),
        ("models/*.onnx", "/**/*.onnx", "`/**/*.onnx` would search outside the manifest's folder"),
        ("models/*.onnx", "**/b*.onnx", None),
        (
            "name: first",
            "name: beta",
            "farm.yaml:7:20: `models/beta.onnx` would be model `beta`, as the model on line 5",
        ),
        ("  - source: {glob", "  - name: all\n    source: {glob", "`name` and `glob` do not go together"),
        ('{glob: "models/*.onnx"}', '{glob: ""}', "is not a pattern of file names"),
        ('{glob: "models/*.onnx"}', "{glob: {a: []}}", "is not a pattern of file names"),
    ],
)
def test_what_is_wrong_with_a_pattern_is_reported_at_its_place(
    manifest: Path, old: str, new: str, message: str | None
) -> None:
    manifest.write_text(TEXT.replace(old, new))
    if message is None:
        assert [model.name for model in load_manifest(manifest).models] == ["first", "beta", "last"]
        return
    with pytest.raises(ManifestError) as caught:
        load_manifest(manifest)
    assert message in str(caught.value)
    assert len(caught.value.problems) == 1


def test_two_files_of_one_name_are_refused(manifest: Path) -> None:
    save_model(manifest.parent / "models" / "zoo-net.onnx")
    with pytest.raises(ManifestError, match=r"would be model `zoo-net`, as `models/Zoo net\.onnx`"):
        load_manifest(manifest)


def test_the_farm_refuses_a_pattern_whose_files_are_not_said() -> None:
    with pytest.raises(ManifestError, match=r"manifest:7:20: which files `models/\*\.onnx` matches is not said"):
        parse_manifest(TEXT)
