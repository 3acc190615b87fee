"""Programs of the real MIGraphX, read without it: what is read is what MIGraphX itself says about them."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from farm.runner.mxr import dtype_name, read
from tests.support.compiling import PNET, RNET, needs_target

pytestmark = pytest.mark.migraphx


def described(shape: Any) -> dict[str, Any]:
    return {"dtype": dtype_name(shape.type_string()), "shape": shape.lens(), "strides": shape.strides()}


def listed(program: Any) -> Counter[str]:
    """The operators of MIGraphX's own listing; its literals and parameters carry their content behind the name."""
    names = re.findall(r"^\S+ = (@?[\w:]+)", repr(program), re.MULTILINE)
    return Counter(re.sub(r"^(@param):.*", r"\1", name) for name in names)


@pytest.mark.parametrize("format", ["msgpack", "json"])
@pytest.mark.parametrize("target", ["", "ref", "cpu"])
@pytest.mark.parametrize(
    ("model", "inputs"), [(PNET, {"input_1": [1, 24, 24, 3]}), (RNET, {"input_2": [2, 24, 24, 3]})]
)
def test_the_file_says_what_migraphx_says(
    tmp_path: Path, model: Path, inputs: dict[str, list[int]], target: str, format: str
) -> None:
    import migraphx

    program = migraphx.parse_onnx(str(model), map_input_dims=inputs)
    if not hasattr(program, "get_main_module"):
        pytest.skip("this migraphx module lists no instructions: it is one over the C API")
    if target:
        needs_target(target)
        program.compile(migraphx.get_target(target))
    path = tmp_path / "net.mxr"
    migraphx.save(program, str(path), format=format)
    found = read(path)
    loaded = migraphx.load(str(path), format=format)
    assert (found["format"], found["size"], found["trailing"]) == (format, path.stat().st_size, 0)
    assert (found["compiled"], found["targets"]) == (loaded.is_compiled(), [target] if target else [])
    assert migraphx.__version__.startswith(found["migraphx_version"])
    there = {port.pop("name"): port for port in found["inputs"]}
    assert there == {name: described(shape) for name, shape in loaded.get_parameter_shapes().items()}
    assert found["outputs"] == [described(shape) for shape in loaded.get_output_shapes()]
    assert Counter(found["modules"]["main"]["operators"]) == listed(loaded)
    literals = [shape for name, shape in instructions(loaded) if name.endswith("literal")]
    assert sum(found["weights"].values()) == sum(shape.bytes() for shape in literals) > 1000


def instructions(program: Any) -> list[tuple[str, Any]]:
    return [(instruction.op().name(), instruction.shape()) for instruction in program.get_main_module()]
