"""Measure how large and how entangled the code is: code lines, files, options, records, long files and functions.

    PYTHONPATH=. python benchmarks/sizes.py --json sizes.json

Code lines are lines of a source without docstrings, comments and blank lines. For each algorithm, `reached` counts the
definitions that a reader meets: from `make` in the algorithm's module, from all of loop.py and from the algorithm's
options, on to every top-level definition of the package that a definition names, and so on. Only the standard library
is used. A file, record or command that does not exist counts as nothing.
"""

import argparse
import ast
import io
import json
import os
import subprocess
import sys
import tokenize
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PACKAGE = "jaxrl_fast"
ALGORITHMS = ("ppo", "dqn", "pqn", "sac", "td3")
RECORDS = ("Env", "Agent", "HostEnvConfig")
MAX_FILE, MAX_PARAMETERS = 300, 6
DEFINED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
IGNORED = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
Definition = tuple[str, str]  # module and name


class Module:
    """One source file of the package, with its top-level definitions and its imports from the package."""

    def __init__(self, path: Path):
        parts = path.relative_to(ROOT).with_suffix("").parts
        self.path, self.name = path, ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        text = path.read_text(encoding="utf-8")
        self.num_lines, self.tree = len(text.splitlines()), ast.parse(text)
        self.code = code_lines(text, self.tree)
        self.definitions: dict[str, ast.stmt] = {}
        for node in self.tree.body:
            for name in defined_names(node):
                self.definitions[name] = node
        self.imports: dict[str, str] = {}  # the local name: the dotted name in the package
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ImportFrom):
                source = node.module or ""
                if node.level:
                    above = self.name.split(".")[: -node.level if path.stem != "__init__" else 1 - node.level or None]
                    source = ".".join([*above, *([node.module] if node.module else [])])
                self.imports |= {x.asname or x.name: f"{source}.{x.name}" for x in node.names}
            elif isinstance(node, ast.Import):
                self.imports |= {x.asname: x.name for x in node.names if x.asname}
        self.imports = {name: full for name, full in self.imports.items() if full.startswith(f"{PACKAGE}.")}

    def lines_of(self, node: ast.AST) -> set[int]:
        """Return the code lines of a node, with its decorators."""
        first = min([node.lineno, *(x.lineno for x in getattr(node, "decorator_list", []))])
        return {line for line in self.code if first <= line <= node.end_lineno}


def code_lines(text: str, tree: ast.Module) -> set[int]:
    """Return the numbers of the lines that hold code: neither docstrings, comments nor blank lines."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in IGNORED:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, *DEFINED)) and ast.get_docstring(node, clean=False) is not None:
            lines.difference_update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return lines


def defined_names(node: ast.stmt) -> list[str]:
    """Return the names that a statement at the top level defines."""
    if isinstance(node, DEFINED):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [x.id for target in targets if target for x in ast.walk(target) if isinstance(x, ast.Name)]


def find(modules: dict[str, Module], dotted: str, seen: frozenset[str] = frozenset()) -> Definition | None:
    """Return the definition that a dotted name means, through modules that only import it."""
    source, _, name = dotted.rpartition(".")
    module = modules.get(source)
    if module is None or dotted in seen:
        return None
    if name in module.definitions:
        return source, name
    return find(modules, module.imports[name], seen | {dotted}) if name in module.imports else None


def dotted_name(node: ast.AST) -> str:
    """Return "a.b.c" of a name or of attributes of a name, and "" for other nodes."""
    if isinstance(node, ast.Attribute):
        base = dotted_name(node.value)
        return base and f"{base}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def named_in(modules: dict[str, Module], module: Module, node: ast.AST) -> set[Definition]:
    """Return the definitions of the package that a node names. Local names may hide them, which is ignored."""
    found = set()
    for part in ast.walk(node):
        name = dotted_name(part)
        first, _, rest = name.partition(".")
        if first in module.definitions and not rest:
            found.add((module.name, first))
        elif first in module.imports:
            found.add(find(modules, module.imports[first] + (f".{rest}" if rest else "")))
    return {x for x in found if x}


def reach(modules: dict[str, Module], algo: str) -> dict[str, int]:
    """Return the number of code lines and files that are reached from an algorithm."""
    own, loop = modules.get(f"{PACKAGE}.agents.{algo}"), modules.get(f"{PACKAGE}.loop")
    todo = [(loop.name, name) for name in loop.definitions] if loop else []
    todo += [(own.name, "make")] if own and "make" in own.definitions else []
    homes = [m for m in modules.values() if m.name.endswith((f".configs.{algo}", f".options.{algo}"))]
    todo += [(m.name, algo.upper()) for m in homes if algo.upper() in m.definitions]
    seen: set[Definition] = set()
    while todo:
        if (definition := todo.pop()) not in seen:
            seen.add(definition)
            module = modules[definition[0]]
            todo += named_in(modules, module, module.definitions[definition[1]])
    lines = {(name, line) for name, what in seen for line in modules[name].lines_of(modules[name].definitions[what])}
    return {"code_lines": len(lines), "files": len({name for name, _ in seen}), "definitions": len(seen)}


def help_of(algo: str) -> dict[str, int]:
    """Return the number of options and of lines of an algorithm's help at 120 columns."""
    paths = os.pathsep.join(x for x in (str(ROOT), os.environ.get("PYTHONPATH", "")) if x)
    command = [sys.executable, "-m", f"{PACKAGE}.train", algo, "--help"]
    environment = os.environ | {"COLUMNS": "120", "PYTHONPATH": paths}
    text = subprocess.run(command, env=environment, capture_output=True, text=True, check=False).stdout
    lines = text.splitlines()
    return {"options": sum(line.lstrip().startswith("--") and line[:3] == "  -" for line in lines), "lines": len(lines)}


