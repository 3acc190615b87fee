"""One form for each document: what the API publishes and checks has the fields of the type that the code uses."""

from __future__ import annotations

from typing import Any, get_type_hints

import pytest
from pydantic import BaseModel

from farm.artifacts import sidecar
from farm.client import family

STORED: list[tuple[type[BaseModel], Any]] = [
    (sidecar.Blobs, sidecar.BlobsDocument),
    (sidecar.Sidecar, sidecar.SidecarDocument),
    (family.Family, family.FamilyIndex),
    (family.Member, family.MemberDocument),
    (family.MemberInput, family.MemberPort),
]
"""Documents in files: the type has fields that are read without a check, some or all of the model's."""


def fields(model: type[BaseModel]) -> set[str]:
    return {field.alias or name for name, field in model.model_fields.items()}


@pytest.mark.parametrize(("model", "document"), STORED)
def test_what_is_read_is_in_the_stored_document(model: type[BaseModel], document: Any) -> None:
    assert set(get_type_hints(document)) <= fields(model)
