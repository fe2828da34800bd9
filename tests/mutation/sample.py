"""Change the package in small ways, one at a time, and count the changes that no test notices.

    python -m tests.mutation.lines                              # once: which tests run which lines
    python -m tests.mutation.sample --num 200 --seed 0          # about an hour and a half on one core
    python -m tests.mutation.sample --num 50 --only rl/ --out rl.jsonl

Mutants are drawn from all those of the files below, so a file counts by its size. Each is planted in a scratch copy.
The tests that run its line are run first, quick ones and those of the nearest files before the others. Then the other
tests of the nearest files are run, until `--budget` seconds of tests are used. A mutant is killed if a test fails.
`survivors.json` lists mutants that change nothing, with the reason; they are drawn, but not planted.

Prints a line for each mutant, the difference where one survived, and a table. `--out` keeps a line of JSON for each;
mutants that the file already has are not planted again. With `--num 0`, the table shows all mutants of the file.

`--again` plants the survivors of a file once more, after `lines` has recorded the tests written for them. Mutants that
these tests kill are marked `new_test`, and the table's last column still counts them as not noticed.
"""

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from tests.mutation import lines, mutants
from tests.mutation.mutants import Mutant
from tests.mutation.patches import ROOT
from tests.mutation.run import PARTS, copy_tree

FILES = [
    "rl/*.py",
    "replay/*.py",
    "replay/host/*.py",
    "agents/*.py",
    "players/*.py",
    "loop.py",
    "rollout.py",
    "async_rollout.py",
    "ahead_rollout.py",
    "networks/*.py",
    "networks/torsos/*.py",
    "envs/spaces.py",
    "envs/wrappers/*.py",
    "envs/gymnasium/*.py",
    "envs/gymnax/*.py",
    "envs/envpool/pool.py",
    "envs/envpool/tasks.py",
    "metrics/*.py",
    "evaluation/*.py",
    "evaluation/export/*.py",
    "evaluation/render/*.py",
    "training/calibrate.py",
    "training/checkpoint_manager.py",
    "training/evaluator.py",
    "sweep/report.py",
    "sweep/table.py",
    "utils/arguments.py",
]
NEAREST = {  # for modules without tests/FOLDER/test_MODULE.py
    "agents/": ["agents/test_agents.py"],
    "async_rollout.py": ["envs/test_envpool.py"],
    "envs/envpool/": ["envs/test_envpool_options.py", "envs/test_envpool.py"],
    "envs/gymnasium/": ["envs/test_gymnasium.py", "envs/test_gymnasium_spaces.py", "envs/test_gymnasium_runs.py"],
    "envs/gymnax/": ["envs/test_gymnax.py"],
    "envs/wrappers/": ["envs/test_image.py", "envs/test_gymnasium.py"],
    "envs/spaces.py": ["envs/test_gymnax.py", "envs/test_envpool_options.py"],
    "evaluation/export/": ["evaluation/test_export.py"],
    "evaluation/render/": ["evaluation/test_render.py"],
    "evaluation/match.py": ["players/test_players.py"],
    "evaluation/": ["evaluation/test_policy.py", "evaluation/test_deployment.py", "training/test_evaluator.py"],
    "metrics/": ["metrics/test_tracker.py"],
    "networks/": ["networks/test_networks.py", "networks/test_conv.py"],
    "players/": ["players/test_players.py"],
    "replay/host/": ["replay/test_host.py"],
    "replay/": ["replay/test_replay.py", "replay/test_ring.py"],
    "rl/heads.py": ["rl/test_distributions.py"],
    "rl/policies.py": ["agents/test_ppo.py", "rl/test_state_noise.py"],
    "rl/q_learning.py": ["agents/test_dqn.py"],
    "rollout.py": ["test_loop.py"],
    "sweep/": ["sweep/test_sweep.py"],
    "utils/arguments.py": ["envs/test_spaces.py", "envs/test_gymnax.py"],
    "training/checkpoint_manager.py": ["training/test_resume.py"],
}
CONTROL_LIMIT_S = 300
NUM_FIRST = 8  # tests of a mutant that are run before the others are collected
FAR = 4  # a test of another file is ordered like one of the nearest files that takes this many times as long
EQUIVALENT = Path(__file__).with_name("survivors.json")
PASSED, INTERRUPTED, BROKEN = 0, 2, 70  # exit statuses of pytest, and of a child that failed before pytest
PYTEST = ("-x", "-q", "-p", "no:cacheprovider", "--nightly", "-W", "ignore::pytest.PytestAssertRewriteWarning")
WARM = ("flax.linen", "hypothesis", "optax", "pytest", "scipy.stats", "xdist", "yaml")


