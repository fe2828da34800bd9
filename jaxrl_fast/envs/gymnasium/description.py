"""Try one gymnasium environment, describe its spaces and the time of a step, and make N of them."""

import functools
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import gymnasium
import jax
import numpy as np

from jaxrl_fast.envs.gymnasium import attributes, copying, masks, process, ray_actor
from jaxrl_fast.envs.gymnasium import spaces as gymnasium_spaces
from jaxrl_fast.envs.gymnasium.layout import Layout, Leaf, Recipe, allocate
from jaxrl_fast.envs.gymnasium.pool import LocalPool, WorkerPool, rows_of
from jaxrl_fast.envs.gymnasium.resetting import Episode
from jaxrl_fast.envs.gymnasium.source import RENDER_MODE, Source
from jaxrl_fast.envs.gymnasium.stepping import Stepper
from jaxrl_fast.envs.host.bridge import choose_bridge
from jaxrl_fast.envs.host.config import HostEnvConfig
from jaxrl_fast.envs.host.env import make_env
from jaxrl_fast.envs.host.pool import HostPool, PoolSpec, num_envs_per_pool
from jaxrl_fast.envs.schedules import Schedule
from jaxrl_fast.envs.spaces import allowed, without_mask
from jaxrl_fast.envs.wrappers import frame_skip, image
from jaxrl_fast.types import Box, Discrete, Env, EnvSpec, MultiDiscrete, PyTree, Space
from jaxrl_fast.types.spaces import Hybrid, mask_size
from jaxrl_fast.utils import ray_cluster
from jaxrl_fast.utils.devices import num_cores
from jaxrl_fast.utils.errors import why
from jaxrl_fast.utils.threads import needs_main_thread, one_thread
from jaxrl_fast.utils.warnings import once, warn

TRIAL_STEPS, TRIAL_S = 50, 0.1  # an environment is tried for that many steps, but no longer than this
MIN_SAVED_S = 5e-4  # seconds that workers must save per step of all environments, to be chosen by "auto"
MAX_WAITING = 32  # workers of all pools, for environments that wait, such as for a simulator in another process
WAITING = 0.5  # an environment waits if it computes for less than this share of a step


class Description(NamedTuple):
    """The properties of an environment that were found by making one and stepping it for a moment."""

    source: Source
    layout: Layout
    pool: PoolSpec  # with num_envs 0
    schedules: Mapping[str, Schedule]  # of attributes
    step_s: float  # seconds of a step, the median
    compute_s: float  # seconds of a step that this process computes
    copy_method: Callable[[], tuple[copying.Method, str]]  # tried in the first call; or why no copy is true
    warnings: tuple[str, ...] = ()  # one sentence each
    warn: Callable[[str], None] = warn  # of values outside their space, for all pools together
    why_main: str = ""  # the error of an environment outside of the main thread; "": it works in any one thread


def make_envs(source: Source, num_envs: int, config: HostEnvConfig) -> Env:
    """Return N environments; one is made and tried first, in a separate thread, as those of a `LocalPool` are."""
    asked = bool(config.wrappers.quarantine), config.wrappers.hide
    try:
        with one_thread("trial") as thread:
            described = thread.call(describe, source, *asked)
    except Exception as error:  # environments may raise anything
        if not needs_main_thread(error):
            raise
        described = describe(source, *asked)._replace(why_main=why(error))
    return from_description(described, num_envs, config)


def from_description(described: Description, num_envs: int, config: HostEnvConfig) -> Env:
    """Return N environments that have been described."""
    if config.workers.ray:
        ray_cluster.connect("host.workers", str(config.workers))
    num = num_envs_per_pool(num_envs, config)
    pool = described.pool._replace(env=described.pool.env._replace(num_envs=num))
    num_workers = choose_num_workers(described, num, config)
    if described.why_main and config.workers.num == 0:
        problem = f"{described.source.env_id} works in the main thread of a process only ({described.why_main}), got 0"
        described = described._replace(
            warnings=(*described.warnings, f"host.workers: {problem}; a worker process steps it")
        )
    open_pool = functools.partial(_open, described, num_workers, config)
    bridge = choose_bridge(described.source.env_id, config.bridge)
    schedules = described.schedules if config.schedules else {}
    env = make_env(pool, open_pool, config, bridge, described.warnings, num_workers, schedules)
    env = env._replace(view=env.view._replace(resize=functools.partial(from_description, described)))
    return env if described.source.whole_image is None else _of_whole_frames(env, described.source)


