"""Hostile models in the children of real compilers: refused before a compiler opens a file, and no worker is harmed."""

from __future__ import annotations

import random
import time
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from farm.child import Limits, Seal, classify, run_child
from farm.compilers import COMPILERS
from farm.jobs.state import FailureKind
from farm.runner.onnx_check import BadModel, check_onnx
from tests.chaos.report import Fault
from tests.hostile_models import CANARY, ESCAPES, escape, malformed, malformed_programs

REFUSALS = {FailureKind.BAD_MODEL, FailureKind.UNSUPPORTED_OPERATOR}


def compilers(fault: str) -> list[Any]:
    """Both, each with a row of its own in the report."""
    on_migraphx = [pytest.mark.migraphx, pytest.mark.fault(f"{fault}-migraphx")]
    return [
        pytest.param("onnxruntime", "cpu", marks=pytest.mark.fault(fault)),
        pytest.param("migraphx", "ref", marks=on_migraphx),
    ]


def search(compiler: str) -> list[str]:
    if compiler != "migraphx":
        return []
    import migraphx

    return [str(Path(migraphx.__file__).parent)]


def ask(folder: Path, model: Path, compiler: str, device: str, **request: Any) -> tuple[FailureKind | None, str, float]:
    """Have a sealed child compile a model, as an attempt does; return the failure's kind, all it said, its seconds."""
    (folder / "made").mkdir(exist_ok=True)
    log = folder / "log.txt"
    log.unlink(missing_ok=True)
    start = time.monotonic()
    end = run_child(
        {
            "action": "compile",
            "compiler": compiler,
            "device": device,
            "threads": 1,
            "search": search(compiler),
            "model": {"path": str(model), "format": "onnx", "outputs": []},
            "inputs": {"x": {"dtype": "float32", "shape": [1, 3]}},
            "batch": None,
            "options": COMPILERS[compiler].filled({}),
            "precision": "fp32",
            "quantization": {},
            "tuning": {"mode": "off"},
            "calibration": None,
            "program": str(folder / "made" / "program"),
            **request,
        },
        log_path=log,
        folder=folder,
        limits=Limits(time=30, memory=4 << 30),
        seal=Seal(read=[model.parent], write=[folder / "made"]),
    )
    failure = classify(end)
    said = f"{failure}{end.result}{log.read_text(errors='replace')}"
    return failure.kind if failure else None, said, time.monotonic() - start


@pytest.mark.parametrize(("compiler", "device"), compilers("20"))
def test_malformed_models_in_a_compilers_child(fault: Fault, tmp_path: Path, compiler: str, device: str) -> None:
    """What the check refuses is refused there with the same kind; what it lets through ends in a failure of its own."""
    corpus = list(malformed(mutations=fault.count.mutations))
    random.Random(1).shuffle(corpus)
    path = tmp_path / "model" / "model.onnx"
    path.parent.mkdir()
    kinds: Counter[str] = Counter()
    slowest = 0.0
    for name, content, words in islice(corpus, fault.count.models):
        path.write_bytes(content)
        try:
            check_onnx(path)
            sound = True
        except BadModel:
            sound = False
        kind, said, seconds = ask(tmp_path, path, compiler, device)
        slowest = max(slowest, seconds)
        kinds[kind or "compiled"] += 1
        assert sound or kind in REFUSALS, (name, said[:500])
        assert words in said, name
        assert kind not in (FailureKind.TIME_LIMIT, FailureKind.INTERNAL), (name, said[:500])
    fault.measured(**kinds, slowest=slowest)
    assert slowest < 30


@pytest.mark.fault("20-programs")
@pytest.mark.migraphx
def test_damaged_programs_in_migraphxs_child(fault: Fault, tmp_path: Path) -> None:
    """A program is loaded to be measured; damage ends as a failure, and where ours reads it, as bad_model."""
    model = tmp_path / "model" / "model.onnx"
    model.parent.mkdir()
    kinds: Counter[str] = Counter()
    corpus = list(malformed_programs(tmp_path, mutations=fault.count.programs))
    random.Random(1).shuffle(corpus)
    for name, content in corpus[: fault.count.programs]:
        program = model.parent / f"program{'.json' if '.json' in name else '.mxr'}"
        program.write_bytes(content)
        part = {"compiler": "migraphx", "device": "ref", "program": str(program), "outputs": ["y"], "session": None,
                "inputs": {"x": {"dtype": "float32", "shape": [1, 3]}}, "batch": None, "options": {},
                "model": {"format": "onnx"}, "samples": {"generate": 1, "seed": 0, "ranges": {}}}  # fmt: skip
        kind, said, seconds = ask(
            tmp_path, model, "migraphx", "ref", action="bench", programs=[part], rounds=1, seconds=0.1, first=1
        )
        assert kind is not None, name
        assert seconds < 30, (name, said[:300])
        kinds[kind] += 1
    fault.measured(**kinds)


@pytest.mark.parametrize(("compiler", "device"), compilers("21"))
def test_escapes_in_a_compilers_child(fault: Fault, tmp_path: Path, compiler: str, device: str) -> None:
    """Refused before the compiler is imported, and the secret is in no program, log or answer."""
    names = random.Random(1).sample(sorted(ESCAPES), min(fault.count.escapes, len(ESCAPES)))
    for number, name in enumerate(names):
        folder = tmp_path / str(number)
        path = escape(name, folder)
        kind, said, _ = ask(folder, path, compiler, device)
        assert kind is FailureKind.BAD_MODEL, (name, said[:500])
        made = b"".join(file.read_bytes() for file in (folder / "made").rglob("*") if file.is_file())
        assert CANARY not in made + said.encode(), name
    fault.measured(refused=len(names))
