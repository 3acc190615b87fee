"""Answers: checks what children answer. Each action has a reader, and each answer is checked once.

A child that a hostile model controls can answer anything, and answers go into work orders, the job store, sidecars and
paths. So the type, length and count of each field are checked. Names must be those of the model's inputs and outputs,
if the request has them. Unknown fields are dropped. Pure, and only on the standard library, since `farm reproduce`
copies it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import PurePosixPath
from typing import Any, cast

from farm.runner.documents import ChildRequest, Request

LONGEST_NAME = 1024
"""Characters of a name of an input, an output or a file."""

LONGEST_WORD = 256
"""Characters of a word of the farm or of a compiler: a dtype, an operator, a version."""

LONGEST_SENTENCE = 4000
"""Characters of a message for people."""

MOST_NAMES = 10_000
"""Entries of one list or mapping, as many as a submission may have."""

MOST_RUNS = 2_000
"""Runs of one program in one round."""

LARGEST = 2**63 - 1
"""The largest number."""

_HALF = re.compile("[\ud800-\udfff]")

Reader = Callable[[Any], Any]
"""Checks a value of an answer and returns it. Raises WrongAnswer."""


class WrongAnswer(Exception):
    """An answer is not valid for its request; the text continues "the compiler's answer"."""


def read_answer(request: ChildRequest, result: Mapping[str, object]) -> Any:
    """Return what a child answered to a request, checked: a document of the request's action. Raises WrongAnswer."""
    reader = _READERS.get(request["action"])
    answer = reader(result) if reader else dict(result)
    _check_against(cast(Request, request), answer)
    return answer


def _check_against(request: Request, answer: Any) -> None:
    """Refuse names that the model does not have, and files outside the folder of the request."""
    action = request["action"]
    if action in ("compile", "reference"):
        model = request.get("model")
        known = (model.get("names") if model else ()) or ()
        _require_known("output", (output["name"] for output in answer["outputs"]), known)
    if action == "compile":
        _require_known("input", (port["name"] for port in answer["inputs"]), request.get("inputs") or ())
        if answer.get("output_parameters") and len(answer["output_parameters"]) != len(answer["outputs"]):
            raise WrongAnswer("has another number of outputs than of parameters for them")
    if action == "evaluate":
        for field in ("errors", "rms", "equal", "nonfinite", "spread", "origin", "unverified"):
            _require_known("output", answer["verification"].get(field, ()), request.get("outputs") or ())
    if action == "bench":
        if len(answer["programs"]) != len(request["programs"]):
            raise WrongAnswer("has another number of programs than were to be measured")
        if any(len(each["rounds"]) != request["rounds"] or not each["first"] for each in answer["programs"]):
            raise WrongAnswer("has a program that was not measured in each round")
    if action == "slice":
        folder = PurePosixPath(request["slices"])
        for piece in answer["slices"]:
            if PurePosixPath(piece["path"]).parent != folder or not _SLICE.fullmatch(PurePosixPath(piece["path"]).name):
                raise WrongAnswer(f"names a slice that is not in its folder: {piece['path'][:100]}")


_SLICE = re.compile(r"slice-[0-9]{4,9}\.onnx")


def _require_known(what: str, names: Any, known: Collection[str]) -> None:
    """Refuse unknown names. If no names are known (a work order of an older release), accept all."""
    foreign = [name for name in names if known and name not in known]
    if foreign:
        raise WrongAnswer(f"has an {what} that the model does not have: {foreign[0][:100]!r}")


# --- readers --------------------------------------------------------------------------------------------------------


def _text(longest: int, pattern: str = "") -> Reader:
    def read(value: Any) -> str:
        if not isinstance(value, str) or len(value) > longest or (pattern and not re.fullmatch(pattern, value)):
            raise WrongAnswer(f"has no text of at most {longest} characters, as it has to be")
        if _HALF.search(value):  # JSON can carry it, but UTF-8 cannot.
            raise WrongAnswer("has half a character")
        return value

    return read


