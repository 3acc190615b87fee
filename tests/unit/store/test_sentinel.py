"""Addresses of Sentinels: what Redis and Celery get of them, and which are refused."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit

import pytest
from kombu.transport.redis import SentinelChannel
from redis.connection import SSLConnection
from redis.exceptions import TimeoutError

from farm.errors import FarmFault, UsageError
from farm.settings import load_settings
from farm.store import Store, broker
from farm.store.link import connected, place_of, sentinels_of

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


@pytest.mark.parametrize(
    ("hosts", "places"),
    [
        ("[::1]", "[::1]:26379"),
        ("[::1]:1,s2", "[::1]:1, s2:26379"),
        ("s1,[fd00::2]:2", "s1:26379, [fd00::2]:2"),
        ("[fd00::1],[fd00::2]:2,[fd00::3]", "[fd00::1]:26379, [fd00::2]:2, [fd00::3]:26379"),
    ],
)
@pytest.mark.parametrize("who", ["", ":p@", "u:p%2F@"])
def test_sentinels_may_have_ipv6_addresses_at_any_place_of_the_list(who: str, hosts: str, places: str) -> None:
    """The `urlsplit` of newer Pythons refuses most of these lists, so it must not be asked about them as a whole."""
    url = f"sentinel://{who}{hosts}/1?master=farm#words"
    assert Store.connect(load_settings({}, redis_url=url)).address == f"farm ({places})"
    wanted = ";".join(f"sentinel://{who}{place}/1" for place in places.split(", "))
    assert broker.make_celery(load_settings({}, redis_url=url)).conf.broker_url == wanted


@pytest.mark.parametrize(("url", "tls"), [(URL, True), ("sentinel://s1/2?master=farm", False)])
def test_the_primary_is_reached_as_its_sentinels_are(url: str, tls: bool) -> None:
    pool = connected(url).connection_pool
    assert issubclass(pool.connection_class, SSLConnection) is tls
    assert (pool.service_name, pool.connection_kwargs["db"]) == ("farm", 2)
    with pytest.raises(ValueError, match="Sentinel is empty"):
        sentinels_of("sentinel://,s1/0?master=farm")


def test_a_message_names_the_places_and_no_password() -> None:
    assert Store.connect(load_settings({}, redis_url=URL)).address == "farm (s1:26380, [fd00::2]:26379, s3:26379)"
    assert place_of("redis://u:p@[::1]/0") == "[::1]:6379"


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("redis://:hunter2@127.0.0.1:1/0", "127.0.0.1:1"),
        ("sentinel://:hunter2@s1:1,[::1]:2/0?master=farm", "farm (s1:1, [::1]:2)"),
    ],
)
def test_messages_name_the_place_of_the_broker_without_its_password(url: str, place: str) -> None:
    assert broker.make_celery(load_settings({}, redis_url=url)).conf.farm_place == place


@pytest.mark.parametrize("url", ["unix:///run/valkey.sock", "unix:/run/valkey.sock", "redis+socket:///run/valkey.sock"])
def test_an_address_of_a_socket_is_refused_when_a_farm_starts(url: str) -> None:
    with pytest.raises(UsageError, match=r"redis_url: it names a socket's file.* by host and port alone"):
        Store.connect(load_settings({}, redis_url=url))


def test_a_connection_to_a_primary_that_does_not_answer_is_closed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        pool = connected("sentinel://s1/0?master=farm", socket_timeout=0.05, protocol=2, driver_info=None)
        connection = pool.connection_pool.make_connection()
        connection.connect_to(silent.getsockname())
        assert connection.is_connected
        connection.send_command("PING")
        with pytest.raises(TimeoutError):
            connection.read_response()
        assert not connection.is_connected


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
