"""The contract of the artifact store, on a real S3 server with faults put in where a server cannot be asked
for them."""

from __future__ import annotations

import hashlib
import io
import os
import random
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import botocore.awsrequest
import httpx
import pytest
from botocore.exceptions import (
    ConnectionClosedError,
    ConnectTimeoutError,
    EndpointConnectionError,
    HTTPClientError,
    ProxyConnectionError,
    ReadTimeoutError,
    ResponseStreamingError,
    SSLError,
)
from prometheus_client import REGISTRY

from farm.artifacts.s3 import S3Store, rules
from farm.artifacts.s3_bucket import PART
from farm.artifacts.storage import ListedObject, blob_key, readable, rewrite, sidecar_key
from farm.errors import ArtifactGone, Conflict, StorageAway, StorageUnavailable, UsageError
from farm.wire.program import Sidecar

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

KEY = "ab" * 32
MISSING = "0" * 64


def make_sidecar(store: S3Store, key: str = KEY, **fields: Any) -> dict[str, Any]:
    """A valid sidecar whose blobs are uploaded."""
    digest, size = store.put_blob_bytes(f"program of {key}".encode())
    log, log_size = store.put_blob_bytes(b"log")
    return {
        "schema": 1,
        "key": key,
        "identifier": "resnet50/onnxruntime-cpu/fp32/b1",
        "spec": {"precision": "fp32"},
        "blobs": {
            "program": {"path": "program.onnx", "digest": digest, "size": size},
            "log": {"path": "log.txt", "digest": log, "size": log_size},
        },
        "toolchain": "onnxruntime1.31.1-1a2b3c4d",
        "device": {"arch": "cpu"},
        "created": "2026-11-21T00:00:00+00:00",
        **fields,
    }


class Overwriter:
    """Somebody with access to the bucket who puts anything anywhere."""

    def __init__(self, client: S3Client, bucket: str) -> None:
        self._client, self._bucket = client, bucket

    def put(self, key: str, data: bytes) -> None:
        self._client.put_object(Bucket=self._bucket, Key=key, Body=data)

    def get(self, key: str) -> bytes:
        return self._client.get_object(Bucket=self._bucket, Key=key)["Body"].read()

    def head(self, key: str) -> Any:
        return self._client.head_object(Bucket=self._bucket, Key=key)


@pytest.fixture
def outside(s3_client: S3Client, s3_connection: dict[str, str]) -> Overwriter:
    return Overwriter(s3_client, s3_connection["bucket"])


# --- blobs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, PART, PART + 1, 2 * PART + 1, 3 * PART])
def test_a_blob_comes_back_as_it_went(store: S3Store, tmp_path: Path, size: int) -> None:
    """Also at the sizes where one request becomes several."""
    data = random.Random(size).randbytes(size)
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(data)

    digest, uploaded = store.put_blob_file(source)
    store.get_blob(digest, target, size)

    assert (digest, uploaded) == (hashlib.sha256(data).hexdigest(), size)
    assert target.read_bytes() == data
    assert store.has_blob(digest, size)
    assert not store.has_blob(digest, size + 1)
    assert store.read_blob(digest, limit=size) == data
    assert store.verify_blob(digest, size)


def counted() -> list[float]:
    """The bytes that were sent to storage and that came from there, as the metrics say it."""
    name, directions = "farm_storage_bytes_total", ("written", "read")
    return [REGISTRY.get_sample_value(name, {"direction": direction}) or 0.0 for direction in directions]


def test_bytes_are_counted(store: S3Store, tmp_path: Path) -> None:
    before = counted()
    store.put_object("config/a.json", b"1")
    digest, _ = store.put_blob_bytes(b"23")
    store.get_object("config/a.json")
    store.get_object("config/a.json", limit=0)
    store.get_blob(digest, tmp_path / "file")
    assert [now - then for now, then in zip(counted(), before, strict=True)] == [3, 3]


def test_a_large_blob_goes_up_in_parts(store: S3Store, outside: Overwriter, tmp_path: Path) -> None:
    path = tmp_path / "large"
    path.write_bytes(os.urandom(3 * PART))
    before = counted()[0]
    digest, _ = store.put_blob_file(path)
    assert outside.head(blob_key(digest))["ETag"].endswith('-3"')
    assert counted()[0] == before + 3 * PART


def test_a_missing_blob_is_named_in_the_error(store: S3Store, s3_connection: dict[str, str], tmp_path: Path) -> None:
    """With bucket, key and endpoint, and without credentials; nothing is left where the file should be."""
    with pytest.raises(ArtifactGone) as error:
        store.get_blob(MISSING, tmp_path / "file")
    for word in (s3_connection["bucket"], blob_key(MISSING), s3_connection["endpoint"]):
        assert word in str(error.value)
    assert s3_connection["secret_key"] not in str(error.value)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ArtifactGone):
        store.read_blob(MISSING, limit=10)
    assert not store.has_blob(MISSING)
    assert not store.verify_blob(MISSING)


def test_a_blob_over_the_limit_is_not_read(store: S3Store) -> None:
    digest, size = store.put_blob_bytes(b"x" * 100)
    with pytest.raises(UsageError, match="100 bytes"):
        store.read_blob(digest, limit=size - 1)


def test_a_small_blob_is_read_by_one_request(store: S3Store) -> None:
    digest, size = store.put_blob_bytes(b"a snapshot")
    asked: list[str] = []
    store.s3.meta.events.register("before-call.s3", lambda model, **_: asked.append(model.name))
    assert store.read_blob(digest, limit=size) == b"a snapshot"
    assert asked == ["GetObject"]


