"""Names of the client's methods in release 0.1.0: scripts of users call them, for one release longer."""

from __future__ import annotations

import warnings

import httpx
import pytest

from farm.client.client import FarmClient
from farm.client.former_names import FORMER

NAMES_OF_0_1_0 = """
    close health plan submit upload build builds cells diff cancel plan_retry retry pause resume pause_pool resume_pool
    report junit watch job log reproduction reproduce workers drain unfence pools audit gc tokens create_token
    revoke_token tuning tuning_snapshot tuning_stats tuning_import tuning_merge tuning_prune artifact artifact_log refs
    ref tag delete_tag ls fetch fetch_family download bring
"""


def client() -> FarmClient:
    answers = httpx.MockTransport(lambda request: httpx.Response(200, json={"items": [], "asked": request.url.path}))
    return FarmClient("http://farm.example", transport=answers)


def test_every_method_of_the_release_before_is_there() -> None:
    with warnings.catch_warnings(), client() as farm:
        warnings.simplefilter("ignore", DeprecationWarning)
        assert [name for name in NAMES_OF_0_1_0.split() if not callable(getattr(farm, name))] == []
        assert set(FORMER) <= set(NAMES_OF_0_1_0.split())


def test_a_former_name_warns_where_it_is_called() -> None:
    with client() as farm:
        with pytest.warns(DeprecationWarning, match=r"client.job is client.jobs.get now") as said:
            assert farm.job == farm.jobs.get  # type: ignore[attr-defined]
        assert said[0].filename == __file__
        with pytest.warns(DeprecationWarning, match=r"client.workers\(\) is client.workers.all\(\) now") as said:
            assert farm.workers() == []  # type: ignore[operator]
        assert said[0].filename == __file__
        with pytest.raises(AttributeError, match="no attribute 'jobb'"):
            farm.jobb  # type: ignore[attr-defined] # noqa: B018
