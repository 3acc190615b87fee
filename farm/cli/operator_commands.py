"""Commands for operators: doctor, audit, gc, drain, unfence, worker, serve, and `farm token …`."""

from __future__ import annotations

import math
import os
import platform
import pwd
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from typer import Argument, Option

from farm import entry_points
from farm.cli import connection, output, render
from farm.cli.connection import connect, offering
from farm.compiling.cgroups import find
from farm.errors import ExitCode, FarmError, NotFound, StorageUnavailable, StoreUnavailable, UsageError
from farm.files import disk_of, shipped_users
from farm.inert import one_line
from farm.runner.seal import unsealable
from farm.units import plural

if TYPE_CHECKING:
    from farm.jobs.rows import AuditLine
    from farm.settings import Settings


def doctor(
    ort_cache: Annotated[
        Path | None, Option(metavar="DIR", help="Check only this cache of ONNX Runtime's MIGraphX provider.")
    ] = None,
    fix: Annotated[
        bool, Option("--fix", help="Make the bucket and Redis' users of each role if missing, where it may.")
    ] = False,
) -> None:
    """Check settings, servers, compilers and limits.

    Says how to fix what is broken, and then exits with 6.
    """
    checks = check_provider_cache(ort_cache) if ort_cache else run_checks(fix=fix)
    broken = [check for check in checks if check.state == "broken"]
    said, width = list[str](), max(len(check.name) for check in checks)
    for check in checks:
        word, colour = {"ok": ("ok", "green"), "broken": ("FAIL", "red"), "absent": ("-", None)}[check.state]
        said.append(f"{typer.style(word.ljust(4), fg=colour)}  {check.name.ljust(width)}  {check.found}")
        said += [f"      {' ' * width}  fix: {check.fix}"] if check.fix else []
    output.result({"ok": not broken, "checks": [asdict(check) for check in checks]}, said)
    if broken:
        raise typer.Exit(int(ExitCode.FARM_FAULT))


def audit(deep: Annotated[bool, Option("--deep", help="Read and hash every blob of every artifact.")] = False) -> None:
    """Check that store, object storage and sidecars agree.

    May run while the farm works. Says what to do about disagreements, and then exits with 6. Changes nothing, except
    that --deep puts damaged blobs into quarantine.
    """
    findings: list[AuditLine] = []
    counts: dict[str, int] = {}
    with connect() as client:
        for line in client.upkeep.audit(deep=deep):
            if "counts" in line:
                counts = line["counts"]
                continue
            findings.append(line)
            if not output.as_json():
                output.say(f"{line['where']}: {one_line(line['problem'])}\n      fix: {line['remedy']}")
    looked = ", ".join(f"{count} {name}" for name, count in counts.items())
    said = f"{plural(len(findings), 'finding') if findings else 'no findings'}; looked at {looked}"
    output.result({"ok": not findings, "findings": findings, "counts": counts}, said)
    if findings:
        raise typer.Exit(int(ExitCode.FARM_FAULT))


def gc(dry_run: Annotated[bool, Option("--dry-run", help="Only show what would be deleted.")] = False) -> None:
    """Delete blobs that nothing names, a day after they were marked.

    Marks blobs that nothing has named for a day, and deletes those that it marked a day ago. Such blobs are the inputs
    of builds that were never submitted, and uploads of dead workers.
    """
    with connect() as client:
        found = client.upkeep.gc(dry_run=dry_run)
    going = "would go" if dry_run else "deleted"
    said = [f"{plural(found['blobs'], 'blob')} {going}, {render.size(found['bytes'])}"]
    if found.get("marked"):
        marked = plural(found["marked"], "blob")
        said.append(f"{marked} marked: deleted a day later, if nothing names them then")
    output.result(found, said)


def drain(worker: Annotated[str, offering("WORKER", "As `farm ls workers` lists it.", connection.workers)]) -> None:
    """Stop a worker when its running attempts have ended."""
    with connect() as client:
        client.workers.drain(worker)
    said = (
        f"{worker} takes no more jobs and stops when its jobs have ended; its service manager (systemd, a Deployment, "
        "`farm up`) starts another: `farm pause POOL` keeps jobs from starting"
    )
    output.result({"worker": worker, "draining": True}, said)


