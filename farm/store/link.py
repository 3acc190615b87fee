"""Link: the only connection to the server. Sends commands and Lua scripts; raises the farm's errors if it is away.

Where several servers are, one is the primary, and Sentinels say which one it is now. Their address is
`sentinel://USER:PASSWORD@HOST:PORT,HOST:PORT/0?master=NAME` with the Sentinels' places; `sentinels://` is the same with
TLS, also to the Sentinels. `sentinel_username` and `sentinel_password` are for these.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

import redis
from redis.backoff import ExponentialBackoff
from redis.client import NEVER_DECODE
from redis.connection import SSLConnection, parse_url
from redis.exceptions import (
    AuthenticationError,
    ConnectionError,
    MasterDownError,
    NoPermissionError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    ResponseError,
    TimeoutError,
)
from redis.retry import Retry
from redis.sentinel import MasterNotFoundError, Sentinel, SentinelManagedConnection

from farm.errors import StoreUnavailable, UsageError
from farm.metrics.instruments import STORE_ERRORS, STORE_SECONDS, timed

ASK_SECONDS = 1.0  # A Sentinel that is silent for so long is passed over: its host may have vanished with the primary.

_ADDRESS = re.compile(r"(sentinels?)://([^/?#]*@)?([^/?#]*)([^?#]*)\??([^#\s]*)")
"""Scheme, user, places, path, query. The `urlsplit` of newer Pythons refuses lists of places with an IPv6 address."""


class Sentinels:
    """What an address with Sentinels says: their places, the primary's name, and options as redis-py has them."""

    def __init__(self, scheme: str, who: str, hosts: str, path: str, query_text: str) -> None:
        """Takes the parts of `_ADDRESS`. Raises ValueError for a wrong address."""
        self.who = who
        self.path = path
        self.places = [_place(host) for host in hosts.split(",")]
        query = dict(parse_qsl(query_text))
        self.master = query.pop("master", "")
        if not self.master:
            raise ValueError("`?master=NAME` is missing, with the name that `sentinel monitor` gives the primary")
        own = {name: query.pop(f"sentinel_{name}", None) for name in ("username", "password")}
        self.tls = scheme == "sentinels"
        address = f"redis{'s' * self.tls}://{who}{path}?{urlencode(query)}"
        self.primary: dict[str, Any] = parse_url(address)  # type: ignore[no-untyped-call]
        """Options of connections to the primary: user, database, certificates."""
        self.primary.pop("connection_class", None)
        certificates = {name: value for name, value in self.primary.items() if name.startswith("ssl_")}
        self.certificates = {"ssl_cert_reqs": "required", **certificates} if self.tls else {}
        self.sentinel = {
            **own,
            **self.certificates,
            "ssl": self.tls,
            "socket_timeout": ASK_SECONDS,
            "socket_connect_timeout": ASK_SECONDS,
        }
        """Options of connections to a Sentinel."""

    def connect(self, **options: Any) -> Any:
        """Return a client of the primary, whichever it is; connects at its first use."""
        asked: Any = Sentinel(self.places, sentinel_kwargs=self.sentinel)  # type: ignore[no-untyped-call]
        connection = _PrimaryByTls if self.tls else _Primary
        return asked.master_for(self.master, connection_class=connection, **self.primary, **options)


def sentinels_of(url: str) -> Sentinels | None:
    """Return what an address with Sentinels says; None if it is the address of a server. Raises ValueError."""
    found = _ADDRESS.match(url)
    return Sentinels(*found.groups("")) if found else None


def connected(url: str, **options: Any) -> Any:
    """Return a client of redis-py for an address of either kind; connects at its first use. Raises ValueError."""
    if found := sentinels_of(url):
        return found.connect(**options)
    if url.startswith(("unix:", "redis+socket:")):  # Celery and redis-py read such addresses differently.
        raise ValueError("it names a socket's file, and the farm reaches Redis by host and port alone")
    return redis.Redis.from_url(url, **options)


