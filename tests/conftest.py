"""Real servers for the tests: one Valkey and one SeaweedFS for the session, clean for each test that asks."""

from __future__ import annotations

import atexit
import compileall
import gc
import json
import logging
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import httpx._config
import httpx._transports.default as transports
import hypothesis
import pytest

import farm
from farm.local import servers
from farm.settings import Settings, load_settings

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

pytest_plugins = ["tests.support.api_farm", "tests.chaos.plugin"]


CI_VARIABLES = ("BUILDKITE", "GITHUB_ACTIONS", "GITLAB_CI", "JENKINS_URL")
"""By these commands know the CI server that runs them; here they are tested as if nobody did."""


def pytest_configure() -> None:
    """Hear Ctrl-C, and let what the tests start hear it: a shell's background jobs are started deaf to it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for name in CI_VARIABLES:
        os.environ.pop(name, None)
    # As often as by default, to look for garbage took a twelfth of the tests' time.
    gc.set_threshold(50_000)
    gc.disable()  # Until all is collected: that leaves little, and in each of xdist's processes.
    # What one process of xdist measures does not pause what the others compile.
    os.environ["FARM_LOCK_DIR"] = locks = tempfile.mkdtemp(prefix="farm-locks-")
    atexit.register(shutil.rmtree, locks, ignore_errors=True)
    # SeaweedFS looks for garbage less often, as a test's memory is soon free, and for work on one core: two are few.
    os.environ["GOGC"], os.environ["GOMAXPROCS"] = "400", "1"
    # Hundreds of processes import numpy, whose threads would spin at each start.
    os.environ["OPENBLAS_THREAD_TIMEOUT"] = "4"
    # How long an example takes is the machine's matter, not a test's.
    hypothesis.settings.register_profile("farm", deadline=None)
    hypothesis.settings.load_profile("farm")
    # As pip does where it installs: hundreds of processes that tests start import these sources.
    compileall.compile_dir(Path(farm.__file__).parent, quiet=1)
    # Each request without a client makes one, which would read the certificates of all authorities again: 0.03 s.
    transports.create_ssl_context = cache(transports.create_ssl_context)
    # A busy machine takes its time: where a test names no time-out, httpx would wait for five seconds.
    httpx._config.DEFAULT_TIMEOUT_CONFIG.read = 60.0


PLACES = pytest.StashKey[dict[Path, int]]()


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """Let each of xdist's processes begin at another file: the asserts that one has rewritten, the others read.

    From then on, Python looks for garbage in what the tests make, not in all that was imported and collected for them.
    """
    config = session.config
    given = getattr(config, "workerinput", None)
    if given and all(Path(each).is_dir() for each in config.args):
        files = [file for each in config.args for file in sorted(Path(each).resolve().rglob("test_*.py"))]
        config.stash[PLACES] = {file: place for place, file in enumerate(files)}
        start = len(files) * int(given["workerid"].removeprefix("gw")) // given["workercount"]
        config.args = [str(file) for file in files[start:] + files[:start]]
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what needs the real migraphx where it is not; a namespace folder of that name does not count."""
    if places := config.stash.get(PLACES, None):
        items.sort(key=lambda item: places[item.path.resolve()])
    marked = [item for item in items if item.get_closest_marker("migraphx")]
    if not marked:
        return
    try:
        import migraphx

        reason = "" if hasattr(migraphx, "parse_onnx") else "`import migraphx` gives another module of that name"
    except ImportError as error:
        reason = f"needs the migraphx module: {error}"
    if reason:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))


TOGETHER = {
    # Stories: each test goes on where the one before it ended.
    "tests/integration/local/test_embedded_farm.py": "embedded farm",
    # All read the sources, or look at what one preparation made.
    "tests/unit/test_imports.py": "imports",
    "tests/unit/cli/test_what_commands_import.py": "imports of commands",
    "tests/integration/node/test_other_toolchains.py": "toolchains",
    # One farm for all.
    "tests/acceptance/test_main_job.py": "quickstart",
    "tests/acceptance/test_reproduce.py": "quickstart",
    "tests/acceptance/test_tuning.py": "quickstart",
    "tests/integration/local/test_rights.py": "rights",
}
"""Files whose tests run in one process, in order: by file what they share."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Spread single tests over the processes, but for those that belong together.

    xdist's own groups (`--dist loadgroup`) are lost with pytest 9.2, which no longer reads the node ids that hold them.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return TOGETHER.get(nodeid.partition("::")[0], nodeid)

    return Groups(config, log)


@pytest.fixture(autouse=True)
def _logs_as_before() -> Iterator[None]:
    """A command that a test calls in this process logs to its own standard error, which pytest closes after it."""
    yield
    root = logging.getLogger()
    for handler in root.handlers[:]:
        if type(handler) is logging.StreamHandler:  # Those of pytest are of classes of their own.
            root.removeHandler(handler)
            root.setLevel(logging.WARNING)


@pytest.fixture(scope="session", autouse=True)
def _no_settings_of_the_user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests read no settings of the one who runs them; a test that sets HOME has a cache of its own there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))
        patch.delenv("XDG_CACHE_HOME", raising=False)
        yield


@pytest.fixture(scope="session")
def valkey_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.Server]:
    """The session's Valkey."""
    import redis

    server = servers.start_valkey(tmp_path_factory.mktemp("valkey"), secrets.token_hex(8))
    with redis.Redis.from_url(server.url) as connection:
        # A disk that others keep busy would hold every script up; no test takes the power away.
        connection.config_set("appendfsync", "no")
    yield server
    server.stop()


