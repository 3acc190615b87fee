"""The manifest's JSON Schema, for editors: the same rules as the parser's."""

from __future__ import annotations

import ast
import inspect
import json
import sys
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from typing import Any

from farm.manifest.entries import Manifest
from farm.manifest.values import SCHEMA_ID, Entry
from farm.spec import JsonSchema


@cache
def manifest_schema(*, draft7: bool = False) -> JsonSchema:
    """Return the manifest's JSON Schema: draft 2020-12, or draft-07 for the editors that know no other.

    It accepts what `parse_manifest` accepts, except that it does not compare entries (unknown names, selectors).
    It is made once: do not change the result.
    """
    schema = _tidy(_described(Manifest.model_json_schema(by_alias=True)))
    schema["title"] = "Compile farm manifest"
    if not draft7:
        return {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": SCHEMA_ID, **schema}
    text = json.dumps(_as_draft7(schema)).replace('"#/$defs/', '"#/definitions/')
    identity = SCHEMA_ID.replace(".schema", ".draft7.schema")
    return {"$schema": "http://json-schema.org/draft-07/schema#", "$id": identity, **json.loads(text)}


def _described(schema: JsonSchema) -> JsonSchema:
    """Add to each field its docstring, and name an entry's own fields before those that it inherits.

    Pydantic would read the source for the docstrings at every start of `farm`.
    """
    for kind in _kinds(Entry):
        if document := schema if kind is Manifest else schema["$defs"].get(kind.__name__):
            texts, fields = _docstrings(kind), document["properties"]
            for name in kind.model_fields.keys() & texts:
                alias = kind.model_fields[name].alias
                fields[alias] = dict(sorted({"description": texts[name], **fields[alias]}.items()))
            own = {kind.model_fields[name].alias for name in kind.__annotations__ if name in kind.model_fields}
            document["properties"] = dict(sorted(fields.items(), key=lambda field: field[0] not in own))
    return schema


def _kinds(kind: type[Entry]) -> Iterator[type[Entry]]:
    for special in kind.__subclasses__():
        yield special
        yield from _kinds(special)


def _docstrings(kind: type[Entry]) -> dict[str, str]:
    """Return the docstring of each field of a kind of entry, with the inherited ones."""
    found: dict[str, str] = {}
    for base in (kind for kind in reversed(kind.__mro__) if issubclass(kind, Entry)):
        for above, below in pairwise(_classes(base.__module__)[base.__name__].body):
            match above, below:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    found[name] = inspect.cleandoc(text)
    return found


@cache
def _classes(module: str) -> dict[str, ast.ClassDef]:
    """Return the classes at the top of a module by name; the source is read once for all."""
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


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
    result: JsonSchema = {}
    dependencies: JsonSchema = {}
    for key, value in schema.items():
        if key in ("dependentRequired", "dependentSchemas"):
            dependencies |= _as_draft7(value)
        else:
            result["definitions" if key == "$defs" else key] = _as_draft7(value)
    if dependencies:
        result["dependencies"] = dependencies
    if "$ref" in result and len(result) > 1:
        # In draft-07 a reference hides all other keys of its object.
        return {"allOf": [{"$ref": result.pop("$ref")}], **result}
    return result
