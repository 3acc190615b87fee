"""The audit of the store names each contradiction, and nothing else."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import redis

from farm.jobs.state import Outcome
from farm.settings import Settings
from farm.store import Store
from tests.support.jobs import join_pool, new_cell, run_next, submit, take
from tests.support.scripted_pool import POOL

LANE = "pool:P:ready:0:new:b-1"

SAID = [
    ("HDEL build:b-1:cells hit", ["b-1 accepted 4 cells, but holds 3"]),
    (
        "SREM build:b-1:live waits",
        [
            "b-1 waits is queued, but nobody waits for it",
            "b-1 waits for cells that it does not have",
            "j-waits is queued, but nobody wants it",
        ],
    ),
    ("HSET build:b-1:ends waits {}", ["b-1 waits is queued, but has ended"]),
    ("HSET build:b-1:ends runs {}", ["b-1 runs is running, but has ended"]),
    ("DEL job:j-waits", ["b-1 waits is queued, but its job is gone"]),
    ("HDEL build:b-1:jobs runs", ["b-1 runs is running, but its job is gone"]),
    (
        "SADD build:b-1:live over",
        [
            "b-1 over is succeeded, but is waited for",
            "b-1 waits for cells that it does not have",
            "j-over is succeeded, but has live cells",
        ],
    ),
    ("HDEL build:b-1:ends over", ["b-1 over is succeeded, but not how it ended"]),
    ("HSET build:b-1 n:queued 5", ["b-1 counts 5 cells as queued, but 1 are"]),
    ("HDEL build:b-1 n:running", ["b-1 counts 0 cells as running, but 1 are"]),
    ("HSET build:b-1 n:failed 2", ["b-1 counts 2 cells as failed, but 0 are"]),
    (
        "HSET build:b-1 state ended",
        ["b-1 is ended, but has live cells", "b-1 ended, but nobody will write its report"],
    ),
    ("HSET build:b-1 state reported", ["b-1 is reported, but has live cells"]),
    ("HSET build:b-2 state open", ["b-2 has no live cell, but did not end"]),
    ("HSET build:b-2 state open cells 2", []),  # It waits for another lot.
    ("SREM unreported b-2", ["b-2 ended, but nobody will write its report"]),
    (
        "HSET build:b-1:states waits running",
        [
            "b-1 counts 1 cells as queued, but 0 are",
            "b-1 counts 1 cells as running, but 2 are",
            "b-1 waits is running, but its job is queued",
            "j-waits is queued, but its cell waits of b-1 is running",
        ],
    ),
    (
        "HSET build:b-1:states waits odd",
        [
            "b-1 counts 0 cells as odd, but 1 are",
            "b-1 counts 1 cells as queued, but 0 are",
            "b-1 waits for cells that it does not have",
            "b-1 waits is odd, but is waited for",
            "b-1 waits is odd, but not how it ended",
            "j-waits is queued, but its cell waits of b-1 is odd",
        ],
    ),
    ("ZREM pool:P:waiting j-waits", ["j-waits is waiting, but not listed among its pool's waiting"]),
    ("ZADD pool:P:handed 1 j-waits", ["j-waits is waiting, but listed among its pool's handed"]),
    ("ZREM pool:P:running j-runs", ["j-runs is running, but not listed among its pool's running"]),
    ("ZADD pool:P:running 1 j-over", ["j-over is succeeded, but listed among its pool's running"]),
    ("ZREM leases j-runs", ["j-runs is running without a lease"]),
    ("RENAME leases kept", []),
    ("ZADD leases 1 j-waits", ["j-waits is queued with a lease"]),
    ("ZADD kept 1 j-over", ["j-over is succeeded with a lease"]),
    ("DEL pool:P:levels", ["j-waits waits, but will never be handed out"]),
    ("DEL pool:P:turns:0:new", ["j-waits waits, but will never be handed out"]),
    ("RENAME pool:P:turns:0:new pool:P:firsts:0:new", []),
    (f"DEL {LANE}", ["j-waits waits, but will never be handed out"]),
    (f"RENAME {LANE} delayed", []),
    ("DEL active:main:waits", ["j-waits is queued, but is not the one of its key"]),
    ("SET active:main:runs j-over", ["j-runs is running, but is not the one of its key"]),
    ("HSET job:j-runs cancelling 1 job_key other", []),
    ("SET active:main:over j-over", ["j-over is succeeded, but still the one of its key"]),
    ('HSET job:j-over:attempts 2:end {"end":"succeeded"}', ["j-over succeeded 2 times"]),
    ('HSET job:j-over:attempts 2:end {"end":"failed"} 2:start {"end":"succeeded"}', []),
]


@pytest.fixture
def story(store: Store, farm_settings: Settings) -> Iterator[tuple[redis.Redis, dict[str, str]]]:
    """A build with a cell in each state and one that has ended; the names that stand for names here."""
    join_pool(store)
    success = Outcome.success({"latency": 0.01})
    cells = {name: new_cell(f"{number}" * 64) for number, name in enumerate(("over", "runs", "waits"), 1)}
    cells["hit"] = new_cell("4" * 64, facts={"latency": 0.5}, order=None)
    build = submit(store, *cells.values())
    run_next(store, success)
    take(store)
    other = submit(store, new_cell("5" * 64, facts={}, order=None))
    jobs = store.builds.jobs(build)
    names = {"b-1": build, "b-2": other, "P": POOL.name}
    names |= {f"j-{name}": jobs[cell["identifier"]] for name, cell in cells.items() if name != "hit"}
    names |= {f"main:{name}": f"main:{cell['key']}" for name, cell in cells.items()}
    names |= {name: cell["identifier"] for name, cell in cells.items()}
    with redis.Redis.from_url(farm_settings.redis_url.get_secret_value()) as connection:
        yield connection, names


@pytest.mark.damaged
def test_each_contradiction_is_named_and_nothing_else(store: Store, story: tuple[redis.Redis, dict[str, str]]) -> None:
    connection, names = story
    whole = {name: connection.dump(name) for name in connection.scan_iter("{farm}:*", 1000)}
    pattern = re.compile(r"(?<![\w-])(" + "|".join(map(re.escape, names)) + r")(?![\w-])")
    back = {each: name for name, each in names.items() if ":" not in name}
    real = re.compile("|".join(map(re.escape, back)))

    def said() -> list[str]:
        found = [*store.audit.builds(), *store.audit.jobs()]
        return sorted(real.sub(lambda word: back[word[0]], f"{one} {problem}") for one, problem in found)

    assert said() == []
    assert store.audit.count() == {"builds": 2, "jobs": 3}
    for command, sentences in SAID:
        verb, *words = command.split(" ")
        words = [pattern.sub(lambda word: names[word[0]], word) for word in words]
        keys = 2 if verb == "RENAME" else 1
        connection.execute_command(verb, *["{farm}:" + word for word in words[:keys]], *words[keys:])
        assert said() == sorted(sentences), command
        connection.flushall()
        for name, content in whole.items():
            connection.restore(name, 0, content)
