"""Documents that are checked in for those who read them without running the farm: they say what the code says."""

from __future__ import annotations

import json
import re

import jsonschema

from farm.artifacts import sidecar
from farm.client.fetching import family_schema
from farm.serving.server import openapi
from tests.contracts.published import command_lines
from tests.support.places import ROOT


def test_the_api_document_is_up_to_date() -> None:
    """`make schemas` writes it again."""
    document = json.loads((ROOT / "docs" / "openapi.json").read_text())
    # Words that libraries put in change with their versions; paths and names are ours.
    assert document["paths"].keys() == openapi()["paths"].keys()
    assert document["components"]["schemas"].keys() == openapi()["components"]["schemas"].keys()


def test_the_sidecars_schema_is_up_to_date_and_a_schema() -> None:
    """`make schemas` writes it again."""
    document = json.loads((ROOT / "configs" / "artifact.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(document)
    assert document["properties"].keys() == sidecar.schema()["properties"].keys()


def test_the_family_index_schema_is_up_to_date_and_a_schema() -> None:
    """`make schemas` writes it again."""
    document = json.loads((ROOT / "configs" / "family.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(document)
    assert document == family_schema()


def test_systemds_units_use_options_that_the_commands_have() -> None:
    commands = command_lines()
    for unit in (ROOT / "deploy" / "systemd").glob("*.service"):
        text = unit.read_text()
        command = re.findall(r"^ExecStart=\S+/(farm \w+)", text, re.MULTILINE)[0]
        options = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", text))
        assert options <= commands[command]["parameters"].keys(), unit.name
