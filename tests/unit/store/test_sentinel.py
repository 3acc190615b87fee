"""Addresses of Sentinels: what Redis and Celery get of them, and which are refused."""

from __future__ import annotations

from urllib.parse import urlsplit

import pytest
from kombu.transport.redis import SentinelChannel
from redis.connection import SSLConnection

from farm.errors import FarmFault, UsageError
from farm.settings import load_settings
from farm.store import Store, broker, sentinel

URL = "sentinels://farm-worker:a%40b@s1:26380,[fd00::2],s3/2?master=farm&ssl_ca_certs=/ca.pem&sentinel_password=ask"


def test_celery_gets_each_sentinel_and_the_same_tls_and_user() -> None:
    app = broker.make_celery(load_settings({}, redis_url=URL))
    assert [urlsplit(url)[1:3] for url in app.connection_for_write().alt] == [
        (f"farm-worker:a%40b@{place}", "/2") for place in ("s1:26380", "[fd00::2]:26379", "s3:26379")
    ]
    options = app.conf.broker_transport_options
    assert options["master_name"] == "farm"
    for tls in (app.conf.broker_use_ssl, options["sentinel_kwargs"]):
        assert tls["ssl_ca_certs"] == "/ca.pem"
    assert (options["sentinel_kwargs"]["ssl"], options["sentinel_kwargs"]["password"]) == (True, "ask")
    assert app.conf.broker_use_ssl["ssl_cert_reqs"] == "required"


def test_celery_only_carries_messages_and_waits_for_a_server_that_is_away() -> None:
    settings = broker.make_celery(load_settings({}, redis_url="redis://s1/0")).conf
    on = ["task_ignore_result", "task_acks_late", "worker_disable_prefetch", "task_create_missing_queues"]
    on += ["broker_connection_retry_on_startup", "broker_channel_error_retry"]
    off = ["task_reject_on_worker_lost", "worker_cancel_long_running_tasks_on_connection_loss"]
    off += ["worker_enable_remote_control", "worker_send_task_events"]
    off += ["worker_hijack_root_logger", "worker_redirect_stdouts"]
    assert [settings[name] for name in on + off] == [True] * len(on) + [False] * len(off)
    assert (settings.worker_prefetch_multiplier, settings.broker_connection_max_retries) == (1, None)
    assert settings.broker_use_ssl is None
    assert settings.broker_transport_options == {
        "global_keyprefix": "{farm}:broker:",
        "ack_emulation": False,
        "socket_timeout": 10,
        "socket_connect_timeout": 4.0,
        "socket_keepalive": True,
        "health_check_interval": 5,
        "priority_steps": [0],
    }


@pytest.mark.parametrize(("url", "tls"), [(URL, True), ("sentinel://s1/2?master=farm", False)])
def test_the_primary_is_reached_as_its_sentinels_are(url: str, tls: bool) -> None:
    pool = sentinel.connect(url).connection_pool
    assert issubclass(pool.connection_class, SSLConnection) is tls
    assert (pool.service_name, pool.connection_kwargs["db"]) == ("farm", 2)
    with pytest.raises(ValueError, match="Sentinel is empty"):
        sentinel.read("sentinel://,s1/0?master=farm")


def test_a_message_names_the_places_and_no_password() -> None:
    assert Store.connect(load_settings({}, redis_url=URL)).address == "farm (s1:26380, fd00::2:26379, s3:26379)"


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("sentinel://s1,s2/0", "`?master=NAME` is missing"),
        ("sentinel://s1,,s2/0?master=farm", "the place of a Sentinel is empty"),
        ("sentinel://s1:port/0?master=farm", "Port"),
    ],
)
def test_a_wrong_address_is_refused_with_the_reason(url: str, said: str) -> None:
    with pytest.raises(UsageError, match=said.replace("?", r"\?")):
        Store.connect(load_settings({}, redis_url=url))


def test_without_an_address_there_is_no_store() -> None:
    with pytest.raises(UsageError, match="no address of Redis is set"):
        Store.connect(load_settings({}, redis_url=""))


def test_a_kombu_that_cannot_use_sentinels_is_refused_with_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """As celery/kombu#2420 shows it: next to a redis-py that it does not know, it has no class for connections."""
    monkeypatch.setattr(SentinelChannel, "connection_class", None)
    with pytest.raises(FarmFault, match=r"kombu [0-9.]+ cannot use sentinel:// with redis-py [0-9.]+"):
        Store.connect(load_settings({}, redis_url=URL))
    Store.connect(load_settings({}, redis_url="redis://s1/0"))