def unfence(node: Annotated[str, Argument(metavar="NODE", help="As `farm ls workers` lists it.")]) -> None:
    """Let a fenced node take jobs again at once."""
    with connect() as client:
        client.workers.unfence(node)
    output.result({"node": node, "fenced": ""}, f"node {node} takes jobs again")


def worker(
    slots: Annotated[int | None, Option(min=1, metavar="N", help="Attempts at once on CPU targets.")] = None,
    only: Annotated[str, Option(metavar="gpu|cpu", help="Serve only the GPUs, or only the CPU targets.")] = "",
    exit_when_idle: Annotated[
        float | None, Option(min=1, metavar="SECONDS", help="Stop after so long without work.")
    ] = None,
) -> None:
    """Take jobs for this node's GPUs and CPU targets.

    Runs until SIGTERM or Ctrl-C; then running attempts may go on for `grace_seconds`, and the rest is given back.
    """
    from farm.local.servers import own_data_folder
    from farm.logging import configure
    from farm.node.gpus import HERE
    from farm.node.supervisor import Supervisor
    from farm.node.survey import share_out, survey, with_other_toolchains
    from farm.settings import load_settings

    if only not in ("", "gpu", "cpu"):
        raise UsageError(f"--only takes gpu or cpu, not `{only}`")
    settings = load_settings() if slots is None else load_settings(cpu_slots=slots)
    configure(settings)
    # An older farm, or systemd, may have left it open to others; it holds models, programs and sockets of tenants.
    own_data_folder(settings.data_dir)
    found = survey(settings)
    settings = with_other_toolchains(settings, found)
    kinds = share_out(found.pools, found.gpus, settings, HERE)
    kinds = [kind for kind in kinds if not only or (kind.name == "cpu") == (only == "cpu")]
    if found.rocm:
        output.note(f"uses {found.rocm}")
    for note in found.notes:
        output.note(str(note))
    if not kinds:
        hint = f"{_install('worker')}; see `farm doctor`"
        raise UsageError("this node has no compiler that works", hint=hint)
    if output.as_json():
        output.emit({"kinds": [kind.as_dict() for kind in kinds], **found.as_dict()})
    else:
        for kind in kinds:
            pools = ", ".join(pool.name for pool in kind.pools)
            output.note(f"{kind.name}: {plural(len(kind.slots), 'slot')} of {kind.threads} threads serve {pools}")
    settings = settings.model_copy(update={"migraphx_path": found.migraphx_path})
    environment = {"ROCM_PATH": found.rocm.root} if found.rocm else {}
    idle = math.inf if exit_when_idle is None else exit_when_idle
    supervisor = Supervisor(settings, kinds, versions=found.versions, environment=environment, idle_seconds=idle)
    raise typer.Exit(supervisor.run())


def serve(
    host: Annotated[
        str, Option(help="The address to serve on; beyond loopback only with a token, and TLS or a proxy.")
    ] = "127.0.0.1",
    port: Annotated[int, Option(min=0, max=65535, metavar="N", help="0 means any free port.")] = 8000,
    certificate: Annotated[Path | None, Option(help="PEM file of the certificate with its chain.")] = None,
    key: Annotated[Path | None, Option(help="PEM file of the certificate's key.")] = None,
    behind_proxy: Annotated[bool, Option("--behind-proxy", help="Serve plain HTTP behind a proxy with TLS.")] = False,
) -> None:
    """Serve the API and run the control loops.

    Runs until SIGTERM or Ctrl-C. Any number of them may run at the same time.
    """
    from farm.app import Farm
    from farm.local.servers import own_data_folder
    from farm.serving.server import Listening
    from farm.serving.server import serve as serve_api
    from farm.settings import load_settings

    def ready(url: str) -> None:
        output.emit({"api_url": url}) if output.as_json() else output.note(f"serving {url}/v1")

    settings = load_settings()
    others = other_users(pwd.getpwall())
    if others and not settings.api_token.get_secret_value():
        output.note(
            f"warning: without a token every user of this machine is this farm's administrator ({', '.join(others)}): "
            "set FARM_API_TOKEN"
        )
    listening = Listening(host, port, certificate, key, behind_proxy)
    own_data_folder(settings.data_dir)
    serve_api(Farm(settings), listening, ready=ready)


