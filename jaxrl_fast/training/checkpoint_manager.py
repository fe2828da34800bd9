"""Save and restore a run: the training state, and the numbers that the host tracks."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrl_fast import loop
from jaxrl_fast.config import settings
from jaxrl_fast.config.paths import CHECKPOINTS
from jaxrl_fast.metrics import tracker
from jaxrl_fast.parallel import team
from jaxrl_fast.parallel.arrays import local_index
from jaxrl_fast.parallel.program import Program
from jaxrl_fast.runs import checkpoint, checkpoint_writer, fingerprint, parts
from jaxrl_fast.training.plan import Plan
from jaxrl_fast.types import Env
from jaxrl_fast.types.host import HostEnv
from jaxrl_fast.utils import warnings
from jaxrl_fast.utils.errors import why
from jaxrl_fast.utils.parsing import parse_period
from jaxrl_fast.utils.throttle import Throttle

TRAIN_ENVS, EVAL_ENVS = "train_envs/", "eval_envs/"  # begin the names of arrays with the states of host environments


def has_envs(saved: checkpoint.Checkpoint) -> bool:
    """Return whether a checkpoint has the state of host environments."""
    return any(name.startswith(TRAIN_ENVS) for name in saved.arrays)


class CheckpointManager:
    """Saves a run regularly, and restores it."""

    def __init__(self, plan: Plan, metrics: tracker.MetricsTracker):
        options = plan.settings.options
        self.plan, self.tracker = plan, metrics
        self.writer = checkpoint_writer.Writer(
            plan.folder / CHECKPOINTS, options.keep_checkpoints, plan.agent.learning.resources
        )
        self.every_steps, seconds = parse_period(str(options.save_every))
        self.throttle = Throttle(seconds or math.inf)
        self.num_begun = 0  # checkpoints, whether or not they could be written
        self.team = team.current()
        evaluates = self.team.leads and not plan.shares_env
        self._envs = {TRAIN_ENVS: plan.env} | ({EVAL_ENVS: plan.eval_env} if evaluates else {})
        self.resets_envs = not plan.env.on_device  # whether a restored run starts new episodes

    @property
    def last(self) -> Path | None:
        """Return the newest checkpoint, if it is still on the disk."""
        last = self.writer.last
        return last if last is not None and last.is_dir() else None

    @property
    def num_saved(self) -> int:
        """Return the number of checkpoints written so far, in all processes of the run."""
        return self.writer.num_written

    def saved_at(self, env_steps: int) -> bool:
        """Return whether the checkpoint of this step is on the disk."""
        return self.last == self.writer.folder(env_steps)

    def should_save(self) -> bool:
        """Return whether a checkpoint is due by the clock, and none is being written."""
        return self.throttle.elapsed() and not self.writer.busy

    def defer(self) -> None:
        """Start the clock again without a save."""
        self.throttle.ready()

    def restore(self, saved: checkpoint.Checkpoint, program: Program) -> tuple[loop.TrainState, dict[str, Any]]:
        """Return the training state, and the `host_state` that was given to `save`."""
        whole = checkpoint.unflatten(program.state_spec, saved)
        for resource in self.plan.agent.learning.resources:
            resource.load(saved.manifest[checkpoint.RESOURCES][resource.name])
        state = program.shard_state(whole)
        kept = saved.manifest["host"]
        self.tracker.restore(kept["scores"], saved.arrays)
        if saved.manifest["config"]["solved_threshold"] != self.tracker.solved_threshold:
            self.tracker.reset_solved()
        self.writer.num_written, self.writer.last = kept["num_saves"], saved.folder
        self._mark_best()
        self.resets_envs = not (self.plan.env.on_device or self._restore_envs(saved))
        saved.arrays.clear()  # the device has them now
        return state, kept["others"]

    def save(
        self,
        state: loop.TrainState,
        env_steps: int,
        host_state: Mapping[str, Any],
        score: float | None = None,
        with_envs: bool = True,
    ) -> tuple[int, str] | None:
        """Copy everything to the host and begin to write it.

        Nothing is saved if a seed's numbers are not finite; the seed's index and the name of the array are returned.

        Args:
            score: The evaluation's score, if it is the best so far.
            with_envs: Whether host environments are at the same step as the state, so that they can be saved too.
        """
        self.throttle.ready()
        folder = self.writer.folder(env_steps)
        if self.team.decide(lambda: self.last == folder):
            if score is not None:
                self.writer.mark(folder, score)
            return None
        num_seeds = len(self.tracker.diverged)
        arrays, kinds = checkpoint.flatten(state, num_seeds if num_seeds > 1 else None)
        needed = checkpoint.names({"agent": self.plan.agent.policy_state(state.agent)})
        parameters = {id(x) for x in jax.tree.leaves(self.plan.agent.parameters(state.agent))}
        learned = {name for name, x in checkpoint.names({"agent": state.agent}).items() if id(x) in parameters}
        first = local_index(jax.tree.leaves(state)[0])[0][0] if num_seeds > 1 else 0
        checked = {name: x for name, x in arrays.items() if name in needed or name in learned}
        bad = self._not_finite(checked, learned, first)
        for of_process in self.team.gather(bad):
            if of_process is not None:
                member, array = of_process
                return member, array
        self.num_begun += 1
        results, buffered = self.tracker.state_dict()
        of_envs = self._states_of_envs() if with_envs else {}
        if not all(self.team.gather(bool(of_envs))):
            of_envs = {}
        manifest = {
            "env_steps": env_steps,
            "arrays": kinds,
            "host": {"scores": results, "num_saves": self.num_saved + 1, "others": host_state},
            "num_shards": self.plan.placement.num_shards,
            "num_grad_workers": self._num_grad_workers(),
            "exact": self.plan.env.on_device or self.plan.settings.options.host.exact_resume or bool(of_envs),
            "meta": fingerprint.fingerprint(),
            "config": settings.to_mapping(self.plan.settings),
        }
        division = parts.WHOLE
        if self.team.count > 1:
            arrays, division = parts.divide(arrays, checkpoint.names(state), num_seeds, self.team)
        of_host = (buffered if self.team.leads else {}) | of_envs
        self.writer.save(folder, arrays | of_host, manifest, score, division)
        return None

    def _num_grad_workers(self) -> int:
        """Return the gradient workers of a resume: those of the first part of the run, unless it has fewer cores."""
        before = self.plan.saved.manifest["num_grad_workers"] if self.plan.saved else 1
        return max(before, self.plan.placement.num_grad_workers)

    def open_resources(self) -> None:
        """Open the agent's host resources, empty. Delete what no checkpoint names, and what is half written."""
        self.writer.remove_leftovers()
        for resource in self.plan.agent.learning.resources:
            resource.open(self.plan.folder / resource.name)
        self.writer.prune()

    def wait(self) -> str:
        """Wait until the checkpoint is on the disk. Return an error message, or ""; older checkpoints remain."""
        problem = self.writer.wait()
        return problem and f"{problem}; training continues"

    def mark_eval_envs(self) -> Callable[[], None]:
        """Return a function that takes the environments of evaluations back to where they are now, if they can be."""
        host = self.plan.eval_env.host if self.team.leads else None
        state = self._state_of(self.plan.eval_env) if host else {}
        return lambda: host.load(state) if host and state else None

    def _states_of_envs(self) -> checkpoint.Arrays:
        """Return the states of host environments by name; nothing if some of them cannot be saved."""
        states = {prefix: self._state_of(env) for prefix, env in self._envs.items()}
        named = {prefix + name: x for prefix, state in states.items() for name, x in state.items()}
        return named if all(states.values()) else {}

    def _state_of(self, env: Env) -> checkpoint.Arrays:
        """Return the state of host environments; nothing if they reset at checkpoints or cannot be saved."""
        if env.host is None or self.plan.settings.options.host.exact_resume:
            return {}
        try:
            state = env.host.save()
        except Exception as error:  # environments may raise anything
            warnings.warn(f"the state of {env.spec.id} is not saved ({why(error)})")
            return {}
        return {} if isinstance(state, str) else state

    def _restore_envs(self, saved: checkpoint.Checkpoint) -> bool:
        """Let host environments continue from their saved states. Return whether those of all processes do."""
        if not has_envs(saved):
            return False
        hosts = {prefix: env.host for prefix, env in self._envs.items() if env.host}
        each = self.team.gather(self._load_envs(saved, hosts))
        if not all(each):
            for host in hosts.values():
                host.reseed(saved.manifest["host"]["scores"]["updates"])
        return all(each)

    def _load_envs(self, saved: checkpoint.Checkpoint, hosts: Mapping[str, HostEnv]) -> bool:
        """Return whether host environments could be restored; else warn."""
        for prefix, host in hosts.items():
            state = {name.removeprefix(prefix): x for name, x in saved.arrays.items() if name.startswith(prefix)}
            try:
                if state:  # else of evaluations that shared the environment of the training
                    host.load(state)
            except Exception as error:  # environments may raise anything, for example after changes of their code
                env_id = self.plan.env.spec.id
                warnings.warn(f"the state of {env_id} cannot be restored ({why(error)}); its episodes are reset")
                return False
        return True

    def _mark_best(self) -> None:
        """Mark the checkpoint of the best evaluation, which a killed run may not have done."""
        best = self.tracker.best()
        folder = self.writer.folder(best["env_steps"]) if best else None
        if folder is not None and folder.is_dir():
            self.writer.mark(folder, best["eval_return_mean"])

    def _not_finite(self, arrays: checkpoint.Arrays, learned: set[str], first: int) -> tuple[int, str] | None:
        """Return the first seed that newly has a NaN or an infinite parameter, and the array's name.

        Several seeds are the rows of the arrays, from the `first` that this process has.
        """
        diverged = self.tracker.diverged
        for i in range(len(diverged)):
            for name, x in arrays.items():
                if diverged[i] is not None or not name.startswith("agent/") or x.dtype.kind != "f":
                    continue
                one = x
                if len(diverged) > 1:
                    one = x[i - first :][:1] if i >= first else x[:0]
                wrong = ~np.isfinite(one) if name in learned else np.isnan(one)
                if wrong.any():
                    return i, name
        return None
