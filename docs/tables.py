"""Tables of the documentation, made from the code and from the JSON files in benchmarks/results.

A line such as `<!-- table: options ppo -->` in a page stands for one of them. `docs/hooks.py` fills it in when the site
is built; the same from a terminal:

    python docs/tables.py options ppo
"""

import functools
import importlib
import inspect
import json
import os
import re
import statistics
import sys
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
DATA = ROOT / "docs" / "data"
MARK = re.compile(r"^<!-- table: ([^>]+?) -->$", re.MULTILINE)
COMMANDS = ("evaluate", "video", "export", "plot", "check", "envs.__main__")  # modules with an `Options`


def fill(markdown: str) -> str:
    """Replace every mark in a page by its table."""
    return MARK.sub(lambda mark: render(mark[1]), markdown)


def render(words: str) -> str:
    """Return the table that a mark names. ValueError for an unknown one."""
    kind, *arguments = words.split()
    if kind not in KINDS:
        raise ValueError(f"table: there is no kind {kind!r}; there are {', '.join(KINDS)}")
    return KINDS[kind](*arguments)


def grid(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '&#124;') for cell in line)} |" for line in lines)


# Options


def options(algo: str) -> str:
    """Return the options of an algorithm, and those of each part with all its alternatives.

    Those of a part without alternatives are among the algorithm's.
    """
    declared = fields_of(configs()[algo])
    own: dict[str, Any] = {}
    for name, option in declared.items():
        if "" in option.parts:
            own |= {f"{name}.{inner.name}": inner for inner, _ in inner_options(option)}
        elif not option.parts:
            own[name] = option
    choices = {name: option for name, option in declared.items() if option.parts and "" not in option.parts}
    tables = [option_table(own), f"Parts, each with its options:\n\n{choice_table(choices)}"]
    tables += [f"### {name}\n\n{part_table(option)}" for name, option in choices.items() if has_options(option)]
    return "\n\n".join(tables)


def command(name: str) -> str:
    """Return the options of a command, a table for each group."""
    if name not in ("train", "sweep", "search"):
        return option_table(fields_of(options_of(name)), "--")
    if name == "search":
        return group_table(importlib.import_module("jaxrl_fast.options.search").SearchOptions)
    module = importlib.import_module("jaxrl_fast.options.run")
    if name == "sweep":
        return option_table(fields_of(module.SweepOptions), "--")
    groups = reversed(module.Options.__bases__)
    tables = (f"### {group.__name__}\n\n{summary(group)}\n\n{group_table(group)}" for group in groups)
    return "\n\n".join(tables)


def group_table(group: type) -> str:
    """Return the options of a group of a run's options. Those of a part follow the part."""
    rows: dict[str, Any] = {}
    for name, option in fields_of(group).items():
        rows |= {} if "" in option.parts else {name: option}
        for inner, words in inner_options(option):
            of = "" if "" in words else f" With {join(words)}."
            rows[f"{name}.{inner.name}"] = inner._replace(help=inner.help + of)
    return option_table(rows, "--")


def options_of(name: str) -> type:
    """Return the options of a command by its module."""
    return importlib.import_module(f"jaxrl_fast.{name}").Options


def option_table(declared: Mapping[str, Any], prefix: str = "") -> str:
    """Return a row for each option: name, default, meaning, and the values that it may have."""
    return grid(["option", "default", "meaning"], (option_row(name, o, prefix) for name, o in declared.items()))


def option_row(name: str, option: Any, prefix: str = "") -> list[str]:
    """Return the cells of an option. Raise ValueError for an option without help."""
    if not option.help:
        raise ValueError(f"the option {name} has no help")
    singular = importlib.import_module("jaxrl_fast.config.sources").SINGULAR
    written = prefix + singular.get(name, name).replace("_", "-") if prefix else name
    words = tuple(option.parts) or values_of(option.kind)
    default = option.default.kind if option.parts else option.default  # of a choice, a part
    meaning = option.help + (f" One of {join(words)}." if words else "")
    return [f"`{written}`", f"`{written_default(default)}`", meaning]


def choice_table(choices: Mapping[str, Any]) -> str:
    """Return a row for each part: name, default, alternatives and meaning."""
    rows = [
        [f"`{name}`", f"`{option.default.kind}`", join(alternatives(option)), option.help]
        for name, option in choices.items()
    ]
    return grid(["part", "default", "alternatives", "meaning"], rows)