def other_users(users: Iterable[pwd.struct_passwd]) -> list[str]:
    """Return the names of the people who can log in on this machine, without the current user."""
    people = [user for user in users if PEOPLE <= user.pw_uid < NOBODY and user.pw_uid != os.getuid()]
    return sorted(user.pw_name for user in people if Path(user.pw_shell).name not in ("", "false", "nologin"))


PEOPLE, NOBODY = 1000, 65534  # First and last user id of people, as distributions assign them.


# --- farm token: access to the API ---------------------------------------------------------------------------------

commands = output.commands("Make, list and revoke tokens.")


Name = Annotated[str, Argument(metavar="NAME", help="A name for its user, such as `ci-main`.")]


@commands.command()
def create(
    name: Name,
    namespace: Annotated[str, Option(help="The only namespace in which it is valid.")],
    role: Annotated[Literal["monitor", "reader", "submitter", "admin"], Option(help="What it may do.")] = "submitter",
    max_cells: Annotated[int, Option(min=0, help="Unfinished cells at once; 0: no limit.")] = 0,
) -> None:
    """Make a token and print its secret, which is shown only once."""
    with connect() as client:
        secret = client.tokens.create(name, role, namespace, max_cells=max_cells)
    output.result({"name": name, "secret": secret}, secret)
    if not output.as_json():
        output.note(f"whoever has this token is a {role} in the namespace {namespace}: FARM_API_TOKEN={secret[:8]}…")


@commands.command()
def ls() -> None:
    """List the tokens."""
    with connect() as client:
        tokens = client.tokens.all()
    rows = [("NAME", "ROLE", "NAMESPACE", "MAX CELLS", "CREATED (UTC)")]
    for each in tokens:
        cells, created = str(each["max_cells"] or "none"), render.minute(each["created"])
        rows.append((each["name"], each["role"], each["namespace"], cells, created))
    output.table(rows, "no tokens yet: farm token create NAME --namespace NS", {"items": tokens})


@commands.command()
def revoke(name: Name) -> None:
    """Revoke a token: within seconds it is refused everywhere. Builds that it submitted go on."""
    with connect() as client:
        client.tokens.revoke(name)
    output.result({"revoked": name}, f"{name} is revoked")


SCARCE = 2 * 10**9  # With fewer bytes of memory or disk, a usual model may fail to compile.


@dataclass(frozen=True, slots=True)
class Check:
    """One finding. `absent` is something that this node does not need."""

    name: str
    state: Literal["ok", "broken", "absent"]
    found: str
    fix: str = ""


def run_checks(*, fix: bool = False) -> list[Check]:
    """Run all checks, even if some fail. `fix`: make a bucket, and users of Redis, that are missing."""
    from farm.settings import load_settings

    python = [Check("python", "ok", f"{platform.python_version()} at {sys.executable}"), *_extensions()]
    try:
        settings = load_settings()
    except FarmError as error:
        return [*python, Check("settings", "broken", error.message, error.hint)]
    output.quiet_logs(settings)
    read = f"namespace {settings.namespace or 'of the token'}, data in {settings.data_dir.absolute()}"
    checks: dict[str, Callable[[Settings], Check]] = {
        "api": _api,
        "workers": _workers,
        "redis": _redis,
        **({"redis users": _redis_users} if fix else {}),
        "object storage": partial(_storage, fix=fix),
        **({"bucket": _bucket} if settings.s3_bucket else {}),
        "seal": _seal,
        "memory limits": _memory_limits,
        "process limit": _process_limit,
        "disk limit": _disk_limit,
        "disk": _disk,
    }
    found = [_guarded(name, partial(check, settings)) for name, check in checks.items()]
    return [*python, Check("settings", "ok", read), *found, *_node(settings)]


def check_provider_cache(folder: Path) -> list[Check]:
    """Compare the programs in a cache of ONNX Runtime's MIGraphX provider with their sidecars and this machine."""
    from farm.node.amd_gpus import find_amd_gpus, find_rocm
    from farm.node.gpus import HERE

    rocm = find_rocm(HERE)
    gpus, _ = find_amd_gpus(HERE, [f"{rocm.root}/bin"] if rocm else [])
    wrong_files = entry_points.required(entry_points.CHECKS, "ort-cache")
    fix = "remove the file, and fetch a pack for it: `farm fetch --layout onnxruntime-cache`"
    found = [
        Check(one_line(name), "broken", one_line(why), fix)
        for name, why in wrong_files(folder, {gpu.arch for gpu in gpus})
    ]
    return found or [Check("cache", "ok", f"{folder}: every program is the one that its sidecar says")]


