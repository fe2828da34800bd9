"""Make small changes to a source file, one at a time: the mutants that tests should notice.

A mutant is one span of text and its replacement. The rules are those of mutmut and cosmic-ray (operators,
comparisons, numbers, conditions, statements), and some for code on arrays: arguments swapped or left out, a maximum for
a minimum, a function of elements left out.

Code that no test should notice is not changed: annotations, docstrings and other strings, decorators, imports,
assertions, `__all__`, messages of errors and warnings, and arguments that are a check or a hint for the compiler.
"""

import ast
import difflib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

OPERATORS = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "//"),
    ast.Pow: ("**", "*"),
    ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"),
    ast.BitXor: ("^", "&"),
    ast.MatMult: ("@", "*"),
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
    ast.And: ("and", "or"),
    ast.Or: ("or", "and"),
}
PAIRS = "max min, maximum minimum, argmax argmin, any all, zeros ones, zeros_like ones_like, floor ceil, sum mean"
OTHERS = {a: b for pair in PAIRS.split(", ") for a, b in (pair.split(), pair.split()[::-1])}
OF_ELEMENTS = {"abs", "clip", "copy", "deepcopy", "exp", "log", "sqrt", "square", "sorted", "stop_gradient", "tanh"}
OF_ANY_TYPE = {"getattr", "hasattr", "isinstance", "map", "partial"}  # swapped arguments raise at once
OF_TYPES = {"NewType", "TypeVar", "cast", "warn"}


HINTS = ("encoding", "mode", "strict", "unique_indices", "unroll")  # arguments that are checks or hints


class Mutant(NamedTuple):
    """One change of one file."""

    path: str  # of the source file, below the root
    rule: str
    line: int  # of the start, from 1
    start: int  # offsets into the source
    stop: int
    text: str  # the replacement

    def apply(self, source: str) -> str:
        """Return the changed source."""
        return source[: self.start] + self.text + source[self.stop :]

    def is_worth_a_test(self, source: str) -> bool:
        """Return whether the changed source can be parsed and the change is not only a hint."""
        try:
            ast.parse(self.apply(source))
        except SyntaxError:
            return False
        name = source[: self.start].rpartition("(")[2].rpartition(",")[2] + source[self.start : self.stop]
        return name.strip().partition("=")[0] not in HINTS

    def diff(self, source: str) -> list[str]:
        """Return the removed lines, with `-`, and the added lines, with `+`, without indentation."""
        lines = difflib.ndiff(source.splitlines(), self.apply(source).splitlines())
        return [f"{line[0]} {line[2:].strip()}" for line in lines if line[0] in "-+"]


def of_file(root: Path, path: str) -> list[Mutant]:
    """Return all mutants of a file, in the order of their places."""
    source = (root / path).read_text(encoding="utf-8")
    return of_source(source, path)


def of_source(source: str, path: str) -> list[Mutant]:
    """Return all mutants of a source, in the order of their places."""
    text, found = Text(source), {}
    for node in _live(ast.parse(source)):
        for rule, start, stop, new in _changes(node, text):
            mutant = Mutant(path, rule, source.count("\n", 0, start) + 1, start, stop, new)
            found[start, stop, new] = mutant
    return [found[place] for place in sorted(found)]