def part_table(option: Any) -> str:
    """Return the options of a part: name, the alternatives that have it, default and meaning."""
    every = len(alternatives(option))
    rows = []
    for inner, words in inner_options(option):
        name, default, meaning = option_row(f"{option.name}.{inner.name}", inner)
        rows.append([name, "all" if len(words) == every else join(words), default, meaning])
    return grid(["option", "alternatives", "default", "meaning"], rows)


def has_options(option: Any) -> bool:
    """Return whether an alternative of a part has options."""
    return any(True for _ in inner_options(option))


def inner_options(option: Any) -> Iterable[tuple[Any, list[str]]]:
    """Yield the options of a part's alternatives, each with the words of the alternatives that declare it equally."""
    found: dict[Any, tuple[Any, list[str]]] = {}
    for word, part in alternatives(option).items():
        for inner in declare().options_of(part).values():
            inner = inner._replace(default=declare().value_of(part, inner.name))
            same = inner.name, inner.help, str(inner.default)
            found.setdefault(same, (inner, []))[1].append(word)
    yield from found.values()


def alternatives(option: Any) -> dict[str, Any]:
    """Return the alternatives of a part by their words; those of a user are `package.module:Class`."""
    return {**option.parts} | ({"package.module:Class": option.custom} if option.custom else {})


def join(words: Iterable[str]) -> str:
    """Return words as code: `gru`, `lstm`."""
    return ", ".join(f"`{word}`" for word in words)


def written_default(value: Any) -> str:
    """Return a default as a command line or a preset would write it."""
    if value is None:
        return "none"
    if value in ("", (), {}):
        return "(empty)"
    return str(value).lower() if isinstance(value, bool) else str(value)


def values_of(hint: Any) -> tuple[str, ...]:
    """Return the words that an option chooses among, where these are all that it may be."""
    return tuple(v or '""' for v in typing.get_args(hint)) if typing.get_origin(hint) is typing.Literal else ()


def summary(kind: type) -> str:
    """Return the first line of a docstring."""
    return inspect.getdoc(kind).splitlines()[0]


def configs() -> Mapping[str, type]:
    """Return the options of each algorithm, by its name."""
    return importlib.import_module("jaxrl_fast.options").ALGORITHMS


def declare() -> Any:
    """Return the module that declares options."""
    return importlib.import_module("jaxrl_fast.options.declare")


def fields_of(kind: type) -> dict[str, Any]:
    """Return the options that the fields of a record declare, by name."""
    return declare().fields_of(kind)


# Metrics


def metrics(name: str) -> str:
    """Return the metrics of an algorithm, of every record (`record`), or of the summary (`summary`)."""
    told = explained()[name]
    if name in configs():
        check_names(name, own_metrics(name), told)
        return grid(["metric", "meaning", "how it should look"], ([f"`{k}`", *v] for k, v in told.items()))
    return grid(["key", "meaning"], ([f"`{k}`", v] for k, v in told.items()))


def explained() -> dict[str, dict[str, Any]]:
    """Return what docs/data/metrics.yml says of each metric."""
    return yaml.safe_load((DATA / "metrics.yml").read_text(encoding="utf-8"))


def check_names(what: str, names: Iterable[str], told: Iterable[str]) -> None:
    """Raise where the metrics of the code and those that the file explains are not the same."""
    if set(names) != set(told):
        differ = ", ".join(sorted(set(names) ^ set(told)))
        raise ValueError(f"docs/data/metrics.yml, {what}: the code and the file differ in {differ}")


@functools.cache
def own_metrics(algo: str) -> frozenset[str]:
    """Return the names of what an algorithm's updates report. They are traced, not computed."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    import jax

    from jaxrl_fast import agents, envs, loop

    env = envs.make("Pendulum-v1" if algo in ("sac", "td3", "ddpg", "reppo") else "CartPole-v1", 2)
    agent = agents.load(algo).make(configs()[algo](), env.spec, 10)
    step = lambda: loop.train_step(env, agent, loop.init(env, agent, jax.random.key(0)))[1][1]
    return frozenset(name.removesuffix("_sum") for name in jax.eval_shape(step))


# Results


def read(name: str) -> Any:
    """Return one JSON file of benchmarks/results."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def published() -> dict[str, Any]:
    """Return docs/data/published.yml: the presets in the order of the tables, with what others report."""
    return yaml.safe_load((DATA / "published.yml").read_text(encoding="utf-8"))


