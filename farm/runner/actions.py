"""Actions of a child that are the same for every compiler; each compiler has its own part in its module."""

from __future__ import annotations

import importlib
import os
import resource
import sys
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from .child import add_package
from .protocol import RequestFailed

if TYPE_CHECKING:
    from . import documents
    from .launcher import Messages
    from .measuring import Program


class CompilerModule(Protocol):
    """What each compiler's module offers."""

    RECIPE: int  # Its number in cache keys: it goes up when its conversion or quantization changes what comes out.

    def probe(self, request: documents.Request) -> documents.ProbeAnswer:
        """Return what is installed. Raises RequestFailed and ImportError if it cannot be used."""

    def compile(self, request: documents.Request, messages: Messages) -> documents.CompileAnswer:
        """Quantize, compile, save."""

    def tune(self, request: documents.Request, messages: Messages) -> documents.Answer:
        """Tune one slice into the databases of the request and the environment."""

    def load(self, request: documents.Request) -> Program:
        """Load a compiled program from its file."""

    def load_reference(self, request: documents.Request) -> Program:
        """Load the original model to make reference outputs with."""


_MODULES = {"onnxruntime": ".onnxruntime_compiler", "migraphx": ".migraphx_compiler", "onnx": ".onnx_evaluator"}
"""The onnx package's evaluator is a reference, and compiles nothing."""

_ADDED: dict[str, Sequence[str]] = {}
"""Modules that extensions add, by target (`onnxruntime/cuda`, a pattern): compilers, and devices of ONNX Runtime."""


def add_modules(modules: Mapping[str, Sequence[str]]) -> None:
    """Make modules known: `{target: [name, folder of its package]}`. Nothing of them is imported yet."""
    _ADDED.update(modules)


def find_module(compiler: str, device: str) -> Any:
    """Import the module that an extension adds for a compiler's device; None if there is none."""
    asked = f"{compiler}/{device}"
    name, folder = next((added for target, added in _ADDED.items() if fnmatchcase(asked, target)), ("", ""))
    package = name.rpartition(".")[0]
    if package and package not in sys.modules:
        add_package(package, folder)
    return importlib.import_module(name) if name else None


def run_action(request: documents.Request, messages: Messages) -> documents.Answer:
    """Do what a request asks for. Raises RequestFailed with the kind and sentence for the user."""
    os.environ.update(request.get("environment") or {})
    sys.path[:0] = [path for path in request.get("search") or () if path not in sys.path]
    add_modules(request.get("modules") or {})
    own = _probe, _check, _reference, _slice, _tune, _pack, _compile, _evaluate, _bench
    if "extension" in request:
        work = getattr(find_module(request["extension"], ""), request["action"])
    else:
        work = {each.__name__: each for each in own}[f"_{request['action']}"]
    found: documents.Answer = work(request, messages)
    return found


def compiler_module(request: documents.Request) -> CompilerModule:
    """Return the module of the request's compiler."""
    name = request["compiler"]
    if name in _MODULES:
        module: Any = importlib.import_module(_MODULES[name], __package__)
    else:
        module = find_module(name, request.get("device") or "")
    return module  # type: ignore[no-any-return]


def check_model(request: documents.Request) -> documents.CheckAnswer | None:
    """Check the request's model; None if this interpreter lacks onnx or protobuf (another child has checked it)."""
    from .onnx_models import check_onnx
    from .tf_check import check_tf

    model = request["model"]
    try:
        if model["format"] == "tf":
            return check_tf(model["path"], model.get("outputs") or ())
        return check_onnx(model["path"], alone=model.get("alone", False))
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("onnx", "google"):
            raise
        return None


def _probe(request: documents.Request, messages: Messages) -> documents.ProbeAnswer:
    try:
        return compiler_module(request).probe(request)
    except ImportError as error:
        return {"available": False, "reason": f"{sys.executable} cannot import {request['compiler']}: {error}"}
    except RequestFailed as failure:
        return {"available": False, "reason": failure.message, "fix": failure.detail}