class _Primary(SentinelManagedConnection):
    """A connection that closes when an answer does not come.

    redis-py's own stays open: to a vanished host for ever, and the next command gets the answer that came late.
    """

    def read_response(self, *arguments: Any, **options: Any) -> Any:
        """Return the next answer."""
        return super().read_response(*arguments, **{"disconnect_on_error": True, **options})


class _PrimaryByTls(_Primary, SSLConnection):
    """The same, by TLS."""


def place_of(url: str) -> str:
    """Return where an address leads, for messages: without user and password."""
    if found := sentinels_of(url):
        return f"{found.master} ({', '.join(spelt(*place) for place in found.places)})"
    parts = urlsplit(url)
    return spelt(parts.hostname or "", parts.port or 6379)


def refused(server: str, address: str, error: BaseException | None) -> StoreUnavailable | None:
    """Return our error if a server, or a Sentinel before it, is there and refuses the user or password."""
    turn = "the operator's turn: write into redis_url (FARM_REDIS_URL)"
    if isinstance(error, AuthenticationError):
        hint = f"{turn} a user and password that the server knows"
        return StoreUnavailable(f"{server} at {address} refuses the user or password: {error}", hint=hint)
    if isinstance(error, MasterNotFoundError) and "AuthenticationError" in str(error):  # It quotes each Sentinel.
        hint = f"{turn} `sentinel_username` and `sentinel_password` as the Sentinels know them"
        return StoreUnavailable(f"a Sentinel at {address} refuses the user or password", hint=hint)
    return None


def spelt(host: str, port: int) -> str:
    """Return a place as addresses have it: an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _place(host: str) -> tuple[str, int]:
    parts = urlsplit(f"//{host}")
    if not parts.hostname:
        raise ValueError("the place of a Sentinel is empty")
    return parts.hostname, parts.port or 26379


_ARGUMENTS = re.compile(r"^-- arguments: (\w.*)$", re.MULTILINE)
_SHARED = "_shared"  # The file whose definitions scripts share.


@dataclass(frozen=True, slots=True)
class Script:
    """One script: its whole text, its digest on the server, and its arguments in order."""

    name: str
    text: str
    sha: str
    arguments: tuple[str, ...]

    def bind(self, values: Mapping[str, object]) -> list[object]:
        """Return the values in the script's order. Raises TypeError if the names differ from the header's."""
        if values.keys() != set(self.arguments):
            raise TypeError(f"{self.name}.lua takes {', '.join(self.arguments)}; got {', '.join(values)}")
        return [values[name] for name in self.arguments]


def load_scripts(constants: str) -> dict[str, Script]:
    """Return every script by its name; `constants` is Lua text that is prepended to all of them."""
    sources = dict(_sources())
    shared = re.split(r"^(?=local )", f"{constants}\n{sources.pop(_SHARED)}", flags=re.MULTILINE)
    scripts = {}
    for name, source in sources.items():
        found = _ARGUMENTS.search(source)
        arguments = tuple(found[1].split(", ")) if found else ()
        bound = f"local {', '.join(arguments)} = unpack(ARGV)\n" if arguments else ""
        text = f"{_used(shared, source)}\n{bound}{source}"
        # The server names scripts by SHA-1; it is not used for security.
        scripts[name] = Script(name, text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest(), arguments)
    return scripts


def _used(shared: Sequence[str], source: str) -> str:
    """Return the shared definitions that a script needs, if only for others: each call makes all of them again."""
    words, kept = _words(source), ""
    for definition in reversed(shared):
        names = _words(definition.partition("(" if definition.startswith("local function") else "=")[0])
        if names & words - {"local", "function"}:
            words, kept = words | _words(definition), definition + kept
    return kept


@cache
def _words(text: str) -> frozenset[str]:
    return frozenset(re.findall(r"\w+", text))


@cache
def _sources() -> dict[str, str]:
    return {path.stem: path.read_text(encoding="utf-8") for path in (Path(__file__).parent / "lua").glob("*.lua")}


PREFIX = "{farm}"  # The hash tag that all keys share, so that a cluster keeps them together for the scripts.

SOCKET_TIMEOUT = 4.0
"""Seconds after which a silent server counts as away; blocking commands ask for less.

