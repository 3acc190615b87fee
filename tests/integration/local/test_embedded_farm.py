"""The embedded farm: up with nothing but a folder, shared by who comes second, gone with who came first."""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import pytest
from structlog.testing import capture_logs

from farm.artifacts.s3 import S3Store
from farm.cli import main
from farm.client.client import FarmClient
from farm.errors import FarmFault, NotAllowed, StoreUnavailable, UsageError
from farm.local.embedded import EmbeddedFarm, _credentials
from farm.local.servers import own_data_folder, write_private
from farm.settings import Settings, load_settings
from tests.support.embedded_farms import Run, ask, bearer, none_runs, processes_of, settings_for
from tests.support.farm_command import command
from tests.support.helpers import wait_until
from tests.support.neighbours import as_neighbour, needs_root


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One data folder for the whole story: what each chapter leaves is what the next one finds."""
    folder = tmp_path_factory.mktemp("farm")
    as_in_a_clone(folder)
    return folder


def as_in_a_clone(folder: Path) -> None:
    """Write credentials that who made the folder knows, with the rights that files of a clone have."""
    known = dict.fromkeys(("redis_password", "s3_access_key", "s3_secret_key", "api_token"), "known")
    folder.chmod(0o755)
    for name in ("credentials.json", "farm.json"):
        (folder / name).write_text(json.dumps(known | {"api_url": "http://127.0.0.1:9"}))


@pytest.fixture(scope="module")
def impatient() -> list[Run]:
    """The process that wants the same farm while the first one still starts it."""
    return []


@pytest.fixture(scope="module")
def first(folder: Path, impatient: list[Run]) -> Iterator[tuple[EmbeddedFarm, Settings]]:
    def say(words: str) -> None:
        if words == "starting Valkey":
            impatient.append(Run(folder))

    farm = EmbeddedFarm(settings_for(folder), say=say)
    with farm as settings:
        yield farm, settings
        # The farm does not stop before they have left, also if a chapter failed that should have seen them leave.
        for run in impatient:
            run.kill()


def test_it_comes_up_with_nothing_but_a_folder(first: tuple[EmbeddedFarm, Settings], folder: Path) -> None:
    """It takes work: the API answers, a worker is registered. Secrets are its owner's alone."""
    farm, settings = first
    assert not farm.joined
    assert ask(settings, "/v1/workers")["items"]
    S3Store.from_settings(settings).check()
    assert httpx.get(settings.api_url + "/v1/workers", timeout=60).status_code == 401
    for name in ("farm.json", "credentials.json", "valkey/valkey.conf"):
        assert (folder / name).stat().st_mode & 0o077 == 0
    assert {path.name for path in (folder / "logs").iterdir()} == {
        "server.log",
        "valkey.log",
        "weed.log",
        "worker.log",
    }


def test_a_farm_in_a_folder_that_came_with_a_clone_has_credentials_of_its_own(
    first: tuple[EmbeddedFarm, Settings], folder: Path
) -> None:
    _, settings = first
    assert folder.stat().st_mode & 0o777 == 0o700
    written = (folder / "farm.json").read_text() + (folder / "credentials.json").read_text()
    assert "known" not in written and settings.api_token.get_secret_value() in written


@needs_root
def test_another_user_of_the_machine_reads_and_reaches_nothing(
    first: tuple[EmbeddedFarm, Settings], folder: Path
) -> None:
    """No file, no socket, and no port that answers more than that it wants a key."""
    farm, settings = first
    modes = {folder: folder.lstat().st_mode}
    for place, folders, files in os.walk(folder):
        for path in (Path(place, name) for name in folders + files):
            with suppress(FileNotFoundError):  # of a child that ended meanwhile
                modes[path] = path.lstat().st_mode
    assert len(modes) > 10
    # SeaweedFS opens that one file of a volume by itself, in folders that are closed.
    is_open = [path for path, mode in modes.items() if mode & 0o077 and not stat.S_ISLNK(mode)]
    assert [str(path) for path in is_open if path.suffix != ".vif"] == []
    connections = []
    for process in processes_of(farm):
        with suppress(psutil.NoSuchProcess):  # a child that ended meanwhile
            connections += process.net_connections("all")
    ports = sorted({each.laddr.port for each in connections if each.status == "LISTEN"})
    assert len(ports) >= 5, "Valkey, the API, and the parts of SeaweedFS"
    sockets = sorted({str(each.laddr) for each in connections if each.family == socket.AF_UNIX and each.laddr})
    read, reached, written = as_neighbour(
        lambda: (
            [name for name in (".", "farm.json", "credentials.json", "logs", "s3") if readable(name)],
            [path for path in sockets if connects(path)],
            [answer for port in ports for answer in without_a_key(port)],
        ),
        within=folder,
    )
    assert (read, reached) == ([], [])
    assert as_neighbour(lambda: readable("."), within=Path("/")), "what is open, he does read"
    known = json.loads((folder / "credentials.json").read_text())
    assert [answer for answer in written for secret in known.values() if secret in answer] == []
    assert [answer for answer in written if not re.search(REFUSED, answer, re.IGNORECASE)] == []
    assert ask(settings, "/v1/workers")["items"], "it goes on"


