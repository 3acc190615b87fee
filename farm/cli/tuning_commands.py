"""Commands of the tuning databases: `farm tuning …`."""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Argument, Option

from farm.cli import output, render
from farm.cli.connection import connect
from farm.errors import NotFound, UsageError
from farm.results.pictures import totals
from farm.units import parse_duration

if TYPE_CHECKING:
    from farm.client.client import FarmClient
    from farm.tuning.formats import Read
    from farm.tuning.records import Snapshot, TuningDatabaseView, TuningStats

commands = output.commands("List, import and export what tuning learnt.")

Database = Annotated[
    str, Argument(metavar="DATABASE", help="POOL/DEVICE/MODE, or words that occur in only one database's name.")
]

ENVIRONMENT = "tuning.env"
README = "README.md"
OPERATIONS, HOURS = "operations.svg", "hours.svg"  # The pictures of `stats`.


@commands.command()
def ls() -> None:
    """List the tuning databases, including empty ones of known pools."""
    with connect() as client:
        items = client.tuning.all()
    rows = [("DATABASE", "RECORDS", "MERGED (UTC)", "NOT MERGED")]
    for item in items:
        waiting = render.plural(item["waiting"], "delta") if item["waiting"] else ""
        held = "damaged" if item.get("damaged") else render.plural(sum(item["records"].values()), "record")
        merged = render.minute(item["moved"] or "")
        rows.append((item["name"], held, merged, waiting))
    output.table(rows, "no tuning databases yet: a pool gets them when a worker serves it", {"items": items})
    for item in items:
        if item.get("damaged") and not output.as_json():
            output.note(f"{item['name']} is damaged: {item['damaged']}")


@commands.command()
def stats(
    database: Annotated[str, Argument(metavar="[DATABASE]", help="One database; default: all together.")] = "",
    pictures: Annotated[
        Path | None, Option(metavar="FOLDER", help="Draw operations.svg and hours.svg into this folder.")
    ] = None,
) -> None:
    """Show what is known, and what tuning cost and saved."""
    with connect() as client:
        items = client.tuning.all()
        names = [choose(items, database)] if database else [item["name"] for item in _sound(items) if _holds(item)]
        found = [client.tuning.stats(name) for name in names]
    days = any(one["days"] for one in found)
    if pictures and days:
        with output.writing(pictures):
            pictures.mkdir(parents=True, exist_ok=True)
            draw(found, pictures)
    said = []
    for one in found:
        total = one["total"]
        kinds = ", ".join(f"{count} {store}" for store, count in one["records"].items() if count) or "no records"
        said += [
            str(one["database"]),
            f"  {kinds}",
            f"  {render.plural(total['sessions'], 'session')}: operations {total['known']} from the database,"
            f" {total['tuned']} tuned, {total['untunable']} not tunable;"
            f" {render.duration(total['seconds'])} spent, {render.duration(total['saved'])} saved",
        ]
    output.result({"items": found}, said)
    if not found and not output.as_json():
        output.note("all tuning databases are still empty")
    elif pictures and not output.as_json():
        drawn = f"drawn: {pictures / OPERATIONS}, {pictures / HOURS}"
        output.note(drawn if days else "nothing to draw: no job has tuned with it yet")


@commands.command()
def export(
    database: Database,
    folder: Annotated[Path, Option("--output", "-o", help="The folder to write; it has to be empty.")],
    sqlite: Annotated[
        bool, Option("--sqlite", help="Write the problem cache as SQLite (MIGraphX after ROCm 7.2).")
    ] = False,
) -> None:
    """Write a folder that MIGraphX and MIOpen can use without the farm.

    Its `tuning.env` sets the variables for that.
    """
    from farm.tuning import exchange
    from farm.tuning.formats import OBJECTS, PROBLEM_CACHE, write_folder
    from farm.tuning.records import RecordStore

    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} is not empty", hint="choose another folder")
    with connect() as client:
        name = choose(client.tuning.all(), database)
        known = exchange.read(client.tuning.snapshot(name))
    # MIGraphX and MIOpen cannot read the farm's own records.
    snapshot = known.only(record for record in known if record.store not in OBJECTS)
    if not len(snapshot):
        hint = "`farm tuning stats` shows its content; the sidecar says how ONNX Runtime runs a tuned program best"
        raise NotFound(f"{name} has nothing that MIGraphX or MIOpen could read", hint=hint)
    if sqlite and not any(store is RecordStore.PROBLEM_CACHE and file for store, file in snapshot.tables):
        hint = "only such a problem cache can be SQLite"
        raise UsageError(f"{name} has no problem cache that names devices", hint=hint)
    cache = "problem_cache.db" if sqlite else PROBLEM_CACHE
    with output.writing(folder):
        write_folder(snapshot, folder, problem_cache=cache)
        variables = {
            "MIOPEN_USER_DB_PATH": str(folder.resolve()),
            "MIGRAPHX_PROBLEM_CACHE": str(folder.resolve() / cache),
        }
        exports = [f"export {variable}={shlex.quote(value)}\n" for variable, value in variables.items()]
        (folder / ENVIRONMENT).write_text("".join(exports))
        (folder / README).write_text(_readme(name, snapshot, cache), encoding="utf-8")
    document = {"database": name, "folder": str(folder), "records": snapshot.counts(), "environment": variables}
    said = [f"{len(snapshot)} records of {name} in {folder}", f"to use them: . {folder / ENVIRONMENT}"]
    output.result(document, said)


