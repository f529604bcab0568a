"""Where a small change of a module makes another program: comparisons, arithmetic, constants, statements."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass

COMPARE = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
BINARY = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.LShift: ast.RShift,
}  # fmt: skip
NAMES = {
    "min": "max", "max": "min", "minimum": "maximum", "maximum": "minimum", "any": "all", "all": "any",
    "amax": "amin", "zeros_like": "ones_like", "ones_like": "zeros_like", "remainder": "div", "tanh_": "exp_",
    "clamp_min": "clamp_max", "clamp_max": "clamp_min", "repeat": "repeat_interleave",
}  # fmt: skip
DROPPED = frozenset(
    [
        "clamp",
        "clamp_min",
        "clamp_max",
        "masked_fill",
        "masked_fill_",
        "mul_",
        "div_",
        "sub_",
        "exp_",
        "tanh_",
        "clone",
        "copy_",
        "to",
        "expand",
        "repeat",
        "cumsum",
        "transpose",
        "float",
        "contiguous",
    ]
)
"""Methods whose call is left out: ``x.f(…)`` becomes ``x``."""
SKIPPED_CALLS = frozenset({"ContractViolation", "BackendRejected", "Reason"})
"""What they say is words; that they are raised is tested by name elsewhere."""


@dataclass(frozen=True)
class Mutant:
    """One changed program."""

    module: str
    """Name within the package, as 'kernels.mask'."""
    scope: str
    """Qualified name of the function or class around it, empty for the module."""
    line: int
    change: str
    """Old and new text."""
    tree: ast.Module

    @property
    def id(self) -> str:
        """Stable while the code around it is: it carries no line number."""
        return f"{self.module}:{self.scope}: {self.change}"


def mutants(module: str, source: str) -> Iterator[Mutant]:
    """Yield every mutant of a module, in the order of its lines; equal changes of a scope are numbered."""
    tree = ast.parse(source)
    seen: dict[tuple[str, str], int] = {}
    for path, scope, node in _sites(tree):
        for new in _changes(node):
            old = ast.unparse(node).splitlines()[0]
            text = "removed" if isinstance(new, ast.Pass) else ast.unparse(new).splitlines()[0]
            key = (scope, f"{old} → {text}")
            seen[key] = seen.get(key, 0) + 1
            change = key[1] if seen[key] == 1 else f"{key[1]} (#{seen[key]})"
            yield Mutant(module, scope, node.lineno, change, _replaced(tree, path, new))


Path = tuple[tuple[str, int | None], ...]


def _sites(tree: ast.Module) -> Iterator[tuple[Path, str, ast.expr | ast.stmt]]:
    def walk(node: ast.AST, path: Path, scope: str) -> Iterator[tuple[Path, str, ast.expr | ast.stmt]]:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            scope = f"{scope}.{node.name}".lstrip(".")
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list", "type_comment", "bases"):
                continue
            for index, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
                if not isinstance(child, ast.AST) or _is_words(child):
                    continue
                here = (*path, (name, index))
                if isinstance(child, (ast.expr, ast.stmt)):
                    yield here, scope, child
                yield from walk(child, here, scope)

    yield from walk(tree, (), "")


def _is_words(node: ast.AST) -> bool:
    """Docstrings, imports, assertions, raises and what they say."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in SKIPPED_CALLS:
        return True
    return isinstance(node, (ast.Import, ast.ImportFrom, ast.Assert, ast.Raise, ast.JoinedStr, ast.arguments))


def _changes(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Compare):
        yield _with(node, ops=[COMPARE[type(node.ops[0])](), *node.ops[1:]])
    elif isinstance(node, ast.BinOp) and type(node.op) in BINARY:
        yield _with(node, op=BINARY[type(node.op)]())
        if isinstance(node.op, (ast.Mult, ast.Div, ast.Add, ast.Sub, ast.BitAnd, ast.BitOr)):
            yield node.left
    elif isinstance(node, ast.BoolOp):
        yield _with(node, op=ast.And() if isinstance(node.op, ast.Or) else ast.Or())
    elif isinstance(node, ast.UnaryOp):
        yield node.operand
    elif isinstance(node, (ast.If, ast.IfExp)) and not isinstance(node.test, (ast.Compare, ast.UnaryOp)):
        # The negation of a comparison is a mutant of the comparison itself.
        yield _with(node, test=ast.UnaryOp(ast.Not(), node.test))
    elif isinstance(node, ast.Constant):
        yield from _other_constants(node.value)
    elif isinstance(node, ast.Call):
        yield from _calls(node)
    elif isinstance(node, (ast.AugAssign, ast.Expr)) or (isinstance(node, ast.Assign) and _rewrites(node)):
        yield ast.Pass()


def _other_constants(value: object) -> Iterator[ast.AST]:
    if isinstance(value, bool):
        yield ast.Constant(not value)
    elif isinstance(value, (int, float)):
        yield ast.Constant(value + 1)
        if value == 1:
            yield ast.Constant(value - 1)


def _calls(node: ast.Call) -> Iterator[ast.AST]:
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if name in NAMES:
        func = copy.deepcopy(node.func)
        if isinstance(func, ast.Attribute):
            func.attr = NAMES[name]
        else:
            func = ast.Name(NAMES[name], ast.Load())
        yield _with(node, func=func)
    of_torch = isinstance(node.func, ast.Attribute) and getattr(node.func.value, "id", "") in ("torch", "F")
    if isinstance(node.func, ast.Attribute) and name in DROPPED and not of_torch:
        yield node.func.value
    if of_torch and name in ("exp", "log") and len(node.args) == 1:
        yield node.args[0]
    if of_torch and name == "where":
        yield node.args[1]
        yield node.args[2]


def _rewrites(node: ast.Assign) -> bool:
    """Whether an assignment gives a new value to names that have one: without it the program still runs."""
    targets = {n.id for target in node.targets for n in ast.walk(target) if isinstance(n, ast.Name)}
    return bool(targets) and targets <= {n.id for n in ast.walk(node.value) if isinstance(n, ast.Name)}


def _with(node: ast.AST, **changes: object) -> ast.AST:
    made = copy.copy(node)
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def _replaced(tree: ast.Module, path: Path, new: ast.AST) -> ast.Module:
    """Return a copy of a module with one node replaced; what is off the path is shared."""
    root = copy.copy(tree)
    at: ast.AST = root
    for name, index in path[:-1]:
        value = getattr(at, name)
        child = copy.copy(value if index is None else value[index])
        _put(at, name, index, child)
        at = child
    _put(at, *path[-1], new)
    return ast.fix_missing_locations(root)


def _put(at: ast.AST, name: str, index: int | None, child: ast.AST) -> None:
    if index is None:
        setattr(at, name, child)
        return
    values = list(getattr(at, name))
    values[index] = child
    setattr(at, name, values)