def _guarded(name: str, check: Callable[[], Check]) -> Check:
    """Turn an error of a check into a finding, so that the other checks still run."""
    try:
        return check()
    except NotFound as error:  # There is no API to ask.
        return Check(name, "absent", error.message, error.hint)
    except FarmError as error:
        return Check(name, "broken", error.message, error.hint)
    except ImportError as error:
        return Check(name, "broken", f"{error}", "pip install 'migraphx-farm[embedded]'")
    except OSError as error:
        return Check(name, "broken", f"{error}", "check the named file or address")


def _extensions() -> list[Check]:
    """List what other packages add to the farm, and what of it cannot be imported."""

    def check(name: str, package: str) -> Check:
        entry_points.find(entry_points.EXTENSIONS, name)
        return Check(f"extension {name}", "ok", f"of {package}")

    return [_guarded(f"extension {name}", partial(check, name, package)) for name, package in entry_points.packages()]


def _api(settings: Settings) -> Check:
    with connect(settings) as client:
        version = client.health().get("version", "unknown")
        client.builds(limit=1)
        return Check("api", "ok", f"{client.url} answers, version {version}")


def _workers(settings: Settings) -> Check:
    with connect(settings) as client:
        workers, troubles = client.workers.all(), client.workers.troubles()
    idle = {(worker["node"], reason) for worker in workers if (reason := worker["fenced"] or worker["resting"])}
    wrong = [*(f"node {node} takes no jobs: {reason}" for node, reason in sorted(idle)), *troubles]
    if wrong:
        return Check("workers", "broken", "; ".join(wrong), "check the node; `farm unfence NODE` lifts a fence")
    if not workers:
        return Check("workers", "absent", "no worker is live: jobs wait", "start `farm worker` on a node")
    nodes = {worker["node"] for worker in workers}
    return Check("workers", "ok", f"{len(workers)} live, on {plural(len(nodes), 'node')}")


def _redis(settings: Settings) -> Check:
    if not settings.redis_url.get_secret_value():
        return _embedded("redis", "Valkey", "redis_url")
    from farm.app import Farm

    Farm(settings).store.check()
    return Check("redis", "ok", "answers, keeps its data on disk, evicts nothing")


def _redis_users(settings: Settings) -> Check:
    """Make the user of each role that Redis lacks, and print its address, as `farm token create` prints a token."""
    from farm.app import Farm

    if not (url := settings.redis_url.get_secret_value()):
        return Check("redis users", "absent", "the embedded Valkey has one user")
    try:
        made, kept = Farm(settings).store.make_users(shipped_users())
    except StoreUnavailable as error:
        return Check("redis users", "absent", f"not made: {error.message}", "use the address of an administrator")
    user = re.compile("//([^/?#]*@)?")  # `urlsplit` takes no list of places in which one is an IPv6 address.
    addresses = [user.sub(f"//{name}:{password}@", url, count=1) for name, password in made.items()]
    fix = "" if kept else "write them into the server's ACL file: without one that it may write, a restart forgets them"
    return Check("redis users", "ok", f"made: {', '.join(addresses)}" if made else "each role has one", fix)


def _storage(settings: Settings, *, fix: bool) -> Check:
    if not settings.s3_bucket:
        return _embedded("object storage", "SeaweedFS", "s3_bucket")
    from farm.app import Farm

    artifacts = Farm(settings).artifacts
    if fix:
        artifacts.create()
    artifacts.check()
    where = settings.s3_endpoint or f"AWS {settings.s3_region}"
    return Check("object storage", "ok", f"bucket {settings.s3_bucket} at {where} honours conditional writes")


def _bucket(settings: Settings) -> Check:
    """Check that the bucket's own rules delete nothing that the farm keeps."""
    from farm.app import Farm
    from farm.artifacts.s3 import rules

    try:
        found = list(rules(Farm(settings).artifacts.with_patience(0)))
    except StorageUnavailable as error:
        return Check("bucket", "absent", f"its rules are not known: {error.message}", "ask with its owner's keys")
    if not found:
        return Check("bucket", "ok", "no rule of its own touches what the farm keeps")
    said, fix = "; ".join(one for one, _, _ in found), "; ".join(one for _, one, _ in found)
    return Check("bucket", "broken" if any(bad for _, _, bad in found) else "absent", one_line(said), one_line(fix))


