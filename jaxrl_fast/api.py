"""Train and load from Python: `fit("ppo_cartpole", num_envs=256)`, `load("runs/mine").policy(obs)`."""

import base64
import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

from jaxrl_fast.config import cli, paths, resume
from jaxrl_fast.config.convert import convert
from jaxrl_fast.config.load import from_keywords
from jaxrl_fast.config.sources import from_mapping
from jaxrl_fast.options.declare import Option
from jaxrl_fast.plotting import run_curve
from jaxrl_fast.runs import files
from jaxrl_fast.training import plan, trainer
from jaxrl_fast.training.callbacks import check_callbacks
from jaxrl_fast.utils import devices, formatting
from jaxrl_fast.utils.files import path_of
from jaxrl_fast.utils.importing import describe

if TYPE_CHECKING:
    from jaxrl_fast.evaluation.export.load import ExportedPolicy
    from jaxrl_fast.evaluation.policy import Trained


def fit(
    preset: str | None = None,
    *,
    algo: str | ModuleType = "",
    agent: Mapping[str, Any] | None = None,
    callbacks: Sequence[Any] = (),
    **options: Any,
) -> "Run":
    """Train, and return the run.

    Ctrl-C saves and returns the run, with the status "stopped". A second Ctrl-C is a KeyboardInterrupt.

    Args:
        preset: The name or the file of a preset.
        algo: An algorithm's name, or a custom module with `Config` and `make`.
        agent: Options of the algorithm by name: `{"learning_rate": 1e-3}`.
        callbacks: Objects with `on_record`, `on_evaluation` or `on_end`, see `Callback`.
        **options: Options as on the command line: `num_envs=256`, `env="Acrobot-v1"`,
            `env_options={"max_steps_in_episode": 200}`, `resume="runs/mine"`. `env` may also be a class, a factory or
            an instance of gymnax's or gymnasium's interface.

    Raises:
        ValueError: An option is wrong. Nothing has been compiled or written.
        FloatingPointError: The training has diverged. The folder holds all results until then.
        MemoryError: The program does not fit into memory.
    """
    if isinstance(options.get("resume"), Run):
        options |= {"env": options["resume"].env} if options["resume"].env is not None and "env" not in options else {}
        options["resume"] = options["resume"].folder
    if isinstance(options.get("init_from"), Run):
        options["init_from"] = options["init_from"].folder
    check_callbacks(callbacks)
    if options.get("dry_run"):
        raise ValueError("dry_run: returns no run, got True; use python -m jaxrl_fast.train --dry-run")
    ready = plan.make_plan(from_keywords(preset, algo, agent, **options))
    outcome = trainer.execute(ready, callbacks=callbacks)
    if not ready.env.on_device:  # after an exception, a program may still be running, so its pools stay open
        devices.release_envs([ready.env, ready.eval_env])
    if outcome.failure:
        raise FloatingPointError(outcome.failure)
    return Run(outcome.folder.resolve(), outcome.summary, outcome.agent_state, ready.settings.options.env)


def load(
    run: "str | Path | Run",
    seed: int | None = None,
    which: Literal["best", "last"] = "best",
    env: Any = None,
    member: Mapping[str, Any] | str | Sequence[str] | None = None,
) -> "Trained | ExportedPolicy":
    """Load a trained policy: `load("runs/mine").policy(obs)` is the action for an observation (see `policy.Trained`).

    An exported policy is loaded from its folder or its file: `load("policies/walker/policy.onnx").policy(obs)`. It is
    called as the policy of its run, and other arguments do not apply.

    Args:
        run: The run or its folder, or an exported policy.
        seed: One of the run's seeds; by default the first.
        which: "best" for the checkpoint with the best mean evaluation over all seeds, "last" for the newest one.
        env: The training environment, if it cannot be made from its id.
        member: For a run of a sweep with several members: values that select one, {"gamma": 0.9} or "gamma=0.9".

    Raises:
        ValueError: An argument is wrong, or the run cannot be loaded.
    """
    from jaxrl_fast.evaluation import policy

    if not isinstance(run, Run) and (exported := _exported(path_of(str(run)))) is not None:
        others = {"seed": seed, "env": env, "member": member} | ({} if which == "best" else {"which": which})
        for name, value in others.items():
            if value is not None:
                raise ValueError(f"{name}: an exported policy is complete, got {describe(value)}; leave it out")
        return exported
    given = from_mapping({"member": {} if member is None else member})[0]
    values = convert(Option("member", dict[str, Any]), given)
    if isinstance(run, Run):
        return policy.load(run.folder, seed, which, run.env if env is None else env, values)
    return policy.load(path_of(str(run)), seed, which, env, values)


