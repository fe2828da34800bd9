"""Messages name an environment given as an object by "module:Class", never by "<class ...>" or an address."""

import re
from types import SimpleNamespace

import jax.numpy as jnp
import pytest
import yaml
from gymnax.environments import spaces

import jaxrl_fast
from jaxrl_fast import envs
from jaxrl_fast.config import paths
from jaxrl_fast.options.run import written_env
from jaxrl_fast.sweep import prepare
from jaxrl_fast.utils import importing

HERE = __name__
LAMBDA = rf"{HERE}:<lambda>\.<locals>\.<lambda>"


class Counter:
    """Episodes have eight steps with reward 1."""

    default_params = ()

    def __init__(self, reward: float = 1.0):
        self.reward = reward

    def reset_env(self, key, params):
        return jnp.zeros(1), jnp.int32(0)

    def step_env(self, key, state, action, params):
        return jnp.zeros(1), state + 1, self.reward, False, {}

    def is_truncated(self, state, params):
        return state >= 8

    def action_space(self, params):
        return spaces.Discrete(2)


class Half:
    """An environment without steps."""

    default_params = ()

    def reset_env(self, key, params):
        return jnp.zeros(1), jnp.int32(0)


class Continuous(Counter):
    def action_space(self, params):
        return spaces.Box(-1.0, 1.0, (2,))


class Odd(Counter):
    def action_space(self, params):
        return spaces.Dict({})


class Broken(Counter):
    def step_env(self, key, state, action, params):
        raise RuntimeError("no step")


class Growing(Counter):
    def step_env(self, key, state, action, params):
        return jnp.zeros(2), state + 1, 1.0, False, {}


class Infinite(Counter):
    def step_env(self, key, state, action, params):
        return jnp.zeros(1), state + 1, jnp.float32(jnp.inf), False, {}


class Costly(Counter):
    def __init__(self, price):
        self.price = price


class Failing(Counter):
    def __init__(self):
        raise RuntimeError("no data")


GIVEN = {  # how an environment is given, and its name in messages
    "class": (lambda kind: kind, lambda kind: rf"{HERE}:{kind.__name__}"),
    "instance": (lambda kind: kind(), lambda kind: rf"{HERE}:{kind.__name__}"),
    "lambda": (lambda kind: lambda: kind(), lambda kind: LAMBDA),
    "pair": (lambda kind: (kind(), ()), lambda kind: rf"{HERE}:{kind.__name__}"),
}
SMALL = {"num_envs": 2, "total_steps": 64, "eval_episodes": 2, "loggers": ()}
SMALL |= {"hidden_sizes": [4]}
ON_POLICY = {"rollout_length": 8, "num_minibatches": 1, "num_epochs": 1}


def fit(env, algo="ppo", **options):
    return jaxrl_fast.fit(algo=algo, env=env, **SMALL | (ON_POLICY if algo == "ppo" else {}) | options)


def message(call, *args, **kwargs):
    with pytest.raises(ValueError) as caught:
        call(*args, **kwargs)
    return check(str(caught.value))


def check(text):
    assert not re.search(r"<class|<function| object>| at 0x|\n", text), text
    return text


CASES = [  # the environment's class, what is done with it, and the message
    (Counter, lambda env: fit(env, env_options={"nope": 1}), "{} has no option 'nope'"),
    (Counter, lambda env: fit(env, protocol="dqn2015"), "protocol: {} is not an Atari game, got dqn2015"),
    (Counter, lambda env: fit(env, async_pools=1), "host.async_pools: {} runs on the device and has no pools, got 1"),
    (Half, fit, "{} lacks step_env, is_truncated, action_space of gymnax's interface"),
    (Odd, fit, "{}: unsupported action space, got"),
    (Broken, fit, r"{}: tracing it failed with RuntimeError: no step \(test_names.py:\d+, in step_env\)"),
    (Growing, fit, "{}: the shape of its observation must not change"),
    (
        Continuous,
        lambda env: fit(env, "dqn", total_steps=20_000),
        r"dqn: requires discrete actions, got Box\(shape=\(2,\)\) of {}; try ppo",
    ),
    (
        Counter,
        lambda env: jaxrl_fast.sweep(algo="ppo", env=env, num_envs=[1, 2], workers=2),
        "env: workers and launcher require a name, got {}; give package.module:Class",
    ),
    (Counter, lambda env: jaxrl_fast.fit(algo="ppo", num_envs=[env]), "num_envs: must be a whole number .*got .*{}"),
    (Counter, lambda env: fit([env]), r"env: must be an id, such as 'CartPole-v1', .* got \[.*{}.*\]"),
    (Counter, lambda env: fit({"a": env}), r"env: must be an id, .* got {{'a': .*{}.*}}"),
    (Counter, lambda env: fit((env,)), r"env: a tuple must hold an instance and its parameters, got \(.*{}.*,\)"),
]


