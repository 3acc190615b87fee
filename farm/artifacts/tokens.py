"""Tokens: who may call the API, in which namespace and role, and with how many unfinished cells.

The farm keeps a token's SHA-256 only, as the name of a small document in object storage. The administrator's own token
is a setting, so that somebody can still repair a farm whose storage is lost.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from enum import IntEnum
from typing import TYPE_CHECKING, cast

from typing_extensions import TypedDict

from farm.artifacts.storage import Object, folder_name
from farm.errors import Conflict, NotFound

if TYPE_CHECKING:
    from farm.artifacts.s3 import S3Store

PREFIX = "config/tokens/"
ADMINISTRATOR = "admin"  # The name of the caller who has the administrator's own token; no other token may have it.
PERSON = "person:"  # Begins the name of a person that a proxy signs in: no token has such a name, nor has the farm.
REMEMBERED = 5.0  # Seconds for which a looked-up token is trusted; after that a revoked token is refused everywhere.
LINK_SECONDS = 600  # For how long a sign-in link works.
MOST_REMEMBERED = 4096  # Tokens that are remembered, also those to look up again.


class Secret(TypedDict):
    """A new token's secret; only this answer contains it."""

    secret: str


class TokenDocument(TypedDict):
    """A token as the farm knows it, without its secret."""

    name: str
    role: str
    namespace: str
    max_cells: int
    created: str


class Role(IntEnum):
    """What a token may do; a higher role includes the lower ones, except that only `ADMIN` includes `MONITOR`.

    `MONITOR` reads the metrics, which are of all namespaces, and nothing else.
    """

    MONITOR = 0
    READER = 1
    SUBMITTER = 2
    ADMIN = 3


@dataclass(frozen=True, slots=True)
class Token:
    """A token as the farm knows it, and so the caller who has it: a name, and a role in a namespace.

    `max_cells` limits the unfinished cells of its builds; 0 means no limit.
    """

    name: str
    role: Role
    namespace: str
    max_cells: int = 0
    created: str = ""
    digest: str = ""
    """The SHA-256 of its secret, which no other token has, also none of the same name later; empty for the rest."""

    def as_dict(self) -> TokenDocument:
        """Return the token as JSON, without its secret."""
        return cast(TokenDocument, {**asdict(self), "role": self.role.name.lower()})


def link_code(secret: str, until: int | None = None) -> str:
    """Return what a link shows in place of a secret, to sign a browser in; by default it works for ten minutes."""
    until = int(time.time()) + LINK_SECONDS if until is None else until
    return f"{until}{hmac.new(secret.encode(), f'sign in until {until}'.encode(), 'sha256').hexdigest()}"


class Tokens:
    """The tokens of a farm. Thread-safe."""

    def __init__(self, artifacts: S3Store) -> None:
        self._artifacts = artifacts
        self._lock = threading.Lock()
        self._remembered: dict[str, tuple[float, Token]] = {}
        """By key, the one looked up last at the end: until when a token is trusted without another look, and it."""
        self._spent: dict[str, int] = {}
        """Codes of sign-in links that were used, and until when they would have worked (Unix seconds)."""
        self._began = int(time.time())

    def find(self, secret: str) -> Token | None:
        """Return the token with this secret; None if there is none, or it was revoked.

        Only for a secret that was known before does this wait while storage is away. Raises StorageAway.
        """
        key = _key(secret)
        now = time.monotonic()
        with self._lock:
            known = self._remembered.get(key)
            if known and now < known[0]:
                return known[1]
        found = (self._artifacts if known else self._artifacts.with_patience(0)).get_object(key)
        token = _read(found) if found else None
        with self._lock:
            # Wrong secrets are not cached, so that nobody can fill the memory with them.
            self._remembered.pop(key, None)
            if token:
                self._remembered[key] = (now + REMEMBERED, token)
            if len(self._remembered) > MOST_REMEMBERED:
                del self._remembered[next(iter(self._remembered))]
        return token

    def spend(self, code: str, secret: str) -> bool:
        """Whether a `link_code` of this secret works: for ten minutes, and once; none from before this process does."""
        now = time.time()
        with self._lock:
            self._spent = {each: until for each, until in self._spent.items() if until > now}
            until = int(code[:10]) if code[:10].isdecimal() else 0
            known = bool(secret) and hmac.compare_digest(code.encode(), link_code(secret, until).encode())
            made = until - LINK_SECONDS
            if not known or code in self._spent or not max(self._began, now - LINK_SECONDS) <= made <= now:
                return False
            self._spent[code] = until
        return True

    def remembers(self, secret: str) -> bool:
        """Whether this was a token's secret when it was looked up last; asks nobody."""
        with self._lock:
            return _key(secret) in self._remembered

    def create(self, name: str, role: Role, namespace: str, *, max_cells: int = 0) -> str:
        """Make a token and return its secret, which is shown only once. Raises Conflict if the name is taken."""
        if name == ADMINISTRATOR or any(token.name == name for _, token in self._all()):
            raise Conflict(f"a token {name} exists already", hint="revoke it first, or choose another name")
        secret = f"farm_{secrets.token_urlsafe(32)}"
        token = Token(name, role, folder_name(namespace), max_cells, datetime.now(UTC).isoformat(timespec="seconds"))
        self._artifacts.put_object(_key(secret), json.dumps(token.as_dict()).encode(), create=True)
        return secret

    def list(self) -> list[Token]:
        """Return all tokens by name."""
        return sorted((token for _, token in self._all()), key=lambda token: token.name)

    def revoke(self, name: str) -> None:
        """Delete a token: it is refused here from now on, and everywhere within seconds. Raises NotFound."""
        keys = [key for key, token in self._all() if token.name == name]
        if not keys:
            raise NotFound(f"no token {name}", hint="`farm token ls` lists them")
        for key in keys:
            self._artifacts.delete_object(key)
            with self._lock:
                self._remembered.pop(key, None)

    def _all(self) -> Iterator[tuple[str, Token]]:
        for key in self._artifacts.list_objects(PREFIX):
            if found := self._artifacts.get_object(key):
                yield key, _read(found)


def _key(secret: str) -> str:
    # A secret of 256 random bits needs no slow hash.
    return f"{PREFIX}{hashlib.sha256(secret.encode()).hexdigest()}.json"


def _read(found: Object) -> Token:
    document = json.loads(found.data)
    digest = found.key.removeprefix(PREFIX).removesuffix(".json")
    return Token(**{**document, "role": Role[document["role"].upper()], "digest": digest})
