"""The table of compilers, and that the runner stays what it must be."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import Any

import pytest

from farm.runner.samples import make_samples
from farm.targets.compilers import (
    MIGRAPHX,
    ONNXRUNTIME,
    canonical_precision,
    compilers,
    default_equal_share,
    default_tolerance,
    filled,
)
from tests.support.features import FEATURES
from tests.support.places import ROOT

RUNNER = ROOT / "farm" / "runner"


@pytest.mark.parametrize(
    ("given", "canonical"),
    [
        ("int8+fp16", "int8-fp16"),
        ("fp16+int8", "int8-fp16"),
        ("bf16-fp8", "fp8-bf16"),
        ("FP32", "fp32"),
        ("native", "native"),
        ("fp16+int4", "int4-fp16"),
    ],
)
def test_precisions_have_one_spelling(given: str, canonical: str) -> None:
    assert canonical_precision(given) == canonical


def test_every_precision_has_a_tolerance() -> None:
    for compiler in compilers().values():
        for kind in compiler.devices:
            assert all(default_tolerance(precision) > 0 for precision in kind.precisions)
    assert default_tolerance("int8-fp16") == 2e-1
    assert default_equal_share("fp32") == 1.0


def test_devices_are_served_by_kind() -> None:
    assert MIGRAPHX.device("gfx942") is MIGRAPHX.device("gfx1100")
    assert MIGRAPHX.device("ref").precisions
    assert ONNXRUNTIME.device("gfx942").precisions == ()
    assert ONNXRUNTIME.device("ref").precisions == ()


def test_defaults_are_filled_in_and_mistakes_named() -> None:
    assert ONNXRUNTIME.resolved("native", {}, "cpu")[0] == {"level": "standard"}
    assert ONNXRUNTIME.resolved("int8", {"per_channel": True}, "")[1]["per_channel"] is True
    with pytest.raises(ValueError, match="`level` must be one of standard, tuned"):
        ONNXRUNTIME.resolved("native", {"level": "turbo"}, "cpu")[0]
    with pytest.raises(ValueError, match="must be true or false, not 1"):
        MIGRAPHX.resolved("native", {"fast_math": 1}, "gfx942")[0]


def test_debugging_is_variables_that_a_manifest_cannot_set_otherwise() -> None:
    found = MIGRAPHX.debugging.environment({"log_level": "debug", "trace": ["mlir", "miopen"], "timings": True})
    assert found == {
        "MIGRAPHX_LOG_LEVEL": "4",
        "MIOPEN_LOG_LEVEL": "6",
        "MIGRAPHX_TRACE_MLIR": "1",
        "MIOPEN_ENABLE_LOGGING": "1",
        "MIOPEN_ENABLE_LOGGING_CMD": "1",
        "MIGRAPHX_TIME_PASSES": "1",
    }
    assert not found.keys() & MIGRAPHX.env.keys()
    assert ONNXRUNTIME.debugging.environment({"log_level": "debug", "trace": ["mlir"], "timings": True}) == {}


def test_what_is_tuned_is_bound_to_a_cpu_family() -> None:
    assert not ONNXRUNTIME.family_bound({"level": "standard"}, "off")
    assert ONNXRUNTIME.family_bound({"level": "tuned"}, "off")
    assert ONNXRUNTIME.family_bound({"level": "standard"}, "quick")


def test_pairs_have_what_both_halves_have() -> None:
    assert MIGRAPHX.needs_calibration("int8-fp16")
    assert not MIGRAPHX.needs_calibration("fp16")
    assert ONNXRUNTIME.libraries_of("bf16") == ("ml_dtypes",)


def test_environment_is_an_allow_list() -> None:
    """Variables that write files, carry compiler flags, or are not the compiler's stay out."""
    refused = [
        "LD_PRELOAD", "MIGRAPHX_GPU_DUMP_SRC", "MIGRAPHX_GPU_HIP_FLAGS", "MIGRAPHX_PROBLEM_CACHE",
        "MIGRAPHX_TRACE_EVAL", "MIGRAPHX_MLIR_TUNE_EXHAUSTIVE", "MIOPEN_DEBUG_ENFORCE_DEVICE",
        "MIOPEN_FIND_ENFORCE", "MIOPEN_USER_DB_PATH",
        "HIPBLASLT_TUNING_FILE", "HSA_OVERRIDE_GFX_VERSION", "ROCR_VISIBLE_DEVICES", "AWS_SECRET_ACCESS_KEY",
    ]  # fmt: skip
    for name in refused:
        assert MIGRAPHX.env_problem(name, "1"), name
        with pytest.raises(ValueError, match=name):
            MIGRAPHX.resolve_env({name: "1"})


