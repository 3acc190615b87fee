"""Farm: builds the parts of a process from the settings, lazily and once; it has no interface of its own."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from farm.errors import UsageError
from farm.settings import Settings, load_settings

if TYPE_CHECKING:
    from celery import Celery

    from farm.artifacts.s3 import S3Store
    from farm.artifacts.tokens import Tokens
    from farm.builds.acknowledged import AcknowledgedFailures
    from farm.builds.cell_history import CellHistory
    from farm.builds.finishing import BuildFinisher
    from farm.builds.firing import TriggerRounds
    from farm.builds.job_views import JobViews
    from farm.builds.known import KnownArtifacts
    from farm.builds.reading import BuildReader
    from farm.builds.service import BuildService
    from farm.builds.stored_builds import StoredBuilds
    from farm.builds.stored_manifests import StoredManifests
    from farm.builds.toolchains import Toolchains
    from farm.node.executor import Executor
    from farm.signing.notary import Notary, Promotions
    from farm.store import Store
    from farm.webhooks.hooks import Webhooks
    from farm.webhooks.sending import DeliveryRounds

_current: Farm | None = None


class Farm:
    """The parts of one process. Each is made at its first use, so a process pays only for what it uses."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    @classmethod
    def from_settings(cls, settings: Settings) -> Farm:
        """Return a farm for these settings."""
        return cls(settings)

    @classmethod
    def current(cls) -> Farm:
        """Return this process's farm, made from its environment at the first call."""
        global _current  # noqa: PLW0603 - one farm for each process is the point
        if _current is None:
            _current = cls(load_settings())
        return _current

    @cached_property
    def store(self) -> Store:
        """The job store. Raises UsageError if no address is set, FarmFault if the server would lose work."""
        from farm.store import Store

        if not self.settings.redis_url.get_secret_value():
            raise UsageError("no address of Redis is set", hint="set FARM_REDIS_URL, or use `farm run` or `farm up`")
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
    def tokens(self) -> Tokens:
        """The tokens of the API's callers."""
        from farm.artifacts.tokens import Tokens

        return Tokens(self.artifacts)

    @cached_property
    def notary(self) -> Notary | None:
        """Signs what this process says of programs; None if it has no key."""
        from farm.signing.notary import Notary

        return Notary.from_settings(self.settings)

    @cached_property
    def promotions(self) -> Promotions:
        """Checks what refs are to name."""
        from farm.signing.notary import Promotions

        return Promotions.from_settings(self.artifacts, self.settings)

    @cached_property
    def celery(self) -> Celery:
        """The Celery application that carries messages to workers."""
        from farm.broker import make_celery

        return make_celery(self.settings)

    @cached_property
    def builds(self) -> BuildService:
        """Accepts builds and changes to them."""
        from farm.builds.service import BuildService

        return BuildService(
            self.store,
            self.artifacts,
            self.settings,
            reader=self.build_reader,
            known=self._known_artifacts,
            history=self.cell_history,
            acknowledged=self.acknowledged,
        )

    @cached_property
    def stored_manifests(self) -> StoredManifests:
        """The manifests that are stored under a name."""
        from farm.builds.stored_manifests import StoredManifests

        return StoredManifests(self.artifacts, self.store.now)

    @cached_property
    def stored_builds(self) -> StoredBuilds:
        """Builds stored manifests."""
        from farm.builds.stored_builds import StoredBuilds

        return StoredBuilds(self.stored_manifests, self.builds)

    @cached_property
    def webhooks(self) -> Webhooks:
        """The webhooks of all namespaces."""
        from farm.webhooks.hooks import Webhooks

        return Webhooks(self.artifacts, self.store.now)

    @cached_property
    def delivery_rounds(self) -> DeliveryRounds:
        """Sends what webhooks get."""
        from farm.webhooks.sending import DeliveryRounds

        return DeliveryRounds(self.webhooks, self.store.now, self.settings.webhook_networks)

    @cached_property
    def trigger_rounds(self) -> TriggerRounds:
        """Builds stored manifests when their triggers say so."""
        from farm.builds.firing import TriggerRounds

        return TriggerRounds(
            self.store,
            self.artifacts,
            self.settings,
            manifests=self.stored_manifests,
            builds=self.stored_builds,
            tokens=self.tokens,
            webhooks=self.webhooks,
        )

    @cached_property
    def acknowledged(self) -> AcknowledgedFailures:
        """What is known of failing cells."""
        from farm.builds.acknowledged import AcknowledgedFailures

        return AcknowledgedFailures(self.artifacts)

    @cached_property
    def build_reader(self) -> BuildReader:
        """Reads builds and their reports."""
        from farm.builds.reading import BuildReader

        return BuildReader(self.store, self.artifacts, self.jobs)

    @cached_property
    def build_finisher(self) -> BuildFinisher:
        """Finishes the builds that have ended."""
        from farm.builds.finishing import BuildFinisher

        return BuildFinisher(
            self.store,
            self.artifacts,
            builds=self.builds,
            reader=self.build_reader,
            known=self._known_artifacts,
            history=self.cell_history,
            webhooks=self.webhooks,
            notary=self.notary,
        )

    @cached_property
    def toolchains(self) -> Toolchains:
        """Shadow builds, and which toolchain's programs refs give to readers."""
        from farm.artifacts.refs import Refs
        from farm.builds.baselines import Baselines
        from farm.builds.toolchains import Toolchains

        return Toolchains(
            self.store,
            self.artifacts,
            builds=self.builds,
            reader=self.build_reader,
            finisher=self.build_finisher,
            known=self._known_artifacts,
            baselines=Baselines(Refs(self.artifacts), self._known_artifacts, self.cell_history),
            promotions=self.promotions,
        )

    @cached_property
    def cell_history(self) -> CellHistory:
        """How each cell ended in each build."""
        from farm.builds.cell_history import CellHistory

        return CellHistory(self.settings.data_dir / "history.sqlite3", self.artifacts)

    @cached_property
    def _known_artifacts(self) -> KnownArtifacts:
        from farm.builds.known import KnownArtifacts

        return KnownArtifacts(self.store, self.artifacts)

    @cached_property
    def jobs(self) -> JobViews:
        """Reads jobs."""
        from farm.builds.job_views import JobViews

        return JobViews(self.store, self.artifacts)

    @cached_property
    def executor(self) -> Executor:
        """Runs the steps of one attempt."""
        from farm.node.blob_cache import NodeCache
        from farm.node.executor import Executor

        cache = NodeCache(
            self.settings.data_dir / "cache", limit=self.settings.cache_bytes, download=self.artifacts.get_blob
        )
        return Executor(self.artifacts, cache, self.settings)
