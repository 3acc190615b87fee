"""Hostile models in the children of real compilers: refused before a compiler opens a file, and no worker is harmed."""

from __future__ import annotations

import base64
import os
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pytest

from farm.compiling.child_process import Seal, run_child
from farm.compiling.failures import ChildLimits, classify
from farm.jobs.state import FailureKind
from farm.runner.onnx_models import BadModel, check_onnx
from farm.targets.compilers import compilers, filled
from tests.chaos.report import Fault
from tests.fuzz.readers import READERS
from tests.fuzz.run import broken, try_readers
from tests.support.compiling import search
from tests.support.hostile_models import CANARY, ESCAPES, escape, malformed, malformed_programs, model

T = TypeVar("T")
PROMISED, HANGS = 30.0, 300.0
"""Seconds that no child takes on a machine that does nothing else, and after which one counts as hanging on any."""
REFUSALS = {FailureKind.BAD_MODEL, FailureKind.UNSUPPORTED_OPERATOR}


def both_compilers(fault: str) -> list[Any]:
    """Both, each with a row of its own in the report."""
    on_migraphx = [pytest.mark.migraphx, pytest.mark.fault(f"{fault}-migraphx")]
    return [
        pytest.param("onnxruntime", "cpu", marks=pytest.mark.fault(fault)),
        pytest.param("migraphx", "ref", marks=on_migraphx),
    ]


class Answer(NamedTuple):
    """How a child ended: the failure's kind, all that it said, its seconds, and the files that it made."""

    kind: FailureKind | None
    said: str
    seconds: float
    made: bytes


def ask(folder: Path, model: Path, compiler: str, device: str, **request: Any) -> Answer:
    """Have a sealed child compile a model, as an attempt does."""
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
            "model": {"path": str(model), "format": "onnx", "names": ["y"]},
            "inputs": {"x": {"dtype": "float32", "shape": [1, 3]}},
            "batch": None,
            "options": filled(compilers()[compiler].options_of(device), {}),
            "precision": "fp32",
            "quantization": {},
            "tuning": {"mode": "off"},
            "calibration": None,
            "program": str(folder / "made" / "program"),
            **request,
        },
        log_path=log,
        folder=folder,
        limits=ChildLimits(time=HANGS, memory=4 << 30),
        seal=Seal(read=[model.parent], write=[folder / "made"]),
    )
    failure = classify(end)
    said = f"{failure}{end.result}{log.read_text(errors='replace')}"
    made = b"".join(file.read_bytes() for file in (folder / "made").rglob("*") if file.is_file())
    return Answer(failure.kind if failure else None, said, time.monotonic() - start, made)


def longest(folder: Path, compiler: str, device: str) -> float:
    """Seconds that a child may take: as promised, or as many as twenty that compile a sound model here and now."""
    folder.mkdir()
    sound = folder / "sound.onnx"
    sound.write_bytes(model().SerializeToString())
    answer = ask(folder, sound, compiler, device)
    assert answer.kind is None, answer.said[:500]
    return max(PROMISED, 20 * answer.seconds)


def ask_all(cases: Iterable[T], folder: Path, ask_one: Callable[[T, Path], Answer]) -> Iterator[tuple[T, Answer]]:
    """Ask a child for each case, as many at once as there are cores, each in a folder of its own."""

    def in_folder(numbered: tuple[int, T]) -> tuple[T, Answer]:
        number, case = numbered
        own = folder / str(number)
        own.mkdir()
        answer = ask_one(case, own)
        shutil.rmtree(own)
        return case, answer

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield from pool.map(in_folder, enumerate(cases))


