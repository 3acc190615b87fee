"""Transport: HTTP as the client speaks it, with the farm and with the object storage that it points to.

If a request fails by the farm's fault, it is tried again. If the farm refuses it, the error of `farm.errors` that the
farm answered is raised. A download is checked byte by byte before it gets its name.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache, cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, cast
from urllib.request import getproxies

from farm import __version__, errors
from farm.artifacts.refs import ShownRef
from farm.artifacts.storage import Put, SignedSidecar
from farm.client.http_library import httpx
from farm.errors import ArtifactGone, FarmError, FarmFault, NotFound, Problem, StorageUnavailable, UsageError
from farm.jobs.rows import Listed
from farm.wire.checking import checked, read, unexpected

if TYPE_CHECKING:
    import ssl

    from farm.client.client import FarmClient
    from farm.wire.program import Sidecar


T = TypeVar("T")

RETRY_DELAYS: tuple[float, ...] = (0.2, 0.5, 1.0, 2.0)
"""Seconds between tries of one request. Every verb may be repeated, so every verb is."""

SILENCE = 5.0  # Seconds without an answer after which a command says what it waits for.

CHUNK = 1 << 20

LARGEST_ANSWER = 256 << 20  # Bytes of a farm's answer, unpacked, that are read at most.
LONGEST_LINE = 16 << 20  # Bytes of one line of an answer that comes line by line, and of one event.
DOWNLOADS_AT_ONCE = 8  # Requests at once for the pieces of one blob.

LAST_PORT = 65535
"""The system's resolver would ask a larger port by its last 16 bits, and somebody else may listen there."""

LEAST = 64 << 10  # Bytes that an answer brings in each `MINUTE` of waiting for it: one in drops would never time out.

MINUTE = 60.0

SMALL_ANSWER = 1 << 20  # Bytes of what object storage says about an upload, or about an error.


@cache
def trusted() -> ssl.SSLContext:
    """Return the certificates that this process trusts; to read them takes longer than all else in a client."""
    return httpx.create_ssl_context()


def _names_no_proxy() -> bool:
    return not getproxies().keys() & {"http", "https", "all"}


def _client(**options: Any) -> httpx.Client:
    """Return an httpx client. Raises UsageError for a proxy that it cannot ask."""
    try:
        return httpx.Client(event_hooks={"response": [_require_one_coding, require_pace]}, **options)
    except ImportError:
        hint = "install socksio next to the farm, or unset ALL_PROXY"
        raise UsageError("a SOCKS proxy is set, and the package for it is missing", hint=hint) from None


def _require_one_coding(response: httpx.Response) -> None:
    """Raises httpx.DecodingError for what is packed twice: a piece of it could unpack to any size."""
    if "," in response.headers.get("Content-Encoding", ""):
        raise httpx.DecodingError("it is compressed more than once", request=response.request)


def require_pace(response: httpx.Response) -> None:
    """Let the body of an answer raise httpx.ReadTimeout if it comes in drops, unless its request expects silence."""

    class Paced(httpx.SyncByteStream):
        def __iter__(self) -> Iterator[bytes]:
            came, waited, began = 0, 0.0, time.monotonic()
            for data in cast("httpx.SyncByteStream", body):
                came, waited = came + len(data), waited + time.monotonic() - began
                if waited > MINUTE:
                    if came < LEAST:
                        raise httpx.ReadTimeout(f"{came} bytes in {waited:.0f} s", request=response.request)
                    came, waited = 0, 0.0
                yield data
                began = time.monotonic()

        def close(self) -> None:
            cast("httpx.SyncByteStream", body).close()

    body = response.stream
    if response.is_error or not response.request.extensions.get("silent"):
        response.stream = Paced()


def _may_be_a_farm(url: str) -> bool:
    try:
        parts = httpx.URL(url)
    except httpx.InvalidURL:
        return False
    has_host = bool(parts.host) and " " not in url
    return parts.scheme in ("http", "https") and has_host and (parts.port or 0) <= LAST_PORT


