"""What a bucket does by itself: lifecycle rules, versioning, its region. `farm doctor` asks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from farm.artifacts.storage import BLOBS

if TYPE_CHECKING:
    from mypy_boto3_s3.type_defs import LifecycleRuleOutputTypeDef

    from farm.artifacts.s3_bucket import Bucket

FROZEN = frozenset({"GLACIER", "DEEP_ARCHIVE"})
"""Storage classes whose objects have to be restored before they are read."""


def rules(bucket: Bucket) -> Iterator[tuple[str, str, bool]]:
    """What the bucket's own settings do to the farm: each with what to do, and whether something is lost or fails.

    Raises StorageUnavailable if our keys may not read them.
    """
    s3, name = bucket.s3, bucket.name
    head = bucket.ask("reach", "", lambda: s3.head_bucket(Bucket=name))
    ours, its = s3.meta.region_name, head["ResponseMetadata"]["HTTPHeaders"].get("x-amz-bucket-region")
    if its not in (None, ours):
        said = f"the bucket is in {its}, and s3_region is {ours}: presigned addresses are refused"
        yield said, f"set s3_region = {its}", True
    asked = bucket.unless_absent("read the rules of", "", lambda: s3.get_bucket_lifecycle_configuration(Bucket=name))
    enabled = [rule for rule in (asked["Rules"] if asked else []) if rule["Status"] == "Enabled"]
    for rule in enabled:
        if what := _takes(rule):
            said = f"the lifecycle rule {rule.get('ID', 'without an id')} {what}"
            yield said, "remove the rule, or limit it to quarantine/", True
    status = bucket.ask("read the versioning of", "", lambda: s3.get_bucket_versioning(Bucket=name).get("Status"))
    if status and not any("NoncurrentVersionExpiration" in rule for rule in enabled):
        said = f"versioning is {status.lower()}: what the farm deletes or replaces is kept, and takes room for ever"
        yield said, "add a lifecycle rule with NoncurrentVersionExpiration", False


def _takes(rule: LifecycleRuleOutputTypeDef) -> str:
    """What an enabled lifecycle rule does to objects that the farm keeps; empty if it spares them."""
    chosen = rule.get("Filter", {})
    both = chosen.get("And", {})
    if chosen.get("Tag") or both.get("Tags"):  # The farm tags nothing.
        return ""
    prefix = rule.get("Prefix") or chosen.get("Prefix") or both.get("Prefix") or ""
    if not any(kept.startswith(prefix) or prefix.startswith(kept) for kept in (BLOBS, "ns/", "config/")):
        return ""
    where = f"objects under {prefix}" if prefix else "all objects"
    if {"Days", "Date"} & set(rule.get("Expiration", {})):
        return f"deletes {where}: artifacts, refs or tokens are lost"
    frozen = [move["StorageClass"] for move in rule.get("Transitions", []) if move.get("StorageClass") in FROZEN]
    return f"moves {where} to {frozen[0]}, from where nothing can be read at once" if frozen else ""
