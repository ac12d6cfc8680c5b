"""Bugs put into Python source, one at a time, by a change of its syntax tree.

Always true: the same source and random stream give the same bug; what comes out parses, and differs from what went in by one
small change of the kind people make.
"""

from __future__ import annotations

import ast
import copy
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

Change = Callable[[], Any]
"""Makes the change in the tree it was found in."""

_SWAPS: dict[type, type] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.FloorDiv: ast.Mod,
    ast.Mod: ast.FloorDiv,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_CALLS = {"min": "max", "max": "min", "sum": "len", "any": "all", "all": "any"}


class Bug(NamedTuple):
    kind: str
    source: str
    function: str
    """The function or method it is in."""


def bugs(source: str, rng: random.Random) -> Iterator[Bug]:
    """Every bug there is to put into a source, in the stream's order.

    >>> next(bugs("def larger(a, b):\\n    return max(a, b)", random.Random(0))).source
    'def larger(a, b):\\n    return min(a, b)'
    """
    count = len(list(_changes(ast.parse(source))))
    order = list(range(count))
    rng.shuffle(order)
    clean = ast.unparse(ast.parse(source))
    for index in order:
        tree = ast.parse(source)
        kind, function, change = list(_changes(tree))[index]
        change()
        broken = ast.unparse(ast.fix_missing_locations(tree))
        if broken != clean:
            yield Bug(kind, broken, function)


def _changes(tree: ast.Module) -> Iterator[tuple[str, str, Change]]:
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            for node in ast.walk(function):
                for kind, change in _of_node(node, function):
                    yield kind, function.name, change


def _of_node(node: ast.AST, function: ast.FunctionDef) -> Iterator[tuple[str, Change]]:
    match node:
        case ast.Compare(ops=[op]) if type(op) in _SWAPS:
            yield "comparison", lambda: node.ops.__setitem__(0, _SWAPS[type(op)]())
        case ast.BinOp() | ast.BoolOp() | ast.AugAssign() if type(node.op) in _SWAPS:
            yield "operator", lambda: setattr(node, "op", _SWAPS[type(node.op)]())
        case ast.UnaryOp(op=ast.Not()):
            yield "negation", lambda: node.__dict__.update(op=ast.UAdd(), operand=_truth(node.operand))
        case ast.Constant(value=int(value)) if not isinstance(value, bool):
            yield "off by one", lambda: setattr(node, "value", value + 1)
            if value > 0:
                yield "off by one", lambda: setattr(node, "value", value - 1)
        case ast.Constant(value=bool(value)):
            yield "flipped flag", lambda: setattr(node, "value", not value)
        case ast.Call(func=ast.Name(id=name)) if name in _CALLS:
            yield "wrong call", lambda: setattr(node.func, "id", _CALLS[name])
        case ast.Slice(lower=lower) if lower is not None:
            yield "shifted slice", lambda: setattr(node, "lower", _plus_one(lower))
        case ast.Slice(upper=upper) if upper is not None:
            yield "shifted slice", lambda: setattr(node, "upper", _plus_one(upper))
        case ast.Name(ctx=ast.Load()) if (others := _arguments(function) - {node.id}) and node.id in _arguments(function):
            for other in sorted(others):
                yield "wrong variable", lambda other=other: setattr(node, "id", other)
    for part in ("body", "orelse"):
        block = getattr(node, part, None)
        if isinstance(block, list):
            yield from _of_block(block)


def _of_block(block: list[ast.stmt]) -> Iterator[tuple[str, Change]]:
    for index, statement in enumerate(block):
        match statement:
            case ast.AugAssign() | ast.Continue() | ast.Break() | ast.Delete():
                yield "dropped statement", lambda index=index: block.__setitem__(index, ast.Pass())
            case ast.If(orelse=[], body=[ast.Return() | ast.Raise() | ast.Assign()]):
                yield "dropped case", lambda index=index: block.__setitem__(index, ast.Pass())
            case ast.Expr(value=ast.Call()):
                yield "dropped statement", lambda index=index: block.__setitem__(index, ast.Pass())


def _arguments(function: ast.FunctionDef) -> set[str]:
    return {argument.arg for argument in function.args.args if argument.arg != "self"}


def _plus_one(node: ast.expr) -> ast.expr:
    return ast.BinOp(copy.deepcopy(node), ast.Add(), ast.Constant(1))


def _truth(node: ast.expr) -> ast.expr:
    return ast.Call(ast.Name("bool", ast.Load()), [node], [])