def draw(root: Path, num: int, seed: int, only: Sequence[str] = ("",)) -> list[Mutant]:
    """Return different mutants of the files with one of these texts in their paths, drawn at random."""
    paths = sorted({path.relative_to(root).as_posix() for p in FILES for path in (root / "jaxrl_fast").glob(p)})
    every = [mutant for path in paths if any(x in path for x in only) for mutant in mutants.of_file(root, path)]
    random.Random(seed).shuffle(every)
    found: list[Mutant] = []
    for mutant in every:
        if len(found) == num:
            break
        if mutant.is_worth_a_test((root / mutant.path).read_text(encoding="utf-8")):
            found.append(mutant)
    return found


def nearest(root: Path, path: str) -> list[str]:
    """Return the test files of a source file, nearest first."""
    inside = Path(path).relative_to("jaxrl_fast")
    folder = inside.parent.parts[:1]  # tests/envs has the tests of jaxrl_fast/envs/wrappers too
    own = Path("tests", *folder, f"test_{inside.name}").as_posix()
    others = [
        f"tests/{test}" for part, tests in NEAREST.items() if inside.as_posix().startswith(part) for test in tests
    ]
    return list(dict.fromkeys([own, *others] if (root / own).is_file() else others))


def choose_tests(root: Path, mutant: Mutant, record: lines.Record, budget: float) -> list[str]:
    """Return the ids of the tests to run, in this order."""
    near = nearest(root, mutant.path)
    file_of = lambda test: test.split("::")[0]
    cost = lambda test: record.seconds.get(test, 0.0) * (1 if file_of(test) in near else FAR)
    up_to_date = record.digests.get(mutant.path) == lines.digest(root / mutant.path)
    by_line = record.tests.get(mutant.path, {}) if up_to_date else {}
    of_line = sorted((test for test, numbers in by_line.items() if mutant.line in numbers), key=cost)
    others = sorted((test for test in record.seconds if file_of(test) in near and test not in of_line), key=cost)
    chosen, total = [], 0.0
    for test in of_line + others:
        total += record.seconds.get(test, 0.0)
        if chosen and total > budget:
            break
        chosen.append(test)
    return chosen or near


def warm_up(folder: Path) -> None:
    """Import slow modules without starting a device, since children are forked from this process."""
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(folder))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.05")
    import tests.conftest  # noqa: F401  it sets the environment before it imports jax

    for name in WARM:
        __import__(name)


