"""The table of compilers, and that the runner stays what it must be."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

from farm.compilers import (
    COMPILERS,
    MIGRAPHX,
    ONNXRUNTIME,
    canonical_precision,
    default_equal_share,
    default_tolerance,
)
from farm.jobs.state import FailureKind
from farm.runner.samples import make_samples

RUNNER = Path(__file__).parents[2] / "farm" / "runner"


@pytest.mark.parametrize(
    ("given", "canonical"),
    [
        ("int8+fp16", "int8-fp16"),
        ("fp16+int8", "int8-fp16"),
        ("bf16-fp8", "fp8-bf16"),
        ("FP32", "fp32"),
        ("native", "native"),
    ],
)
def test_precisions_have_one_spelling(given: str, canonical: str) -> None:
    assert canonical_precision(given) == canonical


def test_every_precision_has_a_tolerance() -> None:
    for compiler in COMPILERS.values():
        for kind in compiler.devices:
            assert all(default_tolerance(precision) > 0 for precision in kind.precisions)
    assert default_tolerance("int8-fp16") == 2e-1
    assert default_equal_share("fp32") == 1.0


def test_devices_are_served_by_kind() -> None:
    assert MIGRAPHX.device("gfx942") is MIGRAPHX.device("gfx1100")
    assert MIGRAPHX.precisions("ref")
    assert ONNXRUNTIME.device("gfx942") is None
    assert ONNXRUNTIME.precisions("ref") == ()


def test_defaults_are_filled_in_and_mistakes_named() -> None:
    assert ONNXRUNTIME.resolve_options({}) == {"level": "standard"}
    assert ONNXRUNTIME.resolve_quantization("int8", {"per_channel": True})["per_channel"] is True
    with pytest.raises(ValueError, match=r"`level` must be one of standard, tuned.*no onnxruntime option `levl`"):
        ONNXRUNTIME.resolve_options({"level": "turbo", "levl": 1})
    with pytest.raises(ValueError, match="must be true or false, not 1"):
        MIGRAPHX.resolve_options({"fast_math": 1})


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
    refused = ["LD_PRELOAD", "MIGRAPHX_GPU_DUMP_SRC", "MIGRAPHX_GPU_HIP_FLAGS", "MIGRAPHX_PROBLEM_CACHE"]
    assert "MIGRAPHX_DISABLE_MLIR" in MIGRAPHX.env
    assert MIGRAPHX.env.isdisjoint(refused)


# --- the runner ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(RUNNER.glob("*.py")), ids=lambda path: path.name)
def test_runner_is_python_3_10_and_imports_nothing_else_of_the_farm(path: Path) -> None:
    """ROCm ships its module for the system's Python, which need not see the farm."""
    tree = ast.parse(path.read_text(), feature_version=(3, 10))
    allowed = set(sys.stdlib_module_names) | {"numpy", "onnx", "onnxruntime", "ml_dtypes", "google", "migraphx"}
    allowed -= {"tomllib"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            assert {alias.name.split(".")[0] for alias in node.names} <= allowed
        elif isinstance(node, ast.ImportFrom) and not node.level:
            assert str(node.module).split(".")[0] in allowed


def test_guard_imports_nothing_heavy() -> None:
    """The child forks before numpy or a compiler is imported."""
    for name in ("child.py", "guard.py", "protocol.py", "__init__.py"):
        tree = ast.parse((RUNNER / name).read_text())
        top = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        names = {alias.name for node in top if isinstance(node, ast.Import) for alias in node.names}
        assert not names & {"numpy", "onnx", "pathlib", "subprocess"}


def test_generated_samples_depend_only_on_seed_and_name() -> None:
    inputs = {"x": {"dtype": "float32", "shape": [2, 3]}, "i": {"dtype": "int64", "shape": [2]}}
    source = {"generate": 8, "seed": 3, "ranges": {"x": {"range": [0, 1]}, "i": {"value": 7}}}
    first = make_samples(source, {name: dict(spec) for name, spec in inputs.items()}, 2, what="samples")
    again = make_samples(source, {"x": dict(inputs["x"])}, 2, what="samples")
    assert len(first.runs) == 4
    assert (first.runs[0]["x"] == again.runs[0]["x"]).all()
    assert first.runs[0]["x"].min() >= 0
    assert set(first.runs[0]["i"]) == {7}
    assert first.distinct({"x": {"batch_axis": 0}, "i": {"batch_axis": 0}}) == 8


def test_every_failure_kind_is_documented_as_it_is() -> None:
    """The page names each kind, whose fault it is and how many attempts it costs."""
    page = (RUNNER.parents[1] / "docs" / "failure-kinds.md").read_text()
    for kind in FailureKind:
        assert f"| `{kind}` | {kind.policy.fault} | {kind.policy.attempts} |" in page
