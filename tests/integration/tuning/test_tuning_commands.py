"""`farm tuning …` over a real farm: what a user brings, sees, and takes with him."""

from __future__ import annotations

import gzip
import json
import re
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from farm.api import tuning_routes
from farm.app import Farm
from farm.cli import main
from farm.control.loops import merge_tuning
from farm.errors import ExitCode
from farm.spec import Device
from farm.targets.pools import Pool, Target
from farm.tuning.database import MERGE_COUNT, TuningDatabase, device_name
from farm.tuning.records import Record, RecordSource, RecordStore, Snapshot
from tests.support.api_farm import POOL, commands
from tests.support.gpu_programs import CODE_OBJECTS
from tests.support.tuning_writers import delta, restore

GPU = Pool(Target("migraphx", "gfx942"), "rocm7.2-migraphx2.15-1a2b3c4d", Device("gfx942:sramecc+:xnack-", 304, 8), 1)
QUICK = f"{GPU.name}/{device_name(GPU.device)}/quick"
FIND = "gfx942130.HIP.3_5_1_4dddc24.ufdb.txt"
LINE = "576-4-4-1x1-192-4-4-8-1x1-2x2-3x3-0-NCHW-FP32-F=ConvA:0.5,0,algo;ConvB:0.2,64,algo\n"
MIOPEN = CODE_OBJECTS / "miopen"
CONV = {"name": "gpu::mlir_op", "problem": "gfx942:sramecc+:xnack-\t304\t8\tconv -F 1"}


@pytest.fixture(autouse=True)
def _commands_find_the_farm(farm: Farm, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    farm.store.workers.register(
        {"id": "w2", "node": "n2", "pid": 1, "host": "n2", "slots": 1, "pools": [GPU.as_dict()]}, ttl=600
    )
    with commands(farm, url, tmp_path, monkeypatch):
        yield


@pytest.fixture
def database(farm: Farm) -> TuningDatabase:
    return TuningDatabase(farm.artifacts, "main", *QUICK.split("/"))


def own_folder(folder: Path) -> Path:
    """What a user's ~/.config/miopen and problem cache look like after years."""
    folder.mkdir()
    (folder / FIND).write_text(LINE + "cut=Con")
    (folder / "gfx1030_36.HIP.3_5_1_4dddc24.ufdb.txt").write_text(LINE)
    (folder / "gfx942130.ukdb").write_bytes(b"SQLite format 3")
    (folder / "cache.json").write_text(json.dumps([[CONV, "v4:64,16"], [{**CONV, "problem": "x"}, None]]))
    return folder


def said(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["tuning", *arguments]) == 0
    return capsys.readouterr().out


def test_what_a_user_brings_is_there_for_everybody_and_comes_back_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = own_folder(tmp_path / "own")
    assert main(["tuning", "import", "gfx942 quick", str(own)]) == 0
    out, err = capsys.readouterr()
    assert out == f"2 records fit, 2 of them new to {QUICK}\n"
    assert "left out: 1 never decided, 1 broken" in err
    assert f"{FIND} is damaged (line 2 has no end): its complete records are used" in err
    assert "own/gfx1030_36.HIP.3_5_1_4dddc24.ufdb.txt: it is not of gfx942" in err
    assert "refused gfx942130.ukdb: kernel binaries are not tuning" in err
    assert "0 of them new" in said(["import", "gfx942 quick", str(own)], capsys)

    assert said(["export", "gfx942 quick", "-o", "mine"], capsys).startswith(f"2 records of {QUICK}")
    assert (tmp_path / "mine" / FIND).read_text() == LINE
    shell = ". mine/tuning.env; ls $MIOPEN_USER_DB_PATH; cat $MIGRAPHX_PROBLEM_CACHE"
    listed = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, check=True).stdout
    assert FIND in listed
    assert json.loads(listed[listed.index("[") :]) == [[CONV, "v4:64,16"]]
    assert GPU.toolchain in (tmp_path / "mine" / "README.md").read_text()