@commands.command("import")
def import_(
    database: Database,
    paths: Annotated[
        list[Path], Argument(metavar="PATH…", help="Folders and files: ~/.config/miopen, a problem cache, an export.")
    ],
    miopen: Annotated[
        str, Option(metavar="VERSION", help="MIOpen's version, if no job of the pool has shown it yet.")
    ] = "",
) -> None:
    """Import what you tuned yourself.

    Refuses, file by file, what another kind of device or another version of MIOpen measured.
    """
    from farm.tuning import exchange
    from farm.tuning.exchange import label
    from farm.tuning.formats import read_files
    from farm.tuning.records import RecordSource

    read = read_files(paths, RecordSource(""))
    dropped = {"nulls": read.dropped.nulls, "broken": read.dropped.broken}
    left_out = f"{read.dropped.nulls} never decided, {read.dropped.broken} broken" if any(dropped.values()) else ""
    if not len(read.snapshot):
        why = left_out or "they contain no database of MIOpen or MIGraphX"
        places = {file: f"damaged: {where}" for file, where in read.dropped.parts.items()}
        reasons = [f"{file}: {reason}" for file, reason in {**places, **read.dropped.files}.items()]
        raise UsageError(f"nothing to import in {', '.join(map(str, paths))}: {why}", hint="\n".join(reasons))
    with connect() as client:
        name = choose(client.tuning.all(), database)
        found = client.tuning.add(name, exchange.pack(read.snapshot), miopen=miopen)
    # The farm knows tables; the user knows files.
    files = {label(place): ", ".join(str(path) for path in origins) for place, origins in read.origins.items()}
    refused = {files.get(table, table): why for table, why in found["refused"].items()}
    found = {**found, "refused": {**read.dropped.files, **refused}}
    count = sum(found["records"].values())
    fit = f"{render.plural(count, 'record')} {'fits' if count == 1 else 'fit'}"
    output.result({"database": name, **found, "dropped": dropped}, f"{fit}, {found['added']} of them new to {name}")
    if not output.as_json():
        if left_out:
            output.note(f"left out: {left_out}")
        _tell_damage(read)
        for file, why in found["refused"].items():
            output.note(f"refused {file}: {why}")
    if not count:
        raise UsageError("nothing of it fits this database", hint="`farm tuning ls` lists the others")


@commands.command()
def merge(database: Annotated[str, Argument(metavar="[DATABASE]", help="One database; default: all.")] = "") -> None:
    """Merge what attempts committed now; the farm does so by itself within minutes."""
    with connect() as client:
        items = client.tuning.all()
        names = [choose(items, database)] if database else [item["name"] for item in _sound(items) if item["waiting"]]
        found = {name: client.tuning.merge(name) for name in names}
    said = [
        f"{name}: {render.plural(merged['deltas'], 'delta')} merged, {merged['records']} records, "
        f"generation {merged['generation']}"
        for name, merged in found.items()
    ]
    output.result(found, said or "nothing to merge")
    for key in (key for merged in found.values() for key in merged["unreadable"] if not output.as_json()):
        output.note(f"cannot be read, and stays: {key}")


@commands.command()
def diff(
    left: Annotated[str, Argument(metavar="LEFT", help="A database, a folder or a file.")],
    right: Annotated[str, Argument(metavar="RIGHT", help="Another.")],
    keys: Annotated[bool, Option("--keys", help="Also list the keys.")] = False,
) -> None:
    """Compare two databases, or one with files of yours, record by record."""
    with connect() as client:
        items = client.tuning.all()
        ours, theirs = (_snapshot(client, items, what) for what in (left, right))
    sides = {"left": _values(ours), "right": _values(theirs)}
    both = sides["left"].keys() & sides["right"].keys()
    found = {
        "only_left": sorted(sides["left"].keys() - both),
        "only_right": sorted(sides["right"].keys() - both),
        "different": sorted(key for key in both if sides["left"][key] != sides["right"][key]),
    }
    equal = len(both) - len(found["different"])
    words = {"only_left": f"only in {left}", "only_right": f"only in {right}", "different": "with another value"}
    said = [f"{equal} equal"]
    for name, listed in found.items():
        said.append(f"{len(listed)} {words[name]}")
        said += [f"  {' '.join(filter(None, place))}" for place in listed if keys]
    output.result({**{name: [list(key) for key in listed] for name, listed in found.items()}, "equal": equal}, said)


