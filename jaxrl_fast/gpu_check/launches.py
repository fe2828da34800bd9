"""Count the kernels that a GPU would launch for each loop of a program, from the text of XLA's optimized program.

A computation is a list of instructions, one a line. Each instruction is one kernel, except those that only name memory,
and those that call another computation: loops and branches.
"""

import re
from typing import NamedTuple

COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.\-]+ = (?:\((?:[^()]|\([^()]*\))*\)|[^\s(]+)\s+([\w\-]+)\(")
TRIPS = re.compile(r'known_trip_count":\{"n":"(\d+)"')
LABEL = re.compile(r'op_name="([^"]*)"')
CALLED = re.compile(r"(?:body|to_apply|calls|true_computation|false_computation)=%?([\w.\-]+)")
BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
NO_KERNEL = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id",
    "async-update", "get-dimension-size", "domain", "opt-barrier",
}  # fmt: skip
COLLECTIVE = ("all-reduce", "all-gather", "all-to-all", "reduce-scatter", "collective-")


class Loop(NamedTuple):
    """One pass of a loop, without the loops in it. The program itself is a loop of one pass."""

    label: str  # JAX's name of the place
    trips: int | None  # None: the host decides after each pass whether another one follows
    kernels: int = 0  # copies included
    copies: int = 0
    branches: int = 0  # for each, the host waits for the condition
    collectives: int = 0
    inner: tuple["Loop", ...] = ()

    @property
    def total(self) -> int:
        """Return the kernels of one pass with all loops in it, each with its trips, or one pass if they are unknown."""
        return self.kernels + sum((loop.trips or 1) * loop.total for loop in self.inner)

    @property
    def waits(self) -> int:
        """Return how often the host decides something in a pass, once for each loop of unknown length."""
        own = self.branches + sum(loop.trips is None for loop in self.inner)
        return own + sum((loop.trips or 1) * loop.waits for loop in self.inner)

    def find(self, scope: str) -> "Loop | None":
        """Return the first loop within whose label has the name `scope`, outer loops first; None if there is none."""
        for loop in self.inner:
            if f"/{scope}/" in f"{loop.label}/":
                return loop
        found = (loop.find(scope) for loop in self.inner)
        return next((loop for loop in found if loop), None)

    def depth_first(self, depth: int = 0) -> list[tuple[int, "Loop"]]:
        """Return this loop and all loops in it, with their depths."""
        return [(depth, self), *(pair for loop in self.inner for pair in loop.depth_first(depth + 1))]


def read(text: str) -> Loop:
    """Return the program whose text is `compiled.as_text()`."""
    bodies: dict[str, list[tuple[str, str]]] = {}
    entry = name = ""
    for line in text.splitlines():
        if head := COMPUTATION.match(line):
            name = head.group(2)
            entry, bodies[name] = name if head.group(1) else entry, []
        elif name and (instruction := INSTRUCTION.match(line)):
            bodies[name].append((instruction.group(1), line))
    return _loop(bodies, entry, "program", 1)


def _loop(bodies: dict[str, list[tuple[str, str]]], name: str, label: str, trips: int | None) -> Loop:
    kernels = copies = branches = collectives = 0
    inner: list[Loop] = []
    for operation, line in bodies.get(name, ()):
        place = found.group(1) if (found := LABEL.search(line)) else ""
        if operation == "while":
            count = TRIPS.search(line)
            body = re.search(r"body=%?([\w.\-]+)", line)
            inner.append(_loop(bodies, body.group(1) if body else "", place, int(count.group(1)) if count else None))
        elif operation == "conditional":
            branches += 1
            listed = BRANCHES.search(line)
            sides = re.findall(r"[\w.\-]+", listed.group(1)) if listed else CALLED.findall(line)
            each = [_loop(bodies, side, place, 1) for side in sides]
            inner.append(max(each, key=lambda side: side.total)._replace(label=f"{place}/branch"))
        elif operation in ("call", "async-start"):
            inner += [_loop(bodies, called, place, 1) for called in CALLED.findall(line)]
        elif operation not in NO_KERNEL and not operation.endswith("-done"):
            kernels += 1
            copies += operation in ("copy", "copy-start")
            collectives += operation.startswith(COLLECTIVE)
    return Loop(label, trips, kernels, copies, branches, collectives, tuple(inner))