def test_what_was_measured_elsewhere_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = own_folder(tmp_path / "own")
    (own / "gfx942130.HIP.3_4_0_0f1e2d3.udb.txt").write_text("k=A:1\n")
    assert main(["tuning", "import", QUICK, str(own / FIND), str(own), "--miopen", "HIP.3_5_1_4dddc24"]) == 0
    assert (
        "3_4_0_0f1e2d3.udb.txt: it is of MIOpen HIP.3_4_0_0f1e2d3, not of HIP.3_5_1_4dddc24" in capsys.readouterr().err
    )
    (tmp_path / "other.json").write_text(json.dumps([[{**CONV, "problem": "gfx90a\t104\t1\tconv"}, "v4:1"]]))
    assert main(["tuning", "import", QUICK, "other.json"]) == 2
    err = capsys.readouterr().err
    assert "refused other.json: it is of gfx90a with 104 compute units" in err
    assert "nothing of it fits this database" in err
    # An MI308X has the same architecture.
    (tmp_path / "gfx94250.HIP.3_5_1_4dddc24.ufdb.txt").write_text(LINE)
    assert main(["tuning", "import", QUICK, "gfx94250.HIP.3_5_1_4dddc24.ufdb.txt"]) == 2
    assert "it is of gfx942 with 80 compute units, not 304" in capsys.readouterr().err
    assert main(["tuning", "import", QUICK, "nowhere"]) == 2
    assert "there is no nowhere" in capsys.readouterr().err


