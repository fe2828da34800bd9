"""Describe an exported policy: policy.json for programs, README.md for readers."""

import json
from pathlib import Path
from typing import Any

from jaxrl_fast.envs import nested
from jaxrl_fast.evaluation.export.function import Input, PolicyFunction, remembered
from jaxrl_fast.evaluation.saved_run import SavedRun
from jaxrl_fast.runs import files, fingerprint
from jaxrl_fast.utils.formatting import counted, short_number

CI95 = 1.96  # standard errors
NEEDS = {"stablehlo": "pip install jax flatbuffers", "onnx": "pip install onnxruntime", "npz": "pip install numpy"}
DRAWS = {"uniform": "random", "normal": "standard_normal", "gumbel": "gumbel"}  # methods of numpy's Generator


def describe(
    saved: SavedRun, function: PolicyFunction, kind: str, sampled: bool, inputs: list[Input], more: dict[str, Any]
) -> dict[str, Any]:
    """Return the content of policy.json, with `more` entries of this format."""
    options = saved.settings.options
    parts = {name or "action": part.expression for name, part in nested.named(saved.env.view.action_tree) if part}
    meaning = "all choices, then all numbers; see action_parts" if parts else "the environment's own action"
    action = Input("action", ("b", *function.action.shape), str(function.action.dtype), meaning)
    return {
        "format": kind,
        "policy": "sampled" if sampled else "greedy",
        "algo": saved.settings.algo,
        "env_id": saved.env.spec.id,
        "env_options": dict(options.env_options),
        "observation_space": str(function.given.obs),
        "action_space": str(saved.env.spec.action),
        **({"action_parts": parts} if parts else {}),
        "inputs": [dict(x._asdict()) for x in inputs],
        "outputs": [dict(x._asdict()) for x in (action, *remembered(function, "next_memory"))],
        **({"initial_memory": {x.name: x.initial.tolist() for x in function.memory}} if function.memory else {}),
        "load": usage(function, kind, inputs),
        **more,
        "seed": saved.seeds[0],
        "member": saved.member,
        "checkpoint": saved.checkpoint.name,
        "env_steps": saved.env_steps,
        "evaluation": evaluation(saved, sampled),
        "protocol": saved.env.protocol or options.protocol or None,
        "training_command": "python -m jaxrl_fast.train --config config.yaml",
        "versions": fingerprint.versions(),
    }


def usage(function: PolicyFunction, kind: str, inputs: list[Input]) -> list[str]:
    """Return the lines of Python that load the policy and compute actions for two observations."""
    names = [x.name for x in inputs]
    lines = [
        f"{x.name} = np.zeros({(2, *x.shape[1:])}, np.{x.dtype.replace('bool', 'bool_')})"
        for x in inputs
        if x.name.startswith("obs")
    ]
    masks = [x.name for x in inputs if x.name == "action_mask"]
    mask_lines = [f"{x.name} = np.ones({(2, *x.shape[1:])}, bool)" for x in inputs if x.name in masks]
    memory = [one.name for one in function.memory]
    returned = ", ".join(["action", *memory])
    if kind == "stablehlo":
        if not hasattr(function.given.obs, "shape"):
            lines = ["obs = ...  # a tree of arrays [b, ...], as the environment returns it"]
        lines += [*mask_lines, *_initial(function)]
        key = ", jax.random.key_data(jax.random.key(0))" if function.noise else ""
        load = [
            "import jax, numpy as np",
            "from jax import export",
            'with open("policy.stablehlo", "rb") as file:',
            "    policy = jax.jit(export.deserialize(bytearray(file.read())).call)",
        ]
        given = ", ".join(["obs", *masks, *memory]) + key
        return [
            *load,
            *lines,
            f"{returned} = policy({given})  # memory for the next step" if memory else f"print(policy({given}))",
        ]
    lines += [*mask_lines, *_initial(function)]
    lines += ["rng = np.random.default_rng()"] * bool(function.noise)
    for one in function.noise:
        draw = f"rng.{DRAWS[one.law]}(size={(2, *one.spec.shape)}).astype(np.float32)" if one.law else "..."
        lines.append(f"{one.name} = {draw}")
    if kind == "onnx":
        feeds = ", ".join(f'"{name}": {name}' for name in names)
        load = ["import numpy as np, onnxruntime", 'session = onnxruntime.InferenceSession("policy.onnx")']
        call = f"session.run(None, {{{feeds}}})"
        return [*load, *lines, f"{returned} = {call}  # memory for the next step" if memory else f"print({call}[0])"]
    return ["import numpy as np", "from policy import policy", *lines, f"print(policy({', '.join(names)}))"]


