"""A farm whose worker and server sign, and clients that trust its keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pydantic import SecretStr

from farm.app import Farm
from farm.client.client import FarmClient
from farm.extras.signing.signing_keys import new_key
from farm.extras.signing.trust import load_policy
from farm.extras.signing.verifying import Trust
from farm.settings import Settings
from tests.support.api_farm import POOL, finished, freeze_manifest
from tests.support.signed import POLICY

MANIFEST = """\
version: 1
name: demo
targets: [onnxruntime/cpu]
precisions: [fp32]
models:
  - name: net
    source: {path: net.onnx}
"""


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    folder = tmp_path / "keys"
    for name in ("farm", "root", "stranger"):
        new_key(name, folder)
    (folder / "trust.toml").write_text(POLICY)
    return folder


@pytest.fixture
def farm(settings: Settings, keys: Path) -> Farm:
    """A farm whose worker and server sign, and whose server has a policy."""
    changes = {
        "api_token": SecretStr("sesame"),
        "signing_key": str(keys / "farm.key"),
        "builder_id": "urn:example:farm",
        "trust_policy": str(keys / "trust.toml"),
    }
    farm = Farm(settings.model_copy(update=changes))
    worker = {"id": "w1", "node": "n1", "pid": 1, "host": "n1", "slots": 2, "pools": [POOL.as_dict()]}
    farm.store.workers.register(worker, ttl=600)
    return farm


@pytest.fixture
def built(farm: Farm, client: FarmClient, tmp_path: Path) -> str:
    return finished(farm, client, freeze_manifest(tmp_path, MANIFEST))


@pytest.fixture
def trusting(farm: Farm, url: str, keys: Path) -> Iterator[Callable[..., FarmClient]]:
    """Makes clients with a trust policy."""
    made = []

    def make(trust: Trust | None = None) -> FarmClient:
        trust = trust or Trust(load_policy(keys / "trust.toml"))
        made.append(FarmClient(url, farm.settings.api_token.get_secret_value(), trust=trust))
        return made[-1]

    yield make
    for client in made:
        client.close()
