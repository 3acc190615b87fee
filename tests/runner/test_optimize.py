"""`farm optimize`: one model through real compilers, on the command line."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import farm
from farm.artifacts import sidecar as sidecars
from farm.cli import main
from farm.files import NotPlain
from farm.local.optimize import Wanted, plan, store
from farm.node.survey import Findings
from farm.settings import load_settings
from farm.spec import Device, cache_key
from farm.targets.pools import Pool, Target
from tests.support.compiling import MAGIKA, PNET, needs_target

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FARM_MEASURE_SECONDS", "0.2")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    # `signal` belongs to the test runner again afterwards.
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(signal, "signal", lambda *_: before)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*arguments: str) -> tuple[int, str, str]:
        code = main(["optimize", *arguments])
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def net(tmp_path: Path) -> Path:
    """A small net with an open batch: a convolution and a matrix product."""
    random = np.random.default_rng(0)
    weights = {
        "w": random.standard_normal((4, 3, 3, 3)).astype(np.float32),
        "m": random.standard_normal((4 * 6 * 6, 5)).astype(np.float32),
    }
    graph = helper.make_graph(
        [
            helper.make_node("Conv", ["x", "w"], ["c"]),
            helper.make_node("Flatten", ["c"], ["f"]),
            helper.make_node("MatMul", ["f", "m"], ["y"]),
        ],
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 3, 8, 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 5])],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    path = tmp_path / "net.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def left_over(folder: Path) -> list[str]:
    """What a run left behind next to the model: work folders, half-written files, programs."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.suffix != ".onnx")


@pytest.mark.usefixtures("known")
def test_a_real_model_is_compiled_checked_and_compared(run: Run, tmp_path: Path) -> None:
    model = Path(shutil.copy(MAGIKA, tmp_path / "magika.onnx"))
    code, out, err = run(str(model), "-t", "onnxruntime/cpu", "--json")
    assert code == 0, err
    found = json.loads(out)
    assert found["program"] == "saved_models/magika.onnx"
    assert found["identifier"] == "magika/onnxruntime-cpu/fp32/b1"
    assert found["accuracy"]["passed"]
    assert (
        found["accuracy"]["outputs"]["target_label"]["error"]
        < found["accuracy"]["outputs"]["target_label"]["tolerance"]
    )
    assert found["size"] == {"before": model.stat().st_size, "after": Path(found["program"]).stat().st_size}
    assert len(found["after"]["first_runs"]) == 10
    assert found["before"]["target"] == "onnxruntime/cpu"
    assert found["before"]["comparison"]["verdict"] in ("faster", "slower", "no difference shown")
    assert onnxruntime.InferenceSession(found["program"]).get_outputs()[0].name == "target_label"


