"""What `farm reproduce` says of an attempt that it ran again."""

from __future__ import annotations

from typing import Any

import pytest

from farm.extras.reproduce.reproduction import report


@pytest.mark.parametrize(("shared", "said"), [(False, "latency    2 ms"), (True, "latency    2 ms shared")])
def test_a_speed_that_was_not_measured_alone_is_marked(shared: bool, said: str) -> None:
    found: dict[str, Any] = {
        **{"key": "k", "expected_key": "k", "toolchain": "t", "expected_toolchain": "t", "ended": None},
        "program": "net.onnx",
        "record": {"verification": None, "measurements": {"latency": {"median": 0.002}, "shared": shared}},
    }
    assert said in report({}, found)
