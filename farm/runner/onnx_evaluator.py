"""The `onnx` package's own evaluator: slow, and the definition of what every ONNX operator and type means.

It computes right outputs for models that ONNX Runtime does not take: in bfloat16 or float8, of newer operators. Some
attributes and inputs it ignores without a word. So `onnx_forms.json` has, for each of its operators, what its nodes had
in ONNX's own cases that it gets right: attributes other than the default, optional inputs and outputs. `make forms`
makes it. A node with anything else is in a form that nobody has checked.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator
from onnx.reference.ops import load_op

from .measuring import Program
from .onnx_models import outputs_behind
from .protocol import blamed_on_compiler

if TYPE_CHECKING:
    from .documents import Array, Arrays, Request


class _Evaluated(Program):
    def __init__(self, path: str) -> None:
        with blamed_on_compiler(_REFUSAL):
            self.evaluator = ReferenceEvaluator(onnx.load_model(path))
        self.outputs = [str(name) for name in self.evaluator.output_names]

    def run(self, prepared: Arrays) -> list[Array]:
        """Run once."""
        with blamed_on_compiler(_REFUSAL):
            return [np.asarray(value) for value in self.evaluator.run(None, prepared)]


_REFUSAL = "the onnx package's evaluator cannot run the model"


def load_reference(request: Request) -> _Evaluated:
    """Load the original model, unchanged."""
    return _Evaluated(request["model"]["path"])


LIST = Path(__file__).with_name("onnx_forms.json")


def doubted_outputs(model: Any) -> dict[str, str]:
    """Return the outputs of a model whose values the evaluator may get wrong, each with the reason."""
    known = json.loads(LIST.read_text())
    right: dict[str, list[str]] = known["right"]
    versions = versions_of(model)

    def why(node: Any) -> str:
        if onnx.__version__ != known["onnx"]:
            return f"the evaluator of onnx {onnx.__version__} was not checked, only that of {known['onnx']}"
        operator, parts = form_of(node, versions)
        unknown = sorted(parts.difference(right.get(operator, ())))
        if operator in right and not unknown:
            return ""
        form = " with ".join(filter(None, [node.op_type, ", ".join(unknown)]))
        return f"the onnx package's evaluator is not known to be right for {form}"

    return outputs_behind(model, why)


def versions_of(model: Any) -> dict[str, int]:
    """Return the versions of a model's operators by their domain; the default one is empty."""
    return {each.domain if each.domain != "ai.onnx" else "": each.version for each in model.opset_import}


def form_of(node: Any, versions: Mapping[str, int]) -> tuple[str, frozenset[str]]:
    """Return which of the evaluator's operators runs a node, and what the node has beyond what it must have."""
    domain = node.domain if node.domain != "ai.onnx" else ""
    version = versions.get(domain, 1)
    operator = f"{domain}.{node.op_type}" if domain else _implementation(node.op_type, version)
    try:
        schema = onnx.defs.get_schema(node.op_type, version, domain)
    except onnx.defs.SchemaError:
        return operator, frozenset({"a domain or version that onnx does not have"})
    return operator, frozenset([*_attributes(node, schema), *_ports(node, schema)])


def _attributes(node: Any, schema: Any) -> Iterator[str]:
    """Yield attributes that are not the default: texts with their values, since each is another algorithm."""
    for attribute in node.attribute:
        value = onnx.helper.get_attribute_value(attribute)
        default = schema.attributes[attribute.name].default_value if attribute.name in schema.attributes else None
        if default is not None and default.type and value == onnx.helper.get_attribute_value(default):
            continue
        texts = [value] if isinstance(value, bytes) else value if isinstance(value, list) else []
        if texts and all(isinstance(text, bytes) for text in texts):
            yield f"{attribute.name}={','.join(text.decode(errors='replace')[:50] for text in texts)}"
        else:
            yield attribute.name


def _ports(node: Any, schema: Any) -> Iterator[str]:
    for what, names, formal in (("input", node.input, schema.inputs), ("output", node.output, schema.outputs)):
        for name, port in zip(names, formal, strict=False):
            if name and port.option.name == "Optional":
                yield f"{what} {port.name}"


@cache
def _implementation(op_type: str, version: int) -> str:
    """Return the name of the class that runs an operator: older versions of it may have one of their own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            found = load_op("", op_type, version, evaluator_cls=ReferenceEvaluator)
        except Exception:  # The evaluator refuses it too, or takes the function in its schema, by the inputs' types.
            return op_type
    name = str(getattr(found, "__name__", ""))
    return name if name.isidentifier() else op_type
