"""The manifest's JSON Schema, for editors: the same rules as the parser's."""

from __future__ import annotations

import json
from typing import Any

from farm.manifest.entries import Manifest
from farm.manifest.values import SCHEMA_ID


def manifest_schema(*, draft7: bool = False) -> dict[str, Any]:
    """Return the manifest's JSON Schema: draft 2020-12, or draft-07 for the editors that know no other.

    It accepts what `parse_manifest` accepts, but for what one entry says about another (unknown names, selectors).
    """
    schema = _tidy(Manifest.model_json_schema(by_alias=True))
    schema["title"] = "Compile farm manifest"
    if not draft7:
        return {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": SCHEMA_ID, **schema}
    text = json.dumps(_as_draft7(schema)).replace('"#/$defs/', '"#/definitions/')
    identity = SCHEMA_ID.replace(".schema", ".draft7.schema")
    return {"$schema": "http://json-schema.org/draft-07/schema#", "$id": identity, **json.loads(text)}


def _tidy(schema: Any) -> Any:
    """Close mappings whose keys have a pattern, and drop titles and the defaults that say nothing."""
    if isinstance(schema, list):
        return [_tidy(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    result = {
        key: _tidy(value)
        for key, value in schema.items()
        if not (key == "title" and isinstance(value, str))
        and not (key == "default" and not isinstance(value, str | int))
    }
    if "patternProperties" in result:
        result.setdefault("additionalProperties", False)
    return result


def _as_draft7(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_as_draft7(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    result: dict[str, Any] = {}
    dependencies: dict[str, Any] = {}
    for key, value in schema.items():
        if key in ("dependentRequired", "dependentSchemas"):
            dependencies |= _as_draft7(value)
        else:
            result["definitions" if key == "$defs" else key] = _as_draft7(value)
    if dependencies:
        result["dependencies"] = dependencies
    if "$ref" in result and len(result) > 1:
        # In draft-07 a reference hides everything beside it.
        return {"allOf": [{"$ref": result.pop("$ref")}], **result}
    return result
