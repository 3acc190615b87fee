"""Pools: the workers of one target that are alike in every fact which cache keys of that target use.

Also targets as users write them: what a text means, and which pools serve it. Pure.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from typing import TYPE_CHECKING, Any, cast

from farm.errors import UsageError, suggestion
from farm.files import configs_folder
from farm.spec import Device, digest_of
from farm.targets.compilers import DeviceKind, compilers
from farm.units import grouped, parse_size

if TYPE_CHECKING:
    from farm.jobs.rows import PoolDocument


@dataclass(frozen=True, slots=True)
class Profile:
    """A device that a manifest may name: its memory is in bytes."""

    device: Device
    memory: int


@cache
def profiles() -> Mapping[str, Profile]:
    """Return the shipped device profiles by name: whole cards, and each way in which one can be split."""
    document = tomllib.loads((configs_folder() / "devices.toml").read_text(encoding="utf-8"))
    ways = [
        (f"{name}-{mode}" if mode else name, row, parts)
        for name, row in document.items()
        for mode, parts in {"": 1, **row.get("partitions", {})}.items()
    ]
    return {
        name: Profile(
            Device(row["arch"], row["compute_units"] // parts, row["xcc"] // parts if "xcc" in row else None),
            parse_size(row["memory"]) // parts,
        )
        for name, row, parts in ways
    }


def same_arch(one: str, other: str) -> bool:
    """Whether two names of an architecture can be of one GPU: no feature bit that both name differs."""
    named, wanted = ({bit[:-1]: bit[-1:] for bit in arch.split(":")[1:]} for arch in (one, other))
    return bare(one) == bare(other) and all(named[name] == wanted[name] for name in named.keys() & wanted.keys())


def bare(arch: str) -> str:
    """Return the name of an architecture without its feature bits."""
    return arch.partition(":")[0]


_GFX = re.compile(r"gfx[0-9]{1,2}[0-9a-f]{2}")
_SM = re.compile(r"sm_[0-9]{2,3}")
_SLICE = re.compile(r"(?P<card>.+)-mig-[0-9]+g\.[0-9]+gb")
_ANY = ":any"
_ON_CARDS = ("cuda", "tensorrt")  # Devices that the extension for NVIDIA's cards adds.


@dataclass(frozen=True, slots=True)
class Target:
    """`compiler/device`: `migraphx/gfx942`, `migraphx/cpu`, `onnxruntime/cpu`."""

    compiler: str
    device: str

    def __str__(self) -> str:
        return f"{self.compiler}/{self.device}"

    @property
    def kind(self) -> DeviceKind:
        """What is known of its device; one without precisions if no compiler here serves it."""
        compiler = compilers().get(self.compiler)
        return compiler.device(self.device) if compiler else DeviceKind("", ())

    @property
    def slug(self) -> str:
        """The spelling used in identifiers, queues and file names: `migraphx-gfx942`."""
        return f"{self.compiler}-{self.device}"


@dataclass(frozen=True, slots=True)
class Pool:
    """What the workers of one queue have in common: all that keys of their target use. Remembered once registered.

    `toolchain` is the id (`onnxruntime1.31.1-1a2b3c4d`); `libraries` are the versions of libraries that rewrite
    models (`{"onnx": "1.23.2"}`); `recipe` is the number of our module for the compiler; `features` names what
    the installed compiler offers, whatever its version is (for ONNX Runtime its execution providers); `cpu_family` is
    what results are bound to when an option makes them so (ONNX Runtime's tuned level).
    """

    target: Target
    toolchain: str
    device: Device
    recipe: int
    libraries: Mapping[str, str] = field(default_factory=dict)
    features: tuple[str, ...] = ()
    cpu_family: str = ""
    memory: int | None = None  # Memory of the device in bytes, if known.
    untuned: bool = False  # Compiled for a GPU that the worker does not have: nothing is tuned, verified or measured.
    registered: str = ""  # The name that another release registered it under; empty if that is the one it has here.

    @property
    def name(self) -> str:
        """The pool's name, also that of its Celery queue: `onnxruntime-cpu.onnxruntime1.31.1-1a2b3c4d.x86-64-v4`."""
        return self.registered or f"{self.stem}{self._facts}"

    @property
    def stem(self) -> str:
        """The name without the facts behind the toolchain; tuning databases are found by it."""
        return stem_of(str(self.target), self.device.compute_units, self.toolchain)

    @property
    def build(self) -> str:
        """The toolchain with the facts behind it, as `toolchains` may choose it: `…-1a2b3c4d.x86-64-v4`."""
        return f"{self.toolchain}{self._facts}"

    @property
    def keyed_libraries(self) -> dict[str, str]:
        """Versions of the libraries that are in keys of the target, at some precision."""
        compiler = compilers().get(self.target.compiler)
        keyed = {name for names in compiler.libraries.values() for name in names} if compiler else set()
        return {name: self.libraries[name] for name in sorted(keyed & self.libraries.keys())}

    @property
    def _facts(self) -> str:
        """The facts that keys use and that target, compute units and toolchain do not imply."""
        compiler, facts = compilers().get(self.target.compiler), list(_device_facts(self.device))
        if self.recipe != 1:
            facts.append(f"recipe{self.recipe}")
        if self.keyed_libraries:
            facts.append(f"libraries-{digest_of(self.keyed_libraries)[:8]}")
        if compiler and compiler.binds and self.cpu_family:
            facts.append(self.cpu_family)
        return "".join(f".{fact}" for fact in facts)

    def begins(self, prefix: str) -> bool:
        """Whether an entry of `toolchains` means this pool: the start of the toolchain's id, or more than the id."""
        return begins(self.toolchain, prefix) or (
            prefix.startswith(f"{self.toolchain}.") and f"{self.build}.".startswith(f"{prefix}.")
        )

    def as_dict(self) -> PoolDocument:
        """Return the pool as plain JSON."""
        own = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "registered"}
        plain = {"target": asdict(self.target), "device": self.device.as_dict(), "features": list(self.features)}
        return cast("PoolDocument", {**own, **plain, "name": self.name})

    @classmethod
    def from_dict(cls, document: PoolDocument) -> Pool:
        """Read back what `as_dict` wrote, here or in another release; fields of a newer one are left out."""
        given = cast(dict[str, Any], document)
        known = {each.name: given[each.name] for each in fields(cls) if each.name in given}
        known |= {"target": Target(**given["target"]), "device": Device(**given["device"])}
        pool = cls(**{**known, "features": tuple(given["features"])})
        name = document.get("name", pool.name)
        return pool if name == pool.name else replace(pool, registered=name)


