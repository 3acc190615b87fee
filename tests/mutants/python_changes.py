"""Small changes of a Python file, each of which a test should notice. Texts, logs and annotations stay as they are."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import accumulate, pairwise

from tests.mutants.change import Change, other_number

SWAPS: dict[type[ast.AST], tuple[str, bytes, str]] = {
    ast.Lt: ("comparison", rb"<", "<="),
    ast.LtE: ("comparison", rb"<=", "<"),
    ast.Gt: ("comparison", rb">", ">="),
    ast.GtE: ("comparison", rb">=", ">"),
    ast.Eq: ("comparison", rb"==", "!="),
    ast.NotEq: ("comparison", rb"!=", "=="),
    ast.Is: ("comparison", rb"\bis\b", "is not"),
    ast.IsNot: ("comparison", rb"\bis\s+not\b", "is"),
    ast.In: ("comparison", rb"\bin\b", "not in"),
    ast.NotIn: ("comparison", rb"\bnot\s+in\b", "in"),
    ast.And: ("boolean", rb"\band\b", "or"),
    ast.Or: ("boolean", rb"\bor\b", "and"),
    ast.Add: ("arithmetic", rb"\+", "-"),
    ast.Sub: ("arithmetic", rb"-", "+"),
    ast.Mult: ("arithmetic", rb"\*", "/"),
    ast.Div: ("arithmetic", rb"/", "*"),
    ast.FloorDiv: ("arithmetic", rb"//", "*"),
    ast.Mod: ("arithmetic", rb"%", "*"),
    ast.Pow: ("arithmetic", rb"\*\*", "*"),
    ast.LShift: ("arithmetic", rb"<<", ">>"),
    ast.RShift: ("arithmetic", rb">>", "<<"),
    ast.BitXor: ("arithmetic", rb"\^", "|"),
    ast.BitOr: ("arithmetic", rb"\|", "&"),
    ast.BitAnd: ("arithmetic", rb"&", "|"),
}
"""What becomes of an operator: the sort of change, how it is written, what is written instead."""

OPPOSITES = (ast.Eq, ast.NotEq, ast.Is, ast.IsNot, ast.In, ast.NotIn)
"""An inverted condition of one of these alone would be the same change as the swap."""

TEXTS = {"description", "examples", "hint", "title"}
"""Arguments that are for people. So is `strict` of `zip`: like `assert`, it says what is true anyway."""

CACHES = {"cache", "cached_property", "lru_cache"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def python_changes(file: str, source: bytes) -> list[Change]:
    """Return every change of a file, in order of place."""
    return sorted(set(_Finder(file, source).of_block(ast.parse(source).body, None)))


class _Finder:
    """Finds the changes of one file; `around` is the function that a place is in."""

    def __init__(self, file: str, source: bytes) -> None:
        self._file = file
        self._source = source
        self._starts = [0, *accumulate(map(len, source.splitlines(keepends=True)))]

    def of_block(self, body: list[ast.stmt], around: Function | None) -> Iterator[Change]:
        for statement in body:
            if isinstance(statement, ast.Assert | ast.Import | ast.ImportFrom) or _is_log(statement):
                continue
            if isinstance(statement, ast.If) and ast.unparse(statement.test) == "TYPE_CHECKING":  # For annotations.
                continue
            if around and _may_go(statement, around):
                yield self._change("dropped statement", around, statement, *self._span(statement), "pass")
            yield from self._of(statement, around)

    def _of(self, node: ast.AST, around: Function | None) -> Iterator[Change]:
        if isinstance(node, ast.JoinedStr | ast.Raise):  # Both make texts.
            return
        yield from self._of_itself(node, around)
        if isinstance(node, Function):
            for each in (*node.decorator_list, *node.args.defaults, *filter(None, node.args.kw_defaults)):
                yield from self._of(each, around)
            yield from self.of_block(node.body, node)
            return
        for field, value in ast.iter_fields(node):
            if field in {"annotation", "bases", "keywords" if isinstance(node, ast.ClassDef) else ""}:
                continue
            if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
                yield from self.of_block(value, around)
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST) and not _is_for_people(child):
                    yield from self._of(child, around)

    def _of_itself(self, node: ast.AST, around: Function | None) -> Iterator[Change]:
        match node:
            case ast.Compare():
                for operator, (left, right) in zip(node.ops, pairwise([node.left, *node.comparators]), strict=True):
                    yield self._swapped(around, operator, left, right)
            case ast.BoolOp():
                for left, right in pairwise(node.values):
                    yield self._swapped(around, node.op, left, right)
            case ast.BinOp() if not (_is_text(node.left) or _is_text(node.right) or _is_type(node)):
                yield self._swapped(around, node.op, node.left, node.right)
            case ast.AugAssign() if not _is_text(node.value):
                yield self._swapped(around, node.op, node.target, node.value)
            case ast.UnaryOp(op=ast.Not()):
                start, end = self._span(node)
                found = re.match(rb"not\b\s*", self._source[start:end])
                assert found
                yield self._change("boolean", around, node, start, start + found.end(), "")
            case ast.Constant(value=bool() as value):
                yield self._change("boolean", around, node, *self._span(node), str(not value))
            case ast.Constant(value=int() | float() as value):
                yield self._change("number", around, node, *self._span(node), other_number(value))
            case ast.If() | ast.While() | ast.IfExp():
                yield from self._inverted(around, node.test)
            case ast.comprehension():
                for test in node.ifs:
                    yield from self._inverted(around, test)

    def _swapped(self, around: Function | None, operator: ast.AST, left: ast.expr, right: ast.expr) -> Change:
        sort, written, instead = SWAPS[type(operator)]
        start, end = self._span(left)[1], self._span(right)[0]
        found = re.search(written, self._source[start:end])
        assert found, self._source[start:end]
        place = ast.copy_location(ast.Pass(), left)
        place.end_lineno = right.end_lineno
        return self._change(sort, around, place, start + found.start(), start + found.end(), instead)

    def _inverted(self, around: Function | None, test: ast.expr) -> Iterator[Change]:
        if isinstance(test, ast.UnaryOp) or (isinstance(test, ast.Compare) and isinstance(test.ops[0], OPPOSITES)):
            return
        start, end = self._span(test)
        yield self._change("inverted condition", around, test, start, end, f"not ({self._source[start:end].decode()})")

    def _span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self._starts[node.lineno - 1] + node.col_offset, self._starts[node.end_lineno - 1] + node.end_col_offset

    def _change(
        self, sort: str, around: Function | None, place: ast.expr | ast.stmt, start: int, end: int, new: str
    ) -> Change:
        everywhere = around is None or any(CACHES & set(_names(each)) for each in around.decorator_list)
        return Change(self._file, start, end, new, sort, (place.lineno, place.end_lineno or place.lineno), everywhere)


def _may_go(statement: ast.stmt, around: Function) -> bool:
    """Whether the code is still whole without a statement: what breaks every caller says little about the tests."""
    match statement:
        case ast.Expr(value=ast.Call() | ast.Await()) | ast.AugAssign() | ast.Raise() | ast.Delete():
            return True
        case ast.Continue() | ast.Break() | ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            return True
        case ast.Return():
            return statement.value is not None and statement is not around.body[-1]
        case ast.Assign(targets=[ast.Name(id=name)]):
            earlier = (
                each for each in ast.walk(around) if getattr(each, "lineno", statement.lineno) < statement.lineno
            )
            return any(
                (isinstance(each, ast.arg) and each.arg == name)
                or (isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store) and each.id == name)
                for each in earlier
            )
    return False


def _names(node: ast.AST) -> Iterator[str]:
    for each in ast.walk(node):
        if isinstance(each, ast.Name | ast.Attribute):
            yield each.id if isinstance(each, ast.Name) else each.attr


def _is_log(statement: ast.stmt) -> bool:
    match statement:
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id="log" | "logger")))):
            return True
    return False


def _is_for_people(node: ast.AST) -> bool:
    match node:
        case ast.keyword(arg=str() as name):
            return name in TEXTS or name == "strict"
        case ast.Call(func=ast.Name(id="dataclass")) | ast.Call(func=ast.Attribute(attr="dataclass")):
            return True
    return False


def _is_text(node: ast.expr) -> bool:
    match node:
        case ast.Constant(value=str() | bytes()) | ast.JoinedStr():
            return True
        case ast.BinOp():
            return _is_text(node.left) or _is_text(node.right)
    return False


def _is_type(node: ast.BinOp) -> bool:
    """Whether `a | b` joins types."""
    operands = (node.left, node.right)
    return isinstance(node.op, ast.BitOr) and any(
        (isinstance(each, ast.Constant) and each.value is None)
        or (
            isinstance(each, ast.Name)
            and (each.id in {"str", "int", "float", "bool", "list", "dict"} or each.id.istitle())
        )
        or (isinstance(each, ast.BinOp) and _is_type(each))
        for each in operands
    )