def learning(*prefixes: str) -> str:
    """Return the returns of presets whose names begin so, and the commands that trained them."""
    rows = [name for name in published()["learning"] if name.startswith(prefixes)]
    table = grid(
        ["preset", "environment steps", "seeds", "return", "greedy return", "solved at", "published"],
        ([f"`{name}`", *learning_cells(name)] for name in rows),
    )
    commands: dict[str, list[str]] = {}
    for name in rows:
        seeds = learning_seeds(name)
        alone = " --one-by-one" if read("learning")[name]["num_seeds"] == 1 else ""
        commands.setdefault(f"--num-seeds {len(seeds)} --first-seed {seeds[0]}{alone}", []).append(name)
    program = "python benchmarks/learning.py"
    lines = [line for flags, names in commands.items() for line in wrap(f"{program} {flags}", names)]
    return "\n".join([table, "", "```bash", *lines, "```"])


def wrap(command: str, names: Sequence[str], most: int = 6) -> list[str]:
    """Return command lines with a few names each."""
    return [f"{command} {' '.join(names[i : i + most])}" for i in range(0, len(names), most)]


def mujoco(algo: str) -> str:
    """Return the presets of an algorithm for MuJoCo, measured or not, with what others report."""
    load = importlib.import_module("jaxrl_fast.config.load")
    rows = []
    for name, reported in published()["mujoco"].items():
        if name.startswith(f"{algo}_"):
            options = load.from_keywords(name).options
            own = mujoco_cells(name) or ["", "not yet measured", ""]
            rows.append([f"`{name}`", options.env, short(options.total_steps), *own, reported or ""])
    header = ["preset", "environment", "environment steps", "seeds", "return", "greedy return", "published"]
    return grid(header, rows)


def mujoco_cells(name: str) -> list[str]:
    """Return the seeds, the returns and the greedy returns of a preset; nothing if it is not measured."""
    if name not in read("learning"):
        return []
    found = [read("learning")[name]["seeds"][str(seed)] for seed in learning_seeds(name)]
    return [str(len(found)), *(spread([seed[key] for seed in found]) for key in ("return", "greedy"))]


VARIANTS = {  # of benchmarks/control.py
    "flash": "FlashSAC",
    "no_c51": "the same with `value: mean`",
    "no_norms": "the same with `network: simba`",
    "no_blocks": "the same with `network: mlp`",
    "no_scale": "the same with `rewards: raw`",
    "sac": "SAC",
    "reppo": "REPPO",
    "ppo": "PPO",
}


def control(task: str) -> str:
    """Return the cases of benchmarks/control.py of a task. "The same" is the row above."""
    rows = []
    for name, case in read("control").items():
        if name.startswith(f"{task}_"):
            variant, _ = name.removeprefix(f"{task}_").rsplit("_", 1)
            seeds = case["seeds"].values()
            returns = (spread([seed[key] for seed in seeds]) for key in ("return", "greedy"))
            rows.append([VARIANTS[variant], short(case["env_steps"]), str(len(seeds)), *returns])
    return grid(["agent", "environment steps", "seeds", "return", "greedy return"], rows)


def search() -> str:
    """Return the results of benchmarks/search.py, a row for each task and way."""
    rows, kept = [], read("search_cpu")
    for task in (name for name in kept if name != "about"):
        for way in kept["about"]["ways"]:
            if runs := [*kept[task].get(way, {}).values()]:
                scores = [spread([run[name] for run in runs]) for name in ("tuning", "test", "default")]
                rows.append([task, f"`{way}`", str(len(runs)), short(max(run["steps"] for run in runs)), *scores])
    return grid(["task", "way", "searches", "environment steps", "tuning score", "test score", "preset's score"], rows)


def exploration() -> str:
    """Return the cases of benchmarks/exploration.py."""
    cases = read("exploration_cpu").values()
    header = ["environment", "environment steps", "bonus", "seeds", "return", "greedy return"]
    return grid(header, [[*row[:3], *row[4:]] for row in bonus_rows(cases, digits=2)])


