"""ONNX's own operator cases through a compiler: compile, store, load from the file, run, compare.

    python -m tests.operators                                    every case, ONNX Runtime on the CPU
    python -m tests.operators --compiler migraphx --device ref   needs `import migraphx`
    python -m tests.operators --only 'test_conv*' --verbose

Each case ends as one of: pass; unsupported (the compiler does not have the operator or type); refused (another
failure, with its kind); different (it ran, and the outputs are not those expected); crash (it killed its child).
Cases with random outputs are different by nature. Many cases share a child, since its start is what costs; a
case that kills it is counted, and the next child goes on behind it.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

from farm.compiling.child_process import run_child
from farm.compiling.failures import NO_LIMITS, ChildEnd, ChildLimits, EndedBy, classify
from farm.jobs.state import FailureKind
from farm.runner.samples import save_runs
from farm.targets.compilers import compilers
from tests.support.compiling import search

SCRIPT = Path(__file__).with_name("child.py")
TOLERANCE = {"float16": 1e-2, "bfloat16": 5e-2}
CASE_SECONDS = 60.0


def main() -> int:
    """Run the cases and print how they ended; 0 unless one killed its child."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compiler", default="onnxruntime", choices=sorted(compilers()))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", default="*", help="pattern of case names")
    parser.add_argument("--batch", type=int, default=200, help="cases per child")
    parser.add_argument("--verbose", action="store_true", help="print every case that does not pass")
    parser.add_argument("--json", type=Path, help="write how each case ended to this file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        cases = collect(Path(folder), arguments.only)
        ends = run(cases, Path(folder), arguments.compiler, arguments.device, arguments.batch)
    for name, (end, message) in ends.items():
        if arguments.verbose and end != "pass":
            print(f"{end:12} {name}: {message}")
    if arguments.json:
        arguments.json.write_text(json.dumps(ends, indent=1))
    counts = Counter(end for end, _ in ends.values())
    print(f"{arguments.compiler}/{arguments.device}: {len(ends)} cases: ", end="")
    print(", ".join(f"{count} {end}" for end, count in counts.most_common()))
    return 1 if counts["crash"] else 0


def collect(folder: Path, pattern: str) -> list[dict[str, Any]]:
    """Write model and reference of every case and return the requests for them."""
    import onnx
    import onnx.numpy_helper
    from onnx.backend.test.case.node import collect_testcases

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = [case for case in collect_testcases(None) if fnmatch.fnmatch(case.name, pattern)]
    return [request for case in found for request in requests(case, folder / case.name, onnx)]


def requests(case: Any, folder: Path, onnx: Any) -> list[dict[str, Any]]:
    """Return the requests of one case; none where its data is not of arrays (sequences, optionals)."""
    folder.mkdir()
    onnx.save_model(case.model, folder / "model.onnx")
    to_array = onnx.numpy_helper.to_array
    inputs, outputs = (
        {
            value.name: to_array(array) if isinstance(array, onnx.TensorProto) else array
            for value, array in zip(values, arrays, strict=False)
        }
        for values, arrays in zip((case.model.graph.input, case.model.graph.output), case.data_sets[0], strict=True)
    )
    if not all(hasattr(array, "dtype") for array in (*inputs.values(), *outputs.values())):
        inputs, outputs = {}, {}
    meta = {"batch": 1, "samples": 1, "minimum": 1, "origin": {}}
    save_runs(str(folder / "reference.npz"), [inputs], [outputs], meta)
    model = {
        "path": str(folder / "model.onnx"),
        "format": "onnx",
        "names": [value.name for value in case.model.graph.output],
    }
    program = str(folder / "program")
    dtypes = {str(array.dtype) for array in (*inputs.values(), *outputs.values())}
    return [
        {
            "name": case.name,
            "tolerance": max([1e-3, *(TOLERANCE.get(dtype, 0) for dtype in dtypes)]),
            "compile": {
                "model": model,
                "inputs": {name: _described(array) for name, array in inputs.items()},
                "batch": None,
                "precision": "native",
                "quantization": {},
                "tuning": {"mode": "off"},
                "calibration": None,
                "program": program,
            },
            "evaluate": {
                "model": model,
                "program": program,
                "reference": str(folder / "reference.npz"),
                "tolerance": 1e-3,
                "equal": 1.0,
                "measure_seconds": 0,
                "sample": None,
            },
        }
    ]


def _described(array: Any) -> dict[str, Any]:
    dtype = "string" if array.dtype.kind in "OU" else str(array.dtype)
    return {"dtype": dtype.replace("float8_", "float8"), "shape": list(array.shape)}


def run(
    cases: list[dict[str, Any]], folder: Path, compiler: str, device: str, batch: int
) -> dict[str, tuple[str, str]]:
    """Return how each case ended, with a sentence where it did not pass."""
    tolerances = {case["name"]: case["tolerance"] for case in cases}
    ends: dict[str, tuple[str, str]] = {}
    left = list(cases)
    while left:
        lot = left[:batch]
        started: list[str] = []

        def tell(message: Any, started: list[str] = started) -> None:
            answer = json.loads(message["detail"])
            name = answer["case"]
            if "found" in answer:
                ends[name] = compared(answer["found"], tolerances[name])
            elif "error" in answer:
                ends[name] = refused(answer["error"])
            else:
                started.append(name)

        end = run_child(
            {
                "compiler": compiler,
                "device": device,
                "threads": 1,
                "search": search(compiler),
                "options": compilers()[compiler].resolved("native", {}, device)[0],
                "cases": lot,
            },
            log_path=folder / "log.txt",
            limits=ChildLimits(memory=4 << 30, hang=CASE_SECONDS),
            on_message=tell,
            script=SCRIPT,
        )
        failure = classify(end)
        if failure:
            last = started[-1] if started else lot[0]["name"]
            ends.setdefault(last, ("crash", failure.message))
        left = [case for case in left if case["name"] not in ends]
        print(f"\r{len(ends)} of {len(cases)}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return ends


def compared(found: dict[str, Any], tolerance: float) -> tuple[str, str]:
    """Return how a case ended that ran."""
    if found["nonfinite"]:
        return "different", f"not finite: {', '.join(found['nonfinite'])}"
    worst = {name: error for name, error in found["errors"].items() if error > tolerance}
    worst |= {name: share for name, share in found["equal"].items() if share < 1}
    return ("different", str(worst)) if worst else ("pass", "")


def refused(error: dict[str, str]) -> tuple[str, str]:
    """Return how a case ended that was refused."""
    failure = classify(ChildEnd(by=EndedBy.ITSELF, limits=NO_LIMITS, error=error))
    assert failure is not None
    if failure.kind is FailureKind.UNSUPPORTED_OPERATOR:
        return "unsupported", failure.message
    return "refused", f"{failure.kind}: {failure.message}"


if __name__ == "__main__":
    sys.exit(main())
