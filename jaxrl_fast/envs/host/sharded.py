"""Split host environments into shards: each shard of a program steps its own pools.

One program runs in all shards and selects its pools by its index on the shard axis. Shards on separate devices step at
the same time; shards on one device step in turn. The trajectories are the same in both cases.
"""

from collections.abc import Sequence
from functools import partial

from jaxrl_fast.envs.host.pool import of_all
from jaxrl_fast.envs.wrappers.wrapper import with_pools
from jaxrl_fast.parallel import team
from jaxrl_fast.parallel.collectives import call_shard
from jaxrl_fast.types import Env


def join(parts: Sequence[Env], axis_name: str) -> Env:
    """Return an environment that is parts[i] in shard i; all parts have the same spec."""
    first = parts[0]
    of_shard = lambda name: (
        lambda i, *args: call_shard(axis_name, [partial(getattr(part.pools, name), i) for part in parts], *args)
    )
    hosts = {i: host for i in team.current().share(len(parts)) if (host := parts[i].host)}
    host = next(iter(hosts.values()))._replace(**of_all(hosts))
    return first._replace(
        reset=partial(call_shard, axis_name, [part.reset for part in parts]),
        step=partial(call_shard, axis_name, [part.step for part in parts]),
        parallelism=first.parallelism._replace(axis_name=axis_name, num_shards=len(parts)),
        host=with_pools(host, send=of_shard("send"), receive=of_shard("receive")),
    )
