"""Make environments by name: `make("gymnax/CartPole-v1", num_envs=64) -> Env`.

Each backend is a module with `make(name, num_envs, options, host_config) -> Env` and `registered() -> names`, imported
when one of its environments is requested. A suite is a backend whose ids require its prefix, because importing one
takes seconds. Every user error raises a `ValueError` of one sentence before anything is compiled.
"""

import importlib
import importlib.util
import inspect
import re
from types import ModuleType
from typing import TYPE_CHECKING, Any

from jaxrl_fast.envs import construct, interfaces
from jaxrl_fast.utils import importing
from jaxrl_fast.utils.errors import blame, raised_here, why
from jaxrl_fast.utils.parsing import as_schedule, nearest

if TYPE_CHECKING:
    from jaxrl_fast import types
    from jaxrl_fast.envs.host.config import HostEnvConfig


BACKENDS = ("gymnax", "games", "envpool", "gymnasium")  # in the order in which an id without a backend is looked up
# With a module each in `suites`.
SUITES = ("ale", "brax", "craftax", "jaxmarl", "jumanji", "navix", "pgx", "playground", "xminigrid")
# The package's extra that installs a backend.
EXTRAS = {"envpool": "atari"} | {suite: suite for suite in SUITES} | {"jaxmarl": "marl"}
# The name under which a backend's package is imported, if it differs.
PACKAGES = {"ale": "ale_py", "games": "jaxrl_fast", "playground": "mujoco_playground"}


def make(env_id: Any, num_envs: int, /, host_config: "HostEnvConfig | None" = None, **options: Any) -> "types.Env":
    """Return N environments for an id, or for an object with gymnasium's or gymnax's interface.

    Args:
        env_id: "gymnax/CartPole-v1", "CartPole-v1", "my_package.my_module:MyEnv" (a class or an instance, also found
            in the current directory), "my_package:MyEnv-v0" (an id that this package registers with gymnasium), an
            object, or a factory.
        num_envs: N.
        host_config: seed, pools and bridge of host environments. Device environments use only `quarantine`, hidden
            parts of the observation, and the previous action and reward in it.
        **options: parameters of the environment (`max_steps_in_episode=200`) or arguments of its constructor. If it
            does not define them itself, also `frame_skip`, and `gray`, `resize` and `frame_stack` for images.
    """
    if isinstance(num_envs, bool) or not isinstance(num_envs, int) or num_envs < 1:
        raise ValueError(f"num_envs: must be a whole number of at least 1, got {num_envs!r}")
    if isinstance(env_id, tuple) and len(env_id) != 2:
        raise ValueError(f"env: a tuple must hold an instance and its parameters, got {importing.describe(env_id)}")
    if env_id is None or isinstance(env_id, (bool, int, float, bytes, list, dict)):
        got = importing.describe(env_id)
        raise ValueError(f"env: must be an id, such as 'CartPole-v1', or an environment, got {got}")
    config = host_config or _default_host_config()
    rest, frames = _split(env_id, options)
    changes = {name: x for name, x in frames.items() if name in construct.CHANGES}
    if isinstance(env_id, str) and _is_id(env_id):
        backend, name = _find(env_id)
        rest |= changes if backend == "gymnasium" else {}
        env = _backend(backend).make(name, num_envs, rest, config)
    else:
        backend, env = _adapt(env_id, num_envs, rest, changes, config)
    if backend == "gymnasium":  # frames have been changed on the host
        frames = {name: x for name, x in frames.items() if name not in changes}
    if host_config is not None:
        _check_host_config(backend, env, host_config)
    if config.schedules and env.on_device and any(map(as_schedule, options.values())):
        assert env.view.resize, "adapters provide it"
        followed, warnings = env.view.resize(num_envs, config), env.view.warnings
        env = followed._replace(view=followed.view._replace(warnings=warnings))
    again = lambda num_envs, host_config: make(env_id, num_envs, host_config, **options)
    if config.wrappers.quarantine:
        from jaxrl_fast.envs.wrappers import quarantine  # imports jax

        if env.spec.players:
            raise ValueError(f"wrap: quarantine is not supported with several players, got {env.spec.id}; leave it out")
        env = quarantine.guard(env)
    if frames:
        from jaxrl_fast.envs.wrappers import image

        env = image.transform(env, frames)
    if config.wrappers.hide:
        from jaxrl_fast.envs.wrappers import hide

        env = hide.hide(env, config.wrappers.hide, keep_whole=config.render)
    if config.wrappers.previous:
        from jaxrl_fast.envs.wrappers import previous

        env = previous.observe(env)
    for name in config.wrappers.custom:
        env = _wrapped(env, name)
    return env if env.view.resize else env._replace(view=env.view._replace(resize=again))


