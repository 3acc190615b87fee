"""The environment of children: what of the worker's own they must not get."""

from __future__ import annotations

from pathlib import Path

import pytest

from farm.compiling.child_process import child_environment


def test_a_toolchain_does_not_load_libraries_of_another_migraphx(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MIGraphX loads a target that it lacks from any folder that the loader knows, whatever its version."""
    for name in ("new", "old", "more"):
        (tmp_path / name).mkdir()
    for name in ("new", "old"):
        (tmp_path / name / "libmigraphx.so").touch()
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{tmp_path / 'new'}:{tmp_path / 'more'}")

    def libraries(search: str) -> str:
        environment = child_environment(tmp_path, {"action": "probe", "search": [search]}, {})
        return environment["LD_LIBRARY_PATH"]

    assert libraries(str(tmp_path / "old")) == str(tmp_path / "more")
    assert libraries(str(tmp_path / "new")) == libraries("") == f"{tmp_path / 'new'}:{tmp_path / 'more'}"


def test_a_child_reports_its_use_to_nobody(tmp_path: Path) -> None:
    """ONNX Runtime does as it is loaded, unless this is set."""
    environment = child_environment(tmp_path, {"action": "probe"}, {})
    assert environment["ORT_DISABLE_TELEMETRY"] == "1"
