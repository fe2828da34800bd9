"""What of a run is saved, and how it goes on from there: the training's state and the host's numbers beside it."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_fast import loop
from jaxrl_fast.config import settings
from jaxrl_fast.config.paths import CHECKPOINTS
from jaxrl_fast.metrics import tracker
from jaxrl_fast.parallel.program import PARAMETERS, Program
from jaxrl_fast.runs import checkpoint, checkpoint_saver, fingerprint
from jaxrl_fast.training.plan import Plan
from jaxrl_fast.utils.parsing import parse_period
from jaxrl_fast.utils.throttle import Throttle


class CheckpointManager:
    """Saves a run when it is time, and restores it."""

    def __init__(self, plan: Plan, results: tracker.MetricsTracker):
        options = plan.settings.options
        self.plan, self.scores = plan, results
        self.saver = checkpoint_saver.Saver(plan.folder / CHECKPOINTS, options.keep_checkpoints)
        self.every_steps, seconds = parse_period(str(options.save_every))
        self.pace = Throttle(seconds or math.inf)
        self.num_begun = 0  # whether or not they could be written

    @property
    def last(self) -> Path | None:
        """The newest checkpoint that is on the disk."""
        return self.saver.last

    @property
    def num_saved(self) -> int:
        """Checkpoints written so far, in all processes of the run."""
        return self.saver.num_written

    def has(self, env_steps: int) -> bool:
        """Whether the checkpoint of this moment is on the disk."""
        return self.last == self.saver.folder(env_steps)

    def due(self) -> bool:
        """Whether a checkpoint by the clock should be written now."""
        return self.pace.over() and not self.saver.busy

    def postpone(self) -> None:
        """Nothing can be saved now: it is not due before its time has passed again."""
        self.pace.due()

    def restore(self, saved: checkpoint.Checkpoint, program: Program) -> tuple[loop.TrainState, dict[str, Any]]:
        """The training's state, and what else was given to `save`."""
        state = program.shard_state(checkpoint.unflatten(program.state_spec, saved))
        kept = saved.manifest["host"]
        self.scores.restore(kept["scores"], saved.arrays)
        if saved.manifest["config"]["solved_threshold"] != self.scores.goal:
            self.scores.reset_solved()
        self.saver.num_written, self.saver.last = kept["num_saves"], saved.folder
        self._mark_again()
        saved.arrays.clear()  # the device has them now
        return state, kept["others"]

    def save(
        self, state: loop.TrainState, env_steps: int, others: Mapping[str, Any], score: float | None = None
    ) -> tuple[int, str] | None:
        """Copies everything to the host and begins to write it. `score`: of its evaluation, if it is the best so far.

        Where a seed's numbers are not finite nothing is saved; its place among all and what it is are returned.
        """
        self.pace.due()
        folder = self.saver.folder(env_steps)
        if self.saver.last == folder:
            if score is not None:
                self.saver.mark(folder, score)
            return None
        num_seeds = len(self.scores.diverged)
        arrays, kinds = checkpoint.flatten(state, num_seeds if num_seeds > 1 else None)
        needed = checkpoint.names({"agent": self.plan.agent.policy_state(state.agent)})
        bad = self._not_finite({name: x for name, x in arrays.items() if name in needed})
        if bad is not None:
            return bad
        self.num_begun += 1
        results, ledger = self.scores.saved()
        manifest = {
            "env_steps": env_steps,
            "arrays": kinds,
            "host": {"scores": results, "num_saves": self.num_saved + 1, "others": others},
            "num_shards": self.plan.placement.num_shards,
            "num_grad_workers": self.plan.placement.num_grad_workers,
            "exact": self.plan.env.on_device or self.plan.settings.options.exact_resume,
            "meta": fingerprint.fingerprint(),
            "config": settings.to_mapping(self.plan.settings),
        }
        self.saver.save(folder, arrays | ledger, manifest, score)
        return None

    def wait(self) -> str:
        """Until what was begun is on the disk. What went wrong, in a sentence: the one before is still there."""
        problem = self.saver.wait()
        return problem and f"{problem}; training goes on"

    def _mark_again(self) -> None:
        """The best evaluation's checkpoint, in case that the run was killed before it was marked."""
        best = self.scores.best()
        folder = self.saver.folder(best["env_steps"]) if best else None
        if folder is not None and folder.is_dir():
            self.saver.mark(folder, best["eval_return_mean"])

    def _not_finite(self, arrays: checkpoint.Arrays) -> tuple[int, str] | None:
        """The place of a seed that was well so far and whose learner has a NaN, or an infinite parameter; and where."""
        diverged = self.scores.diverged
        for i in range(len(diverged)):
            for name, x in arrays.items():
                if diverged[i] is not None or not name.startswith("agent/") or x.dtype.kind != "f":
                    continue
                one = x[i] if len(diverged) > 1 else x
                wrong = ~np.isfinite(one) if PARAMETERS in name else np.isnan(one)
                if wrong.any():
                    return i, name
        return None
