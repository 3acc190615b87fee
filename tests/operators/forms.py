"""Which forms of operators the `onnx` package's evaluator gets right in ONNX's own cases: `onnx_forms.json`.

python -m tests.operators.forms            say what would change
python -m tests.operators.forms --write    write the list again, for the installed onnx
"""

from __future__ import annotations

import argparse
import importlib
import json
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
from onnx.backend.test.case import node as operators
from onnx.backend.test.case.node import collect_testcases
from onnx.backend.test.loader import load_model_tests
from onnx.reference import ReferenceEvaluator

from farm.runner.onnx_evaluator import LIST, form_of, versions_of
from farm.runner.onnx_models import nodes_of


def main() -> int:
    """Compare the list with the cases; 1 if it is not up to date."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    write = parser.parse_args().write
    cases = cases_of("")
    older = [each for case in cases for each in at_older_versions(case)]
    ends = {case.name: agrees(case) for case in [*cases, *older]}
    cases += [case for case in older if ends[case.name]]
    text = json.dumps({"onnx": onnx.__version__, "right": right_forms(cases, ends)}, indent=1) + "\n"
    wrong = sorted(case.name for case in cases if not ends[case.name])
    print(f"{len(cases)} cases of onnx {onnx.__version__}, {len(older)} more tried at older versions")
    print(f"{len(wrong)} are not right: {', '.join(wrong)}")
    same = LIST.exists() and LIST.read_text() == text
    if write:
        LIST.write_text(text)
    print("up to date" if same else f"{'written' if write else 'not up to date'}: {LIST.name}")
    return 0 if same or write else 1


class Case(NamedTuple):
    """A model with inputs, and the outputs that are right for them."""

    name: str
    model: onnx.ModelProto
    runs: Sequence[tuple[Sequence[Any], Sequence[Any]]]
    rtol: float = 1e-3
    atol: float = 1e-6


def cases_of(start: str) -> list[Case]:
    """Return ONNX's own cases whose names go on from `test_` with this: of operators, and those made from PyTorch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = [case for case in _collected(start) if case.name.startswith(f"test_{start}")]
    values = [
        [([_value(each) for each in given], [_value(each) for each in wanted]) for given, wanted in case.data_sets]
        for case in found
    ]
    cases = [
        Case(case.name, case.model, runs, max(case.rtol, 1e-3), max(case.atol, 1e-6))
        for case, runs in zip(found, values, strict=True)
    ]
    for kind in ("pytorch-converted", "pytorch-operator", "simple"):
        for each in load_model_tests(kind=kind):
            if each.model_dir and each.name.startswith(f"test_{start}"):
                cases.append(_stored(each.name, Path(each.model_dir)))
    return cases


def _collected(start: str) -> list[Any]:
    """Make the cases of operators; of some alone, for which those of a module of their name are made: all take 5 s."""
    if not start:
        return list(collect_testcases(None))
    importlib.import_module(f"{operators.__name__}.{start.rstrip('_')}")
    return list(operators._NodeTestCases)


def _stored(name: str, folder: Path) -> Case:
    """Read a case that is kept as files."""

    def values(data: Path, what: str) -> list[Any]:
        files = sorted(data.glob(f"{what}_*.pb"), key=lambda path: int(path.stem.rpartition("_")[2]))
        return [onnx.numpy_helper.to_array(onnx.TensorProto.FromString(path.read_bytes())) for path in files]

    runs = [(values(data, "input"), values(data, "output")) for data in sorted(folder.glob("test_data_set_*"))]
    return Case(name, onnx.load(folder / "model.onnx"), runs)


def at_older_versions(case: Case) -> Iterator[Case]:
    """Yield a case of one node as models of older versions have it, if the evaluator has other code for them.

    What is an attribute there is taken out of the inputs. A case that means something else there ends wrong.
    """
    versions, (node, *others) = versions_of(case.model), case.model.graph.node
    if others or node.domain or case.model.functions:
        return
    seen = {form_of(node, versions)[0]}
    for version in range(versions[""] - 1, 5, -1):
        older = onnx.ModelProto.FromString(case.model.SerializeToString())
        older.opset_import[0].version = version
        try:
            schema = onnx.defs.get_schema(node.op_type, version)
            operator, _ = form_of(node, {"": version})
            if operator in seen:
                continue
            runs = [(_moved(older.graph, schema, given), wanted) for given, wanted in case.runs]
            onnx.checker.check_model(older)
        except (onnx.defs.SchemaError, onnx.checker.ValidationError, ValueError):
            continue
        seen.add(operator)
        yield case._replace(name=f"{case.name} at version {version}", model=older, runs=runs)