def _wrapped(env: "types.Env", name: str) -> "types.Env":
    """Return the environments with a user's wrapper, a function from Env to Env. Its exceptions keep their type.

    Unless the wrapper changes `encode_obs`, a policy takes observations as the wrapper returns them.
    """
    from jaxrl_fast.types import Env, View

    wrapper = importing.attribute(name, f"wrapper {name!r}")
    try:
        found = wrapper(env)
    except Exception as error:
        if not raised_here(error):
            blame(error, f"wrap: {name} failed")
        raise
    if not isinstance(found, Env):
        raise ValueError(f"wrap: {name} must return an Env, got {importing.describe(found)}; return env._replace(...)")
    if found.view.encode_obs is not env.view.encode_obs:
        return found
    return found._replace(view=found.view._replace(raw_obs=None, encode_obs=View().encode_obs, raw_mask=None))


def is_physics(env_id: Any) -> bool:
    """Return whether an id names a physics simulation, whose numbers may become infinite or NaN.

    Backends may define a function `is_physics(name) -> bool`. Custom environments return False.
    """
    if not isinstance(env_id, str) or not _is_registered_name(env_id):
        return False
    backend, name = _find(env_id)
    of_backend: Any = getattr(_backend(backend), "is_physics", lambda name: False)
    return bool(of_backend(name))


def _is_registered_name(env_id: str) -> bool:
    """Return whether this is an id, and not a Python object: "CartPole-v1" or "my_package:MyEnv-v0"."""
    _, colon, name = env_id.rpartition(":")
    return not colon or not all(part.isidentifier() for part in name.split("."))


def _is_id(env_id: str) -> bool:
    """Return whether this is an id, also one without a version that a module registers: "my_package:MyEnv"."""
    if _is_registered_name(env_id):
        return True
    module, _, name = env_id.removeprefix("gymnasium/").rpartition(":")
    found = importing.module(module, f"environment {env_id!r}")
    return not hasattr(found, name.partition(".")[0]) and name in _backend("gymnasium").registered()


