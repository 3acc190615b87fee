"""Extensions: what `farm.extras` and other packages add to servers and workers. The core finds them by entry points."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from farm import entry_points
from farm.errors import FarmFault, UsageError

if TYPE_CHECKING:
    from farm.artifacts.refs import RefCommit, RefView, SnapshotCell
    from farm.artifacts.s3 import S3Store
    from farm.artifacts.storage import Sign
    from farm.results.report import Report
    from farm.settings import Settings
    from farm.wire.program import Sidecar

SIGNING = ("signing_key", "trust_policy")
"""Settings without whose reader a farm must not go on: programs would be neither signed nor refused."""

F = TypeVar("F")  # The farm of a process, `farm.app.Farm`.


@dataclass(frozen=True, slots=True)
class Loop:
    """What each control plane does repeatedly, in a thread of its own: `step`, then a pause of `seconds`.

    An exception does not end it. The first step comes after `first` seconds. With `leader_only`, it is done by one
    control plane at a time; a step may still happen twice at once, if its leader was away for a while.
    """

    name: str
    step: Callable[[], object]
    seconds: float
    first: float = 0.0
    leader_only: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Extension(Generic[F]):
    """What one package adds to servers and workers. Its module is imported by both: hooks may be `late`."""

    name: str
    routes: Sequence[str] = ()
    """Routers of FastAPI below `/v1`, each as `module:name`: only servers have FastAPI."""

    pages: Sequence[str] = ()
    """Routers of FastAPI below `/ui`, each as `module:name`."""

    templates: Path | None = None
    """A folder with templates of these pages (Jinja2); those of the farm go before one of the same name."""

    menu: Sequence[tuple[str, str]] = ()
    """Pages that the menu of all pages names: the path below `/ui/ns/NAMESPACE/`, and the text."""

    loops: Callable[[F], Sequence[Loop]] | None = None
    """Returns the loops that a control plane runs."""

    settings: Sequence[str] = ()
    """Settings that it reads. One that a user sets must have a reader, if much depends on it: see `require_readers`."""

    on_start: Callable[[F], object] | None = None
    """Called before a server answers. Raises UsageError for settings that it cannot use: the server does not start."""

    on_published: Callable[[Settings], Sign | None] | None = None
    """Returns what a worker calls with each program's sidecar before it is stored; None: nothing. What that raises
    keeps the program from being published. Raises UsageError for settings that it cannot use.
    """

    on_judged: Callable[[F, Report], object] | None = None
    """Called with the report of a build that has ended, before refs name its cells. As `on_finished`."""

    on_named: Callable[[F, str, str, Sequence[SnapshotCell]], Callable[[], object] | None] | None = None
    """Called with namespace, tag and cells before a ref that people move names them. Raises FarmError to refuse.

    What it returns is called when the ref names them; both may be called again for the same move.
    """

    on_commit: Callable[[F, RefCommit], RefView | None] | None = None
    """Called before a ref is written, whoever moves it; returns what is written (`farm.artifacts.refs.Commit`).

    Raises FarmError to refuse the move. It may be called again for the same move.
    """

    on_committed: Callable[[F, str, RefView], object] | None = None
    """Called with the namespace and a ref that was written; one without a snapshot was deleted."""

    artifact_facts: Callable[[F, str, Sidecar], Sequence[tuple[str, str]]] | None = None
    """Returns what an artifact's page says of it besides, as names and texts, to a reader of a namespace."""

    on_finished: Callable[[F, Report], object] | None = None
    """Called when a build has ended, before it counts as reported. It may be called again for the same build.

    After a FarmFault, such as storage that is away, the build's end is repeated. Other exceptions are logged.
    """


@cache
def installed() -> tuple[Extension[Any], ...]:
    """Return all installed extensions by name; imports them. Raises UsageError for one that cannot be imported."""
    return tuple(each for _, each in entry_points.load(entry_points.EXTENSIONS))


def publishing(settings: Settings) -> Sign | None:
    """Return what is called with each program before its sidecar is stored. Raises UsageError for wrong settings."""
    require_readers(settings)
    found = [sign for each in installed() if each.on_published and (sign := each.on_published(settings))]

    def call_all(artifacts: S3Store, sidecar: Sidecar, text: bytes) -> None:
        for sign in found:
            sign(artifacts, sidecar, text)

    return call_all if found else None


def require_readers(settings: Settings) -> None:
    """Raise UsageError if signatures are asked for by the settings, and nothing here makes or checks any."""
    for name in SIGNING:
        if getattr(settings, name) and not any(name in each.settings for each in installed()):
            hint = "install the farm's own, or unset it"
            raise UsageError(f"`{name}` is set, and no installed extension reads it", hint=hint)


def late(name: str, *needed: str) -> Callable[..., Any]:
    """Return a hook that calls the function `module:name`, whose module is imported at the first call only.

    With `needed` settings it does nothing, and imports nothing, unless one of them is set.
    """

    def hook(farm: Any, *args: object) -> object:
        settings = getattr(farm, "settings", farm)  # A worker's hooks get these alone.
        wanted = not needed or any(getattr(settings, each) for each in needed)
        return resolve_name(name)(farm, *args) if wanted else None

    return hook


def notify(extensions: Sequence[Extension[F]], farm: F, hook: str, report: Report) -> None:
    """Call a hook of all extensions that have it. Raises FarmFault; other exceptions are logged."""
    for each in extensions:
        if (does := getattr(each, hook)) is not None:
            try:
                does(farm, report)
            except FarmFault:
                raise
            except Exception:
                from farm.logging import get_logger  # It takes long to import, and most processes never need it here.

                get_logger(__name__).exception("an extension failed, continuing", extension=each.name, hook=hook)
