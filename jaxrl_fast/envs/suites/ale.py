"""Provide Atari by the vector environment of ale-py (Arcade Learning Environment), which runs in threads on the host.

A pool steps all its environments in C++, and a compiled program calls it through ale-py's XLA calls. Single frames come
from it; `image` stacks them here, because the replay needs stacks that begin as copies of one frame. ale-py is licensed
under the GPL.
"""

import functools
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import ale_py
import jax
import jax.numpy as jnp
import numpy as np
from ale_py import roms
from ale_py.vector_env import AtariVectorEnv

from jaxrl_fast.envs.gymnasium.spaces import encode
from jaxrl_fast.envs.host.config import HostEnvConfig
from jaxrl_fast.envs.host.env import Bridge, callback_bridge, make_env
from jaxrl_fast.envs.host.pool import LazyPool, PoolSpec, Row, num_envs_per_pool
from jaxrl_fast.envs.wrappers import image
from jaxrl_fast.types import Discrete, Env, EnvSpec, PyTree
from jaxrl_fast.utils import devices, importing, target
from jaxrl_fast.utils.arguments import coerce, refuse_option

PROTOCOLS: dict[str, dict[str, Any]] = {  # the published rules, as ale-py's options; the papers are in envpool.tasks
    "dqn2015": dict(life_loss_info=True, repeat_action_probability=0.0, use_fire_reset=True, noop_max=30),
    "machado2018": dict(life_loss_info=False, repeat_action_probability=0.25, use_fire_reset=False, noop_max=1),
}
OPTIONS: dict[str, tuple[Any, int, int]] = {  # default, and the least and the greatest number
    "frame_stack": (4, 1, image.MAX_STACK),
    "frameskip": (4, 1, 1000),
    "img_height": (84, 36, 1024),  # a network would take smaller frames for boards
    "img_width": (84, 36, 1024),
    "noop_max": (30, 0, 10_000),
    "max_num_frames_per_episode": (108_000, 1, 2**31 - 1),
    "num_threads": (0, 0, 1024),  # 0: one for each core
    "use_fire_reset": (True, 0, 1),
    "maxpool": (True, 0, 1),
    "full_action_space": (False, 0, 1),
}
OF_RUN = {  # options of ale-py that another option sets
    **dict.fromkeys(("life_loss_info", "episodic_life", "repeat_action_probability"), "protocol"),
    "num_envs": "num_envs",
    "reward_clipping": "rewards",
    "stack_num": "frame_stack",
}


def registered() -> tuple[str, ...]:
    """Return the games: "MsPacman" for the ROM "ms_pacman"."""
    return tuple(_roms())


def option_names(name: str) -> tuple[str, ...]:
    """Return the names of the options of all games."""
    return tuple(OPTIONS)


