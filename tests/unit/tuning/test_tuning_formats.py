"""The files of MIGraphX and MIOpen: what is whole in them is read, whatever happened to the rest."""

from __future__ import annotations

import json
import os
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from farm.errors import UsageError
from farm.tuning.exchange import pack, unpack
from farm.tuning.formats import (
    OBJECTS,
    PROBLEM_CACHE,
    canonical,
    check_place,
    check_record,
    miopen_name,
    read_files,
    read_folder,
    write_folder,
)
from farm.tuning.records import Record, RecordSource, RecordStore, Snapshot

SOURCE = RecordSource("2026-01-01T00:00:00+00:00", "worker-1", "job-1")
FIND = "gfx942130.HIP.3_5_1_4dddc24.ufdb.txt"
PERF = "batchnorm_gfx906_60.HIP.3_5_1_4dddc24-dirty.udb.txt"
DEVICE = {"cu_count": 304, "device_name": "AMD Instinct MI300X", "gfx_name": "gfx942", "wavefront_size": 64}
OTHER_DEVICE = {**DEVICE, "gfx_name": "gfx1100"}

# What MIGraphX 6.4 wrote for one convolution and one GEMM, and a problem that it saw and never decided.
MLIR = {"name": "gpu::mlir_op", "problem": "gfx942:sramecc+:xnack-\t304\t8\tconv -F 1 -f GNC01 -I NGC01 -O NGC01"}
GEMM = {"name": "rocblas", "problem": [{"lens": [1, 64], "strides": [64, 1], "type": "half_type", "scale": 1.0}]}
UNDECIDED = {"name": "gpu::mlir_op", "problem": "gfx942\t304\t8\tconv -F 2"}
PLAIN: list[Any] = [[MLIR, "v4:64,16,8,16,16,1,1,1,1"], [UNDECIDED, None], [GEMM, 5]]

same_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)


def write_sqlite(path: Path, rows: list[tuple[Any, Any, Any]]) -> None:
    """As MIGraphX's `sqlite_problem_cache::save` does."""
    with closing(sqlite3.connect(path)) as database, database:
        database.execute(
            "CREATE TABLE IF NOT EXISTS solutions (  device_key  TEXT NOT NULL,  problem_key TEXT NOT NULL,"
            "  solution    TEXT NOT NULL,  PRIMARY KEY (device_key, problem_key)) WITHOUT ROWID;"
        )
        database.executemany(
            "INSERT OR REPLACE INTO solutions(device_key, problem_key, solution) VALUES(?,?,?)",
            [tuple(map(json.dumps, row)) for row in rows],
        )


def values(snapshot: Snapshot) -> dict[str, str]:
    return {record.key: record.value for record in snapshot}


def test_the_problem_cache_of_rocm_6_and_7(tmp_path: Path) -> None:
    (tmp_path / PROBLEM_CACHE).write_text(json.dumps(PLAIN, indent=2))
    read = read_folder(tmp_path, SOURCE)
    assert values(read.snapshot) == {canonical(MLIR): '"v4:64,16,8,16,16,1,1,1,1"', canonical(GEMM): "5"}
    assert (read.dropped.nulls, read.dropped.broken) == (1, 0)
    write_folder(read.snapshot, tmp_path / "copy")
    assert json.loads((tmp_path / "copy" / PROBLEM_CACHE).read_text()) == [PLAIN[0], PLAIN[2]]


def test_the_keyed_problem_cache(tmp_path: Path) -> None:
    document = [[DEVICE, [PLAIN[0], PLAIN[1]]], [OTHER_DEVICE, [PLAIN[2]]]]
    (tmp_path / PROBLEM_CACHE).write_text(json.dumps(document))
    read = read_folder(tmp_path, SOURCE)
    assert {record.file for record in read.snapshot} == {canonical(DEVICE), canonical(OTHER_DEVICE)}
    write_folder(read.snapshot, tmp_path / "copy")
    assert json.loads((tmp_path / "copy" / PROBLEM_CACHE).read_text()) == [
        [DEVICE, [PLAIN[0]]],
        [OTHER_DEVICE, [PLAIN[2]]],
    ]


def test_the_problem_cache_in_sqlite(tmp_path: Path) -> None:
    write_sqlite(tmp_path / "cache.db", [(DEVICE, *PLAIN[0]), (DEVICE, *PLAIN[1]), (OTHER_DEVICE, *PLAIN[2])])
    read = read_files([tmp_path], SOURCE)
    assert (len(read.snapshot), read.dropped.nulls) == (2, 1)
    write_folder(read.snapshot, tmp_path / "copy", problem_cache="again.sqlite")
    assert read_files([tmp_path / "copy"], SOURCE).snapshot == read.snapshot