def learning_from_data() -> str:
    """Return the cases of benchmarks/learning_from_data.py."""
    header = ["environment", "environment steps", "bonus", "return of the data", "seeds", "return", "greedy return"]
    return grid(header, bonus_rows(read("learning_from_data_cpu").values()))


def bonus_rows(cases: Iterable[Any], digits: int = 1) -> list[list[str]]:
    """Return a row for each case: its environment, steps, bonus, return of the data, seeds and returns."""
    rows = []
    for case in cases:
        bonus, seeds = dict(case["bonus"]), case["seeds"].values()
        words = (
            " ".join([f"`{bonus.pop('kind')}`", *(f"{name} {value:g}" for name, value in bonus.items())])
            if bonus
            else "none"
        )
        source = "" if case["source_return"] is None else f"{case['source_return']:.1f}"
        returns = (spread([seed[key] for seed in seeds], digits) for key in ("return", "greedy"))
        rows.append([f"`{case['env_id']}`", short(case["env_steps"]), words, source, str(len(seeds)), *returns])
    return rows


def learning_cells(name: str) -> list[str]:
    """Return what a row of the table says of a preset."""
    run, seeds = read("learning")[name], learning_seeds(name)
    found = [run["seeds"][str(seed)] for seed in seeds]
    solved = [seed["solved_at"] for seed in found if seed["solved_at"]]
    at = short(statistics.median(solved)) if solved else ""
    at += f" ({len(solved)} of {len(seeds)})" if 0 < len(solved) < len(seeds) else ""
    span = f"{seeds[0]} to {seeds[-1]}" if len(seeds) > 1 else str(seeds[0])
    returns, greedy = ([seed[key] for seed in found] for key in ("return", "greedy"))
    return [short(run["env_steps"]), span, spread(returns), spread(greedy), at, published()["learning"][name] or ""]


def suite_results() -> str:
    """Return what PPO reaches in one environment of each suite, and what a random policy and others reach."""
    rows = []
    for name in (name for name in published()["learning"] if name.startswith("suite_")):
        run, seeds = read("learning")[name], learning_seeds(name)
        means = []
        for key in ("return", "greedy"):
            values = [run["seeds"][str(seed)][key] for seed in seeds]
            means.append(f"{statistics.mean(values):.3g} ± {statistics.stdev(values):.3g}")
        reference = [f"{run['random']['return']:.3g}", published()["learning"][name] or ""]
        rows.append([f"`{run['env_id']}`", short(run["env_steps"]), f"{len(seeds)}", *means, *reference])
    heading = ["environment", "environment steps", "seeds", "return", "greedy return", "random policy", "reference"]
    return grid(heading, rows)


def learning_seeds(name: str) -> list[int]:
    """Return the seeds of a preset that are reported: all that are kept but those that chose its settings."""
    without = published()["left_out"].get(name, [])
    return [seed for seed in map(int, read("learning")[name]["seeds"]) if seed not in without]


def spread(values: Sequence[float], digits: int = 1) -> str:
    """Return the mean and the standard deviation over seeds."""
    deviation = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{deviation}"


def short(number: float) -> str:
    """Return 1234567 as 1.23M."""
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:g}"


def players() -> str:
    """Return how the players of `games/Paddles` play after training together, from `players_learning.json`."""
    rows = [
        [f"`{name}`", short(case["steps"][-1]), str(case["seeds"]), *(at_end(case[side]) for side in ("left", "right"))]
        for name, case in read("players_learning").items()
    ]
    return grid(["case", "environment steps", "seeds", "left", "right"], rows)


def at_end(returns: Sequence[Sequence[float]]) -> str:
    """Return the mean over seeds of returns [S, P] at the last place, and the lowest and highest seed."""
    last = [values[-1] for values in returns]
    return f"{statistics.mean(last):.2f} ({min(last):.2f} to {max(last):.2f})"


