"""Programs in a provider's cache that are not what their sidecars say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from farm.cli import main
from farm.extras.packs.pack_checks import wrong_files
from farm.node.gpus import HERE
from tests.support.gpu_programs import program, sidecar_of, write_mxr
from tests.support.recorded import unpack

NAME = "20f00-66d49f38cafc24e6-8e96240bd18e6f87-36a8840bfe2de0d1.mxr"


@pytest.fixture
def pack(tmp_path: Path) -> Path:
    """A pack's folder; return the program in its cache."""
    (tmp_path / "cache").mkdir()
    file = write_mxr(tmp_path / "cache" / NAME)
    rest = {"schema": 1, "namespace": "main", "created": "2026-11-22T00:00:00+00:00"}
    (tmp_path / "artifact.json").write_text(json.dumps({**sidecar_of(file), **rest}))
    return file


def test_a_pack_as_it_was_fetched_is_whole(
    pack: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert list(wrong_files(pack.parent)) == []
    assert main(["doctor", "--ort-cache", str(pack.parent)]) == 0
    assert "every program is the one" in capsys.readouterr().out


def test_another_program_under_the_same_name_is_named(pack: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_mxr(pack, program(left_over=True))
    reasons = [why for name, why in wrong_files(pack.parent) if name == NAME]
    assert any("digest: the sidecar says" in why for why in reasons)
    assert all(why.startswith("it is not net/migraphx-gfx942/fp32/static made by rocm7.2") for why in reasons)
    assert main(["doctor", "--ort-cache", str(pack.parent), "--json"]) == 6
    assert json.loads(capsys.readouterr().out)["checks"][0]["name"] == NAME


def test_a_program_for_another_card_is_named(
    pack: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is what its sidecar says, and of no use on this machine; a machine without a card only keeps it."""
    monkeypatch.setattr(HERE, "root", unpack("mi300x-spx", tmp_path / "mi300x"))
    assert main(["doctor", "--ort-cache", str(pack.parent)]) == 0
    monkeypatch.setattr(HERE, "root", unpack("mixed", tmp_path / "mixed"))
    assert main(["doctor", "--ort-cache", str(pack.parent)]) == 6
    assert "has kernels for gfx942:sramecc+:xnack-, not for gfx1100 or gfx90a" in capsys.readouterr().out


def test_a_program_without_a_sidecar_and_one_that_is_cut_are_named(pack: Path, tmp_path: Path) -> None:
    pack.write_bytes(pack.read_bytes()[:100])
    (name, why), *_ = wrong_files(pack.parent)
    assert (name, "not a MIGraphX program" in why) == (NAME, True)
    (tmp_path / "artifact.json").write_text("{}")
    assert list(wrong_files(pack.parent)) == [(NAME, "no sidecar says what it is")]


def test_a_folder_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--ort-cache", str(tmp_path / "none")]) == 4
    assert "no folder" in capsys.readouterr().err