def _initial(function: PolicyFunction) -> list[str]:
    """Return lines of Python that make the memory of two environments at the start of an episode."""
    make = lambda x: f"np.zeros({(2, *x.shape)}, np.{x.dtype})" if not x.any() else "...  # see initial_memory"
    return [f"{one.name} = {make(one.initial)}" for one in function.memory]


def evaluation(saved: SavedRun, sampled: bool) -> dict[str, Any] | None:
    """Return the return of this checkpoint with its interval, from evaluation.json or else from training; None without.

    An evaluation during training has a single number for all seeds of a run; its interval is that of a normal mean.
    """
    wanted = {
        "checkpoint": saved.checkpoint.name,
        "policy": "exploring" if sampled else "greedy",
        "member": saved.member,
    }
    for path in sorted(saved.folder.glob("evaluation*.json"), key=lambda p: p.stat().st_mtime, reverse=True):
        found = _read(path)
        rows = [row for row in _rows(found, "seeds") if row.get("seed") == saved.seeds[0]]
        if rows and {name: found.get(name) for name in wanted} == wanted:
            names = ("mean", "std", "low", "high")
            numbers = {f"return_{n}": rows[0].get(f"eval_return_{n}") for n in names}
            return numbers | {
                "episodes": rows[0].get("eval_episodes"),
                "interval": "95%, bootstrap",
                "source": path.name,
            }
    summary = files.summary_if_any(saved.folder)
    rows = [row for row in _rows(summary, "evaluations") if row.get("env_steps") == saved.env_steps]
    if sampled or saved.member or not rows or not rows[-1].get("eval_episodes"):
        return None
    mean, std, number = (rows[-1][f"eval_{n}"] for n in ("return_mean", "return_std", "episodes"))
    half = CI95 * std / number**0.5
    numbers = {"return_mean": mean, "return_std": std, "return_low": mean - half, "return_high": mean + half}
    source = "evaluation during training" + (", all seeds" if summary.get("num_seeds", 1) > 1 else "")
    return numbers | {"episodes": number, "interval": "95%, normal", "source": source}


def _read(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return {}


def _rows(content: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """Return a list of dictionaries in a file, without anything else that an edited file may hold there."""
    rows = content.get(name)
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []


def readme(card: dict[str, Any]) -> str:
    """Return the content of README.md."""
    score = card["evaluation"]
    steps = short_number(card["env_steps"])
    shape = lambda x: f"{x['dtype']}[{', '.join(map(str, x['shape']))}]"
    row = lambda kind, x: f"| `{x['name']}` | {kind} | `{shape(x)}` | {x['meaning']} |"
    table = [row(kind, x) for kind in ("input", "output") for x in card[f"{kind}s"]]
    parts = [f"- `{name}`: `{text}`" for name, text in card.get("action_parts", {}).items()]
    returned = (
        f"Return {score['return_mean']:.2f}, interval {score['return_low']:.2f} to {score['return_high']:.2f} "
        f"({score['interval']}), over {counted(score['episodes'], 'episode')} ({score['source']}). Rewards are raw."
        if score and score["return_mean"] is not None and score["return_low"] is not None
        else "Not evaluated: run `python -m jaxrl_fast.evaluate` on the run, then export again."
    )
    return "\n".join(
        [
            f"# {card['algo'].upper()} on {card['env_id']}, {card['policy']} policy",
            "",
            f"Trained by jaxrl_fast {card['versions']['jaxrl_fast']}: seed {card['seed']}, {steps} environment steps.",
            returned,
            "",
            "| array | | type, `b` rows | meaning |",
            "| --- | --- | --- | --- |",
            *table,
            "",
            *(["Parts of an action, from `action` [b, k + D]:", "", *parts, ""] if parts else []),
            f"Load it with `{NEEDS[card['format']]}`:",
            "",
            *("```python", *card["load"], "```"),
            "",
            "Train it again with jaxrl_fast:",
            "",
            *("```bash", card["training_command"], "```"),
            "",
            "`policy.json` holds the same and more for programs.",
            "",
        ]
    )
