"""Packs: what each layout holds, which programs it refuses, and that nothing of the user's is written over."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from farm.artifacts.sidecar import validate
from farm.client.packs import Layout, Pack
from farm.errors import UsageError
from farm.extras import packs
from farm.extras.packs import layouts
from farm.extras.packs.fetch import CacheFile, ask_provider, fixed_model, small_files, write_pack
from farm.extras.packs.layouts import require_fit, wrapper
from farm.wire.program import Sidecar
from tests.support.provider import has_compiler, interpreter_with_provider

ARCH = "gfx942:sramecc+:xnack-"
NAME = "net--migraphx-gfx942--fp16--b8.pack.mxr"
needs_compiler = pytest.mark.skipif(not has_compiler(), reason="needs cc, nm and objdump")


def sidecar_of(**changes: Any) -> Sidecar:
    ports = {
        "inputs": [{"name": "x", "dtype": "float32", "shape": [8, 3]}],
        "outputs": [{"name": "y", "dtype": "float32", "shape": [8, 3], "parameter": "main:#output_0"}],
    }
    document: dict[str, Any] = {
        "schema": 1,
        "key": "0" * 64,
        "namespace": "main",
        "identifier": "net/migraphx-gfx942/fp16/b8.pack",
        "spec": {"compiler": {"name": "migraphx"}, "model": {"format": "onnx"}, "device": {"arch": ARCH}},
        "blobs": {"program": {"path": NAME, "digest": "1" * 64, "size": 9}},
        "toolchain": "rocm7.2-migraphx2.15-aa",
        "device": {"arch": ARCH},
        "offload_copy": False,
        "created": "2026-11-22T00:00:00+00:00",
        **ports,
    }
    return validate({**document, **changes})


def own_program(identifier: str = "net", stored: str = "net.onnx") -> Sidecar:
    spec = {"compiler": {"name": "onnxruntime"}, "model": {"format": "onnx"}, "device": {"arch": "cpu"}}
    blobs = {"program": {"path": stored, "digest": "1" * 64, "size": 9}}
    return sidecar_of(spec=spec, device={"arch": "cpu"}, blobs=blobs, offload_copy=True, identifier=identifier)


def bring_model(folder: Path) -> Path:
    """A model whose batch has a name, and whose weights are in a file of their own."""
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", 3]) for name in "xy"]
    weights = helper.make_tensor("w", TensorProto.FLOAT, [3, 3], struct.pack("9f", *range(9)), raw=True)
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "net", ports[:1], ports[1:], [weights])
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    place = folder / "brought"
    onnx.save(made, place, save_as_external_data=True, location="net.data", size_threshold=0)
    return place


def no_model(folder: Path) -> Path:
    raise AssertionError("this layout needs no model")


def write(tmp_path: Path, layout: Layout, sidecar: Sidecar | None = None, **options: Any) -> Pack:
    program = tmp_path / "program"
    program.write_bytes(b"a program")
    needs = layout in (Layout.ONNXRUNTIME_CACHE, Layout.TRITON) and not (sidecar and sidecar["device"]["arch"] == "cpu")
    return write_pack(
        layout, sidecar or sidecar_of(), program, tmp_path / "out", bring_model if needs else no_model, **options
    )


def contents(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


@pytest.fixture(scope="module")
def pythons(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Interpreters with a provider: the stand-in, and the real one if there is one."""
    real = os.environ.get("FARM_TEST_ORT_MIGRAPHX", "")
    return [interpreter_with_provider(tmp_path_factory.mktemp("provider")), *filter(None, [real])]


# --- the wrapper -------------------------------------------------------------------------------------------------


def test_the_wrapper_names_the_program_and_the_card(tmp_path: Path) -> None:
    pack = write(tmp_path, Layout.ONNXRUNTIME)
    assert contents(pack.folder) == sorted([NAME, "artifact.json", "model_ctx.onnx", "pack.json", "use.py", "use.sh"])
    model = onnx.load(pack.folder / "model_ctx.onnx")
    onnx.checker.check_model(model)
    (node,) = model.graph.node
    facts = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
    assert (node.op_type, node.domain, list(node.input), list(node.output)) == (
        "EPContext", "com.microsoft", ["x"], ["y"],
    )  # fmt: skip
    assert (facts["embed_mode"], facts["main_context"], facts["ep_cache_context"]) == (0, 1, NAME.encode())
    assert (facts["source"], facts["hardware_architecture"]) == (b"MIGraphXExecutionProvider", ARCH.encode())
    assert wrapper(sidecar_of()) == wrapper(sidecar_of()), "the same sidecar gives the same bytes"
    any_card = sidecar_of(spec={**sidecar_of()["spec"], "device": {"arch": "gfx942:any"}})
    assert ARCH.encode() not in wrapper(any_card)


