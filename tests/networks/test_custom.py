"""networks.torsos.custom: a custom flax module as torso of each algorithm, and error messages of one line."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import ShapeDtypeStruct

import jaxrl_fast
from jaxrl_fast import networks
from jaxrl_fast.config import load
from jaxrl_fast.networks import Options
from jaxrl_fast.networks.torsos import custom

HERE = __name__
VECTOR = ShapeDtypeStruct((4,), jnp.float32)
IMAGE = ShapeDtypeStruct((20, 24, 3), jnp.uint8)


class Squares(nn.Module):
    """Scaled squares of the numbers of the observation."""

    scale: float = 1.0
    widths: tuple[int, ...] = ()

    @nn.compact
    def __call__(self, obs):
        x = jax.tree.leaves(obs)[0]
        scale = self.param("scale", nn.initializers.constant(self.scale), ())
        return scale * x**2


class Learned(nn.Module):
    """A dense layer with a custom initializer."""

    @nn.compact
    def __call__(self, obs):
        return nn.Dense(64, kernel_init=nn.initializers.normal(3.0))(obs)


class NoBatch(nn.Module):
    @nn.compact
    def __call__(self, obs):
        return nn.Dense(5)(obs).mean(axis=0)


class Integers(nn.Module):
    def __call__(self, obs):
        return jnp.argmax(obs, axis=-1, keepdims=True)


class WithState(nn.Module):
    @nn.compact
    def __call__(self, obs):
        return nn.BatchNorm(use_running_average=True)(obs)


class WithDropout(nn.Module):
    @nn.compact
    def __call__(self, obs):
        return nn.Dropout(0.5, deterministic=False)(obs)


class Required(nn.Module):
    width: int

    @nn.compact
    def __call__(self, obs):
        return nn.Dense(self.width)(obs)


def start(network):
    return jax.jit(network.init)(jax.random.key(0))


@pytest.mark.parametrize("batch", [(), (5,), (2, 3)])
def test_head_is_applied_to_features_of_custom_module(batch):
    network = networks.network(VECTOR, 3, Options(kind=f"{HERE}:Squares", arguments={"scale": 2.0}))
    params = start(network)
    obs = np.random.default_rng(0).normal(size=(*batch, 4)).astype(np.float32)
    head = params["params"]["heads_0"]
    expected = 2 * obs.astype(float) ** 2 @ np.asarray(head["kernel"], float)
    np.testing.assert_allclose(network.apply(params, obs), expected, rtol=1e-5, atol=1e-6)


def test_hidden_sizes_add_dense_layers_after_custom_module():
    network = networks.network(VECTOR, 3, Options(kind=f"{HERE}:Squares", hidden=(7, 5), activation="relu"))
    params = start(network)["params"]
    layers = [params["torso"]["mlp"][f"Dense_{i}"] for i in range(2)] + [params["heads_0"]]
    obs = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)
    x = obs.astype(float) ** 2
    for layer in layers[:2]:
        x = np.maximum(x @ np.asarray(layer["kernel"], float), 0)
    expected = x @ np.asarray(layers[2]["kernel"], float)
    np.testing.assert_allclose(network.apply({"params": params}, obs), expected, rtol=1e-5, atol=1e-5)


def test_custom_module_keeps_its_initializer_and_head_is_orthogonal():
    params = start(networks.network(ShapeDtypeStruct((200,), jnp.float32), 3, Options(kind=f"{HERE}:Learned")))[
        "params"
    ]
    own, head = params["torso"]["module"]["Dense_0"]["kernel"], params["heads_0"]["kernel"]
    assert float(own.std()) == pytest.approx(3.0, rel=0.05)  # 12,800 numbers
    np.testing.assert_allclose(head.T @ head, np.eye(3), atol=1e-5)


def test_custom_module_gets_images_between_0_and_1_with_channels_last():
    first = ShapeDtypeStruct((3, 20, 24), jnp.uint8)
    x = np.random.default_rng(0).integers(0, 256, (2, 20, 24, 3)).astype(np.uint8)
    networks_of = {obs: networks.network(obs, 2, Options(kind=f"{HERE}:Squares")) for obs in (IMAGE, first)}
    params = start(networks_of[IMAGE])
    expected = (x / 255.0).reshape(2, -1) ** 2 @ np.asarray(params["params"]["heads_0"]["kernel"], float)
    np.testing.assert_allclose(networks_of[IMAGE].apply(params, x), expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(networks_of[first].apply(params, np.moveaxis(x, -1, 1)), expected, rtol=1e-4, atol=1e-5)


def test_custom_module_gets_observation_with_its_structure():
    obs = {"a": ShapeDtypeStruct((2, 3), jnp.int32), "b": ShapeDtypeStruct((), jnp.float32)}
    network = networks.network(obs, 2, Options(kind=f"{HERE}:Squares"))
    params = start(network)
    x = {"a": jnp.arange(12, dtype=jnp.int32).reshape(2, 2, 3), "b": jnp.zeros(2)}
    expected = np.arange(12.0).reshape(2, 6) ** 2 @ np.asarray(params["params"]["heads_0"]["kernel"], float)
    np.testing.assert_allclose(network.apply(params, x), expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        (f"{HERE}:Squers", {}, ["has no 'Squers'", "did you mean Squares?"]),
        ("no_such_module:Torso", {}, ["importing 'no_such_module' failed"]),
        (f"{HERE}:start", {}, ["must be a class derived from flax.linen.Module, got type function"]),
        ("collections:OrderedDict", {}, ["derived from flax.linen.Module", "collections:OrderedDict"]),
        (f"{HERE}:Squares", {"scal": 1}, ["has no option 'scal'", "did you mean scale?"]),
        (f"{HERE}:Squares", {"scale": "much"}, ["scale: must be float", "'much'"]),
        (f"{HERE}:Required", {}, ["cannot be made", "width", "give it in network.options"]),
        (f"{HERE}:NoBatch", {}, ["must return float features [2, F] for 2 observations, got float32[5]"]),
        (f"{HERE}:Integers", {}, ["must return float features", "int32[2, 1]"]),
        (f"{HERE}:WithState", {}, ["must have parameters only, got batch_stats"]),
        (f"{HERE}:WithDropout", {}, ["failed with InvalidRngError", "test_custom.py"]),
        ("mlp", {"scale": 1}, ["network.options: network mlp has no such option, got scale; use a class"]),
    ],
)
def test_network_rejects_invalid_custom_module_in_one_line(name, arguments, words):
    with pytest.raises(ValueError) as caught:
        networks.network(VECTOR, 3, Options(kind=name, arguments=arguments))
    assert len(str(caught.value).splitlines()) == 1
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_options_are_converted_to_type_of_their_defaults():
    options = Options(kind=f"{HERE}:Squares", arguments={"scale": "0.5", "widths": [3, 4]})
    made = custom.make(VECTOR, options, None).module
    assert (made.scale, made.widths) == (0.5, (3, 4))


@pytest.mark.parametrize("network", [Squares(scale=2.0, widths=(1, 2)), Squares])
def test_config_stores_module_as_name_and_options(network):
    agent = load.from_keywords(algo="ppo", env="CartPole-v1", network=network).agent
    assert agent.network.kind == f"{HERE}:Squares"
    assert agent.network.options == ({} if network is Squares else {"scale": 2.0, "widths": [1, 2]})


def test_config_rejects_module_option_that_cannot_be_saved():
    with pytest.raises(ValueError, match="scale must be numbers, words and lists of them, got type object"):
        load.from_keywords(algo="ppo", env="CartPole-v1", network=Squares(scale=object()))


@pytest.mark.slow
@pytest.mark.parametrize("algo", ["ppo", "dqn", "pqn"])
def test_algorithms_train_resume_and_load_with_custom_network(tmp_path, algo):
    options = dict(total_steps=1024, network=Required(width=8), loggers=())
    run = jaxrl_fast.fit(algo=algo, env="CartPole-v1", run_dir=tmp_path / "run", **options)
    trained = jaxrl_fast.load(run)
    assert trained.policy(np.zeros((3, 4), np.float32)).shape == (3,)
    resumed = jaxrl_fast.fit(resume=tmp_path / "run", total_steps=2048)
    assert resumed.summary["env_steps"] >= 2048
