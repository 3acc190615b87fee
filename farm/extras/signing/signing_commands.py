"""Make signing keys, and say whose keys sign refs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from farm.artifacts.storage import MAIN
from farm.cli import connection, output, render
from farm.cli.artifact_commands import key_of
from farm.cli.connection import connect
from farm.errors import ExitCode, UsageError
from farm.extras.signing.signed_refs import Roles, issue, lasts
from farm.extras.signing.signing_keys import clock, load_public, load_signer, new_key
from farm.extras.signing.trust import TrustCheck, load_policy, load_roles, policy_of_keys
from farm.extras.signing.verifying import SignaturesApi, Trust, verify_file, what_to_verify
from farm.files import replacing
from farm.inert import one_line
from farm.settings import Settings, load_settings

if TYPE_CHECKING:
    from securesystemslib.signer import Key


commands = output.commands(__doc__)


def verify(
    what: Annotated[
        str,
        connection.offering(
            "FILE|REF",
            "A fetched program, a folder of them, a pack; or a cell, a key, a tag, a build.",
            connection.stored,
        ),
    ],
    keys: Annotated[
        list[Path] | None, Option("--key", metavar="FILE", help="Trust this public key, and no policy.")
    ] = None,
    policy: Annotated[Path | None, Option(metavar="FILE", help="A trust policy; default: the setting's.")] = None,
    tag: Annotated[str, Option(metavar="REF", help="A file: check that it may be this ref.")] = "",
) -> None:
    """Check who made a program and how it was tested, a line each.

    A file needs no farm: what is signed lies next to it, as `farm fetch` writes it. A cell of a ref
    (`net/migraphx-cpu/fp16/b8@prod`), a cache key, or all of a tag or build is asked of the farm. Ends with exit
    code 39 if anything is refused.
    """
    from farm.client.transfers import default_cache

    settings = load_settings()
    trust = _trust(settings, keys or [], policy)
    if Path(what).exists():
        places = what_to_verify(Path(what))
        found = {str(path): verify_file(path, trust, tag=tag, cache=default_cache()) for path in places}
    else:
        found = _of_farm(settings, what, trust)
    refused = [name for name, checks in found.items() if any(check.verdict == "refused" for check in checks)]
    items = [
        {"name": name, "refused": name in refused, "checks": [check._asdict() for check in checks]}
        for name, checks in found.items()
    ]
    output.result({"items": items}, (line for name, checks in found.items() for line in (name, *_lines(checks))))
    if refused:
        raise typer.Exit(int(ExitCode.ARTIFACT_GONE))


def _lines(checks: Iterable[TrustCheck]) -> list[str]:
    return render.align([(str(check.verdict), check.name, one_line(check.text, 300)) for check in checks], "  ")


def _trust(settings: Settings, keys: list[Path], policy: Path | None) -> Trust:
    if keys and policy:
        raise UsageError("choose one of --key and --policy")
    if keys:
        return Trust(policy_of_keys(keys, settings.namespace or MAIN), settings.namespace)
    if policy:
        return Trust(load_policy(policy), settings.namespace)
    return Trust.from_settings(settings)


def _of_farm(settings: Settings, what: str, trust: Trust) -> dict[str, list[TrustCheck]]:
    """Judge what the farm has under a name."""
    with connect(settings) as client:
        client.trust = trust
        name, _, ref = what.partition("@")
        if "/" in name or re.fullmatch(r"[0-9a-f]{4,64}", name):
            cells = {what: key_of(client, what)}
            tag = ref or "latest"
        else:
            tag = client.find_build(what) if what.startswith("@") or "=" in what else what
            # A build is not a ref: nobody signs which programs it has.
            found = client.refs.unchecked(tag) if re.fullmatch("b-[0-9a-f]{1,16}", tag) else client.refs.get(tag)
            cells = {cell["identifier"]: cell["key"] for cell in found["cells"].values()}
        return {name: SignaturesApi.of(client).judged(key, trust, tag=tag) for name, key in cells.items()}


# --- keys -------------------------------------------------------------------------------------------------------------


@commands.command()
def new(
    name: Annotated[str, Argument(metavar="NAME", help="Such as `farm-2026`: a key has a name in policies.")],
    folder: Annotated[Path, Option("--output", "-o", metavar="DIR", help="Where to write the files.")] = Path(),
) -> None:
    """Make a signing key: NAME.key, which stays secret, and NAME.pub for those who check."""
    private, public, keyid = new_key(name, folder)
    said = [
        f'{private}  sign with it: signing_key = "{private.absolute()}"',
        f"{public}  for trust policies; key id {keyid}",
    ]
    output.result({"private": str(private), "public": str(public), "keyid": keyid}, said)


# --- refs -------------------------------------------------------------------------------------------------------------


@commands.command()
def roles(
    file: Annotated[Path, Argument(metavar="FILE", help="The file of roles; made if it is not there.")],
    by: Annotated[list[Path], Option(metavar="KEY", help="A private key that signs: root, targets.")],
    root: Annotated[list[Path] | None, Option(metavar="FILE", help="Public key of root.")] = None,
    targets: Annotated[list[Path] | None, Option(metavar="FILE", help="… of targets.")] = None,
    server: Annotated[list[Path] | None, Option(metavar="FILE", help="… of the server.")] = None,
    timestamp: Annotated[
        list[Path] | None, Option(metavar="FILE", help="… of timestamps; default: the server's.")
    ] = None,
    promoters: Annotated[
        list[str] | None,
        Option("--promoter", metavar="NAMESPACE=FILE", help="… of who signs its `prod`; NAMESPACE= for nobody."),
    ] = None,
    days: Annotated[float, Option(min=1, help="How long they hold.")] = 730,
) -> None:
    """Say whose keys sign refs: what is named takes the place of the earlier keys, all else stays.

    Run it where the private keys of root and targets are kept, with no network. A changed key of root also needs the
    earlier one (--by). Without any change it only makes them hold longer.
    """
    given = {"root": root, "targets": targets, "server": server, "timestamp": timestamp}
    keys = {name: [load_public(path) for path in paths] for name, paths in given.items() if paths}
    promoting: dict[str, list[Key]] = {}
    for each in promoters or []:
        namespace, equals, path = each.partition("=")
        if not equals or not re.fullmatch(r"[a-z0-9][a-z0-9._-]{0,63}", namespace):
            raise UsageError(f"{each!r} is not NAMESPACE=FILE")
        promoting.setdefault(namespace, []).extend([load_public(Path(path))] if path else [])
    there = load_roles(file) if file.exists() else None
    made = issue(there, map(load_signer, by), keys, promoting, lasts(days, clock()))
    with output.writing(file), replacing(file) as part:
        part.write_bytes(made.text())
    _say_roles(made)


@commands.command()
def publish(file: Annotated[Path, Argument(metavar="FILE", help="A file of roles.")]) -> None:
    """Let the farm's refs be signed by these roles, or by newer ones: an existing farm signs all refs in a minute."""
    made = load_roles(file)
    with connect() as client:
        client.transport.request("POST", "/v1/roles/publish", json=json.loads(made.text()))
    _say_roles(made)