def test_a_sqlite_file_cannot_run_anything(tmp_path: Path) -> None:
    """A view in the table's place could go on for ever."""
    with closing(sqlite3.connect(tmp_path / "cache.db")) as database, database:
        database.execute(
            "CREATE VIEW solutions AS WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n)"
            " SELECT x AS device_key, x AS problem_key, x AS solution FROM n"
        )
    read = read_files([tmp_path], SOURCE)
    assert len(read.snapshot) == 0
    assert "solutions" in read.dropped.files["cache.db"]


def test_of_a_childs_folder_only_what_it_was_given_is_read(tmp_path: Path) -> None:
    """What a hostile child adds is not parsed: a SQLite file has its journals next to it, which it would bring too."""
    write_sqlite(tmp_path / "cache.db", [(DEVICE, *PLAIN[0])])
    (tmp_path / "other.json").write_text(json.dumps([PLAIN[0]]))
    (tmp_path / PROBLEM_CACHE).write_text(json.dumps([PLAIN[2]]))
    assert len(read_folder(tmp_path, SOURCE).snapshot) == 1


@pytest.mark.parametrize(("limit", "value"), [("LIMIT", 100), ("RECORDS", 2), ("VALUES", 10)])
def test_many_files_of_a_child_take_no_more_than_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, value: int
) -> None:
    """It may leave a hundred thousand, under names of its own."""
    for number in range(5):
        (tmp_path / f"gfx942{number}.HIP.3_5_1.ufdb.txt").write_text("1-2-3=solver:1,2,3,4,5,6;\n")
    monkeypatch.setattr(f"farm.tuning.formats.CHILD_{limit}", value)
    read = read_folder(tmp_path, SOURCE)
    assert 0 < len(read.snapshot) < 5
    assert len(read.snapshot) + len(read.dropped.files) == 5


