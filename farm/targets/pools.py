"""Pools: the workers of one target and one toolchain, on one device. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from farm.spec import Device

FEATURES: Mapping[str, str] = {
    "autocast_fp8": "fp8 inputs and outputs become float32",
    "dim_params": "dynamic dimensions by the model's own names",
    "exhaustive_tune": "tuning modes above quick",
    "external_data_path": "models from memory with their weights in other files",
    "get_onnx_operators": "lists the ONNX operators that it has",
    "gpu_arch": "compiles for architectures that are not in the machine",
    "limit_max_iterations": "a bound for loops whose count only the run knows",
    "load_buffer": "programs from memory",
    "map_dyn_input_dims": "dynamic dimensions of inputs",
    "max_loop_iterations": "iterations of a loop whose count is not known",
    "problem_cache": "what tuning learnt is kept in a file",
    "quantize_bf16": "precision bf16",
    "quantize_fp16": "precision fp16",
    "quantize_fp8": "precision fp8",
    "quantize_int8": "precision int8",
    "save_buffer": "programs to memory",
    "to_gpu": "arrays in GPU memory",
    "unpack_int4": "precision int4",
    "use_debug_symbols": "instructions that name the model's nodes",
}
"""What some release of MIGraphX offers and another does not, by the names that `Pool.features` has. A worker asks the
module that it has (contract: a function, a keyword, a variable); the version alone says nothing."""


@dataclass(frozen=True, slots=True)
class Target:
    """`compiler/device`: `migraphx/gfx942`, `migraphx/cpu`, `onnxruntime/cpu`."""

    compiler: str
    device: str

    def __str__(self) -> str:
        return f"{self.compiler}/{self.device}"

    @property
    def slug(self) -> str:
        """The spelling used in identifiers, queues and file names: `migraphx-gfx942`."""
        return f"{self.compiler}-{self.device}"


@dataclass(frozen=True, slots=True)
class Pool:
    """What the workers of one queue have in common. Remembered once registered.

    `toolchain` is the id (`onnxruntime1.31.1-1a2b3c4d`); `libraries` are the versions of libraries that rewrite
    models (`{"onnx": "1.23.2"}`); `recipe` is the number of our module for the compiler; `features` names what
    the installed compiler offers (`FEATURES`; for ONNX Runtime its execution providers); `cpu_family` is what results
    are bound to when an option makes them so (ONNX Runtime's tuned level).
    """

    target: Target
    toolchain: str
    device: Device
    recipe: int
    libraries: Mapping[str, str] = field(default_factory=dict)
    features: tuple[str, ...] = ()
    cpu_family: str = ""
    memory: int | None = None
    """Memory of the device in bytes, where known."""
    untuned: bool = False
    """Compiled for a GPU that the worker does not have: nothing is tuned, verified or measured."""

    @property
    def name(self) -> str:
        """The pool's name, also the name of its Celery queue."""
        units = f"-{self.device.compute_units}cu" if self.device.compute_units else ""
        return f"{self.target.slug}{units}.{self.toolchain}"

    def as_dict(self) -> dict[str, Any]:
        """Return the pool as plain JSON."""
        return {**asdict(self), "features": list(self.features), "name": self.name}

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Pool:
        """Read back what `as_dict` wrote; fields of a newer release are left out."""
        known = {each.name for each in fields(cls)}
        return cls(
            **{
                **{name: value for name, value in document.items() if name in known},
                "target": Target(**document["target"]),
                "device": Device(**document["device"]),
                "features": tuple(document["features"]),
            }
        )


def begins(toolchain: str, prefix: str) -> bool:
    """Whether a toolchain's id begins with a prefix that ends where a number ends: `rocm7.1` is not `rocm7.10`."""
    rest = toolchain.removeprefix(prefix)
    if not toolchain.startswith(prefix):
        return False
    # Only the label has numbers; the digest behind the last dash may be cut anywhere.
    return not (prefix[-1:].isdigit() and rest[:1].isdigit() and "-" in rest)


def in_use(pools: Iterable[tuple[Pool, int]], preferred: Sequence[str] = ()) -> list[Pool]:
    """Return the pools to plan for, of all that are known with their numbers of live workers.

    Pools stay known after their last worker left, so a target that was upgraded has several toolchains. Of those, the
    operator's choice counts (`preferred`: starts of toolchain ids), else those that have live workers, else all. A pool
    that compiles for a GPU which it does not have counts only where no other is known for it.
    """
    groups: dict[tuple[Target, Device], list[tuple[Pool, int]]] = {}
    for pool, live in pools:
        groups.setdefault((pool.target, pool.device), []).append((pool, live))
    chosen: list[Pool] = []
    for known in groups.values():
        group = [(pool, live) for pool, live in known if not pool.untuned] or known
        wanted = [pool for pool, _ in group if any(begins(pool.toolchain, prefix) for prefix in preferred)]
        alive = [pool for pool, live in group if live]
        chosen += wanted or alive or [pool for pool, _ in group]
    return chosen
