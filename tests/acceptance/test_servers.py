"""Servers and processes started by hand, as docs/running.md says: same manifest, same keys, two workers."""

from __future__ import annotations

import secrets
import socket
from pathlib import Path

from farm import embedded
from tests.acceptance.conftest import QUICKSTART, command
from tests.helpers import wait_until


def test_a_farm_on_servers_of_its_own_has_the_same_keys(quickstart, demo_data: Path, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    access, secret, token = (secrets.token_hex(8) for _ in range(3))
    valkey = embedded.start_valkey(tmp_path / "valkey", secrets.token_hex(8))
    weed = embedded.start_weed(tmp_path / "weed", access, secret, bucket="farm")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    farm = command(
        tmp_path,
        FARM_REDIS_URL=valkey.url,
        FARM_S3_ENDPOINT=weed.url,
        FARM_S3_BUCKET="farm",
        FARM_S3_ACCESS_KEY=access,
        FARM_S3_SECRET_KEY=secret,
        FARM_API_TOKEN=token,
    )
    processes = [
        farm.start("serve", "--port", str(port)),
        farm.start("worker", "--slots", "1", FARM_DATA_DIR=str(tmp_path / "node-a")),
        farm.start("worker", "--slots", "1", FARM_DATA_DIR=str(tmp_path / "node-b")),
    ]
    # The client has no address but the API's.
    client = command(tmp_path / "client", FARM_API_URL=f"http://127.0.0.1:{port}", FARM_API_TOKEN=token)
    client.folder.mkdir()
    try:
        wait_until(lambda: len(client.json("ls", "workers").get("items", [])) == 2, timeout=60)
        report = client.json("submit", str(QUICKSTART))
        assert report["build"]["verdict"]["exit_code"] == 0
        assert len({cell["worker"] for cell in report["cells"] if cell["worker"]}) == 2
        here = {cell["identifier"]: cell["key"] for cell in report["cells"]}
        there = {cell["identifier"]: cell["key"] for cell in quickstart.json("plan", str(QUICKSTART))["cells"]}
        assert here == there
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.communicate(timeout=60)
        valkey.stop()
        weed.stop()