def _live(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes below one that a test could notice."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.Import, ast.ImportFrom, ast.Assert, ast.JoinedStr)):
            continue
        if isinstance(child, ast.Raise):
            yield child  # mutate whether it raises, not the exception
            continue
        if isinstance(child, ast.Call) and _name(child.func) in OF_TYPES:
            continue
        if isinstance(child, ast.Assign) and "__all__" in map(_name, child.targets):
            continue
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and child in node.decorator_list:
            continue
        if child in (getattr(node, "annotation", None), getattr(node, "returns", None)):
            continue
        yield child
        yield from _live(child)


class Text:
    """A source, and the positions of its nodes."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.starts = [0]
        for line in source.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))

    def offset(self, line: int, column: int) -> int:
        """Return the offset of a place whose column counts bytes, as `ast` does."""
        whole = self.source[self.starts[line - 1] : self.starts[line]]
        return self.starts[line - 1] + len(whole.encode()[:column].decode())

    def span(self, node: ast.AST) -> tuple[int, int]:
        """Return the offsets of a node's start and end."""
        return self.offset(node.lineno, node.col_offset), self.offset(node.end_lineno, node.end_col_offset)

    def of(self, node: ast.AST) -> str:
        """Return the text of a node."""
        start, stop = self.span(node)
        return self.source[start:stop]


Change = tuple[str, int, int, str]  # the rule, start, stop and the new text


def _changes(node: ast.AST, text: Text) -> Iterator[Change]:
    """Yield the changes of a node itself, not of those below it."""
    match node:
        case ast.BinOp(left=left, op=op, right=right):
            yield from _operator(text, left, op, right)
        case ast.AugAssign(target=target, op=op, value=value):
            yield from _operator(text, target, op, value)
            yield "statement", *text.span(node), "pass"
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            yield from _operator(text, left, op, right)
        case ast.BoolOp(op=op, values=[left, right, *_]):
            yield from _operator(text, left, op, right)
        case ast.UnaryOp(operand=operand):
            yield "unary", *text.span(node), text.of(operand)
        case ast.IfExp(test=test) | ast.If(test=test) | ast.While(test=test):
            yield "condition", *text.span(test), f"(not ({text.of(test)}))"
        case ast.comprehension(ifs=[test, *_]):
            yield "condition", *text.span(test), "True"
        case ast.Constant(value=bool(value)):
            yield "constant", *text.span(node), str(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield "constant", *text.span(node), f"{text.of(node)} + 1" if value > 2**16 else repr(value + 1)
        case ast.Slice(lower=lower, upper=upper):
            for bound in (lower, upper):
                if bound is not None:
                    yield "slice", *text.span(bound), ""
        case ast.Expr(value=ast.Call()) | ast.Raise():
            yield "statement", *text.span(node), "pass"
        case ast.Break():
            yield "statement", *text.span(node), "continue"
        case ast.Continue():
            yield "statement", *text.span(node), "break"
        case ast.Call():
            yield from _calls(node, text)


def _operator(text: Text, left: ast.expr, op: ast.AST, right: ast.expr) -> Iterator[Change]:
    old, new = OPERATORS.get(type(op), ("", ""))
    start, stop = text.span(left)[1], text.span(right)[0]
    place = text.source.find(old, start, stop)
    if old and place >= 0:
        yield "operator", place, place + len(old), new


def _calls(node: ast.Call, text: Text) -> Iterator[Change]:
    name, arguments = _name(node.func), node.args
    start, stop = text.span(node.func)
    if name in OTHERS:
        yield "function", stop - len(name), stop, OTHERS[name]
    if name in OF_ELEMENTS and arguments:
        yield "left out", *text.span(node), text.of(arguments[0])
    branches = name in ("where", "cond") and len(arguments) > 2
    one, two = arguments[1:3] if branches else arguments[:2] if len(arguments) > 1 else (node, node)
    if branches or isinstance(one, ast.Name) and isinstance(two, ast.Name) and name not in OF_ANY_TYPE:
        between = text.source[text.span(one)[1] : text.span(two)[0]]
        swapped = text.of(two) + between + text.of(one)
        if swapped != text.of(one) + between + text.of(two):
            yield "swap", text.span(one)[0], text.span(two)[1], swapped
    for keyword in node.keywords:
        if keyword.arg:
            start, stop = text.span(keyword)
            after = text.source[stop:]
            stop += len(after) - len(after.lstrip(", \n")) if after.lstrip()[:1] == "," else 0
            yield "keyword", start, stop, ""


def _name(node: ast.AST) -> str:
    """Return the last part of a name: `where` of `jnp.where`."""
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
