"""NVML's answers, recorded on real cards, and a stand-in for the binding (`pynvml`) that plays them.

`python -m tests.support.recorded_nvml > tests/support/nvml/NAME.json` records what the farm asks on a machine with
NVIDIA GPUs: it looks for GPUs and at their conditions, through a binding that writes every call and its answer down.
"""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from farm.compiling.attempt import Slot
from farm.extras.nvidia.driver import find
from farm.node.gpus import Machine, conditions
from tests.support.places import ROOT

FOLDER = ROOT / "tests" / "support" / "nvml"
_HANDLES = ("DeviceGetHandleBy", "DeviceGetMigDeviceHandle", "DeviceGetDeviceHandleFrom", "EventSetCreate")


class Refusal(Exception):
    """The stand-in's NVMLError."""

    def __init__(self, value: int) -> None:
        super().__init__(f"NVML error {value}")
        self.value = value


class RecordedNvml:
    """Stands in for pynvml, with answers `{call: answer}`; what was not recorded is not supported (3)."""

    NVMLError = Refusal

    def __init__(self, calls: dict[str, Any]) -> None:
        self.calls = copy.deepcopy(calls)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("nvml"):
            raise AttributeError(name)

        def call(*arguments: Any) -> Any:
            if name == "nvmlInit":
                return None
            answer = self.calls.get(_spelt(name, arguments), {"error": 3})
            if isinstance(answer, dict) and "error" in answer:
                raise Refusal(answer["error"])
            return _objects(answer)

        return call


def _objects(answer: Any) -> Any:
    match answer:
        case {"fields": fields}:
            return SimpleNamespace(**fields)
        case list():
            return [_objects(each) for each in answer]
        case _:
            return answer


def _spelt(name: str, arguments: Any) -> str:
    return f"{name.removeprefix('nvml')}({', '.join(map(str, arguments))})"


class RecordingNvml:
    """Passes calls on to the real binding and writes them down; handles become names."""

    def __init__(self, real: Any) -> None:
        self.real = real
        self.NVMLError = real.NVMLError
        self.calls: dict[str, Any] = {}
        self.handles: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        real = getattr(self.real, name)

        def call(*arguments: Any) -> Any:
            spelt = _spelt(name, arguments)
            try:
                answer = real(*[self.handles.get(each, each) if isinstance(each, str) else each for each in arguments])
            except self.real.NVMLError as error:
                self.calls[spelt] = {"error": error.value}
                raise
            if name.removeprefix("nvml").startswith(_HANDLES):
                # One card has one name, however it was asked for.
                known = next((key for key, each in self.handles.items() if self._same(each, answer)), "")
                handle = known or f"handle-{len(self.handles)}"
                self.handles[handle] = answer
                self.calls[spelt] = handle
                return handle
            self.calls[spelt] = _plain(answer)
            return answer

        return call

    def _same(self, one: Any, other: Any) -> bool:
        try:
            return bool(self.real.nvmlDeviceGetUUID(one) == self.real.nvmlDeviceGetUUID(other))
        except Exception:
            return False


def _plain(answer: Any) -> Any:
    if answer is None or isinstance(answer, int | float | str):
        return answer
    if isinstance(answer, bytes):
        return answer.decode()
    if isinstance(answer, list | tuple):
        return [_plain(each) for each in answer]
    names = [name for name, *_ in getattr(answer, "_fields_", ())] or list(vars(answer))
    found = {name: getattr(answer, name) for name in names}
    return {"fields": {name: _plain(value) for name, value in found.items() if isinstance(value, int | str | bytes)}}


class RecordedMachine(Machine):
    """A machine whose driver gives recorded answers; the device files of `cards` cards are below its root."""

    def __init__(self, root: Path, name: str, cards: int = 1, **environ: str) -> None:
        super().__init__(root, environ)
        self.binding = RecordedNvml(json.loads((FOLDER / f"{name}.json").read_text())["calls"])
        for device in ("nvidiactl", "nvidia-uvm", *(f"nvidia{number}" for number in range(cards))):
            path = root / "dev" / device
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()

    def nvml(self) -> Any:
        return self.binding


def record() -> dict[str, Any]:
    """Ask this machine what the farm asks, and return all calls with their answers."""
    import pynvml

    recording = RecordingNvml(pynvml)
    machine = Machine()
    machine.nvml = lambda: recording  # type: ignore[method-assign]
    gpus, notes = find(machine)
    found = [conditions(Slot(gpu.pin, maker="nvidia"), machine) for gpu in gpus]
    return {
        "calls": recording.calls,
        "gpus": [str(gpu) for gpu in gpus],
        "notes": list(map(str, notes)),
        "conditions": found,
    }


if __name__ == "__main__":
    json.dump(record(), sys.stdout, indent=1)
