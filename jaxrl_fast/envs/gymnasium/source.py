"""Say how to make one gymnasium environment: from a registered id, a class, a function or an instance."""

import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import gymnasium
import jax

from jaxrl_fast.envs import construct, interfaces
from jaxrl_fast.envs.gymnasium import instance, resetting, spaces
from jaxrl_fast.envs.gymnasium.making import make_one
from jaxrl_fast.envs.wrappers import frame_skip, image
from jaxrl_fast.utils import importing
from jaxrl_fast.utils.arguments import coerce, refuse_option
from jaxrl_fast.utils.parsing import as_schedule

RENDER_MODE, TIME_LIMIT = "rgb_array", "max_episode_steps"


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
    whole_image: tuple[int, Any] | None = None  # its index among the parts of an observation, and its space before
    schedules: Mapping[str, str] = {}  # of attributes, as the user gave them
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

    def with_changes(self, hidden: Collection[str]) -> "Source":
        """Return the source of environments with changed frames. Raise ValueError if they have none."""
        if not self.frame_options:
            return self
        env = self.make()
        tree = spaces.observation_tree(self.env_id, env.observation_space, hidden)
        env.close()
        frames, index = image.check(self.env_id, self.frame_options, spaces.seen(tree))
        keys, space = jax.tree.leaves_with_path(tree)[index]
        path = tuple(getattr(key, "key", getattr(key, "idx", None)) for key in keys)
        first = spaces.is_channel_first_image(space.shape, space.dtype)
        changes = dict(gray=frames.gray, size=frames.resize, channels_first=first, path=path)
        return self._replace(changes=changes, whole_image=(index, space))


def from_id(name: str, options: Mapping[str, Any]) -> Source:
    """Return the source for a registered id. Raise ValueError if the id or an option is unknown."""
    env_id, spec, known_arguments = _registered(name)
    creator = _creator(env_id, spec)
    options, schedules = _take_schedules(options, known_arguments)
    options, of_reset = _take_reset(env_id, options)
    options, num_skip = frame_skip.take(env_id, options, known_arguments)
    options, frame_options = _take_changes(options, known_arguments)
    known_arguments.pop("render_mode", None)
    known_arguments[TIME_LIMIT] = spec.max_episode_steps or 1
    given = _checked(env_id, options, known_arguments, takes_any=_takes_any(creator))
    make = functools.partial(gymnasium.make, spec, disable_env_checker=True)
    maker = resetting.with_options(env_id, make, of_reset)
    can_render = _can_render(creator)
    return Source(
        env_id,
        maker,
        given,
        takes_render_mode=can_render,
        frame_skip=num_skip,
        frame_options=frame_options,
        schedules=schedules,
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
        hint = "; it is of old gym, use a package for gymnasium" if interfaces.is_of_old_gym(bare) else hint
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
    options, schedules = _take_schedules(options, known)
    options, of_reset = _take_reset(env_id, options)
    options, num_skip = frame_skip.take(env_id, options, known)
    options, frame_options = _take_changes(options, known)
    own_limit = TIME_LIMIT in known
    chosen = _checked(env_id, options, {TIME_LIMIT: 1} | known, takes_any=_takes_any(given))
    limit = None if own_limit else chosen.pop(TIME_LIMIT, None)
    maker = resetting.with_options(env_id, given, of_reset)
    can_render = _can_render(given)
    return Source(
        env_id, maker, chosen, limit, can_render, num_skip, frame_options, schedules=schedules, is_named=is_named
    )


def _from_instance(env: Any, options: Mapping[str, Any]) -> Source:
    """Return the source for an environment that gymnasium has made, and can make again."""
    if env.spec is None:
        problem, got = "one environment cannot be made again for training and evaluation", importing.describe(env)
        raise ValueError(f"env: {problem}, got {got}; pass its class, or a function: fit(env=lambda: ...)")
    maker = functools.partial(gymnasium.make, env.spec, disable_env_checker=True)
    instance.check_same(env, lambda: construct.call(env.spec.id, maker, {}))
    options, schedules = _take_schedules(options, {})
    options, of_reset = _take_reset(env.spec.id, options)
    options, num_skip = frame_skip.take(env.spec.id, options, ())
    options, frame_options = _take_changes(options, ())
    given = _checked(env.spec.id, options, {TIME_LIMIT: 1})
    return Source(
        f"gymnasium/{env.spec.id}",
        resetting.with_options(env.spec.id, maker, of_reset),
        given,
        takes_render_mode=True,
        frame_skip=num_skip,
        frame_options=frame_options,
        schedules=schedules,
    )


def _take_schedules(options: Mapping[str, Any], known: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the options without schedules of attributes, and these. Arguments that are text have none."""
    is_scheduled = lambda name: (
        as_schedule(options[name])
        and not isinstance(known.get(name), str)
        and name not in construct.OFFERED
        and not name.startswith(resetting.PREFIX)
    )
    found = {name: options[name] for name in options if is_scheduled(name)}
    return {name: x for name, x in options.items() if name not in found}, found


def _take_reset(env_id: str, options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options without those of `reset`, and these, whose text decides their types."""
    options, of_reset = resetting.take(options)
    return options, {name: coerce(env_id, name, x, inspect.Parameter.empty) for name, x in of_reset.items()}


def _take_changes(options: dict[str, Any], known: Collection[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options without changes of frames, and the changes that the environment does not define itself."""
    changes = {name: x for name, x in options.items() if name in construct.CHANGES and name not in known}
    return {name: x for name, x in options.items() if name not in changes}, changes


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