def _number(value: Any) -> int | float:
    """A finite number, no truth value."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise WrongAnswer("has no finite number")
    if isinstance(value, int) and abs(value) > LARGEST:
        raise WrongAnswer("has a number beyond 64 bits")
    return value


def _amount(value: Any) -> int | float:
    """Seconds, errors, shares: a number that is not below 0."""
    if _number(value) < 0:
        raise WrongAnswer("has a number below 0")
    return value  # type: ignore[no-any-return]


def _count(value: Any) -> int:
    if not isinstance(value, int):
        raise WrongAnswer("has no whole number")
    return int(_amount(value))


def _round(value: Any) -> Any:
    """The seconds of each run of one round; they are compared by ratios."""
    if not (runs := _items(_amount, MOST_RUNS)(value)) or not all(runs):
        raise WrongAnswer("has a round without runs, or a run that took no time")
    return runs


def _integer(value: Any) -> int:
    if not isinstance(value, int):
        raise WrongAnswer("has no whole number")
    return int(_number(value))


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise WrongAnswer("has neither true nor false")
    return value


def _either(*readers: Reader) -> Reader:
    def read(value: Any) -> Any:
        for reader in readers[:-1]:
            try:
                return reader(value)
            except WrongAnswer:
                continue
        return readers[-1](value)

    return read


def _maybe(reader: Reader) -> Reader:
    return lambda value: None if value is None else reader(value)


def _items(reader: Reader, most: int = MOST_NAMES) -> Reader:
    def read(value: Any) -> list[Any]:
        if not isinstance(value, list) or len(value) > most:
            raise WrongAnswer(f"has no list of at most {most}")
        return [reader(item) for item in value]

    return read


def _by(key: Reader, reader: Reader, most: int = MOST_NAMES) -> Reader:
    """An object with any keys of one kind."""

    def read(value: Any) -> dict[str, object]:
        if not isinstance(value, dict) or len(value) > most:
            raise WrongAnswer(f"has no object of at most {most} fields")
        return {key(name): reader(item) for name, item in value.items()}

    return read


def _object(required: Mapping[str, Reader], optional: Mapping[str, Reader] | None = None) -> Reader:
    """An object with these fields; others are left out."""

    def read(value: Any) -> dict[str, object]:
        if not isinstance(value, dict):
            raise WrongAnswer("has no object")
        for name in required:
            if name not in value:
                raise WrongAnswer(f"lacks {name!r}")
        found = {}
        for name, reader in {**required, **(optional or {})}.items():
            if name in value:
                try:
                    found[name] = reader(value[name])
                except WrongAnswer as wrong:
                    # The message names the innermost field only.
                    raise (wrong if "'" in str(wrong) else WrongAnswer(f"{wrong} in {name!r}")) from None
        return found

    return read


_name = _text(LONGEST_NAME)
_word = _text(LONGEST_WORD)
_sentence = _text(LONGEST_SENTENCE)
_label = _text(LONGEST_WORD, r"[A-Za-z0-9._+-]*")
"""What becomes part of a key: a toolchain, a target, a version of a library."""


def _file(value: Any) -> str:
    """A file in or below the model's folder."""
    path = _name(value)
    parts = PurePosixPath(path)
    if parts.is_absolute() or not parts.parts or ".." in parts.parts or "\0" in path or "\\" in path:
        raise WrongAnswer(f"names a file that is not in the model's folder: {path[:100]!r}")
    return str(path)


_size = _either(_count, _name)
_tensor = _object({"name": _name, "dtype": _word, "shape": _maybe(_items(_maybe(_size), 64))})
_port = _object({"name": _name, "dtype": _word, "shape": _items(_size, 64)}, {"strides": _maybe(_items(_integer, 64))})
_counts = _by(_word, _count)
_libraries = _by(_label, _label, 64)
_session = _by(_word, _either(_flag, _count, _word), 16)
_by_output = _by(_name, _amount)
_measured = {
    "load": _maybe(_amount),
    "cold_run": _maybe(_amount),
    "warm_run": _maybe(_amount),
    "latency": _maybe(_amount),
    "device_latency": _maybe(_object({"median": _amount, "repeats": _count})),
    **dict.fromkeys(("p50", "p90", "p99", "throughput"), _maybe(_amount)),
    "repeats": _count,
}
_point = _object({"batch": _count, "shapes": _by(_name, _items(_count, 64))}, _measured)
_memory = {"peak_memory": _count}
_usable = {
    "version": _word,
    "toolchain": _label,
    "libraries": _libraries,
    "features": _items(_word, 256),
    "targets": _items(_label, 16),
    "cpu_family": _label,
}
_compiler = {
    "reason": _sentence,
    "fix": _sentence,
    "label": _label,
    "parts": _items(_items(_sentence, 2)),
    "missing": _by(_word, _sentence, 16),
    "lowest": _count,
}
_placement = _object(
    {
        "nodes": _by(_word, _counts, 16),
        "on_purpose": _by(_word, _items(_name, 100)),
        "fallback": _by(_word, _items(_name, 100)),
    }
)


