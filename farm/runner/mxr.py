"""A MIGraphX program (`.mxr`) read without MIGraphX, by the child that saved it and by `farm inspect` alike.

The file is one msgpack map, or one JSON object: `version`, `migraphx_version`, `targets`, `contexts`, and `modules`
with their nodes. Weights and kernels lie in the nodes as binary values. Weights are arrays of bin chunks in msgpack,
`{"bytes": [numbers]}` in JSON; kernels and solutions of MIOpen are arrays of numbers in both, since MIGraphX's
`serialize.hpp` has no overload for its own binary type. Chunks are passed over by their length and arrays of numbers in
one pass, so gigabytes of weights cost neither time nor memory, and kernels 1 MiB.

The reader of msgpack is written by hand, since the `msgpack` package holds a whole chunk (up to 4 GiB) in memory before
it lets go of it, and children have no such package. The file is not trusted: whatever it holds ends in an answer, in
`MalformedProgram` or in `ProgramTooLarge`, after at most `MAX_VALUES` values, and with one node of msgpack or
`MAX_JSON` in memory.
"""

from __future__ import annotations

import json
import os
import re
import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, TypedDict

from .protocol import is_deep

if TYPE_CHECKING:
    from typing import NotRequired

MAX_NODES = 200_000
MAX_VALUES = 20_000_000  # Values of a whole file: one is a number, a text, a list, a map or a chunk of bytes.
MAX_NODE_VALUES = 500_000
MAX_JSON = 64 << 20  # Bytes of a JSON file that are parsed.
MAX_TEXT = 1 << 20  # Bytes of one text; one of more than 64 counts as several values.
MAX_NAME = 500  # Characters of a name that is kept: of an operator, a module, a node.
MAX_RANK = 64
MAX_DEPTH = 32
MIN_BYTES = MAX_RANK + 1
"""Numbers from which on an array of them, each from 0 to 255, is read as a binary value; no shape has as many."""
BLOCK = 1 << 20
HEAD = 4096  # Bytes of a binary value that are kept: enough for the header of an ELF file or of an offload bundle.

LEFT_OVER = "gpu::precompile_op"
"""An operator that was never decided: MIGraphX saves such a program without an error, and it does not run."""

_DTYPES = {
    "float_type": "float32", "half_type": "float16", "double_type": "float64", "bf16_type": "bfloat16",
    "fp8e4m3fn_type": "float8e4m3fn", "fp8e4m3fnuz_type": "float8e4m3fnuz", "fp8e5m2_type": "float8e5m2",
    "fp8e5m2fnuz_type": "float8e5m2fnuz",
}  # fmt: skip
"""MIGraphX's names of types that are not numpy's with `_type` behind."""


class MalformedProgram(Exception):
    """The file is not a MIGraphX program, or a damaged one; the message says where."""


class ProgramTooLarge(Exception):
    """The file may be a program, but is too large to look into."""


class Binary(NamedTuple):
    """A binary value: how long it is, and how it begins."""

    size: int
    head: bytes


Fields = Mapping[str, object]  # A map as it stands in the file: every value of it is checked when it is used.


class StoredPort(TypedDict):
    """An input or output in a program's file; MIGraphX keeps no names of outputs, ONNX no strides.

    A dynamic dimension of MIGraphX is `1..4`.
    """

    name: NotRequired[str]
    dtype: str
    shape: Sequence[int | str | None] | None
    strides: NotRequired[list[int] | None]


class CodeObjects(TypedDict):
    """Kernels for the same architectures, and their size in bytes; the number of CUs is not in a file."""

    arches: list[str]
    count: int
    size: int
    wave_sizes: list[int]  # Threads of a wavefront, as the kernels' metadata say: 32 or 64.


class LibrarySolution(TypedDict):
    """A solution of a library that tuning chose for an operator, and how often."""

    operator: str
    solution: int
    count: int


class ModuleContent(TypedDict):
    """What one module of a program holds."""

    operators: Mapping[str, int]  # How often it has each.