def stem_of(target: str, compute_units: int | None, toolchain: str) -> str:
    """Return the start of the names of all pools of a target (`migraphx/gfx942`) and a toolchain."""
    units = f"-{compute_units}cu" if compute_units else ""
    return f"{target.replace('/', '-')}{units}.{toolchain}"


def _device_facts(device: Device) -> Iterator[str]:
    """Yield feature bits and XCDs of a GPU, unless they are those of the profile with its compute units."""
    arch, *features = device.arch.split(":")
    if arch.startswith("sm_"):
        yield device.arch.replace(":", "-")
        return
    alike = (
        each.device
        for each in profiles().values()
        if (each.device.arch.partition(":")[0], each.device.compute_units) == (arch, device.compute_units)
    )
    usual = next(alike, Device(arch))
    if device.arch != usual.arch:
        yield from (f"{feature[:-1]}-{'on' if feature.endswith('+') else 'off'}" for feature in features)
        if not features:
            yield "unknown-features"
    if device.xcc != usual.xcc:
        yield f"{device.xcc or 'unknown-'}xcc"


def begins(toolchain: str, prefix: str) -> bool:
    """Whether a toolchain's id begins with a prefix that ends where a number ends: `rocm7.1` is not `rocm7.10`."""
    rest = toolchain.removeprefix(prefix)
    # Only the label has numbers; the digest behind the last dash may be cut anywhere.
    cut = prefix[-1:].isdigit() and rest[:1].isdigit() and "-" in rest
    return toolchain.startswith(prefix) and not cut


def version_of(toolchain: str) -> tuple[int, ...]:
    """Return the numbers of a toolchain's label, by which toolchains of one target are ordered, the oldest first."""
    return tuple(map(int, re.findall(r"[0-9]+", toolchain.rpartition("-")[0] or toolchain)))


def in_use(pools: Iterable[tuple[Pool, int]], preferred: Sequence[str] = ()) -> list[Pool]:
    """Return the pools to plan for, of all that are known with their numbers of live workers.

    Pools stay known after their last worker left, so a target that was upgraded has several toolchains. Of those, the
    operator's choice counts (`preferred`: starts of toolchain ids), else those that have live workers, else all. A pool
    that compiles for a GPU which it does not have counts only if no other is known for it.
    """
    chosen: list[Pool] = []
    for known in grouped(pools, lambda each: (each[0].target, each[0].device)).values():
        group = [(pool, live) for pool, live in known if not pool.untuned] or known
        wanted = [pool for pool, _ in group if any(map(pool.begins, preferred))]
        alive = [pool for pool, live in group if live]
        chosen += wanted or alive or [pool for pool, _ in group]
    return chosen


