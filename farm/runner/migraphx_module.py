"""The installed MIGraphX: imports its module, and says which build it is, what it offers and why it cannot be used."""

from __future__ import annotations

import hashlib
import importlib
import json
import mmap
import operator
import os
import re
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from .protocol import RequestFailed, first_line

if TYPE_CHECKING:
    from .documents import ProbeAnswer, Request

_PARTS = re.compile(
    r"^lib(migraphx(?!_py|_c\.)|MIOpen|rocblas|hipblaslt|amdhip64|hiprtc(?!-builtins)|amd_comgr)[\w.+-]*\.so"
)
"""Libraries whose builds make up the toolchain; not the per-Python binding."""

_FUNCTIONS = (
    "autocast_fp8", "get_onnx_operators", "load_buffer", "quantize_bf16", "quantize_fp16", "quantize_fp8",
    "quantize_int8", "save_buffer", "to_gpu",
)  # fmt: skip
_KEYWORDS = {
    "parse_onnx": (
        "dim_params", "limit_max_iterations", "map_dyn_input_dims", "max_loop_iterations", "use_debug_symbols",
    ),
    "parse_onnx_buffer": ("external_data_path",),
    "program.compile": ("exhaustive_tune",),
}  # fmt: skip
_VARIABLES = {"problem_cache": "MIGRAPHX_PROBLEM_CACHE"}
"""What MIGraphX may offer, by how it is found: functions, keywords of functions, variables that its libraries read.
`farm/targets/pools.py` says what each is for."""


def probe(request: Request) -> ProbeAnswer:
    """Return which MIGraphX is installed. Raises RequestFailed if none can be used."""
    migraphx = migraphx_module()
    targets, missing = [], {}
    for name in ("gpu", "cpu", "ref"):
        try:
            migraphx.get_target(name)
            targets.append(name)
        except RuntimeError as error:
            missing[name] = first_line(str(error))
    parts = sorted([*identity(path)] for path in _loaded_parts())
    version = str(getattr(migraphx, "__version__", "unknown"))
    short = ".".join(re.findall(r"\d+", version)[:2]) or "unknown"
    rocm = ".".join(request["rocm"].split(".")[:2]) if "gpu" in targets else ""
    label = f"rocm{rocm}-migraphx{short}" if rocm else f"migraphx{short}"
    digest = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:8]
    return {
        "available": bool(targets),
        "reason": "" if targets else f"no target loads: {missing}",
        "version": version,
        "label": label,
        "toolchain": f"{label}-{digest}",
        "libraries": {},
        "features": _features(migraphx),
        "targets": targets,
        "missing": missing,
        "cpu_family": "",
    }


def _features(migraphx: Any) -> list[str]:
    """Return what this MIGraphX offers of all that some release does; to be called once its targets are loaded."""
    libraries = [path for path in _loaded_parts() if "libmigraphx" in path]
    return sorted(
        [name for name in _FUNCTIONS if hasattr(migraphx, name)]
        + [name for function, names in _KEYWORDS.items() for name in names if takes(migraphx, function, name)]
        + [name for name, text in _VARIABLES.items() if any(_contains(path, text) for path in libraries)]
        # For an architecture that is not here: an older binding lacks the keyword.
        + ["gpu_arch"] * _works(lambda: migraphx.get_target("gpu", gpu_arch="gfx942"))
        + ["unpack_int4"] * _works(lambda: migraphx.op("unpack_int4"))
    )


def takes(migraphx: Any, function: str, keyword: str) -> bool:
    """Whether a function has a keyword; the binding writes each function's signature into its docstring."""
    try:
        signature = str(operator.attrgetter(function)(migraphx).__doc__)
    except AttributeError:
        return False
    return re.search(rf"\b{keyword}:", signature) is not None


def _contains(path: str, text: str) -> bool:
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:  # noqa: PTH123
        return data.find(text.encode()) >= 0


def _works(call: Callable[[], object]) -> bool:
    try:
        call()
    except (TypeError, RuntimeError):
        return False
    return True