@pytest.mark.parametrize(("compiler", "device"), both_compilers("20"))
def test_malformed_models_in_a_compilers_child(fault: Fault, tmp_path: Path, compiler: str, device: str) -> None:
    """What the check refuses is refused there with the same kind; what it lets through ends in a failure of its own."""
    corpus = list(malformed(mutations=fault.count.mutations))
    random.Random(1).shuffle(corpus)

    def compile_one(case: tuple[str, bytes, str], folder: Path) -> Answer:
        name, content, words = case
        path = folder / "model" / "model.onnx"
        path.parent.mkdir()
        path.write_bytes(content)
        try:
            check_onnx(path)
            sound = True
        except BadModel:
            sound = False
        answer = ask(folder, path, compiler, device)
        assert sound or answer.kind in REFUSALS, (name, answer.said[:500])
        assert words in answer.said, name
        assert answer.kind not in (FailureKind.TIME_LIMIT, FailureKind.INTERNAL), (name, answer.said[:500])
        return answer

    before = longest(tmp_path / "before", compiler, device)
    answers = [answer for _, answer in ask_all(islice(corpus, fault.count.models), tmp_path, compile_one)]
    slowest = max(answer.seconds for answer in answers)
    fault.measured(**Counter(answer.kind or "compiled" for answer in answers), slowest=slowest)
    assert slowest < max(before, longest(tmp_path / "after", compiler, device))


@pytest.mark.fault("22-bytes")
def test_damaged_bytes_in_every_reader(fault: Fault, tmp_path: Path) -> None:
    """What `tests/unit/test_foreign_bytes.py` tries a little of, with other inputs each time."""
    seed = random.randrange(2**32)
    results = try_readers(tmp_path, examples=100, seconds=fault.count.seconds / len(READERS), seed=seed)
    fault.measured(seed=seed, inputs=sum(result.get("inputs", 0) for result in results))
    kept = {name: base64.b64encode((tmp_path / name).read_bytes()[:4096]).decode() for name in broken(results)}
    assert not broken(results), kept


@pytest.mark.fault("20-programs")
@pytest.mark.migraphx
def test_damaged_programs_in_migraphxs_child(fault: Fault, tmp_path: Path) -> None:
    """A program is loaded to be measured; damage ends as a failure, and where ours reads it, as bad_model."""
    (tmp_path / "sound").mkdir()
    corpus = list(malformed_programs(tmp_path / "sound", mutations=fault.count.programs))
    random.Random(1).shuffle(corpus)

    def load_one(case: tuple[str, bytes], folder: Path) -> Answer:
        name, content = case
        program = folder / "model" / f"program{'.json' if '.json' in name else '.mxr'}"
        program.parent.mkdir()
        program.write_bytes(content)
        part = {"compiler": "migraphx", "device": "ref", "program": str(program), "outputs": ["y"], "session": None,
                "inputs": {"x": {"dtype": "float32", "shape": [1, 3]}}, "batch": None, "options": {},
                "model": {"format": "onnx"}, "samples": {"generate": 1, "seed": 0, "ranges": {}}}  # fmt: skip
        bench = {"action": "bench", "programs": [part], "rounds": 1, "seconds": 0.1, "first": 1}
        return ask(folder, program.with_name("model.onnx"), "migraphx", "ref", **bench)

    before = longest(tmp_path / "before", "migraphx", "ref")
    kinds: Counter[str] = Counter()
    slowest, what = 0.0, ""
    for (name, _), answer in ask_all(corpus[: fault.count.programs], tmp_path, load_one):
        assert answer.kind is not None, name
        slowest, what = max((slowest, what), (answer.seconds, f"{name}: {answer.said[:300]}"))
        kinds[answer.kind] += 1
    fault.measured(**kinds, slowest=slowest)
    assert slowest < max(before, longest(tmp_path / "after", "migraphx", "ref")), what


@pytest.mark.parametrize(("compiler", "device"), both_compilers("21"))
def test_escapes_in_a_compilers_child(fault: Fault, tmp_path: Path, compiler: str, device: str) -> None:
    """Refused before the compiler is imported, and the secret is in no program, log or answer."""
    names = random.Random(1).sample(sorted(ESCAPES), min(fault.count.escapes, len(ESCAPES)))

    def compile_one(name: str, folder: Path) -> Answer:
        return ask(folder, escape(name, folder), compiler, device)

    for name, answer in ask_all(names, tmp_path, compile_one):
        assert answer.kind is FailureKind.BAD_MODEL, (name, answer.said[:500])
        assert CANARY not in answer.made + answer.said.encode(), name
    fault.measured(refused=len(names))