REFUSED = (
    r"^(-NOAUTH|-DENIED|HTTP/1\.[01] (40[0-9]|411|415|501)|$)"
    # A page of sizes and addresses: SeaweedFS' own, which nothing turns off.
    r"|^HTTP/1\.1 200 OK .*<title>SeaweedFS"
)


def readable(name: str) -> bool:
    try:
        return bool(list(Path(name).iterdir()) if Path(name).is_dir() else Path(name).read_bytes())
    except PermissionError:
        return False


def connects(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        try:
            client.connect(path)
        except OSError:
            return False
        return True


def without_a_key(port: int) -> Iterator[str]:
    """What a port answers to who has no key, in the languages that are spoken here; its first bytes, on one line."""
    for text in (
        "PING\r\n", "CONFIG GET *\r\n", "EVAL 'return 1' 0\r\n", "KEYS *\r\n",
        "GET / HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n",
        "GET /v1/tokens HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n",
        "POST /v1/tokens HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}",
        "PUT /farm/x HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1\r\nConnection: close\r\n\r\nx",
        "GET /farm/?list-type=2 HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n",
    ):  # fmt: skip
        answer = b""
        with socket.create_connection(("127.0.0.1", port), timeout=60) as client, suppress(OSError):
            client.sendall(text.encode())
            client.shutdown(socket.SHUT_WR)
            while len(answer) < 4000 and (part := client.recv(4000)):
                answer += part
        yield f"{' '.join(answer.decode(errors='replace').split())}"


def test_its_worker_has_no_token_of_the_api(first: tuple[EmbeddedFarm, Settings]) -> None:
    """It starts compilers of strangers: what leads one of them to its environment leads to no administrator."""
    farm, settings = first
    (worker,) = (psutil.Process(server.pid) for server in farm._servers if server.name == "worker")
    held: dict[int, dict[str, str]] = {}

    def celery_runs() -> bool:
        """Whether it does by now, with the environment of all that were looked at on the way."""
        commands: list[str] = []
        for process in (worker, *worker.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):  # one that asked for an engine's version ends at any time
                held[process.pid] = process.environ()
                commands += process.cmdline()
        return "tasks" in commands

    wait_until(celery_runs)
    token = settings.api_token.get_secret_value()
    assert token
    assert worker.pid in held
    assert [pid for pid, environ in held.items() if token in " ".join(environ.values())] == []
    assert {environ["FARM_API_TOKEN"] for environ in held.values() if "FARM_API_TOKEN" in environ} == {""}


def test_a_second_process_joins_the_first(first: tuple[EmbeddedFarm, Settings], impatient: list[Run]) -> None:
    """Also if it comes while the first one starts. It leaves without taking anything with it."""
    _, settings = first
    (second,) = impatient
    assert second.wait_until_up() == settings.api_url
    assert second.processes == []
    second.leave()
    assert ask(settings, "/v1/workers")["items"]


def test_a_worker_that_was_drained_is_started_again_and_did_not_die(first: tuple[EmbeddedFarm, Settings]) -> None:
    farm, settings = first
    worker = next(server for server in farm._servers if server.name == "worker")
    pid = worker.pid
    name = wait_until(
        lambda: next((one["id"] for one in ask(settings, "/v1/workers")["items"] if one["pid"] == pid), ""), timeout=60
    )
    with capture_logs() as logs:
        httpx.post(
            f"{settings.api_url}/v1/workers/{name}/drain", headers=bearer(settings), timeout=60
        ).raise_for_status()
        wait_until(lambda: worker.pid not in (None, pid), timeout=60)
    (line,) = (line for line in logs if line.get("part") == "worker")
    assert (line["log_level"], line["event"]) == ("info", "embedded process ended, starting it again")


def test_the_first_does_not_stop_under_the_second(
    first: tuple[EmbeddedFarm, Settings], folder: Path, impatient: list[Run]
) -> None:
    """It waits until the second has left, and then leaves nothing running. With this the story ends."""
    farm, settings = first
    # The worker of the chapter before may still be starting.
    wait_until(lambda: ask(settings, "/v1/workers")["items"], timeout=60)
    processes = processes_of(farm)
    assert processes
    for run in impatient:
        run.kill()
    second = Run(folder)
    impatient.append(second)
    assert second.wait_until_up() == settings.api_url
    assert not second.processes
    stopping = threading.Thread(target=farm.stop)
    stopping.start()
    stopping.join(2)
    assert stopping.is_alive()
    written = json.loads((folder / "farm.json").read_text())
    assert ask(settings_for(folder, **written), "/v1/workers")["items"]

    second.leave()
    stopping.join(60)
    assert not stopping.is_alive()
    assert none_runs(processes)


def test_only_what_the_settings_do_not_name_is_started(settings: Settings) -> None:
    """Here Redis and S3 are the operator's."""
    farm = EmbeddedFarm(settings.model_copy(update={"cpu_slots": 1}))
    with farm as complete:
        assert {server.name for server in farm._servers} == {"server", "worker"}
        assert complete.redis_url == settings.redis_url
        assert complete.s3_bucket == settings.s3_bucket
        assert ask(complete, "/v1/workers")["items"]


def test_where_a_farm_is_named_nothing_is_started(tmp_path: Path) -> None:
    settings = settings_for(tmp_path / "none", api_url="https://farm.example.org")
    with EmbeddedFarm(settings) as same:
        assert same == settings
    assert not (tmp_path / "none").exists()


def test_waiting_for_another_process_and_a_full_disk_are_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_data_folder(tmp_path)
    monkeypatch.setattr("farm.local.embedded.START_SECONDS", 0.35)
    monkeypatch.setattr("farm.local.embedded.SCARCE", 1 << 60)
    said: list[str] = []
    with (tmp_path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(FarmFault, match="does not answer"):
            EmbeddedFarm(settings_for(tmp_path), say=said.append).start()
    assert said[1:] == ["waiting for the farm that already runs in this folder"]
    assert said[0].endswith(f"are free at {tmp_path}: servers stop when a disk is full")


def test_a_folder_that_cannot_be_used_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot keep data"):
        EmbeddedFarm(settings_for(tmp_path / "file")).start()


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="only root can mount a folder read-only")
@pytest.mark.parametrize("command", ["up", "worker"])
def test_a_folder_that_can_only_be_read_is_a_usage_error(tmp_path: Path, command: str) -> None:
    """Such as a volume that is mounted so."""
    mounted = 'mount -t tmpfs none "$1" && chmod 700 "$1" && mount -o remount,ro "$1" && exec "$0" -m farm "$2"'
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", mounted, sys.executable, str(tmp_path), command],
        check=False,
        env={**os.environ, "FARM_DATA_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert f"cannot keep data in {tmp_path}: Read-only file system" in done.stderr


def test_a_folder_that_came_with_a_clone_gives_no_credentials(tmp_path: Path) -> None:
    """Nor an address: who made the folder would get the token at it."""
    as_in_a_clone(tmp_path)
    with pytest.raises(NotAllowed, match="names a farm that is not yours"):
        FarmClient.from_settings(settings_for(tmp_path, api_token="secret"))
    (tmp_path / "farm.json").write_text(json.dumps({"api_url": "https://evil.example", "api_token": ""}))
    (tmp_path / "farm.json").chmod(0o600)
    with pytest.raises(NotAllowed, match=r"evil\.example"):
        FarmClient.from_settings(settings_for(tmp_path, api_token="secret"))


@pytest.mark.parametrize("name", ["s3", "valkey", "outbox"])
def test_data_that_came_with_a_clone_is_not_taken_in(tmp_path: Path, name: str) -> None:
    """Its parcels would be published, and its objects served, as if this user had made them."""
    tmp_path.chmod(0o755)
    (tmp_path / name / "there").mkdir(parents=True)
    (tmp_path / "credentials.json").write_text(json.dumps(dict.fromkeys(("redis_password", "s3_secret_key"), "known")))
    with pytest.raises(UsageError, match=f"no farm of yours wrote {name} in"):
        EmbeddedFarm(settings_for(tmp_path)).start()
    assert [path.name for path in (tmp_path / name).iterdir()] == ["there"]


@pytest.mark.parametrize("place", [".farm", ".farm/work", ".farm/work/host", ".farm/cache", ".farm/cache/00"])
def test_no_link_that_came_with_a_clone_is_followed(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], place: str
) -> None:
    """It leads to a folder of the user's, in which the farm would write, and clear away what it takes for its own."""
    victim = tmp_path / "victim"
    (victim / "project" / "poetry").mkdir(parents=True)
    for name in ("poetry.lock", "credentials.json", "project/poetry.lock", "project/poetry/code.py"):
        (victim / name).write_text("mine")
    victim.chmod(0o755)
    link = tmp_path / "clone" / place
    link.parent.mkdir(parents=True)
    link.symlink_to(victim)
    monkeypatch.chdir(tmp_path / "clone")
    before = sorted(victim.rglob("*"))
    farm = EmbeddedFarm(load_settings({}))
    try:
        with pytest.raises(UsageError, match=f"{place} is a link"):
            farm.start()
    finally:
        farm.stop()
    for setting, value in settings.environment().items():
        monkeypatch.setenv(setting, value)
    monkeypatch.delenv("FARM_DATA_DIR")
    assert main(["worker"]) == 2
    assert f"{place} is a link" in capsys.readouterr().err
    assert sorted(victim.rglob("*")) == before
    assert victim.stat().st_mode & 0o777 == 0o755
    assert (victim / "credentials.json").read_text() == "mine"


def test_a_worker_publishes_nothing_of_an_outbox_that_came_with_a_clone(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "clone" / "outbox" / "parcel").mkdir(parents=True)
    (tmp_path / "clone").chmod(0o755)
    for setting, value in {**settings.environment(), "FARM_DATA_DIR": str(tmp_path / "clone")}.items():
        monkeypatch.setenv(setting, value)
    assert main(["worker"]) == 2
    assert "no farm of yours wrote outbox" in capsys.readouterr().err


def test_a_part_that_does_not_start_says_why_and_leaves_nothing(tmp_path: Path) -> None:
    write_private(tmp_path / "credentials.json", json.dumps({"redis_password": secrets.token_hex(8)}))
    (tmp_path / "valkey").mkdir()
    (tmp_path / "valkey" / "appendonlydir").write_text("not a folder")
    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(StoreUnavailable, match="did not start") as error:
        EmbeddedFarm(settings_for(tmp_path)).start()
    assert "appendonlydir" in error.value.hint
    assert set(psutil.Process().children(recursive=True)) == before


def test_what_a_farm_has_stored_is_read_when_none_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a worker, and nobody joins it; when the command has read, nothing runs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("FARM_API_URL", raising=False)
    assert main(["status"]) == 4
    assert "no farm: api_url is not set" in capsys.readouterr().err
    _credentials(own_data_folder(tmp_path / ".farm"))
    started: list[EmbeddedFarm] = []
    start = EmbeddedFarm.start

    def noting(farm: EmbeddedFarm) -> Settings:
        started.append(farm)
        settings = start(farm)
        assert ask(settings, "/v1/workers")["items"] == []
        assert not (tmp_path / ".farm" / "farm.json").exists()
        assert settings.pool_timeout > 10**8, "a build that was interrupted long ago does not fail by being looked at"
        return settings

    monkeypatch.setattr(EmbeddedFarm, "start", noting)
    assert main(["status", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"items": []}
    (farm,) = started
    assert processes_of(farm) == []
    assert f":{farm._port()}" in farm.settings.api_url, "the URLs of its pages stay"


def test_ctrl_c_in_a_second_farm_up_leaves_the_first_and_says_so(tmp_path: Path) -> None:
    farm = command(tmp_path)
    with farm.up():
        second = farm.start("up")
        assert second.stdout is not None
        link = next(found[0] for line in second.stdout if (found := re.search(r"http://\S+\?once=\w+", line)))
        assert "set-cookie" in httpx.get(link, timeout=60).headers, "it signs a browser in"
        assert any("Ctrl-C leaves it running" in line for line in second.stdout)
        second.send_signal(signal.SIGINT)
        assert "left: the farm runs on at http://127.0.0.1:" in second.communicate(timeout=120)[0]
        assert farm.json("ls", "workers")["items"]