def _of_whole_frames(env: Env, source: Source) -> Env:
    """Return the environments with a view of frames before pools change them."""
    assert source.whole_image, "frames change"
    (index, space), frames = source.whole_image, image.parse(source.env_id, source.frame_options)
    raw = env.spec.obs if env.view.raw_obs is None else env.view.raw_obs

    def encode(whole: PyTree) -> PyTree:
        changed = image.change(frames, gymnasium_spaces.encode(space, jax.tree.leaves(whole)[index]))
        return env.view.encode_obs(image.replaced(whole, index, changed))

    raw = image.replaced(raw, index, jax.ShapeDtypeStruct(space.shape, space.dtype))
    return env._replace(view=env.view._replace(raw_obs=raw, encode_obs=encode))


def _open(described: Description, num_workers: int, config: HostEnvConfig, index: int, seeds: list[int]) -> HostPool:
    del index
    source, quarantine = described.source, bool(config.wrappers.quarantine)
    schedules = {name: x if config.schedules else x.fixed() for name, x in described.schedules.items()}
    num_total = len(seeds) * max(config.num_async_pools, 1) * config.shard.num
    recipe = Recipe(source.env_id, source.maker(config.render), described.layout, quarantine, schedules, num_total)
    method = lambda: described.copy_method()[0]
    pool: LocalPool | WorkerPool
    if num_workers:
        timeout_s, start = config.workers.timeout, ray_actor.Worker if config.workers.ray else process.Worker
        pool = WorkerPool(
            recipe, seeds, method, described.warn, num_workers=num_workers, timeout_s=timeout_s, start=start
        )
    else:
        pool = LocalPool(recipe, seeds, method, described.warn)
    if config.episodes:
        pool.set_episodes([Episode(*begin) for begin in config.episodes], -(-len(config.episodes) // len(seeds)))
    return pool


def choose_num_workers(described: Description, num_envs: int, config: HostEnvConfig) -> int:
    """Return the number of worker processes for a pool of `num_envs`; 0: they are stepped in this process.

    Without workers, the environments of all pools and shards take turns in this process, because Python runs in one
    thread at a time.
    """
    if config.workers.num != "auto":
        return min(max(int(config.workers.num), bool(described.why_main)), num_envs)
    waits = described.compute_s < WAITING * described.step_s
    num_pools = max(config.num_async_pools, 1) * config.shard.num
    most = min(num_envs, max((MAX_WAITING if waits else num_cores()) // num_pools, 1))
    at_once = most * config.shard.num
    saved_s = num_envs * config.shard.num * described.step_s * (1 - 1 / at_once)
    if at_once > 1 and saved_s >= MIN_SAVED_S:
        return most
    # Asynchronous pools step while this process computes.
    return 1 if config.num_async_pools or described.why_main else 0


def describe(source: Source, quarantine: bool = False, hidden: Collection[str] = ()) -> Description:
    """Make one environment, and step it for a moment. Raise ValueError if its spaces are not supported.

    With `quarantine`, numbers that are not finite are accepted. Parts of the observation that are `hidden` may be
    anything.
    """
    source = source.with_changes(hidden)
    env = source.make()
    if env.spec is not None and not source.is_named:
        source = source._replace(env_id=f"gymnasium/{env.spec.id}")
    try:
        env_id, space = source.env_id, env.action_space
        action, start, bounds, parts = gymnasium_spaces.action_space(env_id, space)
        tree = gymnasium_spaces.observation_tree(env_id, env.observation_space, hidden)
        layout = _layout(tree, space if parts is None else action.zeros())._replace(action_tree=parts)
        is_part = gymnasium_spaces.is_action_mask(tree, action)
        if not is_part:
            layout = layout._replace(mask_size=_mask_size(env, env_id, layout, action, quarantine))
        has_action_mask = is_part or bool(layout.mask_size)
        frame_skip.check(env_id, has_action_mask, source.frame_skip)
        schedules = attributes.resolve(env_id, env, source.schedules)
        step_s, compute_s = _try(env, env_id, layout, quarantine, schedules)
        can_render = source.takes_render_mode and RENDER_MODE in (env.metadata or {}).get("render_modes", ())
        can_render = can_render or env.render_mode == RENDER_MODE
    finally:
        env.close()
    raw = rows_of(layout, allocate(layout, 1))
    visible, mask = _parts(is_part, bool(layout.mask_size))
    method = functools.cache(functools.partial(copying.choose_method, source.maker(render=False)))
    pool = PoolSpec(
        env=EnvSpec(env_id, None, action, 0, has_action_mask=has_action_mask),  # type: ignore[arg-type]
        raw_obs=jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), raw),
        action_dtype=layout.action_dtype,
        action_start=start,
        bounds=bounds,
        action_tree=parts,
        encode=functools.partial(gymnasium_spaces.encode, visible(tree) if is_part else tree),
        visible=visible,
        action_mask=functools.partial(_allowed, action, mask) if mask and not isinstance(action, Box) else None,
        mask_is_part=is_part,
        why_not_saved=lambda: method()[1],
        can_render=can_render,
    )
    source = source._replace(takes_render_mode=source.takes_render_mode and can_render)
    warnings = gymnasium_spaces.warnings(env_id, visible(tree) if is_part else tree)
    return Description(source, layout, pool, schedules, step_s, compute_s, method, warnings, once(warn))


def _parts(is_part: bool, is_in_info: bool) -> tuple[Callable[[PyTree], PyTree], Callable[[PyTree], PyTree] | None]:
    """Return the functions that extract the observation and the action mask from raw observations."""
    if is_part:
        return without_mask, lambda raw: raw["action_mask"]
    if is_in_info:
        return lambda raw: raw["obs"], lambda raw: raw["action_mask"]
    return lambda raw: raw, None


def _allowed(action: Discrete | MultiDiscrete | Hybrid, mask: Callable[[PyTree], PyTree], raw: PyTree) -> jax.Array:
    return allowed(action, mask(raw))


def _layout(tree: PyTree, action: Any) -> Layout:
    """Return the arrays of a row for a tree of spaces and an action space."""
    leaves: list[Leaf] = []

    def add(space: Any, path: tuple[Any, ...]) -> Any:
        if isinstance(space, dict):
            return {name: add(part, (*path, name)) for name, part in space.items()}
        if isinstance(space, tuple):
            return tuple(add(part, (*path, i)) for i, part in enumerate(space))
        if space is None:
            return None
        low, high, is_index = gymnasium_spaces.limits(space)
        dtype = np.dtype(space.dtype)
        leaves.append(Leaf(path, tuple(space.shape), dtype, gymnasium_spaces.stored_dtype(space), low, high, is_index))
        return len(leaves) - 1

    indices = add(tree, ())
    return Layout(tuple(leaves), indices, tuple(action.shape), np.dtype(action.dtype))


class _InfoMask(gymnasium.Wrapper):
    """A wrapper that notes whether `info` has had an action mask, and the time of each step.

    The time is that of the environment alone, since one call of a `Stepper` costs as much as a quick step.
    """

    has_mask = False

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self.times: list[tuple[float, float]] = []  # seconds of a step, and those on a core

    def reset(self, **options: Any) -> Any:
        """Start an episode."""
        return self._noted(self.env.reset(**options))

    def step(self, action: Any) -> Any:
        """Take a step."""
        wall, cpu = time.perf_counter(), time.process_time()
        outcome = self.env.step(action)
        self.times.append((time.perf_counter() - wall, time.process_time() - cpu))
        return self._noted(outcome)

    def _noted(self, outcome: Any) -> Any:
        info = outcome[-1] if isinstance(outcome, tuple) and outcome else None
        self.has_mask |= masks.of(None, info) is not None
        return outcome


def _mask_size(env: Any, env_id: str, layout: Layout, action: Space, quarantine: bool) -> int:
    """Return the number of entries of `info["action_mask"]` after a reset; 0 if there is none."""
    if isinstance(action, Box):
        return 0
    noting = _InfoMask(env)
    Stepper(Recipe(env_id, lambda: noting, layout, quarantine), [0], allocate(layout, 1)).reset()
    return mask_size(action) if noting.has_mask else 0


def _try(
    env: Any, env_id: str, layout: Layout, quarantine: bool, schedules: Mapping[str, Schedule]
) -> tuple[float, float]:
    """Step an environment for a moment with random actions. Return the seconds of a step, and those on a core.

    Both are medians, because an interrupted step on a busy machine takes a thousand times as long.
    Raise ValueError if only steps, and not resets, return an action mask, or if steps change a scheduled attribute.
    """
    arrays, noting = allocate(layout, 1), _InfoMask(env)
    fixed = {name: each.fixed() for name, each in schedules.items()}
    stepper = Stepper(Recipe(env_id, lambda: noting, layout, quarantine, fixed), [0], arrays)
    stepper.reset()
    is_part = [leaf.path == ("action_mask",) for leaf in layout.leaves]
    mask = arrays.obs[is_part.index(True)][0] if any(is_part) else arrays.mask[0]
    env.action_space.seed(0)
    until = time.perf_counter() + TRIAL_S
    while not noting.times or len(noting.times) < TRIAL_STEPS and time.perf_counter() < until:
        arrays.action[0] = masks.sample(env.action_space, mask, layout.action_tree)
        stepper.step()
    if noting.has_mask and not layout.mask_size and not any(is_part):
        raise ValueError(
            f'{env_id}: info["action_mask"] must be returned by reset too, got it from step only; return it from both'
        )
    attributes.check_kept(env_id, env, stepper.options, "steps")
    step_s, compute_s = np.median(noting.times, axis=0).tolist()
    return step_s, compute_s