class Transport:
    """Connections to one farm, in one namespace; they may be shared by threads."""

    def __init__(
        self, url: str, token: str, *, namespace: str, timeout: float, transport: httpx.BaseTransport | None = None
    ) -> None:
        """Connect to the farm at `url`; `timeout` is in seconds and for each answer."""
        self.url = url.rstrip("/").removesuffix("/v1").rstrip("/")
        self.on_silence: Callable[[], object] | None = None
        """Called when an answer takes long, from another thread."""
        if not _may_be_a_farm(self.url):
            hint = "FARM_API_URL looks like https://farm.example:8080"
            raise UsageError(f"{url!r} is not the address of a farm", hint=hint)
        if re.match(r"https?://[^/?#]*@", self.url):
            # It would be sent in place of the token, and shown with each link to a page.
            hint = "leave it out; set FARM_API_TOKEN to a token"
            raise UsageError("the address of the farm holds a name or a password", hint=hint)
        headers = {"User-Agent": "migraphx-farm"}
        if namespace:
            headers["Farm-Namespace"] = namespace
        if token:
            headers["Authorization"] = f"Bearer {token}"
        # Without TLS nobody shows a certificate, and to read the trusted ones takes as long as all else.
        needs_trust = transport is None and (self.url.startswith("https:") or not _names_no_proxy())
        verify = trusted() if needs_trust else False
        self._api = _client(transport=transport, verify=verify, base_url=self.url, headers=headers, timeout=timeout)
        self._timeout = timeout
        self._lock = threading.Lock()
        self._opened = {"api": self._api}

    def close(self) -> None:
        """Close the connections."""
        for client in self._opened.values():
            client.close()

    def _storage(self, purpose: Literal["uploads", "downloads"]) -> httpx.Client:
        """Connections to object storage. Presigned URLs carry their own permission: they never see the farm's token."""
        with self._lock:
            if purpose not in self._opened:
                timeout = httpx.Timeout(self._timeout, write=300.0, read=300.0)
                if purpose == "downloads" and _names_no_proxy():
                    from farm.client.large_answers import LargeAnswers

                    options: dict[str, Any] = {"transport": LargeAnswers(DOWNLOADS_AT_ONCE, trusted)}
                else:
                    options = {"verify": trusted()}
                self._opened[purpose] = _client(timeout=timeout, **options)
            return self._opened[purpose]

    def get(self, path: str, kind: type[T], **params: Any) -> T:
        """Return a document of this type. Raises as `ask`."""
        return self.ask("GET", path, kind, params=params)

    def items(self, path: str, kind: type[T], **params: Any) -> list[T]:
        """Return the items of a list, each of this type. Raises as `ask`."""
        return self.get(path, Listed[kind], **params)["items"]  # type: ignore[valid-type]

    def post(self, path: str, kind: type[T], body: object = None, **options: Any) -> T:
        """Send JSON, and return the document that is answered. Raises as `ask`."""
        return self.ask("POST", path, kind, json=body, **options)

    def ask(self, method: str, path: str, kind: type[T], **options: Any) -> T:
        """Ask the farm, and return the document that it answers if it is of this type: no other answer leaves this.

        Raises as `request`, and UsageError for an unexpected answer.
        """
        return read(self.request(method, path, **options).content, kind, f"{self.url}{path}")

    def request(self, method: str, path: str, *, limit: int = LARGEST_ANSWER, **options: Any) -> httpx.Response:
        """Ask the farm; its answer has `limit` bytes at most.

        Raises what it refuses with, FarmFault if it cannot be reached after all tries, UsageError for a longer one.
        """

        def once() -> httpx.Response:
            with self._reaching(path), self._not_in_silence(), self._api.stream(method, path, **options) as response:
                return _checked(_read(response, limit))

        return retry(once)

    @contextlib.contextmanager
    def _not_in_silence(self) -> Iterator[None]:
        if not self.on_silence:
            yield
            return
        timer = threading.Timer(SILENCE, self.on_silence)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    @contextlib.contextmanager
    def _reaching(self, path: str) -> Iterator[None]:
        """Raises FarmFault if the farm cannot be reached in the block, UsageError for an answer that cannot be read."""
        try:
            yield
        except httpx.DecodingError:
            raise unexpected(f"{self.url}{path}", "it cannot be read") from None
        except httpx.TransportError as error:
            hint = "is it running? FARM_API_URL sets its address"
            if "CERTIFICATE_VERIFY_FAILED" in str(error):
                hint = "is it the right host? SSL_CERT_FILE names a file of certificates that are trusted"
            message = f"cannot reach the farm at {self.url}: {error or type(error).__name__}"
            raise FarmFault(message, hint=hint) from None

    @contextlib.contextmanager
    def lines(self, path: str, *, timeout: float, **options: Any) -> Iterator[Iterator[str]]:
        """Open an answer that comes line by line, with at most `timeout` seconds of silence.

        Raises UsageError for a line that is too long, also while the lines are read.
        """
        options |= {"timeout": httpx.Timeout(10.0, read=timeout), "extensions": {"silent": True}}
        with self._reaching(path), self._api.stream("GET", path, **options) as response:
            _checked(_read(response, LARGEST_ANSWER) if response.is_error else response)
            yield _lines(response)

    def put(self, put: Put, path: Path, count: Callable[[int], None]) -> None:
        """Send one blob, or a part of it; the signature covers its size, and a whole blob's SHA-256."""
        headers = {**put["headers"], "Content-Length": str(put["size"])}

        def once() -> None:
            sent = 0

            def chunks() -> Iterator[bytes]:
                nonlocal sent
                with path.open("rb") as file:
                    file.seek(put["start"])
                    while chunk := file.read(min(CHUNK, put["size"] - sent)):
                        yield chunk
                        sent += len(chunk)
                        count(len(chunk))

            try:
                with self._storage("uploads").stream("PUT", put["url"], content=chunks(), headers=headers) as answer:
                    response = _read(answer, SMALL_ANSWER)
            except (httpx.TransportError, httpx.InvalidURL) as error:
                count(-sent)
                raise StorageUnavailable(f"cannot upload {path.name}: {error or type(error).__name__}") from None
            if response.status_code == 400:
                raise UsageError(f"object storage refuses {path.name}", hint="did the file change meanwhile?")
            if not response.is_success:
                count(-sent)
                raise _storage_answer(response, f"cannot upload {path.name}")

        retry(once)

    def ref(self, tag: str) -> ShownRef:
        """Return a ref and the cells that it names. Raises NotFound."""
        # As it came, not as the type reads it: its digest is signed.
        found = self.get(f"/v1/refs/{named('ref', tag)}", dict[str, Any])
        checked(found, ShownRef, self.url, strict=True)
        return cast(ShownRef, found)

    def sidecar(self, key: str) -> Sidecar:
        """Return the sidecar of a cache key. Raises NotFound, or ArtifactGone if it is damaged."""
        from farm.artifacts.sidecar import validate

        found = self.get(f"/v1/artifacts/{named('artifact', key)}", dict[str, Any])
        try:
            return validate(found)
        except UsageError as error:
            raise unexpected(self.url, error.message) from None

    def statements(self, key: str) -> SignedSidecar:
        """Return the sidecar of a cache key as it is stored, and what is signed about it. Raises NotFound."""
        return self.get(f"/v1/artifacts/{named('artifact', key)}/statements", SignedSidecar)

    def location(self, digest: str, name: str) -> str:
        """Return the URL of a blob's bytes, which holds for a while. Raises ArtifactGone if there are none."""
        try:
            return str(self.request("GET", f"/v1/blobs/{digest}").headers["Location"])
        except KeyError:
            raise unexpected(self.url, f"it does not say where {name} is") from None
        except NotFound:
            raise gone(name, "is no longer in object storage") from None

    def read(self, url: str, name: str, start: int, end: int, write: Callable[[bytes], None], *, whole: bool) -> None:
        """Hand the bytes of a stored file from `start` up to `end` to `write`; `whole` if that is all of them.

        Raises StorageUnavailable, ArtifactGone if there is no such file, NoRanges if only the whole can be had.
        """
        headers = {"Accept-Encoding": "identity", **({} if whole else {"Range": f"bytes={start}-{end - 1}"})}
        try:
            with self._storage("downloads").stream("GET", url, headers=headers) as response:
                if response.status_code == 404:
                    raise gone(name, "is no longer in object storage")
                if not response.is_success:
                    raise _storage_answer(_read(response, SMALL_ANSWER), f"cannot download {name}")
                if response.status_code != 206 and not whole:
                    raise NoRanges
                for data in response.iter_raw():
                    write(data)
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise StorageUnavailable(f"cannot download {name}: {error or type(error).__name__}") from None


