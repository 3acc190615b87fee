"""A farm whose refs are signed: the keys of its roles, their file, and the policy of a reader who trusts them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from farm.app import Farm
from farm.extras.signing.signed_refs import Renewals, Roles, issue, lasts, publish
from farm.extras.signing.signing_keys import clock
from farm.extras.signing.trust import load_policy
from farm.extras.signing.verifying import Trust
from tests.support.signed import POLICY, key_in

if TYPE_CHECKING:
    from securesystemslib.signer import CryptoSigner

SIGNED_REFS = POLICY.replace('promoted = ["prod"]\n', "") + '[refs]\nroles = "roles.json"\n'


@dataclass
class Ceremony:
    """The keys of a farm's roles, by their names, in a folder with the file of roles."""

    folder: Path
    signers: dict[str, CryptoSigner] = field(default_factory=dict)
    roles: Roles | None = None

    def signer(self, name: str) -> CryptoSigner:
        if name not in self.signers:
            self.signers[name] = key_in(self.folder, name)
        return self.signers[name]

    def issue(
        self, *by: str, promoters: Sequence[str] = (), namespace: str = "main", days: float = 730, **keys: str
    ) -> Roles:
        """Issue roles with these keys, given by name, and write the file."""
        given = {role: [self.signer(name).public_key] for role, name in keys.items()}
        promoting = {namespace: [self.signer(name).public_key for name in promoters]} if promoters else {}
        signing = [self.signer(name) for name in by]
        self.roles = issue(self.roles, signing, given, promoting, lasts(days, clock()))
        (self.folder / "roles.json").write_bytes(self.roles.text())
        return self.roles

    def publish(self, farm: Farm, now: datetime | None = None) -> None:
        """Publish the roles, and let the farm sign what is due."""
        assert self.roles
        publish(farm.artifacts, self.roles.text())
        Renewals(farm).renew(now)

    def trust(self, memory: str = "memory", by: str = "", namespace: str = "", policy: str = SIGNED_REFS) -> Trust:
        """Return what a reader with the roles of now trusts; `by` is his key, if he promotes."""
        (self.folder / "trust.toml").write_text(policy)
        signer = self.signer(by) if by else None
        return Trust(load_policy(self.folder / "trust.toml"), namespace, signer, self.folder / memory)
