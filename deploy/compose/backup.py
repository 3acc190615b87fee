"""Copy the farm's bucket to a folder, and back: object storage is the record, and Redis is filled from it.

    docker compose --profile core run --rm backup save       # copies what is new to the folder FARM_BACKUP
    docker compose --profile core run --rm backup restore    # copies all back into an empty bucket

It may save while the farm works: documents are copied before the blobs that they name, and no blob that has a name
goes. It restores in the opposite order, so that nothing ever names a blob that is not there. Objects that the farm
deleted stay in the folder; a new folder now and then leaves them out.

Without compose: `backup.py save FOLDER` with the settings of `farm-serve`.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
from botocore.config import Config

from farm.settings import load_settings

FOLDER = Path(*sys.argv[2:3] or ["/backup"])
PARTS = ("config/", "ns/", "gc/", "quarantine/", "blobs/")
"""Starts of the keys, in the order in which they are saved; `uploads/` are not finished yet."""

settings = load_settings()
bucket = settings.s3_bucket
s3: Any = boto3.client(
    "s3",
    endpoint_url=settings.s3_endpoint or None,
    region_name=settings.s3_region,
    aws_access_key_id=settings.s3_access_key.get_secret_value() or None,
    aws_secret_access_key=settings.s3_secret_key.get_secret_value() or None,
    config=Config(s3={"addressing_style": "path"} if settings.s3_endpoint else {}),
)


def stored(part: str) -> Iterator[tuple[str, int]]:
    """Yield key and size of all objects whose keys start so."""
    for page in s3.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=part):
        for entry in page.get("Contents", ()):
            if ".." in entry["Key"].split("/"):
                sys.exit(f"the key {entry['Key']!r} leads out of its folder: the farm writes none such, so delete it")
            yield entry["Key"], entry["Size"]


def save() -> int:
    """Copy what is not in the folder yet; a blob of the right size is, since its name is its digest."""
    copied = 0
    for part in PARTS:
        for key, size in stored(part):
            place = FOLDER / key
            if part == "blobs/" and place.is_file() and place.stat().st_size == size:
                continue
            place.parent.mkdir(parents=True, exist_ok=True)
            partial = place.with_name(f"{place.name}.part")
            s3.download_file(bucket, key, str(partial))
            partial.replace(place)
            copied += 1
    return copied


def restore() -> int:
    """Copy the folder into the bucket, which has to be empty."""
    if next(stored("ns/"), None):
        sys.exit(f"the bucket {bucket} has artifacts already: restore into an empty one")
    copied = 0
    for part in reversed(PARTS):
        for place in sorted((FOLDER / part).rglob("*")):
            if place.is_file() and place.suffix != ".part":
                kind = "application/json" if place.suffix == ".json" else "application/octet-stream"
                s3.upload_file(
                    str(place), bucket, place.relative_to(FOLDER).as_posix(), ExtraArgs={"ContentType": kind}
                )
                copied += 1
    return copied


actions = {"save": save, "restore": restore}
if sys.argv[1:2] == [] or sys.argv[1] not in actions:
    sys.exit(__doc__)
print(f"{sys.argv[1]}: {actions[sys.argv[1]]()} objects")  # noqa: T201