class ProgramContent(TypedDict):
    """What a program's file holds; sizes in bytes, nothing of its weights or kernels. An ONNX file has fewer fields."""

    format: str  # `msgpack`, `json` or `onnx`.
    size: int
    inputs: list[StoredPort]
    outputs: list[StoredPort]
    modules: Mapping[str, ModuleContent]
    weights: Mapping[str, int]  # Bytes by dtype.
    opsets: NotRequired[Mapping[str, int]]
    trailing: NotRequired[int]  # Bytes behind the program.
    file_version: NotRequired[object]
    migraphx_version: NotRequired[str]
    targets: NotRequired[list[str]]
    contexts: NotRequired[list[object]]
    compiled: NotRequired[bool]
    output_parameters: NotRequired[list[str]]  # Names such as `main:#output_0`.
    code_objects: NotRequired[list[CodeObjects]]
    solutions: NotRequired[list[LibrarySolution]]
    offload_copy: NotRequired[bool | None]  # None if there is no GPU to copy to.
    left_over: NotRequired[int]  # Undecided operators.
    unknown: NotRequired[list[str]]


def dtype_name(migraphx_type: str) -> str:
    """Return our name of a MIGraphX type: `float_type` -> `float32`."""
    return _DTYPES.get(migraphx_type, migraphx_type.removesuffix("_type"))


def read(path: str | os.PathLike[str]) -> ProgramContent:
    """Return what a program is.

    Raises MalformedProgram, ProgramTooLarge, OSError.
    """
    with open(path, "rb") as file:  # noqa: PTH123
        size, start = os.fstat(file.fileno()).st_size, file.read(16)
        file.seek(0)
        if not start:
            raise MalformedProgram("the file is empty")
        if start.lstrip().startswith(b"{"):
            return _Program(_parts_of_json(file, size)).summary("json", size, 0)
        if start[0] & 0xF0 == 0x80 or start[0] in (0xDE, 0xDF):
            found = _Program(_Msgpack(file, size).parts())
            return found.summary("msgpack", size, size - file.tell())
        raise MalformedProgram("it is neither a msgpack map nor a JSON object")


_GENERIC = {
    "gfx9-generic": "gfx90[02469c]", "gfx9-4-generic": "gfx94[012]|gfx950", "gfx10-1-generic": "gfx101[0-3]",
    "gfx10-3-generic": "gfx103[0-6]", "gfx11-generic": "gfx11[05][0-3]", "gfx12-generic": "gfx120[01]",
}  # fmt: skip
"""The devices that run kernels for a generic architecture (LLVM, docs/AMDGPUUsage.rst)."""


def foreign_arches(code_objects: Sequence[CodeObjects], device: str) -> list[str]:
    """Return the architectures of those kernels that a device (`gfx90a`, `gfx90a:sramecc+:xnack-`) does not run.

    A feature that either of the two does not name fits, and so does what the file does not say. Kernels for wavefronts
    of a size that the device does not have are `wave32`.
    """
    foreign = set()
    for code in code_objects:
        if not any(_fits(arch, device) for arch in code["arches"]):
            foreign.update(code["arches"])
        elif device.startswith("gfx9"):  # Later devices have wavefronts of both sizes.
            foreign.update(f"wave{size}" for size in code["wave_sizes"] if size != 64)
    return sorted(foreign)


def _fits(arch: str, device: str) -> bool:
    name, *features = arch.split(":")
    wanted, *others = device.split(":")
    if not name.startswith("gfx") or (name.endswith("generic") and name not in _GENERIC):
        return True
    signs = {feature[:-1]: feature[-1:] for feature in others}
    runs = re.fullmatch(_GENERIC.get(name, re.escape(name)), wanted)
    return bool(runs) and all(signs.get(feature[:-1], feature[-1:]) == feature[-1:] for feature in features)


# --- the container ----------------------------------------------------------------------------------------------