def test_a_blob_of_another_size_than_promised_is_refused(store: S3Store, tmp_path: Path) -> None:
    digest, size = store.put_blob_bytes(b"twelve bytes")
    with pytest.raises(ArtifactGone, match="12 bytes where 13 were expected"):
        store.get_blob(digest, tmp_path / "file", size + 1)
    assert store.has_blob(digest, size), "the blob itself is right, and stays"


@pytest.mark.parametrize("size", [11, 2 * PART + 1])
def test_a_file_with_another_digest_than_promised_is_refused(store: S3Store, tmp_path: Path, size: int) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(size))
    with pytest.raises(UsageError, match="SHA-256"):
        store.put_blob_file(path, digest=MISSING)
    assert not store.has_blob(MISSING)


def test_a_file_that_changes_while_it_is_uploaded_makes_no_blob(store: S3Store, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(3 * PART))
    digest = hashlib.sha256(bytes(3 * PART)).hexdigest()

    def change(**_: Any) -> None:
        with path.open("r+b") as file:
            file.seek(3 * PART - 1)
            file.write(b"!")

    store.s3.meta.events.register("before-call.s3.CreateMultipartUpload", change)
    with pytest.raises(UsageError, match="changed while"):
        store.put_blob_file(path)
    assert not store.has_blob(digest)


def flip(data: bytes, place: random.Random) -> bytes:
    position = place.randrange(len(data))
    return data[:position] + bytes([data[position] ^ 1 << place.randrange(8)]) + data[position + 1 :]


def cut(data: bytes, place: random.Random) -> bytes:
    return data[: place.randrange(len(data))]


@pytest.mark.parametrize("damage", [flip, cut])
def test_ten_damaged_blobs_are_all_refused_and_all_brought_back(
    store: S3Store, outside: Overwriter, tmp_path: Path, damage: Callable[[bytes, random.Random], bytes]
) -> None:
    """A damaged blob goes into quarantine, so that it is missing from then on, and the next put brings it
    back."""
    place = random.Random(19)

    def one(number: int) -> None:
        data = f"program {number} ".encode() * 50
        digest, size = store.put_blob_bytes(data)
        damaged = damage(data, random.Random(place.random()))
        outside.put(blob_key(digest), damaged)
        target = tmp_path / str(number)
        with pytest.raises(ArtifactGone, match="damaged"):
            store.get_blob(digest, target)
        assert not target.exists()
        assert not store.has_blob(digest, size)
        assert outside.get(f"quarantine/sha256/{digest[:2]}/{digest}") == damaged
        store.put_blob_bytes(data)
        assert store.read_blob(digest, limit=size) == data

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(one, range(10)))
    assert list(tmp_path.iterdir()) == []


def test_a_put_overwrites_a_damaged_blob(store: S3Store, outside: Overwriter) -> None:
    """That there is something under the name, in the right size, does not make it right."""
    digest, size = store.put_blob_bytes(b"right")
    outside.put(blob_key(digest), b"wrong")
    store.put_blob_bytes(b"right")
    assert outside.get(blob_key(digest)) == b"right"
    assert store.verify_blob(digest, size)


