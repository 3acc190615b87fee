"""A machine that drives a real farm, with a played worker, and compares what every reader gets with the rules of refs.

`tests/support/ref_rules.py` is the model. Builds are submitted, worked and ended in any order, from two namespaces and
under several toolchains; people tag, promote and roll back; time passes and garbage goes.
"""

from __future__ import annotations

import itertools
import secrets
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import hypothesis
import onnx
import pytest
import redis
from fastapi import FastAPI
from hypothesis import HealthCheck, Phase
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    rule,
    run_state_machine_as_test,
)
from pydantic import SecretStr

from farm.app import Farm
from farm.artifacts import inventory
from farm.artifacts.refs import Refs as ArtifactRefs
from farm.artifacts.refs import ShownRef
from farm.builds.known_failures import today
from farm.client.client import FarmClient
from farm.client.fetching import choose
from farm.client.freezing import Frozen, freeze, new_build_id
from farm.client.loading import fitting
from farm.errors import Conflict, GateFailed, ManifestError, NotFound
from farm.jobs.state import FailureKind
from farm.node.survey import Findings
from farm.results.ref_rules import last, readers_order
from farm.results.report import Report
from farm.settings import Settings
from tests.support.api_farm import freeze_manifest
from tests.support.played import Made, Player, toolchain
from tests.support.ref_rules import Log, Numbers, Program, Refs, is_of, programs

POOLS = [toolchain(version) for version in ("1.3.0", "1.30.0", "1.31.0")]
"""A name that begins as another does: `onnxruntime1.3` is not 1.30."""
TOOLCHAINS = {pool.name: pool.toolchain for pool in POOLS}
NAMESPACES = ("main", "pr")
TAGS = ("latest", "prod", "v1")
STRICT, LOOSE = 1e-3, 0.1
QUICK, SLOW = 15.0, 60.0
"""Seconds that a compile may take. It takes 10 or 20, which a shadow build does not call a regression."""
DAY = 86_400.0

MANIFEST = """\
version: 1
name: {name}
targets: [onnxruntime/cpu]
precisions: [fp32]
tuning: {tuning}
verify: {{tolerance: {tolerance}}}
{more}models:
  - {{name: net, source: {{path: net.onnx}}, inputs: {{x: {{shape: [batch, 4]}}}}, batches: {batches}}}
"""


@dataclass(frozen=True)
class Wish:
    """What a manifest says."""

    name: str = "demo"
    commit: int = 1
    batches: tuple[int, ...] = (1, 8)
    background: bool = False
    tolerance: float = LOOSE
    toolchain: str = ""
    baseline: str = ""
    budget: float = 0.0
    """Seconds that a compile may take; 0: any number."""

    @property
    def limits(self) -> dict[str, float]:
        """Its rules, by the kind of failure."""
        return {"accuracy": self.tolerance, **({"budget": self.budget} if self.budget else {})}

    def text(self) -> str:
        """The manifest."""
        more = f"toolchains: [{self.toolchain}]\n" if self.toolchain else ""
        more += f"budgets: {{compile-time: {self.budget}s}}\n" if self.budget else ""
        more += f"gates: {{baseline: {self.baseline}, size: 10%}}\n" if self.baseline else ""
        tuning = "{mode: quick, background: exhaustive}" if self.background else "quick"
        return MANIFEST.format(
            name=self.name, batches=list(self.batches), tuning=tuning, tolerance=self.tolerance, more=more
        )


@dataclass
class Build:
    """A build that is not finished: what its cells were planned as, by identifier."""

    id: str
    namespace: str
    moment: float
    wish: Wish
    cells: dict[str, dict[str, Any]]
    against: dict[str, str] = field(default_factory=dict)
    """Of a follow-up: the keys of what it is measured against."""
    shadows: str = ""
    retries: bool = False