def test_onnx_runtime_names_who_made_the_wrapper(tmp_path: Path) -> None:
    """The CPU's build cannot run it, and reads as much of it as says so."""
    pack = write(tmp_path, Layout.ONNXRUNTIME)
    with pytest.raises(Exception, match="MIGraphXExecutionProvider"):
        onnxruntime.InferenceSession(str(pack.folder / "model_ctx.onnx"), providers=["CPUExecutionProvider"])


def test_every_file_of_a_pack_is_in_its_index(tmp_path: Path) -> None:
    pack = write(tmp_path, Layout.ONNXRUNTIME)
    index = json.loads((pack.folder / "pack.json").read_text())
    assert index == pack.index
    assert [file["path"] for file in index["files"]] == sorted(set(contents(pack.folder)) - {"pack.json"})
    assert (index["layout"], index["key"], index["identifier"]) == ("onnxruntime", "0" * 64, sidecar_of()["identifier"])
    assert all((pack.folder / file["path"]).stat().st_size == file["size"] for file in index["files"])


# --- what is refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "changes", "reason", "hint"),
    [
        (Layout.ONNXRUNTIME, {"offload_copy": True}, "copies its inputs", "packs: [onnxruntime]"),
        (Layout.ONNXRUNTIME, {"device": {"arch": "cpu"}}, "only on AMD GPUs", "plain"),
        (Layout.ONNXRUNTIME, {"inputs": []}, "names no inputs", "plain"),
        (
            Layout.ONNXRUNTIME,
            {"inputs": [{"name": "x", "dtype": "float32", "shape": ["N", 3]}]},
            "sizes of x are not fixed",
            "plain",
        ),
        (
            Layout.TRITON,
            {"spec": {**sidecar_of()["spec"], "model": {"format": "tf"}}},
            "its model is not ONNX",
            "plain",
        ),
        (
            Layout.ONNXRUNTIME,
            {"blobs": {"program": {"path": "net.json", "digest": "1" * 64, "size": 9}}},
            "reads .mxr files only",
            "plain",
        ),
    ],
)
def test_a_program_that_cannot_work_is_refused_with_the_reason(
    tmp_path: Path, layout: Layout, changes: dict[str, Any], reason: str, hint: str
) -> None:
    with pytest.raises(UsageError, match=reason) as caught:
        write(tmp_path, layout, sidecar_of(**changes))
    assert hint in caught.value.hint
    assert not (tmp_path / "out").exists()


def test_an_artifacts_page_says_which_packs_can_be_made_of_it() -> None:
    says = packs.extension.artifact_facts
    assert says
    every = (
        "onnxruntime, onnxruntime-cache, triton: `farm fetch net/migraphx-gfx942/fp16/b8.pack@b-1 --layout onnxruntime`"
    )
    assert says(None, "main", sidecar_of(build="b-1")) == [("packs", f"{every} makes one")]
    assert says(None, "main", sidecar_of(offload_copy=True)) == [("packs", "none can be made of it")]


def test_a_cache_takes_no_program_of_another_compiler(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not a program of MIGraphX's"):
        require_fit(Layout.ONNXRUNTIME_CACHE, own_program())


@pytest.mark.parametrize(
    "changes",
    [
        {"identifier": 'net"""\nimport os'},
        {"identifier": "net\nname: other"},
        {"toolchain": 'a"""'},
        {"blobs": {"program": {"path": 'net""".mxr', "digest": "1" * 64, "size": 9}}},
        {"device": {"arch": 'gfx942"'}},
    ],
)
def test_no_name_of_an_untrusted_farm_gets_into_a_script(tmp_path: Path, changes: dict[str, Any]) -> None:
    for layout in (Layout.ONNXRUNTIME, Layout.TRITON):
        with pytest.raises(UsageError, match="not a valid sidecar"):
            write(tmp_path, layout, sidecar_of(**changes))


def test_a_folder_with_something_else_is_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    for index in ("", "[" * 100_000):
        (folder / "pack.json").write_text(index)
        with pytest.raises(UsageError, match="something else than a pack"):
            write(tmp_path, Layout.ONNXRUNTIME)
    assert contents(folder) == ["notes.txt", "pack.json"]
    write(tmp_path, Layout.ONNXRUNTIME, force=True)
    assert (folder / "notes.txt").read_text() == "mine"
    write(tmp_path, Layout.ONNXRUNTIME)
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]


