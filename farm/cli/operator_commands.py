"""Commands for operators: doctor, audit, gc, worker, serve."""

from __future__ import annotations

import os
import pwd
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from farm.cli import completion, output
from farm.cli.connection import connect
from farm.errors import ExitCode, UsageError
from farm.inert import one_line

if TYPE_CHECKING:
    from farm.jobs.rows import AuditLine


def doctor(
    ort_cache: Annotated[
        Path | None,
        typer.Option("--ort-cache", metavar="DIR", help="Check only this cache of ONNX Runtime's MIGraphX provider."),
    ] = None,
    as_json: output.Json = False,
) -> None:
    """Check settings, servers, compilers and limits.

    Says how to fix what is broken, and then exits with 6.
    """
    from farm.cli.check_commands import check_provider_cache, run_checks

    checks = check_provider_cache(ort_cache) if ort_cache else run_checks()
    broken = [check for check in checks if check.state == "broken"]
    said, width = list[str](), max(len(check.name) for check in checks)
    for check in checks:
        word, colour = {"ok": ("ok", "green"), "broken": ("FAIL", "red"), "absent": ("-", None)}[check.state]
        said.append(f"{typer.style(word.ljust(4), fg=colour)}  {check.name.ljust(width)}  {check.found}")
        said += [f"      {' ' * width}  fix: {check.fix}"] if check.fix else []
    output.result({"ok": not broken, "checks": [asdict(check) for check in checks]}, said, as_json=as_json)
    if broken:
        raise typer.Exit(int(ExitCode.FARM_FAULT))


def audit(
    deep: Annotated[bool, typer.Option("--deep", help="Read and hash every blob of every artifact.")] = False,
    as_json: output.Json = False,
) -> None:
    """Check that store, object storage and sidecars agree.

    May run while the farm works. Says what to do about disagreements, and then exits with 6. Changes nothing, except
    that --deep puts damaged blobs into quarantine.
    """
    from farm.cli import render

    findings: list[AuditLine] = []
    counts: dict[str, int] = {}
    with connect() as client:
        for line in client.upkeep.audit(deep=deep):
            if "counts" in line:
                counts = line["counts"]
                continue
            findings.append(line)
            if not as_json:
                output.say(f"{line['where']}: {one_line(line['problem'])}\n      fix: {line['remedy']}")
    looked = ", ".join(f"{count} {name}" for name, count in counts.items())
    said = f"{render.plural(len(findings), 'finding') if findings else 'no findings'}; looked at {looked}"
    output.result({"ok": not findings, "findings": findings, "counts": counts}, said, as_json=as_json)
    if findings:
        raise typer.Exit(int(ExitCode.FARM_FAULT))


def gc(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be deleted.")] = False,
    as_json: output.Json = False,
) -> None:
    """Delete blobs that nothing names, a day after they were marked.

    Marks blobs that nothing has named for a day, and deletes those that it marked a day ago. Such blobs are the inputs
    of builds that were never submitted, and uploads of dead workers.
    """
    from farm.cli import render

    with connect() as client:
        found = client.upkeep.gc(dry_run=dry_run)
    going = "would go" if dry_run else "deleted"
    said = [f"{render.plural(found['blobs'], 'blob')} {going}, {render.size(found['bytes'])}"]
    if found.get("marked"):
        marked = render.plural(found["marked"], "blob")
        said.append(f"{marked} marked: deleted a day later, if nothing names them then")
    output.result(found, said, as_json=as_json)


def drain(
    worker: Annotated[
        str, typer.Argument(metavar="WORKER", help="As `farm ls workers` lists it.", autocompletion=completion.workers)
    ],
    as_json: output.Json = False,
) -> None:
    """Stop a worker when its running attempts have ended."""
    with connect() as client:
        client.workers.drain(worker)
    said = (
        f"{worker} takes no more jobs and stops when its jobs have ended; its service manager (systemd, `farm up`) "
        "starts another: `farm pause POOL` keeps jobs from starting"
    )
    output.result({"worker": worker, "draining": True}, said, as_json=as_json)


def unfence(
    node: Annotated[str, typer.Argument(metavar="NODE", help="As `farm ls workers` lists it.")],
    as_json: output.Json = False,
) -> None:
    """Let a fenced node take jobs again at once."""
    with connect() as client:
        client.workers.unfence(node)
    output.result({"node": node, "fenced": ""}, f"node {node} takes jobs again", as_json=as_json)


