"""Health of a node: its probe, a program that is known to be good; room on its disk; and the port that tells of it.

The probe runs a model of a few bytes through the pipeline of a job, in sealed children, on each GPU of a kind of slot,
or on one CPU slot. A node that fails the probe would fail jobs.

A worker's health over HTTP, for systemd, Kubernetes and monitoring:

    GET /live     200 while the worker looks after its slots; at 503 a restart would help
    GET /ready    200 when every kind of slot takes jobs; 503 while one starts, rests, drains, is fenced or has no store
    GET /metrics  what the node's processes count, for Prometheus

The first two carry the same document. It holds nothing secret, and nothing can be changed here.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, NamedTuple, cast

from farm.compiling.attempt import FreeSlots, Slot, by_toolchain, is_same_build
from farm.compiling.pipeline import Children, InputFiles, Pipeline, StepEnded, Steps, StepSettings
from farm.errors import FarmError, UsageError
from farm.files import disk_of
from farm.jobs.state import AttemptLimits, FailureKind
from farm.logging import get_logger
from farm.manifest.parsing import parse_manifest
from farm.matrix.cells import expand
from farm.matrix.combinations import combine
from farm.metrics.instruments import CONTENT_TYPE
from farm.models.frozen import read_model
from farm.node.disk import WorkFolder, make_room
from farm.node.gpus import until_forgotten
from farm.node.survey import SlotKind
from farm.node.survey import probe as look_for
from farm.results.gates import judge
from farm.runner.documents import CheckAnswer, Evidence
from farm.settings import Settings
from farm.targets.pools import Pool

log = get_logger(__name__)

SLOW_SECONDS = 5.0
"""A disk that takes so long to keep a megabyte is slow: logs, programs and databases wait for it, too."""

WRITE_EVERY = 60.0  # Seconds between two such writes.
LONGEST_PAUSE = 3600.0  # Seconds between two health probes of a fenced node, however long it has been.
PROBE_SECONDS = 300.0  # Time limit of a probe; the first compile on a GPU fills MIGraphX's caches.

MANIFEST = """
version: 1
name: health
targets: ["{target}"]
precisions: [fp32]
models: [{{name: probe, source: {{path: probe.onnx}}, samples: {{generate: 2, seed: 0}}}}]
"""

MODEL = Path(__file__).with_name("probe.onnx")
"""A matrix product and an activation with equal weights: if its outputs are wrong, the node is at fault."""

CONTENT: CheckAnswer = {
    "inputs": [{"name": "x", "dtype": "float32", "shape": [16, 16]}],
    "outputs": [{"name": "y", "dtype": "float32", "shape": [16, 16]}],
    "opset": 13,
    "operators": {"MatMul": 1, "Relu": 1},
    "weight_dtypes": ["float32"],
    "external_files": [],
}
"""What is in it: to read it here would keep onnx and numpy, 40 MB, in the supervisor of every worker."""


def lacks_room(settings: Settings) -> str:
    """Make room on the disk; return why attempts have none to work in, as one sentence; empty if they have."""
    given = "its cache has given all"
    try:
        make_room(settings)
    except FileNotFoundError:  # There is no cache yet.
        pass
    except OSError as error:  # Such as of a disk that is read-only now. The attempts that run go on.
        given = f"its cache gives none ({error})"
    _, free = disk_of(settings.data_dir)
    if free >= settings.min_free_bytes:
        return ""
    needed = f"{settings.min_free_bytes / 1e9:g} GB are needed, and {given}: free some space"
    return f"its disk is full: {free / 1e9:.2f} GB free at {settings.data_dir.absolute()}, {needed}"


class DiskWatch:
    """Times how long the disk of a folder takes to keep a megabyte. One write at a time, each in a thread."""

    def __init__(self, folder: Path, sync: Callable[[int], object] = os.fsync) -> None:
        self._folder = folder
        self._sync = sync
        self._began: float | None = None
        self._next = 0.0
        self._took = 0.0

    @property
    def slow(self) -> str:
        """Why the disk is slow, as one sentence, also while a write hangs; empty if it is not."""
        began = self._began
        took = self._took if began is None else max(self._took, time.monotonic() - began)
        if took < SLOW_SECONDS:
            return ""
        how = "see `dmesg` and `iostat` there, or set data_dir to another disk"
        return f"its disk is slow: a megabyte took {took:.0f} s at {self._folder}: {how}"

    def start(self) -> None:
        """Start a write, unless one runs or was not long ago."""
        if self._began is None and time.monotonic() >= self._next:
            self._began = time.monotonic()
            threading.Thread(target=self.look, name="disk-watch", daemon=True).start()

    def look(self) -> str:
        """Write now, and return what `slow` says of it. A disk that cannot be written to is not called slow."""
        began = self._began = time.monotonic()
        with suppress(OSError), TemporaryFile(dir=self._folder) as file:
            file.write(bytes(1 << 20))
            file.flush()
            self._sync(file.fileno())
        self._took = time.monotonic() - began
        self._began, self._next = None, began + WRITE_EVERY
        return self.slow


def probe(settings: Settings, kind: SlotKind) -> str:
    """Return why slots of this kind cannot compile and run a good program, as one sentence; empty if they can.

    Waits for GPUs that attempts hold. The result counts only if `lacks_room` finds nothing.
    """
    pool = next((pool for pool in kind.pools if not pool.untuned), kind.pools[0])
    others = {
        each.toolchain.rpartition("-")[2]: each
        for each in kind.pools
        if each.target.compiler != pool.target.compiler or not is_same_build(each.toolchain, pool.toolchain)
    }
    if changed := [text for other in others.values() if (text := _changed(settings, other))]:
        return "; ".join(changed)
    slots = list({slot.gpu: slot for slot in kind.slots}.values())
    # Probes work where attempts do: a disk that cannot be written to fails both.
    with closing(WorkFolder(settings.data_dir.resolve() / "work")) as work, ThreadPoolExecutor(len(slots)) as threads:
        found = threads.map(lambda slot: _probe_slot(settings, pool, slot, work), slots)
    return "; ".join(filter(None, found))


class Probes:
    """A worker's health probes: one at a time, each in a thread, at growing pauses while the node is fenced."""

    def __init__(self, probe: Callable[[], str], pause: float, nudge: Callable[[], None]) -> None:
        self._probe = probe
        self._nudge = nudge
        self._first_pause = self._pause = pause
        self._running = False
        self._fences = 0
        self.due_at = 0.0
        """When the pause after the last one is over, by the monotonic clock."""
        self.answer: str | None = None
        """What the last probe found wrong, until it is reported or not to be believed; empty: nothing."""
        self.row = 0
        """How many passed in a row since the node was fenced."""
        self.proven = False
        """Whether the store knows one's answer."""

    @property
    def due(self) -> bool:
        """Whether the pause after the last one is over."""
        return time.monotonic() >= self.due_at

    def begin_row(self) -> None:
        """The node was fenced: earlier passes do not count. Each further fence makes the pauses longer."""
        self.row, self.due_at = 0, 0.0
        self._pause = self._first_pause * 2 ** min(self._fences, 20)
        self._fences += 1

    def start(self) -> None:
        """Start a probe, unless one runs or its result has not been reported yet."""
        if self._running or self.answer is not None:
            return
        self._running = True
        # A daemon: it may take minutes, and nobody waits for it when the worker ends.
        threading.Thread(target=self._run, name="health-probe", daemon=True).start()

    def _run(self) -> None:
        try:
            wrong = self._probe()
        except Exception as error:  # What breaks a probe would break attempts.
            log.exception("health probe broke")
            wrong = f"{type(error).__name__}: {error}"
        self.row = 0 if wrong else self.row + 1
        self.due_at = time.monotonic() + min(self._pause, LONGEST_PAUSE)
        self._pause *= 2
        self._running, self.answer = False, wrong
        self._nudge()


