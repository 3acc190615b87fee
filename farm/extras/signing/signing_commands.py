"""Make and revoke signing keys."""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from farm.cli import completion, output, render
from farm.cli.connection import connect
from farm.cli.inspect_command import key_of
from farm.errors import ExitCode, UsageError
from farm.extras.signing.signatures_api import SignaturesApi
from farm.inert import one_line

if TYPE_CHECKING:
    from farm.extras.signing.judging import TrustCheck
    from farm.extras.signing.verifying import Trust
    from farm.settings import Settings

commands = output.commands(__doc__)


def verify(
    what: Annotated[
        str,
        typer.Argument(
            metavar="FILE|REF",
            help="A fetched program, a folder of them, a pack; or a cell, a key, a tag, a build.",
            autocompletion=completion.stored,
        ),
    ],
    keys: Annotated[
        list[Path] | None, typer.Option("--key", metavar="FILE", help="Trust this public key, and no policy.")
    ] = None,
    policy: Annotated[
        Path | None, typer.Option("--policy", metavar="FILE", help="A trust policy; default: the setting's.")
    ] = None,
    tag: Annotated[str, typer.Option("--tag", metavar="REF", help="A file: check that it may be this ref.")] = "",
    as_json: output.Json = False,
) -> None:
    """Check who made a program and how it was tested, a line each.

    A file needs no farm: what is signed lies next to it, as `farm fetch` writes it. A cell of a ref
    (`net/migraphx-cpu/fp16/b8@prod`), a cache key, or all of a tag or build is asked of the farm. Ends with exit
    code 39 if anything is refused.
    """
    from farm.client.cache import default_cache
    from farm.extras.signing.verifying import verify_file, what_to_verify
    from farm.settings import load_settings

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
    said = (line for name, checks in found.items() for line in (name, *_lines(checks)))
    output.result({"items": items}, said, as_json=as_json)
    if refused:
        raise typer.Exit(int(ExitCode.ARTIFACT_GONE))


def _lines(checks: Iterable[TrustCheck]) -> list[str]:
    return render.align([(str(check.verdict), check.name, one_line(check.text, 300)) for check in checks], "  ")


def _trust(settings: Settings, keys: list[Path], policy: Path | None) -> Trust:
    from farm.artifacts.keys import MAIN
    from farm.extras.signing.trust import load_policy, policy_of_keys
    from farm.extras.signing.verifying import Trust

    if keys and policy:
        raise UsageError("choose one of --key and --policy")
    if keys:
        return Trust(policy_of_keys(keys, settings.namespace or MAIN), None, settings.namespace)
    if policy:
        return Trust(load_policy(policy), None, settings.namespace)
    return Trust.from_settings(settings.model_copy(update={"signing_key": ""}))


def _of_farm(settings: Settings, what: str, trust: Trust) -> dict[str, list[TrustCheck]]:
    """Judge what the farm has under a name."""
    with connect(settings) as client:
        name, _, ref = what.partition("@")
        if "/" in name or re.fullmatch(r"[0-9a-f]{4,64}", name):
            cells = {what: key_of(client, what)}
            tag = ref or "latest"
        else:
            tag = client.find_build(what) if what.startswith("@") or "=" in what else what
            cells = {cell["identifier"]: cell["key"] for cell in client.ls(tag)}
        return {name: SignaturesApi.of(client).judged(key, trust, tag=tag) for name, key in cells.items()}


# --- keys -------------------------------------------------------------------------------------------------------------


@commands.command()
def new(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Such as `farm-2026`: a key has a name in policies.")],
    folder: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="Where to write the files.")] = Path(),
    as_json: output.Json = False,
) -> None:
    """Make a signing key: NAME.key, which stays secret, and NAME.pub for those who check."""
    from farm.extras.signing.signing_keys import new_key

    private, public, keyid = new_key(name, folder)
    said = [
        f'{private}  sign with it: signing_key = "{private.absolute()}"',
        f"{public}  for trust policies; key id {keyid}",
    ]
    output.result({"private": str(private), "public": str(public), "keyid": keyid}, said, as_json=as_json)


@commands.command()
def revoke(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The revocation document; made if it is not there.")],
    by: Annotated[Path, typer.Option("--by", metavar="KEY", help="The private key that signs it.")],
    keys: Annotated[
        list[str] | None, typer.Option("--key", metavar="FILE|ID", help="Revoke this public key, or key id.")
    ] = None,
    programs: Annotated[
        list[str] | None, typer.Option("--program", metavar="FILE|SHA256", help="Revoke this program.")
    ] = None,
    since: Annotated[
        str, typer.Option("--since", metavar="TIME", help="What the key signed before still counts (2026-11-01).")
    ] = "",
    reason: Annotated[str, typer.Option("--reason", help="Why; readers see it.")] = "",
    as_json: output.Json = False,
) -> None:
    """Revoke keys and programs. Without any, issue the document again, so that it stays fresh.

    Give the file to all readers; their policies say who may sign it, and how old it may be.
    """
    from farm.extras.signing.revocations import RevokedKey, issue
    from farm.extras.signing.signing_keys import load_signer
    from farm.extras.signing.trust import clock

    signer = load_signer(by)
    start = _instant(since) if since else None
    revoked = {_key_id(each): RevokedKey(reason, start) for each in keys or []}
    with output.writing(file):
        made = issue(file, signer, clock(), revoked, {_program_id(each): reason for each in programs or []})
    counts = f"{render.plural(len(made.keys), 'key')} and {render.plural(len(made.programs), 'program')}"
    document = {"file": str(file), "number": made.number, "keys": [*made.keys], "programs": [*made.programs]}
    output.result(document, f"{file}: number {made.number}, {counts} revoked", as_json=as_json)


@commands.command()
def publish(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A revocation document.")],
    as_json: output.Json = False,
) -> None:
    """Publish a revocation document: `farm fetch` and `farm verify REF` bring it to readers whose policy takes it."""
    try:
        document = file.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror or error}") from None
    with connect() as client:
        SignaturesApi.of(client).publish_revocations(document)
    output.result({"published": str(file)}, f"{file} is published", as_json=as_json)


def _key_id(named: str) -> str:
    from farm.extras.signing.signing_keys import load_public

    return named if re.fullmatch(r"[0-9a-f]{64}", named) else load_public(Path(named)).keyid


def _program_id(named: str) -> str:
    import hashlib

    if re.fullmatch(r"[0-9a-f]{64}", named):
        return named
    try:
        with Path(named).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UsageError(f"cannot read {named}: {error.strerror or error}") from None


def _instant(text: str) -> datetime:
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        raise UsageError(f"{text!r} is not a time", hint="such as 2026-11-01 or 2026-11-01T12:00:00Z") from None
    return when if when.tzinfo else when.replace(tzinfo=UTC)