def worker(
    slots: Annotated[
        int | None, typer.Option("--slots", min=1, metavar="N", help="Attempts at once on CPU targets.")
    ] = None,
    only: Annotated[
        str, typer.Option("--only", metavar="gpu|cpu", help="Serve only the GPUs, or only the CPU targets.")
    ] = "",
    as_json: output.Json = False,
) -> None:
    """Take jobs for this node's GPUs and CPU targets.

    Runs until SIGTERM or Ctrl-C; then running attempts may go on for `grace_seconds`, and the rest is given back.
    """
    from farm.local.servers import own_data_folder
    from farm.logging import configure
    from farm.node.machine import Machine
    from farm.node.slot_shares import share_out
    from farm.node.supervisor import run_worker
    from farm.node.survey import survey, with_other_toolchains
    from farm.settings import load_settings

    if only not in ("", "gpu", "cpu"):
        raise UsageError(f"--only takes gpu or cpu, not `{only}`")
    settings = load_settings() if slots is None else load_settings(cpu_slots=slots)
    configure(settings)
    # An older farm, or systemd, may have left it open to others; it holds models, programs and sockets of tenants.
    own_data_folder(settings.data_dir)
    machine = Machine()
    found = survey(settings, machine)
    settings = with_other_toolchains(settings, found)
    kinds = share_out(found.pools, found.gpus, settings, machine)
    kinds = [kind for kind in kinds if not only or (kind.name == "cpu") == (only == "cpu")]
    if found.rocm:
        output.note(f"uses {found.rocm}")
    for note in found.notes:
        output.note(str(note))
    if not kinds:
        raise UsageError(
            "this node has no compiler that works", hint="pip install 'migraphx-farm[worker]'; see `farm doctor`"
        )
    if as_json:
        output.emit({"kinds": [kind.as_dict() for kind in kinds], **found.as_dict()})
    else:
        for kind in kinds:
            count = f"{len(kind.slots)} slots" if len(kind.slots) > 1 else "1 slot"
            pools = ", ".join(pool.name for pool in kind.pools)
            output.note(f"{kind.name}: {count} of {kind.threads} threads serve {pools}")
    settings = settings.model_copy(update={"migraphx_path": found.migraphx_path})
    environment = {"ROCM_PATH": found.rocm.root} if found.rocm else {}
    raise typer.Exit(run_worker(settings, kinds, versions=found.versions, environment=environment))


def serve(
    host: Annotated[
        str,
        typer.Option("--host", help="The address to serve on; beyond loopback only with a token, and TLS or a proxy."),
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, metavar="N", help="0 means any free port.")] = 8000,
    certificate: Annotated[
        Path | None, typer.Option("--certificate", help="PEM file of the certificate with its chain.")
    ] = None,
    key: Annotated[Path | None, typer.Option("--key", help="PEM file of the certificate's key.")] = None,
    behind_proxy: Annotated[
        bool, typer.Option("--behind-proxy", help="Serve plain HTTP behind a proxy with TLS.")
    ] = False,
    as_json: output.Json = False,
) -> None:
    """Serve the API and run the control loops.

    Runs until SIGTERM or Ctrl-C. Any number of them may run at the same time.
    """
    from farm.app import Farm
    from farm.serving.server import Listening
    from farm.serving.server import serve as serve_api
    from farm.settings import load_settings

    def ready(url: str) -> None:
        output.emit({"api_url": url}) if as_json else output.note(f"serving {url}/v1")

    settings = load_settings()
    others = other_users(pwd.getpwall())
    if others and not settings.api_token.get_secret_value():
        output.note(
            f"warning: without a token every user of this machine is this farm's administrator ({', '.join(others)}): "
            "set FARM_API_TOKEN"
        )
    listening = Listening(host, port, certificate, key, behind_proxy)
    serve_api(Farm.from_settings(settings), listening, ready=ready)


def other_users(users: Iterable[pwd.struct_passwd]) -> list[str]:
    """Return the names of the people who can log in on this machine, without the current user."""
    people = [user for user in users if PEOPLE <= user.pw_uid < NOBODY and user.pw_uid != os.getuid()]
    return sorted(user.pw_name for user in people if Path(user.pw_shell).name not in ("", "false", "nologin"))


PEOPLE, NOBODY = 1000, 65534
"""First and last user id of people, as distributions assign them."""