@pytest.mark.usefixtures("known")
def test_the_sidecar_is_the_farms_own(run: Run, net: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Same schema, and the key that a build gives to the same spec; `farm inspect` finds it next to the program."""
    code, _, err = run(str(net), "--batch", "4")
    assert code == 0
    assert "onnxruntime-cpu/fp32/b4" in err
    assert "this machine has no GPU for MIGraphX" in err
    document = json.loads(Path("saved_models/net.onnx.artifact.json").read_text())
    assert sidecars.validate(document)["measurements"]["latency"] is not None
    assert document["inputs"][0]["shape"] == [4, 3, 8, 8]
    assert document["key"] == cache_key(document["spec"])
    assert main(["inspect", "saved_models/net.onnx", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["disagreements"] == []


@pytest.mark.usefixtures("known")
def test_tuned_and_untuned_are_measured_in_turns(run: Run, net: Path) -> None:
    code, out, err = run(str(net), "-t", "onnxruntime/cpu", "--exhaustive-tune", "--json")
    assert code == 0, err
    tuning = json.loads(out)["tuning"]
    assert tuning["published"] == ("tuned" if tuning["ratio"] >= 1 else "untuned")
    assert tuning["tuned"]["repeats"] > 0
    assert tuning["baseline"]["repeats"] > 0


@pytest.mark.parametrize(
    ("given", "place"),
    [
        ("out/", "out/net.onnx"),
        ("there", "there/net.onnx"),
        ("out/other.onnx", "out/other.onnx"),
        ("other", "saved_models/other.onnx"),
        ("other.onnx", "saved_models/other.onnx"),
    ],
)
def test_the_output_path_is_a_file_a_folder_or_a_bare_name(tmp_path: Path, given: str, place: str) -> None:
    from farm.local.optimize import Wanted, destination

    (tmp_path / "there").mkdir()
    assert destination(Wanted(model=Path("models/net.onnx"), output=given), ".onnx") == Path(place)


@pytest.mark.usefixtures("known")
def test_the_model_is_never_overwritten(run: Run, net: Path) -> None:
    before = net.read_bytes()
    code, _, err = run(str(net), "-t", "onnxruntime/cpu", "-p", f"{net.parent}/net.onnx")
    assert (code, net.read_bytes()) == (2, before)
    assert "is the model itself" in err


@pytest.mark.usefixtures("known")
def test_calibrated_on_the_users_arrays(run: Run, net: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "real.npy", np.random.default_rng(1).standard_normal((16, 3, 8, 8)).astype(np.float32))
    code, out, err = run(str(net), "-t", "onnxruntime/cpu", "-i", "--calibration", "real.npy", "--json")
    assert code == 0, err
    assert json.loads(out)["quantized"] == {"Conv": 1, "MatMul": 1}


@pytest.mark.usefixtures("known")
def test_an_input_file_gives_the_shape_and_is_what_it_is_run_on(run: Run, net: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.ones((2, 3, 8, 8), np.float32))
    code, out, err = run(str(net), "-t", "onnxruntime/cpu", "--input-file", "x.npy", "--json")
    assert code == 0, err
    found = json.loads(out)
    assert found["inputs"][0]["shape"] == [2, 3, 8, 8]
    assert found["accuracy"]["weak"]  # one input proves little


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        (["--fp16", "--bf16"], "--fp16 --bf16 cannot be combined", "onnxruntime/cpu has"),
        (["--fp8"], "onnxruntime/cpu has no --fp8", "has native, fp32"),
        (["--int8"], "--int8 needs calibration data", "--calibration FILE.npz with an array for `x`"),
        (["--fp16", "--calibration", "x.npz"], "--calibration has no use at precision fp16", "leave it out"),
        (["-d"], "onnxruntime has no option fast_math", "choose a target of migraphx"),
        (["--input", "z=1x3x8x8"], "--input z: no such input", "x"),
        (["--input", "x"], "not NAME=SHAPE", "x=1x3x224x224"),
        (["--input", "x=1,3,8,8", "--batch", "8"], "no input of the model leaves its batch open", "x=batch,"),
        (["--input", "x=1,3,9,8"], "the model fixes dimension 2 at 8, not 9", ""),
        (["--memory-limit", "8"], "'8' is not a size", "512MiB"),
        (["--input-file", "none.npy"], "none.npy: not an .npy file", "numpy.save"),
        (["-t", "gfx942"], "not on this machine", "onnxruntime/cpu"),
        (["-t", "gpus"], "unknown target `gpus`", "gpu, cpu, ref"),
    ],
)
def test_what_does_not_go_together_is_refused_with_what_to_do(
    run: Run, net: Path, tmp_path: Path, arguments: list[str], message: str, hint: str
) -> None:
    target = [] if "-t" in arguments else ["-t", "onnxruntime/cpu"]
    code, out, err = run(str(net), *target, *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert hint in err
    assert left_over(tmp_path) == []


@pytest.mark.usefixtures("known")
def test_an_open_size_asks_for_input_and_says_how(run: Run) -> None:
    code, _, err = run(str(PNET), "-t", "onnxruntime/cpu")
    assert code == 2
    assert "--input input_1=batch,SIZE,SIZE,3" in err


@pytest.mark.usefixtures("known")
def test_what_is_not_accurate_enough_is_not_written(run: Run, net: Path, tmp_path: Path) -> None:
    code, out, err = run(str(net), "-t", "onnxruntime/cpu", "--fp16", "--tolerance", "1e-9")
    assert (code, out) == (3, "")
    assert "output `y` is off by" in err
    assert "--tolerance accepts a larger error" in err
    assert left_over(tmp_path) == []


@pytest.mark.usefixtures("known")
def test_what_the_compiler_refuses_leaves_nothing(run: Run, net: Path, tmp_path: Path) -> None:
    """Memory is limited where it is used: the compiler's child ends, and the sentence says why."""
    code, out, _ = run(str(net), "-t", "onnxruntime/cpu", "--memory-limit", "20MB", "--json")
    assert code == 1
    assert "out_of_memory" in json.loads(out)["error"]["message"]
    assert left_over(tmp_path) == []


@pytest.mark.usefixtures("known")
def test_a_broken_model_is_the_users_to_fix(run: Run, tmp_path: Path) -> None:
    (tmp_path / "net.onnx").write_bytes(b"not a model")
    code, _, err = run("net.onnx", "-t", "onnxruntime/cpu")
    assert code == 2
    assert "not an ONNX model" in err


def test_nothing_that_compiles_is_said(run: Run, net: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farm.local.optimize.survey", lambda settings: Findings())
    code, _, err = run(str(net))
    assert code == 2
    assert "nothing here compiles onnx models" in err


def test_ctrl_c_leaves_nothing(net: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(farm.__file__).parents[1]), "FARM_MEASURE_SECONDS": "60"}
    process = subprocess.Popen(
        [sys.executable, "-m", "farm", "optimize", str(net), "-t", "onnxruntime/cpu"],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        env=environment,
        text=True,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if line.strip() == "measuring":
            process.send_signal(signal.SIGINT)
            break
    process.communicate(timeout=120)
    assert process.returncode == 8
    assert left_over(tmp_path) == []


@pytest.mark.migraphx
def test_migraphx_compiles_here_and_its_options_reach_the_program(
    run: Run, net: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The older spellings too; the program is JSON, and MIGraphX loads and runs it."""
    import migraphx

    needs_target("cpu")

    monkeypatch.setenv("FARM_MIGRAPHX_PATH", str(Path(migraphx.__file__).resolve().parent))
    code, out, err = run(
        str(net),
        "-t",
        "cpu",
        "--fp16",
        "--disable_fast_math",
        "--offload_copy_off",
        "-j",
        "--output_path",
        "o/",
        "--json",
    )
    assert code == 0, err
    found: dict[str, Any] = json.loads(out)
    assert found["program"] == "o/net.json"
    assert found["target"] == "migraphx/cpu"
    spec = json.loads(Path("o/net.json.artifact.json").read_text())["spec"]
    assert (spec["options"]["fast_math"], spec["options"]["offload_copy"]) == (False, False)
    program = migraphx.load("o/net.json", format="json")
    assert list(program.get_parameter_shapes()["x"].lens()) == [1, 3, 8, 8]


@pytest.mark.migraphx
def test_ref_is_the_slowest_and_says_so(run: Run, net: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import migraphx

    monkeypatch.setenv("FARM_MIGRAPHX_PATH", str(Path(migraphx.__file__).resolve().parent))
    code, out, err = run(str(net), "-t", "ref", "--json")
    assert code == 0, err
    assert json.loads(out)["before"]["comparison"]["verdict"] == "slower"


def test_what_lies_in_a_programs_place_is_not_followed(tmp_path: Path) -> None:
    """The program goes from the user's own machine to others: a link would bring any file of his along."""
    (tmp_path / "key").write_text("the user's")
    (tmp_path / "made.onnx").symlink_to(tmp_path / "key")
    made: Any = SimpleNamespace(program=tmp_path / "made.onnx", sidecar={})
    with pytest.raises(NotPlain, match="not a regular file with one name"):
        store(made, tmp_path / "out" / "net.onnx")
    assert list((tmp_path / "out").iterdir()) == []


def on_cards(tensorrt: bool = True) -> Findings:
    """A machine with an H200, whose libraries are there."""
    card = Device("sm_90:h200", 132)
    pools = [Pool(Target("onnxruntime", "cuda"), "onnxruntime1.31.1-cuda13.0-aabbccdd", card, 1)]
    if tensorrt:
        build = "onnxruntime1.31.1-tensorrt10.13.3-cuda13.0-aabbccdd"
        pools.append(Pool(Target("onnxruntime", "tensorrt"), build, card, 1))
    return Findings(pools)


@pytest.mark.parametrize(
    ("arguments", "target", "precision", "options"),
    [
        ({}, "onnxruntime/cuda", "fp32", {}),
        ({"precisions": ["tf32"], "gpu_memory_limit": 2 << 30}, "onnxruntime/cuda", "tf32", {"gpu_mem_limit": 2 << 30}),
        (
            {"target": "onnxruntime/tensorrt", "precisions": ["fp16"], "options": {"trt_max_workspace_size": 1 << 28}},
            "onnxruntime/tensorrt", "fp16", {"trt_max_workspace_size": 1 << 28},
        ),
    ],
)  # fmt: skip
def test_a_model_for_an_nvidia_card_is_planned(
    arguments: dict[str, Any],
    target: str,
    precision: str,
    options: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("farm.local.optimize.survey", lambda _: on_cards())
    planned = plan(
        Wanted(model=PNET, inputs={"input_1": ["batch", 12, 12, 3]}, **arguments), load_settings({}), tmp_path
    )
    assert (str(planned.pool.target), planned.cell.spec["precision"]) == (target, precision)
    assert {name: value for name, value in planned.cell.spec["options"].items() if name in options} == options


def test_what_only_tensorrt_has_is_refused_elsewhere(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farm.local.optimize.survey", lambda _: on_cards(tensorrt=False))
    code, _, said = run(str(PNET), "--input", "input_1=1x12x12x3", "--workspace", "1GiB")
    assert code == 2 and "onnxruntime has no option trt_max_workspace_size" in said
    code, _, said = run(str(PNET), "--input", "input_1=1x12x12x3", "-t", "onnxruntime/tensorrt")
    assert code == 2 and "not on this machine; here is onnxruntime/cuda" in said
