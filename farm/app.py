"""Farm: builds the parts of a process from the settings, lazily and once; it has no interface of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, TypeVar, cast

from farm.errors import UsageError
from farm.settings import Settings, load_settings

if TYPE_CHECKING:
    from celery import Celery

    from farm.artifacts.refs import Refs, SnapshotCell
    from farm.artifacts.s3 import S3Store
    from farm.artifacts.tokens import Tokens
    from farm.builds.finishing import BuildFinisher
    from farm.builds.known_failures import KnownFailures
    from farm.builds.past_builds import Baselines, BuildIndex
    from farm.builds.planner import KnownArtifacts, Planner
    from farm.builds.reading import BuildReader, JobViews
    from farm.builds.service import Admission, BuildService
    from farm.extension import Extension
    from farm.node.executor import Executor
    from farm.store import Store

P = TypeVar("P")

_current: Farm | None = None


def _made(name: str, others: str) -> cached_property[Any]:
    """Return a part that the class or function `module:name` makes of `others`, named in a row, at its first use."""
    return cached_property(lambda farm: resolve_name(name)(*(getattr(farm, each) for each in others.split())))


class Farm:
    """The parts of one process. Each is made at its first use, so a process pays only for what it uses."""

    tokens: cached_property[Tokens] = _made("farm.artifacts.tokens:Tokens", "artifacts")
    """The tokens of the API's callers."""
    celery: cached_property[Celery] = _made("farm.store.broker:make_celery", "settings")
    """The Celery application that carries messages to workers."""
    builds: cached_property[BuildService] = _made(
        "farm.builds.service:BuildService", "store artifacts build_reader known planner baselines failures admission"
    )
    """Accepts builds and changes to them."""
    planner: cached_property[Planner] = _made("farm.builds.planner:Planner", "store artifacts settings known")
    """Plans submissions."""
    baselines: cached_property[Baselines] = _made("farm.builds.past_builds:Baselines", "refs known build_index")
    """Finds what cells are compared with."""
    admission: cached_property[Admission] = _made(
        "farm.builds.service:Admission", "store artifacts settings build_reader known"
    )
    """Accepts planned builds, and restores those that the store has lost."""
    failures: cached_property[KnownFailures] = _made("farm.builds.known_failures:KnownFailures", "artifacts")
    """What is known about failing cells, and what gates refused."""
    build_reader: cached_property[BuildReader] = _made(
        "farm.builds.reading:BuildReader", "store artifacts jobs build_index"
    )
    """Reads builds and their reports."""
    build_finisher: cached_property[BuildFinisher] = _made(
        "farm.builds.finishing:BuildFinisher",
        "store artifacts admission build_reader known build_index failures refs notify",
    )
    """Finishes the builds that have ended."""
    known: cached_property[KnownArtifacts] = _made("farm.builds.planner:KnownArtifacts", "store artifacts")
    """What is known about programs that are there."""
    jobs: cached_property[JobViews] = _made("farm.builds.reading:JobViews", "store artifacts")
    """Reads jobs."""
    executor: cached_property[Executor] = _made("farm.node.executor:Executor", "artifacts settings")
    """Runs the steps of one attempt."""
    extensions: cached_property[tuple[Extension[Farm], ...]] = _made("farm.extension:installed", "")
    """What other packages add to this farm. Raises UsageError for one that cannot be imported."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._parts: dict[Callable[[Farm], object], object] = {}

    @classmethod
    def current(cls) -> Farm:
        """Return this process's farm, made from its environment at the first call."""
        global _current  # noqa: PLW0603 - one farm for each process is the point
        if _current is None:
            _current = cls(load_settings())
        return _current

    def start(self) -> None:
        """Let extensions check the settings before a server answers. Raises UsageError."""
        from farm.extension import require_readers

        require_readers(self.settings)
        for each in self.extensions:
            if each.on_start:
                each.on_start(self)

    def check_named(self, namespace: str, tag: str, cells: Sequence[SnapshotCell]) -> Callable[[], object]:
        """Let extensions check what a tag is to name; return what is called when it names it. Raises their refusal."""
        after = [each.on_named(self, namespace, tag, cells) for each in self.extensions if each.on_named]
        return lambda: [each() for each in after if each]

    @cached_property
    def notify(self) -> partial[None]:
        """Calls a hook of all extensions with a report."""
        from farm.extension import notify

        return partial(notify, self.extensions, self)

    def part(self, make: Callable[[Farm], P]) -> P:
        """Return what `make` returned for this farm when it was first asked for: a part that an extension adds."""
        if make not in self._parts:
            self._parts.setdefault(make, make(self))
        return cast(P, self._parts[make])

    @cached_property
    def store(self) -> Store:
        """The job store. Raises UsageError if no address is set, FarmFault if the server would lose work."""
        from farm.store import Store

        store = Store.connect(self.settings)
        store.check()
        return store

    @cached_property
    def artifacts(self) -> S3Store:
        """The object store. Raises UsageError if none is set, StorageUnavailable if it ignores conditions."""
        from farm.artifacts.s3 import S3Store

        if not self.settings.s3_bucket:
            raise UsageError("no bucket is set", hint="set FARM_S3_BUCKET (and FARM_S3_ENDPOINT), or use `farm run`")
        return S3Store.from_settings(self.settings)

    @cached_property
    def refs(self) -> Refs:
        """The refs, for who moves some: extensions see each write, and may refuse it."""
        from farm.artifacts.refs import Refs

        found = self.extensions
        on_commit = [partial(each.on_commit, self) for each in found if each.on_commit]
        return Refs(
            self.artifacts, on_commit, [partial(each.on_committed, self) for each in found if each.on_committed]
        )

    @cached_property
    def build_index(self) -> BuildIndex:
        """The index of finished builds."""
        from farm.builds.past_builds import BuildIndex

        return BuildIndex(self.settings.data_dir / "builds.sqlite3", self.store, self.artifacts)