class NoRanges(Exception):
    """A server sends whole files only."""


def gone(name: str, how: str) -> ArtifactGone:
    """Return the error for stored bytes that are missing or wrong."""
    return ArtifactGone(f"{name} {how}", hint="submit the manifest again: damaged programs are compiled again")


# --- details ----------------------------------------------------------------------------------------------------------


def retry(once: Callable[[], T]) -> T:
    """Do it until it is done: what fails by the farm's fault gets a few more tries, anything else is raised at once."""
    for delay in RETRY_DELAYS:
        try:
            return once()
        except FarmFault:
            time.sleep(delay)
    return once()


def _read(response: httpx.Response, limit: int) -> httpx.Response:
    """Return the response with its content; one that is packed could unpack to any size."""
    data = bytearray()
    for chunk in response.iter_bytes():
        data += chunk
        _require_short(len(data), limit, response)
    packing = (b"content-encoding", b"content-length", b"transfer-encoding")
    headers = [(name, value) for name, value in response.headers.raw if name.lower() not in packing]
    return httpx.Response(response.status_code, headers=headers, content=bytes(data), request=response.request)


def _require_short(size: int, limit: int, response: httpx.Response) -> None:
    if size > limit:
        raise UsageError(f"{response.url} answers more than {limit >> 20} MiB", hint="is a farm at that address?")


