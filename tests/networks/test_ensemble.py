"""networks.ensemble: critics of observations and actions, with separate parameters."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import ShapeDtypeStruct

from jaxrl_fast import networks
from jaxrl_fast.networks import Options
from jaxrl_fast.networks.ensemble import critics, ensemble
from jaxrl_fast.networks.torsos import custom

VECTOR = ShapeDtypeStruct((3,), jnp.float32)
BOARD = ShapeDtypeStruct((5, 4, 2), jnp.bool_)
TREE = {"grid": ShapeDtypeStruct((2, 3), jnp.int32), "speed": ShapeDtypeStruct((), jnp.float32)}


class Doubled(nn.Module):
    """Twice the observation, in rows of two."""

    @nn.compact
    def __call__(self, obs):
        self.param("unused", nn.initializers.zeros, ())
        return 2 * obs.reshape(obs.shape[0], -1, 1)


def start(network, seed=0):
    return jax.jit(network.init)(jax.random.key(seed))


def draw(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def compute(network, params, *inputs):
    return jax.jit(network.apply)(params, inputs)


def at(i, tree):
    return jax.tree.map(lambda x: x[i], tree)


@pytest.mark.parametrize("batch", [(), (2, 3)])
def test_critics_match_dense_layers_on_concatenated_observation_and_action(batch):
    made = critics(VECTOR, 2, 3, Options(hidden=(8,), activation="relu", kernel_init="lecun_normal"))
    params = jax.tree.map(lambda x: x + 0.1, start(made))  # biases begin at 0
    obs, action = draw(*batch, 3), draw(*batch, 2, seed=1)
    value = compute(made, params, obs, action)
    assert value.shape == (3, *batch)
    x = np.concatenate([obs, action], -1).astype(float)
    for i in range(3):
        layers = at(i, params)["params"]
        dense, head = layers["torso"]["mlp"]["Dense_0"], layers["heads_0"]
        hidden = np.maximum(x @ np.asarray(dense["kernel"], float) + np.asarray(dense["bias"]), 0)
        expected = (hidden @ np.asarray(head["kernel"], float) + np.asarray(head["bias"]))[..., 0]
        np.testing.assert_allclose(value[i], expected, rtol=1e-5, atol=1e-5)


def test_critics_differ_and_init_is_reproducible():
    made = critics(VECTOR, 2, 4, Options(hidden=(8,)))
    params = start(made)
    jax.tree.map(np.testing.assert_array_equal, params, start(made))
    kernels = [x for x in jax.tree.leaves(params) if x.ndim == 3]
    assert len(kernels) == 2
    for i, j in ((0, 1), (1, 2), (2, 3), (0, 3)):
        assert all(np.abs(x[i] - x[j]).max() > 0.1 for x in kernels)


def test_loss_of_one_critic_has_no_gradient_for_others():
    made = critics(VECTOR, 2, 3, Options(hidden=(8,), activation="relu"))
    inputs = draw(6, 3), draw(6, 2, seed=1)
    gradient = jax.jit(jax.grad(lambda params: made.apply(params, inputs)[1].sum()))(start(made))
    norm = lambda i: max(float(np.abs(x[i]).max()) for x in jax.tree.leaves(gradient))
    assert norm(0) == norm(2) == 0 and norm(1) > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("obs", [BOARD, TREE], ids=["board", "tree"])
def test_critics_accept_action_with_board_and_tree_observations(obs):
    """Each row has the same value as without a batch, and another action changes the value."""
    made = critics(obs, 2, 2, Options(hidden=(8,)))
    params, rng = start(made), np.random.default_rng(0)
    x = jax.tree.map(lambda leaf: jnp.asarray(rng.integers(0, 2, (4, *leaf.shape)), leaf.dtype), obs)
    action = draw(4, 2)
    answer = jax.jit(made.apply)
    value = answer(params, (x, action))
    assert value.shape == (2, 4)
    alone = compute(made, params, at(0, x), action[0])  # without a batch
    np.testing.assert_allclose(value[:, 0], alone, rtol=1e-4, atol=1e-5)
    assert (np.abs(value - answer(params, (x, action + 1))) > 1e-3).all()


def test_network_options_reach_each_critic():
    options = dict(hidden=(7, 5), activation="relu", layer_norm=True, kernel_init="he_uniform")
    made = critics(VECTOR, 2, 2, Options(**options))
    one = networks.network(VECTOR, 1, Options(action_size=2, **options))
    params = start(made)
    assert jax.eval_shape(partial(at, 0), params) == jax.eval_shape(one.init, jax.random.key(0))
    inputs = draw(4, 3), draw(4, 2)
    np.testing.assert_allclose(compute(made, params, *inputs)[1], compute(one, at(1, params), *inputs)[:, 0], rtol=1e-5)


def test_critics_compute_in_dtype_of_option_and_return_float32():
    made = critics(VECTOR, 2, 2, Options(hidden=(8,), dtype=jnp.bfloat16))
    params, inputs = start(made), (draw(4, 3), draw(4, 2))
    value = compute(made, params, *inputs)
    exact = compute(critics(VECTOR, 2, 2, Options(hidden=(8,))), params, *inputs)
    assert value.dtype == jnp.float32
    np.testing.assert_allclose(value, exact, atol=0.05)
    assert (value != exact).any()


# Custom modules


def test_join_action_concatenates_flat_features_and_action():
    joined = custom.JoinAction(Doubled())
    obs, action = draw(4, 3), draw(4, 2, seed=1)
    variables = joined.init(jax.random.key(0), (obs, action))
    found = joined.apply(variables, (obs, action))
    np.testing.assert_allclose(found, np.concatenate([2 * obs, action], axis=-1), rtol=1e-6)


def test_join_action_keeps_dtype_of_features():
    joined = custom.JoinAction(Doubled())
    inputs = draw(4, 3).astype(jnp.bfloat16), draw(4, 2)
    found = joined.apply(joined.init(jax.random.key(0), inputs), inputs)
    assert found.dtype == jnp.bfloat16 and found.shape == (4, 5)


def test_critic_dense_layers_are_applied_to_custom_features_and_action():
    made = critics(VECTOR, 2, 2, Options(kind=f"{__name__}:Doubled", hidden=(6,), activation="relu"))
    layers = start(made)["params"]
    obs, action = draw(4, 3), draw(4, 2, seed=1)
    features = np.concatenate([2 * obs, action], axis=-1).astype(float)
    hidden = np.maximum(features @ np.asarray(layers["torso"]["mlp"]["Dense_0"]["kernel"][1], float), 0)
    expected = (hidden @ np.asarray(layers["heads_0"]["kernel"][1], float))[:, 0]
    np.testing.assert_allclose(compute(made, {"params": layers}, obs, action)[1], expected, rtol=1e-4, atol=1e-5)


def test_inputs_are_pair_of_observation_and_action():
    assert Options().inputs(VECTOR) is VECTOR
    assert Options(action_size=2).inputs(TREE) == (TREE, ShapeDtypeStruct((2,), jnp.float32))


@pytest.mark.slow
@pytest.mark.parametrize("noisy", [False, True])
def test_ensemble_outputs_match_networks_one_by_one(noisy):
    one = networks.network(VECTOR, 2, Options(hidden=(5,), noisy=noisy))
    both = ensemble(one, 2)
    params = both.init(jax.random.key(0))
    obs = jax.random.normal(jax.random.key(1), (4, 3))
    noise = both.noise(jax.random.key(2), ())
    outputs = both.apply(params, obs, noise)
    assert outputs.shape == (2, 4, 2)
    for i in range(2):
        own, own_noise = (jax.tree.map(lambda x, i=i: x[i], tree) for tree in (params, noise))
        np.testing.assert_allclose(outputs[i], one.apply(own, obs, own_noise), rtol=1e-5, atol=1e-6)
    kernels = [x for x in jax.tree.leaves(params) if x.ndim == 3 and x[0].std() > 1e-3]
    assert kernels and all(np.abs(x[0] - x[1]).max() > 0.1 for x in kernels), "separate parameters"
    for x in jax.tree.leaves(noise):
        assert np.abs(x[0] - x[1]).max() > 0.1, "separate noise"
    assert bool(jax.tree.leaves(noise)) == noisy


def test_copies_have_separate_noise():
    """The outputs of three copies are those of each copy alone with its part of the noise, which differs."""
    one = networks.network(VECTOR, 2, Options(hidden=(4,), noisy=True))
    made, obs = ensemble(one, 3), draw(5, 3)
    params, noise = start(made), made.noise(jax.random.key(1), ())
    found = jax.jit(made.apply)(params, obs, noise)
    for i in range(3):
        np.testing.assert_allclose(found[i], jax.jit(one.apply)(at(i, params), obs, at(i, noise)), rtol=1e-5, atol=1e-6)
    first = jax.tree.leaves(noise)[0]
    assert first.shape[0] == 3 and not np.isclose(first[0], first[1]).any()
    assert not np.isclose(found, jax.jit(made.apply)(params, obs, jax.tree.map(jnp.zeros_like, noise))).any()
