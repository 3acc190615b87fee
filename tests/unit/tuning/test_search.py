"""Slices as a child described them: its words decide neither what is granted nor how much is counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from farm.compiling.children import StepEnded
from farm.tuning.search import Search

CUT: dict[str, Any] = {"path": "/w/slices/slice-0000.onnx", "signature": "s", "operations": 2, "count": 3, "inputs": {}}


@pytest.mark.parametrize(
    "path", ["/w/slices/slice-0000.onnx", "/home/ada/.ssh/slice-0000.onnx", "../../slice-0000.onnx"]
)
def test_a_slice_is_looked_for_where_the_child_was_to_write_it(path: str) -> None:
    assert Search._checked({**CUT, "path": path}, Path("/w/slices")) == CUT


@pytest.mark.parametrize("wrong", [{"path": 1}, {"operations": "x"}, {"count": 1 << 40}, {"count": 0}])
def test_a_slice_that_is_none_is_the_childs_failure(wrong: dict[str, Any]) -> None:
    with pytest.raises(StepEnded, match="named an unknown slice"):
        Search._checked({**CUT, **wrong}, Path("/w/slices"))