def test_a_second_model_does_not_take_the_place_of_the_first_in_a_repository(tmp_path: Path) -> None:
    write(tmp_path, Layout.TRITON, own_program("net_a"))
    own = tmp_path / "out" / "models" / "ensemble" / "config.pbtxt"
    own.parent.mkdir()
    own.write_text("written by hand")
    before = contents(tmp_path / "out")
    with pytest.raises(UsageError, match="the repository of another model, net_a") as caught:
        write(tmp_path, Layout.TRITON, own_program("net_b"))
    assert "--model-repository" in caught.value.hint
    assert contents(tmp_path / "out") == before
    write(tmp_path, Layout.TRITON, own_program("net_a"))
    assert contents(tmp_path / "out") == before
    write(tmp_path, Layout.TRITON, own_program("net_b"), force=True)
    assert contents(tmp_path / "out") == [name.replace("net_a", "net_b") for name in before]
    assert own.read_text() == "written by hand"


def test_only_what_a_pack_wrote_is_replaced_by_the_next(tmp_path: Path) -> None:
    """A file that its user has changed, or that the next pack brings and the last one did not, is refused."""
    write(tmp_path, Layout.TRITON, own_program("net_a"))
    config = tmp_path / "out" / "models" / "net_a" / "config.pbtxt"
    written = config.read_text()
    config.write_text("edited")
    with pytest.raises(UsageError, match=r"config\.pbtxt exists, and no fetch has written it"):
        write(tmp_path, Layout.TRITON, own_program("net_a"))
    config.write_text(written)
    (tmp_path / "out" / "use.py").write_text("mine")
    with pytest.raises(UsageError, match=r"use\.py exists, and no fetch has written it"):
        write(tmp_path, Layout.ONNXRUNTIME, own_program("net_a"))
    (tmp_path / "out" / "use.py").unlink()
    (tmp_path / "out" / "start.sh").write_text("edited")
    write(tmp_path, Layout.ONNXRUNTIME, own_program("net_a"))
    assert contents(tmp_path / "out") == sorted(
        ["artifact.json", "net_a.onnx", "pack.json", "start.sh", "use.py", "use.sh"]
    )
    assert (tmp_path / "out" / "start.sh").read_text() == "edited"


def test_an_index_of_a_hostile_farm_removes_nothing_of_the_users(tmp_path: Path) -> None:
    (tmp_path / "out" / "src").mkdir(parents=True)
    for name in ("out/src/main.c", "beside"):
        (tmp_path / name).write_text("mine")
    files = [{"path": path, "digest": "0" * 64, "size": 4} for path in ("src/main.c", "src", "../beside", "/etc", "")]
    (tmp_path / "out" / "pack.json").write_text(json.dumps({"schema": 1, "files": files}))
    write(tmp_path, Layout.TRITON, own_program("net_a"))
    assert (tmp_path / "out" / "src" / "main.c").read_text() == (tmp_path / "beside").read_text() == "mine"


def test_no_link_in_the_folder_is_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("theirs")
    write(tmp_path, Layout.ONNXRUNTIME)
    for name in ("model_ctx.onnx", "use.py"):
        (tmp_path / "out" / name).unlink()
        (tmp_path / "out" / name).symlink_to(outside / "file")
    with pytest.raises(UsageError, match="no fetch has written it"):
        write(tmp_path, Layout.ONNXRUNTIME)
    write(tmp_path, Layout.ONNXRUNTIME, force=True)
    (tmp_path / "away").mkdir()
    write(tmp_path, Layout.TRITON, own_program("net_a"))
    (tmp_path / "out" / "models").rename(tmp_path / "away" / "models")
    (tmp_path / "out" / "models").symlink_to(tmp_path / "away" / "models")
    before = (tmp_path / "away" / "models" / "net_a" / "1" / "model.onnx").stat().st_ino
    with pytest.raises(UsageError, match="no fetch has written it"):
        write(tmp_path, Layout.TRITON, own_program("net_a"))
    write(tmp_path, Layout.TRITON, own_program("net_a"), force=True)
    assert (tmp_path / "away" / "models" / "net_a" / "1" / "model.onnx").stat().st_ino == before
    assert (outside / "file").read_text() == "theirs"


# --- the cache ---------------------------------------------------------------------------------------------------


