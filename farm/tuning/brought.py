"""What a user brings for a tuning database: read in a sealed child, never in the server."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import asdict, astuple, dataclass
from pathlib import Path

from farm.compiling.child_process import ChildLimits, Seal, run_child
from farm.compiling.failures import classify
from farm.errors import FarmFault, UsageError
from farm.files import read_plain
from farm.jobs.state import Fault
from farm.runner.documents import ChildRequest
from farm.spec import Device
from farm.tuning import text
from farm.tuning.records import RecordSource, Snapshot

CHILD = Path(__file__).with_name("import_child.py")

LIMITS = ChildLimits(time=120, memory=1 << 30, log=1 << 20, disk=256 << 20)
"""What reading it may take: what is brought is bounded too (`text.BROUGHT`), and takes a quarter of that memory."""

KNOWN_MEMORY = 64
"""Bytes of memory for each packed byte of what the database holds already."""


class ImportRequest(ChildRequest, total=False):
    """What `import_child.py` is asked: the files to read and to write, and what the records were measured on."""

    offered: str
    known: str
    delta: str
    made_on: Mapping[str, object]
    toolchain: str
    miopen: str
    source: list[str]


@dataclass(frozen=True, slots=True)
class Brought:
    """What fits. `delta` is packed (empty: nothing fits), `records` counts it by store, `added` what is new in it.

    `refused` names the files that do not fit, with the reason.
    """

    delta: bytes
    records: Mapping[str, int]
    added: int
    refused: Mapping[str, str]


def read_brought(
    packed: bytes, known: Snapshot, device: Device, toolchain: str, miopen: str, source: RecordSource
) -> Brought:
    """Return what of a packed snapshot fits a device and its toolchain, measured by `source`; see `fitting`.

    Raises UsageError for what cannot be read, or needs more memory or time than an import may take.
    """
    with tempfile.TemporaryDirectory(prefix="farm-import-") as name:
        folder = Path(name)
        offered, ours, made = folder / "offered.gz", folder / "known.gz", folder / "made"
        offered.write_bytes(packed)
        ours.write_bytes(text.pack(known))
        made.mkdir()
        request: ImportRequest = {
            "action": "import",
            "offered": str(offered),
            "known": str(ours),
            "delta": str(made / "delta.gz"),
            "made_on": asdict(device),
            "toolchain": toolchain,
            "miopen": miopen,
            "source": list(astuple(source)),
        }
        end = run_child(
            request,
            log_path=folder / "log.txt",
            limits=_limits(ours.stat().st_size),
            folder=folder,
            seal=Seal(read=[offered, ours], write=[made]),
            script=CHILD,
        )
        if not end.ok or end.result is None:
            failure = classify(end)
            if failure is None or failure.kind.policy.fault is Fault.FARM:
                raise FarmFault(f"the import could not be read: {failure.message if failure else 'interrupted'}")
            raise UsageError(f"the import cannot be read: {failure.message}", hint="bring a part of it at a time")
        if "refusal" in end.result:
            raise UsageError(end.result["refusal"], hint=end.result["hint"])
        delta = read_plain(made / "delta.gz", LIMITS.disk)
    return Brought(delta, end.result["records"], end.result["added"], end.result["refused"])


def _limits(known: int) -> ChildLimits:
    return ChildLimits(time=LIMITS.time, memory=LIMITS.memory + KNOWN_MEMORY * known, log=LIMITS.log, disk=LIMITS.disk)