def _moved(graph: Any, schema: Any, given: Sequence[Any]) -> list[Any]:
    """Make attributes of the inputs that are such in an older version; return the others. Raises ValueError."""
    node, left = graph.node[0], list(given)
    latest = onnx.defs.get_schema(node.op_type)
    named = dict(zip(node.input, (port.name for port in latest.inputs), strict=False))
    for name, value in reversed(list(zip([port.name for port in graph.input], given, strict=False))):
        if named.get(name) not in schema.attributes:
            continue
        place = next(index for index, port in enumerate(graph.input) if port.name == name)
        if list(node.input)[-1] == name:
            node.input.pop()
        if not any(each.name == named[name] for each in node.attribute):
            node.attribute.append(onnx.helper.make_attribute(named[name], value.tolist()))
        del graph.input[place], left[place]
    if len(node.input) > len(schema.inputs) and schema.inputs[-1].option.name != "Variadic":
        raise ValueError("it has more inputs than there are in this version")
    return left


def agrees(case: Case) -> bool:
    """Whether the evaluator's outputs are those of a case; not if it refuses the case."""
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            evaluator = ReferenceEvaluator(case.model)
            names = [port.name for port in case.model.graph.input]
            return all(
                _equal(made, right, case)
                for given, wanted in case.runs
                for made, right in zip(evaluator.run(None, dict(zip(names, given, strict=False))), wanted, strict=True)
            )
    except Exception:
        return False


def _value(value: Any) -> Any:
    return onnx.numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else value


def _equal(made: Any, wanted: Any, case: Case) -> bool:
    if isinstance(wanted, list):
        return len(made) == len(wanted) and all(_equal(*pair, case) for pair in zip(made, wanted, strict=True))
    if wanted is None:
        return made is None
    one, other = np.asarray(made), np.asarray(wanted)
    if one.shape != other.shape:
        return False
    if other.dtype.kind in "OSU":
        return bool((one.astype(str) == other.astype(str)).all())
    wide = np.complex128 if other.dtype.kind == "c" else np.float64
    close = np.allclose(
        one.astype(wide), other.astype(wide), max(case.rtol, 1e-3), max(case.atol, 1e-6), equal_nan=True
    )
    return one.dtype == other.dtype and bool(close)


def right_forms(cases: Sequence[Case], ends: dict[str, bool]) -> dict[str, list[str]]:
    """Return what nodes have in the cases of one node that end right only with it, by the evaluator's operator.

    An operator with a case that ends wrong is left out. Of a wrong case with several nodes those that run a graph are
    blamed: the others have cases of their own.
    """
    wrong: set[str] = set()
    single: list[tuple[Case, str, frozenset[str]]] = []
    for case in cases:
        nodes, versions = list(nodes_of(case.model.graph)), versions_of(case.model)
        if not ends[case.name]:
            blamed = [node for node in nodes if len(nodes) == 1 or any(each.HasField("g") for each in node.attribute)]
            wrong |= {form_of(node, versions)[0] for node in blamed}
        elif len(case.model.graph.node) == 1:
            single.append((case, *form_of(case.model.graph.node[0], versions)))
    right: dict[str, set[str]] = {}
    tried = Counter[tuple[str, str]]()
    for case, operator, parts in single:
        if operator in wrong:
            continue  # Without its trip count a Loop has no end.
        known = right.setdefault(operator, set())
        unknown = {part for part in parts - known if tried[operator, part] < TRIES}
        tried.update((operator, part) for part in unknown)
        known.update(part for part in unknown if _matters(case, part))
    return {operator: sorted(parts) for operator, parts in sorted(right.items())}


TRIES = 10
"""Cases that are asked at most whether a part matters."""

SAID_TWICE = {"kernel_shape", "hidden_size"}
"""Attributes that the shapes of the weights say, too."""


def _matters(case: Case, part: str) -> bool:
    """Whether a case ends otherwise without this: a case proves nothing of what may be ignored in it."""
    kind, _, name = part.rpartition(" ") if part.startswith(("input ", "output ")) else ("", "", part.partition("=")[0])
    if kind == "output" or name in SAID_TWICE:
        return True
    model = onnx.ModelProto.FromString(case.model.SerializeToString())
    (node,) = model.graph.node
    if kind:
        schema = onnx.defs.get_schema(node.op_type, versions_of(model)[node.domain], node.domain)
        node.input[[port.name for port in schema.inputs].index(name)] = ""
    else:
        left = [each for each in node.attribute if each.name != name]
        del node.attribute[:]
        node.attribute.extend(left)
    return not agrees(case._replace(model=model))


if __name__ == "__main__":
    raise SystemExit(main())
