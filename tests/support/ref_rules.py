"""The rules of `docs/refs.md` once more, as a model in plain Python: what is written down is what happened, and when.

The product keeps entries with marks; here a place is its log, and what a reader gets is read from the log each time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from math import inf
from typing import NamedTuple

UNNAMED = 30 * 86_400.0


class Program(NamedTuple):
    """What a submission put into a place: its key, the digest of its model's file, and whose manifest it is."""

    key: str
    model: str
    manifest: str


Made = tuple[str, Program]
"""A toolchain, and what it made."""


class Event(NamedTuple):
    """At a moment a toolchain got a place: by a submission with a program, or (None) because somebody chose it."""

    moment: float
    toolchain: str
    program: Program | None


Log = tuple[Event, ...]
"""What happened in a place. It need not be in order: builds end late."""


def programs(log: Log) -> dict[str, Event]:
    """Return the last submission of each toolchain."""
    return {event.toolchain: event for event in sorted(log, key=lambda event: event.moment) if event.program}


def holder(log: Log) -> str:
    """Return the toolchain that readers get: that of the last event, submission or choice."""
    return max(log, key=lambda event: event.moment).toolchain


def lost(log: Log) -> dict[str, float]:
    """Return the toolchains that readers do not get (any more), and since when."""
    now = holder(log)
    return {
        each: min(event.moment for event in log if event.moment > max(e.moment for e in log if e.toolchain == each))
        for each in programs(log)
        if each != now
    }


def is_of(toolchain: str, asked: str) -> bool:
    """Whether a toolchain (`onnxruntime1.30.0-1a2b`) is the one asked for: the same name as far as its numbers go."""
    numbers, wanted = (text.partition("-")[0].split(".") for text in (toolchain, asked))
    return toolchain.startswith(asked) and numbers[: len(wanted)] == wanted


Numbers = Mapping[str, float]
"""What a program was measured to have, by the kind of failure that too much of it is."""


class Refusal(NamedTuple):
    """What a build said against a program: in which cell, the kind of failure, and the limits that it was over."""

    cell: str
    kind: str
    rules: Mapping[str, float]