def atari() -> str:
    """Return the trainings of the Atari presets, on a CPU and on a GPU."""
    rows = []
    for game in ("pong_cpu", "breakout_cpu"):
        for name, training in read(game)["trainings"].items():
            preset = re.match(r"(\w+_small)\b", name)
            if preset:
                rows.append([f"`{preset[1]}`", training["cpu"], *atari_cells(training["summary"])])
    rows.sort(key=lambda row: (list(published()["atari"]).index(row[0].strip("`")), int(row[2])))
    gpu = read("on_a_gpu_h200")["pong"]
    rows.append([f"`{gpu['preset']}`", "NVIDIA H200", *atari_cells(gpu["found"])])
    rows = [[*row, published()["atari"][row[0].strip("`")]] for row in rows]
    return grid(
        ["preset", "machine", "seed", "steps", "solved at", "return", "greedy return", "published"],
        rows,
    )


def atari_cells(summary: Mapping[str, Any]) -> list[str]:
    """Return what a row of the table says of a training."""
    stopped = " (stopped)" if summary["status"] == "stopped" else ""
    solved, greedy = summary["steps_to_solve"], summary["eval_return_mean"]
    return [
        str(summary["seed"]),
        short(summary["env_steps"]) + stopped,
        short(solved) if solved else "",
        f"{summary['final_return_mean']:.1f}",
        "" if greedy is None else f"{greedy:.1f}",
    ]


# Speed


def speed(name: str) -> str:
    """Return steps per second of jaxrl_fast and of a plain program, from `NAME.json`."""
    found = read(name)
    rows = [
        [
            f"{case['num_envs']}" + (f" ({case['rounds']} rounds)" if "rounds" in case else ""),
            short(case["plain_steps_per_s"]),
            short(case["ours_steps_per_s"]),
            f"{case['ratio']:.2f} ({case['ratio_min']:.2f} to {case['ratio_max']:.2f})",
        ]
        for case in found["cases"]
    ]
    return grid(["environments", "plain program", "jaxrl_fast", "ratio (lowest to highest round)"], rows)


def gymnasium_speed() -> str:
    """Return the speeds of PPO in Python environments, of jaxrl_fast and of Stable-Baselines3."""
    rows = []
    for case in read("gymnasium_speed_cpu")["cases"]:
        rates = case["steps_per_s"]
        ours, sb3 = ([rates[name] for name in rates if name.startswith(of)] for of in ("ours", "sb3"))
        shares = [case[name] for name in ("share_of_serial_limit", "share_of_what_sleep_allows") if name in case]
        cells = [case["task"].removeprefix("gymnasium/"), f"{case['num_envs']}", short(max(sb3)), short(rates["ours"])]
        rows.append([*cells, short(max(ours)), f"{max(ours) / max(sb3):.1f}", f"{shares[0]:.0%}"])
    heading = ["environment", "number", "SB3", "jaxrl_fast", "with the best options"]
    return grid([*heading, "best to SB3", "of the limit"], rows)


def suites() -> str:
    """Return how many environments of each suite can be trained, and with which versions."""
    rows = []
    for suite, found in read("suites").items():
        num = len(found["works"]) + len(found["refused"])
        versions = ", ".join(f"{package} {version}" for package, version in found["versions"].items())
        rows.append([f"`{suite}`", f"{len(found['works'])} of {num}", refusals(found["refused"]), versions])
    return grid(["suite", "environments that work", "the others", "versions"], rows)


def refusals(reasons: Mapping[str, str]) -> str:
    """Return the names of environments that are refused, by their families if a family has several."""
    families = [re.match(r"XLand|\w+", name) for name in reasons]
    return ", ".join(dict.fromkeys(f"{family[0]}" for family in families if family)) or "none"


def replay() -> str:
    """Return how fast minibatches are sampled, and what memory that takes."""
    buffers = {"ours": "jaxrl_fast", "pairs": "plain: both observations", "flashbax flat": "flashbax"}
    buffers |= {"ours, prioritized": "jaxrl_fast, prioritized", "flashbax prioritized flat": "flashbax, prioritized"}
    label = lambda c: buffers[c["buffer"].replace("prioritised", "prioritized")]
    rows = [
        [f"{c['capacity']:,} × {c['case']}", label(c), short(c["samples_per_s"]), f"{c['bytes'] / 1e6:,.0f} MB"]
        for c in read("replay_speed_cpu")["cases"]
    ]
    return grid(["stored transitions", "buffer", "samples per second", "memory"], rows)