def num_parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the number of parameters without self and cls."""
    given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg]
    return sum(x is not None and x.arg not in ("self", "cls") for x in given)


def measure() -> dict[str, Any]:
    """Return all numbers."""
    modules = {m.name: m for m in map(Module, sorted((ROOT / PACKAGE).rglob("*.py")))}
    count = lambda folder: sum(len(p.read_text(encoding="utf-8").splitlines()) for p in (ROOT / folder).rglob("*.py"))
    nodes = [(m, node) for m in modules.values() for node in ast.walk(m.tree)]
    records = {
        f"{m.name}.{node.name}": sum(isinstance(x, ast.AnnAssign) for x in node.body)
        for m, node in nodes
        if isinstance(node, ast.ClassDef) and node.name in RECORDS
    }
    functions = [(m, node) for m, node in nodes if isinstance(node, DEFINED[:2])]
    refusals = [
        m.lines_of(node)
        for m, node in nodes
        if isinstance(node, ast.Raise) and node.exc and dotted_name(getattr(node.exc, "func", node.exc)) == "ValueError"
    ]
    return {
        "package": {
            "code_lines": sum(len(m.code) for m in modules.values()),
            "lines": count(PACKAGE),
            "files": len(modules),
        },
        "tests": {"lines": count("tests")},
        "reached": {algo: reach(modules, algo) for algo in ALGORITHMS},
        "help": {algo: help_of(algo) for algo in ALGORITHMS},
        "fields": records,
        "raise_value_error": {"code_lines": sum(map(len, refusals)), "number": len(refusals)},
        f"files_over_{MAX_FILE}_lines": {
            str(m.path.relative_to(ROOT)): m.num_lines for m in modules.values() if m.num_lines > MAX_FILE
        },
        f"functions_over_{MAX_PARAMETERS}_parameters": {
            f"{m.path.relative_to(ROOT)}:{node.lineno} {node.name}": num_parameters(node)
            for m, node in functions
            if num_parameters(node) > MAX_PARAMETERS
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the size of the code.")
    parser.add_argument("--json", type=Path, help="JSON file to write")
    chosen = parser.parse_args()
    sizes = measure()
    for title, numbers in sizes.items():
        print(f"{title} ({len(numbers)})" if "_over_" in title else title)
        for name, value in numbers.items():
            parts = value.items() if isinstance(value, dict) else [("", value)]
            print(f"    {name:40} {'  '.join(f'{number:>6} {what}' for what, number in parts)}".rstrip())
    if chosen.json:
        chosen.json.write_text(json.dumps(sizes, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