@dataclass(frozen=True, slots=True)
class Choice:
    """A target of a manifest, understood: which pools can serve it, and which device goes into the spec.

    `target` keeps the user's word for the device (`migraphx/mi300x`), because two profiles may share an arch;
    `served` is the target that pools are registered under (`migraphx/gfx942`).
    """

    text: str
    target: Target
    served: Target
    profile: Profile | None = None
    any_device: bool = False
    arch: str = ""  # The start of the arch that a device of NVIDIA's must have: `sm_90`, `sm_90:h200-mig-1g.18gb`.

    @property
    def slug(self) -> str:
        """The spelling in identifiers: `migraphx-mi300x`, `migraphx-gfx942-any`, `onnxruntime-cuda-h200`."""
        return self.target.slug.replace(":", "-")

    @property
    def names(self) -> frozenset[str]:
        """Every spelling under which a selector may name this target."""
        return frozenset(
            {
                self.text, str(self.target), self.slug, self.target.device,
                str(self.served), self.served.slug, self.served.device,
                *([self.target.device.partition(":")[2]] if self.arch else []),
            }
        )  # fmt: skip

    def serves(self, pool: Pool) -> bool:
        """Whether a pool's device is one that this target asks for."""
        if pool.target != self.served:
            return False
        if self.arch:
            return f"{pool.device.arch}:".startswith(f"{self.arch}:")
        if self.profile is None:
            return True
        wanted = self.profile.device
        # A worker leaves the XCDs and feature bits out if it cannot find them.
        return (
            same_arch(pool.device.arch, wanted.arch)
            and pool.device.compute_units == wanted.compute_units
            and pool.device.xcc in (None, wanted.xcc)
        )

    def device(self, pool: Pool, *, family_bound: bool) -> Device:
        """Return the device of the spec for a job of this target in a pool."""
        if self.any_device:
            return Device(f"{self.served.device}{_ANY}")
        if self.profile and not self.arch:
            return self.profile.device
        device = pool.device
        # A pool of a GPU's provider is of no CPU family.
        family = (pool.cpu_family or None) if family_bound else None
        return Device(device.arch, device.compute_units, device.xcc, family)


def understand_target(text: str) -> Choice:
    """Return what a target's text means. Raises ValueError that says what is known instead."""
    compiler, slash, device = text.partition("/")
    if not slash and (text in _cards() or _SM.fullmatch(text) or _SLICE.fullmatch(text)):
        compiler, device, slash = "onnxruntime", f"cuda:{text}", "/"
    if (known := compilers().get(compiler)) and known.device(device.partition(":")[0]).maker == "nvidia":
        return _nvidia(text, compiler, device)
    if not slash:
        compiler, device = "migraphx", text
        if device not in profiles() and not _GFX.fullmatch(device.removesuffix(_ANY)):
            whole = " or ".join(f"`{name}`" for name in _known() if text in name.split("/"))
            raise ValueError(
                f"unknown target `{text}`: {f'did you mean {whole}?' if whole else suggestion(text, _known())}"
            )
    if device.partition(":")[0] in _ON_CARDS:
        said = f"`{text}` needs the extension nvidia, which is not installed"
        raise ValueError(f"{said}: the package migraphx-farm has it in farm/extras/nvidia")
    if compiler not in compilers():
        raise ValueError(f"unknown compiler `{compiler}`: {suggestion(compiler, compilers())}")
    profile = profiles().get(device)
    name = bare(profile.device.arch) if profile else device.removesuffix(_ANY)
    any_device = device.endswith(_ANY) and _GFX.fullmatch(name) is not None
    if (not any_device and ":" in device) or not compilers()[compiler].device(name).precisions:
        raise ValueError(f"{compiler} has no device `{device}`: {suggestion(text, _known())}")
    if name.startswith("gfx") and not _GFX.fullmatch(name):
        raise ValueError(f"`{device}` is not the name of a GPU architecture (gfx90a, gfx942, gfx1100, …)")
    return Choice(text, Target(compiler, device), Target(compiler, name), profile, any_device)


