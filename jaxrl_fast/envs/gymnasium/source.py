"""Describe gymnasium environments: their construction, their spaces, and the time of a step."""

import functools
import inspect
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import gymnasium
import jax
import numpy as np

from jaxrl_fast.envs import construct, frame_skip, gymnasium_spaces, image, spaces
from jaxrl_fast.envs.direct_bridge import choose_bridge
from jaxrl_fast.envs.gymnasium import copying
from jaxrl_fast.envs.gymnasium.layout import Layout, Leaf, allocate
from jaxrl_fast.envs.gymnasium.making import make_one
from jaxrl_fast.envs.gymnasium.pool import LocalPool, WorkerPool, rows_of
from jaxrl_fast.envs.gymnasium.stepping import Stepper
from jaxrl_fast.envs.host_env import make_env
from jaxrl_fast.envs.host_pool import HostPool, PoolSpec, num_envs_per_pool
from jaxrl_fast.types import Box, Discrete, Env, EnvSpec, HostEnvConfig, MultiDiscrete, PyTree, Space
from jaxrl_fast.utils import importing
from jaxrl_fast.utils.arguments import coerce, refuse_option
from jaxrl_fast.utils.devices import num_cores

RENDER_MODE, TIME_LIMIT = "rgb_array", "max_episode_steps"
TRIAL_STEPS, TRIAL_S = 50, 0.1  # an environment is tried for that many steps, but no longer than this
MIN_SAVED_S = 1e-3  # seconds that workers must save per step of all environments, to be chosen by "auto"
MAX_WAITING = 32  # workers of all pools, for environments that wait, such as for a simulator in another process
WAITING = 0.5  # an environment waits if it computes for less than this share of a step


class Source(NamedTuple):
    """The construction of one environment."""

    env_id: str
    construct: Callable[..., Any]
    arguments: dict[str, Any]
    max_episode_steps: int | None = None  # of a time limit around it
    takes_render_mode: bool = False
    frame_skip: int = 1  # steps for each action
    frame_options: Mapping[str, Any] = {}  # `gray` and `resize`, as the user gave them
    changes: Mapping[str, Any] | None = None  # the arguments of `making.ChangeFrames`
    is_named: bool = True  # False: a function in Python; the environment that it makes may have an id

    def make(self, render: bool = False) -> Any:
        """Return a new environment. Raise a ValueError of one line if it cannot be made."""
        env = construct.call(self.env_id, self.maker(render), {})
        if not isinstance(env, gymnasium.Env):
            raise ValueError(f"{self.env_id}: must make a gymnasium.Env, got {type(env).__name__}")
        for name in ("observation_space", "action_space"):
            if not isinstance(getattr(env, name, None), gymnasium.Space):
                raise ValueError(
                    f"{self.env_id}: {name} must be a space, got {getattr(env, name, None)!r}; set it in __init__"
                )
        return env

    def maker(self, render: bool) -> Callable[[], Any]:
        """Return the function that makes an environment, which can be sent to another process."""
        render = render and self.takes_render_mode
        return functools.partial(
            make_one,
            self.construct,
            self.arguments,
            self.max_episode_steps,
            render,
            self.frame_skip,
            self.changes,
        )

    def with_changes(self) -> "Source":
        """Return the source of environments with changed frames. Raise ValueError if they have none."""
        if not self.frame_options:
            return self
        env = self.make()
        space = env.observation_space
        env.close()
        frames = image.check(self.env_id, self.frame_options, gymnasium_spaces.seen(space))
        first = gymnasium_spaces.is_channel_first_image(space.shape, space.dtype)
        return self._replace(changes=dict(gray=frames.gray, size=frames.resize, channels_first=first))


class Description(NamedTuple):
    """The properties of an environment that were found by making one and stepping it for a moment."""

    source: Source
    layout: Layout
    pool: PoolSpec  # with num_envs 0
    step_s: float  # seconds of a step, the median
    compute_s: float  # seconds of a step that this process computes
    copy_method: Callable[[], tuple[copying.Method, str]]  # tried in the first call; or why no copy is true