@needs_compiler
def test_the_cache_holds_the_program_under_the_name_that_the_provider_asks_for(
    tmp_path: Path, pythons: list[str]
) -> None:
    for python in pythons:
        pack = write(tmp_path, Layout.ONNXRUNTIME_CACHE, python=python)
        (cached,) = (pack.folder / "cache").iterdir()
        assert cached.read_bytes() == b"a program"
        assert cached.name.startswith("20") and cached.suffix == ".mxr"
        assert contents(pack.folder) == sorted(
            ["artifact.json", f"cache/{cached.name}", "model.onnx", "net.data", "pack.json", "use.py", "use.sh"]
        )
        model = onnx.load(pack.folder / "model.onnx")
        assert [size.dim_value for size in model.graph.input[0].type.tensor_type.shape.dim] == [8, 3]
        assert ask_provider(pack.folder / "model.onnx", ARCH, python).name == cached.name, "in any folder"
        assert pack.index["onnxruntime"] in (pack.folder / "use.py").read_text()


@needs_compiler
def test_a_second_pack_leaves_no_program_of_the_first_in_the_cache(tmp_path: Path, pythons: list[str]) -> None:
    pack = write(tmp_path, Layout.ONNXRUNTIME_CACHE, python=pythons[0])
    (pack.folder / "cache" / "20e00-of-another-version.mxr").write_bytes(b"stale")
    write(tmp_path, Layout.ONNXRUNTIME_CACHE, python=pythons[0])
    assert len(list((pack.folder / "cache").iterdir())) == 1


@needs_compiler
@pytest.mark.parametrize(
    ("provider", "message"),
    [({"parts": 3}, "cuts the model into 3 parts"), ({"whole": False}, "does not run the whole model by MIGraphX")],
)
def test_a_model_that_the_provider_takes_in_parts_is_refused(
    tmp_path: Path, provider: dict[str, Any], message: str
) -> None:
    python = interpreter_with_provider(tmp_path / "python", **provider)
    with pytest.raises(UsageError, match=message):
        write(tmp_path, Layout.ONNXRUNTIME_CACHE, python=python)
    assert contents(tmp_path / "out") == []


def test_without_a_provider_the_way_to_one_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"pip install onnxruntime-migraphx.*--python"):
        write(tmp_path, Layout.ONNXRUNTIME_CACHE)


# --- starters ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        small_files(Layout.ONNXRUNTIME, sidecar_of())["use.py"],
        small_files(Layout.ONNXRUNTIME_CACHE, sidecar_of(), CacheFile("20f00-a.mxr", "1.27.1"))["use.py"],
        small_files(Layout.ONNXRUNTIME, own_program())["use.py"],
    ],
)
def test_what_starts_a_pack_is_python(text: bytes) -> None:
    compile(text, "use.py", "exec")


def test_a_program_of_onnx_runtimes_own_starts(tmp_path: Path) -> None:
    source = bring_model(tmp_path)
    model = onnx.load(source)
    (tmp_path / "net.data").unlink()
    program = tmp_path / "program.onnx"
    onnx.save(model, program)
    write_pack(Layout.ONNXRUNTIME, own_program(), program, tmp_path / "out", no_model)
    done = subprocess.run(
        [tmp_path / "out" / "use.sh"], env={**os.environ, "PYTHON": sys.executable},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "CPUExecutionProvider ['x']" in done.stdout


def tuned(**session: Any) -> Sidecar:
    """A program for the CPU whose tuning decided how to run it."""
    return validate({**own_program(), "tuning": {"session": session}})


@pytest.mark.parametrize("session", [{"level": "basic", "threads": 2, "spinning": False},
                                     {"level": "extended", "threads": 1, "spinning": True}])  # fmt: skip
def test_a_tuned_program_starts_as_it_was_measured(tmp_path: Path, session: dict[str, Any]) -> None:
    onnx.save(onnx.load(bring_model(tmp_path)), tmp_path / "program.onnx")
    write_pack(Layout.ONNXRUNTIME, tuned(**session), tmp_path / "program.onnx", tmp_path / "out", no_model)
    asked = (
        "import use; o = use.options; print(o.graph_optimization_level.name, o.intra_op_num_threads,"
        " o.get_session_config_entry('session.intra_op.allow_spinning'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", asked], cwd=tmp_path / "out", capture_output=True, text=True, check=False
    )
    level, threads, spinning = done.stdout.split()
    assert (level, int(threads), bool(int(spinning))) == (
        f"ORT_ENABLE_{session['level'].upper()}", session["threads"], session["spinning"]
    )  # fmt: skip


def on_a_card(precision: str, **session: Any) -> Sidecar:
    """A program of ONNX Runtime's for an H200."""
    spec = {
        "compiler": {"name": "onnxruntime"}, "model": {"format": "onnx"}, "device": {"arch": "sm_90:h200"},
        "precision": precision, "options": {"gpu_mem_limit": 1 << 30},
    }  # fmt: skip
    blobs = {"program": {"path": "net.onnx", "digest": "1" * 64, "size": 9}}
    return sidecar_of(spec=spec, device={"arch": "sm_90:h200"}, blobs=blobs, tuning={"session": session or None})


