"""The local farm: starts the parts that the settings do not name, keeps their data in one folder, and stops them."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from farm.errors import FarmFault
from farm.files import read_private
from farm.local.servers import (
    HOST,
    START_SECONDS,
    Server,
    free_ports,
    own_data_folder,
    require_own_data,
    start_valkey,
    start_weed,
    started,
    valkey_binary,
    weed_binary,
    write_private,
)
from farm.logging import get_logger
from farm.settings import Settings, worker_environment

log = get_logger(__name__)

SCARCE = 2 * 10**9  # With fewer free bytes of disk people are warned.

BUCKET = "farm"
CREDENTIALS = "credentials.json"  # File of a data folder; it is written at the first start.
ROOT = Path(__file__).parent.parent.parent
RESTART_DELAY = 10.0  # Seconds to which the pause before restarting a child that keeps dying grows.
FOR_EVER = 1e9  # Seconds for which a job waits at least, in a farm without a worker.
CALM = 60.0  # Seconds without a death after which a child's pauses start again from the shortest.
Say = Callable[[str], None]  # Called with a few words on what the farm waits for.


class EmbeddedFarm:
    """A whole farm on this machine, as far as the settings do not name its parts.

        with EmbeddedFarm(load_settings()) as settings:
            client = FarmClient.from_settings(settings)

    What is missing of Valkey, SeaweedFS, the farm's server and one worker is started, with its data,
    credentials and logs in `data_dir`; an `api_url` in the settings means that a farm is there already, and
    nothing is started. One process at a time runs the parts of a folder: a second one joins it (`joined`),
    and the first does not stop under it. A part that dies is started again. Nothing is left running when this
    process ends, also by kill -9.
    """

    def __init__(self, settings: Settings, *, say: Say = lambda _: None, works: bool = True) -> None:
        """`say` gets what is waited for. Without `works` it has no worker: for reading what was stored, by one process.

        Nobody joins such a farm, and it gives no job up because no worker takes it.
        """
        self.settings = settings if works else settings.model_copy(update={"pool_timeout": FOR_EVER})
        """The settings; `start` fills every address in."""
        self._works = works
        self.joined = False
        """Whether another process runs the parts."""
        self._say = say
        self._servers: list[Server] = []
        self._locks = contextlib.ExitStack()
        self._stopping = threading.Event()
        self._watcher: threading.Thread | None = None

    def start(self) -> Settings:
        """Start what is missing, or join the farm that runs in this folder; return when it takes work.

        Raises UsageError for a folder that cannot be used, FarmFault (with the end of its log) for a part
        that does not start.
        """
        if self.settings.api_url:
            self.joined = True
            return self.settings
        # Refuse early if a server that has to be started is not installed.
        if not self.settings.redis_url.get_secret_value():
            valkey_binary()
        if not (self.settings.s3_endpoint or self.settings.s3_bucket):
            weed_binary()
        folder = own_data_folder(self.settings.data_dir)
        self.settings = self.settings.model_copy(update={"data_dir": folder})
        if (free := shutil.disk_usage(folder).free) < SCARCE:
            self._say(f"only {free / 1e9:.1f} GB are free at {folder}: servers stop when a disk is full")
        deadline, waits = time.monotonic() + START_SECONDS, False
        while not self._take("lock", fcntl.LOCK_EX | fcntl.LOCK_NB):
            # Somebody runs the parts of this folder, or is about to, or is about to stop.
            if self._join():
                return self.settings
            if time.monotonic() > deadline:
                raise FarmFault(
                    f"the farm in {folder} belongs to another process and does not answer",
                    hint=f"end that process, or choose another data_dir; its logs are in {folder}/logs",
                )
            if not waits:
                self._say("waiting for the farm that already runs in this folder")
            waits = True
            time.sleep(0.1)
        try:
            self._start_parts()
        except BaseException:
            self.stop(wait_for_others=False)
            raise
        return self.settings

    def _join(self) -> bool:
        """Join the farm that another process runs in this folder; False when there is none that answers."""
        # Locked first: from here on the other process does not stop its farm before we leave.
        if not self._take("users", fcntl.LOCK_SH | fcntl.LOCK_NB):
            return False
        with contextlib.suppress(OSError, ValueError):
            shared = json.loads(read_private(self.settings.data_dir / "farm.json", 1 << 20))
            settings = _completed(self.settings, shared)
            if _asked(settings, "/v1/health") is not None:
                self.settings, self.joined = settings, True
                return True
        self._locks.close()
        return False

    # --- starting -------------------------------------------------------------------------------------------

    def _start_parts(self) -> None:
        folder = self.settings.data_dir
        (folder / "farm.json").unlink(missing_ok=True)
        known, logs = _credentials(folder), folder / "logs"
        shared = {"api_token": self.settings.api_token.get_secret_value() or known["api_token"]}
        if not self.settings.redis_url.get_secret_value():
            self._say(
                "starting Valkey" if self._works else "starting the farm of this folder, to read what it has stored"
            )
            valkey = self._add(start_valkey(folder / "valkey", known["redis_password"], log=logs / "valkey.log"))
            shared["redis_url"] = valkey.url
        if not (self.settings.s3_endpoint or self.settings.s3_bucket):
            if self._works:
                self._say("starting SeaweedFS")
            keys = {name: known[name] for name in ("s3_access_key", "s3_secret_key")}
            weed = self._add(start_weed(folder / "s3", *keys.values(), bucket=BUCKET, log=logs / "weed.log"))
            shared |= {"s3_endpoint": weed.url, "s3_public_endpoint": "", "s3_bucket": BUCKET, **keys}
        if self._works:
            self._say("starting the farm's server and a worker")
        worker = self._part(_completed(self.settings, shared), "worker", []) if self._works else None
        if worker:
            self._add(worker).spawn()
        server = self._add(started(lambda: self._server(shared), FarmFault, "the farm's server"))
        shared["api_url"] = server.url
        self.settings = _completed(self.settings, shared)
        if worker:
            # This very worker: one of an earlier run may still be in the farm's list.
            listed = partial(_asked, self.settings, "/v1/workers")
            worker.ready = lambda: any(item["pid"] == worker.pid for item in (listed() or {"items": []})["items"])
            if not worker.wait_until_ready():
                raise FarmFault("the farm's worker did not start", hint=worker.last_words())
            write_private(folder / "farm.json", json.dumps(shared, indent=1))
        self._watcher = threading.Thread(target=self._watch, name="embedded-farm", daemon=True)
        self._watcher.start()

    def _add(self, server: Server) -> Server:
        self._servers.append(server)
        return server

    def _server(self, shared: Mapping[str, str]) -> Server:
        port = self._port()
        settings = _completed(self.settings, {**shared, "api_url": f"http://{HOST}:{port}"})
        server = self._part(settings, "server", ["--host", HOST, "--port", str(port)])
        server.ready = lambda: _asked(settings, "/v1/health") is not None
        return server

    def _port(self) -> int:
        """Return the port of the last start if it is free, so that the URLs of pages stay; else another one."""
        place = self.settings.data_dir / "port"
        with contextlib.suppress(OSError, ValueError), socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            known = int(read_private(place, 16))
            probe.bind((HOST, known))
            return known
        (port,) = free_ports(1)
        write_private(place, str(port))
        return port

    def _part(self, settings: Settings, name: str, arguments: Sequence[str]) -> Server:
        """One of the farm's own processes; the settings reach it in its environment."""
        # A worker that goes with its store and storage cannot finish what it runs: it gives it back at once.
        settings = settings.model_copy(update={"grace_seconds": 0.0})
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        worker = name == "worker"
        given = worker_environment(settings, os.environ) if worker else {**os.environ, **settings.environment()}
        return Server(
            name,
            settings.api_url,
            # -P: a `tasks` or `celery.py` in the user's folder is not ours.
            [sys.executable, "-P", "-m", "farm", {"server": "serve"}.get(name, name), *arguments],
            settings.data_dir / "logs" / f"{name}.log",
            ready=lambda: True,
            patience=10,
            environment={**given, "PYTHONPATH": path},
        )

    # --- running --------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Start again what dies: at once, then with growing pauses while it keeps dying."""
        pauses = {server.name: 0.0 for server in self._servers}
        deaths = dict(pauses)
        while not self._stopping.wait(0.5):
            for server in self._servers:
                server.rotate()
                if server.alive:
                    continue
                now = time.monotonic()
                calm = now - deaths[server.name] > CALM
                pauses[server.name] = 0.0 if calm else min(RESTART_DELAY, 2 * pauses[server.name] + 0.5)
                deaths[server.name] = now
                if server.status == 0:
                    log.info("embedded process ended, starting it again", part=server.name)
                else:
                    log.warning("embedded process died, starting it again", part=server.name, log=str(server.log))
                if not self._stopping.wait(pauses[server.name]):
                    server.spawn()

    # --- stopping -------------------------------------------------------------------------------------------

    def stop(self, *, wait_for_others: bool = True) -> None:
        """Leave the farm; who started it ends its parts, after those who joined it have left.

        Repeatable. What was stored stays in the folder for the next start.
        """
        if self._servers and wait_for_others and not self._take("users", fcntl.LOCK_EX | fcntl.LOCK_NB):
            self._say("waiting for another process that uses this farm")
            self._take("users", fcntl.LOCK_EX)
        self._stopping.set()
        if self._watcher:
            self._watcher.join()
        # Those who depend on others first; a worker gives its attempts back to the store.
        for group in (("server", "worker"), ("weed", "valkey")):
            members = [server for server in self._servers if server.name in group]
            for server in members:
                server.release()
            for server in members:
                server.stop()
        if self._servers:
            (self.settings.data_dir / "farm.json").unlink(missing_ok=True)
        self._servers.clear()
        self._locks.close()

    def __enter__(self) -> Settings:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # Ctrl-C means that the farm has to end.
        self.stop(wait_for_others=kind is not KeyboardInterrupt)

    def _take(self, name: str, mode: int) -> bool:
        """Lock a file of the folder until `stop`; the kernel lets go of it when this process dies."""
        descriptor = os.open(self.settings.data_dir / name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, mode)
        except BlockingIOError:
            os.close(descriptor)
            return False
        self._locks.callback(os.close, descriptor)
        return True


