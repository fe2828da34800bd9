"""Environments by name: `make("gymnax/CartPole-v1", num_envs=64) -> Env`.

One file a backend, and none is imported before an environment of it is asked for. A backend is a module
with `make(name, num_envs, options) -> Env` and `registered() -> names`. Whatever the user can get wrong
is a `ValueError` of one sentence, raised before anything is compiled.
"""

import importlib
import importlib.util
import re
from types import ModuleType
from typing import TYPE_CHECKING, Any

from jaxrl_fast.utils import importing
from jaxrl_fast.utils.parsing import nearest

if TYPE_CHECKING:
    from jaxrl_fast import types


BACKENDS = ("gymnax", "envpool")  # a bare id that several know means the first
EXTRAS = {"envpool": "atari"}  # of ours, with which a backend comes; others are packages of the backend's own name


def make(env_id: Any, num_envs: int, /, conditions: "types.HostEnvConfig | None" = None, **options: Any) -> "types.Env":
    """N environments behind one id, or behind an object with gymnax's interface.

    Ids: "gymnax/CartPole-v1"; "CartPole-v1"; "my_package.my_module:MyEnv", a class or an instance, found from
    the current directory too. An object may also be a factory. Options are parameters of the environment
    (`max_steps_in_episode=200`) or arguments of its constructor. `conditions` are for environments on the host.
    """
    if isinstance(num_envs, bool) or not isinstance(num_envs, int) or num_envs < 1:
        raise ValueError(f"num_envs must be a whole number of at least 1, not {num_envs!r}")
    if isinstance(env_id, tuple) and len(env_id) != 2:
        raise ValueError(f"env: an instance and its parameters make a pair, and {env_id!r} is none")
    if env_id is None or isinstance(env_id, (bool, int, float, bytes, list, dict)):
        raise ValueError(f"env: {env_id!r} is neither an id, such as 'CartPole-v1', nor has it gymnax's interface")
    adapted = not isinstance(env_id, str) or ":" in env_id
    backend, name = ("gymnax", env_id) if adapted else _find(env_id)
    if backend == "envpool":
        return _backend(backend).make(name, num_envs, options, conditions)
    if conditions and conditions.protocol:
        raise ValueError(f"--protocol {conditions.protocol}: {env_id} is no game of Atari, for which protocols are")
    if conditions and conditions.async_pools:
        raise ValueError(
            f"--async-pools {conditions.async_pools}: {env_id} runs on the device, where nothing waits for a pool"
        )
    if not adapted:
        return _backend(backend).make(name, num_envs, options)
    source = (env_id,) if not isinstance(env_id, str) else (_import_object(env_id), env_id)
    return _backend(backend).adapt(source[0], num_envs, options, *source[1:])


def registered(backend: str = "gymnax") -> tuple[str, ...]:
    """All ids of a backend, each with its prefix."""
    return tuple(f"{backend}/{name}" for name in _backend(backend).registered())


def _find(env_id: str) -> tuple[str, str]:
    """The backend and the name within it: ("gymnax", "CartPole-v1")."""
    backend, slash, name = env_id.partition("/")
    if slash and backend not in BACKENDS:
        hint = _of_atari(name) or nearest(backend, BACKENDS) or f"; there are {' and '.join(BACKENDS)}"
        raise ValueError(f"unknown backend {backend!r} in environment {env_id!r}{hint}")
    name = name if slash else env_id
    if slash:
        _backend(backend)  # or a sentence that says what it lacks
    backends = (backend,) if slash else tuple(filter(_is_here, BACKENDS))
    for backend in backends:
        if name in _backend(backend).registered():
            return backend, name
    ids: dict[str, str] = {}  # of each name; a bare one is enough for the first backend's
    for backend in backends:
        prefix = "" if not slash and backend == BACKENDS[0] else f"{backend}/"
        ids |= {known: prefix + known for known in _backend(backend).registered() if known not in ids}
    same_game = [ids[known] for known in ids if known.partition("-")[0].lower() == name.lower()]
    near = f"; did you mean {' or '.join(same_game[:2])}?" if same_game else _of_atari(name)
    near = near or nearest(name, ids, ids.__getitem__)
    hint = near or "; give one such as 'gymnax/CartPole-v1', or 'my_package.my_module:MyEnv' for one of your own"
    absent = "".join(f" ({_absence(backend)})" for backend in BACKENDS if not slash and not _is_here(backend))
    raise ValueError(f"unknown environment {env_id!r}{absent}{hint}")


def _of_atari(name: str) -> str:
    """For a message about a game as gym has called it: "PongNoFrameskip-v4", or "Pong-v5" of "ALE"."""
    game = re.fullmatch(r"(\w+?)(NoFrameskip|Deterministic)?(-ram)?-v\d+", name)
    if game is None:
        return ""
    ours = f"envpool/{game[1]}-v5"
    try:
        known = ours in registered("envpool")
    except ValueError:  # it is not here
        known = bool(game[2])
    return f"; did you mean {ours}?" if known else ""


def _is_here(backend: str) -> bool:
    return importlib.util.find_spec(backend) is not None


def _absence(backend: str) -> str:
    """A sentence about a backend that is not here."""
    package = f'"jaxrl_fast[{EXTRAS[backend]}]"' if backend in EXTRAS else backend
    return f"{backend} is not installed here; pip install {package}"


def _backend(name: str) -> ModuleType:
    if not _is_here(name):
        raise ValueError(_absence(name))
    try:
        return importlib.import_module(f"{__name__}.{name}")
    except ImportError as error:
        raise ValueError(f"{name}'s environments cannot be made, because {name} does not import: {error}") from error


def _import_object(env_id: str) -> Any:
    """What "my_package.my_module:MyEnv" names."""
    module_name, _, attribute = env_id.partition(":")
    module = importing.module(module_name, f"environment {env_id!r}")
    found = module
    for part in attribute.split("."):
        if not hasattr(found, part) and module_name == "__main__":
            instead = "from Python give it as env, or have it in a module"
            raise ValueError(f"environment {env_id!r} was a script's own, which is another one now; {instead}")
        if not hasattr(found, part):
            hint = nearest(attribute, vars(module))
            raise ValueError(f"environment {env_id!r}: {module_name!r} has no {attribute!r}{hint}")
        found = getattr(found, part)
    return found
