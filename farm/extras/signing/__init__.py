"""Signing: statements about programs, signed with a farm's key, and the trust policies of those who load them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from farm.extension import Extension, late

if TYPE_CHECKING:
    from farm.app import Farm

extension: Extension[Farm] = Extension(
    name="signing",
    settings=["signing_key", "timestamp_key", "trust_policy", "builder_id"],
    routes=["farm.extras.signing.role_routes:router"],
    loops=late("farm.extras.signing.signed_refs:loops"),
    on_start=late("farm.extras.signing.notary:start", "signing_key", "timestamp_key", "trust_policy"),
    on_published=late("farm.extras.signing.notary:publishing", "signing_key"),
    on_judged=late("farm.extras.signing.notary:attest_build", "signing_key"),
    on_named=late("farm.extras.signing.notary:check", "trust_policy"),
    on_commit=late("farm.extras.signing.signed_refs:commit"),
    on_committed=late("farm.extras.signing.signed_refs:remember"),
    artifact_facts=late("farm.extras.signing.notary:facts_of"),
)
