"""`farm bench`: programs measured for real, alone and in turns, on the command line."""

from __future__ import annotations

import hashlib
import json
import signal
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from farm.cli import main
from farm.node.survey import Findings
from farm.spec import Device
from farm.targets.pools import Pool, Target
from tests.support.gpu_programs import sidecar_of, write_mxr

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("FARM_MEASURE_SECONDS", "0.05")
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(signal, "signal", lambda *_: before)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*arguments: str) -> tuple[int, str, str]:
        code = main(list(arguments))
        return code, *capsys.readouterr()

    return run


def net(path: Path, layers: int) -> Path:
    """A chain of matrix products: so many times as slow as one."""
    size = 256
    weight = np.eye(size, dtype=np.float32) + 0.01
    names = ["x", *(f"h{index}" for index in range(layers - 1)), "y"]
    graph = helper.make_graph(
        [helper.make_node("MatMul", [before, f"w{after}"], [after]) for before, after in pairwise(names)],
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", size])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", size])],
        [numpy_helper.from_array(weight, f"w{name}") for name in names[1:]],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


@pytest.fixture
def slow(tmp_path: Path, run: Run) -> Path:
    """A program of forty products, at a batch of 64."""
    model = net(tmp_path / "slow.onnx", 40)
    assert run("optimize", str(model), "-t", "onnxruntime/cpu", "--batch", "64", "--tolerance", "1")[0] == 0
    return Path("saved_models/slow.onnx")


@pytest.fixture
def fast(tmp_path: Path, run: Run) -> Path:
    """A program of one, with the same inputs."""
    model = net(tmp_path / "fast.onnx", 1)
    assert run("optimize", str(model), "-t", "onnxruntime/cpu", "--batch", "64")[0] == 0
    return Path("saved_models/fast.onnx")


def bench(run: Run, *arguments: str) -> dict[str, Any]:
    code, out, err = run("bench", *arguments, "--seconds", "0.4", "--json")
    assert code == 0, err
    [found] = json.loads(out)["artifacts"]
    return dict(found)


@pytest.mark.noise
def test_two_programs_take_turns_and_the_faster_is_named(run: Run, slow: Path, fast: Path) -> None:
    found = bench(run, str(fast), "--against", str(slow), "--picture", "turns.svg")
    latency, other = found["latency"], found["against"]["latency"]
    assert found["batch"] == 64
    assert latency["minimum"] <= latency["p50"] <= latency["p90"] <= latency["p99"] < 60
    assert latency["throughput"] == pytest.approx(64 / latency["p50"])
    assert len(found["first_runs"]) == 10
    assert found["load"] > 0
    assert found["peak_memory"] > 10_000_000
    assert found["against"]["comparison"]["verdict"] == "faster"
    assert found["against"]["comparison"]["ratio"] > 2
    assert other["p50"] > latency["p50"]
    picture = Path("turns.svg").read_text()
    assert "percentile" in picture
    assert "latency (ms)" in picture


@pytest.mark.usefixtures("known")
def test_against_the_original_model(run: Run, fast: Path, tmp_path: Path) -> None:
    code, out, err = run("bench", str(fast), "--against", "onnxruntime", "--seconds", "0.2")
    assert (code, out) == (2, "")
    assert "--model FILE.onnx" in err
    net(tmp_path / "another.onnx", 2)
    code, _, err = run("bench", str(fast), "--against", "onnxruntime", "--model", "another.onnx")
    assert code == 2
    assert "is not the model that fast.onnx was made from" in err
    found = bench(run, str(fast), "--against", "onnxruntime", "--model", "fast.onnx")
    assert found["against"]["target"] == "onnxruntime/cpu"
    code, _, err = run("bench", str(fast), "--against", "torch", "--model", "fast.onnx")
    assert code == 2
    assert "was not made from a PyTorch model" in err


@pytest.mark.usefixtures("known")
def test_a_family_is_measured_by_batch_and_drawn(run: Run, tmp_path: Path) -> None:
    """A folder as `farm fetch --family` writes it: one artifact in a folder of its own for each batch."""
    model = net(tmp_path / "net.onnx", 1)
    for batch in (1, 8):
        place = tmp_path / "family" / f"b{batch}"
        code = run("optimize", str(model), "-t", "onnxruntime/cpu", "--batch", str(batch), "-p", f"{place}/net.onnx")[0]
        assert code == 0
        (place / "net.onnx.artifact.json").rename(place / "artifact.json")
    code, out, err = run("bench", "family", "--seconds", "0.2", "--picture", "batches.svg", "--json")
    assert code == 0, err
    assert [found["batch"] for found in json.loads(out)["artifacts"]] == [1, 8]
    assert "throughput (samples a second)" in Path("batches.svg").read_text()


