"""A farm whose every part is a real process that a test may break: Valkey, control plane, workers."""

from __future__ import annotations

import json
import os
import secrets
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import redis
from pydantic import SecretStr

from farm.app import Farm
from farm.artifacts.s3 import S3Store
from farm.client.client import FarmClient
from farm.client.freezing import Frozen
from farm.control.audit import Auditor
from farm.errors import FarmFault
from farm.local import embedded, servers
from farm.local.servers import Server
from farm.settings import load_settings
from farm.store import Store
from tests.support.api_farm import freeze_manifest
from tests.support.helpers import alive, wait_until
from tests.support.jobs import ROOT, Worker, join_pool, running_workers

LEASE = 3.0
ENDED = {"succeeded", "failed", "cancelled"}
MANIFEST = """\
version: 1
name: chaos
targets: [onnxruntime/cpu]
salt: "{salt}"
{options}
models:
{models}
"""
MODEL = "  - {{name: net{first}, source: {{path: net.onnx}}, batches: [{batches}]}}"
MOST_BATCHES = 1000
"""Of one model in a manifest."""

Script = Mapping[str, list[dict[str, Any]]]


class Rig:
    """One farm. Every part that it starts is gone when its block ends."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.folder = folder
        self.valkey = servers.start_valkey(folder / "valkey", secrets.token_hex(8))
        self.settings = load_settings(
            {},
            **{
                "data_dir": folder / "data",
                "redis_url": self.valkey.url,
                "api_token": "chaos-" + secrets.token_hex(8),
                "lease_seconds": LEASE,
                "renew_seconds": 0.5,
                "retry_delay": 0.1,
                "grace_seconds": 5.0,
                "threads": 1,
                "measure_seconds": 0.01,
                "log_level": "error",
                **settings,
            },
        )
        (folder / "data").mkdir()
        self.script({"": [{}]})
        self.farm = Farm(self.settings)
        self.parts = ExitStack()
        self.parts.callback(self.valkey.stop)
        self.builds: list[str] = []
        self.started: list[Worker] = []
        self._freezing = threading.Lock()

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop_workers()
        self.parts.close()
        wait_until(lambda: not self.processes(), message="nothing is left running")

    def through(self, redis_url: str) -> None:
        """Have everybody who is started from here on, and ourselves, reach Valkey by another address."""
        self.settings = self.settings.model_copy(update={"redis_url": SecretStr(redis_url)})
        self.farm = Farm(self.settings)

    # --- parts --------------------------------------------------------------------------------------------------

    @property
    def store(self) -> Store:
        return self.farm.store

    @property
    def artifacts(self) -> S3Store:
        return self.farm.artifacts  # type: ignore[return-value]

    @property
    def raw(self) -> redis.Redis:
        """Valkey past the code under test."""
        return redis.Redis.from_url(self.valkey.url, decode_responses=True)

    def serve(self, root: Path = ROOT, **settings: Any) -> FarmClient:
        """Start a control plane in a process of its own, and return a client of its API."""
        (port,) = servers.free_ports(1)
        host = servers.HOST
        changed = self.settings.model_copy(update={"api_url": f"http://{host}:{port}", **settings})
        server = Server(
            "server",
            changed.api_url,
            [sys.executable, "-P", "-m", "farm", "serve", "--host", host, "--port", str(port), "--behind-proxy"],
            self.folder / f"server-{host}-{port}.log",
            ready=lambda: embedded._asked(changed, "/v1/health") is not None,
            patience=1,
            environment={**os.environ, **changed.environment(), "PYTHONPATH": str(root)},
        )
        server.spawn()
        self.parts.callback(server.stop)
        assert server.wait_until_ready(), server.last_words()
        self.server = server
        client = FarmClient(changed.api_url, changed.api_token.get_secret_value())
        self.parts.callback(client.close)
        return client

    def workers(self, *nodes: str, slots: int = 2, **options: Any) -> list[Worker]:
        """Start a worker with the scripted compiler on each node; return when all are known."""
        settings = options.pop("settings", self.settings)
        options.setdefault("app", "tests.chaos.stub")
        workers = self.parts.enter_context(running_workers(settings, self.store, nodes, slots, **options))
        self.started += workers
        return workers

    def node(self, slots: int = 2, root: Path = ROOT) -> Server:
        """Start a whole worker of the code in a folder, with this machine's own compilers."""
        node = Server(
            "worker",
            "",
            [sys.executable, "-P", "-m", "farm", "worker", "--slots", str(slots)],
            self.folder / "worker.log",
            ready=lambda: bool(self.store.workers.list()),
            patience=1,
            environment={**os.environ, **self.settings.environment(), "PYTHONPATH": str(root)},
        )
        node.spawn()
        self.parts.callback(node.stop)
        assert node.wait_until_ready(), node.last_words()
        return node

    def stop_workers(self) -> None:
        """kill -9 of every supervisor; nothing of a worker may outlive it."""
        for worker in self.started:
            worker.supervisor.kill()
            worker.supervisor.wait()
        self.started.clear()

    def script(self, script: Script) -> None:
        """Say what compilers do from now on, by batch ("": all others) and attempt."""
        path = self.folder / "data" / "script.json"
        path.with_suffix(".new").write_text(json.dumps(script))
        path.with_suffix(".new").replace(path)

    def kill_valkey(self) -> None:
        """kill -9, and start it again on the same data."""
        assert self.valkey.pid
        os.kill(self.valkey.pid, signal.SIGKILL)
        wait_until(lambda: not self.valkey.alive)
        self.start_valkey()

    def restart_valkey(self) -> None:
        """SIGTERM, and start it again on the same data."""
        self.valkey.stop()
        self.start_valkey()

    def start_valkey(self) -> None:
        self.valkey.spawn()
        assert self.valkey.wait_until_ready(), self.valkey.last_words()

    # --- builds -------------------------------------------------------------------------------------------------

    def freeze(self, cells: int, *, salt: str = "", options: str = "") -> Frozen:
        """Make a submission of so many cells (batches from 1 on) that no other build has, but for its `salt`.

        `options` are further lines of its manifest.
        """
        models = [
            MODEL.format(first=first, batches=", ".join(map(str, range(first, min(first + MOST_BATCHES, cells + 1)))))
            for first in range(1, cells + 1, MOST_BATCHES)
        ]
        text = MANIFEST.format(salt=salt or secrets.token_hex(8), models="\n".join(models), options=options)
        with self._freezing:  # Submitters share the folder.
            return freeze_manifest(self.folder, text, batch="batch")

    def submit(self, client: FarmClient, cells: int, **options: Any) -> str:
        """Submit so many cells and return the build's id, once it is acknowledged."""
        build = client.submit(self.freeze(cells, **options))
        self.builds.append(build["id"])
        return str(build["id"])

    def wait(self, build_id: str, timeout: float = 180.0) -> list[dict[str, Any]]:
        """Wait for a build's report and return its cells."""

        def reported() -> bool:
            build = self.store.builds.get(build_id)
            return bool(build and build["state"] == "reported")

        wait_until(reported, timeout, f"{build_id} is reported")
        return self.farm.build_reader.cells("main", build_id)

    def attempts(self, cell: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The attempts of a cell's job."""
        job = self.store.jobs.get(cell["job"])
        assert job
        return list(job["attempts"])

    def orders(self, count: int) -> list[dict[str, Any]]:
        """Return key, identifier and spec of so many cells, planned as ever, for who plays the worker himself."""
        join_pool(self.store, ttl=3600)
        plan, _ = self.farm.builds._planner.plan("main", self.freeze(count).submission, "")
        return [
            {"key": cell["key"], "identifier": cell["identifier"], "spec": cell["order"]["spec"]} for cell in plan.cells
        ]

    def compiled(self, cell: Mapping[str, Any]) -> int:
        """In how many attempts a cell's program was compiled."""
        return sum("compiling" in one["phases"] for one in self.attempts(cell)) if cell["job"] else 0

    def ended(self, build_id: str) -> bool:
        """Whether a build's cells have all ended."""
        build = self.store.builds.get(build_id)
        return bool(build and build["state"] != "open")

    def running(self, build_id: str) -> list[dict[str, Any]]:
        """Cells that run now."""
        return [cell for cell in self.store.builds.cells(build_id) if cell["state"] == "running"]

    # --- afterwards ---------------------------------------------------------------------------------------------

    def published(self) -> Counter[str]:
        """How often workers wrote the sidecar of each key."""
        path = self.folder / "data" / "published"
        lines = path.read_text().splitlines() if path.exists() else []
        return Counter(line.split()[0] for line in lines if line.endswith(" new"))

    def compiles(self) -> Counter[str]:
        """How often each job was compiled, to the end or not."""
        path = self.folder / "data" / "compiles"
        return Counter(line.split()[0] for line in path.read_text().splitlines()) if path.exists() else Counter()

    def adopted(self) -> int:
        """How often a worker found another's artifact at its own publication."""
        path = self.folder / "data" / "published"
        return path.read_text().count(" adopted\n") if path.exists() else 0

    def compilers(self) -> list[int]:
        """Process ids of compilers of this farm, guards included."""
        return [one.pid for one in self.processes() if is_compiler(one)]

    def processes(self) -> list[psutil.Process]:
        """Processes whose command or environment names this farm's folder, but for Valkey and ourselves."""
        mine = os.getpid()
        return [
            one
            for one in psutil.process_iter()
            if one.pid != mine and alive(one.pid) and any(str(self.folder) in word for word in words_of(one))
            if not any("valkey" in word for word in words_of(one)[:6])
        ]

    def ledger(self, rebuilt: Collection[str] = ()) -> dict[str, int]:
        """Check what every test ends with, and return the sums: nothing lost, nothing twice, nothing left over.

        Accepted cells = finished + failed + cancelled, one publication for each key that succeeded (two for the keys
        that were damaged and `rebuilt`), and an audit without findings.
        """
        sums: Counter[str] = Counter()
        keys = set()

        def accepted(build_id: str) -> int:
            return len(json.loads(self.artifacts.get_object(f"ns/main/builds/{build_id}/plan.json").data)["cells"])

        with ThreadPoolExecutor(8) as pool:
            for count, cells in zip(pool.map(accepted, self.builds), pool.map(self.wait, self.builds), strict=True):
                assert count == len(cells), "a cell was lost"
                states = Counter(cell["state"] for cell in cells)
                assert set(states) <= ENDED, states
                sums.update(states)
                sums["accepted"] += count
                keys |= {cell["key"] for cell in cells if cell["state"] == "succeeded"}
            there = pool.map(lambda key: self.artifacts.lookup(["main"], key), keys)
            absent = [key for key, artifact in zip(keys, there, strict=True) if not artifact]
        assert not absent, f"succeeded, and not there: {absent}"
        twice = {key: count for key, count in self.published().items() if count > 1 + (key in rebuilt)}
        assert not twice, f"published more than once: {twice}"
        assert list(Auditor(self.store, self.artifacts, deep=True).findings())[:-1] == []
        sums["lost"] = sums["accepted"] - sum(sums[state] for state in ENDED)
        sums["published_twice"] = len(twice)
        return dict(sums)


def is_compiler(process: psutil.Process) -> bool:
    """Whether this is a scripted compiler, or the guard or the launcher of one."""
    return any("chaos/compiler.py" in word for word in words_of(process))


def words_of(process: psutil.Process) -> list[str]:
    """Command line, folder and environment of a process, as far as we may see them."""
    try:
        return [*process.cmdline(), process.cwd(), process.environ().get("FARM_DATA_DIR", "")]
    except psutil.Error:
        return []


def gone(pids: list[int]) -> bool:
    return not any(alive(pid) for pid in pids)


def insist(call: Callable[[], Any], timeout: float = 120.0, *, every: float = 0.1) -> Any:
    """Repeat what the farm cannot do for now, after so many seconds each time."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            return call()
        except FarmFault:
            if time.monotonic() > deadline:
                raise
            pause(every)


def pause(seconds: float) -> None:
    """Let a fault last: what is waited for is time itself."""
    end = time.monotonic() + seconds
    wait_until(lambda: time.monotonic() >= end, timeout=seconds + 5)
