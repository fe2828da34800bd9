"""Split host environments into shards: each shard of a program steps its own pools.

One program runs in all shards and selects its pools by its index on the shard axis. Shards on separate devices step at
the same time; shards on one device step in turn. The trajectories are the same in both cases.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from jaxrl_fast.envs.wrappers.wrapper import with_pools
from jaxrl_fast.parallel.collectives import call_shard
from jaxrl_fast.types import Env
from jaxrl_fast.types.host import HostEnv


def join(parts: Sequence[Env], axis_name: str) -> Env:
    """Return an environment that is parts[i] in shard i; all parts have the same spec."""
    first = parts[0]
    of_shard = lambda name: (
        lambda i, *args: call_shard(axis_name, [partial(getattr(part.pools, name), i) for part in parts], *args)
    )
    host = _join_hosts([part.host for part in parts if part.host])
    return first._replace(
        reset=partial(call_shard, axis_name, [part.reset for part in parts]),
        step=partial(call_shard, axis_name, [part.step for part in parts]),
        parallelism=first.parallelism._replace(axis_name=axis_name, num_shards=len(parts)),
        host=with_pools(host, send=of_shard("send"), receive=of_shard("receive")),
    )


def _join_hosts(parts: Sequence[HostEnv]) -> HostEnv:
    """Return the record of all shards. Names of saved arrays begin with the index of a shard."""

    def for_all(name: str) -> Callable[..., None]:
        def call(*args: Any) -> None:
            for part in parts:
                getattr(part, name)(*args)

        return call

    def save() -> dict[str, Any] | str:
        found: dict[str, Any] = {}
        for i, part in enumerate(parts):
            state = part.save()
            if isinstance(state, str):
                return state
            found |= {f"{i}/{name}": x for name, x in state.items()}
        return found

    def load(state: Mapping[str, Any]) -> None:
        for i, part in enumerate(parts):
            part.load({name.removeprefix(f"{i}/"): x for name, x in state.items() if name.startswith(f"{i}/")})

    return parts[0]._replace(
        open=for_all("open"), close=for_all("close"), reseed=for_all("reseed"), save=save, load=load
    )