@pytest.mark.parametrize("name", [PROBLEM_CACHE, *OBJECTS.values(), FIND, PERF])
@pytest.mark.parametrize("shape", ["[],", "k=A:1\n", ";A:1"])
def test_a_crowded_file_of_a_child_is_left_unparsed(
    name: str, shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of its bytes would take fifty in the worker."""
    monkeypatch.setattr("farm.tuning.formats.CHILD_RECORDS", 999)
    monkeypatch.setattr("farm.tuning.formats.CHILD_VALUES", 1999)
    (tmp_path / name).write_text(shape * 1000)
    read = read_folder(tmp_path, SOURCE)
    assert (len(read.snapshot), read.dropped.files) == (0, {name: "it has more records than a compiler writes"})


@pytest.mark.parametrize("how", ["link", "folder", "pipe", "second name"])
def test_nothing_is_written_through_what_a_child_left(how: str, tmp_path: Path) -> None:
    """The tuning files of a slot are written again in a folder in which children write."""
    victim = tmp_path / "profile"
    victim.write_text("the user's")
    made, folder = tmp_path / "made", tmp_path / "tuning"
    made.mkdir()
    (made / PROBLEM_CACHE).write_text(json.dumps([PLAIN[0]]))
    (made / FIND).write_text("k=A:0.5,0,x\n")
    (made / OBJECTS[RecordStore.SLICES]).write_text(json.dumps({"0" * 64: {"operations": 1, "seconds": 1}}))
    snapshot = read_folder(made, SOURCE).snapshot
    folder.mkdir()
    for path in made.iterdir():
        place = folder / path.name
        if how == "link":
            place.symlink_to(victim)
        elif how == "second name":
            place.hardlink_to(victim)
        elif how == "folder":
            (place / "deep").mkdir(parents=True)
        else:
            os.mkfifo(place)
    write_folder(snapshot, folder)
    assert victim.read_text() == "the user's"
    assert read_folder(folder, SOURCE).snapshot == snapshot


def test_a_timing_cache_of_tensorrt_is_kept_as_it_is_and_the_longer_one_stays(tmp_path: Path) -> None:
    name, data = "TensorrtExecutionProvider_cache_sm90.timing", bytes(range(256)) + b"\n;,[{"
    for folder, size in (("long", len(data)), ("short", 100)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_bytes(data[:size])
        (tmp_path / folder / "other.timing").write_bytes(b"?")
    long, short = (read_folder(tmp_path / folder, SOURCE).snapshot for folder in ("long", "short"))
    assert len(long) == len(short) == 1
    assert long.join(short).tables == short.join(long).tables == long.tables
    write_folder(short.join(long), tmp_path / "copy")
    assert (tmp_path / "copy" / name).read_bytes() == data
    [place] = long.tables
    [record] = long
    assert not check_place(place) and not check_record(*record_parts(record))
    assert check_place((RecordStore.TIMING_CACHE, "../x.timing"))
    assert check_record(RecordStore.TIMING_CACHE, "cache", "no base64!")


def record_parts(record: Record) -> tuple[RecordStore, str, str]:
    return record.store, record.key, record.value


def test_find_db_and_perf_db(tmp_path: Path) -> None:
    find = "64-56-56-3x3-64-56-56-1-1x1-1x1-1x1-0-NCHW-FP16-F=ConvA:0.5,0,algo;ConvB:0.2,64,algo\n"
    (tmp_path / FIND).write_text(find)
    (tmp_path / PERF).write_text("k1=ConvA:1,2;ConvB:\nk2=ConvA:3\n")
    (tmp_path / "gfx942130.HIP.fdb.txt").write_text("system=databases:are,not,ours\n")
    (tmp_path / "notes.txt").write_text("neither\n")
    read = read_folder(tmp_path, SOURCE)
    assert {store: count for store, count in read.snapshot.counts().items() if count} == {"find_db": 1, "perf_db": 3}
    write_folder(read.snapshot, tmp_path / "copy")
    assert (tmp_path / "copy" / FIND).read_text() == find
    assert (tmp_path / "copy" / PERF).read_text() == "k1=ConvA:1,2;ConvB:\nk2=ConvA:3\n"
    assert sorted(path.name for path in (tmp_path / "copy").iterdir()) == sorted([FIND, PERF])


def test_of_two_lines_with_one_key_miopen_reads_the_first(tmp_path: Path) -> None:
    (tmp_path / FIND).write_text("k=A:0.5,0,x\nk=A:0.1,0,x\n")
    assert values(read_folder(tmp_path, SOURCE).snapshot) == {"k": "A:0.5,0,x"}


@pytest.mark.parametrize(
    ("line", "kept"),
    [
        (b"k2=A:0.1,0", 1),  # cut: MIOpen ends every line
        (b"\0\0\0\0\n", 1),
        (b"k2=A:0\0.1,0,x\n", 1),
        (b"\xff\xfe=A:1,0,x\n", 1),
        (b"=A:1,0,x\n", 1),
        (b"k2=no solver here\n", 1),
        (b"k2=;:1;A:0.1,0,x\n", 2),
    ],
)
def test_broken_lines_are_dropped_and_counted(line: bytes, kept: int, tmp_path: Path) -> None:
    (tmp_path / FIND).write_bytes(b"k1=A:0.5,0,x\n" + line)
    read = read_folder(tmp_path, SOURCE)
    assert len(read.snapshot) == kept
    assert read.dropped.broken == 2 - kept


def test_an_empty_problem_cache_is_no_damage(tmp_path: Path) -> None:
    (tmp_path / PROBLEM_CACHE).write_bytes(b"")
    read = read_folder(tmp_path, SOURCE)
    assert (len(read.snapshot), read.dropped.broken) == (0, 0)


def test_no_records_make_no_file(tmp_path: Path) -> None:
    """MIGraphX fails on an empty problem cache, and makes one where there is none."""
    write_folder(Snapshot(), tmp_path / "copy")
    assert list((tmp_path / "copy").iterdir()) == []


@same_folder
@given(form=st.sampled_from(["plain", "keyed"]), data=st.data())
def test_a_cut_problem_cache_gives_what_is_whole_in_it(form: str, data: st.DataObject, tmp_path: Path) -> None:
    """Every whole entry, and never one whose solution lost its end (`12` of `123`)."""
    entries = [[{"name": "rocblas", "problem": [{"lens": [number, 1]}]}, 1000000 + number] for number in range(8)]
    text = json.dumps(entries if form == "plain" else [[DEVICE, entries]], indent=data.draw(st.sampled_from([None, 4])))
    cut = data.draw(st.integers(1, len(text) - 1))
    (tmp_path / PROBLEM_CACHE).write_text(text[:cut])
    read = read_folder(tmp_path, SOURCE)
    # An entry is whole once the bracket behind its solution is there.
    ends = [text.index("]", text.index(str(value))) for _, value in entries]
    assert len(read.snapshot) == sum(end < cut for end in ends)
    assert values(read.snapshot).items() <= {canonical(key): canonical(value) for key, value in entries}.items()
    assert read.dropped.broken == 1


@same_folder
@given(data=st.data())
def test_nulls_in_a_file_cost_only_what_they_hit(data: st.DataObject, tmp_path: Path) -> None:
    entries = [[{"name": "rocblas", "problem": number}, "solution"] for number in range(8)]
    text = bytearray(json.dumps(entries).encode())
    start = data.draw(st.integers(0, len(text) - 1))
    length = data.draw(st.integers(1, 30))
    text[start : start + length] = bytes(len(text[start : start + length]))
    (tmp_path / PROBLEM_CACHE).write_bytes(text)
    read = read_folder(tmp_path, SOURCE)
    # The shortest entry has more than 30 bytes, so a hole hits two at most.
    assert len(read.snapshot) >= 6
    assert values(read.snapshot).items() <= {canonical(key): '"solution"' for key, _ in entries}.items()


@same_folder
@given(data=st.binary(max_size=200))
def test_no_bytes_are_an_error(data: bytes, tmp_path: Path) -> None:
    for name in (PROBLEM_CACHE, FIND, PERF, "cache.db"):
        (tmp_path / name).write_bytes(data)
    read_folder(tmp_path, SOURCE)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("a\tb\n@@\tend", {"operations": 1, "seconds": 1.0}),
        ("0" * 64, 5),
        ("0" * 64, {"seconds": 1.0}),
        ("0" * 64, {"operations": "1", "seconds": 1.0}),
        ("0" * 64, {"operations": 10**400, "seconds": 1.0}),
    ],
)
def test_what_is_no_slice_of_ours_is_dropped_and_counted(key: str, value: object, tmp_path: Path) -> None:
    """Every attempt that tunes reads them all, and a tab or a newline would cut the delta that they are stored in."""
    good = {"1" * 64: {"operations": 2, "seconds": 0.5}}
    (tmp_path / "slices.json").write_text(json.dumps({key: value, **good}))
    read = read_folder(tmp_path, SOURCE)
    assert values(unpack(pack(read.snapshot))) == {name: canonical(slice_) for name, slice_ in good.items()}
    assert read.dropped.broken == 1


@pytest.mark.parametrize("text", ['["ab"]', "[[1,2]]", "[[null,1]]", '[[{"name":1},2,3]]', '{"a":1}', "7"])
def test_no_document_is_an_error(text: str, tmp_path: Path) -> None:
    (tmp_path / PROBLEM_CACHE).write_text(text)
    read = read_folder(tmp_path, SOURCE)
    assert (len(read.snapshot), read.dropped.broken) == (0, 1)
    assert "nothing in it is a whole entry" in read.dropped.files[PROBLEM_CACHE]


def test_a_hostile_depth_is_no_error(tmp_path: Path) -> None:
    (tmp_path / PROBLEM_CACHE).write_text("[" * 200_000)
    assert len(read_folder(tmp_path, SOURCE).snapshot) == 0


@pytest.mark.parametrize(
    ("name", "base", "version"),
    [
        (FIND, "gfx942130", "HIP.3_5_1_4dddc24"),
        (PERF, "gfx906_60", "HIP.3_5_1_4dddc24-dirty"),
        ("gfx90a68.HIP.2_16_0_.ufdb.txt", "gfx90a68", "HIP.2_16_0_"),
        ("gfx90a_sramecc_noxnack68.HIP.3_0_0_abc.udb.txt", "gfx90a_sramecc_noxnack68", "HIP.3_0_0_abc"),
    ],
)
def test_names_of_miopen(name: str, base: str, version: str) -> None:
    named = miopen_name(name)
    assert named is not None
    assert (named.base, named.version) == (base, version)


@pytest.mark.parametrize("name", ["../x.ufdb.txt", "a/b.udb.txt", "gfx942130.HIP.fdb.txt", "x.udb", ".udb.txt"])
def test_what_is_no_name_of_miopen(name: str) -> None:
    assert miopen_name(name) is None


def test_a_file_that_is_no_database_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"x")
    with pytest.raises(UsageError, match=r"model\.onnx is not a tuning database"):
        read_files([tmp_path / "model.onnx"], SOURCE)
    with pytest.raises(UsageError, match=r"there is no .*gone\.json"):
        read_files([tmp_path / "gone.json"], SOURCE)


@pytest.mark.parametrize("store", [RecordStore.TIMING_CACHE, RecordStore.FIND_DB])
@pytest.mark.parametrize("name", ["{outside}/made", "../made", "", "made"])
def test_a_snapshot_names_no_file_but_a_compilers(tmp_path: Path, store: RecordStore, name: str) -> None:
    """Every worker writes some, and `farm tuning export` takes a farm's: each reader makes files of these names."""
    file = name.format(outside=tmp_path)
    source = RecordSource("2026-11-26T00:00:00+00:00", "w1", "j-1", "t")
    packed = pack(Snapshot({(store, file): {"cache": ("AAAA", source)}}))
    with pytest.raises(UsageError, match="does not name a"):
        write_folder(unpack(packed), tmp_path / "data" / "tuning")
    assert not list(tmp_path.iterdir())