def _probe_slot(settings: Settings, pool: Pool, slot: Slot, work: WorkFolder) -> str:
    where = f"GPU {slot.gpu}" if slot.gpu else str(pool.target)
    try:
        with (
            FreeSlots([slot], settings.lock_dir, until_forgotten).one(threading.Event()) as held,
            work.place("health-") as folder,
        ):
            assert held
            return _compiled_well(settings, pool, held, folder)
    except StepEnded as ended:
        assert ended.failure
        return f"{where}: {ended.failure.kind}: {ended.failure.message}"
    except (FarmError, OSError) as error:
        return f"{where}: {error}"


def _changed(settings: Settings, pool: Pool) -> str:
    """Return how the compiler of a pool differs from the registered one; empty if it does not."""
    device = pool.target.device if pool.target.kind.module else ""
    installation = by_toolchain(settings.other_toolchains).get(pool.toolchain)
    found = look_for(pool.target.compiler, settings, device=device, installation=installation)
    here = str(found.get("toolchain") or found.get("reason"))
    # The label may have the version of ROCm, which is not asked for here.
    if is_same_build(here, pool.toolchain):
        return ""
    return f"{pool.target}: {FailureKind.TOOLCHAIN_MISMATCH}: here is {here}, not {pool.toolchain}"


def _compiled_well(settings: Settings, pool: Pool, slot: Slot, folder: Path) -> str:
    model = folder / "model" / "probe.onnx"
    model.parent.mkdir()
    shutil.copyfile(MODEL, model)
    manifest = parse_manifest(MANIFEST.format(target=pool.target), "the health probe")
    [cell] = expand(combine(manifest), {"probe": read_model(model, check=lambda *_: CONTENT)}, {}, [pool])
    limits = AttemptLimits(time=PROBE_SECONDS, memory=0)
    once = replace(StepSettings.of(settings), measure_seconds=1e-3)
    children = Children(folder, once, limits, lambda *_: None, threading.Event(), slot)
    installation = by_toolchain(settings.other_toolchains).get(pool.toolchain)
    steps = Steps(cell.order, children, keyed=True, installation=installation)
    pipeline = Pipeline(steps, InputFiles(model))
    if pool.untuned:
        pipeline.compile()
        return ""
    record = pipeline.run()
    if steps.refused:
        return f"{pool.target}: {next(iter(steps.refused.values()))}"  # Every reference can run this model.
    compared = cast("Evidence | None", record["verification"])
    wrong = judge(compared, cell.gates["tolerance"]) if compared else None
    return f"{pool.target}: {wrong.message}" if wrong else ""


