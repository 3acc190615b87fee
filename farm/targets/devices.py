"""Targets as users write them: device profiles (`configs/devices.toml`), what a text means, which pool serves it."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from farm.errors import suggestion
from farm.settings import configs_folder
from farm.spec import Device
from farm.targets.compilers import COMPILERS
from farm.targets.pools import Pool, Target
from farm.units import parse_size

_GFX = re.compile(r"gfx[0-9]{1,2}[0-9a-f]{2}")
_SM = re.compile(r"sm_[0-9]{2,3}")
_SLICE = re.compile(r"(?P<card>.+)-mig-[0-9]+g\.[0-9]+gb")
_ANY = ":any"


@dataclass(frozen=True, slots=True)
class Profile:
    """A device that a manifest may name: its memory is in bytes."""

    name: str
    device: Device
    memory: int


@cache
def profiles() -> Mapping[str, Profile]:
    """Return the shipped device profiles by name: whole cards, and each way in which one can be split."""
    document = tomllib.loads((configs_folder() / "devices.toml").read_text())
    ways = [
        (f"{name}-{mode}" if mode else name, row, parts)
        for name, row in document.items()
        for mode, parts in {"": 1, **row.get("partitions", {})}.items()
    ]
    return {
        name: Profile(
            name,
            Device(row["arch"], row["compute_units"] // parts, row["xcc"] // parts if "xcc" in row else None),
            parse_size(row["memory"]) // parts,
        )
        for name, row, parts in ways
    }


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
    arch: str = ""
    """The start of the arch that a device of NVIDIA's must have: `sm_90`, `sm_90:h200-mig-1g.18gb`."""

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
            _same_arch(pool.device.arch, wanted.arch)
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
    if (known := COMPILERS.get(compiler)) and known.maker(device.partition(":")[0]) == "nvidia":
        return _nvidia(text, compiler, device)
    if not slash:
        compiler, device = "migraphx", text
        if device not in profiles() and not _GFX.fullmatch(device.removesuffix(_ANY)):
            raise ValueError(f"unknown target `{text}`: {suggestion(text, _known())}")
    if compiler not in COMPILERS:
        raise ValueError(f"unknown compiler `{compiler}`: {suggestion(compiler, COMPILERS)}")
    profile = profiles().get(device)
    name = _bare(profile.device.arch) if profile else device.removesuffix(_ANY)
    any_device = device.endswith(_ANY) and _GFX.fullmatch(name) is not None
    if (not any_device and ":" in device) or COMPILERS[compiler].device(name) is None:
        raise ValueError(f"{compiler} has no device `{device}`: {suggestion(text, _known())}")
    if name.startswith("gfx") and not _GFX.fullmatch(name):
        raise ValueError(f"`{device}` is not the name of a GPU architecture (gfx90a, gfx942, gfx1100, …)")
    return Choice(text, Target(compiler, device), Target(compiler, name), profile, any_device)


def _cards() -> dict[str, Profile]:
    """Return the profiles of NVIDIA's cards."""
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


class NoPool(ValueError):
    """No pool serves a target, or several do; `hint` suggests what to write."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


def choose_pools(
    choice: Choice,
    toolchain: str,
    *,
    in_use: Sequence[Pool],
    known: Sequence[Pool],
    family_bound: bool = False,
    libraries: Sequence[str] = (),
) -> list[Pool]:
    """Return the pools that serve a target, any of which gives the same cache keys.

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
            if choice.served.maker == "nvidia":
                hint = f"name the card ({choice.served}:h200, …), or `toolchains`"
            if family_bound and len({pool.device for pool in candidates}) == 1:
                builds = " or ".join(sorted({f"`{pool.build}`" for pool in candidates}))
                hint = f"programs for one CPU family: choose it by an entry of `toolchains`, {builds}"
        raise NoPool(f"several pools serve `{choice.text}`: {names}", hint)
    if serving:
        names = ", ".join(sorted({pool.toolchain for pool in serving}))
        raise NoPool(f"no pool of `{choice.text}` has the toolchain `{toolchain}`", f"known: {names}")
    targets = ", ".join(sorted({str(pool.target) for pool in in_use})) or "none"
    message = f"no pool serves `{choice.text}`: no such worker was ever seen"
    raise NoPool(message, f"known: {targets}; start `farm worker` on such a node")


def _age(pool: Pool, libraries: Sequence[str]) -> tuple[Any, ...]:
    """Return the sort key of the farm's own part of a pool, the newest last."""
    versions = [pool.libraries.get(name, "") for name in sorted(libraries)]
    numbers = [[int(number) for number in re.findall(r"[0-9]+", version)] for version in versions]
    return pool.recipe, numbers, versions


def _known() -> list[str]:
    fixed = [
        f"{compiler.name}/{kind.pattern}"
        for compiler in COMPILERS.values()
        for kind in compiler.devices
        if kind.maker is None
    ]
    return [*fixed, *profiles()]


def _same_arch(one: str, other: str) -> bool:
    """Whether two names of an architecture can be of one GPU: no feature bit that both name differs."""
    named, wanted = ({bit[:-1]: bit[-1] for bit in arch.split(":")[1:]} for arch in (one, other))
    return _bare(one) == _bare(other) and all(named[name] == wanted[name] for name in named.keys() & wanted.keys())


def _bare(arch: str) -> str:
    return arch.partition(":")[0]
