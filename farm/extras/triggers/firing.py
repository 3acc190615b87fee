"""Firing: looks at the triggers of all stored manifests, and builds those whose occasion has come."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from farm import errors
from farm.artifacts.tokens import ADMINISTRATOR, Role
from farm.extension import Loop
from farm.extras.triggers.stored_manifests import (
    BuildWish,
    ManifestHead,
    PendingRun,
    StoredManifests,
    TriggerState,
    claimed,
    ended,
    postponed,
)
from farm.extras.webhooks.hooks import Webhooks
from farm.logging import get_logger
from farm.targets.pools import Pool, in_use, understand_target

if TYPE_CHECKING:
    from farm.app import Farm

log = get_logger(__name__)

FIRE_SECONDS = 10.0  # Seconds between two looks at the triggers: each reads the heads of all stored manifests.
AGAIN = 60.0  # Seconds until a build that the farm could not accept for now is tried again.


def loops(farm: Farm) -> list[Loop]:
    """Return the loop that fires triggers: one of its own, because to accept a large build takes long."""
    return [Loop("triggers", TriggerRounds(farm).go, FIRE_SECONDS)]


class TriggerRounds:
    """Goes through all triggers. Any number of control planes may: each occasion makes one build."""

    def __init__(self, farm: Farm) -> None:
        self._store, self._artifacts, self._settings = farm.store, farm.artifacts, farm.settings
        self._manifests, self._tokens, self._webhooks = farm.part(StoredManifests), farm.tokens, Webhooks(farm)

    def go(self) -> int:
        """Look at every trigger once, and return how many builds were made. One that fails does not stop the others."""
        made = 0
        for namespace in self._artifacts.list_folders("ns/"):
            for name, head in self._manifests.heads(namespace):
                for position in range(len(head.get("triggers", []))):
                    try:
                        made += self._look(namespace, name, head, position)
                    except errors.FarmFault:
                        raise
                    except Exception:
                        log.exception("trigger failed", namespace=namespace, manifest=name)
        return made

    def _look(self, namespace: str, name: str, head: ManifestHead, position: int) -> bool:
        """Look at one trigger; return whether it made a build."""
        before, now = head["triggers"][position], self._store.now()
        try:
            found, problem = self._found(before), ""
        except (errors.UsageError, errors.StorageUnavailable, ValueError) as error:
            found, problem = None, str(getattr(error, "message", error))
        after = claimed(before, now, head["version"], found, secrets.token_hex(8))
        if problem and before["pending"] is None:
            after = {**before, "problem": problem}
        if after == before or not self._replace(namespace, name, head, before, after):
            return False
        pending = after["pending"]
        return pending is not None and self._fire(namespace, name, head, after, pending)

    def _fire(self, namespace: str, name: str, head: ManifestHead, state: TriggerState, pending: PendingRun) -> bool:
        # With the version: a trigger that was removed and came back counts from one again.
        occasion = (state["kind"], state["text"], state["timezone"], str(pending["version"]), str(state["fired"]))
        build_id = self._artifacts.build_id_of(head["id"], *occasion)
        where = {"namespace": namespace, "manifest": name, "trigger": state["text"]}
        build, error = "", ""
        try:
            by, max_cells = self._owner(namespace, head, pending["version"])
            wish = BuildWish(version=pending["version"], labels={"trigger": state["kind"]}, gates=None)
            warnings = [pending["warning"]] if pending["warning"] else []
            made = self._manifests.build(
                namespace, name, wish, build_id, by=by, max_cells=max_cells, warnings=warnings, unattended=True
            )
            build = made["id"]
            log.info("trigger fired", **where, build=build, why=pending["why"])
        except (errors.FarmFault, errors.QuotaExceeded) as problem:
            log.warning("trigger waits", **where, error=problem.message)
            later = postponed(state, self._store.now(), problem.message, AGAIN)
            self._replace(namespace, name, head, state, later)
            return False
        except errors.FarmError as problem:
            error = problem.message
            log.warning("trigger made no build", **where, error=error)
            document = {**where, "version": pending["version"], "why": pending["why"], "error": error}
            self._webhooks.tell(namespace, "trigger.failed", build_id, document)
        self._replace(namespace, name, head, state, ended(state, self._store.now(), build, error))
        return bool(build)

    def _replace(
        self, namespace: str, name: str, head: ManifestHead, before: TriggerState, after: TriggerState
    ) -> bool:
        """Replace a trigger's state if it is still what it was; return whether it was."""

        def change(now: ManifestHead | None) -> ManifestHead:
            if now is None:
                raise errors.NotFound(f"{name} was removed")
            if now["id"] != head["id"] or before not in now.get("triggers", []):
                return now
            return {**now, "triggers": [after if state == before else state for state in now["triggers"]]}

        try:
            was, is_now = self._manifests.move(namespace, name, change)
        except (errors.NotFound, errors.ArtifactGone):
            return False
        return was != is_now

    def _found(self, state: TriggerState) -> set[str] | None:
        """Return what a trigger looks at. Raises as `Bucket.source_version`."""
        if state["kind"] == "source":
            bucket, _, key = state["text"].removeprefix("s3://").partition("/")
            if bucket not in self._settings.s3_sources:
                raise errors.UsageError(f"the farm may not read the bucket {bucket} (setting s3_sources)")
            return {self._artifacts.source_version(bucket, key)}
        if state["kind"] == "toolchain":
            choice = understand_target(state["text"])
            rows = [(Pool.from_dict(row["pool"]), row["live_workers"]) for row in self._store.workers.pools()]
            live = {pool.name for pool, workers in rows if workers}
            planned_for = [pool for pool in in_use(rows, self._settings.toolchains) if pool.name in live]
            return {pool.toolchain for pool in planned_for if choice.serves(pool)}
        return None

    def _owner(self, namespace: str, head: ManifestHead, version: int) -> tuple[str, int]:
        """Return the token for which a version is built, and how many unfinished cells it may have.

        Raises NotAllowed if the token that pushed the version may no longer submit.
        """
        pushed = next((each for each in head["versions"] if each["version"] == version), None)
        by = pushed["by"] if pushed else ""
        if by == ADMINISTRATOR:
            return by, 0
        for token in self._tokens.list():
            allowed = token.role is Role.ADMIN or (token.namespace == namespace and token.role >= Role.SUBMITTER)
            if pushed and token.name == by and pushed.get("token") == token.digest and allowed:
                return by, token.max_cells
        raise errors.NotAllowed(f"the token {by}, which pushed version {version}, may no longer submit: push it again")
