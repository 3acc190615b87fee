"""Signing: statements about programs, signed with a farm's key, and the trust policies of those who load them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from farm.extension import Extension, late

if TYPE_CHECKING:
    from farm.app import Farm
    from farm.artifacts.refs import SnapshotCell
    from farm.artifacts.storage import Sign
    from farm.results.report import Report
    from farm.settings import Settings


def _start(farm: Farm) -> None:
    """Read key and policy: a wrong one ends the start."""
    if farm.settings.trust_policy:
        from farm.extras.signing.notary import Promotions

        farm.part(Promotions.of)
    if farm.settings.signing_key or farm.settings.timestamp_key:
        from farm.extras.signing.signing_keys import signers_of

        signers_of(farm.settings)


def _sign_publications(settings: Settings) -> Sign | None:
    """Return what signs the programs of a worker; None if it has no key."""
    if not settings.signing_key:
        return None
    from farm.extras.signing.notary import Notary

    notary = Notary.from_settings(settings)
    return notary.attest if notary else None


def _sign_gates(farm: Farm, report: Report) -> None:
    """Sign what a build's gates made of the cells that passed them, if this server has a key."""
    if farm.settings.signing_key:
        from farm.extras.signing.notary import attest_build

        attest_build(farm, report)


def _check(farm: Farm, namespace: str, tag: str, cells: Sequence[SnapshotCell]) -> Callable[[], object] | None:
    """Let a ref name what passes the server's trust policy, and then sign that it does. Raises Untrusted."""
    if not farm.settings.trust_policy:
        return None
    from farm.extras.signing.notary import Promotions

    return farm.part(Promotions.of).check(namespace, tag, cells)


extension = Extension(
    name="signing",
    settings=["signing_key", "timestamp_key", "trust_policy", "builder_id"],
    routes=["farm.extras.signing.role_routes:router"],
    loops=late("farm.extras.signing.signed_refs:loops"),
    on_start=_start,
    on_published=_sign_publications,
    on_judged=_sign_gates,
    on_named=_check,
    on_commit=late("farm.extras.signing.signed_refs:commit"),
    on_committed=late("farm.extras.signing.signed_refs:remember"),
    artifact_facts=late("farm.extras.signing.notary:facts_of"),
)