def from_id(name: str, options: Mapping[str, Any]) -> Source:
    """Return the source for a registered id. Raise ValueError if the id or an option is unknown."""
    env_id, spec, known_arguments = _registered(name)
    creator = _creator(env_id, spec)
    options, num_skip = frame_skip.take(env_id, options, known_arguments)
    options, frame_options = _take_changes(options, known_arguments)
    known_arguments.pop("render_mode", None)
    known_arguments[TIME_LIMIT] = spec.max_episode_steps or 1
    given = _checked(env_id, options, known_arguments, takes_any=_takes_any(creator))
    maker = functools.partial(gymnasium.make, spec, disable_env_checker=True)
    return Source(
        env_id, maker, given, takes_render_mode=_can_render(creator), frame_skip=num_skip, frame_options=frame_options
    )


def option_names(name: str) -> tuple[str, ...]:
    """Return the names of the arguments of an id."""
    return tuple(_registered(name)[2])


def _registered(name: str) -> tuple[str, Any, dict[str, Any]]:
    """Return the id with its backend, gymnasium's spec of it, and the arguments that it takes."""
    env_id = f"gymnasium/{name}"
    module, _, bare = name.rpartition(":")
    if module:
        importing.module(module, f"environment {name!r}")
    spec = gymnasium.registry.get(bare)
    if spec is None:
        known = [key for key in gymnasium.registry if key.partition("-v")[0] == bare.partition("-v")[0]]
        hint = f"; it registers {known[0]}" if known else ""
        raise ValueError(f"unknown environment {name!r}: module {module!r} does not register {bare!r}{hint}")
    return env_id, spec, {**construct.arguments(_creator(env_id, spec)), **spec.kwargs}


def _creator(env_id: str, spec: Any) -> Callable[..., Any]:
    """Return the class or function that makes a registered environment; importing it may fail."""
    if callable(spec.entry_point):
        return spec.entry_point
    load = functools.partial(gymnasium.envs.registration.load_env_creator, spec.entry_point)
    return construct.call(env_id, load, {})


def from_object(given: Any, options: Mapping[str, Any], env_id: str) -> Source:
    """Return the source for a class, a factory or an environment. Raise ValueError if only one can be made."""
    is_named = bool(env_id) or inspect.isclass(given)
    env_id = env_id or importing.name_of(given)
    if isinstance(given, gymnasium.Env):
        return _from_instance(given, options)
    known = construct.arguments(given)
    known.pop("render_mode", None)
    options, num_skip = frame_skip.take(env_id, options, known)
    options, frame_options = _take_changes(options, known)
    own_limit = TIME_LIMIT in known
    chosen = _checked(env_id, options, {TIME_LIMIT: 1} | known, takes_any=_takes_any(given))
    limit = None if own_limit else chosen.pop(TIME_LIMIT, None)
    return Source(env_id, given, chosen, limit, _can_render(given), num_skip, frame_options, is_named=is_named)


def _from_instance(env: Any, options: Mapping[str, Any]) -> Source:
    """Return the source for an environment that gymnasium has made, and can make again."""
    if env.spec is None:
        problem, got = "one environment cannot be made again for training and evaluation", importing.describe(env)
        raise ValueError(f"env: {problem}, got {got}; pass its class, or a function: fit(env=lambda: ...)")
    options, num_skip = frame_skip.take(env.spec.id, options, ())
    options, frame_options = _take_changes(options, ())
    given = _checked(env.spec.id, options, {TIME_LIMIT: 1})
    maker = functools.partial(gymnasium.make, env.spec, disable_env_checker=True)
    return Source(
        f"gymnasium/{env.spec.id}",
        maker,
        given,
        takes_render_mode=True,
        frame_skip=num_skip,
        frame_options=frame_options,
    )