def has_data(settings: Settings) -> bool:
    """Whether a farm of this machine has stored something in the data folder, and no farm is named to ask instead."""
    return not settings.api_url and (settings.data_dir / CREDENTIALS).is_file()


def _credentials(folder: Path) -> dict[str, str]:
    """Return the folder's own credentials, made once: data written with them can be read after a restart.

    Credentials that others could read, or that came with a copy of the folder, do not count. Data without credentials
    came with the folder, too. Raises UsageError for such data.
    """
    path = folder / CREDENTIALS
    names = ("redis_password", "s3_access_key", "s3_secret_key", "api_token")
    known: dict[str, str] = {}
    try:
        known = json.loads(read_private(path, 1 << 20))
    except FileNotFoundError:
        pass
    except OSError as error:
        log.warning("making new credentials", file=str(path), reason=error.strerror)
    if not known:
        require_own_data(folder)
    if missing := [name for name in names if name not in known]:
        known |= {name: secrets.token_hex(20) for name in missing}
        write_private(path, json.dumps(known, indent=1))
    return {name: known[name] for name in names}


def _completed(settings: Settings, shared: Mapping[str, str]) -> Settings:
    """The settings with the addresses and credentials that an embedded farm has chosen."""
    known = {name: value for name, value in shared.items() if name in Settings.model_fields}
    return Settings.model_validate({**dict(settings), **known})


def _asked(settings: Settings, path: str) -> Any:
    """The farm's answer to a GET; None if it does not answer, or not with JSON."""
    token = settings.api_token.get_secret_value()
    request = urllib.request.Request(settings.api_url + path, headers={"Authorization": f"Bearer {token}"})  # noqa: S310
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:  # noqa: S310 - our own loopback address
            return json.load(answer)
    except (OSError, ValueError):
        return None