def test_a_database_takes_no_more_than_its_readers_can_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A request of a megabyte brings half a million records, which the control plane reads to merge them."""
    own = own_folder(tmp_path / "own")
    said(["import", QUICK, str(own)], capsys)
    monkeypatch.setattr(tuning_routes.records, "LARGEST_DATABASE", 100)
    assert main(["tuning", "import", QUICK, str(own)]) == 2
    assert f"{QUICK} is full" in capsys.readouterr().err


def test_an_enforcement_s_database_takes_imports_once_it_is_there(
    farm: Farm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = own_folder(tmp_path / "own")
    enforced = TuningDatabase(farm.artifacts, "main", *f"{QUICK}-enforce1".split("/"))
    enforced.commit(delta(1))
    assert said(["stats", "enforce1"], capsys).startswith(enforced.name)
    assert "2 records fit" in said(["import", enforced.name, str(own)], capsys)
    (tmp_path / "gfx942130.ufdb.txt").write_text(LINE)
    assert main(["tuning", "import", enforced.name, "gfx942130.ufdb.txt"]) == 2
    assert "refused gfx942130.ufdb.txt: its name has no version of MIOpen" in capsys.readouterr().err
    said(["import", "gfx942 quick", str(own)], capsys)
    assert said(["stats", "gfx942 quick"], capsys).startswith(f"{QUICK}\n"), "by words, too, the one of the mode alone"


def test_what_miopen_itself_wrote_goes_in_and_comes_out_whole(
    farm: Farm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Genuine files of MIOpen 3.4 for gfx90a with 104 units, of two runs of one search: what is known already stays."""

    def parts(folder: Path, name: str) -> list[str]:
        return sorted(re.split("[=;]", (folder / name).read_text().removesuffix("\n")))

    arch, wanted = "gfx90a:sramecc+:xnack-", "gfx90a quick"
    card = Pool(Target("migraphx", "gfx90a"), "rocm7.1-migraphx2.14-1a2b3c4d", Device(arch, 104, 1), 1)
    other = Pool(Target("migraphx", "gfx90a"), "rocm7.1-migraphx2.14-1a2b3c4d", Device(arch, 110, 1), 1)
    worker = {"id": "w3", "node": "n3", "pid": 1, "host": "n3", "slots": 1, "pools": [card.as_dict()]}
    farm.store.workers.register(worker, ttl=600)
    assert main(["tuning", "import", wanted, str(MIOPEN)]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("3 records fit, 3 of them new to ")
    assert "refused gfx90a68.ukdb: kernel binaries are not tuning" in err
    assert "2 records fit, 0 of them new" in said(["import", wanted, str(MIOPEN / "again")], capsys)
    said(["export", wanted, "-o", "mine"], capsys)
    for name in ("gfx90a68.HIP.3_4_0_.udb.txt", "gfx90a68.HIP.3_4_0_.ufdb.txt"):
        assert parts(tmp_path / "mine", name) == parts(MIOPEN, name)
    farm.store.workers.register({**worker, "pools": [other.as_dict()]}, ttl=600)
    assert main(["tuning", "import", f"{other.name}/{device_name(other.device)}/quick", str(MIOPEN)]) == 2
    assert "it is of gfx90a with 104 compute units, not 110" in capsys.readouterr().err


def test_a_radeon_s_compute_units_may_be_counted_by_twos(
    farm: Farm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """HIP tells MIOpen and MIGraphX of 48 work group processors; rocminfo of 96 compute units."""
    pool = replace(GPU, target=Target("migraphx", "gfx1100"), device=Device("gfx1100", 96))
    worker = {"id": "w3", "node": "n3", "pid": 1, "host": "n3", "slots": 1, "pools": [pool.as_dict()]}
    farm.store.workers.register(worker, ttl=600)
    (tmp_path / "cache.json").write_text(json.dumps([[{**CONV, "problem": "gfx1100\t48\t1\tconv -F 1"}, "v4:64"]]))
    (tmp_path / "gfx1100_48.HIP.3_5_1_4dddc24.ufdb.txt").write_text(LINE)
    assert "2 records fit" in said(
        ["import", "gfx1100 quick", "cache.json", "gfx1100_48.HIP.3_5_1_4dddc24.ufdb.txt"], capsys
    )
    (tmp_path / "other.json").write_text(json.dumps([[{**CONV, "problem": "gfx1100\t42\t1\tconv -F 1"}, "v4:64"]]))
    assert main(["tuning", "import", "gfx1100 quick", "other.json"]) == 2
    assert "it is of gfx1100 with 42 compute units" in capsys.readouterr().err


def test_of_several_versions_nothing_is_taken_until_one_is_chosen(
    database: TuningDatabase, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What jobs of the pool wrote shows which its MIOpen is; what was imported by mistake does not stop that."""
    own = own_folder(tmp_path / "own")
    older = "gfx942130.HIP.3_4_0_0f1e2d3.ufdb.txt"
    (own / older).write_text(LINE)
    assert main(["tuning", "import", QUICK, str(own)]) == 2
    err = capsys.readouterr().err
    assert "choose one with --miopen, of HIP.3_4_0_0f1e2d3, HIP.3_5_1_4dddc24" in err
    assert main(["tuning", "import", QUICK, str(own), "--miopen", "3.5.1"]) == 2
    assert "no file is of MIOpen 3.5.1" in capsys.readouterr().err
    assert not database.exists()
    assert main(["tuning", "import", QUICK, str(own / older)]) == 0
    assert main(["tuning", "import", QUICK, str(own / FIND)]) == 2
    assert main(["tuning", "import", QUICK, str(own / FIND), "--miopen", "HIP.3_5_1_4dddc24"]) == 0
    measured = Record(
        RecordStore.FIND_DB, FIND, "k", "ConvA:1,0,a", RecordSource("2026-11-20T00:00:00+00:00", "w", "job-1")
    )
    database.commit(Snapshot.of([measured]))
    assert main(["tuning", "import", QUICK, str(own / FIND)]) == 0
    assert main(["tuning", "import", QUICK, str(own / older)]) == 2


@pytest.mark.parametrize(
    ("version", "read"), [("2.15", ["old.json"]), ("2.16", ["old.json", "new.json"]), ("2.17", ["new.json"])]
)
def test_a_problem_cache_of_the_other_form_is_refused(
    farm: Farm, tmp_path: Path, capsys: pytest.CaptureFixture[str], version: str, read: list[str]
) -> None:
    """A toolchain reads one form: records of the other would keep those of its own from being written.

    Which one, MIGraphX's version says; 2.16 was the number both before and after the change, so a job has to show it.
    """
    pool = replace(GPU, toolchain=f"rocm7.9-migraphx{version}-1a2b3c4d")
    farm.store.workers.register(
        {"id": "w3", "node": "n3", "pid": 1, "host": "n3", "slots": 1, "pools": [pool.as_dict()]}, ttl=600
    )
    database = TuningDatabase(farm.artifacts, "main", pool.name, device_name(pool.device), "quick")
    device = {"cu_count": 304, "device_name": "MI300X", "gfx_name": GPU.device.arch, "wavefront_size": 64}
    (tmp_path / "old.json").write_text(json.dumps([[CONV, "v4:64"]]))
    (tmp_path / "new.json").write_text(json.dumps([[device, [[CONV, "v4:32"]]]]))
    if len(read) > 1:
        assert main(["tuning", "import", database.name, "old.json", "new.json"]) == 2
        assert re.findall("refused (.*): it is .* let a job tune there first", capsys.readouterr().err) == read
        assert not database.exists()
        key = json.dumps({**CONV, "problem": CONV["problem"] + "0"}, sort_keys=True, separators=(",", ":"))
        source = RecordSource("2026-11-20T00:00:00+00:00", "w3", "job-1", pool.toolchain)
        database.commit(Snapshot.of([Record(RecordStore.PROBLEM_CACHE, "", key, '"v4:16"', source)]))
    assert main(["tuning", "import", database.name, read[0]]) == 0
    other = next(name for name in ("new.json", "old.json") if name != read[0])
    assert main(["tuning", "import", database.name, other]) == 2
    assert f"refused {other}: it is " in capsys.readouterr().err
    restore(database, tmp_path / "restored")
    restored = json.loads((tmp_path / "restored" / "problem_cache.json").read_text())
    assert json.loads((tmp_path / read[0]).read_text())[0] in restored
    assert len(restored) == len(read), "what the job tuned too"


def test_ls_stats_merge_and_pictures(
    farm: Farm, database: TuningDatabase, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in (1, 2):
        database.commit(delta(number))
    header, *lines = said(["ls"], capsys).splitlines()
    assert header.endswith("NOT MERGED")
    assert next(line for line in lines if line.startswith(QUICK)).endswith("  2 deltas")
    assert "2 deltas merged, 5 records, generation 1" in said(["merge"], capsys)
    assert said(["merge"], capsys) == "nothing to merge\n"
    assert "5 records" in said(["ls"], capsys)
    out = said(["stats", "quick gfx942", "--pictures", "pictures"], capsys)
    assert "5 problem_cache" in out
    assert "2 sessions: operations 0 from the database, 6 tuned, 0 not tunable" in out
    assert b"<svg" in (tmp_path / "pictures" / "operations.svg").read_bytes()
    assert b"minutes" in (tmp_path / "pictures" / "hours.svg").read_bytes()
    assert main(["tuning", "stats", "gfx942 full", "--pictures", "none"]) == ExitCode.NOTHING_MATCHED


def test_what_no_other_program_reads_is_not_exported(
    database: TuningDatabase, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """ONNX Runtime's jobs leave figures of the farm's own, and their sessions."""
    record = Record(
        RecordStore.SLICES, "", "0" * 64, '{"operations":1,"seconds":1.0}', RecordSource("2026-11-20T00:00:00+00:00")
    )
    database.commit(Snapshot.of([record], delta(1).log))
    assert main(["tuning", "export", QUICK, "-o", "out"]) == ExitCode.NOTHING_MATCHED
    assert "has nothing that MIGraphX or MIOpen could read" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_control_plane_merges_by_itself(farm: Farm, database: TuningDatabase) -> None:
    database.commit(delta(1))
    assert merge_tuning(farm.artifacts) == 1
    assert database.waiting() == []
    assert merge_tuning(farm.artifacts) == 0


def test_diff_and_prune(database: TuningDatabase, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    database.commit(delta(1))
    said(["export", QUICK, "-o", "before"], capsys)
    database.commit(delta(2))
    found = json.loads(said(["diff", "before", QUICK, "--json"], capsys))
    assert (found["equal"], len(found["only_left"]), len(found["only_right"]), len(found["different"])) == (3, 0, 2, 0)
    assert "own-2-1" in said(["diff", "before", QUICK, "--keys"], capsys)

    assert said(["prune", QUICK, "--job", "job-2", "--dry-run"], capsys) == f"2 records would go, 3 left in {QUICK}\n"
    assert said(["prune", QUICK, "--job", "job-2"], capsys) == f"2 records removed, 3 left in {QUICK}\n"
    assert main(["tuning", "prune", QUICK]) == 2
    assert main(["tuning", "prune", QUICK, "--older-than", "soon"]) == 2
    assert main(["tuning", "prune", QUICK, "--older-than", "999999999d"]) == 2, "the calendar has no such day"
    said(["prune", QUICK, "--older-than", "30d"], capsys)
    said(["prune", QUICK, "--all"], capsys)
    assert (database.head(), database.waiting()) == (None, [])


def test_a_name_must_mean_one_database(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tuning", "export", "gfx942", "-o", "out"]) == 2
    assert f"'gfx942' matches 3 tuning databases\n  {GPU.name}" in capsys.readouterr().err
    assert main(["tuning", "export", "gfx1100", "-o", "out"]) == 4
    assert main(["tuning", "export", QUICK, "-o", "out"]) == 4
    assert f"{QUICK} holds nothing yet" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    (tmp_path / "model.onnx").write_bytes(b"x")
    assert main(["tuning", "import", QUICK, "model.onnx"]) == 2
    assert "model.onnx is not a tuning database" in capsys.readouterr().err


def test_only_databases_that_a_pool_can_have_are_listed(farm: Farm, capsys: pytest.CaptureFixture[str]) -> None:
    """An untuned pool has none, and what ONNX Runtime learns is of one family of CPUs."""
    cpu = Device("cpu")
    others = [
        Pool(Target("onnxruntime", "cpu"), "onnxruntime1.31.1-00000000", cpu, 1, cpu_family="x86-64-v3"),
        Pool(Target("migraphx", "ref"), GPU.toolchain, cpu, 1),
        replace(GPU, toolchain="rocm7.2-migraphx2.15-cross-1a2b3c4d", untuned=True),
    ]
    worker = {"id": "w3", "node": "n3", "slots": 1, "pools": [pool.as_dict() for pool in others]}
    farm.store.workers.register(worker, ttl=600)
    listed = [line.split()[0] for line in said(["ls"], capsys).splitlines()[1:]]
    expected = [f"{GPU.name}/{device_name(GPU.device)}/{mode}" for mode in ("exhaustive", "full", "quick")]
    expected += [f"{others[0].stem}/cpu-x86-64-v3/{mode}" for mode in ("exhaustive", "quick")]
    assert [name for name in listed if not name.startswith(POOL.name)] == expected
    Path("cache.json").write_text(json.dumps([[CONV, "v4:1"]]))
    assert main(["tuning", "import", f"{others[0].stem}/cpu-x86-64-v3/full", "cache.json"]) == ExitCode.NOTHING_MATCHED


HEADS: dict[str, Callable[[Farm, dict[str, Any]], dict[str, Any]]] = {
    "head of a newer farm": lambda farm, head: {**head, "schema": 2},
    "names no blob": lambda farm, head: {**head, "snapshot": "../head.json"},
    "snapshot is gone": lambda farm, head: {**head, "snapshot": "0" * 64},
    "snapshot of a newer farm": lambda farm, head: {**head, **newer(farm, head["snapshot"])},
}


def newer(farm: Farm, digest: str) -> dict[str, Any]:
    """Write the snapshot as a farm with another schema would."""
    text = gzip.decompress(farm.artifacts.read_blob(digest, 1 << 20)).replace(b'"schema": 1', b'"schema": 2')
    digest, size = farm.artifacts.put_blob_bytes(gzip.compress(text))
    return {"snapshot": digest, "size": size}


@pytest.mark.parametrize("how", HEADS)
def test_one_damaged_database_is_reported_and_keeps_no_other(
    farm: Farm, database: TuningDatabase, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """What cannot be read is not written over: a farm that can may come back."""
    database.commit(delta(1))
    database.merge()
    place = f"ns/main/tuning/{QUICK}/head.json"
    found = farm.artifacts.get_object(place)
    assert found
    damaged = json.dumps(HEADS[how](farm, json.loads(found.data))).encode()
    farm.artifacts.put_object(place, damaged)
    for number in range(MERGE_COUNT):
        database.commit(delta(number))
    # Databases are looked at in the order of their names: one before this, and one after.
    others = [TuningDatabase(farm.artifacts, "main", GPU.name, device_name(GPU.device), mode) for mode in ("a", "z")]
    for other in others:
        other.commit(delta(1))

    assert merge_tuning(farm.artifacts) == 2
    assert [len(other.waiting()) for other in others] == [0, 0]
    assert len(database.waiting()) == MERGE_COUNT
    left = farm.artifacts.get_object(place)
    assert left and left.data == damaged

    assert main(["tuning", "ls"]) == 0
    out, err = capsys.readouterr()
    assert re.search(rf"{re.escape(QUICK)} +damaged", out)
    assert f"{QUICK} is damaged: the " in err and "cannot be read" in err
    for other in others:
        other.commit(delta(2))
    assert said(["merge"], capsys).count("1 delta merged") == 2
    assert said(["stats"], capsys).count("sessions") == 2


def test_a_damaged_database_is_listed_and_can_be_started_again(
    farm: Farm, database: TuningDatabase, capsys: pytest.CaptureFixture[str]
) -> None:
    farm.artifacts.put_object(f"ns/main/tuning/{QUICK}/head.json", b"{}")
    assert re.search(rf"{re.escape(QUICK)} +damaged", said(["ls"], capsys))
    assert main(["tuning", "prune", "gfx942 quick", "--job", "j-1"]) == ExitCode.ARTIFACT_GONE
    assert f"`farm tuning prune {QUICK} --all`" in capsys.readouterr().err
    assert "0 left" in said(["prune", QUICK, "--all"], capsys)
    assert "0 records" in said(["ls"], capsys)
    assert database.head() is None
