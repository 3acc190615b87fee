"""What has to be converted is recognized by looking, and nothing pickled is ever loaded."""

from __future__ import annotations

import os
import threading
import zipfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from farm.client.authoring import lint
from farm.client.transfers import trim
from farm.errors import ManifestError
from farm.extras.convert.conversion import convert, kind_of
from farm.manifest.entries import ModelEntry
from farm.manifest.parsing import parse_manifest
from farm.models.frozen import UnreadableModel
from tests.support.helpers import folders_without_end
from tests.unit.client.test_freezing import write_text


def archive(path: Path, *names: str) -> Path:
    with zipfile.ZipFile(path, "w") as made:
        for name in names:
            made.writestr(f"net/{name}", b"")
    return path


def test_archives_are_known_by_what_is_in_them(tmp_path: Path) -> None:
    """The ending says nothing: TorchScript, weights and whole pickled modules are all called .pt."""
    assert kind_of(archive(tmp_path / "a.pt", "archive_format", "models/model.json"), "torch") == "pt2"
    assert kind_of(archive(tmp_path / "b.pt", "data.pkl", "constants.pkl", "code/x.py"), "torch") == "torchscript"
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "saved_model.pb").touch()
    assert kind_of(tmp_path / "saved", "saved-model") == "saved-model"


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("data.pkl", "data/0"), "holds a pickled module or weights"),
        (("archive_format", "data/aotinductor/model/x.so", "models/model.json"), "is a package of AOTInductor"),
        (("word/document.xml",), "is neither a .pt2 nor a TorchScript archive"),
    ],
)
def test_what_is_no_program_is_refused_with_what_to_do(names: tuple[str, ...], message: str, tmp_path: Path) -> None:
    with pytest.raises(UnreadableModel, match=message) as caught:
        kind_of(archive(tmp_path / "net.pt", *names), "torch")
    assert "torch.export" in caught.value.hint


def test_an_old_pickle_is_refused_unread(tmp_path: Path) -> None:
    (tmp_path / "net.pt").write_bytes(b"\x80\x02cos\nsystem\n(S'touch /tmp/pwned'\ntR.")
    with pytest.raises(UnreadableModel, match="is a pickle"):
        kind_of(tmp_path / "net.pt", "torch")


def test_two_clients_that_convert_one_model_at_once_both_have_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The converter is played: it waits until both are at it."""
    both = threading.Barrier(2, timeout=30)

    def played(request: Mapping[str, Any], *_: object) -> dict[str, Any]:
        if request["action"] == "convert":
            both.wait()
            output = Path(request["output"])
            output.write_bytes(b"model")
            output.with_name("weights").write_bytes(b"weights")
            both.wait()
        return {"libraries": {"torch": "2.9"}}

    monkeypatch.setattr("farm.extras.convert.conversion._ask", played)
    archive(tmp_path / "net.pt2", "archive_format", "models/model.json")
    entry = ModelEntry.model_validate({"name": "net", "source": {"path": "net.pt2"}, "format": "torch"})
    with ThreadPoolExecutor(2) as pool:
        made = list(pool.map(lambda _: convert(tmp_path / "net.pt2", entry, tmp_path / "cache", {}), range(2)))
    (model,) = {path for path, _ in made}
    assert (model.read_bytes(), model.with_name("weights").read_bytes()) == (b"model", b"weights")
    assert [path.name for path in (tmp_path / "cache" / "conversions").iterdir()] == [model.parent.name]


@pytest.mark.parametrize("what", ["link", "folder"])
def test_the_record_of_a_conversion_goes_to_no_place_that_the_converter_chose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """The converter is played by a hostile one, on the submitter's own machine."""
    victim = tmp_path / ".profile"
    victim.write_text("the user's")

    def played(request: Mapping[str, Any], *_: object) -> dict[str, Any]:
        if request["action"] == "convert":
            output = Path(request["output"])
            output.write_bytes(b"model")
            record = output.with_name("conversion.json")
            record.symlink_to(victim) if what == "link" else record.mkdir()
        return {"libraries": {"torch": "2.9"}}

    monkeypatch.setattr("farm.extras.convert.conversion._ask", played)
    archive(tmp_path / "net.pt2", "archive_format", "models/model.json")
    entry = ModelEntry.model_validate({"name": "net", "source": {"path": "net.pt2"}, "format": "torch"})
    with pytest.raises(UnreadableModel, match=r"the converter left conversion\.json"):
        convert(tmp_path / "net.pt2", entry, tmp_path / "cache", {})
    assert victim.read_text() == "the user's"
    assert not list((tmp_path / "cache" / "conversions").iterdir())


def test_what_a_killed_conversion_left_is_removed_however_deep(tmp_path: Path) -> None:
    """Every later command of the user trims the cache."""
    left = tmp_path / "conversions" / "x.part"
    left.mkdir(parents=True)
    folders_without_end(left)
    (left / "large").write_bytes(b"x" * 100)
    os.utime(left, (0, 0))
    trim(tmp_path, 10)
    assert list((tmp_path / "conversions").iterdir()) == []


def test_lint_looks_without_converting(tmp_path: Path) -> None:
    archive(tmp_path / "net.pt", "data.pkl")
    archive(tmp_path / "net.pt2", "archive_format", "models/model.json")
    write_text(tmp_path, "source: {path: net.pt2}\nformat: torch", "source: {path: net.pt}\nformat: torch")
    problems = lint(tmp_path / "farm.yaml")
    assert [problem.line for problem in problems] == [9]
    assert "pickled" in problems[0].message


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ("{path: a.onnx}\n    conversion: {opset: 17}", "`conversion` belongs to `format: saved-model`"),
        ("{path: a.pt2}\n    format: torch\n    conversion: {to: tf}", "only a SavedModel can be converted to `tf`"),
        ("{s3: 's3://models/a.pt2'}\n    format: torch", "what has to be converted is read here"),
        ("{path: a}\n    format: saved-model\n    outputs: [y]", "`outputs` belongs to `format: tf`"),
    ],
)
def test_fields_that_do_not_go_together(fields: str, message: str) -> None:
    head = "version: 1\nname: n\ntargets: [onnxruntime/cpu]\nmodels:\n  - name: net\n    source: "
    with pytest.raises(ManifestError, match=message):
        parse_manifest(head + fields)