class Refs:
    """The refs of all namespaces."""

    def __init__(self) -> None:
        self.refs: dict[tuple[str, str], dict[str, Log]] = {}
        """The places of each ref, by identifiers."""
        self.refusals: dict[tuple[str, str], list[Refusal]] = {}
        """What was said against a program in a namespace, by its key, since a rule or a person let it in."""
        self.known: dict[tuple[str, str], str] = {}
        """The kind of failure that somebody accepts of a cell in a namespace."""

    # --- what is refused

    def may_enter(self, namespace: str, cell: str, key: str, limits: Mapping[str, float], number: Numbers) -> bool:
        """A build judged a cell's program by the `limits` of its rules; whether `latest` may name it.

        What is over a limit is refused until it passes each limit that refused it, or a person lets it in.
        """
        broken = {rule: limit for rule, limit in limits.items() if number[rule] > limit}
        said = self.refusals.setdefault((namespace, key), [])
        if broken:
            said.append(Refusal(cell, next(each for each in number if each in broken), broken))
            return False
        refused = [(rule, limit) for refusal in said for rule, limit in refusal.rules.items()]
        is_known = bool(said) and self.known.get((namespace, said[-1].cell)) == said[-1].kind
        if is_known or all(limits.get(rule, inf) <= limit for rule, limit in refused):
            said.clear()
        return not said

    def let_in(self, namespace: str, keys: Iterable[str]) -> None:
        """A person chose programs."""
        for key in keys:
            self.refusals.pop((namespace, key), None)

    # --- what builds do

    def enter(
        self, namespace: str, moment: float, passed: Mapping[str, Made], manifest: str, waits: Collection[str] | None
    ) -> None:
        """A build that was submitted at a moment ended, and these cells passed.

        What its manifest's submissions have not had for 30 days leaves, but for cells that the build `waits` for. A
        retry (None) lets nothing leave.
        """
        places = dict(self.refs.get((namespace, "latest"), {}))
        for name, (toolchain, program) in passed.items():
            there = programs(places.get(name, ())).get(toolchain)
            if there is None or there.moment < moment:
                places[name] = (*places.get(name, ()), Event(moment, toolchain, program))
        for name, log in places.items() if waits is not None else ():
            old = {
                toolchain
                for toolchain, event in programs(log).items()
                if event.program and event.program.manifest == manifest
                if event.moment < moment - UNNAMED and name not in (waits or ())
            }
            # What readers do not get goes with what they get.
            places[name] = tuple(event for event in log if event.toolchain not in old and holder(log) not in old)
        self.refs[namespace, "latest"] = {name: log for name, log in places.items() if log}

    def speed_up(self, namespace: str, moment: float, faster: Mapping[str, tuple[Made, str]]) -> None:
        """A follow-up ended: these cells have a program that is faster than the one with a key."""
        places = self.refs.get((namespace, "latest"), {})
        for name, ((toolchain, program), slower) in faster.items():
            there = programs(places.get(name, ())).get(toolchain)
            if there and there.program and there.program.key == slower and there.moment <= moment:
                log = [event for event in places[name] if event != there]
                places[name] = (*log, Event(moment, toolchain, program))

    # --- what people do

    def tag(self, namespace: str, tag: str, places: Mapping[str, Log]) -> None:
        """Point a ref to what another names."""
        self.let_in(namespace, {e.program.key for log in places.values() for e in programs(log).values() if e.program})
        self.refs[namespace, tag] = dict(places)

    def tag_build(self, namespace: str, tag: str, moment: float, passed: Mapping[str, Made]) -> None:
        """Point a ref to what passed in a build, which was created at a moment."""
        self.let_in(namespace, {program.key for _, program in passed.values()})
        self.refs[namespace, tag] = {name: (Event(moment, *made),) for name, made in passed.items()}

    def promote(self, namespace: str, tag: str, moment: float, passed: Mapping[str, Made]) -> bool:
        """Give what passed in a shadow build to readers; False if they get it already."""
        self.let_in(namespace, {program.key for _, program in passed.values()})
        given = self.given(namespace, tag)
        if all(name in given and given[name][1] == program.key for name, (_, program) in passed.items()):
            return False
        places = self.refs[namespace, tag]
        for name, (toolchain, program) in passed.items():
            others = [event for event in places.get(name, ()) if event.toolchain != toolchain or not event.program]
            places[name] = (*others, Event(moment, toolchain, program))
        return True

    def roll_back(self, namespace: str, tag: str, moment: float, toolchain: str) -> bool | None:
        """Give readers another toolchain's programs; False if they get them already, None if there are none."""
        places = self.refs[namespace, tag]
        has_it = {name for name, log in places.items() if toolchain and is_of(holder(log), toolchain)}
        losses = [
            (since, programs(log)[each].moment, name, each)
            for name, log in places.items()
            for each, since in lost(log).items()
            if name not in has_it and (not toolchain or is_of(each, toolchain))
        ]
        if not losses:
            return False if has_it else None
        last = max(losses)[0]
        back = {name: each for since, _, name, each in sorted(losses) if toolchain or since == last}
        for name, each in back.items():
            places[name] = (*places[name], Event(moment, each, None))
        return True

    # --- what readers get

    def read(self, namespace: str, tag: str) -> dict[str, Log]:
        """Return the places of a ref as a namespace reads it: its own ref, else that of `main`."""
        return self.refs.get((namespace, tag), self.refs.get(("main", tag), {}))

    def given(self, namespace: str, tag: str) -> dict[str, tuple[str, str]]:
        """Return toolchain and key of what readers get, by identifier."""
        return {name: self._named(log, holder(log)) for name, log in self.read(namespace, tag).items()}

    def named(self, namespace: str, tag: str, toolchain: str) -> dict[str, tuple[str, str]]:
        """Return what readers get who name a toolchain; of several that it means, the one that readers got last."""
        found = {}
        for name, log in self.read(namespace, tag).items():
            ends = {holder(log): inf, **lost(log)}
            fitting = [(end, programs(log)[each].moment, each) for each, end in ends.items() if is_of(each, toolchain)]
            if fitting:
                found[name] = self._named(log, max(fitting)[2])
        return found

    def family(self, namespace: str, tag: str) -> set[str]:
        """Return the keys that readers get who fetch all shapes: those of one toolchain and model, which came last."""
        members: dict[tuple[str, str], dict[str, float]] = {}
        for _, log in sorted(self.read(namespace, tag).items()):  # The first of equal ones counts.
            event = programs(log)[holder(log)]
            assert event.program
            members.setdefault((event.toolchain, event.program.model), {})[event.program.key] = event.moment
        _, found = max(members.items(), key=lambda each: (max(each[1].values()), each[0][0], len(each[1])))
        return set(found)

    def chosen(self, namespace: str, live: Iterable[str]) -> str:
        """Return the toolchain that a build takes of several with workers: of `prod`, else `latest`; "" if none is."""
        for tag in ("prod", "latest"):
            given = [
                (programs(log)[holder(log)].moment, holder(log))
                for log in self.read(namespace, tag).values()
                if holder(log) in set(live)
            ]
            if given:
                return max(given)[1]
        return ""

    @staticmethod
    def _named(log: Log, toolchain: str) -> tuple[str, str]:
        program = programs(log)[toolchain].program
        assert program
        return toolchain, program.key