PATIENCE = 5.0  # Seconds that a client has to send its request and to read the answer.
MOST_CONNECTIONS = 64  # Connections at once.


class Health(NamedTuple):
    """Whether the worker lives, and how its kinds of slots are (`{"node", "workers": [{"consuming", …}]}`)."""

    alive: bool
    document: Mapping[str, Any]


class _HealthServer(ThreadingHTTPServer):
    """Closes connections that take too long, and new ones if there are too many: each has a thread."""

    daemon_threads = True

    def __init__(self, *arguments: Any) -> None:
        self._open: dict[Any, float] = {}
        """When each connection began."""
        super().__init__(*arguments)

    def process_request(self, request: Any, client_address: Any) -> None:
        if len(self._open) >= MOST_CONNECTIONS:
            super().shutdown_request(request)
            return
        self._open[request] = time.monotonic()
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._open.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Look at the open connections, every half second or so."""
        for request, began in list(self._open.items()):
            if time.monotonic() - began > PATIENCE:
                with suppress(OSError):
                    request.shutdown(socket.SHUT_RDWR)  # Its thread then comes to its end.

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a client that went away."""


@contextmanager
def serve_health(port: int, look: Callable[[], Health], metrics: Callable[[], bytes]) -> Iterator[None]:
    """Answer on `port` (0: not at all) while the block runs. Raises UsageError if the port is taken."""
    if not port:
        yield
        return

    class Handler(BaseHTTPRequestHandler):
        timeout = PATIENCE

        def do_GET(self) -> None:
            if self.path == "/metrics":
                self._answer(200, CONTENT_TYPE, metrics())
                return
            alive, document = look()
            ready = alive and all(worker["consuming"] for worker in document["workers"])
            states = {"/live": alive, "/ready": ready}
            if self.path not in states:
                self.send_error(404, "here are /live, /ready and /metrics")
                return
            body = json.dumps({"alive": alive, "ready": ready, **document}).encode()
            self._answer(200 if states[self.path] else 503, "application/json", body)

        def _answer(self, status: int, kind: str, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Log nothing: requests come every few seconds."""

    try:
        server = _HealthServer(("", port), Handler)
    except OSError as error:
        raise UsageError(f"health_port {port}: {error.strerror}", hint="choose another, or 0 for none") from None
    threading.Thread(target=server.serve_forever, name="health-port", daemon=True).start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