def _embedded(name: str, server: Literal["Valkey", "SeaweedFS"], setting: str) -> Check:
    from farm.local.servers import valkey_binary, weed_binary

    find = {"Valkey": valkey_binary, "SeaweedFS": weed_binary}[server]
    try:
        find()
    except UsageError:
        return Check(name, "absent", f"{setting} is not set, and {server} is not installed here", _install("embedded"))
    return Check(name, "ok", f"{setting} is not set: the embedded {server} is used")


def _node(settings: Settings) -> list[Check]:
    """Check this node: ROCm, each GPU, compilers, pools, what cannot be used, memory."""
    from farm.node.gpus import HERE
    from farm.node.survey import share_out, survey

    try:
        found = survey(settings)
    except OSError as error:
        return [Check("node", "broken", f"{error}", "check the named file")]
    rocm = Check("rocm", "ok", str(found.rocm)) if found.rocm else Check("rocm", "absent", "none: no AMD GPU is used")
    driver = next((gpu.driver for gpu in found.gpus if gpu.maker == "nvidia"), "")
    nvidia = [Check("nvidia driver", "ok", driver)] if driver else []
    gpus = [Check(gpu.name, "ok", str(gpu)) for gpu in found.gpus]
    kinds = share_out(found.pools, found.gpus, settings, HERE)
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


def _seal(_: Settings) -> Check:
    if missing := unsealable():
        found = f"this kernel ({os.uname().release}) cannot keep a hostile model from: {', '.join(missing)}"
        fix = "use Linux 5.13 or newer with Landlock on, or compile only trusted models"
        return Check("seal", "absent", found, fix)
    return Check("seal", "ok", "children can reach only their own files, no network, no other process")


def _memory_limits(_: Settings) -> Check:
    groups = find()
    if groups.memory:
        return Check("memory limits", "ok", f"enforced by the kernel: {groups}")
    return Check("memory limits", "absent", str(groups), _DELEGATE)


_DELEGATE = "Delegate=memory pids in the worker's systemd unit, or a writable cgroup v2 in its container"


def _process_limit(settings: Settings) -> Check:
    limit = settings.process_limit
    if not limit:
        return Check("process limit", "absent", "none: a compiler may start any number", "set process_limit")
    if find().processes:
        return Check("process limit", "ok", f"{limit} for each child, enforced by the kernel")
    found = f"{limit} for each child, checked four times a second: a child that forks faster can slow this node down"
    return Check("process limit", "absent", found, _DELEGATE)


def _disk_limit(settings: Settings) -> Check:
    """Check what one attempt may write; there is no quota, so the worker measures it while it grows."""
    limit, (_, free) = settings.disk_limit, disk_of(settings.data_dir)
    if not limit:
        return Check("disk limit", "absent", "none: one attempt may fill the disk", "set disk_limit")
    found = f"{limit / 1e9:g} GB for each attempt, checked once a second"
    if limit > free:
        return Check("disk limit", "absent", f"{found}; {free / 1e9:.0f} GB are free", "set disk_limit to less")
    return Check("disk limit", "ok", found)


def _memory(settings: Settings, slots: int) -> Check:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limits = [Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")]
    texts = [path.read_text().strip() for path in limits if path.is_file()]
    limit = next((int(text) for text in texts if text.isdigit()), None)
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


def _disk(settings: Settings) -> Check:
    from farm.node.health import DiskWatch

    there, free = disk_of(settings.data_dir)
    found = f"{free / 1e9:.0f} GB free at {settings.data_dir.absolute()}"
    if not os.access(there, os.W_OK):
        return Check("disk", "broken", f"{there} is not writable", "set data_dir to a folder that is")
    if free < SCARCE:
        return Check("disk", "broken", found, "free some space, or set data_dir to a larger disk")
    if slow := DiskWatch(there).look():
        return Check("disk", "broken", slow, "see `dmesg` and `iostat`, or set data_dir to another disk")
    return Check("disk", "ok", found)


def _install(extra: str) -> str:
    return f"pip install 'migraphx-farm[{extra}]'"