@dataclass
class World:
    """Where the machine gets its farms from: the session's servers, each farm with a bucket of its own."""

    settings: Settings
    app: FastAPI
    url: str
    s3: Any
    folder: Path
    frozen: dict[Wish, Frozen] = field(default_factory=dict)
    fetched: set[tuple[tuple[str, str, bool], ...]] = field(default_factory=set)
    """Entries of refs, in the order in which readers get them, that were fetched and loaded."""

    def farm(self, stack: ExitStack) -> tuple[Farm, dict[str, FarmClient]]:
        """Return a farm in which nothing has happened, and clients of its namespaces."""
        with redis.Redis.from_url(self.settings.redis_url.get_secret_value()) as connection:
            connection.flushall()
        name, token = f"test-{secrets.token_hex(6)}", secrets.token_hex(16)
        self.s3.create_bucket(Bucket=name)
        data = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        changes = {"s3_bucket": name, "data_dir": data, "api_token": SecretStr(token)}
        self.app.state.farm = farm = Farm(self.settings.model_copy(update=changes))
        clients = [stack.enter_context(FarmClient(self.url, token, namespace=each)) for each in NAMESPACES]
        return farm, dict(zip(NAMESPACES, clients, strict=True))

    def freeze(self, wish: Wish) -> Frozen:
        """Return a wish as it is submitted."""
        if wish not in self.frozen:
            folder = self.folder / str(len(self.frozen))
            folder.mkdir()
            freeze_manifest(folder, wish.text(), batch="batch")
            model = onnx.load(folder / "net.onnx")
            model.doc_string = f"commit {wish.commit}"
            onnx.save(model, folder / "net.onnx")
            self.frozen[wish] = freeze(folder / "farm.yaml", cache=self.folder / "cache")
        found = self.frozen[wish]
        return replace(found, submission={**found.submission, "build_id": new_build_id()})

    def walk(self, steps: Iterable[tuple[str, dict[str, Any]]]) -> None:
        """Let a farm take these steps."""
        machine = type("Machine", (RefMachine,), {"world": self})()
        try:
            for step in steps:
                machine.take(step)
                machine.every_ref_is_as_the_rules_say()
        finally:
            machine.teardown()

    def run(self, steps: int, *, farms: int, seed: int) -> int:
        """Let farms take so many steps each, the same ones for the same seed; return how many they took together."""

        class Machine(RefMachine):
            world = self

        run_state_machine_as_test(
            hypothesis.seed(seed)(Machine),
            settings=hypothesis.settings(
                max_examples=farms,
                stateful_step_count=steps,
                database=None,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
                report_multiple_bugs=False,
            ),
        )
        return Machine.steps


WISHES = st.builds(
    Wish,
    name=st.sampled_from(["demo", "demo", "other"]),
    commit=st.sampled_from([1, 2]),
    batches=st.sampled_from([(1, 8), (1, 8), (1,)]),
    background=st.sampled_from([True, True, False]),
    tolerance=st.sampled_from([LOOSE, STRICT]),
    toolchain=st.sampled_from(["", "", "", "onnxruntime1.3", "onnxruntime1.30", "onnxruntime1.31"]),
    baseline=st.sampled_from(["", "latest", "prod"]),
    budget=st.sampled_from([0.0, 0.0, QUICK, SLOW]),
)
NAMED = ["onnxruntime1.3", "onnxruntime1.30", "onnxruntime1.31", "onnxruntime1"]
FLEETS = [("1.3",), ("1.31",), ("1.3", "1.30"), ("1.30", "1.31"), ("1.3", "1.30", "1.31")]


def any_of(*values: Any) -> st.SearchStrategy[Any]:
    """One of these values; one that is given twice comes twice as often."""
    return st.sampled_from(values)


def step(name: str, **arguments: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[str, dict[str, Any]]]:
    """A step of the machine, with what it is drawn from."""
    return st.tuples(st.just(name), st.fixed_dictionaries(arguments))


