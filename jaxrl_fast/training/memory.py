"""Estimate the memory of a run before it is allocated."""

import math
from typing import NamedTuple

from jaxrl_fast import loop
from jaxrl_fast.parallel import program
from jaxrl_fast.parallel.placement import SINGLE_DEVICE, Placement
from jaxrl_fast.runs import checkpoint
from jaxrl_fast.types import Agent, Env, PyTree
from jaxrl_fast.utils import target
from jaxrl_fast.utils.memory import format_bytes, free_bytes, nbytes
from jaxrl_fast.utils.random import key_of_seed


class MemoryEstimate(NamedTuple):
    """The bytes allocated throughout training. Temporary arrays are not included: they are known after compiling."""

    parameters: int  # optimizer, normalization statistics and the state of a bonus included
    replay: int
    environments: int  # a rollout that is kept for the next update included
    free: int | None  # None: unknown
    copies: int = 1  # of everything in the same memory: on a CPU, checkpoints copy to that memory too
    files: int = 0  # bytes on the disk of a replay in the host's memory or on the disk, see `disk.ReplayFiles`
    data: int = 0  # what the bonus learns from, whole on every device; no checkpoint has it

    @property
    def total(self) -> int:
        """Return the sum of all parts, copies included."""
        return self.copies * (self.parameters + self.replay + self.environments) + self.data

    def __str__(self) -> str:
        parts = [("parameters", self.parameters), ("replay", self.replay), ("environments", self.environments)]
        listed = " · ".join(f"{name} {format_bytes(size)}" for name, size in parts if size)
        listed += " · twice while saving" if self.copies > 1 else ""
        listed += f" · data {format_bytes(self.data)}" if self.data else ""
        return listed + ("" if self.free is None else f" · {format_bytes(self.free)} free")


def estimate(env: Env, agent: Agent, placement: Placement = SINGLE_DEVICE, data: PyTree = ()) -> MemoryEstimate:
    """Return the memory of all seeds on all devices of a placement. Nothing is compiled.

    `data` are the arrays that all seeds learn from (`bonus_data.of_program`).
    """
    state = program.abstract(env, lambda env: loop.init(env, agent, key_of_seed(0)))
    of_acting = checkpoint.names({"agent": agent.policy_state(state.agent)})
    others = {name: x for name, x in checkpoint.names({"agent": state.agent}).items() if name not in of_acting}
    of_replay = nbytes([x for name, x in others.items() if "/bonus/" not in name])
    parameters = nbytes(state.agent) - of_replay
    copies = 2 if target.platform() == "cpu" else 1
    of_envs = nbytes((state.actors, state.rollout))
    times = placement.num_padded_seeds * placement.num_grad_workers
    parameters, of_replay, of_envs = (times * part for part in (parameters, of_replay, of_envs))
    free, of_data = free_bytes(placement.num_devices), placement.num_devices * nbytes(data)
    return MemoryEstimate(parameters, of_replay, of_envs, free, copies, data=of_data)


def rollout_bytes(env: Env, agent: Agent) -> int:
    """Return the least bytes of an update of one seed: its rollout, and a copy of the rollout as minibatches."""

    def act(env: Env) -> PyTree:
        state = loop.init(env, agent, key_of_seed(0))
        return loop.act(env, agent, state.agent, state.actors, key_of_seed(0))[1]

    return 2 * nbytes(program.abstract(env, act))


def check_fits(
    needed: MemoryEstimate, replay_size: int | None, steps_per_update: int = 1, resumed: bool = False
) -> None:
    """Raise ValueError if a run does not fit into memory; the error names the largest `replay_size` that fits.

    The replay is counted in whole updates. A resumed run cannot change its `replay_size`, and one copy of its state is
    already in the host's memory.
    """
    copies = 1 if resumed else needed.copies
    others = needed.parameters + needed.environments
    if needed.free is None or needed._replace(copies=copies).total <= needed.free:
        return
    rest = needed.free - copies * others - needed.data
    if resumed:
        raise ValueError(f"this run does not fit into memory here ({needed})")
    if replay_size is None or rest <= 0:
        less = f"fewer environments or seeds{', or a smaller dataset or teacher,' if needed.data else ''} need less"
        raise ValueError(f"this does not fit into memory ({needed}); {less}")
    held = max(replay_size // steps_per_update, 1) * steps_per_update
    fits = math.floor(rest / (copies * needed.replay / held))
    unit = 10 ** max(len(str(fits)) - 3, 0)
    twice = ", twice while saving," if copies > 1 else ""
    raise ValueError(
        f"replay.size: a replay of {format_bytes(needed.replay)}{twice} does not fit into "
        f"{format_bytes(rest)}, got {replay_size}; use at most {fits // unit * unit}"
    )
