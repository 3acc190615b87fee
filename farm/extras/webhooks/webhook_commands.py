"""Tell other servers what happens: make, list and remove webhooks, and see their messages."""

from __future__ import annotations

from typing import Annotated

from typer import Argument, Option

from farm.cli import output, render
from farm.cli.connection import connect
from farm.errors import UsageError
from farm.extras.webhooks.hooks import DeliveryView, WebhookView
from farm.extras.webhooks.webhook_api import WebhooksApi
from farm.units import parse_duration

commands = output.commands(__doc__)

Name = Annotated[str, Argument(metavar="NAME", help="A webhook's name.")]


@commands.command()
def add(
    name: Name,
    url: Annotated[str, Argument(metavar="URL", help="The address to call, such as https://ci.example/farm.")],
    event: Annotated[
        list[str] | None, Option(metavar="EVENT", help="build.finished (default), trigger.failed. Repeatable.")
    ] = None,
) -> None:
    """Make a webhook and print the secret that signs its messages, which is shown only once."""
    with connect() as client:
        secret = WebhooksApi.of(client).create(name, url, event or ["build.finished"])
    output.result({"name": name, "secret": secret}, secret)


@commands.command()
def ls() -> None:
    """List the webhooks of the namespace."""
    with connect() as client:
        found = WebhooksApi.of(client).all()
    rows = [("NAME", "URL", "EVENTS", "STATE")]
    rows += [(each["name"], each["url"], ", ".join(each["events"]), _activity(each)) for each in found]
    output.table(rows, "no webhooks yet: farm webhook add NAME URL", {"items": found})


@commands.command()
def log(
    name: Name,
    limit: Annotated[int, Option("--limit", "-n", min=1, max=200, metavar="N", help="Messages to show.")] = 20,
) -> None:
    """Show what was sent to a webhook, the newest first, and what came of the last attempt."""
    with connect() as client:
        found = WebhooksApi.of(client).deliveries(name, limit)
    rows = [("MESSAGE", "CREATED (UTC)", "EVENT", "STATE", "TRIES", "LAST")]
    rows += [
        (each["id"], render.when(each["created"]), each["event"], _state(each), str(len(each["attempts"])), _last(each))
        for each in found
    ]
    output.table(rows, "nothing was sent yet", {"items": found})


@commands.command()
def replay(
    name: Name,
    message: Annotated[str, Argument(metavar="MESSAGE", help="A message's id: `farm webhook log` has them.")],
) -> None:
    """Send a message again, with the same id."""
    with connect() as client:
        again = WebhooksApi.of(client).replay(name, message)
    output.result(again, f"{message} is sent again")


@commands.command()
def rotate(
    name: Name,
    overlap: Annotated[
        str, Option(metavar="TIME", help="How long the old secret signs, too; 0s if it leaked.")
    ] = "24h",
) -> None:
    """Give a webhook a new secret and print it, which is shown only once. For a while both sign each message."""
    try:
        seconds = parse_duration(overlap)
    except ValueError as error:
        raise UsageError(f"--overlap: {error}") from None
    with connect() as client:
        secret = WebhooksApi.of(client).rotate(name, seconds)
    output.result({"name": name, "secret": secret}, secret)


@commands.command()
def rm(name: Name) -> None:
    """Remove a webhook with its log."""
    with connect() as client:
        WebhooksApi.of(client).remove(name)
    output.result({"removed": name}, f"{name} is removed")


def _activity(hook: WebhookView) -> str:
    until = hook.get("old_signs_until")
    return hook["disabled"] or (f"active, the old secret signs until {render.when(until)} UTC" if until else "active")


def _state(delivery: DeliveryView) -> str:
    again = delivery["next"] if delivery["attempts"] else None
    return f"{delivery['state']} until {render.when(again)}" if again else delivery["state"]


def _last(delivery: DeliveryView) -> str:
    if not delivery["attempts"]:
        return ""
    last = delivery["attempts"][-1]
    return last["error"] or str(last["status"])
