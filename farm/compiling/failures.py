"""Failures: how a child ended, which kind of failure that is, and the sentence for the user. Pure.

The kind is decided here and nowhere else.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from farm.files import MOST_FILES
from farm.jobs.state import FailureKind, policy_of
from farm.runner.documents import ChildError


@dataclass(frozen=True, slots=True)
class ChildLimits:
    """Limits of a child. Times in seconds, sizes in bytes; 0 means no limit."""

    time: float = 0
    whole: float = 0  # The limit of the whole attempt; `time` is what is left of it. Messages name the whole.
    memory: int = 0
    hang: float = 0  # Longest time without a sign of life: a message, a longer log, or CPU time.
    waiting: float = 0.0
    """Cores that a child keeps busy while it waits for its GPU: their CPU time is not a sign of life."""
    log: int = 1 << 30
    disk: int = 0  # What the child may write, together with what other children of its attempt have `written`.
    written: int = 0
    files: int = MOST_FILES  # Files that it may write, if `disk` is limited.
    processes: int = 0  # Processes and threads that it may have at once.
    dying: float = 60.0  # Time for killed processes to be gone, and for a child that has answered to end.


NO_LIMITS = ChildLimits(log=0)


class EndedBy(StrEnum):
    """Why the child ended: by itself, or because the parent, its guard or its launcher ended it for a reason.

    Guard and launcher say these words (`GuardEnd.killed`).
    """

    ITSELF = ""
    TIME_LIMIT = "time"
    MEMORY_LIMIT = "memory"
    DISK_LIMIT = "disk"
    FILE_LIMIT = "files"
    PROCESS_LIMIT = "processes"
    LOG_LIMIT = "log"
    HANG = "hang"
    NONSENSE = "nonsense"
    AWAKE = "awake"
    UNGUARDED = "guard"
    STRAY_FILES = "stray_files"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class ChildEnd:
    """How a child ended, as it was seen; `classify` says what that means.

    `result` is its answer, checked by `read_answer`, `error` its own account of a failure. `code` is that of its
    process's exit, or below 0 the number of a signal, `phase` what it was doing, `memory` the peak in bytes of all its
    processes together.
    """

    by: EndedBy
    limits: ChildLimits
    result: Any = None
    ok: bool = False  # Whether it answered, and is gone.
    wrong: str = ""
    """What is wrong with its answer if it ended as NONSENSE; empty if it sent something that is not a message."""
    error: ChildError | None = None
    code: int | None = None
    shared: bool = False  # Whether it measured something while others ran on its host, or may have.
    memory: int = 0
    oom_killer: bool = False
    """Whether the kernel killed it because memory ran out.

    Without a control group: whether the kernel killed any process of the machine for that while the child ran.
    """
    phase: str = ""
    log_tail: str = ""
    left: Sequence[str] = ()
    """Entries that were removed from its folders, because they were not regular files; such a child has failed."""
    stuck: tuple[int, ...] = ()  # Process ids of what could not be killed, and is still there.


class Failure(NamedTuple):
    """Why a child failed: the kind, one sentence, and a few useful lines of its log."""

    kind: FailureKind
    message: str
    detail: str = ""
    fences: bool = False  # Whether this alone shows that something is wrong with the node.


class _Known(NamedTuple):
    """A known message of a compiler: pattern, failure kind, and our sentence for it (empty: the compiler's own)."""

    pattern: str
    kind: FailureKind
    sentence: str = ""


FULL_DISK = "the worker's disk is full (its operator has to free space)"
_DYING_WORDS = (
    _Known(r"No space left on device|Disk quota exceeded", FailureKind.STORAGE, FULL_DISK),
    _Known(r"File too large", FailureKind.DISK_LIMIT, "it wrote a file that is larger than its node allows"),
    _Known(
        r"Gpu allocation failed|hipErrorOutOfMemory|HIP out of memory|CUDA failure 2: |cudaErrorMemoryAllocation"
        r"|CUDA_ERROR_OUT_OF_MEMORY|CUDNN_STATUS_ALLOC_FAILED|CUBLAS_STATUS_ALLOC_FAILED"
        r"|on (?:CUDA|TensorRT): (?s:.*)(?:Failed to allocate memory|is smaller than requested bytes|OutOfMemory)",
        FailureKind.GPU_MEMORY,
        "the GPU's memory ran out",
    ),
    _Known(
        r"Memory access fault by GPU|HW Exception by GPU|GPU Hang|hipErrorIllegalAddress"
        r"|CUDA failure (?:214|70[0-2]|71[4-9]|72[01]): |cudaError(?:IllegalAddress|LaunchFailure|MisalignedAddress)"
        r"|CUDA_ERROR_(?:ILLEGAL_ADDRESS|LAUNCH_FAILED|MISALIGNED_ADDRESS|ECC_UNCORRECTABLE)",
        FailureKind.GPU_FAULT,
        "the GPU reported a fault",
    ),
    _Known(
        r"CUDA failure 209: |no kernel image is available for execution|cudaErrorNoKernelImageForDevice",
        FailureKind.GPU_UNSERVED,
        "the installed libraries have no kernels for this GPU",
    ),
    _Known(
        r"CUDA failure (?:35|803|804): |(?P<what>lib(?:cud|cub|cuf|cur|nv)\w*\.so[.\d]*): cannot open shared object"
        r"|CUDNN_STATUS_\w*VERSION_MISMATCH|CUDNN_STATUS_SUBLIBRARY_LOADING_FAILED",
        FailureKind.GPU_LIBRARY,
    ),
    _Known(
        r"CUDA failure (?:46|100|101|304|802|999): |no CUDA-capable device|cudaErrorDevicesUnavailable|GPU is lost",
        FailureKind.GPU_LOST,
        "the GPU cannot be reached any more",
    ),
    _Known(
        r"No device\b|Failed to get device properties|no ROCm-capable device",
        FailureKind.GPU_FAULT,
        "the compiler found no working GPU",
    ),
    _Known(
        r"std::bad_alloc|\bbad allocation\b|MemoryError|Cannot allocate memory|Failed to allocate memory",
        FailureKind.OUT_OF_MEMORY,
        "memory ran out",
    ),
)
"""Also looked for at the end of the log of a process that died."""

_MESSAGES = (
    _Known(
        r"Target GPU SM \d+ is not supported by this TensorRT",
        FailureKind.GPU_UNSERVED,
        "the installed TensorRT has no kernels for this GPU",
    ),
    _Known(
        r"Unknown operator: (?P<what>\S+)",
        FailureKind.UNSUPPORTED_OPERATOR,
        "the compiler does not have operator {what}",
    ),
    _Known(
        r"Prototensor data type (?P<what>\d+) not supported",
        FailureKind.UNSUPPORTED_OPERATOR,
        "the compiler does not have the model's tensor type {what}",
    ),
    _Known(
        r"NOT_IMPLEMENTED|is not a registered function/op|No Op registered for|Could not find an implementation"
        r"|can't be converted to MLDataType|Unsupported model IR version|ONNX Runtime only \*guarantees\* support"
        r"|\b(?:is|are) not supported\b",
        FailureKind.UNSUPPORTED_OPERATOR,
    ),
    _Known(r"Failed reading (?:onnx|tf) file", FailureKind.BAD_MODEL, "the compiler cannot read the model file"),
    _Known(
        r"Dynamic loading or symbol lookup failed|Program version mismatch|Operator not found: "
        r"|plan file is not compatible with this version of TensorRT"
        r"|Failed to load module: ",
        FailureKind.TOOLCHAIN_MISMATCH,
    ),
    *_DYING_WORDS,
)

_TABLES = {"": _MESSAGES, FailureKind.INTERNAL: _MESSAGES, FailureKind.UNVERIFIABLE: _DYING_WORDS}
"""Known messages by the kind that the child stated."""

REFUSED = frozenset(
    {
        FailureKind.BAD_MODEL,
        FailureKind.UNSUPPORTED_OPERATOR,
        FailureKind.BAD_CALIBRATION,
        FailureKind.NOTHING_QUANTIZED,
        FailureKind.COMPILER_ERROR,
    }
)
"""Kinds by which a compiler refuses a model, or one slice of it, which does not fail the others."""

_STATED = REFUSED | {
    FailureKind.OUT_OF_MEMORY,
    FailureKind.GPU_LIBRARY,
    FailureKind.TOOLCHAIN_MISMATCH,
    FailureKind.INTERNAL,
    FailureKind.UNVERIFIABLE,
}
"""Kinds that a child may state. It cannot know the others: limits, the node, the farm, gates."""

_LONGEST_TEXT = 4000  # Characters of a child's message that the store and reports keep; the log has the whole message.

_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")


def classify(end: ChildEnd) -> Failure | None:
    """Return why a child failed; None if it answered or was cancelled. Only this function decides that."""
    if end.stuck:
        which = "process" if len(end.stuck) == 1 else "processes"
        why = "the kernel does not let go, as after a reset of the GPU; restart the machine"
        message = f"{which} {', '.join(map(str, end.stuck))} cannot be killed: {why}{_during(end)}"
        return Failure(FailureKind.GPU_FAULT, message, _useful_lines(end.log_tail), fences=True)
    if end.ok or end.by is EndedBy.CANCELLED:
        return None
    detail = _useful_lines(end.log_tail)
    if end.wrong:
        return Failure(FailureKind.COMPILER_ERROR, f"the compiler's answer {end.wrong}", detail)
    if end.by is not EndedBy.ITSELF:
        return _from_limit(end, detail)
    if end.error is not None:
        return _from_error(end.error, detail)
    return _from_death(end, detail)


def _from_limit(end: ChildEnd, detail: str) -> Failure:
    limits, left = end.limits, f"{', '.join(end.left[:3])}{' and more' if len(end.left) > 3 else ''}"
    signs = "progress and no CPU time" + (" but that of waiting" if limits.waiting else "")
    broken = FailureKind.COMPILER_ERROR
    kind, sentence = {
        EndedBy.TIME_LIMIT: (FailureKind.TIME_LIMIT, f"it took longer than {_seconds(limits.whole or limits.time)}"),
        EndedBy.HANG: (FailureKind.HANG, f"no {signs} for {_seconds(limits.hang)}"),
        EndedBy.MEMORY_LIMIT: (FailureKind.OUT_OF_MEMORY, f"it needed more memory than {_bytes(limits.memory)}"),
        EndedBy.DISK_LIMIT: (
            FailureKind.DISK_LIMIT,
            f"its attempt wrote more than {_bytes(limits.disk)} to the node's disk",
        ),
        EndedBy.FILE_LIMIT: (FailureKind.DISK_LIMIT, "it made, or has open, more files than any compiler"),
        EndedBy.PROCESS_LIMIT: (
            FailureKind.PROCESS_LIMIT,
            f"it had more than {limits.processes} processes and threads",
        ),
        EndedBy.LOG_LIMIT: (broken, f"it wrote more than {_bytes(limits.log)} of log"),
        EndedBy.NONSENSE: (broken, "it sent the worker something that is not a message"),
        EndedBy.AWAKE: (broken, "it did not stand still while another program was measured"),
        EndedBy.UNGUARDED: (FailureKind.COMPILER_CRASH, "the process that starts and guards it ended early"),
        EndedBy.STRAY_FILES: (broken, f"it left what is not a plain file: {left}"),
    }[end.by]
    return Failure(kind, sentence + _during(end), detail)


def _from_error(error: ChildError, detail: str) -> Failure:
    message = error["message"] or "the compiler failed without a message"
    detail = error["detail"] or detail
    stated = error["kind"]
    kind = FailureKind(stated) if stated in _STATED else FailureKind.COMPILER_ERROR
    if table := _TABLES.get(stated):
        found = _recognise(table, f"{message}\n{detail}")
        kind, message = (found.kind, found.message or message) if found else (kind, message)
    return Failure(kind, message[:_LONGEST_TEXT], detail[:_LONGEST_TEXT])


def _from_death(end: ChildEnd, detail: str) -> Failure:
    found = _recognise(_DYING_WORDS, end.log_tail)
    if found and end.code != 0:
        return Failure(found.kind, (found.message or policy_of(found.kind).sentence) + _during(end), detail)
    if end.code == -signal.SIGKILL and end.oom_killer:
        return Failure(FailureKind.OUT_OF_MEMORY, "the machine's memory ran out" + _during(end), detail)
    code = end.code or 0
    how = f"died by {_signal_name(-code)}" if code < 0 else f"exited with code {end.code} and no answer"
    return Failure(FailureKind.COMPILER_CRASH, f"it {how}{_during(end)}", detail)


def _recognise(table: tuple[_Known, ...], text: str) -> Failure | None:
    for known in table:
        if found := re.search(known.pattern, text):
            return Failure(known.kind, known.sentence.format(**found.groupdict()))
    return None


def _during(end: ChildEnd) -> str:
    return f" while {end.phase}" if end.phase else ""


def _useful_lines(log: str) -> str:
    lines = [_ANSI.sub("", line).rstrip()[:400] for line in log.splitlines()]
    return "\n".join([line for line in lines if line][-8:])


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _seconds(seconds: float) -> str:
    return f"{seconds:g} s" if seconds < 120 else f"{seconds / 60:g} min" if seconds < 7200 else f"{seconds / 3600:g} h"


def _bytes(size: int) -> str:
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20)):
        if size >= scale:
            return f"{size / scale:.4g} {unit}"
    return f"{size} bytes"
