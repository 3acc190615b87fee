"""Fetching from a farm that nobody should trust: its names stay in the folder, and the user's files stay."""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from farm.client import fetching
from farm.client.fetching import bring_model, place_kernels, write_artifact, write_family
from farm.errors import ArtifactGone, UsageError
from farm.files import replacing
from tests.support.gpu_programs import as_json, code_object, pack, program

BYTES: dict[str, bytes] = {}


def blob(path: str, content: bytes = b"a program") -> dict[str, Any]:
    digest = hashlib.sha256(content).hexdigest()
    BYTES[digest] = content
    return {"path": path, "digest": digest, "size": len(content)}


def bring(wanted: Mapping[str, Any], place: Path) -> None:
    """As the client does, once its bytes are checked."""
    with replacing(place) as part:
        part.write_bytes(BYTES[wanted["digest"]])


def fetch(folder: Path, program: dict[str, Any], *, force: bool = False, device: Any = None, **others: Any) -> None:
    cell = {"identifier": Path(program["path"]).stem, "program": program, "shape": "b1"}
    sidecar = {"blobs": {"program": program, "log": None, **others}, "device": device}
    write_artifact(bring, cell, sidecar, folder, log=True, force=force)


def contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir() if not path.name.endswith("artifact.json")}


@pytest.mark.parametrize("name", ["notes.txt", "package.json", "net.onnx"])
def test_a_file_of_the_user_is_not_written_over(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    with pytest.raises(UsageError, match=f"{name} exists, and no fetch has written it") as error:
        fetch(tmp_path, blob(name))
    assert "--force" in error.value.hint
    (tmp_path / f"other.onnx.{name}").write_text("mine")
    with pytest.raises(UsageError, match=f"other.onnx.{name} exists, and no fetch has written it"):
        fetch(tmp_path, blob("other.onnx"), log=blob(name))
    assert contents(tmp_path) == {name: "mine", f"other.onnx.{name}": "mine"}
    fetch(tmp_path, blob(name), force=True)
    assert contents(tmp_path)[name] == "a program"
    (tmp_path / f"{name}.artifact.json").write_text("[" * 100_000)
    with pytest.raises(UsageError, match=r"artifact\.json exists, and no fetch has written it"):
        fetch(tmp_path, blob(name))


def test_programs_share_a_folder(tmp_path: Path) -> None:
    """Each has its sidecar and its log by its own name."""
    fetch(tmp_path, blob("net.onnx", b"one"), log=blob("log.txt", b"its log"))
    fetch(tmp_path, blob("other.onnx", b"two"), log=blob("log.txt", b"another log"))
    fetch(tmp_path, blob("net.onnx", b"three"))
    assert contents(tmp_path) == {
        "net.onnx": "three", "net.onnx.log.txt": "its log", "other.onnx": "two", "other.onnx.log.txt": "another log"
    }  # fmt: skip
    for name in ("net.onnx", "other.onnx"):
        document = json.loads((tmp_path / f"{name}.artifact.json").read_text())
        assert document["blobs"]["program"]["path"] == name


def test_what_a_fetch_wrote_is_replaced_by_the_next(tmp_path: Path) -> None:
    fetch(tmp_path, blob("net.onnx", b"one"), log=blob("log.txt", b"a log"))
    fetch(tmp_path, blob("net.onnx", b"one"), log=blob("log.txt", b"a log"))
    fetch(tmp_path, blob("net.onnx", b"two"), log=blob("log.txt", b"another log"))
    assert contents(tmp_path) == {"net.onnx": "two", "net.onnx.log.txt": "another log"}
    (tmp_path / "net.onnx.artifact.json").unlink()  # As after a fetch that was killed before its last step.
    fetch(tmp_path, blob("net.onnx", b"two"), log=blob("log.txt", b"another log"))
    (tmp_path / "net.onnx").write_text("edited")
    with pytest.raises(UsageError, match=r"net\.onnx"):
        fetch(tmp_path, blob("net.onnx", b"three"))


def test_a_name_that_was_only_announced_gives_no_right_to_it(tmp_path: Path) -> None:
    """A first sidecar that names the user's file as a log that is not fetched must not make it the farm's."""
    (tmp_path / "net.onnx.notes.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"notes\.txt"):
        fetch(tmp_path, blob("net.onnx"), reproduction=blob("notes.txt", b"something"))
    assert contents(tmp_path) == {"net.onnx.notes.txt": "mine"}


@pytest.mark.parametrize("identifier", ["../net", ".net", "artifact", "net.artifact", "pack", "net\n", ""])
def test_cells_that_no_farm_has_are_refused(tmp_path: Path, identifier: str) -> None:
    cell, sidecar = {"identifier": identifier}, {"blobs": {"program": blob("net.json")}}
    with pytest.raises(ArtifactGone, match="the farm names a file"):
        write_artifact(bring, cell, sidecar, tmp_path / "out", log=False)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize(
    "name",
    ["../net.onnx", "/etc/net.onnx", ".net.onnx", "a/net.onnx", "Makefile", "conftest.py", "farm.toml", "artifact.json",
     "a.artifact.json", "family.json", "pack.json", "net.onnx\n", "..", ""],
)  # fmt: skip
def test_names_that_no_artifact_has_are_refused(tmp_path: Path, name: str) -> None:
    for blobs in ({"program": blob(name)}, {"program": blob("net.onnx"), "sample": blob(name)}):
        with pytest.raises(ArtifactGone, match="the farm names a file"):
            fetch(tmp_path / "out", force=True, **blobs)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    with pytest.raises(ArtifactGone, match="one name"):
        fetch(tmp_path, blob("net.onnx"), log=blob("net.onnx"))


@pytest.mark.parametrize(("name", "form"), [("net.mxr", pack), ("net.json", as_json)])
def test_a_program_with_kernels_for_another_card_is_not_kept(tmp_path: Path, name: str, form: Any) -> None:
    kept = blob(name, form(program(code_object("gfx90a:sramecc+:xnack-"))))
    with pytest.raises(ArtifactGone, match=r"it has kernels for gfx90a.*, not for gfx942"):
        fetch(tmp_path, kept, device={"arch": "gfx942:sramecc+:xnack-"})
    assert contents(tmp_path) == {}


def test_no_link_is_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("theirs")
    folder = tmp_path / "out"
    folder.mkdir()
    for name in ("net.onnx", "net.onnx.artifact.json"):
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(outside / "file")
        with pytest.raises(UsageError, match="no fetch has written it"):
            fetch(folder, blob("net.onnx"))
        fetch(folder, blob("net.onnx"), force=True)
        assert not (folder / name).is_symlink()
    (folder / "b1").symlink_to(outside)
    cell = {"identifier": "net", "program": blob("net.onnx"), "shape": "b1"}
    index = {"members": []}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fetching, "family_index", lambda *_: index)
        with pytest.raises(UsageError, match="b1 is a link"):
            write_family(
                bring, [(cell, {"blobs": {"program": cell["program"]}}, None)], folder, ref="latest", log=False
            )
        (folder / "b1").unlink()
        (folder / "family.json").write_text('{"name": "my own"}')
        with pytest.raises(UsageError, match=r"family\.json exists"):
            write_family(
                bring, [(cell, {"blobs": {"program": cell["program"]}}, None)], folder, ref="latest", log=False
            )
    assert {path.name: path.read_text() for path in outside.iterdir()} == {"file": "theirs"}


def archive(tmp_path: Path, *names: str, content: bytes = b"kernels") -> dict[str, Any]:
    with zipfile.ZipFile(tmp_path / "made.zip", "w", zipfile.ZIP_DEFLATED) as made:
        for name in names:
            made.writestr(name, content)
    return blob("kernels.zip", (tmp_path / "made.zip").read_bytes())


@pytest.mark.parametrize(
    "name", ["../x", "/etc/x", "", "a\0b", "onnxruntime.py", "numpy/__init__.pyc", "numpy.abi3.so"]
)
def test_data_of_a_model_is_nothing_else(tmp_path: Path, name: str) -> None:
    order: Any = {"model": {"files": [blob("model.onnx"), blob(name)]}}
    with pytest.raises(ArtifactGone, match="the farm names a file"):
        bring_model(bring, order, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_kernels_stay_in_their_folder(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "kernels.zip").write_text("mine")
    packed = archive(tmp_path, "../../a.ukdb", "/b.ukdb", "c.sh", "d/e.ukdb")
    place_kernels(bring, packed, tmp_path / "out" / "kernels")
    place_kernels(bring, packed, tmp_path / "out" / "kernels")
    assert sorted(path.name for path in (tmp_path / "out" / "kernels").iterdir()) == ["a.ukdb", "b.ukdb", "e.ukdb"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["kernels", "kernels.zip"]
    assert (tmp_path / "out" / "kernels.zip").read_text() == "mine"
    (tmp_path / "out" / "kernels" / "mine.txt").write_text("")
    with pytest.raises(UsageError, match="no fetch has written"):
        place_kernels(bring, packed, tmp_path / "out" / "kernels")
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / "kernels").symlink_to(tmp_path / "out")
    with pytest.raises(UsageError, match="no fetch has written"):
        place_kernels(bring, packed, tmp_path / "link" / "kernels")


def test_kernels_that_unpack_without_end_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "LARGEST_KERNELS", 1 << 20)
    packed = archive(tmp_path, "a.ukdb", "b.ukdb", content=b"\0" * (600 << 10))
    with pytest.raises(ArtifactGone, match="the kernel binaries are more than"):
        place_kernels(bring, packed, tmp_path / "out" / "kernels")
    assert json.dumps([path.name for path in (tmp_path / "out").rglob("*")]) == '["kernels"]'
    with zipfile.ZipFile(tmp_path / "odd.zip", "w", zipfile.ZIP_LZMA) as odd:
        odd.writestr("a.ukdb", b"kernels")
    archive(tmp_path, "é.ukdb")
    no_name = (tmp_path / "made.zip").read_bytes().replace("é".encode(), b"\xc3.")
    for wrong in (b"no archive", (tmp_path / "odd.zip").read_bytes(), no_name):
        with pytest.raises(ArtifactGone, match="cannot be unpacked"):
            place_kernels(bring, blob("kernels.zip", wrong), tmp_path / "out" / "kernels")
