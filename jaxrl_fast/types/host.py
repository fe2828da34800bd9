"""Define what environments and agents have on the host, outside of compiled programs.

`types` refers to these records: `Env.host` is a `HostEnv`, and an agent with a replay in host memory or on disk has a
`HostResource`.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from jax import Array

PyTree = Any
AtariProtocol = Literal["", "dqn2015", "machado2018"]  # the published rules for episodes, rewards and scores


class AsyncPools(NamedTuple):
    """N environments in `num` pools of N / num each, with a step of a pool in two halves.

    Each call takes the state that the previous call of any pool returned, so that calls keep their order. While
    actions are pending, `reset` and `step` of the environment must not be called.
    """

    num: int
    send: Callable[[int, PyTree, Array], PyTree]  # (pool, state, action [N / num, ...])
    receive: Callable[[int, PyTree], tuple[PyTree, Any]]  # (pool, state); the `TimeStep` of that action, [N / num]
    overlap: bool = False  # the next rollout is collected during the update
    ahead: int = 0  # rollouts that a pool may be ahead of the learner; 0: all pools collect the same rollout
    wait: Callable[[Array], Array] = lambda sent: sent  # (bool [num]: whose action is sent) to those whose step is done


class HostEnv(NamedTuple):
    """The pools behind host environments. A program that steps them cannot be vmapped."""

    open: Callable[[], None] = lambda: None  # create the pools now; else they are created when first needed
    close: Callable[[], None] = lambda: None  # destroy them: programs compiled with them must not run afterwards
    reseed: Callable[[int], None] = lambda number: None  # restart the episodes with another seed
    # Numpy arrays by name, which a checkpoint keeps, or why the state cannot be saved. No program may be running.
    save: Callable[[], dict[str, Any] | str] = lambda: "its backend cannot save it"
    load: Callable[[Mapping[str, Any]], None] = lambda arrays: None  # continue from the arrays that `save` returned
    render: Callable[[], Any] | None = None  # [H, W, 3] uint8 of the first environment
    check_render: Callable[[], None] = lambda: None  # raises ValueError if `render` would fail
    protocol: AtariProtocol = ""
    num_workers: int = 0  # processes that step each pool; 0: the backend's threads or this process
    pools: AsyncPools | None = None  # if a step of a pool has two halves
    schedules: Mapping[str, Any] = {}  # of `envs.schedules`, of options by name
    # Values that replace schedules, and the steps that each environment has made; None: as many as now.
    set_options: Callable[[Mapping[str, float], int | None], None] = lambda values, num_steps: None


class HostResource(NamedTuple):
    """A part of an agent's state that lies outside of the compiled program, such as a replay buffer on the disk."""

    name: str  # of its folder in the run's folder
    open: Callable[[Any], None]  # (its folder, a pathlib.Path), empty, before a program runs that uses it
    close: Callable[[], None]  # when no such program runs any more
    save: Callable[[], Callable[[], dict[str, Any]]]  # record the state; the result writes the changes, in a thread
    load: Callable[[Mapping[str, Any]], None]  # restores what `save` wrote, with "files" of name, bytes and sha256
    prune: Callable[[list[Mapping[str, Any]]], None]  # delete files that are in none of these and not in use
    report: Callable[[], dict[str, float]]  # numbers about its contents and the time taken