@pytest.mark.parametrize(
    ("name", "value", "spelt"),
    [
        ("MIGRAPHX_DISABLE_MLIR", True, "1"),
        ("MIGRAPHX_DISABLE_MLIR", 1, "1"),
        ("MIGRAPHX_DISABLE_MLIR", "true", "1"),
        # What is off is as if it were not there: the key is that of a manifest which never names it.
        ("MIGRAPHX_DISABLE_MLIR", False, None),
        ("MIGRAPHX_NSTREAMS", 4, "4"),
        ("MIGRAPHX_NSTREAMS", "04", "4"),
        ("MIGRAPHX_SPLIT_REDUCE_SIZE", -1, "-1"),
        ("MIGRAPHX_MLIR_USE_SPECIFIC_OPS", "~fused,dot", "~fused,dot"),
        ("MIOPEN_DEBUG_CONV_IMPLICIT_GEMM", False, "0"),
        ("MIOPEN_DEBUG_FIND_ONLY_SOLVER", "ConvAsm1x1U", "ConvAsm1x1U"),
        ("HIPBLASLT_TUNING_OVERRIDE_FILE", "sha256:" + "a" * 64, "sha256:" + "a" * 64),
    ],
)
def test_a_value_of_a_variable_has_one_spelling(name: str, value: Any, spelt: str | None) -> None:
    assert MIGRAPHX.resolve_env({name: value}) == ({name: spelt} if spelt else {})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MIGRAPHX_DISABLE_MLIR", "maybe"),
        ("MIGRAPHX_NSTREAMS", "two"),
        ("MIGRAPHX_NSTREAMS", True),
        ("MIGRAPHX_NSTREAMS", 0),
        ("MIGRAPHX_GPU_OPTIMIZE", "3 -include /etc/passwd"),
        ("MIGRAPHX_MLIR_USE_SPECIFIC_OPS", "everything"),
        ("MIOPEN_DEBUG_FIND_ONLY_SOLVER", "../../secret"),
        ("MIOPEN_DEBUG_FIND_ONLY_SOLVER", "a b"),
        ("HIPBLASLT_TUNING_OVERRIDE_FILE", "/etc/passwd"),
    ],
)
def test_a_value_that_a_variable_cannot_have_is_refused(name: str, value: Any) -> None:
    """A number that is none makes MIGraphX throw; what looks like a path could name a file of the worker."""
    with pytest.raises(ValueError, match=name):
        MIGRAPHX.resolve_env({name: value})


def test_every_feature_that_is_asked_for_has_a_release_and_a_description() -> None:
    options = [option for table in (MIGRAPHX.options, *MIGRAPHX.quantization.values()) for option in table.values()]
    wanted = {option.feature for option in options if option.feature}
    wanted |= {name for names in MIGRAPHX.needs.values() for name in names}
    assert wanted == set(MIGRAPHX.features)
    assert wanted <= set(FEATURES)


def test_options_that_came_later_are_not_in_the_spec_while_they_have_their_default() -> None:
    first = {"offload_copy": True, "fast_math": True, "nhwc": True, "max_loop_iterations": 10}
    assert MIGRAPHX.resolved("native", {}, "gfx942")[0] == first
    assert (
        MIGRAPHX.resolved("native", {"use_debug_symbols": False, "limit_max_iterations": 65535}, "gfx942")[0] == first
    )
    assert MIGRAPHX.resolved("native", {"use_debug_symbols": True}, "gfx942")[0] == {**first, "use_debug_symbols": True}
    assert filled(MIGRAPHX.options_of("gfx942"), first)["limit_max_iterations"] == 65535
    assert MIGRAPHX.resolved("int8-fp16", {}, "")[1] == {}
    assert MIGRAPHX.resolved("fp16", {"fp16_operators": ["dot", "convolution", "dot"]}, "")[1] == {
        "fp16_operators": ("convolution", "dot")
    }