def make(name: str, num_envs: int, options: Mapping[str, Any], host_config: HostEnvConfig) -> Env:
    """Return N environments of one game. Raise ValueError if an option is not supported."""
    env_id, protocol = f"ale/{name}", host_config.protocol or "dqn2015"
    given = _checked(env_id, options)
    stack = given.pop("frame_stack", OPTIONS["frame_stack"][0])
    config = PROTOCOLS[protocol] | given
    num = num_envs_per_pool(num_envs, host_config)
    config["num_threads"] = max((given.get("num_threads") or min(devices.num_cores(), num)) // host_config.shard.num, 1)
    make_vector = functools.partial(AtariVectorEnv, _roms()[name], stack_num=1, reward_clipping=False, **config)
    one = make_vector(1)
    pool = PoolSpec(
        env=EnvSpec(env_id, None, Discrete(int(one.single_action_space.n)), num),  # type: ignore[arg-type]
        raw_obs=jax.ShapeDtypeStruct(one.single_observation_space.shape, np.dtype(np.uint8)),
        action_dtype=np.dtype(np.int32),
        encode=functools.partial(encode, one.single_observation_space),
        reports_game_over=True,
        ends_at_life_loss=config["life_loss_info"],
        noop_after_last=True,
        protocol=protocol,  # type: ignore[arg-type]
    )
    open_pool = lambda index, seeds: AlePool(make_vector, seeds)
    env = make_env(pool, open_pool, host_config, _choose_bridge(env_id, host_config.bridge))
    return image.transform(env, {"frame_stack": stack}) if stack > 1 else env


class AlePool:
    """n environments of one game, as `host_pool.HostPool`."""

    def __init__(self, make_vector: Any, seeds: Sequence[int]) -> None:
        jax.devices()  # before ale-py registers calls
        self.envs = make_vector(len(seeds))
        self.envs.is_xla_registered = _register()
        self.seeds: np.ndarray | None = np.array(seeds, np.int32)  # of the next reset; None: no new ones
        self.is_pending = False

    @functools.cached_property
    def handle(self) -> np.ndarray:
        """Return the address of the environments in C++, uint8 [8]."""
        return np.frombuffer(self.envs.ale.handle(), np.uint8)

    @functools.cached_property
    def call(self) -> Any:
        """Return ale-py's step for compiled programs: (address, action) -> (address, row)."""
        return self.envs.xla()[2]

    def reset(self) -> PyTree:
        """Return first observations of new games."""
        self._discard()
        seeds, self.seeds = self.seeds, None
        return self.envs.reset(seed=seeds)[0]

    def send(self, action: np.ndarray) -> None:
        """Start a step."""
        self.envs.send(action)
        self.is_pending = True

    def recv(self) -> Row:
        """Return the row of the pending step."""
        self.is_pending = False
        return _row(*self.envs.recv())

    def reseed(self, seeds: Sequence[int]) -> None:
        """Give each environment a new seed."""
        self._discard()
        self.seeds = np.array(seeds, np.int32)

    def render(self) -> np.ndarray:
        """Raise NotImplementedError: videos show observations."""
        raise NotImplementedError

    def close(self) -> None:
        """Release the environments."""
        self._discard()
        self.envs = None
        self.__dict__.pop("call", None)

    def _discard(self) -> None:
        if self.is_pending:
            self.recv()


def _row(obs: Any, reward: Any, terminated: Any, truncated: Any, info: Mapping[str, Any]) -> Row:
    """Return a row. A game is over at the end of an episode without lives left; games without lives have none."""
    return Row(obs, reward, terminated, truncated, terminated & (info["lives"] == 0))


@functools.cache
def _register() -> bool:
    """Register ale-py's XLA calls once in a process, and return True."""
    for name, call in (("reset", ale_py._ale_py.VectorXLAReset), ("step", ale_py._ale_py.VectorXLAStep)):
        jax.ffi.register_ffi_target(f"atari_vector_xla_{name}", call(), platform="cpu")
    return True


def _choose_bridge(env_id: str, name: str) -> Any:
    """Return the function that makes the bridge called "auto", "ffi" or "callback"."""
    works = target.platform() == "cpu" and sys.platform != "win32" and importing.module_exists("chex")
    if name == "ffi" and not works:
        raise ValueError(f"host.bridge: ale-py's XLA calls of {env_id} need a CPU and chex, got ffi; use callback")
    return _ffi_bridge if works and name != "callback" else callback_bridge


def _ffi_bridge(pool: LazyPool) -> Bridge:
    """Step the pool through ale-py's XLA calls; halves of a step, which it does not have, through Python."""
    return callback_bridge(pool)._replace(step=functools.partial(_ffi_step, pool))


def _ffi_step(pool: LazyPool, handle: jax.Array, action: jax.Array) -> tuple[jax.Array, Row]:
    """Call with the address that ale-py takes, which depends on `handle`, so that steps keep their order."""
    opened = pool.pool
    address, row = opened.call(handle + opened.handle, action)
    obs, reward, *rest = _row(*row)
    return address - opened.handle, Row(obs, reward.astype(jnp.float32), *rest)


@functools.cache
def _roms() -> dict[str, str]:
    """Return ale-py's name of each game: {"MsPacman": "ms_pacman"}. Others in its list would end the process."""
    is_supported = ale_py.ALEInterface.isSupportedROM
    known = [rom for rom in sorted(roms.get_all_rom_ids()) if is_supported(roms.get_rom_path(rom))]
    return {"".join(part.capitalize() for part in rom.split("_")): rom for rom in known}


def _checked(env_id: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options with the types of the defaults. Raise ValueError for one that is unknown or out of range."""
    values = {}
    for name, given in options.items():
        if name in OF_RUN:
            raise ValueError(f"{name}: not an option of {env_id}, got {given}; use {OF_RUN[name]}")
        if name not in OPTIONS:
            refuse_option(env_id, name, tuple(OPTIONS))
        default, low, high = OPTIONS[name]
        value = values[name] = coerce(env_id, name, given, default)
        if not low <= value <= high:
            raise ValueError(f"{name}: must be {low} to {high} for {env_id}, got {given}")
    return values