A script takes milliseconds, at most some tenths of a second: a server that is silent for longer hangs, and its callers
get an error.
"""

CONNECTIONS = 1024
"""Connections at once at most: a server's threads that wait for events have one each (`WATCHERS` in `farm.api`)."""

_REPLICA = "it is a replica: the farm continues when it is the primary again; otherwise set redis_url to the primary"
_REFUSALS = {
    "MISCONF": "it cannot write to its disk: check its log",
    "NOREPLICAS": "too few replicas follow it (min-replicas-to-write)",
    "UNBLOCKED": _REPLICA,
    "BUSY": "a script runs for too long: wait, or end it with SCRIPT KILL",
}
"""Starts of the answers of a server that refuses for now, for which redis-py has no class."""

_REFUSING = {
    OutOfMemoryError: "it is full: raise its maxmemory; the farm then continues, and loses nothing meanwhile",
    ReadOnlyError: _REPLICA,
    MasterDownError: _REPLICA,
    NoPermissionError: "give its user the rights of its role: deploy/redis/users.acl has them",
}
"""What to do about errors for which redis-py has a class."""

_PLACE = re.compile(r"^Command # .* of pipeline caused error: |\.? script: \S+, on @.*| script: on @\S*", re.DOTALL)
"""The place of an error in a script or pipeline, which does not help the user."""

BLOCKING = frozenset({"BZPOPMIN", "XREAD"})
"""Commands that wait for something to happen: their time says nothing about the server."""


def key(*parts: str) -> str:
    """Return the name of a key; `docs/job-store.md` lists the patterns."""
    return ":".join((PREFIX, *parts))


def _spelt(command: Iterable[Any]) -> Iterator[Any]:
    return (key(*part) if isinstance(part, tuple) else part for part in command)


