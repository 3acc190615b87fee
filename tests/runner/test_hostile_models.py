"""Hostile models, where they are submitted and where they are checked: refused with the place named, and quickly.

The same corpora go through the compilers' children in `tests/chaos/`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from farm.client.authoring import lint
from farm.client.freezing import freeze
from farm.client.inspection import inspect_program
from farm.errors import ManifestError, UsageError
from farm.runner import migraphx_compiler
from farm.runner.onnx_models import BadModel, check_onnx
from farm.runner.protocol import RequestFailed
from tests.support.hostile_models import CANARY, ESCAPES, escape, malformed, malformed_programs

KINDS = {"bad_model", "unsupported_operator"}
MANIFEST = """\
version: 1
name: hostile
targets: [onnxruntime/cpu]
models: [{name: net, source: {path: model.onnx}}]
"""


def test_malformed_models_are_refused_with_the_place(tmp_path: Path) -> None:
    """By the child's check and by the submitting client alike; mutated bytes may also happen to be sound."""
    path = tmp_path / "model.onnx"
    (tmp_path / "farm.yaml").write_text(MANIFEST)
    refused = 0
    for name, content, words in malformed(mutations=60):
        path.write_bytes(content)
        try:
            check_onnx(path)
        except BadModel as error:
            refused += 1
            assert error.kind in KINDS, name
            assert words in error.message, name
            assert len(error.message.splitlines()) == 1, name
            (problem,) = lint(tmp_path / "farm.yaml")
            assert error.message in problem.message, name
            assert problem.line == 4, name
            with pytest.raises(ManifestError):
                freeze(tmp_path / "farm.yaml", cache=tmp_path / "cache")
        else:
            assert "mutation" in name
    assert refused >= 300


@pytest.mark.parametrize("name", ESCAPES)
def test_external_data_cannot_escape(tmp_path: Path, name: str) -> None:
    """Every way out of the model's folder is refused, and nothing is opened on the way (a pipe would block)."""
    path = escape(name, tmp_path)
    (path.parent / "farm.yaml").write_text(MANIFEST)
    with pytest.raises(BadModel) as refused:
        check_onnx(path)
    assert refused.value.kind == "bad_model"
    (problem,) = lint(path.parent / "farm.yaml")
    assert CANARY.decode() not in f"{refused.value.message} {problem}"


def test_sound_external_data_passes(tmp_path: Path) -> None:
    """The corpus of escapes is one edit away from a model that is read."""
    path = escape("short length", tmp_path)
    path.write_bytes(path.read_bytes().replace(b"23", b"24"))
    assert check_onnx(path)["external_files"] == ["data"]


def test_damaged_programs_are_refused_before_migraphx_reads_them(tmp_path: Path) -> None:
    """`farm inspect` says so in one sentence; the child that would load one, too."""
    refused = 0
    for name, content in malformed_programs(tmp_path, mutations=75):
        path = tmp_path / f"program{'.json' if '.json' in name else '.mxr'}"
        path.write_bytes(content)
        try:
            inspect_program(path)
        except UsageError as error:
            refused += 1
            assert len(error.message.splitlines()) == 1, name
            with pytest.raises(RequestFailed, match="the program is damaged") as failed:
                migraphx_compiler.load({"program": str(path), "device": "ref"})
            assert failed.value.kind == "bad_model"
        else:
            assert name.startswith("flipped"), name
    assert refused >= 250
