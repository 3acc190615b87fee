"""What a manifest names is found, read and frozen by the submitting side, or said to be missing with its place."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import httpx
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from farm.cli import main
from farm.client.authoring import init_manifest, lint, name_cells
from farm.client.freezing import freeze as submission_of
from farm.client.freezing import in_package
from farm.errors import ManifestError
from farm.manifest.entries import Manifest, manifest_schema
from farm.manifest.parsing import load_manifest
from farm.matrix.cells import expand
from farm.matrix.combinations import MatrixRules, combine
from farm.spec import Device
from farm.targets.pools import Pool, Target
from tests.support.freezing import freeze

CPU = Pool(Target("onnxruntime", "cpu"), "onnxruntime1.31.1-1a2b3c4d", Device("cpu"), 1)


def save_net(path: Path, shape: list[int | str | None] | None = None, dtype: int = TensorProto.FLOAT) -> Path:
    shape = ["N", 4] if shape is None else shape
    one = numpy_helper.from_array(np.ones((), dtype=helper.tensor_dtype_to_np_dtype(dtype)), "one")
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "one"], ["y"])],
        "net",
        [helper.make_tensor_value_info("x", dtype, shape)],
        [helper.make_tensor_value_info("y", dtype, shape)],
        [one],
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save_model(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    return path


def write_text(folder: Path, *models: str, last: str = "") -> None:
    """A manifest of models given as the lines of their entries."""
    lines = ["version: 1", "name: nightly", "targets: [onnxruntime/cpu]", "models:"]
    for number, fields in enumerate(models):
        lines += [f"  - name: net{number}", *(f"    {field}" for field in fields.split("\n"))]
    (folder / "farm.yaml").write_text("\n".join([*lines, last, ""]))


def write(folder: Path, *models: str, last: str = "") -> Manifest:
    write_text(folder, *models, last=last)
    return load_manifest(folder / "farm.yaml")


def refused(act: Callable[[], object]) -> str:
    with pytest.raises(ManifestError) as caught:
        act()
    return str(caught.value)


SHAPE = "inputs: {x: {shape: [batch, 4]}}\nbatches: [2]"


def test_a_manifest_may_have_a_name_that_is_no_text(tmp_path: Path) -> None:
    save_net(tmp_path / "net.onnx")
    write_text(tmp_path, f"source: {{path: net.onnx}}\n{SHAPE}")
    file = (tmp_path / "farm.yaml").rename(tmp_path / os.fsdecode(b"\xff.yaml"))
    assert submission_of(file).submission["file"].encode().endswith(b"?.yaml")


def test_a_manifest_and_its_files_become_models_data_and_blobs(tmp_path: Path) -> None:
    save_net(tmp_path / "models" / "net.onnx")
    np.savez(tmp_path / "cal.npz", x=np.zeros((6, 4), dtype=np.float32))
    calibrated = f"source: {{path: models/net.onnx}}\ncalibration: {{path: cal.npz}}\nprecisions: [int8]\n{SHAPE}"
    manifest = write(tmp_path, f"source: {{path: models/net.onnx}}\n{SHAPE}", calibrated)
    found = freeze(combine(manifest), tmp_path, cache=tmp_path / "cache")
    assert sorted(found.models) == ["net0", "net1"]
    assert list(found.data) == ["net1/calibration"]
    for digest, file in found.files.items():
        assert hashlib.sha256(file.read_bytes()).hexdigest() == digest
    cells = expand(combine(manifest), found.models, found.data, [CPU])
    named = {
        file["digest"] for cell in cells for file in [*cell.order["model"]["files"], cell.order["calibration"]] if file
    }
    assert named == set(found.files)


def test_a_dataset_is_frozen_once_under_its_name(tmp_path: Path) -> None:
    save_net(tmp_path / "net.onnx")
    np.savez(tmp_path / "cal.npz", x=np.zeros((6, 4), dtype=np.float32))
    entry = f"source: {{path: net.onnx}}\ncalibration: shared\nsamples: shared\n{SHAPE}"
    manifest = write(tmp_path, entry, entry, last="datasets: {shared: {path: cal.npz}}")
    assert list(freeze(combine(manifest), tmp_path, cache=tmp_path / "cache").data) == ["shared"]


def test_a_dataset_is_to_each_model_what_its_own_inputs_make_of_it(tmp_path: Path) -> None:
    """An .npy holds the only input, whatever that is called: of models that call it alike there is one blob."""
    save_net(tmp_path / "net.onnx")
    other = onnx.load(tmp_path / "net.onnx")
    other.graph.input[0].name = "pixels"
    for node in other.graph.node:
        node.input[:] = ["pixels" if name == "x" else name for name in node.input]
    onnx.save(other, tmp_path / "other.onnx")
    np.save(tmp_path / "cal.npy", np.zeros((6, 4), dtype=np.float32))
    entry = f"source: {{path: net.onnx}}\ncalibration: shared\nprecisions: [int8]\n{SHAPE}"
    manifest = write(
        tmp_path,
        entry,
        entry.replace("net.onnx", "other.onnx").replace("x:", "pixels:"),
        entry,
        last="datasets: {shared: {path: cal.npy}}",
    )
    found = freeze(combine(manifest), tmp_path, cache=tmp_path / "cache")
    assert {key: list(data["arrays"]) for key, data in found.data.items()} == {
        "shared": ["x"],
        "net1/calibration": ["pixels"],
    }
    cells = expand(combine(manifest), found.models, found.data, [CPU])
    digests = [cell.spec["calibration"]["digest"] for cell in cells]
    assert digests == [found.data[key]["digest"] for key in ("shared", "net1/calibration", "shared")]


def test_every_file_that_is_missing_is_reported_at_once_with_its_line(tmp_path: Path) -> None:
    save_net(tmp_path / "resnet50.onnx")
    (tmp_path / "empty.onnx").touch()
    (tmp_path / "text.onnx").write_text("hello, this is text")
    manifest = write(
        tmp_path,
        "source: {path: resnet5.onnx}",
        "source: {path: empty.onnx}",
        "source: {path: text.onnx}",
        "source: {package: no_such_package/net.onnx}",
        f"source: {{path: resnet50.onnx}}\ncalibration: {{path: cal.npz}}\n{SHAPE}",
    )
    text = refused(lambda: freeze(combine(manifest), tmp_path, cache=tmp_path / "cache"))
    for expected in (
        "farm.yaml:6:20: there is no file",
        "did you mean `resnet50.onnx`?",
        "farm.yaml:8:13:",
        "empty (0 bytes)",
        "farm.yaml:10:13:",
        "not an ONNX model",
        "farm.yaml:12:23: the Python package `no_such_package` is not installed here",
        "install it on this machine",
        "farm.yaml:15:25: there is no file",
    ):
        assert expected in text, text


def test_models_in_a_bucket_are_left_to_the_farm(tmp_path: Path) -> None:
    save_net(tmp_path / "net.onnx")
    manifest = write(tmp_path, "source: {path: net.onnx}", "source: {s3: 's3://models/net.onnx'}")
    found = freeze(combine(manifest), tmp_path, cache=tmp_path / "cache")
    assert (list(found.models), list(found.files.values())) == (["net0"], [tmp_path / "net.onnx"])


# --- packages -----------------------------------------------------------------------------------------------------


def test_a_file_of_a_package_is_found_without_importing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "trapped_models"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('imported')")
    save_net(package / "nets" / "net.onnx")
    monkeypatch.syspath_prepend(tmp_path)
    assert in_package("trapped_models/nets/net.onnx") == package / "nets" / "net.onnx"
    text = refused(
        lambda: freeze(combine(write(tmp_path, "source: {package: trapped_models/nets/ned.onnx}")), tmp_path)
    )
    assert "did you mean `trapped_models/nets/net.onnx`?" in text
    text = refused(lambda: freeze(combine(write(tmp_path, "source: {package: trapped_models/../farm.yaml}")), tmp_path))
    assert "leaves the package" in text


# --- https --------------------------------------------------------------------------------------------------------


class Web:
    """What a few addresses answer, and what was asked."""

    def __init__(self, **pages: httpx.Response) -> None:
        self.pages = pages
        self.asked: list[str] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(str(request.url))
        return self.pages.get(request.url.path.strip("/").partition(".")[0]) or httpx.Response(404)


def get(folder: Path, web: Web, content: bytes) -> Path:
    digest = hashlib.sha256(content).hexdigest()
    manifest = write(folder, f"source: {{https: 'https://models.example/net.onnx?v=1', sha256: {digest}}}")
    return freeze(combine(manifest), folder, cache=folder / "cache", transport=httpx.MockTransport(web)).files[digest]


def test_a_download_is_checked_and_kept(tmp_path: Path) -> None:
    content = save_net(tmp_path / "net.onnx").read_bytes()
    web = Web(net=httpx.Response(200, content=content))
    first = get(tmp_path, web, content)
    assert first.read_bytes() == content
    assert first.name == "net.onnx"
    assert get(tmp_path, web, content) == first
    assert len(web.asked) == 1


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (httpx.Response(200, content=b"something else"), "has the SHA-256"),
        (httpx.Response(500), "answered 500 Internal Server Error"),
        (httpx.Response(302, headers={"location": "http://models.example/plain"}), "which is not https"),
        (httpx.Response(302, headers={"location": "https://models.example/net.onnx"}), "cannot be read"),
    ],
)
def test_a_download_that_goes_wrong_leaves_nothing(answer: httpx.Response, expected: str, tmp_path: Path) -> None:
    web = Web(net=answer, plain=httpx.Response(200, content=b"right"))
    text = refused(lambda: get(tmp_path, web, b"right"))
    assert "farm.yaml:6:21" in text
    assert expected in text
    assert all(address.startswith("https://") for address in web.asked)
    assert [path for path in (tmp_path / "cache").rglob("*") if path.is_file()] == []


def test_a_redirect_to_https_is_followed(tmp_path: Path) -> None:
    moved = httpx.Response(302, headers={"location": "https://cdn.example/moved.onnx"})
    content = save_net(tmp_path / "net.onnx").read_bytes()
    web = Web(net=moved, moved=httpx.Response(200, content=content))
    assert get(tmp_path, web, content).read_bytes() == content


def test_a_server_that_does_not_answer(tmp_path: Path) -> None:
    def gone(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("no route to host")

    manifest = write(tmp_path, f"source: {{https: 'https://models.example/net.onnx', sha256: {'a' * 64}}}")
    transport = httpx.MockTransport(gone)
    assert "no route to host" in refused(
        lambda: freeze(combine(manifest), tmp_path, cache=tmp_path / "c", transport=transport)
    )


def test_what_is_no_address_is_a_usage_error(tmp_path: Path) -> None:
    manifest = write(tmp_path, f"source: {{https: 'https://é..x/net.onnx', sha256: {'a' * 64}}}")
    text = refused(lambda: freeze(combine(manifest), tmp_path, cache=tmp_path / "c"))
    assert "https://é..x/net.onnx cannot be read: Invalid IDNA hostname" in text


# --- lint and init ------------------------------------------------------------------------------------------------


def test_lint_reads_models_and_data_and_says_all(tmp_path: Path) -> None:
    save_net(tmp_path / "net.onnx")
    np.savez(tmp_path / "cal.npz", x=np.zeros((6, 5)))
    write_text(
        tmp_path,
        f"source: {{path: net.onnx}}\ncalibration: {{path: cal.npz}}\nprecisions: [int8]\n{SHAPE}",
        "source: {path: net.onnx}",
        f"source: {{https: 'https://models.example/net.onnx', sha256: {'a' * 64}}}\nprecisions: [fp64]",
    )
    assert [problem.line for problem in lint(tmp_path / "farm.yaml")] == [15]
    text = (tmp_path / "farm.yaml").read_text().replace("fp64", "fp32")
    (tmp_path / "farm.yaml").write_text(text)
    first, second = lint(tmp_path / "farm.yaml")
    assert "array `x` is float64, the model wants float32" in first.message
    assert (first.line, first.column) == (7, 18)
    assert "`N`, has no size" in second.message
    assert second.line == 11
    assert lint(tmp_path / "farm.yaml", models=False) == []
    assert not list(tmp_path.glob("*.part"))


def test_a_new_manifest_asks_for_a_shape_that_the_model_does_not_say(tmp_path: Path) -> None:
    path = save_net(tmp_path / "net.onnx")
    model = onnx.load(path)
    model.graph.input[0].type.tensor_type.ClearField("shape")
    onnx.save_model(model, path)
    text = init_manifest(path, tmp_path)
    assert '"x": {shape: [batch]}  # float32; the model does not give its shape: write it' in text
    (tmp_path / "farm.yaml").write_text(text)
    assert lint(tmp_path / "farm.yaml") == []


def test_a_new_manifest_comes_with_the_schema_that_its_first_line_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = save_net(tmp_path / "net.onnx")
    assert main(["init", str(model), "-o", str(tmp_path / "farm.yaml")]) == 0
    first = (tmp_path / "farm.yaml").read_text().splitlines()[0]
    schema = tmp_path / first.removeprefix("# yaml-language-server: $schema=")
    assert json.loads(schema.read_text()) == manifest_schema(draft7=True)
    schema.write_text("mine")
    assert main(["init", str(model), "-o", str(tmp_path / "other.yaml"), "-t", "mi300x", "-t", "gfx942"]) == 0
    assert "\ntargets: [mi300x, gfx942]\n" in (tmp_path / "other.yaml").read_text()
    assert main(["init", str(model), "-t", "cuda"]) == 2
    assert "did you mean `onnxruntime/cuda`?" in capsys.readouterr().err
    assert schema.read_text() == "mine"
    assert lint(tmp_path / "farm.yaml") == []
    assert main(["init", str(model), "-o", str(tmp_path)]) == 2
    assert "it is a folder\n  name a file in it" in capsys.readouterr().err


def test_a_new_manifest_names_a_model_called_model_by_its_folder(tmp_path: Path) -> None:
    path = save_net(tmp_path / "swift_f0" / "model.onnx", ["N", 4], TensorProto.FLOAT)
    assert "name: swift_f0\n" in init_manifest(path, tmp_path)


@pytest.mark.parametrize("name", ["1.5", "0123", "1e3", "null", "True"])
def test_a_new_manifest_quotes_a_name_that_yaml_would_read_as_a_number_or_nothing(name: str, tmp_path: Path) -> None:
    (tmp_path / "farm.yaml").write_text(init_manifest(save_net(tmp_path / f"{name}.onnx"), tmp_path))
    assert name_cells(tmp_path / "farm.yaml")[0] == name.lower()


@pytest.mark.parametrize(("path", "hint"), [("https://farm.example/x.onnx", "sha256"), ("~/x.onnx", "not expanded")])
def test_a_path_that_is_no_path_says_what_to_write(path: str, hint: str, tmp_path: Path) -> None:
    text = "version: 1\nname: n\ntargets: [onnxruntime/cpu]\nprecisions: [fp32]\nmodels:\n"
    (tmp_path / "farm.yaml").write_text(f"{text}  - name: m\n    source: {{path: {path}}}\n")
    (problem,) = lint(tmp_path / "farm.yaml")
    assert hint in problem.hint


def test_lint_of_what_is_no_manifest(tmp_path: Path) -> None:
    (tmp_path / "farm.yaml").write_text("version: [1\n")
    (problem,) = lint(tmp_path / "farm.yaml")
    assert problem.message.startswith("not YAML")


@pytest.mark.parametrize(
    ("shape", "dtype", "shown"),
    [
        (["N", 3, "H", "W"], TensorProto.FLOAT, "shape: [batch, 3, H, W]"),
        ([1, 3, 8, 8], TensorProto.FLOAT, "shape: [1, 3, 8, 8]"),
        ([None, None], TensorProto.FLOAT, "shape: [batch, dim1]"),
        (["unk__1", "past + seq"], TensorProto.INT64, "shape: [batch, past + seq], range: [0, 1]"),
        (["a-b!", "c d"], TensorProto.FLOAT, "shape: [batch, dim1]"),
        (["N", "null"], TensorProto.FLOAT, 'shape: [batch, "null"]'),
        ([], TensorProto.FLOAT, "shape: []"),
        (["N", 4], TensorProto.FLOAT16, "precisions: [native]"),
    ],
)
def test_a_new_manifest_is_complete_and_without_problems(
    shape: list[int | str | None], dtype: int, shown: str, tmp_path: Path
) -> None:
    path = save_net(tmp_path / "My Nets" / "Net (1).onnx", shape, dtype)
    text = init_manifest(path, tmp_path)
    (tmp_path / "farm.yaml").write_text(text)
    assert shown in text
    assert "name: net-1" in text
    assert 'path: "My Nets/Net (1).onnx"' in text
    assert lint(tmp_path / "farm.yaml") == []


def test_overrides_bring_data_for_the_models_that_need_it_and_files_for_the_environment(tmp_path: Path) -> None:
    save_net(tmp_path / "net.onnx")
    np.savez(tmp_path / "cal.npz", x=np.zeros((6, 4), dtype=np.float32))
    np.savez(tmp_path / "better.npz", x=np.ones((6, 4), dtype=np.float32))
    (tmp_path / "gemms.txt").write_text("a tuned GEMM\n")
    entry = f"source: {{path: net.onnx}}\n{SHAPE}"
    manifest = write(
        tmp_path,
        f"{entry}\ncalibration: {{path: cal.npz}}\nprecisions: [int8]",
        entry,
        last="overrides:\n"
        "  - {select: {shape: b2}, calibration: {path: better.npz}}\n"
        "  - {select: {model: net1}, env: {HIPBLASLT_TUNING_OVERRIDE_FILE: {path: gemms.txt}}}",
    )
    found = freeze(combine(manifest), tmp_path, cache=tmp_path / "cache")
    assert sorted(found.data) == ["net0/calibration", "net0/calibration/0"]
    digest = hashlib.sha256(b"a tuned GEMM\n").hexdigest()
    assert found.env_files == {"gemms.txt": {"digest": digest, "size": 13}}
    assert found.files[digest].read_bytes() == b"a tuned GEMM\n"
    cell, _ = expand(combine(manifest), found.models, found.data, [CPU], files=found.env_files)
    assert cell.spec["calibration"] == {"digest": found.data["net0/calibration/0"]["digest"]}


def test_a_file_of_the_environment_that_is_missing_is_reported_at_its_place(tmp_path: Path) -> None:
    save_net(tmp_path / "net.onnx")
    setting = "env: {HIPBLASLT_TUNING_OVERRIDE_FILE: {path: gems.txt}}"
    manifest = write(tmp_path, f"source: {{path: net.onnx}}\n{SHAPE}\n{setting}")
    text = refused(lambda: freeze(combine(manifest), tmp_path, cache=tmp_path / "cache"))
    assert "farm.yaml:9:43: there is no file" in text


def test_a_client_multiplies_out_the_matrix_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    combined: list[int] = []
    once = MatrixRules.all
    monkeypatch.setattr(MatrixRules, "all", lambda rules: combined.append(1) or once(rules))
    save_net(tmp_path / "net.onnx", [2, 4])
    write(tmp_path, "source: {path: net.onnx}")
    submission_of(tmp_path / "farm.yaml", cache=tmp_path / "cache")
    assert len(combined) == 1
    assert name_cells(tmp_path / "farm.yaml")[1]
    assert len(combined) == 2
