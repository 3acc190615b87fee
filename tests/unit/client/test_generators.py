"""A user's own function makes samples where the manifest is submitted; what it does wrong is said with its place."""

from __future__ import annotations

import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
import pytest

from farm.client import made_data
from farm.client.authoring import lint
from farm.client.freezing import freeze
from farm.errors import ManifestError
from tests.unit.client.test_freezing import save_net, write_text

ENTRY = """\
source: {path: net.onnx}
inputs: {x: {shape: [batch, 4]}}
batches: [2]
precisions: [int8]
calibration: {generator: "%s"}"""


def submitted(folder: Path, code: str, function: str = "calib:samples") -> Any:
    """Freeze a manifest whose calibration data comes from `code`, a module in the same folder."""
    save_net(folder / "net.onnx")
    (folder / "calib.py").write_text("import numpy as np\n" + dedent(code))
    write_text(folder, ENTRY % function)
    return freeze(folder / "farm.yaml", cache=folder / "cache")


def refusal(folder: Path, code: str, function: str = "calib:samples") -> str:
    with pytest.raises(ManifestError) as caught:
        submitted(folder, code, function)
    assert caught.value.problems[0].line == 10
    return str(caught.value)


GOOD = """
    from helper import COUNT

    def samples():
        for number in range(COUNT):
            yield {"x": np.full((1, 4), number, dtype=np.float32)}
        yield {"x": np.arange(4, dtype=np.float32)}
"""


def test_what_a_function_yields_becomes_a_blob_that_the_key_names(tmp_path: Path) -> None:
    """A module finds its neighbours; a sample may come with or without its batch axis; nothing stays behind."""
    (tmp_path / "helper.py").write_text("COUNT = 3")
    known, path = set(sys.modules), list(sys.path)
    frozen = submitted(tmp_path, GOOD)
    assert sys.path == path
    assert not {"calib", "helper"} & (set(sys.modules) - known)
    data = frozen.submission["data"]["net0/calibration"]
    assert data["arrays"] == {"x": {"dtype": "float32", "shape": [4, 4]}}
    with np.load(frozen.files[data["digest"]]) as archive:
        np.testing.assert_array_equal(archive["x"][:, 0], [0, 1, 2, 0])
        np.testing.assert_array_equal(archive["x"][3], [0, 1, 2, 3])
    assert [entry.suffix for entry in (tmp_path / "cache" / "data").iterdir()] == [".npz"]
    (tmp_path / "helper.py").write_text("COUNT = 4")
    other = submitted(tmp_path, GOOD).submission["data"]["net0/calibration"]
    assert other["digest"] != data["digest"]


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (
            "def samples():\n    yield {'x': np.zeros((1, 4), np.float32)}\n    raise RuntimeError('disk gone')",
            "calib:samples, sample 1: RuntimeError: disk gone (calib.py, line 4)",
        ),
        ("def samples(): yield np.zeros(4)", "calib:samples, sample 0 is ndarray, not a dict"),
        ("def samples(): yield {'y': np.zeros(4)}", "sample 0: there is no array for input `x`"),
        (
            "def samples(): yield {'x': np.zeros((1, 4), np.float32), 'z': 1}",
            "calib:samples, sample 0: the model has no `z`",
        ),
        ("def samples(): yield {'x': np.zeros((1, 4))}", "input `x` is float64, the model wants float32"),
        ("def samples(): yield {'x': np.zeros((1, 5), np.float32)}", "has shape [1, 5], the model wants [batch, 4]"),
        ("def samples(): yield {'x': np.zeros((0, 4), np.float32)}", "input `x` is empty, its shape is [0, 4]"),
        ("def samples(): yield {'x': np.full((1, 4), np.nan, np.float32)}", "array `x` holds NaN"),
        ("def samples(): yield from ()", "calib:samples yields no sample"),
        ("def samples(): return None", "calib:samples, sample 0: TypeError"),
        ("def sample(): yield {}", "module `calib` has no function `samples`"),
        ("import no_such_library", "module `calib` cannot be imported: ModuleNotFoundError: No module named"),
        ("def samples(:", "module `calib` cannot be imported: SyntaxError"),
    ],
)
def test_what_goes_wrong_names_function_sample_and_input(code: str, message: str, tmp_path: Path) -> None:
    assert message in refusal(tmp_path, code)


def test_a_module_that_is_not_there_says_where_it_was_looked_for(tmp_path: Path) -> None:
    text = refusal(tmp_path, "", "no_such.calibration:samples")
    assert "there is no module `no_such.calibration`" in text
    assert str(tmp_path / "no_such" / "calibration.py") in text


def test_an_endless_generator_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    endless = "def samples():\n    while True: yield {'x': np.zeros((1, 4), np.float32)}"
    monkeypatch.setattr(made_data, "MAX_SAMPLES", 5)
    assert "calib:samples yields more than 5 samples" in refusal(tmp_path, endless)
    monkeypatch.setattr(made_data, "MAX_SAMPLES", 500)
    monkeypatch.setattr(made_data, "MAX_BYTES", 100)
    assert "calib:samples, sample 6: more than 100 bytes" in refusal(tmp_path, endless)


def test_lint_runs_nobodys_code(tmp_path: Path) -> None:
    save_net(tmp_path / "net.onnx")
    (tmp_path / "calib.py").write_text("raise SystemExit('run')")
    write_text(tmp_path, ENTRY % "calib:samples")
    assert lint(tmp_path / "farm.yaml") == []