def replay_dqn() -> str:
    """Return the speed of DQN on Pong with each storage of the replay."""
    rows = []
    for c in read("replay_dqn_cpu")["cases"]:
        storage, compression = c["store"].split("-")
        measured = f"{c['steps_per_s']:.0f}", f"{c['ratio']:.2f}", f"{c['read_ms']:.1f} ms"
        rows.append([storage, compression, *measured])
    waiting = "waiting for an update's batches"
    return grid(["storage", "compression", "steps per second", "relative to `device`", waiting], rows)


def replay_stores() -> str:
    """Return how fast each store of a replay is sampled, and what a transition takes there."""
    rows = [
        [
            f"{c['game']}, {c.get('frames', '84x84')}",
            c["store"] if "frames" in c else f"{c['store']}-{c['compression']}",
            f"{c['bytes']:,.0f}",
            *(short(c[speed]) if speed in c else "" for speed in ("samples_per_s", "cold_samples_per_s")),
        ]
        for c in read("replay_stores_cpu")["cases"]
    ]
    return grid(["frames", "store", "bytes", "samples per second", "with a cold page cache"], rows)


def replay_memory() -> str:
    """Return what a million transitions take in a process, by the frames and the store."""
    names = {"host-zstd": "`host`, compressed", "disk-none": "`disk`, not compressed"}
    rows = [
        [c["game"], names[c["store"]], f"{c['bytes']:,.0f}", f"{c['peak_mb']:,.0f} MiB"]
        for c in read("replay_memory_cpu")["cases"]
    ]
    return grid(["frames", "storage", "bytes per transition", "peak memory of the process"], rows)


def shared() -> str:
    """Return how long runs take that share the cores of a machine, compared with one run alone."""
    tasks = {"ppo_16": "PPO, 16 environments", "ppo_64": "PPO, 64 environments", "dqn_64": "DQN, 64 environments"}
    cases = read("shared_machine_cpu")["cases"]
    columns = list(dict.fromkeys((c["runs"], c["busy_programs"]) for c in cases))
    busy_programs = lambda busy: f", {busy} busy program{'s' * (busy > 1)}" if busy else ""
    titles = [f"{n} runs" if n > 1 else f"1 run{busy_programs(busy)}" for n, busy in columns]
    found = {(c["case"], c["devices"], c["runs"], c["busy_programs"]): c for c in cases}
    rows = []
    for case, devices in dict.fromkeys((c["case"], c["devices"]) for c in cases):
        factors = [f"{found[case, devices, *column]['factor']:.2f}" for column in columns]
        rows.append([f"{tasks[case]}, CartPole-v1", devices, *factors])
    return grid(["task", "`--devices`", *titles], rows)


def several_machines() -> str:
    """Return what a run on many hosts would send and write, as computed from the programs."""
    paper = read("several_machines_cpu")["paper"]
    megabytes = lambda x: f"{x / 1e6:,.1f} MB"
    names = ("sent_bytes_of_a_sum", "checkpoint_bytes_of_each_other_process", "checkpoint_bytes")
    rows = [[f"`{preset}`", *(megabytes(found[name]) for name in names)] for preset, found in paper["presets"].items()]
    num = paper["hosts"] * paper["gpus"]
    header = ["preset", "sent by each GPU for a gradient step", "checkpoint of a process", f"checkpoint of {num}"]
    return grid(header, rows)


def ray_actors() -> str:
    """Return the time of a step of environments that wait, in worker processes and in Ray actors."""
    found = read("ray_actors_cpu")["step"]
    names = {"processes": "worker processes", "ray_actors": "Ray actors"}
    row = lambda key: [names[key], f"{found['ms_per_step'][key]:.1f}", f"{found['start_s'][key]:.0f}"]
    return grid([f"{found['num_envs']} environments in", "ms per step", "seconds to start"], map(row, names))


def gpu_cluster() -> str:
    """Return the collectives of programs for two hosts with eight GPUs each."""
    steps = ("environment_step", "gradient_step", "update")
    rows = []
    for line, of_gpus in read("gpu_counts_2x8_h200")["programs"].items():
        (entry,) = of_gpus.values()
        numbers = [str(entry[step]["collectives"]) if step in entry else "" for step in steps]
        rows.append([f"`{line.removeprefix('--config ')}`", *numbers, f"{entry['memory'] / 1e6:,.1f} MB"])
    return grid(["preset", *(step.replace("_", " ") for step in steps), "memory of each GPU"], rows)