def _split(env_id: Any, options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the environment's options, and the image options that it does not define itself."""
    frames = {name for name in construct.FRAME_OPTIONS if name in options}
    if not frames:
        return options, {}
    if isinstance(env_id, str) and _is_id(env_id):
        backend, name = _find(env_id)
        own: Any = getattr(_backend(backend), "option_names", lambda name: ())(name)
    else:
        source = importing.attribute(env_id, f"environment {env_id!r}") if isinstance(env_id, str) else env_id
        own = construct.arguments(source)
    frames -= {*own}
    return {k: x for k, x in options.items() if k not in frames}, {k: x for k, x in options.items() if k in frames}


def _adapt(
    given: Any, num_envs: int, options: dict[str, Any], changes: dict[str, Any], config: "HostEnvConfig"
) -> tuple[str, "types.Env"]:
    """Return the backend, chosen by the object's interface, and N environments for an object or its name.

    Environments of gymnasium also take `changes` of their frames.
    """
    env_id = given if isinstance(given, str) else ""
    source = importing.attribute(env_id, f"environment {env_id!r}") if env_id else given
    gymnasium, gymnax = _backend("gymnasium"), _backend("gymnax")
    if gymnasium.recognizes(source):
        return "gymnasium", gymnasium.adapt(source, num_envs, options | changes, config, env_id)
    interfaces.check(env_id, source)
    if env_id:
        interfaces.check_function(env_id, source)
    if env_id or inspect.isclass(source) or not construct.is_factory(source):
        return "gymnax", gymnax.adapt(source, num_envs, options, env_id)
    made = gymnax.made(source, options)  # only a call shows what a function makes
    if gymnasium.recognizes(made):
        made.close()
        return "gymnasium", gymnasium.adapt(source, num_envs, options | changes, config, env_id)
    interfaces.check("", made)
    return "gymnax", gymnax.adapt(source, num_envs, options, env_id, lambda **_: made)


def _default_host_config() -> "HostEnvConfig":
    from jaxrl_fast.envs.host.config import HostEnvConfig  # imports jax

    return HostEnvConfig()


def _check_host_config(backend: str, env: "types.Env", config: "HostEnvConfig") -> None:
    """Raise ValueError for options that this environment does not support."""
    if config.protocol and not env.protocol:
        raise ValueError(f"protocol: {env.spec.id} is not an Atari game, got {config.protocol}")
    if config.ahead and backend != "gymnasium":
        raise ValueError(f"host.ahead: {env.spec.id} has no worker processes, got {config.ahead}; leave it out")
    if config.num_async_pools and env.on_device:
        raise ValueError(
            f"host.async_pools: {env.spec.id} runs on the device and has no pools, got {config.num_async_pools}; use 0"
        )
    if config.episodes and backend != "gymnasium":
        raise ValueError(f"episodes_file: {env.spec.id} takes no seeds or options of reset, got a file; leave it out")
    if config.workers.num not in ("auto", 0) and backend != "gymnasium":
        remedy = "leave it out" if env.on_device else "use env_options num_threads"
        raise ValueError(f"host.workers: {env.spec.id} has no worker processes, got {config.workers}; {remedy}")


def registered(backend: str = "gymnax") -> tuple[str, ...]:
    """Return all ids of a backend, with its prefix."""
    return tuple(f"{backend}/{name}" for name in _backend(backend).registered())


def _find(env_id: str) -> tuple[str, str]:
    """Return the backend and the name within it: ("gymnax", "CartPole-v1")."""
    if ":" in env_id:
        return "gymnasium", env_id.removeprefix("gymnasium/")
    backend, slash, name = env_id.partition("/")
    if slash and backend not in (*BACKENDS, *SUITES):
        for other in filter(is_installed, BACKENDS):  # a name may have a slash: envpool's MetaWorld/Reach-v3
            if env_id in _backend(other).registered():
                return other, env_id
        hint = (
            _minatar_hint(backend, name)
            or _atari_hint(name)
            or nearest(backend, (*BACKENDS, *SUITES))
            or _package_hint(env_id)
            or f"; choose {' or '.join((*BACKENDS, *SUITES))}"
        )
        raise ValueError(f"unknown backend {backend!r} in environment {env_id!r}{hint}")
    name = name if slash else env_id
    if slash:
        _backend(backend)  # raises ValueError if the backend is not installed
    backends = (backend,) if slash else tuple(filter(is_installed, BACKENDS))
    for backend in backends:
        if name in _backend(backend).registered():
            return backend, name
    ids: dict[str, str] = {}  # by name; without a prefix for the first backend
    for backend in backends:
        prefix = "" if not slash and backend == BACKENDS[0] else f"{backend}/"
        ids |= {known: prefix + known for known in _backend(backend).registered() if known not in ids}
    other_versions = [ids[known] for known in ids if known.partition("-")[0].lower() == name.lower()]
    near = f"; did you mean {' or '.join(other_versions[:2])}?" if other_versions else _atari_hint(name)
    near = near or nearest(name, ids, ids.__getitem__)
    example = "; give an id such as 'gymnax/CartPole-v1', or 'my_package.my_module:MyEnv' for your own environment"
    hint = near or "gymnasium" in backends and _package_hint(name) or example
    if slash and not near and backend in SUITES:
        hint = f"; `python -m jaxrl_fast.envs {backend}/` lists those of {backend}"
    missing = "".join(
        f" ({_not_installed(backend)})" for backend in BACKENDS if not slash and not is_installed(backend)
    )
    raise ValueError(f"unknown environment {env_id!r}{missing}{hint}")


def _atari_hint(name: str) -> str:
    """Return a hint for gym's names of Atari games, "PongNoFrameskip-v4" or "Pong-v5" of "ALE", or ""."""
    game = re.fullmatch(r"(\w+?)(NoFrameskip|Deterministic)?(-ram)?-v\d+", name)
    if game is None:
        return ""
    env_id = f"envpool/{game[1]}-v5"
    try:
        known = env_id in registered("envpool")
    except ValueError:  # envpool is not installed
        known = bool(game[2])
    return f"; did you mean {env_id}?" if known else ""


def _package_hint(name: str) -> str:
    """Return a hint for an id of gymnasium that a package registers when it is imported, or ""."""
    if not re.search(r"-v\d+$", name):
        return ""
    package, slash, _ = name.partition("/")
    if slash and importing.module_exists(package):
        return f"; did you mean {package}:{name}?"
    return f"; use PACKAGE:{name}, with the package that registers it"


def _minatar_hint(backend: str, name: str) -> str:
    """Return a hint for gymnasium's names of MinAtar's games, "MinAtar/Breakout-v1", or ""."""
    game = re.fullmatch(r"(\w+?)(-v\d+)?", name)
    env_id = f"gymnax/{game[1] if game else ''}-MinAtar"
    is_game = backend.lower() == "minatar" and env_id in registered("gymnax")
    return f"; did you mean {env_id}?" if is_game else ""


def is_installed(backend: str) -> bool:
    """Return whether a backend's package is installed, without importing it."""
    return importlib.util.find_spec(PACKAGES.get(backend, backend)) is not None


def _not_installed(backend: str) -> str:
    """Return a sentence about a missing backend."""
    command = importing.install(EXTRAS[backend]) if backend in EXTRAS else f"pip install {backend}"
    return f"{backend} is not installed; {command}"


def module_name(backend: str) -> str:
    """Return the name of a backend's module."""
    return f"{__name__}.suites.{backend}" if backend in SUITES else f"{__name__}.{backend}"


def _backend(name: str) -> ModuleType:
    """Import a backend's module. Raise ValueError if its package is missing or broken."""
    if not is_installed(name):
        raise ValueError(_not_installed(name))
    try:
        return importlib.import_module(module_name(name))
    except Exception as error:  # a package may raise anything, for example with another version of a dependency
        raise ValueError(f"{name} environments cannot be made because {name} does not import ({why(error)})") from error
