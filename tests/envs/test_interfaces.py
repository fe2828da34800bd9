"""Messages for environments of other interfaces, and for ids that are not found: each names a way out."""

import sys
import types

import gymnasium
import numpy as np
import pytest

from jaxrl_fast import envs
from jaxrl_fast.envs import interfaces

pytestmark = pytest.mark.unit
HERE = "tests.envs.test_interfaces"


def base_of(package, name="Base"):
    """Return a class as a package that is not installed would define it."""
    return type(name, (), {"__module__": f"{package}.core"})


class Core:
    """The methods of gymnasium.Env without its base."""

    observation_space, action_space = gymnasium.spaces.Box(0, 1, (1,)), gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {}

    def step(self, action):
        return np.zeros(1, np.float32), 0.0, False, False, {}


class Proper(Core, gymnasium.Env):
    """An environment."""


class Agents(Core, base_of("pettingzoo", "ParallelEnv")):
    pass


class Old(Core, base_of("gym", "Env")):
    pass


class Control(Core, base_of("dm_env", "Environment")):
    pass


class Many(Core, base_of("stable_baselines3", "VecEnv")):
    pass


class Vector(gymnasium.vector.VectorEnv):
    pass


class Compiled(base_of("gym", "Env")):
    """The interface of gymnax, half of it, whatever its base is."""

    def step_env(self, key, state, action, params):
        return None


class Stateless:
    """The public methods of gymnax's environments."""

    def reset(self, key, params=None):
        return None

    def step(self, key, state, action, params=None):
        return None


def make_proper():
    return Proper()


def make_other() -> Core:
    return Core()


SAYS = {
    "Core": "Core, which has only its methods; derive the class from gymnasium.Env",
    "Agents": "Agents of PettingZoo; write one for one of its agents, or in JAX a class with `players`",
    "Old": "Old of old gym; derive it from gymnasium.Env, or wrap it with the package shimmy",
    "Control": "Control of dm_env; wrap it with the package shimmy",
    "Many": "Many, which steps several; use the class of one, num_envs makes several",
    "Vector": "Vector, which steps several; use the class of one, num_envs makes several",
}


@pytest.mark.parametrize("name", SAYS)
@pytest.mark.parametrize("form", ["name", "class", "instance", "function"])
def test_other_interface_is_named_with_remedy(name, form):
    kind = globals()[name]
    given = {"name": f"{HERE}:{name}", "class": kind, "instance": kind(), "function": lambda: kind()}[form]
    with pytest.raises(ValueError) as raised:
        envs.make(given, 2)
    assert str(raised.value) == f"env: must be a gymnasium.Env, got {HERE}:{SAYS[name]}"


@pytest.mark.parametrize("name", ["Compiled", "Stateless"])
def test_interface_of_gymnax_is_told_as_such(name):
    with pytest.raises(ValueError, match=r"lacks .*is_truncated.* of gymnax's interface"):
        envs.make(f"{HERE}:{name}", 2)


@pytest.mark.parametrize(("name", "got"), [("make_proper", "none"), ("make_other", f"{HERE}:Core")])
def test_function_given_by_name_needs_its_annotation(name, got):
    with pytest.raises(ValueError) as raised:
        envs.make(f"{HERE}:{name}", 2)
    says = f"env: {HERE}:{name} must be annotated to return a gymnasium.Env, got {got}; "
    assert str(raised.value) == f"{says}write def {name}(...) -> gymnasium.Env, or in Python fit(env={name})"
    make_annotated.__annotations__["return"] = "gymnasium.Env"
    assert envs.make(f"{HERE}:make_annotated", 2).spec.id == f"{HERE}:make_annotated"


def make_annotated():
    return Proper()


@pytest.fixture
def package(monkeypatch):
    """A module that registers three ids: without a version, in a namespace that is its name, and of old gym."""
    module = types.ModuleType("arcade")
    module.__spec__ = types.SimpleNamespace(origin="arcade.py")
    monkeypatch.setitem(sys.modules, "arcade", module)
    old = types.SimpleNamespace(envs=types.SimpleNamespace(registry={"Dusty-v0": None}))
    monkeypatch.setitem(sys.modules, "gym", old)
    for name in ("Unversioned", "arcade/Push-v1"):
        gymnasium.register(id=name, entry_point=Proper, max_episode_steps=5)
    yield
    del gymnasium.registry["Unversioned"], gymnasium.registry["arcade/Push-v1"]


@pytest.mark.parametrize("name", ["arcade:Unversioned", "gymnasium/arcade:Unversioned", "arcade:arcade/Push-v1"])
def test_id_that_package_registers_is_made(name, package):
    assert envs.make(name, 2).spec.id == f"gymnasium/{name.removeprefix('gymnasium/')}"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("arcade/Pull-v1", "unknown backend 'arcade' in environment '{}'; did you mean arcade:arcade/Pull-v1?"),
        ("attic/Pull-v1", "unknown backend 'attic' in environment '{}'; use PACKAGE:attic/Pull-v1, with the package"),
        ("gymnasium/zebra-v0", "unknown environment '{}'; use PACKAGE:zebra-v0, with the package that registers it"),
        ("qqqqq-v0", "unknown environment '{}'; use PACKAGE:qqqqq-v0, with the package that registers it"),
        ("gymnax/zebra-v0", "unknown environment '{}'; give an id such as"),
        ("arcade:Nothing", "environment '{}': module 'arcade' has no 'Nothing'"),
        ("arcade:Dusty-v0", "does not register 'Dusty-v0'; it is of old gym, use a package for gymnasium"),
        ("arcade:Rusty-v0", "module 'arcade' does not register 'Rusty-v0'"),
    ],
)
def test_id_that_is_not_found_names_a_way_out(name, says, package):
    with pytest.raises(ValueError) as raised:
        envs.make(name, 2)
    assert says.format(name) in str(raised.value) and "\n" not in str(raised.value)


def test_ids_of_older_gym_are_found(monkeypatch):
    """Before 0.26, its registry had a dictionary of ids."""
    assert not interfaces.is_of_old_gym("Dusty-v0")
    registry = types.SimpleNamespace(env_specs={"Dusty-v0": None})
    monkeypatch.setitem(sys.modules, "gym", types.SimpleNamespace(envs=types.SimpleNamespace(registry=registry)))
    assert interfaces.is_of_old_gym("Dusty-v0") and not interfaces.is_of_old_gym("Rusty-v0")