def async_actors() -> str:
    """Return the speed of a training whose environments wait, with actors that are some updates ahead."""
    found = read("async_actors_cpu")["training"]
    speed = found["steps_per_s"]
    row = lambda k: [k, f"{found['expected_steps_per_s'][k]}", f"{speed[k]}", f"{speed[k] / speed['0']:.1f}"]
    return grid(["`--host.ahead`", "expected steps/s", "steps/s", "times as fast as 0"], map(row, speed))


def gpu_programs(gpu: str) -> str:
    """Return the kernels of each compiled program: with the waits for the host, of each step."""
    steps = ("environment_step", "gradient_step", "update")
    rows = []
    for line, of_gpus in read("gpu_counts")["programs"].items():
        if gpu not in of_gpus:
            continue
        entry = of_gpus[gpu]
        number = lambda step: f"{entry[step]['kernels']:,}" if step in entry else "-"  # noqa: B023
        waits = sum(entry[step]["host_waits"] for step in steps[:2] if step in entry)
        rows.append([f"`{line.removeprefix('--config ')}`", size(entry["memory"]), *map(number, steps), str(waits)])
    return grid(["preset", "memory", *(step.replace("_", " ") for step in steps), "host waits"], rows)


def size(num_bytes: float) -> str:
    """Return a number of bytes in MB."""
    return f"{num_bytes / 1e6:,.0f} MB" if num_bytes >= 1e6 else "under 1 MB"


def throughput() -> str:
    """Return steps per second of PPO against the number of environments."""
    curve = read("population_speed_cpu")["curve"]
    rows = [[upper(c["what"]), str(c["num_envs"]), short(c["steps_per_s"]), f"{c['speed_up']:.1f}"] for c in curve]
    return grid(["task", "environments", "steps per second", "times one environment"], rows)


def seeds() -> str:
    """Return what many seeds in one program take."""
    found = read("population_speed_cpu")
    row = lambda what, c, long: [what, f"{c['ratio']:.2f} ({c['least']:.2f} to {c['most']:.2f})", long]
    rows = [
        row(f"{c['num_seeds']} seeds, {c['algo'].upper()}", c, "one program instead of one run after another")
        for c in found["seeds"]
    ]
    rows += [
        row(f"{c['num_seeds']} seeds, {upper(c['what'])}", c, "one seed after another instead of all at once")
        for c in found["turns"]
    ]
    return grid(["case", "times as fast (lowest to highest round)", "what is compared"], rows)


def upper(words: str) -> str:
    """Return the name of an algorithm, with which this begins, in capitals."""
    algo, *rest = words.split(" ", 1)
    return " ".join([algo.upper(), *rest])


def atari_speed(name: str) -> str:
    """Return steps per second of Atari for each way of overlapping emulators and network, from `NAME.json`."""
    rows = []
    for case in read(name)["cases"]:
        for pools in (key.split("_")[1] for key in case if re.fullmatch(r"training_\d_steps_per_s", key)):
            cells = [case[f"acting_{pools}_steps_per_s"], case[f"training_{pools}_steps_per_s"]]
            cells += [case.get(f"overlapped_{pools}_steps_per_s")]
            emulators = [case["raw_sync_steps_per_s"], case["raw_async_steps_per_s"]]
            words = [short(x) if x else "" for x in (*emulators, *cells)]
            rows.append([f"`{case['preset']}`", str(case["num_envs"]), words[0], words[1], f"`{pools}`", *words[2:]])
    header = ["preset", "environments", "envpool alone, synchronous", "envpool alone, asynchronous", "pools"]
    return grid([*header, "acting", "training", "training with `--host.overlap`"], rows)


# The README's tables have fewer rows and columns.