@pytest.fixture(scope="session")
def valkey_url(valkey_server: servers.Server) -> str:
    """URL of the session's Valkey, as it is: another test's keys may be in it."""
    return valkey_server.url


@pytest.fixture
def redis_url(valkey_url: str) -> str:
    """URL of the session's Valkey, emptied."""
    import redis

    with redis.Redis.from_url(valkey_url) as connection:
        connection.flushall()
    return valkey_url


@dataclass(frozen=True)
class WeedServer:
    """The session's SeaweedFS with its credentials."""

    url: str
    access_key: str
    secret_key: str
    ports: dict[str, int]
    """Of its parts, by their names on its command line."""

    def client(self) -> S3Client:
        """A plain boto3 client, to look at the server past the code under test."""
        import boto3
        from botocore.config import Config

        return boto3.client(
            "s3",
            endpoint_url=self.url,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            region_name="us-east-1",
            config=Config(signature_version="s3v4", s3={"addressing_style": "path"}),
        )


@contextmanager
def running_weed() -> Iterator[WeedServer]:
    """Run a SeaweedFS, and remove all that tests put there.

    With FARM_TEST_S3=http://KEY:SECRET@HOST:PORT tests take that server, to hold another one to the contract of storage
    (`pytest tests/integration/artifacts`). Their buckets stay on it.
    """
    if other := urlsplit(os.environ.get("FARM_TEST_S3", "")).netloc:
        keys, _, place = other.rpartition("@")
        yield WeedServer(f"http://{place}", *keys.split(":"), ports={})
        return
    with tempfile.TemporaryDirectory() as folder:
        access_key, secret_key = secrets.token_hex(8), secrets.token_hex(16)
        server = servers.start_weed(Path(folder), access_key, secret_key, bucket="first")
        try:
            named = (part.lstrip("-").split("=") for part in server.command if ".port" in part)
            ports = {name: int(port) for name, port in named}
            _share_volumes(server, ports)
            yield WeedServer(server.url, access_key, secret_key, ports)
        finally:
            server.stop()


def _share_volumes(server: servers.Server, ports: dict[str, int]) -> None:
    """Keep all buckets in one set of volumes: volumes of its own would cost each test's bucket 0.2 s."""
    place = {
        part: f"{servers.HOST}:{ports[f'{part}.port']}.{ports[f'{part}.port.grpc']}" for part in ("master", "filer")
    }
    subprocess.run(
        [servers.weed_binary(), "shell", *(f"-{part}={address}" for part, address in place.items())],
        input="fs.configure -locationPrefix=/buckets -collection=tests -apply\nexit\n",
        env=server.environment,
        text=True,
        check=True,
        capture_output=True,
        timeout=60,
    )


WEED = "TESTS_WEED"
"""The variable that names a SeaweedFS which runs already."""
SHARED = pytest.StashKey[tuple[ExitStack, WeedServer]]()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Give all of xdist's processes one SeaweedFS: each test has a bucket of its own there anyway."""
    if SHARED not in node.config.stash:
        stack = ExitStack()
        node.config.stash[SHARED] = stack, stack.enter_context(running_weed())
    node.workerinput["weed"] = asdict(node.config.stash[SHARED][1])


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the SeaweedFS that xdist's processes shared."""
    if SHARED in config.stash:
        config.stash[SHARED][0].close()


@pytest.fixture(scope="session")
def weed(request: pytest.FixtureRequest) -> Iterator[WeedServer]:
    """The session's SeaweedFS."""
    with ExitStack() as stack:
        given = getattr(request.config, "workerinput", {}).get("weed") or json.loads(os.environ.get(WEED, "null"))
        yield WeedServer(**given) if given else stack.enter_context(running_weed())


@pytest.fixture(scope="session")
def s3_client(weed: WeedServer) -> S3Client:
    """A plain boto3 client for the session's SeaweedFS."""
    return weed.client()


@pytest.fixture
def s3_settings(weed: WeedServer, s3_client: S3Client) -> dict[str, str]:
    """The settings that name the session's SeaweedFS and a fresh bucket on it, which goes with the server.

    An emptied one would not do: SeaweedFS goes on to list folders that were emptied.
    """
    bucket = f"test-{secrets.token_hex(6)}"
    s3_client.create_bucket(Bucket=bucket)
    return {
        "s3_endpoint": weed.url,
        "s3_public_endpoint": "",
        "s3_bucket": bucket,
        "s3_access_key": weed.access_key,
        "s3_secret_key": weed.secret_key,
    }


@pytest.fixture
def s3_connection(s3_settings: dict[str, str]) -> dict[str, str]:
    """What a store in the test's bucket is made with."""
    return {name: s3_settings[f"s3_{name}"] for name in ("endpoint", "bucket", "access_key", "secret_key")}


@pytest.fixture
def settings(redis_url: str, s3_settings: dict[str, str], tmp_path: Path) -> Settings:
    """Settings for the session's servers, an empty data folder and leases short enough to wait for."""
    return load_settings(
        {},
        data_dir=tmp_path,
        redis_url=redis_url,
        **s3_settings,
        lease_seconds=3.0,
        renew_seconds=0.5,
        retry_delay=0.2,
        measure_seconds=0.1,
    )


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", folder]
    if subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("this user may not mount a file system")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)