@pytest.mark.usefixtures("known")
def test_what_cannot_be_measured_says_what_can(run: Run, fast: Path, tmp_path: Path) -> None:
    code, _, err = run("bench", "nothing.mxr")
    assert code == 4
    assert "MODEL/TARGET/PRECISION" in err
    code, _, err = run("bench", str(fast), "--model", "fast.onnx")
    assert (code, "add --against onnxruntime, or torch" in err) == (2, True)
    code, _, err = run("inspect", "nothing.mxr")
    assert (code, "no file nothing.mxr" in err) == (4, True)
    code, _, err = run("bench", "fast.onnx")
    assert code == 4
    assert "no sidecar next to" in err
    document = Path(f"{fast}.artifact.json")
    document.write_text(document.read_text().replace('"arch": "cpu"', '"arch": "gfx942"'))
    code, _, err = run("bench", str(fast))
    assert code == 2
    assert "needs onnxruntime/gfx942; here is onnxruntime/cpu" in err
    sidecar = json.loads(document.read_text())
    for field, value, why in (("model", "onnx", "is not one"), ("verification", None, "has no 'verification'")):
        spec = {name: given for name, given in sidecar["spec"].items() if name != field}
        document.write_text(json.dumps({**sidecar, "spec": {**spec, field: value} if value is not None else spec}))
        code, _, err = run("bench", str(fast))
        assert code == 39, err
        assert f"fast.onnx cannot be run: the spec in its sidecar {why}" in err
    fast.write_bytes(fast.read_bytes() + b"x")
    code, _, err = run("bench", str(fast))
    assert code == 39


def test_a_program_with_kernels_for_another_card_is_not_run(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file for gfx942 with `xnack-`, where the card has `xnack+`."""
    card = Pool(
        Target("migraphx", "gfx942"), "rocm7.2-migraphx2.15-01234567", Device("gfx942:sramecc+:xnack+", 304, 8), 1
    )
    monkeypatch.setattr("farm.node.survey.survey", lambda settings: Findings(pools=[card]))
    program = write_mxr(tmp_path / "net.mxr")
    sidecar = sidecar_of(program)
    sidecar["spec"] |= {"device": sidecar["device"], "batch": None, "inputs": {}, "options": {}}
    sidecar["spec"] |= {"env": {}, "model": {"format": "onnx"}, "verification": None}
    Path("net.mxr.artifact.json").write_text(json.dumps({**sidecar, "tuning": {}}))
    code, _, err = run("bench", "net.mxr")
    assert code == 2
    assert "does not run here: it has kernels for gfx942:sramecc+:xnack-, not for gfx942:sramecc+:xnack+" in err


@pytest.mark.noise
@pytest.mark.migraphx
@pytest.mark.parametrize("python", ["", "own"])
def test_migraphx_in_turns_with_onnxruntime(
    run: Run, fast: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, python: str
) -> None:
    """In one process, and where MIGraphX has an interpreter of its own in processes by turns."""
    import sys

    import migraphx

    monkeypatch.setenv("FARM_MIGRAPHX_PATH", str(Path(migraphx.__file__).resolve().parent))
    monkeypatch.setenv("FARM_MIGRAPHX_PYTHON", sys.executable if python else "")
    assert run("optimize", "fast.onnx", "-t", "ref", "--batch", "64")[0] == 0
    # As `farm fetch --sample` leaves it: in the archive its bytes begin where no float does.
    np.savez("saved_models/in.npz", x=np.ones((64, 256), np.float32))
    document = Path("saved_models/fast.mxr.artifact.json")
    sidecar = json.loads(document.read_text())
    digest = hashlib.sha256(Path("saved_models/in.npz").read_bytes()).hexdigest()
    sidecar["blobs"]["sample"] = {"path": "in.npz", "digest": digest, "size": 0}
    document.write_text(json.dumps(sidecar))
    found = bench(run, "saved_models/fast.mxr", "--against", str(fast))
    assert found["target"] == "migraphx/ref"
    assert found["against"]["comparison"]["verdict"] == "slower"