def _lines(response: httpx.Response) -> Iterator[str]:
    """Yield an answer's lines without their ends; httpx would wait for the end of a line however long it is."""
    rest = bytearray()
    for chunk in response.iter_bytes():
        *lines, last = chunk.split(b"\n")
        for line in lines:
            rest += line
            _require_short(len(rest), LONGEST_LINE, response)
            yield rest.removesuffix(b"\r").decode(errors="replace")
            rest.clear()
        rest += last
        _require_short(len(rest), LONGEST_LINE, response)
    if rest:
        yield rest.decode(errors="replace")


def _checked(response: httpx.Response) -> httpx.Response:
    """Return the response, or raise the error that the farm answered with."""
    if response.status_code < 400:
        return response
    try:
        document = response.json()
        detail = str(document["detail"])
    except (ValueError, KeyError, TypeError, RecursionError):
        detail = f"{response.url} answers {response.status_code} {response.reason_phrase}"
        if response.status_code in (404, 405, 501):
            raise UsageError(detail, hint="no farm answers there: FARM_API_URL sets its address") from None
        document = {}
    if response.status_code in (404, 405) and document.get("type") == "about:blank":
        # Our servers name an error's class, but for a route that they do not have.
        older = f"the farm at {response.url.join('/')} is older than this client ({__version__})"
        hint = "upgrade the farm, or install the client of its release: /v1/health shows the farm's version"
        raise UsageError(f"{older}: it does not know {response.request.method} {response.url.path}", hint=hint)
    kind = _KINDS.get(str(document.get("type", "")).rpartition(":")[2])
    if kind is None:
        kind = _BY_STATUS.get(response.status_code, FarmFault if response.status_code >= 500 else UsageError)
    hint = str(document.get("hint", ""))
    try:
        if kind is errors.ManifestError:
            error: FarmError = errors.ManifestError([Problem(**problem) for problem in document.get("problems", [])])
        elif kind is errors.InputsMissing:
            kept = str(document.get("kept", ""))
            error = errors.InputsMissing(detail, document["missing_blobs"], kept=kept, hint=hint)
        else:
            error = kind(detail, hint=hint)
    except (TypeError, KeyError, AttributeError):
        error = UsageError(detail, hint=hint)
    raise error