@pytest.mark.parametrize(
    ("given", "case"),
    [*((given, 0) for given in GIVEN), *((["class", "instance", "lambda"][i % 3], i) for i in range(1, len(CASES)))],
)
def test_error_message_names_environment_given_as_object(given, case, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (give, name), (kind, act, words) = GIVEN[given], CASES[case]
    assert re.match(words.format(name(kind)), message(act, give(kind)))


@pytest.mark.parametrize("given", GIVEN)
def test_error_message_names_environment_passed_as_config(given):
    """The first argument of `fit` is `config`, so `fit(Counter)` is an error."""
    give, name = GIVEN[given]
    assert re.search(rf"^config: .* got .*{name(Counter)}", message(jaxrl_fast.fit, give(Counter)))


def test_error_message_names_class_that_cannot_be_constructed():
    assert message(fit, Costly).startswith(f"{HERE}:Costly cannot be made: TypeError")
    assert re.fullmatch(
        rf"{HERE}:Failing cannot be made: RuntimeError: no data \(test_names.py:\d+, in __init__\)",
        message(fit, Failing),
    )
    assert message(envs.make, dict, 1) == (
        "env: must be an environment or a function that makes one, got builtins:dict"
    )


@pytest.mark.parametrize("error", [ImportError("no a\nin b"), AttributeError("no a\nin b")])
def test_error_message_has_one_line_when_package_of_suite_fails_to_import(error, monkeypatch):
    def fail(name):
        raise error

    monkeypatch.setattr(envs, "is_installed", lambda name: True)
    monkeypatch.setattr(envs.importlib, "import_module", fail)
    expected = f"brax environments cannot be made because brax does not import ({type(error).__name__}: no a)"
    assert message(envs.make, "brax/ant", 1) == expected


@pytest.mark.parametrize("given", ["class", "instance", "pair"])
def test_sweep_resume_error_names_environment_object(given):
    """sweep.yaml stores only the repr of the environment."""
    give, name = GIVEN[given]
    options = SimpleNamespace(env=written_env(give(Counter)))
    groups = {"0": SimpleNamespace(settings=SimpleNamespace(options=options))}
    plan = SimpleNamespace(folder="x", shown=str, groups=groups)
    words = rf"resume x: its environment was given as an object \(.*{name(Counter)}.*\); resume with"
    assert re.match(words, message(prepare._check_env_names, plan))


@pytest.mark.slow
def test_run_names_environment_object_in_config_output_and_errors(tmp_path, capsys):
    """Check config.yaml, the output, and the errors of a video, a load and a diverged run."""
    run = fit(Counter(), run_dir=str(tmp_path / "run"))
    name = f"{HERE}:Counter"
    assert yaml.safe_load((run.folder / paths.CONFIG).read_text())["env"] == name
    check(capsys.readouterr().out.replace("\n", " "))
    assert message(run.video).startswith(f"{name} has no renderer")
    assert f"cannot be rebuilt from its name {name}" in message(jaxrl_fast.load, str(run.folder))
    with pytest.raises(FloatingPointError) as caught:
        fit(Infinite(), run_dir=str(tmp_path / "infinite"))
    assert f"{HERE}:Infinite" in check(str(caught.value))


def test_describe_names_classes_and_objects_without_repr():
    assert importing.describe([Counter, 1, ("a", Counter())]) == f"[{HERE}:Counter, 1, ('a', {HERE}:Counter)]"
    assert importing.describe({"env": (Counter,)}) == f"{{'env': ({HERE}:Counter,)}}"
    assert importing.describe(jnp.float32(1)) == f"{jnp.float32(1)!r}"


PACKAGED = """
import gymnasium

def joint(kind):
    assert kind in ("hinge", "slide")

class Arm(gymnasium.Env):
    def __init__(self):
        joint("free")
"""


def test_constructor_that_fails_in_an_installed_package_is_told_with_its_line(tmp_path, monkeypatch):
    folder = tmp_path / "site-packages" / "arm_package"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(PACKAGED, encoding="utf-8")
    monkeypatch.syspath_prepend(str(folder.parent))
    line = 'AssertionError (arm_package/__init__.py:5, in joint: assert kind in ("hinge", "slide"))'
    with pytest.raises(ValueError, match=f"^arm_package:Arm cannot be made: {re.escape(line)}$"):
        envs.make("arm_package:Arm", 1)