Part = tuple[str, str, Any]
"""A piece of a program as it stands in its file: a field ("", name, value), the beginning of a module (name, "", None),
or a node (module, "node", value)."""

_CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}
_NUMBERS = {
    0xCA: ">f", 0xCB: ">d", 0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q", 0xD0: ">b", 0xD1: ">h", 0xD2: ">i",
    0xD3: ">q",
}  # fmt: skip

_LOW = bytes(range(0x80))
_MARKED_LOW = re.compile(rb"\xcc[\x00-\x7f]")
_MARKED = re.compile(rb"\xcc([\x80-\xff])")


class _Msgpack:
    """https://github.com/msgpack/msgpack/blob/master/spec.md; extension types do not occur in programs."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self.file = file
        self.size = size
        self.left = MAX_VALUES
        self.left_of_value = 0

    def parts(self) -> Iterator[Part]:
        """Yield the parts of a program."""
        for field in self.members():
            yield "", field, self.value() if field != "modules" else None
            for module in self.members() if field == "modules" else ():
                yield module, "", None
                for key in self.members():
                    if key != "nodes":
                        self.value()
                        continue
                    for _ in range(self.count(self.byte(), 0x90, 0xDC, "a list")):
                        yield module, "node", self.value()

    def members(self) -> Iterator[str]:
        """Yield the keys of a map; the caller takes exactly one value after each."""
        for _ in range(self.count(self.byte(), 0x80, 0xDE, "a map")):
            self.left_of_value = MAX_NODE_VALUES
            yield self.key()

    def value(self) -> Any:
        """Return the next value: None, bool, int, float, str, Binary, or lists and dicts of them."""
        self.left_of_value = MAX_NODE_VALUES
        return self.take(0)

    def spend(self, depth: int, count: int = 1) -> None:
        self.left -= count
        self.left_of_value -= count
        if self.left < 0:
            raise MalformedProgram(f"it has more than {MAX_VALUES} values")
        if self.left_of_value < 0:
            raise MalformedProgram(f"one node has more than {MAX_NODE_VALUES} values")
        if depth > MAX_DEPTH:
            raise MalformedProgram(f"values lie more than {MAX_DEPTH} deep in one another")

    def take(self, depth: int) -> Any:  # noqa: PLR0911 (one for each kind of value)
        self.spend(depth)
        code = self.byte()
        if code <= 0x7F:
            return code
        if code >= 0xE0:
            return code - 0x100
        if code <= 0x8F or code in (0xDE, 0xDF):
            count = self.count(code, 0x80, 0xDE, "a map")
            return {self.key(): self.take(depth + 1) for _ in range(count)}
        if code <= 0x9F or code in (0xDC, 0xDD):
            count = self.count(code, 0x90, 0xDC, "a list")
            numbers = self.numbers(count) if count >= MIN_BYTES else None
            return numbers or _joined([self.take(depth + 1) for _ in range(count)])
        if code <= 0xBF or 0xD9 <= code <= 0xDB:
            return self.text(code)
        if code in _CONSTANTS:
            return _CONSTANTS[code]
        if code in _NUMBERS:
            return struct.unpack(_NUMBERS[code], self.exactly(struct.calcsize(_NUMBERS[code])))[0]
        if 0xC4 <= code <= 0xC6:
            return self.binary(self.number(1 << (code - 0xC4)))
        raise MalformedProgram(f"byte {self.file.tell() - 1} is {code:#x}, which begins no value that a program has")

    def key(self) -> str:
        self.spend(0)
        code = self.byte()
        if not (0xA0 <= code <= 0xBF or 0xD9 <= code <= 0xDB):
            raise MalformedProgram(f"the key at byte {self.file.tell() - 1} is not text")
        return self.text(code)

    def text(self, code: int) -> str:
        size = code & 0x1F if code <= 0xBF else self.number(1 << (code - 0xD9))
        if size > MAX_TEXT:
            raise MalformedProgram(f"the text at byte {self.file.tell()} has {size} bytes")
        self.spend(0, size >> 6)
        try:
            return self.exactly(size).decode()
        except UnicodeDecodeError:
            raise MalformedProgram(f"the text before byte {self.file.tell()} is not UTF-8") from None

    def binary(self, size: int) -> Binary:
        head = self.exactly(min(size, HEAD))
        # Past the end a seek succeeds too.
        if self.file.tell() + size - len(head) > self.size:
            raise MalformedProgram(f"it is cut: a value of {size} bytes goes beyond its end")
        self.file.seek(size - len(head), os.SEEK_CUR)
        return Binary(size, head)

    def numbers(self, count: int) -> Binary | None:
        """Return an array of numbers from 0 to 255 as bytes; None, at the array's start, if it has something else.

        A number below 128 is one byte, any other 0xCC and itself.
        """
        start, left, head = self.file.tell(), count, b""
        while left:
            block = self.file.read(min(left, BLOCK))
            # In a run of 0xCC the first is a mark and the second a number, and so on: each such pair becomes one byte.
            marked = block.replace(b"\xcc\xcc", b"\0")
            if marked.endswith(b"\xcc"):
                last = self.file.read(1)
                block += last
                marked = marked[:-1] + (b"\0" if last == b"\xcc" else b"\xcc" + last)
            marks = marked.count(b"\xcc")
            if not block or len(marked.translate(None, _LOW)) != 2 * marks or _MARKED_LOW.search(marked):
                self.file.seek(start)
                return None
            left -= len(marked) - marks
            if len(head) < HEAD:
                head += _MARKED.sub(rb"\1", block[: 2 * HEAD])
        return Binary(count, head[:HEAD])

    def count(self, code: int, short: int, long: int, what: str) -> int:
        if code & 0xF0 == short:
            return code & 0x0F
        if code in (long, long + 1):
            return self.number(2 if code == long else 4)
        raise MalformedProgram(f"{what} should begin at byte {self.file.tell() - 1}")

    def number(self, size: int) -> int:
        return int.from_bytes(self.exactly(size), "big")

    def byte(self) -> int:
        return self.exactly(1)[0]

    def exactly(self, size: int) -> bytes:
        data = self.file.read(size)
        if len(data) < size:
            raise MalformedProgram(f"it is cut at byte {self.size}")
        return data


def _joined(values: list[Any]) -> Any:
    if values and all(isinstance(value, Binary) for value in values):
        return Binary(sum(chunk.size for chunk in values), values[0].head)
    return values


def _parts_of_json(file: BinaryIO, size: int) -> Iterator[Part]:
    """Yield the parts of a program in JSON, which is parsed as a whole: that takes up to thirty times its size."""
    if size > MAX_JSON:
        raise ProgramTooLarge(f"it is JSON of {size >> 20} MiB, and at most {MAX_JSON >> 20} MiB are read")
    try:
        document = json.loads(file.read(), object_hook=_binary)
        deep = is_deep(document, MAX_DEPTH)
    except RecursionError:
        deep = True
    except ValueError as error:
        raise MalformedProgram(f"it is cut or damaged: {error}") from None
    if deep:
        raise MalformedProgram(f"values lie more than {MAX_DEPTH} deep in one another")
    for field, value in _of_kind(document, dict).items():
        yield "", field, value
        for module, fields in _of_kind(value, dict).items() if field == "modules" else ():
            yield module, "", None
            for node in _of_kind(_of_kind(fields, dict).get("nodes", []), list):
                yield module, "node", node


def _of_kind(value: object, kind: type) -> Any:
    if not isinstance(value, kind):
        raise MalformedProgram(f"something else is in the place of {_KINDS[kind]}")
    return value


def _binary(fields: Fields) -> Any:
    """Return a binary value as one; any other map with its long arrays of numbers from 0 to 255 as binary values."""
    numbers = fields.get("bytes")
    if len(fields) > 1 or not isinstance(numbers, list):
        lists = {name: each for name, each in fields.items() if isinstance(each, list) and len(each) >= MIN_BYTES}
        return {**fields, **{name: _bytes(each) or each for name, each in lists.items()}}
    if not numbers:
        return Binary(0, b"")
    if found := _bytes(numbers):
        return found
    raise MalformedProgram("a binary value is not made of numbers from 0 to 255")


def _bytes(numbers: list[Any]) -> Binary | None:
    """Return an array of numbers from 0 to 255 as bytes; None if it has something else."""
    try:
        data = bytes(numbers)
    except (TypeError, ValueError):
        return None
    return Binary(len(data), data[:HEAD])


# --- the program ------------------------------------------------------------------------------------------------


class _Program:
    """What has been seen of a program; nodes come one by one."""

    def __init__(self, parts: Iterable[Part]) -> None:
        self.fields: dict[str, object] = {}
        self.modules: dict[str, Counter[str]] = {}
        self.inputs: list[StoredPort] = []
        self.output_parameters: list[str] = []
        self.outputs: list[StoredPort] = []
        self.shapes: dict[str, StoredPort] = {}
        self.code_objects: dict[tuple[str, ...], CodeObjects] = {}
        self.solutions: Counter[tuple[str, int]] = Counter()
        self.weights: Counter[str] = Counter()
        nodes = 0
        for module, name, value in parts:
            if not module:
                if name in self.fields:
                    raise MalformedProgram(f"the field {name!r} is there twice")
                if len(self.fields) > 100:
                    raise MalformedProgram("it has more than 100 fields")
                self.fields[name] = value
            elif not name:
                if module in self.modules or len(module) > MAX_NAME or len(self.modules) >= MAX_NODES // 10:
                    raise MalformedProgram(f"it has a module too many, {module[:80]!r}")
                self.modules[module] = Counter()
            else:
                nodes += 1
                if nodes > MAX_NODES:
                    raise MalformedProgram(f"it has more than {MAX_NODES} nodes")
                self.add(module, value, f"node {self.modules[module].total()} of module {module!r}")
        for name in ("version", "modules"):
            if name not in self.fields:
                raise MalformedProgram(f"it has no field {name!r}: no MIGraphX program")
        _checked(self.fields, "version", int, "the program")
        if "main" not in self.modules:
            raise MalformedProgram("it has no main module")

    def add(self, module: str, node: Any, place: str) -> None:
        if not isinstance(node, dict):
            raise MalformedProgram(f"{place} is not a map")
        operator = _checked(node, "name", str, place)
        inner = node.get("operator")
        if operator.endswith("::op") and isinstance(inner, dict):
            # `ref::op` and `cpu::op` hold the operator that they run; MIGraphX's own listing shows that one.
            operator = operator[:-2] + _checked(inner, "name", str, place)
        self.modules[module][operator] += 1
        for part in (*_maps(node.get("operator")), *_maps(node.get("literal"))):
            self.add_part(operator, part, place)
        if module == "main":
            self.add_to_main(operator, node, place)

    def add_part(self, operator: str, part: Fields, place: str) -> None:
        code, data = part.get("code_object"), part.get("data")
        if isinstance(code, Binary):
            arches = tuple(arch[:MAX_NAME] for arch in gpu_arches(code.head)) or ("unknown",)
            new: CodeObjects = {"arches": list(arches), "count": 0, "size": 0, "wave_sizes": []}
            known = self.code_objects.setdefault(arches, new)
            known["count"] += 1
            known["size"] += code.size
            known["wave_sizes"] = sorted({*known["wave_sizes"], *wave_sizes(code.head)})
        shape = part.get("shape")
        if isinstance(data, Binary) and isinstance(shape, dict):
            self.weights[dtype_name(_checked(shape, "type", str, place))] += data.size
        for field in ("solution_id", "solution_idx"):
            solution = part.get(field)
            if isinstance(solution, int):
                self.solutions[operator, solution] += 1

    def add_to_main(self, operator: str, node: Fields, place: str) -> None:
        if operator == "@return":
            inputs = _checked(node, "inputs", list, place)
            unknown = [name for name in inputs if not isinstance(name, str) or name not in self.shapes]
            if unknown:
                raise MalformedProgram(f"{place} returns {unknown[0]!r}, which no node before it gives")
            self.outputs = [self.shapes[name] for name in inputs]
            return
        shape = _shape(_checked(node, "shape", dict, place), place)
        self.shapes[_checked(node, "output", str, place)] = shape
        if operator == "@param":
            name = _checked(_checked(node, "operator", dict, place), "parameter", str, place)
            if "#output_" in name:
                self.output_parameters.append(name)
            else:
                self.inputs.append({"name": name, **shape})
        # Where nothing is returned in so many words, the last node is the result.
        self.outputs = [shape]

    def summary(self, container: str, size: int, trailing: int) -> ProgramContent:
        targets = [
            _checked(target if isinstance(target, dict) else {}, "name", str, "a target")
            for target in _checked(self.fields, "targets", list, "the program", [])
        ]
        operators = sum(self.modules.values(), Counter())
        copies = any(operators[name] for name in ("hip::copy_to_gpu", "hip::copy_from_gpu"))
        return {
            "format": container,
            "size": size,
            "trailing": trailing,
            "file_version": self.fields["version"],
            "migraphx_version": _checked(self.fields, "migraphx_version", str, "the program", ""),
            "targets": targets,
            "contexts": _checked(self.fields, "contexts", list, "the program", []),
            "compiled": bool(targets),
            "inputs": self.inputs,
            "outputs": self.outputs,
            "output_parameters": sorted(self.output_parameters, key=_position),
            "modules": {name: {"operators": dict(sorted(found.items()))} for name, found in self.modules.items()},
            "code_objects": [self.code_objects[arches] for arches in sorted(self.code_objects)],
            "solutions": [
                {"operator": operator, "solution": solution, "count": count}
                for (operator, solution), count in sorted(self.solutions.items())
            ],
            "weights": dict(self.weights.most_common()),
            "offload_copy": copies if "gpu" in targets else None,
            "left_over": operators[LEFT_OVER],
            "unknown": sorted(name.partition(":")[2] for name in operators if name.startswith("unknown:")),
        }


_KINDS = {int: "a whole number", str: "text", list: "a list", dict: "a map"}
_MISSING = object()


def _checked(document: Fields, name: str, kind: type, place: str, default: Any = _MISSING) -> Any:
    value = document.get(name, default)
    if value is _MISSING:
        raise MalformedProgram(f"{place} has no {name!r}")
    if kind is str and isinstance(value, str) and len(value) > MAX_NAME:
        raise MalformedProgram(f"{name!r} of {place} has {len(value)} characters")
    if not isinstance(value, kind) or isinstance(value, bool):
        raise MalformedProgram(f"{name!r} of {place} is not {_KINDS[kind]}")
    return value


def _maps(value: Any) -> Iterator[Fields]:
    """Yield a map and all that lie in it; operators hold operators."""
    left = [value]
    while left:
        match left.pop():
            case dict() as fields:
                yield fields
                left += fields.values()
            case list() as values:
                left += values


def _shape(shape: Fields, place: str) -> StoredPort:
    dtype = dtype_name(_checked(shape, "type", str, place))
    dynamic = _checked(shape, "dynamic_dimensions", list, place, [])
    if not dynamic:
        lens, strides = (_checked(shape, name, list, place, []) for name in ("lens", "strides"))
        if len(lens) > MAX_RANK or not all(type(size) is int for size in (*lens, *strides)):
            raise MalformedProgram(f"the shape of {place} is not made of at most {MAX_RANK} whole numbers")
        return {"dtype": dtype, "shape": lens, "strides": strides}
    sizes: list[Any] = []
    for size in dynamic[:MAX_RANK]:
        bounds = size if isinstance(size, dict) else {}
        # File version 8 has the bounds in a `range`, earlier ones next to the optimals.
        bounds = _checked(bounds, "range", dict, place, bounds)
        low, high = (_checked(bounds, end, int, place) for end in ("min", "max"))
        sizes.append(f"{low}..{high}" if low < high else low)
    return {"dtype": dtype, "shape": sizes, "strides": None}


def _position(parameter: str) -> tuple[int, str]:
    number = parameter.rpartition("_")[2]
    return (int(number) if number.isdecimal() and len(number) < 10 else -1, parameter)


# --- kernels ------------------------------------------------------------------------------------------------------

_AMDGPU = 224
_ARCHES = {
    0x2F: "gfx906", 0x30: "gfx908", 0x3F: "gfx90a", 0x40: "gfx940", 0x4C: "gfx942", 0x4F: "gfx950", 0x33: "gfx1010",
    0x36: "gfx1030", 0x41: "gfx1100", 0x46: "gfx1101", 0x47: "gfx1102", 0x44: "gfx1103", 0x43: "gfx1150",
    0x4A: "gfx1151", 0x55: "gfx1152", 0x58: "gfx1153", 0x48: "gfx1200", 0x4E: "gfx1201", 0x49: "gfx1250",
    0x51: "gfx9-generic", 0x52: "gfx10-1-generic", 0x53: "gfx10-3-generic", 0x54: "gfx11-generic",
    0x59: "gfx12-generic", 0x5F: "gfx9-4-generic",
}  # fmt: skip
"""Low byte of `e_flags` of an AMDGPU code object (LLVM, docs/AMDGPUUsage.rst)."""
_FEATURES = (("sramecc", 0xC00, 0x800, 0xC00), ("xnack", 0x300, 0x200, 0x300))
"""Name, mask, off and on within `e_flags`; what runs either way has no suffix."""

_BUNDLE = b"__CLANG_OFFLOAD_BUNDLE__"
_COMPRESSED_BUNDLE = b"CCOB"


def gpu_arches(head: bytes) -> list[str]:
    """Return the architectures that a code object holds kernels for, from its first bytes: `gfx90a:sramecc+:xnack-`.

    A code object is an ELF file, or an offload bundle of several. Empty if it is neither, `compressed` if it is a
    compressed bundle: to read its list is to unpack it.
    """
    if head.startswith(_COMPRESSED_BUNDLE):
        return ["compressed"]
    if head.startswith(_BUNDLE):
        return list(_bundled(head))
    if head[:5] != b"\x7fELF\x02" or len(head) < 64 or struct.unpack_from("<H", head, 18)[0] != _AMDGPU:
        return []
    (flags,) = struct.unpack_from("<I", head, 48)
    arch = _ARCHES.get(flags & 0xFF, f"unknown-{flags & 0xFF:#x}")
    signs = [(name, {off: "-", on: "+"}.get(flags & mask)) for name, mask, off, on in _FEATURES]
    return [":".join([arch, *(f"{name}{sign}" for name, sign in signs if sign)])]


def wave_sizes(head: bytes) -> set[int]:
    """Return the threads of a wavefront of the kernels whose metadata are in a code object's first bytes.

    The metadata are msgpack in a note before the code (LLVM, docs/AMDGPUUsage.rst, "Code Object V3 Metadata").
    """
    return {size[0] for size in re.findall(rb"\.wavefront_size([\x20\x40])", head)}


def _bundled(head: bytes) -> Iterator[str]:
    """Yield the targets of a bundle's entries (offset, size, length of id, id); the host's entry is left out."""
    place = len(_BUNDLE)
    count = int.from_bytes(head[place : place + 8], "little")
    place += 8
    while count and len(head) >= place + 24:
        (length,) = struct.unpack_from("<Q", head, place + 16)
        name = head[place + 24 : place + 24 + length].decode(errors="replace")
        if "amdgcn" in name:
            yield name.rpartition("--")[2]
        place += 24 + length
        count -= 1