def migraphx_module() -> Any:
    """Import the real MIGraphX.

    Raises RequestFailed (`toolchain_mismatch`): not there, for another Python, or a placeholder of that name.
    """
    try:
        migraphx = importlib.import_module("migraphx")
    except ImportError as error:
        others = _other_pythons()
        reason = f"cannot import migraphx: {first_line(str(error))}"
        raise RequestFailed("toolchain_mismatch", reason + others, _SET_PYTHON if others else "") from None
    if not hasattr(migraphx, "parse_onnx"):
        if not getattr(migraphx, "__file__", None) and (others := _other_pythons()):
            # The library's own folder: Python takes it for a package if the module is for another Python.
            raise RequestFailed("toolchain_mismatch", f"cannot import migraphx{others}", _SET_PYTHON)
        place = getattr(migraphx, "__file__", None) or next(iter(getattr(migraphx, "__path__", ["?"])))
        reason = f"the package migraphx at {place} is a placeholder without parse_onnx"
        raise RequestFailed("toolchain_mismatch", reason, "pip uninstall migraphx, and install ROCm's package migraphx")
    return migraphx


_SET_PYTHON = "set migraphx_python (FARM_MIGRAPHX_PYTHON) to the interpreter that the module is for"


def _other_pythons() -> str:
    """Return a sentence on the modules of MIGraphX on the import path that this Python cannot load."""
    found = [entry.name for folder in sys.path for entry in sorted(Path(folder).glob("migraphx.*.so"))]
    if not found:
        return ""
    versions = [f"Python 3.{tag[1]}" for name in found if (tag := re.search(r"cpython-3(\d+)", name))]
    wanted = f" ({', '.join(versions)})" if versions else ""
    mine = f"{sys.version_info[0]}.{sys.version_info[1]}"
    return f": {sys.executable} is Python {mine}, there is {', '.join(found)}{wanted}"


def _loaded_parts() -> list[str]:
    """Return the paths of the toolchain's libraries that this process has mapped."""
    paths = {line.split(maxsplit=5)[5] for line in Path("/proc/self/maps").read_text().splitlines() if "/" in line}
    return sorted(path for path in paths if _PARTS.match(os.path.basename(path)))  # noqa: PTH119


# --- libraries as ELF files --------------------------------------------------------------------------------------

_LOAD, _DYNAMIC, _NOTE = 1, 2, 4
_STRTAB, _SONAME = 5, 14
_BUILD_ID = 3


def identity(path: str) -> tuple[str, str]:
    """Return soname (else the file's name) and build id (else 40 digits of its SHA-256) of a 64-bit ELF library."""
    with open(path, "rb") as file:  # noqa: PTH123
        segments = _segments(file)
        soname = _soname(file, segments) or os.path.basename(path)  # noqa: PTH119
        return soname, _build_id(file, segments) or _digest(file)


def _segments(file: BinaryIO) -> list[tuple[int, int, int, int]]:
    """Return type, offset, address and size of each segment; none for a file of another kind."""
    header = file.read(64)
    if header[:5] != b"\x7fELF\x02" or len(header) < 64:
        return []
    offset, size, count = (*struct.unpack_from("<Q", header, 32), *struct.unpack_from("<HH", header, 54))
    segments = []
    for index in range(count):
        file.seek(offset + index * size)
        kind, _, place, address, _, length = struct.unpack("<IIQQQQ", file.read(40))
        segments.append((kind, place, address, length))
    return segments


def _read(file: BinaryIO, place: int, size: int) -> bytes:
    file.seek(place)
    return file.read(size)


def _soname(file: BinaryIO, segments: list[tuple[int, int, int, int]]) -> str:
    for kind, place, _, size in segments:
        if kind != _DYNAMIC:
            continue
        entries = dict(struct.iter_unpack("<QQ", _read(file, place, size - size % 16)))
        if _SONAME not in entries or _STRTAB not in entries:
            return ""
        for other, offset, address, length in segments:
            if other == _LOAD and address <= entries[_STRTAB] < address + length:
                start = offset + entries[_STRTAB] - address + entries[_SONAME]
                return _read(file, start, 256).split(b"\0")[0].decode(errors="replace")
    return ""


def _build_id(file: BinaryIO, segments: list[tuple[int, int, int, int]]) -> str:
    for kind, place, _, length in segments:
        notes = _read(file, place, length) if kind == _NOTE else b""
        while len(notes) >= 12:
            name_size, size, note = struct.unpack_from("<III", notes)
            start = 12 + (name_size + 3) // 4 * 4
            if note == _BUILD_ID and notes[12 : 12 + name_size] == b"GNU\0":
                return notes[start : start + size].hex()
            notes = notes[start + (size + 3) // 4 * 4 :]
    return ""


def _digest(file: BinaryIO) -> str:
    digest = hashlib.sha256()
    file.seek(0)
    while block := file.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()[:40]