def _check(request: documents.Request, messages: Messages) -> documents.CheckAnswer:
    found = check_model(request)
    if found is None:
        raise RequestFailed("internal", "models are checked by an interpreter that has onnx; this one has not")
    return found


def _pack(request: documents.Request, messages: Messages) -> documents.Answer:
    from .precisions import pack_weights

    check_model(request)
    pack_weights(request, messages)
    return {}


def _compile(request: documents.Request, messages: Messages) -> documents.CompileAnswer:
    check_model(request)
    _refuse_other_toolchain(request, messages)
    return compiler_module(request).compile(request, messages)


def _slice(request: documents.Request, messages: Messages) -> documents.SliceAnswer:
    from .slicing import write_slices

    messages.phase("tuning", 0.0, "cutting the model into slices")
    check_model(request)
    return write_slices(request["model"]["path"], request["inputs"], Path(request["slices"]))


def _refuse_other_toolchain(request: documents.Request, messages: Messages) -> None:
    """Compile nothing for a cache key that this process is not: what it is may have changed since its worker looked.

    Raises RequestFailed (`toolchain_mismatch`).
    """
    expected = request.get("expected")
    if not expected:
        return
    here = _probe({**request, "rocm": ""}, messages)
    if not here["available"]:
        raise RequestFailed("toolchain_mismatch", here["reason"], here.get("fix", ""))
    # The digest decides; the label may have the version of an installation that only the worker knows.
    same = here["toolchain"].rpartition("-")[2] == expected["toolchain"].rpartition("-")[2]
    differs = [] if same else [f"toolchain {here['toolchain']}, not {expected['toolchain']}"]
    recipe = compiler_module(request).RECIPE
    if expected["recipe"] != recipe:
        differs.append(f"recipe {recipe}, not {expected['recipe']}")
    for name, version in expected["libraries"].items():
        if here["libraries"].get(name) != version:
            differs.append(f"{name} {here['libraries'].get(name, 'missing')}, not {version}")
    if expected["cpu_family"] and here["cpu_family"] != expected["cpu_family"]:
        differs.append(f"CPU family {here['cpu_family']}, not {expected['cpu_family']}")
    if differs:
        message = f"what compiles here is not what the cache key says: {'; '.join(differs)}"
        raise RequestFailed("toolchain_mismatch", message, "start the worker again: then it looks at what is installed")


def _tune(request: documents.Request, messages: Messages) -> documents.Answer:
    _refuse_other_toolchain(request, messages)
    return compiler_module(request).tune(request, messages)


def _reference(request: documents.Request, messages: Messages) -> documents.Answer:
    from .samples import make_reference

    messages.phase("verifying", 0.0, "reference outputs")
    check_model(request)
    make_reference(request, messages, lambda: compiler_module(request).load_reference(request))
    return {}


def _evaluate(request: documents.Request, messages: Messages) -> documents.EvaluateAnswer:
    from .measuring import evaluate
    from .samples import load_runs, write_npz

    runs, references, meta = load_runs(request["reference"])
    if request.get("sample"):
        write_npz(request["sample"], {**references[0], **runs[0]})
    messages.phase("verifying", 0.0)
    with messages.alone():
        return evaluate(request, messages, compiler_module(request).load, runs, references, meta)


def _bench(request: documents.Request, messages: Messages) -> documents.BenchAnswer:
    from .measuring import bench

    _refuse_other_toolchain(request, messages)
    with messages.alone():
        programs = bench(request, messages, _load_any)
    return {"programs": programs, "peak_memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}


def _load_any(request: documents.Request) -> Program:
    module = compiler_module(request)
    if request["program"]:
        return module.load(request)
    if request["compiler"] in _MODULES:
        check_model(request)
    return module.load_reference(request)