def test_verifying_finds_a_damaged_large_blob(store: S3Store, outside: Overwriter, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(data := os.urandom(2 * PART + 7))
    digest, size = store.put_blob_file(path)
    outside.put(blob_key(digest), flip(data, random.Random(1)))
    assert store.has_blob(digest, size)
    assert not store.verify_blob(digest, size)
    assert not store.has_blob(digest)


def test_a_damaged_blob_that_somebody_removes_at_the_same_time_needs_no_quarantine(
    store: S3Store, outside: Overwriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest, _ = store.put_blob_bytes(b"right")
    outside.put(blob_key(digest), b"wrong")
    read, seen = store.hash_of, list[str]()

    def read_and_remove(entry: ListedObject) -> str:
        seen.append(read(entry))
        if len(seen) == 2:
            store.delete_object(entry.key)
        return seen[-1]

    monkeypatch.setattr(store, "hash_of", read_and_remove)
    assert not store.verify_blob(digest)


MEMORY = """
import os, resource, sys
from pathlib import Path
from farm.artifacts.s3 import S3Store

def rss(what):
    return next(int(line.split()[1]) / 1024 for line in open("/proc/self/status") if line.startswith(what))

endpoint, bucket, access_key, secret_key, folder = sys.argv[1:]
store = S3Store(endpoint=endpoint, bucket=bucket, access_key=access_key, secret_key=secret_key)
store.check()
source, target = Path(folder) / "source", Path(folder) / "target"
with source.open("wb") as file:
    for _ in range(128):
        file.write(os.urandom(1 << 20))
idle = rss("VmRSS")
digest, size = store.put_blob_file(source)
store.get_blob(digest, target, size)
print(rss("VmHWM") - idle)
"""


def test_memory_does_not_grow_with_a_blob(s3_connection: dict[str, str], tmp_path: Path) -> None:
    """128 MiB go up and come down in less than 100 MiB above what the idle process holds."""
    arguments = s3_connection.values()
    run = subprocess.run(
        [sys.executable, "-c", MEMORY, *arguments, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert float(run.stdout) < 100


# --- artifacts ----------------------------------------------------------------------------------------------


def test_what_is_published_is_found(store: S3Store) -> None:
    published = store.publish("main", make_sidecar(store, worker="w1"))
    found = store.lookup(["main"], KEY)
    assert found is not None
    assert found == published
    assert (found["namespace"], found["namespace"], found["worker"]) == ("main", "main", "w1")


def test_of_eight_that_publish_one_wins_and_the_others_adopt(store: S3Store) -> None:
    """Five rounds; nobody overwrites, everybody ends with the winner's sidecar."""
    with ThreadPoolExecutor(8) as pool:
        for round_ in range(5):
            key = f"{round_:064x}"
            sidecar = make_sidecar(store, key)
            start = threading.Barrier(8)

            def publish(number: int, sidecar: dict[str, Any] = sidecar, start: threading.Barrier = start) -> Sidecar:
                start.wait()
                return store.publish("main", {**sidecar, "worker": f"w{number}"})

            answers = list(pool.map(publish, range(8)))
            assert all(answer == answers[0] for answer in answers)
            assert store.lookup(["main"], key) == answers[0]


def test_a_late_attempt_adopts_what_was_first(store: S3Store) -> None:
    first = store.publish("main", make_sidecar(store, worker="first"))
    late = store.publish("main", make_sidecar(store, worker="late"))
    assert late == first


def test_an_artifact_that_goes_while_another_is_published_is_replaced(
    store: S3Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.publish("main", make_sidecar(store, worker="first"))
    read, seen = store.get_object, list[str]()

    def read_what_is_gone(key: str) -> Any:
        seen.append(key)
        if len(seen) == 2:  # The first look was whether it is our own.
            store.delete_object(key)
        return read(key)

    monkeypatch.setattr(store, "get_object", read_what_is_gone)
    late = store.publish("main", make_sidecar(store, worker="late"))
    assert late["worker"] == "late"


def test_builds_of_a_name_have_one_id_whoever_computes_it_first(store: S3Store, s3_connection: dict[str, str]) -> None:
    """Also if the farm's key goes at the moment in which it is made."""
    read, seen = store.get_object, list[str]()

    def read_what_is_gone(key: str) -> Any:
        seen.append(key)
        if len(seen) == 1:
            store.delete_object(key)
        return read(key)

    store.get_object = read_what_is_gone  # type: ignore[assignment]
    found = store.build_id_of("main", "demo")
    assert re.fullmatch("b-[0-9a-f]{16}", found)
    other = S3Store(**s3_connection)
    assert other.build_id_of("main", "demo") == found
    assert other.build_id_of("maind", "emo") != found


def lose_blob(store: S3Store, outside: Overwriter, digest: str) -> None:
    store.delete_object(blob_key(digest))


def shorten_blob(store: S3Store, outside: Overwriter, digest: str) -> None:
    outside.put(blob_key(digest), b"half a pro")


def cut_sidecar(store: S3Store, outside: Overwriter, digest: str) -> None:
    key = sidecar_key("main", KEY)
    outside.put(key, outside.get(key)[:100])


def misplace_sidecar(store: S3Store, outside: Overwriter, digest: str) -> None:
    other = "cd" * 32
    store.publish("main", make_sidecar(store, other))
    outside.put(sidecar_key("main", KEY), outside.get(sidecar_key("main", other)))


def empty_sidecar(store: S3Store, outside: Overwriter, digest: str) -> None:
    outside.put(sidecar_key("main", KEY), b"")


BREAK = [lose_blob, shorten_blob, cut_sidecar, misplace_sidecar, empty_sidecar]


@pytest.mark.parametrize("break_it", BREAK)
def test_a_broken_artifact_is_not_found_and_the_next_one_repairs_it(
    store: S3Store, outside: Overwriter, break_it: Callable[[S3Store, Overwriter, str], None]
) -> None:
    sidecar = make_sidecar(store, worker="first")
    digest = store.publish("main", sidecar)["blobs"]["program"]["digest"]
    break_it(store, outside, digest)

    assert store.lookup(["main"], KEY) is None
    new, size = store.put_blob_bytes(b"a new program")
    sidecar["blobs"]["program"] = {"path": "program.onnx", "digest": new, "size": size}
    repaired = store.publish("main", {**sidecar, "worker": "second"})

    assert repaired["worker"] == "second"
    assert store.lookup(["main"], KEY) == repaired


def test_of_eight_that_repair_one_does(store: S3Store, outside: Overwriter) -> None:
    sidecar = make_sidecar(store)
    outside.put(sidecar_key("main", KEY), b"{")
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda n: store.publish("main", {**sidecar, "worker": f"w{n}"}), range(8)))
    assert all(answer == answers[0] for answer in answers)


def test_an_artifact_without_its_kernel_cache_is_whole(store: S3Store) -> None:
    """It only makes the first run faster."""
    sidecar = make_sidecar(store)
    sidecar["blobs"]["kernel_cache"] = {"path": "kernels.zip", "digest": MISSING, "size": 1}
    store.publish("main", sidecar)
    assert store.lookup(["main"], KEY)


def test_a_sidecar_whose_blobs_are_not_there_is_not_published(store: S3Store) -> None:
    sidecar = make_sidecar(store)
    sidecar["blobs"]["program"]["digest"] = MISSING
    with pytest.raises(UsageError, match=MISSING):
        store.publish("main", sidecar)
    assert store.get_object(sidecar_key("main", KEY)) is None


def test_main_is_asked_first_and_never_written_from_elsewhere(store: S3Store) -> None:
    """CVE-2025-36852: what an untrusted namespace publishes under a key is not a hit for the trusted one."""
    store.publish("pr-7", make_sidecar(store, worker="fork"))
    assert store.lookup(["main"], KEY) is None
    found = store.lookup(["main", "pr-7"], KEY)
    assert found and found["namespace"] == "pr-7"

    store.publish("main", make_sidecar(store, worker="trusted"))
    found = store.lookup(["main", "pr-7"], KEY)
    assert found and (found["namespace"], found["worker"]) == ("main", "trusted")


KILLED = """
import os, signal, sys
from pathlib import Path
from farm.artifacts.s3 import S3Store

endpoint, bucket, access_key, secret_key, folder, step = sys.argv[1:]
store = S3Store(endpoint=endpoint, bucket=bucket, access_key=access_key, secret_key=secret_key)

def die(**_):
    os.kill(os.getpid(), signal.SIGKILL)

operation, count = {
    "first part": ("before-call.s3.UploadPart", 1),
    "all parts": ("before-call.s3.CompleteMultipartUpload", 1),
    "program": ("before-call.s3.PutObject", 1),
    "log": ("before-call.s3.PutObject", 2),
    "sidecar sent": ("after-call.s3.PutObject", 2),
}[step]
seen = 0
def maybe_die(**_):
    global seen
    seen += 1
    if seen == count:
        die()
store.s3.meta.events.register(operation, maybe_die)
program = Path(folder) / "program"
program.write_bytes(bytes(20 << 20))
digest, size = store.put_blob_file(program)
log, log_size = store.put_blob_bytes(b"log")
store.publish("main", {
    "schema": 1, "key": "ab" * 32, "identifier": "x", "spec": {}, "toolchain": "t", "device": {"arch": "cpu"},
    "created": "2026-11-21T00:00:00+00:00",
    "blobs": {"program": {"path": "program", "digest": digest, "size": size},
              "log": {"path": "log.txt", "digest": log, "size": log_size}},
})
"""


@pytest.mark.parametrize("step", ["first part", "all parts", "program", "log", "sidecar sent"])
def test_who_is_killed_while_publishing_leaves_nothing_or_a_whole_artifact(
    store: S3Store, s3_connection: dict[str, str], tmp_path: Path, step: str
) -> None:
    """And nothing that a retry trips over; multipart uploads that were left open can be ended."""
    arguments = s3_connection.values()
    run = subprocess.run(
        [sys.executable, "-c", KILLED, *arguments, str(tmp_path), step], capture_output=True, text=True, check=False
    )
    assert run.returncode == -signal.SIGKILL, run.stderr
    found = store.lookup(["main"], KEY)
    assert (found is not None) == (step == "sidecar sent")
    assert store.abort_uploads(timedelta(0)) == (1 if "part" in step else 0)
    assert store.abort_uploads(timedelta(0)) == 0
    published = store.publish("main", make_sidecar(store))
    assert (published == found) == (found is not None)


def test_a_large_upload_goes_on_with_the_parts_that_are_missing(
    store: S3Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("farm.artifacts.s3.CLIENT_PART", 5 << 20)
    data = random.Random(1).randbytes((11 << 20) + 3)
    digest = hashlib.sha256(data).hexdigest()

    def bring(put: Any) -> None:
        part = data[put["start"] : put["start"] + put["size"]]
        httpx.put(put["url"], content=part, headers=put["headers"], timeout=60).raise_for_status()

    puts = store.begin_upload("main", digest, len(data))
    assert [(put["start"], put["size"]) for put in puts] == [
        (0, 5 << 20),
        (5 << 20, 5 << 20),
        (10 << 20, (1 << 20) + 3),
    ]
    bring(puts[0])
    bring(puts[2])
    with pytest.raises(UsageError, match=f"{(6 << 20) + 3} of {len(data)} bytes of blob {digest} are there"):
        store.finish_upload("main", digest, len(data))
    (left,) = store.begin_upload("main", digest, len(data))
    assert (left["start"], left["size"]) == (5 << 20, 5 << 20)
    bring(left)
    for _ in range(2):
        store.finish_upload("main", digest, len(data))
        assert store.has_blob(digest, len(data))
        assert list(store.list_objects("uploads/")) == []


def test_what_was_uploaded_and_never_finished_goes_when_it_is_old(store: S3Store, s3_client: Any) -> None:
    key = f"uploads/main/{KEY}"
    store.put_object(key, b"whole, but its name was never checked")
    s3_client.create_multipart_upload(Bucket=store.name, Key=key)
    assert store.abort_uploads(timedelta(hours=1)) == 0
    assert store.get_object(key) is not None
    assert store.abort_uploads(timedelta(0)) == 2
    assert store.get_object(key) is None


def test_uploads_of_other_applications_in_the_bucket_are_left_alone(
    store: S3Store, s3_client: Any, s3_settings: dict[str, str]
) -> None:
    bucket = s3_settings["s3_bucket"]
    theirs, ours = "backups/database", f"blobs/sha256/ab/{'ab' * 32}"
    for key in (theirs, ours):
        s3_client.create_multipart_upload(Bucket=bucket, Key=key)
    assert store.abort_uploads(timedelta(0)) == 1
    left = s3_client.list_multipart_uploads(Bucket=bucket)["Uploads"]
    assert [upload["Key"] for upload in left] == [theirs]
    s3_client.abort_multipart_upload(Bucket=bucket, Key=theirs, UploadId=left[0]["UploadId"])


# --- documents ----------------------------------------------------------------------------------------------


def test_a_document_can_be_created_only_once(store: S3Store) -> None:
    store.put_object("config/a.json", b"1", create=True)
    with pytest.raises(Conflict, match="exists already"):
        store.put_object("config/a.json", b"2", create=True)
    found = store.get_object("config/a.json")
    assert found and found.data == b"1"


def test_a_document_is_replaced_only_where_it_is_what_was_read(store: S3Store) -> None:
    first = store.put_object("config/a.json", b"1")
    second = store.put_object("config/a.json", b"2", if_match=first)
    with pytest.raises(Conflict, match="was changed meanwhile"):
        store.put_object("config/a.json", b"3", if_match=first)
    with pytest.raises(Conflict):
        store.put_object("config/none.json", b"3", if_match=first)
    found = store.get_object("config/a.json")
    assert found and (found.data, found.etag) == (b"2", second)


def test_a_document_is_deleted_only_where_it_is_what_was_read(store: S3Store) -> None:
    first = store.put_object("config/a.json", b"1")
    second = store.put_object("config/a.json", b"2")
    with pytest.raises(Conflict):
        store.delete_object("config/a.json", if_match=first)
    store.delete_object("config/a.json", if_match=second)
    store.delete_object("config/a.json", if_match=second)
    store.delete_object("config/a.json")
    assert store.get_object("config/a.json") is None


def test_a_listing_has_every_object_once_and_in_order(store: S3Store) -> None:
    """Also beyond the thousand that one answer holds."""
    names = [f"ns/main/open/b-{number:04}" for number in range(1050)]
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda name: store.put_object(name, b"{}"), names))
    store.put_object("ns/pr-7/open/b-1", b"{}")
    assert list(store.list_objects("ns/main/open/")) == names
    assert list(store.list_objects("ns/none/")) == []
    assert [entry.size for entry in store.list_entries("ns/pr-7/")] == [2]
    assert store.list_folders("ns/") == ["main", "pr-7"]


# --- outside access -----------------------------------------------------------------------------------------


def test_a_presigned_put_takes_exactly_its_blob(store: S3Store) -> None:
    """The signature covers checksum and size, and the server compares the bytes with the checksum."""
    data, other = b"the right bytes", b"the wrong bytes"
    digest = hashlib.sha256(data).hexdigest()
    put = store.presign_put(digest, len(data))

    wrong_bytes = httpx.put(put["url"], content=other, headers=dict(put["headers"]), timeout=60)
    own_checksum = {
        **put["headers"],
        "x-amz-checksum-sha256": store.presign_put(hashlib.sha256(other).hexdigest(), 15)["headers"][
            "x-amz-checksum-sha256"
        ],
    }
    forged = httpx.put(put["url"], content=other, headers=own_checksum, timeout=60)
    no_checksum = httpx.put(put["url"], content=other, timeout=60)
    longer = httpx.put(put["url"], content=data + b"!", headers={**put["headers"], "content-length": "16"}, timeout=60)
    assert (wrong_bytes.status_code, forged.status_code, no_checksum.status_code, longer.status_code) == (
        400,
        403,
        403,
        403,
    )
    assert not store.has_blob(digest)

    assert httpx.put(put["url"], content=data, headers=dict(put["headers"]), timeout=60).status_code == 200
    assert store.verify_blob(digest, len(data))


def test_a_presigned_get_downloads_under_a_name(store: S3Store) -> None:
    digest, _ = store.put_blob_bytes(b"program")
    answer = httpx.get(store.presign_get(blob_key(digest), filename='res"net\r\n.mxr'), timeout=60)
    assert answer.content == b"program"
    assert answer.headers["content-disposition"] == 'attachment; filename="res_net__.mxr"'
    assert httpx.get(store.presign_get(blob_key(digest)) + "0", timeout=60).status_code == 403


def test_presigned_urls_name_the_public_address(s3_connection: dict[str, str]) -> None:
    store = S3Store(**s3_connection, public_endpoint="https://artifacts.example.org")
    assert store.presign_get("a").startswith(f"https://artifacts.example.org/{s3_connection['bucket']}/a?")
    assert store.presign_put(MISSING, 1)["url"].startswith("https://artifacts.example.org/")


# --- faults -------------------------------------------------------------------------------------------------


class Answer(io.BytesIO):
    def stream(self, *_: Any, **__: Any) -> Iterator[bytes]:
        yield self.read()


class Faults:
    """Stands between a store and its server, and fails chosen requests.

    `before(request)` and `after(request)` return what to do to a request: None (nothing), an error code with
    its HTTP status, an error to raise, or "drop"; what is done after has happened on the server.
    """

    def __init__(self, store: S3Store) -> None:
        session = store.s3._endpoint.http_session  # type: ignore[attr-defined]
        self._send = session.send
        session.send = self.send
        self.before: Callable[[Any], Exception | str | tuple[int, str] | None] = lambda _: None
        self.after = self.before
        self.count = 0

    def send(self, request: Any) -> Any:
        self._fail(request, what := self.before(request))
        if isinstance(what, tuple):
            return self._answer(request, *what)
        answer = self._send(request)
        self._fail(request, self.after(request))
        return answer

    def _fail(self, request: Any, what: Exception | str | tuple[int, str] | None) -> None:
        self.count += what is not None
        if isinstance(what, Exception):
            raise what
        if what == "drop":
            raise ConnectionClosedError(endpoint_url=request.url)

    def _answer(self, request: Any, status: int, code: str) -> Any:
        body = f"<Error><Code>{code}</Code><Message>injected</Message></Error>".encode()
        return botocore.awsrequest.AWSResponse(request.url, status, {"content-length": str(len(body))}, Answer(body))


@pytest.fixture
def faults(store: S3Store) -> Faults:
    return Faults(store)


def once(method: str, part: str, what: Any) -> Callable[[Any], Any]:
    """Do something to the first request with this method whose URL has this part."""
    left = [what]
    return lambda request: left.pop() if left and request.method == method and part in request.url else None


@pytest.mark.parametrize(
    "what",
    [
        (409, "ConditionalRequestConflict"),
        (409, "ConcurrentModification"),  # So Ceph calls it.
        (503, "SlowDown"),
        (500, "InternalError"),
        "drop",
    ],
)
def test_publishing_survives_an_answer_that_means_ask_again(store: S3Store, faults: Faults, what: Any) -> None:
    sidecar = make_sidecar(store)
    faults.before = once("PUT", "/artifacts/", what)
    store.publish("main", sidecar)
    assert store.lookup(["main"], KEY)
    assert faults.count == 1


def test_a_create_whose_answer_was_lost_is_still_ours(store: S3Store, faults: Faults) -> None:
    """The second try meets 412 from our own first one: that is a success, not somebody else's artifact."""
    sidecar = make_sidecar(store, worker="ours")
    faults.after = once("PUT", "/artifacts/", "drop")
    assert store.publish("main", sidecar)["worker"] == "ours"
    assert faults.count == 1


def test_a_large_blob_whose_last_answer_was_lost_is_there(store: S3Store, faults: Faults, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(2 * PART + 1))
    faults.after = once("POST", "uploadId", "drop")
    digest, size = store.put_blob_file(path)
    assert faults.count == 1
    assert store.verify_blob(digest, size)


def test_a_failed_large_upload_leaves_no_parts_behind(s3_connection: dict[str, str], tmp_path: Path) -> None:
    store = S3Store(**s3_connection, patience=0.1)
    faults = Faults(store)
    path = tmp_path / "file"
    path.write_bytes(os.urandom(2 * PART + 1))
    faults.before = lambda request: (503, "SlowDown") if "partNumber=2" in request.url else None
    with pytest.raises(StorageUnavailable, match="503 SlowDown"):
        store.put_blob_file(path)
    assert store.abort_uploads(timedelta(0)) == 0


def test_every_verb_works_on_a_bad_day(s3_connection: dict[str, str], tmp_path: Path) -> None:
    """A fifth of all requests are refused with 503, one in twenty is dropped before and one after it was
    done."""
    store = S3Store(**s3_connection)
    faults = Faults(store)
    dice = random.Random(18)
    faults.before = lambda _: (503, "SlowDown") if dice.random() < 0.2 else "drop" if dice.random() < 0.05 else None
    faults.after = lambda _: "drop" if dice.random() < 0.05 else None

    def one(number: int) -> None:
        key = f"{number:064x}"
        sidecar = make_sidecar(store, key)
        store.publish("main", sidecar)
        found = store.lookup(["main"], key)
        assert found
        program = found["blobs"]["program"]
        store.get_blob(program["digest"], tmp_path / key, program["size"])
        assert (tmp_path / key).read_bytes() == f"program of {key}".encode()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(one, range(30)))
    assert len(list(store.list_objects("ns/main/artifacts/"))) == 30
    assert faults.count > 30


def test_bytes_damaged_on_the_way_are_read_again(store: S3Store, tmp_path: Path) -> None:
    """Only what is damaged twice is damaged in the store."""
    digest, _ = store.put_blob_bytes(b"right")
    real, bad = store._download, ["another digest"]
    store._download = lambda *a: bad.pop() if bad else real(*a)  # type: ignore[method-assign]
    store.get_blob(digest, tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == b"right"
    assert store.has_blob(digest)


def test_a_storage_that_is_not_there_is_an_error_in_time(s3_connection: dict[str, str]) -> None:
    store = S3Store(**{**s3_connection, "endpoint": "http://127.0.0.1:9"}, patience=0.2)
    with pytest.raises(StorageUnavailable, match=r"http://127\.0\.0\.1:9"):
        store.get_object("config/a.json")
    with pytest.raises(StorageUnavailable, match="cannot reach"):
        store.check()


AWAY = [
    EndpointConnectionError(endpoint_url="u"),
    ConnectTimeoutError(endpoint_url="u"),
    ProxyConnectionError(proxy_url="u"),
    SSLError(endpoint_url="u", error="unexpected end"),
    ConnectionClosedError(endpoint_url="u"),
    ReadTimeoutError(endpoint_url="u"),
    ResponseStreamingError(error="cut"),
    HTTPClientError(error="whatever"),
]
"""Everything that botocore raises where a server does not answer."""


@pytest.mark.parametrize("error", AWAY, ids=lambda error: type(error).__name__)
def test_a_server_that_does_not_answer_is_asked_again(store: S3Store, faults: Faults, error: Exception) -> None:
    failures = [error] * 3
    faults.before = lambda _: failures.pop() if failures else None
    digest, _ = store.put_blob_bytes(b"x")
    assert not failures
    assert store.has_blob(digest)


@pytest.mark.parametrize("error", [*AWAY, (503, "SlowDown"), (500, "InternalError")], ids=str)
def test_who_waits_for_a_storage_that_is_away_is_asked_before_each_try(
    s3_connection: dict[str, str], error: Exception | tuple[int, str]
) -> None:
    store = S3Store(**{**s3_connection, "patience": 0.1})
    faults = Faults(store)
    faults.before = lambda _: error
    asked: list[StorageAway] = []

    def wait(away: StorageAway) -> None:
        asked.append(away)
        if len(asked) == 3:
            faults.before = lambda _: None

    digest, _ = store.with_patience(0.1, wait).put_blob_bytes(b"x")
    assert len(asked) == 3
    assert len({away.since for away in asked}) == 1, "from when it was first sent"
    assert store.has_blob(digest), "and everybody else has the patience of before"
    faults.before = lambda _: error
    with pytest.raises(StorageAway, match="cannot write"):
        store.put_blob_bytes(b"y")


def test_what_does_not_pass_is_not_waited_for(s3_connection: dict[str, str]) -> None:
    for wrong in ({"secret_key": "not the secret"}, {"bucket": "no-such-bucket"}):
        store = S3Store(**{**s3_connection, **wrong}).with_patience(0.1, lambda _: pytest.fail("it waits"))
        with pytest.raises(StorageUnavailable) as raised:
            store.put_blob_bytes(b"x")
        assert not isinstance(raised.value, StorageAway)


def test_wrong_credentials_are_an_error_at_once(s3_connection: dict[str, str]) -> None:
    store = S3Store(**{**s3_connection, "secret_key": "not the secret"})
    for ask in (store.check, lambda: store.put_blob_bytes(b"x"), lambda: store.lookup(["main"], KEY)):
        with pytest.raises(StorageUnavailable, match="403") as error:
            ask()
        assert "not the secret" not in str(error.value)


def test_a_missing_bucket_is_an_error_and_not_a_miss(s3_connection: dict[str, str]) -> None:
    store = S3Store(**{**s3_connection, "bucket": "no-such-bucket"})
    with pytest.raises(StorageUnavailable, match="no-such-bucket"):
        store.check()
    with pytest.raises(StorageUnavailable, match="NoSuchBucket"):
        store.lookup(["main"], KEY)


def test_the_check_leaves_nothing_behind(store: S3Store) -> None:
    store.check()
    assert list(store.list_objects("")) == []


@pytest.mark.parametrize(
    ("condition", "action"),
    [("If-None-Match", "PutObject"), ("If-Match", "PutObject"), ("If-Match", "DeleteObject")],
)
def test_a_server_that_ignores_conditions_is_refused(store: S3Store, condition: str, action: str) -> None:
    """A server like that takes every second write or delete; here the condition is lost on the way to a good one."""

    def ignore(params: dict[str, Any], **_: Any) -> None:
        params["headers"].pop(condition, None)

    store.s3.meta.events.register(f"before-call.s3.{action}", ignore)
    with pytest.raises(StorageUnavailable, match=re.escape(condition)):
        store.check()
    assert list(store.list_objects("")) == []


SPARING: list[dict[str, Any]] = [
    {"ID": "parts", "Filter": {"Prefix": ""}, "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 3}},
    {"ID": "aside", "Filter": {"Prefix": "quarantine/"}, "Expiration": {"Days": 30}},
    {"ID": "tagged", "Filter": {"Tag": {"Key": "mine", "Value": "yes"}}, "Expiration": {"Days": 30}},
]


def test_rules_of_the_bucket_that_lose_what_is_kept_are_named(
    store: S3Store, s3_client: S3Client, s3_connection: dict[str, str]
) -> None:
    bucket = s3_connection["bucket"]

    def ruled(*chosen: dict[str, Any]) -> list[tuple[str, bool]]:
        given: Any = {"Rules": [{"Status": "Enabled", **rule} for rule in chosen]}
        s3_client.put_bucket_lifecycle_configuration(Bucket=bucket, LifecycleConfiguration=given)
        return [(said, bad) for said, _, bad in rules(store)]

    assert list(rules(store)) == []
    assert ruled(*SPARING) == []
    old = {"ID": "old", "Filter": {"Prefix": "blobs/sha256/"}, "Expiration": {"Days": 30}}
    assert ruled(old) == [
        ("the lifecycle rule old deletes objects under blobs/sha256/: artifacts, refs or tokens are lost", True)
    ]
    assert ruled({**old, "Status": "Disabled"}) == []
    assert [said for said, _ in ruled({**old, "Filter": {"Prefix": ""}})] == [
        "the lifecycle rule old deletes all objects: artifacts, refs or tokens are lost"
    ]
    s3_client.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
    kept = "versioning is enabled: what the farm deletes or replaces is kept, and takes room for ever"
    assert ruled(SPARING[0]) == [(kept, False)]
    assert ruled({"ID": "past", "Filter": {"Prefix": ""}, "NoncurrentVersionExpiration": {"NoncurrentDays": 7}}) == []
    store.check()


@pytest.mark.parametrize("moved", [{"Days": 90, "StorageClass": "GLACIER"}, {"Days": 90, "StorageClass": "GLACIER_IR"}])
def test_a_rule_that_archives_what_is_read_is_named(store: S3Store, moved: dict[str, Any]) -> None:
    """No server here has such classes: the answer is AWS's, by its documents."""

    def answer(**_: Any) -> tuple[Any, Any]:
        cold = {"ID": "cold", "Status": "Enabled", "Filter": {"Prefix": "ns/"}, "Transitions": [moved]}
        return type("Answer", (), {"status_code": 200}), {"Rules": [cold]}

    store.s3.meta.events.register("before-call.s3.GetBucketLifecycleConfiguration", answer)
    said = [one for one, _, _ in rules(store)]
    cold = "the lifecycle rule cold moves objects under ns/ to GLACIER, from where nothing can be read at once"
    assert said == ([cold] if moved["StorageClass"] == "GLACIER" else [])


def test_a_bucket_in_another_region_is_named(store: S3Store) -> None:
    """boto3 finds the region by itself, and presigned addresses do not; AWS tells it in this header."""

    def tell(parsed: dict[str, Any], **_: Any) -> None:
        parsed["ResponseMetadata"]["HTTPHeaders"]["x-amz-bucket-region"] = "eu-central-1"

    store.s3.meta.events.register("after-call.s3.HeadBucket", tell)
    ((said, fix, bad),) = rules(store)
    assert said == "the bucket is in eu-central-1, and s3_region is us-east-1: presigned addresses are refused"
    assert (fix, bad) == ("set s3_region = eu-central-1", True)


def test_a_store_in_another_region_works_and_signs_for_it(s3_connection: dict[str, str]) -> None:
    store = S3Store(**s3_connection, region="eu-central-1")
    store.check()
    digest, _ = store.put_blob_bytes(b"far away")
    address = store.presign_get(blob_key(digest))
    assert "eu-central-1" in address
    assert httpx.get(address, timeout=60).content == b"far away"


def test_our_own_bucket_can_be_made_twice(s3_connection: dict[str, str]) -> None:
    store = S3Store(**s3_connection)
    store.create()
    store.check()


def test_a_server_answers_if_it_takes_and_gives_back_an_object(s3_connection: dict[str, str]) -> None:
    store = S3Store(**s3_connection, patience=600.0)
    assert store.answers()
    assert list(store.list_objects("")) == []
    faults = Faults(store)
    faults.before = lambda _: (503, "SlowDown")
    assert not store.answers(), "it is asked once"


def test_a_server_that_refuses_the_right_condition_is_refused(store: S3Store, faults: Faults) -> None:
    faults.before = lambda request: (412, "PreconditionFailed") if request.method == "PUT" else None
    with pytest.raises(StorageUnavailable, match="refuses a conditional write that it should take"):
        store.check()


def test_the_parts_of_an_upload_that_is_gone_are_one_object_only_if_it_is_there(store: S3Store) -> None:
    with pytest.raises(StorageUnavailable, match="NoSuchUpload"):
        store.complete("a", "f" * 32, [{"PartNumber": 1, "ETag": '"x"'}], done=lambda: False)
    store.complete("a", "f" * 32, [{"PartNumber": 1, "ETag": '"x"'}], done=lambda: True)


def test_a_part_of_a_blob_that_is_gone_is_an_error_and_none_of_nothing(store: S3Store) -> None:
    digest, _ = store.put_blob_bytes(b"0123456789")
    assert store.read_range(digest, 2, 5) == b"234"
    assert store.read_range(MISSING, 5, 5) == b""
    with pytest.raises(ArtifactGone, match="there is no"):
        store.read_range(MISSING, 0, 1)


@pytest.mark.parametrize("name", ["", "ab", "A" * 64, "g" * 64, "0" * 63, "0" * 65, "../" + "0" * 61])
def test_only_a_digest_names_a_blob(name: str) -> None:
    assert blob_key("0f" * 32) == f"blobs/sha256/0f/{'0f' * 32}"
    with pytest.raises(ValueError, match="is not a SHA-256 in hex"):
        blob_key(name)


def test_a_namespace_reads_main_first_and_main_only_itself() -> None:
    assert (readable("main"), readable("team")) == (["main"], ["main", "team"])


def test_an_object_is_rewritten_only_where_it_changes_and_by_one_writer_after_another(store: S3Store) -> None:
    asked: list[bytes | None] = []

    def change(to: bytes) -> Callable[[Any], bytes]:
        def changed(there: Any) -> bytes:
            asked.append(there.data if there else None)
            if to == b"2" and len(asked) == 2:
                rewrite(store, "a", lambda _: b"other")
            return to

        return changed

    rewrite(store, "a", change(b"1"))
    first = store.get_object("a")
    rewrite(store, "a", change(b"2"))
    assert asked == [None, b"1", b"other"]
    found = store.get_object("a")
    assert found and first and found.data == b"2" and found.etag != first.etag
    faulty = Faults(store)
    faulty.before = lambda request: (500, "InternalError") if request.method == "PUT" else None
    rewrite(store, "a", lambda _: b"2")
    assert faulty.count == 0, "the same bytes are not written again"


def test_what_is_read_of_another_bucket_is_as_it_was_and_not_too_large(
    store: S3Store, s3_connection: dict[str, str], tmp_path: Path
) -> None:
    bucket, path = s3_connection["bucket"], tmp_path / "model.onnx"
    store.put_object("models/net.onnx", b"0123456789")
    version = store.source_version(bucket, "models/net.onnx")
    store.get_source(bucket, "models/net.onnx", version, path, limit=10)
    assert path.read_bytes() == b"0123456789"
    with pytest.raises(UsageError, match="has more than 9 bytes"):
        store.get_source(bucket, "models/net.onnx", version, path, limit=9)
    with pytest.raises(UsageError, match="cannot be read: 404"):
        store.source_version(bucket, "models/other.onnx")
    faults = Faults(store)
    faults.before = lambda _: (503, "SlowDown")
    with pytest.raises(StorageUnavailable, match="cannot be read: SlowDown") as raised:
        store.get_source(bucket, "models/net.onnx", version, path, limit=10)
    assert "its bucket is busy" in str(raised.value)
    faults.before = lambda _: EndpointConnectionError(endpoint_url="u")
    with pytest.raises(StorageUnavailable, match="cannot be reached: EndpointConnectionError"):
        store.source_version(bucket, "models/net.onnx")