def _exported(path: Path) -> "ExportedPolicy | None":
    """Return the exported policy that a path means, or None for the folder of a run."""
    from jaxrl_fast.evaluation.export import load

    folder = load.folder_of(path)
    return None if folder is None else load.load(folder)


@dataclass(frozen=True, repr=False)
class Run:
    """A run that has ended. Its folder holds the same numbers."""

    folder: Path
    summary: dict[str, Any]
    agent_state: Any = None  # the part of the final state that acting needs, [S, ...] with S seeds
    env: Any = None  # the training environment, if it cannot be made from its id

    @classmethod
    def open(cls, folder: str | Path, env: Any = None) -> "Run":
        """Open the run in this folder, without its `agent_state`: use `load` to act.

        `env` is the training environment, if it cannot be made from its id. Raise ValueError if no run has ended there.
        """
        path = path_of(str(folder)).resolve()
        resume.file_of_run(path, str(folder))
        summary = files.read_summary(path)
        missing = [name for name in ("algo", "env_id", "env_steps", "train_time_s") if name not in summary]
        if missing:
            raise ValueError(f"{path / paths.SUMMARY}: {missing[0]}: is missing; restore the file")
        return cls(path, summary, None, env)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Return the lines of metrics.jsonl, one per record and seed: `pandas.DataFrame(run.metrics)` is a table."""
        return files.read_metrics(self.folder)

    def plot(self, **options: Any) -> Any:
        """Draw the learning curve as a matplotlib figure. Options are those of the plot command: `x="seconds"`."""
        from jaxrl_fast.plotting import compare

        return compare.compare([self.folder], **options) if options else run_curve.figure(self.folder)

    def evaluate(self, **options: Any) -> dict[str, Any]:
        """Evaluate in fresh episodes, with the evaluate command's options. Return the contents of evaluation.json."""
        from jaxrl_fast.evaluation import episodes

        chosen = cli.from_keywords(episodes.Options, options)
        opened = episodes.open_run(self.folder, chosen, self.env)
        return episodes.evaluate_run(opened, chosen)

    def video(self, **options: Any) -> Any:
        """Record a GIF of the greedy policy, with the options of the video command. A notebook shows it."""
        from jaxrl_fast.evaluation import video

        opened = video.open_run(self.folder, cli.from_keywords(video.Options, options), self.env)
        return video.record_video(*opened)

    def export(self, **options: Any) -> Path:
        """Export the policy for programs without jaxrl_fast: `run.export(to="onnx")`. Return the new folder.

        The options are those of the export command.
        """
        from jaxrl_fast.evaluation import export

        exported = export.export_run(self.folder, cli.from_keywords(export.Options, options), self.env)
        return export.write(exported)

    def __repr__(self) -> str:
        return f"Run({self._words()}, folder={str(self.folder)!r})"

    def _repr_html_(self) -> str:
        words = html.escape(f"{self._words()} · {self.folder}")
        try:
            picture = base64.b64encode(self.plot()._repr_png_()).decode("ascii")
        except ValueError:  # no records to draw
            return words
        return f'<div>{words}<br><img src="data:image/png;base64,{picture}" width="720"></div>'

    def _words(self) -> str:
        s = self.summary
        steps = f"{formatting.short_number(s['env_steps'])} steps in {formatting.seconds(s['train_time_s'])}"
        score = "" if s.get("final_return_mean") is None else f", return {s['final_return_mean']:.1f}"
        return f"{s['algo']} on {s['env_id']}, {steps}{score}"