@commands.command()
def prune(
    database: Database,
    older_than: Annotated[str, Option(metavar="AGE", help="Records older than this: 90d, 12h.")] = "",
    job: Annotated[str, Option(metavar="JOB", help="Records that this job measured.")] = "",
    everything: Annotated[bool, Option("--all", help="The whole database.")] = False,
    dry_run: Annotated[bool, Option("--dry-run", help="Only say what would go.")] = False,
) -> None:
    """Remove records, so that they are tuned again: by age, by the job that measured them, or all."""
    if everything == bool(older_than or job):
        raise UsageError("choose what to remove", hint="--older-than AGE, --job JOB, or --all")
    try:
        older = parse_duration(older_than) if older_than else None
    except ValueError as error:
        raise UsageError(f"--older-than: {error}") from None
    with connect() as client:
        name = choose(client.tuning.all(), database)
        found = client.tuning.prune(name, older=older, job=job, everything=everything, dry_run=dry_run)
    gone = f"{render.plural(found['pruned'], 'record')} {'would go' if dry_run else 'removed'}"
    output.result({"database": name, **found}, f"{gone}, {found['left']} left in {name}")


# --- how they do it -------------------------------------------------------------------------------------------------


def choose(items: Sequence[TuningDatabaseView], text: str) -> str:
    """Return the only database that matches a text: its whole name, or words that all occur in it."""
    names = [item["name"] for item in items]
    if text in names:
        return text
    words = text.split()
    matching = [name for name in names if all(word in name for word in words)]
    # `quick` means `quick-enforce1` only if there is no `quick`.
    matching = [name for name in matching if name.rpartition("/")[2] in words] or matching
    held = [item["name"] for item in items if item["name"] in matching and _holds(item)]
    for found in (matching, held):
        if len(found) == 1:
            return found[0]
    if not matching:
        raise NotFound(f"no tuning database matches {text!r}", hint="`farm tuning ls` lists them")
    raise UsageError(f"{text!r} matches {len(matching)} tuning databases", hint="\n".join(matching[:10]))


def _sound(items: Sequence[TuningDatabaseView]) -> list[TuningDatabaseView]:
    for item in items:
        if item.get("damaged"):
            output.note(f"left out: {item['name']} is damaged: {item['damaged']}")
    return [item for item in items if not item.get("damaged")]


def _holds(item: TuningDatabaseView) -> bool:
    return bool(item.get("generation") or item.get("waiting") or item.get("damaged"))


def _snapshot(client: FarmClient, items: Sequence[TuningDatabaseView], what: str) -> Snapshot:
    from farm.tuning import exchange
    from farm.tuning.formats import read_files
    from farm.tuning.records import RecordSource

    if Path(what).exists():
        read = read_files([Path(what)], RecordSource(""))
        _tell_damage(read)
        return read.snapshot
    return exchange.read(client.tuning.snapshot(choose(items, what)))


def _values(snapshot: Snapshot) -> dict[tuple[str, str, str], str]:
    return {(str(record.store), record.file, record.key): record.value for record in snapshot}


def _tell_damage(read: Read) -> None:
    for file, where in read.dropped.parts.items():
        if file not in read.dropped.files:
            output.note(f"{file} is damaged ({where}): its complete records are used")


def draw(found: Sequence[TuningStats], folder: Path) -> None:
    """Draw tuning's sums by the end of each day into `operations.svg` and `hours.svg`."""

    def by_day(kind: Literal["known", "tuned", "seconds", "saved"]) -> dict[date, float]:
        sums = defaultdict[date, float](float)
        for day in (day for one in found for day in one["days"]):
            sums[date.fromisoformat(day["date"])] += day[kind]
        return sums

    operations = {"tuned": by_day("tuned"), "taken from the database": by_day("known")}
    (folder / OPERATIONS).write_bytes(totals(title="Operations tuned, in all", y="operations", series=operations))
    spent, saved = by_day("seconds"), by_day("saved")
    # Small figures need a smaller unit: 0.02 hours is hard to read.
    size, unit = (60, "minutes") if max(sum(spent.values()), sum(saved.values())) < 2 * 3600 else (3600, "hours")
    series = {
        name: {day: seconds / size for day, seconds in sums.items()}
        for name, sums in (("spent", spent), ("saved", saved))
    }
    (folder / HOURS).write_bytes(totals(title="Time spent on tuning and saved by it, in all", y=unit, series=series))


def _readme(name: str, snapshot: Snapshot, cache: str) -> str:
    pool, device, mode = name.split("/")
    return f"""\
# What the farm tuned

{len(snapshot)} records of the pool `{pool}`, device `{device}`, mode `{mode}`.

    . ./{ENVIRONMENT}

points MIGraphX (`{cache}`) and MIOpen (this folder) here; compile as usual. Both write into these files: copy the
folder first if others use it too, and give every process a copy of its own. The records are valid for this device and
the toolchain in the pool's name; MIOpen ignores files of another version, MIGraphX does not notice.
If the folder was moved, write its new place into `{ENVIRONMENT}`.
"""