def _probe(value: Any) -> Any:
    """A compiler that is available also describes itself."""
    found = _object({"available": _flag}, _compiler)(value)
    return {**found, **_object(_usable)(value)} if found["available"] else found


def _import(value: Any) -> Any:
    """What was chosen of an import, or why it cannot be read."""
    if isinstance(value, dict) and "refusal" in value:
        return _object({"refusal": _sentence, "hint": _sentence})(value)
    return _object({"records": _counts, "added": _count, "refused": _by(_sentence, _sentence)})(value)


_READERS: Mapping[str, Reader] = {
    "probe": _probe,
    "libraries": _object({"libraries": _libraries}),
    "convert": _object({"size": _count}),
    "check": _object(
        {
            "inputs": _items(_tensor),
            "outputs": _items(_tensor),
            "opset": _integer,
            "operators": _counts,
            "weight_dtypes": _items(_word, 64),
            "external_files": _items(_file),
        },
        {
            "format": _word,
            "opsets": _by(_word, _integer, 64),
            "doubts": _items(_sentence, 1000),
            "weights": _counts,
        },
    ),
    "reference": _object(
        {
            "samples": _count,
            "runs": _count,
            "origin": _by(_name, _word),
            "outputs": _items(_object({"name": _name, "dtype": _word, "shape": _items(_count, 64)})),
        },
        {"unverified": _by(_name, _sentence), **_memory},
    ),
    "import": _import,
    "pack": _object({"quantized": _counts}),
    "slice": _object(
        {
            "slices": _items(
                _object(
                    {
                        "path": _text(4096),
                        "signature": _text(64, "[0-9a-f]{64}"),
                        "operations": _count,
                        "count": _count,
                        "inputs": _by(_name, _object({"dtype": _word, "shape": _items(_count, 64)})),
                    }
                )
            ),
            "operations": _count,
        }
    ),
    "tune": _object({}, {"candidates": _count}),
    "compile": _object(
        {
            "inputs": _items(_port),
            "outputs": _items(_port),
            "weight_dtypes": _counts,
            "compute_dtypes": _counts,
            "quantized": _counts,
        },
        {
            "operators": _counts,
            "size": _count,
            "offload_copy": _maybe(_flag),
            "output_parameters": _items(_name),
            "session": _maybe(_session),
            "symbolic_shapes": _sentence,
            "placement": _maybe(_placement),
            "migraphx_version": _word,
            **_memory,
        },
    ),
    "evaluate": _object(
        {
            "verification": _object(
                {"errors": _by_output, "spread": _by_output, "samples": _count, "weak": _flag},
                {
                    "rms": _by_output,
                    "equal": _by_output,
                    "nonfinite": _items(_name),
                    "runs": _count,
                    "origin": _by(_name, _word),
                    "unverified": _by(_name, _sentence),
                },
            ),
            "measurements": _object({"load": _amount}, {**_measured, "batch": _count, "points": _items(_point, 1000)}),
        },
        _memory,
    ),
    "cache_names": _object(
        {"version": _label, "names": _items(_text(256, r"[A-Za-z0-9][A-Za-z0-9._-]*\.mxr"), 1000), "found": _flag}
    ),
    "bench": _object(
        {
            "programs": _items(
                _object(
                    {
                        "load": _amount,
                        "first": _items(_amount, 100),
                        "rounds": _items(_round, 1000),
                    }
                ),
                100,
            )
        },
        _memory,
    ),
}