WHICH, WHERE, REF = st.integers(0, 99), any_of("main", "main", "pr"), any_of(*TAGS, "latest", "prod")
WORK = {
    "error": any_of(1e-7, 1e-7, 0.01),
    "faster": any_of(True, True, False),
    "fails": any_of(False, False, False, True),
    "seconds": any_of(10.0, 10.0, 20.0),
}
CALM: dict[str, Any] = {"error": 1e-7, "faster": False, "fails": False}
"""Nothing happens to a program."""
OFTEN: Mapping[str, tuple[int, st.SearchStrategy[Any]]] = {
    "build": (6, step("build", namespace=WHERE, wish=WISHES, **WORK)),
    "submit": (3, step("submit", namespace=WHERE, wish=WISHES)),
    "work": (3, step("work", **WORK)),
    "finish": (4, step("finish", which=WHICH)),
    "fleet": (5, step("fleet", versions=any_of(*FLEETS))),
    "tag": (
        3,
        step("tag", namespace=WHERE, tag=REF, source=any_of(*TAGS, "build"), which=WHICH, previous=st.booleans()),
    ),
    "forget": (2, step("forget", namespace=any_of(*NAMESPACES), tag=REF)),
    "shadow": (
        4,
        step(
            "shadow", namespace=WHERE, ref=REF, named=any_of("", *NAMED), is_promoted=any_of(True, True, False), **WORK
        ),
    ),
    "promote": (3, step("promote", which=WHICH, force=st.booleans())),
    "roll_back": (5, step("roll_back", namespace=WHERE, ref=REF, named=any_of("", "", *NAMED))),
    "retry": (1, step("retry", which=WHICH, failed=st.booleans())),
    "acknowledge": (1, step("acknowledge", namespace=WHERE, batch=any_of(1, 8), kind=any_of("accuracy", "budget"))),
    "insist": (5, step("insist", namespace=WHERE, word=any_of("tag", "promote", "acknowledge", ""))),
    "tighten": (4, step("tighten", namespace=WHERE, at_once=st.booleans())),
    "wait": (1, step("wait", days=any_of(1, 31))),
    "collect": (1, step("collect")),
}
STEPS = any_of(*(name for name, (often, _) in OFTEN.items() for _ in range(often))).flatmap(lambda name: OFTEN[name][1])
"""In one rule, since Hypothesis would leave out some rules in each run, such as that which submits."""


