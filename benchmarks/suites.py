"""Try every environment of each suite: which of them can be trained, with which versions.

    python benchmarks/suites.py               # all suites that are installed; the documentation has the table
    python benchmarks/suites.py navix pgx     # some of them; the others keep their entries

An environment works if it can be made, and if its reset and step can be traced for many environments at once. They must
give the shapes and dtypes that its specification declares. tests/envs/test_conformance.py steps a sample of each suite.
"""

import argparse
import json
import platform
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

RESULT = Path(__file__).parent / "results" / "suites.json"
DEPENDS_ON = {"brax": ("mujoco", "mujoco-mjx"), "playground": ("mujoco", "mujoco-mjx")}  # versions that matter, too


def main():
    """Try suites, each in a separate process, and keep what was found."""
    from jaxrl_fast import envs

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("suites", nargs="*", help=f"some of {', '.join(envs.SUITES)}; default: all installed")
    parser.add_argument("--one", action="store_true", help="try one suite in this process and print what was found")
    args = parser.parse_args()
    if not set(args.suites) <= set(envs.SUITES):
        parser.error(f"suites: choose among {', '.join(envs.SUITES)}, got {' '.join(args.suites)}")
    if args.one:
        print(json.dumps(try_suite(args.suites[0])))
        return
    for suite in args.suites or [suite for suite in envs.SUITES if envs.is_installed(suite)]:
        start = time.perf_counter()
        done = subprocess.run([sys.executable, __file__, suite, "--one"], capture_output=True, text=True, check=True)
        found = json.loads(done.stdout.splitlines()[-1])
        kept = json.loads(RESULT.read_text(encoding="utf-8")) if RESULT.exists() else {}
        text = json.dumps(dict(sorted((kept | {suite: found}).items())), indent=1)
        RESULT.write_text(text + "\n", encoding="utf-8")
        seconds = time.perf_counter() - start
        print(f"{suite}: {len(found['works'])} work, {len(found['refused'])} do not, {seconds:.0f} s", flush=True)


def try_suite(suite):
    """Return which environments of a suite work, why the others do not, and the versions."""
    from jaxrl_fast import envs

    works, refused = [], {}
    for env_id in envs.registered(suite):
        name = env_id.partition("/")[2]
        try:
            envs.make(env_id, 4)
            works.append(name)
        except ValueError as error:
            refused[name] = str(error).removeprefix(env_id).lstrip(": ")
    packages = ({"ale": "ale-py"}.get(suite, suite), *DEPENDS_ON.get(suite, ()), "jax")
    versions = {package: version(package) for package in packages} | {"python": platform.python_version()}
    return {"versions": versions, "works": works, "refused": refused}


if __name__ == "__main__":
    main()