def test_a_program_for_a_card_starts_with_the_options_that_it_was_verified_with() -> None:
    session = {"level": "basic", "threads": 4, "spinning": False, "cudnn_conv_algo_search": "HEURISTIC"}
    scope: dict[str, Any] = {}
    for precision, on in (("fp32", "0"), ("tf32", "1")):
        text = layouts.for_own_program(on_a_card(precision, **session))
        [line] = [line for line in text.splitlines() if line.startswith("providers = ")]
        exec(line, scope)
        [(provider, options), _] = scope["providers"]
        assert provider == "CUDAExecutionProvider"
        assert options == {
            "use_tf32": on, "gpu_mem_limit": str(1 << 30), "cudnn_conv_algo_search": "HEURISTIC",
        }  # fmt: skip
        assert "GraphOptimizationLevel.ORT_ENABLE_BASIC" in text
    assert "NVIDIA_TF32_OVERRIDE=0" in layouts.plain_start(on_a_card("fp32"))
    assert all("NVIDIA" not in layouts.plain_start(each) for each in (on_a_card("tf32"), own_program()))


# --- Triton ------------------------------------------------------------------------------------------------------


@needs_compiler
def test_triton_finds_a_repository_and_the_cache_outside_it(tmp_path: Path, pythons: list[str]) -> None:
    pack = write(tmp_path, Layout.TRITON, python=pythons[0])
    model = "net_migraphx-gfx942_fp16_b8_pack"
    place = pack.folder / "models" / model
    assert contents(place) == ["1/model.onnx", "1/net.data", "config.pbtxt"]
    config = (place / "config.pbtxt").read_text()
    assert f'name: "{model}"' in config and "max_batch_size: 0" in config
    assert 'input [{ name: "x" data_type: TYPE_FP32 dims: [8, 3] }]' in config
    assert 'gpu_execution_accelerator: [{ name: "migraphx" }]' in config
    assert len(list((pack.folder / "cache").iterdir())) == 1
    assert 'ORT_MIGRAPHX_MODEL_CACHE_PATH="$here/cache"' in (pack.folder / "start.sh").read_text()
    assert os.access(pack.folder / "start.sh", os.X_OK)


def test_triton_takes_a_program_of_onnx_runtimes_own_as_its_model(tmp_path: Path) -> None:
    pack = write(tmp_path, Layout.TRITON, own_program())
    assert contents(pack.folder) == [
        "artifact.json", "models/net/1/model.onnx", "models/net/config.pbtxt", "pack.json", "start.sh"
    ]  # fmt: skip
    config = (pack.folder / "models" / "net" / "config.pbtxt").read_text()
    assert "KIND_CPU" in config and "accelerator" not in config


def test_triton_runs_a_tuned_program_as_far_as_it_can_be_told() -> None:
    config = layouts.triton_config(tuned(level="basic", threads=2, spinning=False), "net")
    assert "optimization { graph { level: -1 } }" in config
    assert 'parameters { key: "intra_op_thread_count" value: { string_value: "2" } }' in config
    assert "level: 1 " in layouts.triton_config(tuned(level="extended", threads=1, spinning=False), "net")
    untuned = layouts.triton_config(own_program(), "net")
    assert "optimization" not in untuned and "parameters" not in untuned
    card = layouts.triton_config(
        on_a_card("fp32", level="all", threads=0, spinning=False, cudnn_conv_algo_search="HEURISTIC"), "net"
    )
    assert card.count("optimization {") == 1
    assert '{ name: "cuda" parameters { key: "use_tf32" value: "0" }' in card
    assert 'parameters { key: "cudnn_conv_algo_search" value: "HEURISTIC" }' in card


def test_names_are_quoted_for_triton() -> None:
    port = {"name": 'x" }] input [{ name: "z', "dtype": "float16", "shape": []}
    config = layouts.triton_config(sidecar_of(inputs=[port]), "net")
    assert r'name: "x\" }] input [{ name: \"z" data_type: TYPE_FP16 dims: [1] reshape: { shape: [] }' in config
    with pytest.raises(UsageError, match="Triton has no type float8_e4m3fn"):
        layouts.triton_config(sidecar_of(inputs=[{**port, "dtype": "float8_e4m3fn"}]), "net")


def test_what_a_farm_calls_the_model_may_be_none(tmp_path: Path) -> None:
    (tmp_path / "model").write_bytes(b"\xff\xff")
    with pytest.raises(UsageError, match="is not one"):
        fixed_model(tmp_path / "model", sidecar_of())