class RefMachine(RuleBasedStateMachine):
    """The farm, and the model of its refs."""

    world: World
    steps = 0

    def __init__(self) -> None:
        super().__init__()
        self.stack = ExitStack()
        self.farm, self.clients = self.world.farm(self.stack)
        self.player = Player(self.farm, [], says=self.says)
        self.model = Refs()
        self.open: dict[str, Build] = {}
        self.finished: dict[str, Build] = {}
        self.passed: dict[str, dict[str, tuple[str, Program]]] = {}
        self.made: dict[tuple[str, str], bool] = {}
        """Which programs a namespace has, and if each was shown to be faster than what it was measured against."""
        self.shown: dict[str, bool] = {}
        """If the program that a job made was shown to be faster, by the job's id."""
        self.numbers: dict[str, Numbers] = {}
        """Error and compile time of programs, by their keys."""
        self.models: dict[str, str] = {}
        self.worked: dict[str, bool] = {}
        """If jobs succeeded, by their ids."""
        self.enters: dict[tuple[str, str], bool] = {}
        """Whether `latest` may name a program after a build, by the build and the key."""
        self.deeper: dict[str, str] = {}
        """Keys of background programs by those of the programs that they are measured against."""
        self.seen: dict[tuple[str, str, int], dict[str, Log]] = {}
        self.read: dict[tuple[str, str], object] = {}
        self.outcome: Made | FailureKind = Made()
        self.later = 0.0
        now = self.farm.store.now
        self.farm.store.now = lambda: now() + self.later  # type: ignore[method-assign]
        self.fleet(("1.3",))
        self.build("main", Wish(), **CALM)
        self.tag("main", "prod", "latest", 0, previous=False)

    def teardown(self) -> None:
        """Give back what the farm needs."""
        self.stack.close()

    @rule(step=STEPS)
    def take(self, step: tuple[str, dict[str, Any]]) -> None:
        """Do one of the things below."""
        type(self).steps += 1
        name, arguments = step
        getattr(self, name)(**arguments)

    # --- the fleet ----------------------------------------------------------------------------------------------

    def fleet(self, versions: tuple[str, ...]) -> None:
        """The worker has these toolchains from now on."""
        self.farm.store.workers.leave("w1")
        self.player.pools = []
        self.player.join(
            *(pool for pool in POOLS if any(is_of(pool.toolchain, f"onnxruntime{each}") for each in versions))
        )

    def says(self, order: Mapping[str, Any]) -> Made | FailureKind:
        """What comes of a job; the machine draws it before it lets the worker work."""
        return self.outcome

    def work(self, error: float, faster: bool, fails: bool, seconds: float = 10.0) -> None:
        """The worker does all that waits for its toolchains."""
        verdict = "faster" if faster else "no difference shown"
        self.outcome = FailureKind.COMPILER_ERROR if fails else Made(error=error, verdict=verdict)
        publish = self.farm.artifacts.publish

        def published(namespace: str, sidecar: dict[str, Any], **more: Any) -> Any:
            self.made[namespace, sidecar["key"]] = self.shown[sidecar["job"]] = faster
            # What more tuning makes faster is less exact: builds that allow less must not get it.
            is_rough = faster and sidecar["spec"]["tuning"]["mode"] == "exhaustive"
            numbers = self.numbers.setdefault(
                sidecar["key"], {"accuracy": 0.01 if is_rough else error, "budget": seconds}
            )
            self.models[sidecar["key"]] = sidecar["spec"]["model"]["digest"]
            sidecar["verification"]["errors"] = {"y": numbers["accuracy"]}
            sidecar["phases"] = {"compiling": numbers["budget"]}
            return publish(namespace, sidecar, **more)

        finish = self.farm.store.jobs.finish

        def ended(job: str, token: str, outcome: Any) -> Any:
            self.worked[job] = not fails
            return finish(job, token, outcome)

        self.farm.artifacts.publish = published  # type: ignore[method-assign]
        self.farm.store.jobs.finish = ended  # type: ignore[method-assign]
        try:
            self.player.work()
        finally:
            self.farm.artifacts.publish = publish  # type: ignore[method-assign]
            self.farm.store.jobs.finish = finish  # type: ignore[method-assign]

    # --- builds -------------------------------------------------------------------------------------------------

    def submit(self, namespace: str, wish: Wish) -> None:
        """Somebody submits a manifest."""
        live = [pool.toolchain for pool in self.player.pools]
        if wish.toolchain and not any(is_of(each, wish.toolchain) for each in live):
            wish = replace(wish, toolchain="")
        if wish.baseline and not self.model.read(namespace, wish.baseline):
            wish = replace(wish, baseline="")
        expected = next(each for each in live if is_of(each, wish.toolchain or each))
        if not wish.toolchain and len(live) > 1:
            expected = self.model.chosen(namespace, live)
        frozen = self.world.freeze(wish)
        try:
            accepted = self.clients[namespace].submit(frozen)
        except ManifestError:
            assert not expected, f"builds take {expected}"
            return
        assert expected, "no ref says which toolchain builds take"
        build = self.accepted(accepted["id"], namespace, wish)
        given = self.model.given(namespace, wish.baseline) if wish.baseline else {}
        for name, cell in build.cells.items():
            assert TOOLCHAINS[cell["pool"]] == expected, f"{name} is compiled by {cell['pool']}, not {expected}"
            baseline = cell.get("baseline") or {"key": ""}
            wanted = given.get(name, ("", ""))
            assert baseline["key"] == wanted[1], f"{name} is compared with {baseline}, not {wanted}"

    def build(self, namespace: str, wish: Wish, **work: Any) -> None:
        """Somebody submits a manifest, and the farm does all that it has to do."""
        self.submit(namespace, wish)
        self.do_all(**work)

    def do_all(self, which: int = -1, **work: Any) -> None:
        """The farm does what waits, and ends what has ended, the last submission first."""
        self.work(**work)
        for _ in self.ended():
            self.finish(which)

    def accepted(self, build_id: str, namespace: str, wish: Wish) -> Build:
        """Note a build that the farm has accepted."""
        plan = self.farm.build_reader.read_plan(namespace, build_id)
        row = plan["build"]
        build = Build(
            build_id,
            namespace,
            row.get("submitted") or row["created_at"],
            wish,
            {cell["identifier"]: dict(cell) for cell in plan["cells"]},
            shadows=row.get("shadows") or "",
            retries=bool(row.get("retries")),
        )
        self.open[build_id] = build
        return build

    def ended(self) -> list[str]:
        """Return the builds that have ended and have no report yet, the last submission at the end."""
        rows = self.farm.store.builds.unreported()
        found = [row["id"] for row in rows if row["id"] in self.open and row["state"] == "ended"]
        return sorted(found, key=lambda each: self.open[each].moment)

    def finish(self, which: int) -> None:
        """The control plane finishes any of the builds that have ended."""
        if not (ended := self.ended()):
            return
        build = self.open.pop(ended[which % len(ended)])
        self.farm.build_finisher.finish(build.id)
        report = self.clients[build.namespace].report(build.id)
        passed = self.judge(build, report)
        self.finished[build.id], self.passed[build.id] = build, passed
        passed = {name: made for name, made in passed.items() if self.enters.get((build.id, made[1].key))}
        if not passed or build.shadows:
            return
        if build.against:
            jobs = {cell["identifier"]: cell["job"] for cell in report["cells"]}
            faster = {
                name: (made, build.against[name])
                for name, made in passed.items()
                if self.shown.get(jobs[name], self.is_faster(build.namespace, made[1].key))
            }
            self.model.speed_up(build.namespace, build.moment, faster)
            return
        named = {name: self.instead(build, name, *made) for name, made in passed.items()}
        waits = None if build.retries else build.cells.keys() - passed.keys()
        self.model.enter(build.namespace, build.moment, named, build.wish.name, waits)
        if follower := report["build"]["followed_by"]:
            behind = self.accepted(follower, build.namespace, build.wish)
            behind.against = {name: cell["order"]["against"] for name, cell in behind.cells.items()}
            for name, cell in behind.cells.items():
                self.deeper[behind.against[name]] = cell["key"]

    def judge(self, build: Build, report: Report) -> dict[str, tuple[str, Program]]:
        """Return the cells that passed. A shadow build has gates of its own, and no refusal of it is kept."""
        passed = {}
        for cell in report["cells"]:
            key, name = cell["key"], cell["identifier"]
            is_there = cell["hit"] or (cell["job"] and self.worked.get(cell["job"]))
            if not is_there:
                continue
            limits, numbers = build.wish.limits, self.numbers[key]
            is_right = all(numbers[rule] <= limit for rule, limit in limits.items())
            if build.shadows:
                is_right = cell["state"] == "succeeded"
            else:
                self.enters[build.id, key] = self.model.may_enter(build.namespace, name, key, limits, numbers)
            if is_right:
                passed[name] = TOOLCHAINS[cell["pool"]], Program(key, self.models[key], report["build"]["name"])
        return passed

    def instead(self, build: Build, name: str, made_by: str, program: Program) -> tuple[str, Program]:
        """Return what `latest` names of a cell: the program of the background, if it is faster and passes."""
        deeper = self.deeper.get(program.key, "") if build.wish.background else ""
        if deeper and self.is_faster(build.namespace, deeper):
            limits = build.wish.limits
            if self.model.may_enter(build.namespace, name, deeper, limits, self.numbers[deeper]):
                return made_by, program._replace(key=deeper)
        return made_by, program

    def is_faster(self, namespace: str, key: str) -> bool:
        """Whether the program that a namespace reads was shown to be faster."""
        return next((self.made[each, key] for each in ("main", namespace) if (each, key) in self.made), False)

    def retry(self, which: int, failed: bool) -> None:
        """Somebody runs the cells of a build again."""
        build = list(self.finished.values())[which % len(self.finished)]
        if build.against:
            return
        try:
            again = self.clients[build.namespace].retry(build.id, failed=failed)
        except NotFound:
            cells = self.clients[build.namespace].report(build.id)["cells"]
            assert failed and all(cell["as_expected"] or cell["identifier"] in self.passed[build.id] for cell in cells)
            return
        self.accepted(again["id"], build.namespace, build.wish)

    def acknowledge(self, namespace: str, batch: int, kind: str) -> None:
        """Somebody accepts a failure: that changes no ref until a build ends."""
        name = f"net/onnxruntime-cpu/fp32/b{batch}"
        entry = {"cell": name, "kind": kind, "reason": "known", "until": str(today()), "link": ""}
        self.farm.failures.acknowledge(namespace, {**entry, "by": "somebody", "at": 0.0})
        self.model.known[namespace, name] = kind

    def insist(self, namespace: str, word: str) -> None:
        """A gate refuses a new program; somebody builds it without the gate, perhaps lets it in, and builds again."""
        self.fleet(("1.30", "1.31"))
        wish, slow = Wish(commit=self.new_commit, batches=(1,), toolchain="onnxruntime1.31"), {**CALM, "seconds": 20.0}
        self.build(namespace, replace(wish, toolchain="onnxruntime1.30"), **CALM)
        self.tag(namespace, "prod", "latest", 0, previous=False)
        self.build(namespace, replace(wish, budget=QUICK), **slow)
        self.build(namespace, wish, **slow)
        self.every_ref_is_as_the_rules_say()
        if word == "tag":
            self.tag(namespace, "v1", "build", -1, previous=False)
        elif word == "acknowledge":
            self.acknowledge(namespace, 1, "budget")
        elif word == "promote":
            self.shadow(namespace, "prod", wish.toolchain, is_promoted=True, **CALM)
        self.build(namespace, wish, **slow)

    def tighten(self, namespace: str, at_once: bool) -> None:
        """What more tuning makes faster is too rough for a stricter build; a later one does not let it in."""
        loose = Wish(commit=self.new_commit, batches=(1,), background=True)
        strict, faster = replace(loose, tolerance=STRICT), {**CALM, "faster": True}
        if at_once:
            self.submit(namespace, strict)
            self.build(namespace, loose, **faster)
            self.do_all(0, **faster)  # The strict one's follow-up ends first, and refuses.
            self.every_ref_is_as_the_rules_say()
        for wish in (loose, strict, loose):
            self.build(namespace, wish, **faster)
            self.do_all(**faster)
            self.every_ref_is_as_the_rules_say()

    @property
    def new_commit(self) -> int:
        """A commit that nobody has built."""
        return 10 + len(self.finished)

    # --- people -------------------------------------------------------------------------------------------------

    def tag(self, namespace: str, tag: str, source: str, which: int, previous: bool) -> None:
        """Somebody points a tag to what another names or has named, or to a build."""
        builds = [each for each in self.finished.values() if each.namespace == namespace and self.passed[each.id]]
        if source == "build":
            if not builds:
                return
            build = builds[which % len(builds)]
            moment = self.farm.build_reader.get(namespace, build.id)["created_at"]
            self.clients[namespace].refs.move(tag, build.id)
            self.model.tag_build(namespace, tag, moment, self.passed[build.id])
        elif (namespace, source) in self.model.refs:
            wanted: dict[str, Log] | None = self.model.refs[namespace, source]
            if previous:
                before = self.clients[namespace].refs.get(source)["generation"] - 1
                wanted = self.seen.get((namespace, source, before))
                if wanted is None:
                    return
            self.clients[namespace].refs.move(tag, source, previous=previous)
            self.model.tag(namespace, tag, wanted)

    def forget(self, namespace: str, tag: str) -> None:
        """Somebody deletes a tag."""
        if self.model.refs.pop((namespace, tag), None) is not None:
            self.clients[namespace].refs.remove(tag)
            for key in [key for key in self.seen if key[:2] == (namespace, tag)]:
                del self.seen[key]

    def shadow(self, namespace: str, ref: str, named: str, *, is_promoted: bool, **work: Any) -> None:
        """Somebody compiles what a ref names under another toolchain, and may promote it at once."""
        try:
            accepted = self.clients[namespace].toolchains.shadow(ref, named)
        except NotFound:
            return
        build = self.accepted(accepted["id"], namespace, Wish())
        given = self.model.given(namespace, ref)
        for name, cell in build.cells.items():
            assert cell["baseline"]["key"] == given[name][1], f"{name} is compared with what readers get"
            assert TOOLCHAINS[cell["pool"]] != given[name][0]
        self.do_all(**work)
        if is_promoted and build.id in self.finished:
            self.promote_one(build, force=True)

    def promote(self, which: int, force: bool) -> None:
        """Somebody promotes what a shadow build made."""
        if not (shadows := [build for build in self.finished.values() if build.shadows]):
            return
        self.promote_one(shadows[which % len(shadows)], force=force)

    def promote_one(self, build: Build, *, force: bool) -> None:
        """Promote what one shadow build made."""
        client = self.clients[build.namespace]
        found = client.toolchains.radar(build.id)
        passing = {cell["identifier"] for cell in found["cells"] if cell["passes"]}
        place = build.namespace, found["ref"]
        has_moved = place not in self.model.refs or client.refs.get(found["ref"])["generation"] != found["generation"]
        new = {name: made for name, made in self.made_by(build).items() if name in passing}
        try:
            client.toolchains.promote(build.id, force=force)
        except GateFailed:
            assert not new or not (found["promotable"] or force)
        except Conflict:
            assert has_moved
        else:
            is_new = place in self.model.refs and self.model.promote(*place, build.moment, new)
            assert not (is_new and has_moved), "the ref had moved"

    def made_by(self, build: Build) -> dict[str, tuple[str, Program]]:
        """Return toolchain and program of a finished build's cells."""
        report = self.clients[build.namespace].report(build.id)
        return {
            cell["identifier"]: (
                TOOLCHAINS[cell["pool"]],
                Program(cell["key"], self.models[cell["key"]], report["build"]["name"]),
            )
            for cell in report["cells"]
            if cell["facts"]
        }

    def roll_back(self, namespace: str, ref: str, named: str) -> None:
        """Somebody lets readers get what another toolchain made."""
        if (namespace, ref) not in self.model.refs:
            return
        expected = self.model.roll_back(namespace, ref, self.farm.store.now(), named)
        before = self.clients[namespace].refs.get(ref)["generation"]
        try:
            after = self.clients[namespace].toolchains.roll_back(ref, named)["generation"]
        except NotFound:
            assert expected is None, "a program of another toolchain is there"
        else:
            assert (after > before) is expected

    # --- time ---------------------------------------------------------------------------------------------------

    def wait(self, days: int) -> None:
        """Time passes."""
        self.later += days * DAY

    def collect(self) -> None:
        """Garbage goes: what refs name stays."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(inventory, "GRACE", timedelta(0))
            for _ in range(2):
                inventory.collect(self.farm.artifacts, plans_kept=timedelta(days=30))

    # --- readers ------------------------------------------------------------------------------------------------

    @invariant()
    def every_ref_is_as_the_rules_say(self) -> None:
        """All that a ref names, as each namespace reads it; and where that changed, what readers fetch and load."""
        refs = ArtifactRefs(self.farm.artifacts)
        where = {place: refs.find(*place) for place in itertools.product(NAMESPACES, TAGS)}
        for (namespace, tag), ref in where.items():
            now = ref or where["main", tag], dict(self.model.read(namespace, tag))
            if self.read.get((namespace, tag)) != now:
                self.compare(namespace, tag)
                self.read[namespace, tag] = now

    def compare(self, namespace: str, tag: str) -> None:
        """Compare a ref, as a namespace reads it, with the model."""
        client, places = self.clients[namespace], self.model.read(namespace, tag)
        try:
            ref = client.refs.get(tag)
        except NotFound:
            assert not places, f"{namespace} reads no {tag}"
            return
        if ref.get("namespace") == namespace:
            self.seen.setdefault((namespace, tag, ref["generation"]), dict(places))
        cells = list(ref["cells"].values())
        there = {(cell["identifier"], cell["toolchain"]): cell["key"] for cell in cells}
        wanted = {
            (name, each): event.program.key for name, log in places.items() for each, event in programs(log).items()
        }
        assert there == wanted, f"{namespace} reads {tag}: {there}, not {wanted}"
        given = {cell["identifier"]: (cell["toolchain"], cell["key"]) for cell in cells if not cell.get("superseded")}
        assert given == (wanted := self.model.given(namespace, tag)), (
            f"{namespace} gets of {tag}: {given}, not {wanted}"
        )
        if given and ref.get("namespace") == namespace:
            self.fetch(namespace, ref, given)

    def fetch(self, namespace: str, ref: ShownRef, given: Mapping[str, tuple[str, str]]) -> None:
        """Compare what a reader fetches and loads with the model; the same entries in the same order only once."""
        client, tag, cells = self.clients[namespace], ref["tag"], sorted(ref["cells"].values(), key=readers_order)
        entries = tuple((cell["identifier"], cell["key"], "superseded" in cell) for cell in cells)
        if entries in self.world.fetched:
            return

        def gets(name: str, asked: str = "") -> str:
            return last(choose(cells, "net", "onnxruntime/cpu", "fp32", name.rpartition("/")[2], asked, ref=tag))["key"]

        for name, (_, key) in given.items():
            assert gets(name) == key, f"{namespace} fetches {name} of {tag}"
        for asked in NAMED:
            for each, (_, wanted) in self.model.named(namespace, tag, asked).items():
                assert gets(each, asked) == wanted, f"{namespace} fetches {each} of {tag} made by {asked}"
        what: dict[str, Any] = {"name": "net", "target": "onnxruntime/cpu", "precision": "fp32", "ref": tag}
        where: dict[str, Any] = {"folder": self.world.folder / "out", "force": True}
        shape = name.rpartition("/")[2]
        assert client.fetch(**what, **where, shape=shape).artifact["key"] == key, f"{namespace} fetches {name} of {tag}"
        here = Findings(pools=[pool for pool in POOLS if pool.toolchain == given[name][0]])
        best = fitting(client, "net", "fp32", ref=tag, shape=shape, here=here)[0]
        assert best.cell["key"] == key, f"{namespace} loads {name} of {tag}"
        family = client.fetch_family(**what, **where).document
        assert {member["key"] for member in family["members"]} == self.model.family(namespace, tag)
        self.world.fetched.add(entries)