@pytest.mark.parametrize(
    ("device", "precision", "parts"),
    [
        ("gfx90a", "fp8-fp16", ("fp8",)),
        ("gfx942", "fp8-fp16", ()),
        ("gfx950", "fp8", ()),
        ("gfx1201", "fp8", ()),
        ("gfx1100", "fp8-bf16", ("fp8",)),
        ("gfx1030", "bf16", ("bf16",)),
        ("gfx1030", "int8-fp16", ()),
        ("gfx1100", "bf16", ()),
        ("cpu", "int8-fp16", ("int8", "fp16")),
        ("ref", "fp8-bf16", ()),
    ],
)
def test_what_a_device_computes_in_a_wider_type_is_known(device: str, precision: str, parts: tuple[str, ...]) -> None:
    assert MIGRAPHX.emulates(device, precision) == parts


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_onnx_runtime_widens_weights_of_bf16(device: str) -> None:
    known = compilers()["onnxruntime"]
    assert known.emulates(device, "bf16") == ("bf16",)
    assert {part for each in known.device(device).precisions for part in known.emulates(device, each)} == {"bf16"}


# --- the runner ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(RUNNER.glob("*.py")), ids=lambda path: path.name)
def test_runner_is_python_3_10_and_imports_nothing_else_of_the_farm(path: Path) -> None:
    """ROCm ships its module for the system's Python, which need not see the farm."""
    tree = ast.parse(path.read_text(), feature_version=(3, 10))
    allowed = set(sys.stdlib_module_names) | {"numpy", "onnx", "onnxruntime", "ml_dtypes", "google", "migraphx"}
    if path.name == "convert.py":
        allowed |= {"torch", "tensorflow", "tf2onnx"}
    if path.name in ("documents.py", "protocol.py"):  # For the type checker, and for the farm.
        allowed |= {"typing_extensions", "pydantic", "pydantic_core"}
    allowed -= {"tomllib"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            assert {alias.name.split(".")[0] for alias in node.names} <= allowed
        elif isinstance(node, ast.ImportFrom) and not node.level:
            assert str(node.module).split(".")[0] in allowed
        elif isinstance(node, ast.ImportFrom) and path.name != "documents.py":
            checked = any(isinstance(each, ast.If) and node in each.body for each in tree.body)
            assert node.module not in ("documents",) or checked


def test_no_process_of_several_threads_waits_for_any_child() -> None:
    """In a worker that would take the end of another attempt's child from the thread that waits for it."""
    waiting = [path.name for path in (ROOT / "farm").rglob("*.py") if "waitpid(-1" in path.read_text()]
    assert sorted(waiting) == ["launcher.py", "server_guard.py"]
    assert "reap" not in "".join(path.read_text() for path in (ROOT / "farm/compiling").glob("*.py"))


def test_the_launcher_imports_nothing_heavy() -> None:
    """The child forks before numpy or a compiler is imported."""
    for name in ("child.py", "launcher.py", "seal.py", "protocol.py", "__init__.py"):
        tree = ast.parse((RUNNER / name).read_text())
        top = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        names = {alias.name for node in top if isinstance(node, ast.Import) for alias in node.names}
        assert not names & {"numpy", "onnx", "pathlib", "subprocess"}


def test_generated_samples_depend_only_on_seed_and_name() -> None:
    inputs = {"x": {"dtype": "float32", "shape": [2, 3]}, "i": {"dtype": "int64", "shape": [2]}}
    source = {"generate": 8, "seed": 3, "ranges": {"x": {"range": [0, 1]}, "i": {"value": 7}}}
    first = make_samples(source, {name: dict(spec) for name, spec in inputs.items()}, 2, what="samples")
    again = make_samples(source, {"x": dict(inputs["x"])}, 2, what="samples")
    assert len(first) == 4
    assert (first[0]["x"] == again[0]["x"]).all()
    assert first[0]["x"].min() >= 0
    assert set(first[0]["i"]) == {7}
    assert first.distinct({"x": {"batch_axis": 0}, "i": {"batch_axis": 0}}) == 8


def test_the_page_of_the_cache_key_lists_the_younger_options() -> None:
    page = (RUNNER.parents[1] / "docs" / "cache-key.md").read_text()
    listed = page.partition("A **younger option**")[2].partition("\n\n")[0]
    younger = {
        name
        for compiler in compilers().values()
        for table in (compiler.options, *compiler.quantization.values())
        for name, option in table.items()
        if option.newer
    }
    assert younger
    assert {name for name in younger if f"`{name}`" not in listed} == set()
