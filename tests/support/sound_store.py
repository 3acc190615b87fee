"""What is true of the store between two steps, whatever was done (docs/job-store.md): tests that have one end with it.

The farm's own audit says what would harm users; this also says what belongs together, and what expires when.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import redis

from farm.settings import Settings
from farm.store import Store

MANY = 3000
"""Keys: a store with more is about numbers."""

HOUR = 3_600_000
GONE = -2
"""The time that is left to a key that expired while others were read."""
STARTED = {"token", "nonce", "worker", "node", "started_at", "time", "memory"}
"""What a job has while it runs."""
EXPIRING = {
    r"group:.*|cancels:.*|quarantined:.*|node:[^:]*(?:|:passed)|job:[^:]*:(?:packed|log)": None,  # `keep_days`
    r"worker:[^:]*:last": HOUR,
    r"node:[^:]*:blamed": 24 * HOUR,
    r"worker:[^:]*|worker:locks:.*": 24 * HOUR,  # As the worker said.
    r"leader|reaper:.*": HOUR,
    r"moment": 10_000 * HOUR,  # Tests set the clock forward.
}


def contradictions(settings: Settings) -> list[str]:
    """Return a sentence for each thing that is not as it has to be."""
    store = Store.connect(settings)
    with redis.Redis.from_url(
        settings.redis_url.get_secret_value(), decode_responses=True, encoding_errors="replace"
    ) as connection:
        if connection.dbsize() > MANY:
            return []
        audited = [
            f"{kind} {one} {problem}"
            for kind, found in (("build", store.audit.builds()), ("job", store.audit.jobs()))
            for one, problem in found
        ]
        store.close()
        return [*audited, *Records(connection, settings).problems()]


@contextmanager
def kept_sound(settings: Settings, request: pytest.FixtureRequest) -> Iterator[None]:
    """Let the test fail at its end if anything contradicts anything, unless that is what it is about."""
    yield
    if not request.node.get_closest_marker("damaged"):
        found = contradictions(settings)
        assert found == [], "\n".join(found)


class Records:
    """All that a store holds, read once."""

    def __init__(self, connection: Any, settings: Settings) -> None:
        names = sorted(connection.scan_iter("{farm}:*", 1000))
        with connection.pipeline(transaction=False) as pipeline:
            for name in names:
                pipeline.type(name)
            kinds = pipeline.execute()
        with connection.pipeline(transaction=True) as pipeline:
            for name, kind in zip(names, kinds, strict=True):
                match kind:
                    case "hash":
                        pipeline.hgetall(name)
                    case "set":
                        pipeline.smembers(name)
                    case "zset":
                        pipeline.zrange(name, 0, -1, withscores=True)
                    case "stream":
                        pipeline.xrange(name)
                    case _:
                        pipeline.exists(name) if kind == "list" else pipeline.get(name)
            for name in names:
                pipeline.pttl(name)
            values = pipeline.execute()
        values, times = values[: len(names)], values[len(names) :]
        seconds, microseconds = connection.time()
        self.now = seconds * 1000 + microseconds // 1000
        self.settings = settings
        self.keys = {
            name.removeprefix("{farm}:"): dict(value) if kind == "zset" else value
            for name, kind, value in zip(names, kinds, values, strict=True)
        }
        self.times = {name: left for name, left in zip(self.keys, times, strict=True) if left != GONE}
        self.jobs = {name[4:]: value for name, value in self.keys.items() if re.fullmatch(r"job:[^:]+", name)}
        self.builds = {name[6:]: value for name, value in self.keys.items() if re.fullmatch(r"build:[^:]+", name)}

    def set(self, name: str) -> set[str]:
        """Return the members of a set, sorted set or hash; none if it is not there."""
        return set(self.keys.get(name) or ())

    def problems(self) -> Iterator[str]:
        """Yield a sentence for each thing that is not as it has to be."""
        yield from self._times()
        for build_id, build in self.builds.items():
            for problem in self._of_build(build_id, build):
                yield f"build {build_id}: {problem}"
        for job_id, job in self.jobs.items():
            for problem in self._of_job(job_id, job):
                yield f"job {job_id}: {problem}"
        yield from self._of_lanes()

    def _times(self) -> Iterator[str]:
        keep = self.settings.keep_days * 24 * HOUR
        for name, left in self.times.items():
            kind, _, rest = name.partition(":")
            record = {"build": self.builds, "job": self.jobs}.get(kind, {}).get(rest.partition(":")[0])
            if record is not None:
                over = record["state"] not in {"open", "ended", "queued", "running"}
                if over != (keep - HOUR < left <= keep):
                    yield f"{name} is kept for {left} ms, and its {kind} is {record['state']}"
                continue
            bound = next((bound or keep for names, bound in EXPIRING.items() if re.fullmatch(names, name)), 0)
            if (0 <= left <= bound) != bool(bound) or (bound == keep and left < keep - HOUR):
                yield f"{name} is kept for {left} ms of {bound}"

    def _of_build(self, build_id: str, build: dict[str, str]) -> Iterator[str]:
        states, jobs, ends, live = (
            self.keys.get(f"build:{build_id}:{part}", {}) for part in ("states", "jobs", "ends", "live")
        )
        complete = int(build["accepted"]) >= int(build["cells"])
        if (build_id in self.set("incomplete")) == complete and build["state"] == "open":
            yield f"{build['accepted']} of its {build['cells']} cells came, and it waits for others: {not complete}"
        if (build_id in self.set("unreported")) != (build["state"] == "ended"):
            yield f"is {build['state']}, and its report is {'' if build['state'] == 'ended' else 'not '}to come"
        if build_id in self.set("stopping") and (build["state"] != "open" or build.get("stop") != "1" or not live):
            yield "is to be stopped, though nothing of it goes on"
        if build["state"] == "open" and "ended_at" in build:
            yield "has ended and is open"
        if build["state"] != "open" and not int(build["created_at"]) <= int(build["ended_at"]) <= self.now:
            yield "ended before it began, or later than now"
        if build.get("packed"):
            if states or jobs or ends or live:
                yield f"is packed, and has cells: {sorted(states)}"
            return
        flying = self.set(f"build:{build_id}:flying")
        under_way = {job for job in jobs.values() if self.jobs.get(job, {}).get("where") in {"handed", "running"}}
        if flying - under_way or {jobs[cell] for cell in live} & under_way - flying:
            yield f"{sorted(flying)} fly, and {sorted(under_way)} are under way"
        for cell in ends.keys() & jobs.keys():
            end = json.loads(ends[cell])
            if end["job"] != jobs[cell] or not 0 <= self.now - end["at"] < HOUR or end["outcome"]["end"] == "released":
                yield f"{cell} ended otherwise than its job {jobs[cell]}: {end}"
        yield from self._of_events(build_id, build, states, jobs)

    def _of_events(
        self, build_id: str, build: dict[str, str], states: dict[str, str], jobs: dict[str, str]
    ) -> Iterator[str]:
        """What the events say, one after the other, comes to what is there."""
        said = {cell: state for cell, state in states.items() if cell not in jobs}
        last, accepted, counted = "", 0, 0
        for _, event in self.keys.get(f"build:{build_id}:events", ()):
            match event["type"]:
                case "build":
                    last = event["state"]
                case "accepted":
                    accepted, counted = int(event["accepted"]), counted + int(event["cells"])
                case "cell":
                    said[event["identifier"]] = event["state"]
                    if event["job"] != jobs.get(event["identifier"]) or not event["attempt"].isdecimal():
                        yield f"an event speaks of another job: {event}"
                    if (event["state"] == "running") != bool(event["worker"]) and event["state"] in {
                        "queued",
                        "running",
                    }:
                        yield f"an event of a {event['state']} cell speaks of worker {event['worker']!r}"
        if (last, accepted, counted) != (build["state"], int(build["accepted"]), int(build["accepted"])):
            yield f"its events end with {last}, {accepted} cells ({counted}): {build}"
        if unsaid := {cell for cell, state in said.items() if states[cell] != state}:
            yield f"its events say other states of {sorted(unsaid)}"
        if unsaid := {
            cell for cell, state in states.items() if cell not in said and state not in {"queued", "running"}
        }:
            yield f"no event says how {sorted(unsaid)} ended"

    def _of_job(self, job_id: str, job: dict[str, str]) -> Iterator[str]:
        if f"job:{job_id}:packed" in self.keys:
            yield "is packed, and has its record"
        number, running = int(job["number"]), job["state"] == "running"
        attempts = self.keys.get(f"job:{job_id}:attempts", {})
        over = {int(name[:-4]): json.loads(text) for name, text in attempts.items() if name.endswith(":end")}
        begun = {int(name[:-6]): json.loads(text) for name, text in attempts.items() if name.endswith(":start")}
        if set(begun) - {number} != set(range(1, number)) or (number in begun) < running:
            yield f"is at attempt {number}, and began {sorted(begun)}"
        if set(over) - {number} != set(range(1, number)) or (number in over and job["state"] == "queued"):
            yield f"is at attempt {number}, and has the ends of {sorted(over)}"
        spent = sum(over[one]["at"] - begun[one]["started_at"] for one in over.keys() & begun.keys())
        again = any(end["end"] == "superseded" for end in over.values())  # It came later than the end that it replaces.
        if abs(int(job.get("spent", 0)) - spent) > 5 * len(over) and not again:
            yield f"spent {job.get('spent')} ms of {spent}"
        if running != (job.keys() >= STARTED) and job["state"] in {"queued", "running"}:
            yield f"is {job['state']} with {sorted(job)}"
        if (
            job["state"] == "queued"
            and {"phase", "progress", "detail", "paused", "kept", "worker", "token"} & job.keys()
        ):
            yield f"is queued with {sorted(job)}"
        if (job_id in self.set("kept")) != (running and "kept" in job) or job_id in self.set("kept") & self.set(
            "leases"
        ):
            yield f"its program is {'' if 'kept' in job else 'not '}kept"
        lease = self.settings.lease_seconds * 1000
        end = self.keys.get("leases", {}).get(job_id, self.now)
        if end > self.now + lease or (job_id in self.set("leases") and end < int(job["started_at"]) + lease):
            yield f"has a lease until {end}"
        holders = {name for name in self.keys if name.startswith("worker:") and name.endswith(":running")}
        held = {name for name in holders if job_id in self.set(name)}
        if held != ({f"worker:{job['worker']}:running"} if running else set()):
            yield f"is {job['state']} and in {held}"
        if ("ended_at" in job) != ("outcome" in job) or ("ended_at" in job) != (job["where"] == ""):
            yield f"is {job['where']} with {sorted(job)}"
        if job["state"] != "queued" and job_id in self.set("delayed"):
            yield f"is {job['state']} and delayed"

    def _of_lanes(self) -> Iterator[str]:
        """Every lane has its turn, and holds what waits there, by rank."""
        lanes: dict[tuple[str, str], dict[str, dict[str, float]]] = defaultdict(dict)
        for name, members in self.keys.items():
            if found := re.fullmatch(r"pool:(.+):ready:([^:]+:[^:]+):([^:]+)", name):
                lanes[found[1], found[2]][found[3]] = members
        for name, levels in self.keys.items():
            if not (found := re.fullmatch(r"pool:(.+):levels", name)):
                continue
            for level, place in levels.items():
                priority, _, sort = level.partition(":")
                waiting = [self.set(f"pool:{found[1]}:{queue}:{level}") for queue in ("firsts", "turns")]
                there = lanes.pop((found[1], level), {})
                if waiting[0] | waiting[1] != set(there) or waiting[0] & waiting[1] or not there:
                    yield f"{name} at {level}: builds {waiting} wait, and {sorted(there)} have jobs"
                if place != 2 * int(priority) + (sort == "again") or (sort == "again" and waiting[0]):
                    yield f"{name} at {level} has place {place}"
                for build_id, jobs in there.items():
                    for job_id, rank in jobs.items():
                        job = self.jobs[job_id]
                        if (job["where"], float(job["rank"]), job["priority"]) != ("waiting", rank, priority):
                            yield f"{job_id} lies at {level} of {build_id} with rank {rank}: {job}"
                        if (int(job["number"]) > 1) != (sort == "again") or job_id in self.set("delayed"):
                            yield f"{job_id} lies at {level} of {build_id}: {job}"
            if extra := self.set(f"pool:{found[1]}:row") - levels.keys():
                yield f"pool {found[1]} counts turns at {extra}"
        if lanes:
            yield f"lanes have no level: {sorted(lanes)}"
        for job_id, job in self.jobs.items():
            level = f"{job['priority']}:{'again' if int(job['number']) > 1 else 'new'}"
            for name in self.keys.get(f"job:{job_id}:cells", {}):
                build_id, _, cell = name.partition("|")
                if (
                    job["where"] == "waiting"
                    and job_id not in self.set("delayed")
                    and cell in self.set(f"build:{build_id}:live")
                    and job_id not in self.set(f"pool:{job['pool']}:ready:{level}:{build_id}")
                ):
                    yield f"{job_id} waits in no lane of {build_id}"