def _cards() -> dict[str, Profile]:
    return {name: profile for name, profile in profiles().items() if profile.device.arch.startswith("sm_")}


def _nvidia(text: str, compiler: str, device: str) -> Choice:
    """Return what `cuda`, `cuda:h200`, `cuda:sm_90` or `cuda:h200-mig-1g.18gb` means."""
    provider, _, card = device.partition(":")
    target, served = Target(compiler, device), Target(compiler, provider)
    if not card or _SM.fullmatch(card):
        return Choice(text, target, served, arch=card)
    cards, split = _cards(), _SLICE.fullmatch(card)
    name = split["card"] if split else card
    if name not in cards:
        known = [f"{compiler}/{provider}:{each}" for each in cards]
        hint = suggestion(f"{compiler}/{provider}:{name}", known)
        raise ValueError(f"unknown card `{name}`: {hint}, or its compute capability as `{provider}:sm_90`")
    profile = cards[name]
    arch = profile.device.arch + card.removeprefix(name)
    return Choice(text, target, served, None if split else profile, arch=arch)


class NoPool(UsageError):
    """No pool serves a target, or several do; `hint` suggests what to write."""


def choose_pools(
    choice: Choice,
    toolchain: str,
    *,
    in_use: Sequence[Pool],
    known: Sequence[Pool],
    family_bound: bool = False,
    libraries: Sequence[str] = (),
) -> list[Pool]:
    """Return the pools that serve a target; all of them give the same cache keys.

    Of those `in_use`, or with a toolchain of all that are `known` if none of it is in use. Of several recipes or
    versions of `libraries` (those that the key names) the newest counts: they are the farm's own. `family_bound`: keys
    name the CPU family.

    Raises NoPool if none is left, and if the rest of them differ in what keys use.
    """
    serving = sorted(filter(choice.serves, known if toolchain else in_use), key=lambda pool: pool.name)
    candidates = [pool for pool in serving if pool.begins(toolchain)]
    # What is known for good may have no worker any more.
    candidates = [pool for pool in candidates if pool in in_use] or candidates
    toolchains = {pool.toolchain for pool in candidates}
    if candidates and len(toolchains) == 1:
        newest = max(_age(pool, libraries) for pool in candidates)
        candidates = [pool for pool in candidates if _age(pool, libraries) == newest]
        devices = {choice.device(pool, family_bound=family_bound) for pool in candidates}
        if len(devices) == 1:
            # If workers of two releases serve the same facts, what waits is for those that stay.
            return [pool for pool in candidates if not pool.registered] or candidates
    if candidates:
        names = ", ".join(pool.name for pool in candidates)
        hint = "choose by `toolchains: […]`, or the operator does with the setting of that name (FARM_TOOLCHAINS)"
        if toolchain:
            hint = "write more of the toolchain's id"
        if len(toolchains) == 1:
            hint = "name the device (mi300x, mi300a, …) instead of the architecture"
            if choice.served.kind.maker == "nvidia":
                hint = f"name the card ({choice.served}:h200, …), or `toolchains`"
            if family_bound and len({pool.device for pool in candidates}) == 1:
                builds = " or ".join(sorted({f"`{pool.build}`" for pool in candidates}))
                hint = f"programs for one CPU family: choose it by an entry of `toolchains`, {builds}"
        raise NoPool(f"several pools serve `{choice.text}`: {names}", hint=hint)
    if serving:
        names = ", ".join(sorted({pool.toolchain for pool in serving}))
        raise NoPool(f"no pool of `{choice.text}` has the toolchain `{toolchain}`", hint=f"known: {names}")
    targets = ", ".join(sorted({str(pool.target) for pool in in_use})) or "none"
    message = f"no pool serves `{choice.text}`: no such worker was ever seen"
    raise NoPool(message, hint=f"known: {targets}; start `farm worker` on such a node")


def _age(pool: Pool, libraries: Sequence[str]) -> tuple[Any, ...]:
    """Return the sort key of the farm's own part of a pool, the newest last."""
    versions = [pool.libraries.get(name, "") for name in sorted(libraries)]
    numbers = [[int(number) for number in re.findall(r"[0-9]+", version)] for version in versions]
    return pool.recipe, numbers, versions


def _known() -> list[str]:
    fixed = [
        f"{compiler.name}/{kind.pattern}"
        for compiler in compilers().values()
        for kind in compiler.devices
        if "*" not in kind.pattern
    ]
    return [*fixed, *profiles()]