def _tree(kind: type[FarmError]) -> dict[str, type[FarmError]]:
    found = {kind.__name__: kind}
    for child in kind.__subclasses__():
        found |= _tree(child)
    return found


_KINDS = _tree(FarmError)
_BY_STATUS = {401: errors.NotAllowed, 403: errors.NotAllowed, 404: NotFound, 409: errors.Conflict, 410: ArtifactGone}


def events(lines: Iterator[str]) -> Iterator[tuple[str, str, str]]:
    """Yield name, id and data of server-sent events: fields until an empty line make one; comments are left out.

    Raises UsageError for an event that is too long.
    """
    name, identifier = "message", ""
    data: list[str] = []
    size = 0
    for line in lines:
        if not line:
            if data:
                yield name, identifier, "\n".join(data)
            name, data, size = "message", [], 0
            continue
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        match field:
            case "event":
                name = value
            case "id":
                identifier = value
            case "data":
                data.append(value)
                size += len(line)
                if size > LONGEST_LINE:
                    raise UsageError(f"an event of this farm has more than {LONGEST_LINE >> 20} MiB")


def _storage_answer(response: httpx.Response, what: str) -> StorageUnavailable:
    answer = " ".join(response.text.split())[:200]
    return StorageUnavailable(f"{what}: object storage answers {response.status_code} {answer}")


BUILD = re.compile(r"@latest|(b-)?[0-9a-f]{1,16}")  # How a build may be named: its id, the start of it, or the latest.


def build_named(build_id: str) -> str:
    """Return a build's id as part of a path. Raises UsageError for anything else."""
    if not BUILD.fullmatch(build_id):
        hint = "b- and hex digits, a unique start of them, or @latest"
        raise UsageError(f"{build_id!r} is not a build id", hint=hint)
    return build_id if build_id.startswith(("b-", "@")) else f"b-{build_id}"


def split_ref(name: str) -> tuple[str, str]:
    """Return the two parts of NAME[@REF]. Raises UsageError if nothing follows the @: a variable may be unset."""
    artifact, at, ref = name.partition("@")
    if at and not ref:
        raise UsageError(f"{name}: no ref after the @", hint="name a tag or a build, or leave out the @")
    return artifact, ref


def named(what: str, name: str) -> str:
    """Return a name as part of a path. Raises NotFound for what cannot be one; `what` says of what it is the name."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise NotFound(f"no {what} is named {name!r}", hint="names are made of a-z, 0-9, '.', '_' and '-'")
    return name


def database_named(database: str) -> str:
    """Return a tuning database's name as part of a path. Raises NotFound for anything else."""
    if not re.fullmatch(r"[A-Za-z0-9][\w.:+-]*(/[A-Za-z0-9][\w.:+-]*){2}", database, re.ASCII):
        raise NotFound(f"no tuning database is named {database!r}", hint="the name is POOL/DEVICE/MODE")
    return database


class Api:
    """What a farm answers about one topic, such as `client.workers`."""

    def __init__(self, client: FarmClient, transport: Transport) -> None:
        self._client, self._transport = client, transport

    @classmethod
    def of(cls, client: FarmClient) -> Self:
        """Return this topic of a client: for those of extensions, which a type checker does not see at the client."""
        return cls(client, client.transport)


def topic(module: str, kind: str) -> cached_property[Any]:
    """Return the attribute of a client that is its `Api` of one topic; `module` of `farm.client` has that class."""
    return cached_property(lambda client: getattr(import_module(f"farm.client.{module}"), kind).of(client))