@commands.command()
def withdraw() -> None:
    """Let the farm sign no refs any more. Readers whose policies ask for signed refs refuse them then."""
    with connect() as client:
        client.transport.request("POST", "/v1/roles/withdraw")
    output.result({"withdrawn": True}, "the farm signs no refs any more")


@commands.command()
def show(
    file: Annotated[Path | None, Argument(metavar="FILE", help="A file of roles; default: the farm's.")] = None,
) -> None:
    """Show whose keys sign refs, and until when."""
    if file:
        return _say_roles(load_roles(file))
    with connect() as client:
        return _say_roles(Roles.read(client.transport.request("GET", "/v1/roles").content))


def _say_roles(made: Roles) -> None:
    root, top = made.root, made.top
    held = {name: each.keyids for name, each in root.roles.items() if name != "snapshot"}
    held |= {name: each.keyids for name, each in ((top.delegations and top.delegations.roles) or {}).items()}
    ends = {"root": root.expires, "targets": top.expires}
    expires = {name: when.isoformat() for name, when in ends.items()}
    document = {"root": root.version, "targets": top.version, "roles": held, "expires": expires}
    rows = [(name, " ".join(keyid[:16] for keyid in keyids)) for name, keyids in held.items()]
    until = ", ".join(f"{name} {number} until {ends[name]:%Y-%m-%d}" for name, number in
                      (("root", root.version), ("targets", top.version)))  # fmt: skip
    output.result(document, [*render.align(rows), until])