class Link:
    """A pool of connections to one server. Thread-safe; connects at its first use.

    In a command a tuple of texts is a key (`key`).

    Every call raises StoreUnavailable (with host and port, never the password) if the server cannot be reached or
    refuses to write. A call is repeated after a lost connection, because every script may be repeated; not after a
    time-out, because that would take as long again.
    """

    def __init__(self, url: str, constants: str) -> None:
        try:
            # redis-py has no types for these calls.
            self._redis: Any = connected(
                url,
                decode_responses=True,
                encoding_errors="replace",
                protocol=2,
                socket_timeout=SOCKET_TIMEOUT,
                socket_connect_timeout=SOCKET_TIMEOUT,
                socket_keepalive=True,
                max_connections=CONNECTIONS,
                retry=Retry(ExponentialBackoff(base=0.05), 2, (ConnectionError,)),
            )
        except ValueError as error:
            hint = "write it as redis://:password@host:6379/0, or sentinel://:password@host,host/0?master=name"
            raise UsageError(f"redis_url: {error}", hint=hint) from None
        self.address = place_of(url)
        self._scripts = load_scripts(constants)

    def ask(self, *command: Any, binary: bool = False) -> Any:
        """Send one command and return its answer, with `binary` in bytes."""
        options = {NEVER_DECODE: True} if binary else {}
        with self._reaching("" if command[0] in BLOCKING else "command"):
            return self._redis.execute_command(*_spelt(command), **options)

    def now(self) -> float:
        """Return the server's time (Unix seconds), which all records use."""
        seconds, microseconds = self.ask("TIME")
        return round(int(seconds) + int(microseconds) / 1e6, 3)

    def epoch(self) -> str:
        """Return the store's epoch, which changes with each restart, failover or loss of the server."""
        return str(self.run("epoch", server=self.ask("INFO", "server")["run_id"], fresh=secrets.token_hex(4)))

    def ask_many(
        self,
        commands: Sequence[Sequence[Any]],
        *,
        tolerant: bool = False,
        together: bool = False,
        binary: bool = False,
        operation: str = "pipeline",
    ) -> list[Any]:
        """Send commands in one pipeline and return their answers; a `tolerant` caller gets errors among the answers.

        `together`: as one transaction; `binary`: with answers in bytes. `operation` is what they are timed as.
        """
        options = {NEVER_DECODE: True} if binary else {}
        with self._reaching(operation), self._redis.pipeline(transaction=together) as pipeline:
            for command in commands:
                pipeline.execute_command(*_spelt(command), **options)
            return pipeline.execute(raise_on_error=not tolerant) if len(pipeline) else []

    def run(self, script: str, **arguments: Any) -> Any:
        """Run one script."""
        found = self._scripts[script]
        values = found.bind(arguments)
        with self._reaching(script):
            try:
                return self._redis.execute_command("EVALSHA", found.sha, 0, *values)
            except NoScriptError:
                return self._redis.execute_command("EVAL", found.text, 0, *values)

    def run_many(self, script: str, calls: Iterable[Mapping[str, object]]) -> list[Any]:
        """Run one script several times in one pipeline, in order."""
        found = self._scripts[script]
        commands = [["EVALSHA", found.sha, 0, *found.bind(call)] for call in calls]
        try:
            return self.ask_many(commands, operation=script)
        except NoScriptError:
            self.ask("SCRIPT LOAD", found.text)
            return self.ask_many(commands, operation=script)

    def names(self, pattern: str) -> Iterator[str]:
        """Yield the names of the keys that match a pattern, each at least once."""
        with self._reaching(""):
            yield from self._redis.scan_iter(pattern, count=1000)

    def config(self, *names: str) -> dict[str, str]:
        """Return settings of the server, without those that a hosted server hides."""
        with self._reaching("command"):
            try:
                return {name: self._redis.execute_command("CONFIG GET", name)[name] for name in names}
            except ResponseError:  # renamed or forbidden
                policy = self._redis.execute_command("INFO").get("maxmemory_policy", "noeviction")
                return {"maxmemory-policy": str(policy)}

    def close(self) -> None:
        """Close every connection."""
        self._redis.close()

    @contextmanager
    def _reaching(self, operation: str) -> Iterator[None]:
        """Turn errors into ours, and time the operation unless it waits on purpose (an empty name)."""
        try:
            with timed(STORE_SECONDS, operation) if operation else nullcontext():
                yield
        except NoScriptError:
            raise  # The script is sent then.
        except (ConnectionError, TimeoutError, ResponseError) as error:
            STORE_ERRORS.inc()
            if ours := self._explained(error):
                raise ours from error
            raise

    def _explained(self, error: redis.RedisError) -> StoreUnavailable | None:
        """Return our error for one of a server that is away or refuses for now; None for any other."""
        if isinstance(error, TimeoutError):
            what, hint = (
                f"did not answer within {SOCKET_TIMEOUT:g} s",
                "it hangs, or the network is down: check its log",
            )
        elif isinstance(error, ConnectionError):
            if ours := refused("Redis", self.address, error):
                return ours
            what, hint = f"cannot be reached: {type(error).__name__}", "start it, or set FARM_REDIS_URL to its address"
        else:
            why = _PLACE.sub("", str(error))
            what = f"refuses: {why}"
            hint = _REFUSING.get(type(error)) or _REFUSALS.get(why.partition(" ")[0], "")
        return StoreUnavailable(f"Redis at {self.address} {what}", hint=hint) if hint else None


class Records:
    """Some records of the job store, on a link."""

    def __init__(self, link: Link) -> None:
        self._link = link