def run_child(tree: Path, tests: Sequence[str]) -> NoReturn:
    """Run tests of a tree in a forked process, as if nothing of the package had been imported; end with the status."""
    status = BROKEN
    try:
        os.setsid()
        os.chdir(tree)
        for name in [name for name in sys.modules if name.split(".")[0] in ("jaxrl_fast", "tests")]:
            del sys.modules[name]
        sys.path[:] = [str(tree), *(path for path in sys.path if path not in ("", str(ROOT)))]
        os.environ |= {"PYTHONPATH": str(tree), "CI": "1", "TMPDIR": str(tree.parent)}
        output = os.open(tree.parent / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        import pytest

        status = pytest.main([*PYTEST, *tests])
        sys.stdout.flush()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def run_tests(tree: Path, tests: Sequence[str], limit_s: float) -> int | None:
    """Return pytest's status, negative for the signal that ended it, or None after the time limit."""
    start = time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # JAX warns of its threads, but has started none
        child = os.fork()
    if child == 0:
        run_child(tree, tests)
    status = None
    while status is None and time.monotonic() - start < limit_s:
        done, code = os.waitpid(child, os.WNOHANG)
        status = os.waitstatus_to_exitcode(code) if done else None
        time.sleep(0.0 if done else 0.05)
    if status is None:
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return status


def plant(tree: Path, mutant: Mutant, tests: Sequence[str], limit_s: float) -> tuple[str, str]:
    """Return killed, survived or timeout, and the test that failed. The tree is restored.

    A few tests are run first, since pytest imports the files of all tests before it runs one.
    """
    path = tree / mutant.path
    source = path.read_text(encoding="utf-8")
    try:
        replace(path, mutant.apply(source))
        status = run_tests(tree, tests[:NUM_FIRST], limit_s)
        if status == PASSED and len(tests) > NUM_FIRST:
            status = run_tests(tree, tests[NUM_FIRST:], limit_s)
    finally:
        replace(path, source)
    output = (tree.parent / "output.txt").read_text(encoding="utf-8", errors="replace")
    if status is not None and status > INTERRUPTED and run_tests(tree, ["--collect-only", *tests], limit_s) != PASSED:
        raise SystemExit(
            f"{output[-2000:]}\n{mutant.path}: its tests are not found; run python -m tests.mutation.lines"
        )
    failed = [line for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    how = failed[0].partition(" ")[2].partition(" - ")[0] if failed else output[-300:] if status else ""
    return {PASSED: "survived", None: "timeout"}.get(status, "killed"), how


def replace(path: Path, source: str) -> None:
    """Write a source file and delete its bytecode, since two sources of one size may be written in one second."""
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
        compiled.unlink()
    path.write_text(source, encoding="utf-8")


def passes(tree: Path, test: str, passing: set[str]) -> bool:
    """Return whether a test passes without a mutant; `passing` has the tests that are known to pass."""
    if "::" in test and test not in passing and run_tests(tree, [test], CONTROL_LIMIT_S) == PASSED:
        passing.add(test)
    return "::" not in test or test in passing


def equivalents() -> dict[tuple[str, str], str]:
    """Return why mutants change nothing, by path and difference."""
    return {(path, diff): reason for path, diff, reason in map(tuple, json.loads(EQUIVALENT.read_text("utf-8")))}


def table(results: list[dict[str, Any]]) -> str:
    """Return a table in Markdown of the outcomes of mutants.

    The rate is that of tests that existed before the sample. Equivalent mutants are excluded from it.
    """
    outcomes = ("killed", "new", "timeout", "survived", "equivalent")
    counts: dict[str, Counter[str]] = {}
    for result in results:
        package = result["path"].removeprefix("jaxrl_fast/").split("/")[0]
        for name in (package, "all"):
            counts.setdefault(name, Counter())["new" if result.get("new_test") else result["outcome"]] += 1
    rows = [
        "| package | mutants | killed | killed by a new test | time limit | survived | change nothing | noticed |",
        "| --- |" + " --- |" * 7,
    ]
    for name in sorted(counts, key=lambda name: (name == "all", name)):
        n = counts[name]
        noticed, real = n["killed"] + n["timeout"], n.total() - n["equivalent"]
        cells = [n.total(), *(n[outcome] for outcome in outcomes), f"{noticed / real:.0%}" if real else ""]
        rows.append(f"| {name} | " + " | ".join(map(str, cells)) + " |")
    return "\n".join(rows)


def read(out: Path) -> dict[tuple[Any, ...], dict[str, Any]]:
    """Return the results in a file by path, line and difference; the last one of several."""
    found, known = {}, equivalents()
    for line in out.read_text("utf-8").splitlines() if out.is_file() else ():
        result = json.loads(line)
        if reason := known.get((result["path"], result["diff"])):
            result |= {"outcome": "equivalent", "how": reason}
        found[result["path"], result["line"], result["diff"]] = result
    return found


def sample(chosen: list[Mutant], out: Path, budget: float, again: bool = False) -> list[dict[str, Any]]:
    """Plant each mutant that the file does not have, or with `again` those that survived; return all results."""
    record, known, results, passing = lines.read(), equivalents(), [], set()
    out.parent.mkdir(parents=True, exist_ok=True)
    finished = read(out)
    with tempfile.TemporaryDirectory(prefix="mutation_", ignore_cleanup_errors=True) as folder:
        tree = Path(folder, "tree")
        copy_tree(tree, (*PARTS, "benchmarks", "docs", "README.md"))
        warm_up(Path(folder, "cache"))
        for mutant in chosen:
            diff = "\n".join(mutant.diff((tree / mutant.path).read_text(encoding="utf-8")))
            name = {"path": mutant.path, "line": mutant.line, "diff": diff}
            result = finished.get((mutant.path, mutant.line, diff))
            if reason := known.get((mutant.path, diff)):
                result = name | {"outcome": "equivalent", "how": reason}
            elif result is None or again and result["outcome"] == "survived":
                tests, start = choose_tests(tree, mutant, record, budget), time.perf_counter()
                outcome, how = plant(tree, mutant, tests, 60 + 4 * budget)
                if outcome == "killed" and not passes(tree, how, passing):
                    raise SystemExit(f"{how} fails without a mutant too; run python -m tests.mutation.lines")
                result = name | {"rule": mutant.rule, "outcome": outcome, "how": how}
                result |= {"new_test": True} if again and outcome == "killed" else {}
                result |= {"num_tests": len(tests), "seconds": round(time.perf_counter() - start, 1)}
                with out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(result) + "\n")
            results.append(result)
            details = f"\n{diff}" if result["outcome"] == "survived" else f": {result['how']}"
            print(f"{mutant.path}:{mutant.line}: {result['outcome']}{details}", flush=True)
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num", type=int, default=200, help="mutants to draw")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="TEXT", help="files with one of these in their paths"
    )
    parser.add_argument("--budget", type=float, default=60, metavar="SECONDS", help="of tests for each mutant")
    parser.add_argument("--out", type=Path, default=lines.RECORD.with_name("sample.jsonl"), help="results so far")
    parser.add_argument("--again", action="store_true", help="plant what survived once more")
    args = parser.parse_args()
    if args.num:
        results = sample(draw(ROOT, args.num, args.seed, args.only), args.out, args.budget, args.again)
    else:
        results = list(read(args.out).values())
    print(table(results))
    return int(any(result["outcome"] == "survived" for result in results))


if __name__ == "__main__":
    sys.exit(main())