def readme_results() -> str:
    """Return the README's table of results."""
    rows = []
    for name in published()["readme"]:
        steps, _, score, greedy, _, other = learning_cells(name)
        rows.append([f"`{name}`", steps, score, greedy, other])
    gpu = read("on_a_gpu_h200")["pong"]
    _, steps, _, score, greedy = atari_cells(gpu["found"])
    rows.append([f"`{gpu['preset']}`, one GPU", steps, score, greedy, published()["atari"][gpu["preset"]]])
    return grid(["preset", "steps", "return", "greedy return", "published"], rows)


def search_spaces() -> str:
    """Return the shipped space of each algorithm."""
    from jaxrl_fast.search import spaces

    rows = []
    for algo in spaces.SHIPPED:
        space = spaces.parse(spaces.DEFAULT, declare().options_of(configs()[algo]), algo)
        rows += [[algo, *spaces.text_of(dimension).split(" ", 1)] for dimension in space]
    return grid(["algorithm", "option", "range"], ([algo, f"`{name}`", text] for algo, name, text in rows))


def landscape() -> str:
    """Return how good the defaults are among random settings of each task."""
    heading = ["preset", "steps", "10%", "median", "90%", "best", "defaults (rank)", "preset's values (rank)", "solved"]
    rows = []
    for name, task in read("landscape_cpu")["tasks"].items():
        found, quantiles = task["summary"], task["summary"]["quantiles"]
        of = lambda what, found=found: f"{found[what]['score']:.1f} ({found[what]['rank']})"
        cells = [f"`{name}`", short(task["steps"]), *(f"{quantiles[q]:.1f}" for q in ("10", "50", "90", "100"))]
        cells += [of("defaults"), of("preset"), "" if found["solved"] is None else f"{found['solved']}"]
        rows.append(
            [*cells, f"{found['near_the_best']}", f"{found['chosen_by_half']:.1f}, {found['on_other_half']:.1f}"]
        )
    return grid([*heading, "near the best", "chosen, tested"], rows)


def readme_speed() -> str:
    """Return the README's table of speeds."""
    tasks = {
        "ppo_speed_cpu": ("PPO, CartPole-v1", 1024),
        "dqn_speed_cpu": ("DQN, CartPole-v1", 64),
        "pqn_speed_cpu": ("PQN, Breakout-MinAtar", 128),
    }
    rows = []
    for name, (task, num_envs) in tasks.items():
        case = next(case for case in read(name)["cases"] if case["num_envs"] == num_envs)
        speeds = short(case["plain_steps_per_s"]), short(case["ours_steps_per_s"])
        rows.append([task, str(num_envs), *speeds, f"{case['ratio']:.1f}"])
    return grid(["task", "environments", "plain program", "jaxrl_fast", "ratio"], rows)


# Words


def words_to_avoid() -> list[dict[str, Any]]:
    """Return docs/data/words.toml: patterns, and what to write instead."""
    import tomllib

    return tomllib.loads((DATA / "words.toml").read_text(encoding="utf-8"))["avoid"]


def source(module: str, name: str) -> str:
    """Return a function as it stands in the code."""
    return f"```python\n{inspect.getsource(getattr(importlib.import_module(module), name))}```"


def avoid() -> str:
    """Return the glossary's table of words to avoid."""
    return grid(["avoid", "write"], ([entry["words"], entry["write"]] for entry in words_to_avoid()))


KINDS = {
    "options": options,
    "command": command,
    "metrics": metrics,
    "learning": learning,
    "mujoco": mujoco,
    "search": search,
    "control": control,
    "exploration": exploration,
    "learning_from_data": learning_from_data,
    "players": players,
    "atari": atari,
    "speed": speed,
    "gymnasium_speed": gymnasium_speed,
    "replay": replay,
    "replay_stores": replay_stores,
    "replay_dqn": replay_dqn,
    "replay_memory": replay_memory,
    "suites": suites,
    "suite_results": suite_results,
    "several_machines": several_machines,
    "shared": shared,
    "gpu_programs": gpu_programs,
    "gpu_cluster": gpu_cluster,
    "ray_actors": ray_actors,
    "async_actors": async_actors,
    "throughput": throughput,
    "seeds": seeds,
    "atari_speed": atari_speed,
    "readme_results": readme_results,
    "readme_speed": readme_speed,
    "search_spaces": search_spaces,
    "landscape": landscape,
    "source": source,
    "avoid": avoid,
}

if __name__ == "__main__":
    print(render(" ".join(sys.argv[1:])))