def _take_changes(options: dict[str, Any], known: Collection[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options without changes of frames, and the changes that the environment does not define itself."""
    changes = {name: x for name, x in options.items() if name in construct.CHANGES and name not in known}
    return {name: x for name, x in options.items() if name not in changes}, changes


def make_envs(source: Source, num_envs: int, config: HostEnvConfig) -> Env:
    """Return N environments; one is made and tried first."""
    return from_description(describe(source, config.quarantine), num_envs, config)


def from_description(described: Description, num_envs: int, config: HostEnvConfig) -> Env:
    """Return N environments that have been described."""
    num = num_envs_per_pool(num_envs, config)
    pool = described.pool._replace(env=described.pool.env._replace(num_envs=num))
    num_workers = choose_num_workers(described, num, config)
    open_pool = functools.partial(_open, described, num_workers, config)
    env = make_env(pool, open_pool, config, choose_bridge(described.source.env_id, config.bridge))
    again = functools.partial(from_description, described)
    steps = f"{num_workers} worker processes step" if num_workers > 1 else "1 worker process steps"
    info = (f"{steps} the environments of each pool",) if num_workers else ()
    return env._replace(resize=again, info=(*env.info, *info))


def _open(described: Description, num_workers: int, config: HostEnvConfig, index: int, seeds: list[int]) -> HostPool:
    del index
    env_id, make = described.source.env_id, described.source.maker(config.render)
    method = lambda: described.copy_method()[0]
    if not num_workers:
        return LocalPool(env_id, make, described.layout, seeds, config.quarantine, method)
    return WorkerPool(env_id, make, described.layout, seeds, num_workers, config.env_timeout, config.quarantine, method)


def choose_num_workers(described: Description, num_envs: int, config: HostEnvConfig) -> int:
    """Return the number of worker processes for a pool of `num_envs`; 0: they are stepped in this process.

    Without workers, the environments of all pools and shards take turns in this process, because Python runs in one
    thread at a time.
    """
    if config.env_workers != "auto":
        return min(int(config.env_workers), num_envs)
    waits = described.compute_s < WAITING * described.step_s
    num_pools = max(config.num_async_pools, 1) * config.num_shards
    most = min(num_envs, max((MAX_WAITING if waits else num_cores()) // num_pools, 1))
    at_once = most * config.num_shards
    saved_s = num_envs * config.num_shards * described.step_s * (1 - 1 / at_once)
    if at_once > 1 and saved_s >= MIN_SAVED_S:
        return most
    return 1 if config.num_async_pools else 0  # asynchronous pools step while this process computes


def describe(source: Source, quarantine: bool = False) -> Description:
    """Make one environment, and step it for a moment. Raise ValueError if its spaces are not supported.

    With `quarantine`, numbers that are not finite are accepted.
    """
    source = source.with_changes()
    env = source.make()
    if env.spec is not None and not source.is_named:
        source = source._replace(env_id=f"gymnasium/{env.spec.id}")
    try:
        env_id, space = source.env_id, env.action_space
        action, start, bounds = gymnasium_spaces.action_space(env_id, space)
        tree = gymnasium_spaces.as_tree(env.observation_space)
        gymnasium_spaces.check_observation(env_id, env.observation_space)
        layout = _layout(tree, space)
        is_part = gymnasium_spaces.is_action_mask(tree, action)
        if not is_part:
            layout = layout._replace(mask_size=_mask_size(env, env_id, layout, action, quarantine))
        has_action_mask = is_part or bool(layout.mask_size)
        frame_skip.check(env_id, has_action_mask, source.frame_skip)
        step_s, compute_s = _try(env, env_id, layout, quarantine)
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
        encode=functools.partial(gymnasium_spaces.encode, visible(tree) if is_part else tree),
        visible=visible,
        action_mask=functools.partial(_allowed, action, mask) if mask and not isinstance(action, Box) else None,
        why_not_saved=lambda: method()[1],
        can_render=can_render,
    )
    source = source._replace(takes_render_mode=source.takes_render_mode and can_render)
    return Description(source, layout, pool, step_s, compute_s, method)


def _parts(is_part: bool, is_in_info: bool) -> tuple[Callable[[PyTree], PyTree], Callable[[PyTree], PyTree] | None]:
    """Return the functions that extract the observation and the action mask from raw observations."""
    if is_part:
        return _without_mask, lambda raw: raw["action_mask"]
    if is_in_info:
        return lambda raw: raw["obs"], lambda raw: raw["action_mask"]
    return lambda raw: raw, None


def _without_mask(raw: dict[str, Any]) -> PyTree:
    """Return the parts of a dictionary except the mask; a single part without its name."""
    rest = {name: part for name, part in raw.items() if name != "action_mask"}
    return rest if len(rest) > 1 else next(iter(rest.values()))


def _allowed(action: Discrete | MultiDiscrete, mask: Callable[[PyTree], PyTree], raw: PyTree) -> jax.Array:
    return spaces.allowed(action, mask(raw))


def _layout(tree: PyTree, action: Any) -> Layout:
    """Return the arrays of a row for a tree of spaces and an action space."""
    leaves: list[Leaf] = []

    def add(space: Any, path: tuple[Any, ...]) -> Any:
        if isinstance(space, dict):
            return {name: add(part, (*path, name)) for name, part in space.items()}
        if isinstance(space, tuple):
            return tuple(add(part, (*path, i)) for i, part in enumerate(space))
        low, high, is_index = gymnasium_spaces.limits(space)
        dtype = np.dtype(space.dtype)
        leaves.append(Leaf(path, tuple(space.shape), dtype, np.dtype(spaces.narrow_dtype(dtype)), low, high, is_index))
        return len(leaves) - 1

    indices = add(tree, ())
    return Layout(tuple(leaves), indices, tuple(action.shape), np.dtype(action.dtype))


def _mask_size(env: Any, env_id: str, layout: Layout, action: Space, quarantine: bool) -> int:
    """Return the number of entries of `info["action_mask"]` after a reset; 0 if there is none."""
    if isinstance(action, Box):
        return 0
    info: list[Any] = []

    class Noting(gymnasium.Wrapper):
        """A wrapper that keeps the `info` of a reset."""

        def reset(self, **options: Any) -> Any:
            outcome = self.env.reset(**options)
            info.append(outcome[1] if isinstance(outcome, tuple) and len(outcome) == 2 else {})
            return outcome

    Stepper(env_id, lambda: Noting(env), [0], layout, allocate(layout, 1), quarantine=quarantine).reset()
    has_mask = isinstance(info[0], dict) and info[0].get("action_mask") is not None
    return action.num_outputs if has_mask else 0


def _try(env: Any, env_id: str, layout: Layout, quarantine: bool) -> tuple[float, float]:
    """Step an environment for a moment with random actions. Return the seconds of a step, and those on a core.

    Both are medians, because an interrupted step on a busy machine takes a thousand times as long.
    """
    arrays = allocate(layout, 1)
    stepper = Stepper(env_id, lambda: env, [0], layout, arrays, quarantine=quarantine)
    stepper.reset()
    env.action_space.seed(0)
    times: list[tuple[float, float]] = []
    until = time.perf_counter() + TRIAL_S
    while not times or len(times) < TRIAL_STEPS and time.perf_counter() < until:
        arrays.action[0] = _sample(env.action_space, arrays.mask[0])
        is_reset = stepper.ended[0]
        wall, cpu = time.perf_counter(), time.process_time()
        stepper.step()
        if not is_reset:
            times.append((time.perf_counter() - wall, time.process_time() - cpu))
    step_s, compute_s = np.median(times, axis=0).tolist()
    return step_s, compute_s


def _sample(space: Any, mask: np.ndarray) -> Any:
    """Return a random action that the mask allows; an empty mask allows all."""
    is_masked = isinstance(space, gymnasium.spaces.Discrete) and mask.size
    return space.sample(mask.astype(np.int8)) if is_masked else space.sample()


def _checked(
    env_id: str, options: Mapping[str, Any], known: Mapping[str, Any], takes_any: bool = False
) -> dict[str, Any]:
    """Return options with the types of the defaults. Raise ValueError for one that is unknown or of another type."""
    values = {}
    for name, value in options.items():
        if name == "render_mode":
            raise ValueError(f"render_mode: cannot be set here, got {value}; use python -m jaxrl_fast.video to draw")
        if name not in known and not takes_any:
            refuse_option(env_id, name, tuple(known), construct.OFFERED)
        values[name] = coerce(env_id, name, value, known.get(name, inspect.Parameter.empty))
    if values.get(TIME_LIMIT, 1) < 1:
        raise ValueError(f"{TIME_LIMIT}: must be at least 1 for {env_id}, got {options[TIME_LIMIT]}")
    return values


def _takes_any(source: Any) -> bool:
    """Return whether a class or a factory takes arguments that its signature does not name."""
    return any(p.kind is p.VAR_KEYWORD for p in inspect.signature(source).parameters.values())


def _can_render(source: Any) -> bool:
    """Return whether a class or a factory takes a render mode."""
    return "render_mode" in inspect.signature(source).parameters or inspect.isclass(source) and _takes_any(source)
