"""networks.torsos.flash: against a plain program in numpy, its constraint, and the options that it rejects."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import ShapeDtypeStruct

from jaxrl_fast.networks import Options, flat, network
from jaxrl_fast.networks.batch_renorm import with_stats
from jaxrl_fast.networks.ensemble import critics
from jaxrl_fast.networks.torsos import flash
from jaxrl_fast.utils import target

OBS = ShapeDtypeStruct((3,), jnp.float32)


def made(blocks=2, width=4, num_outputs=2, **options):
    return network(OBS, num_outputs, Options(kind="flash", hidden=(width,) * blocks, **options))


def random_params(params, seed=0):
    """Parameters of the same shapes that are all different, in float64."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: rng.normal(size=x.shape) + 0.5, params)


def plain(params, stats, x, training):
    """The network's outputs for rows [B, F], and its running statistics afterwards: one feature at a time."""
    layers, stats, after = params["params"]["torso"]["mlp"], stats["torso"]["mlp"], {}
    number = iter(range(100))

    def normalize(x):
        name = f"BatchNorm_{next(number)}"
        scale, offset = layers[name]["scale"], layers[name]["bias"]
        mean, var = (np.array(stats[name][key], float) for key in ("mean", "var"))
        y, new = np.empty_like(x), [mean.copy(), var.copy()]
        for f in range(x.shape[1]):
            column = x[:, f]
            m, v = mean[f], var[f]
            if training:
                m = sum(column) / len(column)
                v = sum((column - m) ** 2) / len(column)
                new[0][f] = 0.99 * mean[f] + 0.01 * m
                new[1][f] = 0.99 * var[f] + 0.01 * v * len(column) / (len(column) - 1)
            y[:, f] = (column - m) / (v + 1e-5) ** 0.5 * scale[f] + offset[f]
        after[name] = dict(zip(("mean", "var"), new))
        return y

    linear = iter(layers[f"Linear_{i}"]["kernel"] for i in range(100) if f"Linear_{i}" in layers)
    x = normalize(x) @ next(linear)
    for kernel in linear:
        y = np.maximum(normalize(x @ kernel), 0)
        x = x + np.maximum(normalize(y @ next(linear)), 0)
    x = x / np.sqrt((x**2).mean(1, keepdims=True) + 1e-6) * layers["RMSNorm_0"]["scale"]
    return x @ params["params"]["heads_0"]["kernel"] + params["params"]["heads_0"]["bias"], after


@pytest.mark.parametrize("training", [True, False])
def test_network_matches_plain_program(training):
    """Two blocks. The running statistics move by a hundredth, with the unbiased variance."""
    net, rng = made(), np.random.default_rng(1)
    params = random_params(jax.eval_shape(net.init, jax.random.key(0)))
    stats = jax.tree.map(lambda x: 0.5 + rng.random(x.shape), net.init_stats())
    x = rng.normal(size=(6, 3)) * [1, 5, 0.1] + [0, 3, 0]
    expected, after = plain(params, stats, x, training)
    f32 = lambda tree: jax.tree.map(jnp.float32, tree)
    if training:
        found, changed = jax.jit(net.train)(f32(params), f32(stats), jnp.float32(x))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), changed["torso"]["mlp"], after)
    else:
        found = jax.jit(net.apply)(with_stats(f32(params), f32(stats)), jnp.float32(x))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_gradient_flows_through_statistics_of_batch():
    """Against finite differences of the plain program, for an entry of the first kernel."""
    net, rng = made(blocks=1), np.random.default_rng(2)
    params = random_params(jax.eval_shape(net.init, jax.random.key(0)))
    stats, x, weight = net.init_stats(), rng.normal(size=(5, 3)), rng.normal(size=(5, 2))

    def loss(step):
        moved = jax.tree.map(np.copy, params)
        moved["params"]["torso"]["mlp"]["Linear_0"]["kernel"][1, 2] += step
        return (weight * plain(moved, stats, x, True)[0]).sum()

    of = lambda params: (jnp.float32(weight) * net.train(params, stats, jnp.float32(x))[0]).sum()
    found = jax.jit(jax.grad(of))(jax.tree.map(jnp.float32, params))["params"]["torso"]["mlp"]["Linear_0"]["kernel"]
    np.testing.assert_allclose(found[1, 2], (loss(1e-6) - loss(-1e-6)) / 2e-6, rtol=1e-3)


def test_constrain_gives_unit_norms():
    """Weights of an output have norm 1, scale and offset of F features together sqrt(F), and directions stay.

    The authors normalize rows of [outputs, inputs]; here these are columns. Biases of heads stay.
    """
    params = random_params(jax.eval_shape(made().init, jax.random.key(0)))
    found = flash.constrain(jax.tree.map(jnp.float32, params))["params"]
    before, layers = params["params"], found["torso"]["mlp"]
    for kernel in [layers[f"Linear_{i}"]["kernel"] for i in range(5)] + [found["heads_0"]["kernel"]]:
        np.testing.assert_allclose(np.linalg.norm(kernel, axis=0), 1, rtol=1e-5)
    old = before["heads_0"]["kernel"]
    np.testing.assert_allclose(found["heads_0"]["kernel"], old / np.linalg.norm(old, axis=0), rtol=1e-5)
    np.testing.assert_allclose(found["heads_0"]["bias"], before["heads_0"]["bias"], rtol=1e-6)
    for i, size in enumerate((3, 16, 4, 16, 4)):
        norm, old = layers[f"BatchNorm_{i}"], before["torso"]["mlp"][f"BatchNorm_{i}"]
        factor = np.sqrt(size / ((old["scale"] ** 2).sum() + (old["bias"] ** 2).sum()))
        for name in ("scale", "bias"):
            np.testing.assert_allclose(norm[name], factor * old[name], rtol=1e-5)
    np.testing.assert_allclose((layers["RMSNorm_0"]["scale"] ** 2).sum(), 4, rtol=1e-5)


def test_constrain_of_zeros_is_finite():
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape), jax.eval_shape(made().init, jax.random.key(0)))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(flash.constrain(zeros)))


def test_initial_parameters_satisfy_constraint():
    made_of = critics(OBS, 2, 2, Options(kind="flash", hidden=(4,), num_atoms=5))
    params = jax.jit(made_of.init)(jax.random.key(0))
    kernel = params["params"]["torso"]["mlp"]["Linear_0"]["kernel"]
    np.testing.assert_allclose(np.linalg.norm(kernel, axis=1), 1, rtol=1e-5)  # [critics, 5, 4]
    assert not np.array_equal(kernel[0], kernel[1])
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), made_of.constrain(params), params)


@pytest.mark.parametrize("num", [0, 2])
def test_packed_parameters_and_statistics_stay_packed(num):
    """On an accelerator these are vectors, and a loop over gradient steps needs the form that it began with."""
    net = critics(OBS, 2, num, Options(kind="flash", hidden=(4,))) if num else made()
    params, stats = jax.jit(net.init)(jax.random.key(0)), net.init_stats()
    inputs = (jnp.ones((6, 3)), jnp.ones((6, 2))) if num else jnp.ones((6, 3)) * jnp.arange(6.0)[:, None]
    with target.tracing_for("gpu"):
        packed = flat.pack((params, stats))
    assert flat.is_packed(packed[0]) and flat.is_packed(packed[1])
    expected, after = net.train(params, stats, inputs)
    found, packed_after = net.train(*packed, inputs)
    assert jax.tree.structure(packed_after) == jax.tree.structure(packed[1])
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), flat.unpack(packed_after), after)
    assert jax.tree.structure(net.constrain(packed[0])) == jax.tree.structure(packed[0])


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (dict(hidden=(4, 8)), "network.hidden_sizes: flash's blocks must have one width, got 4, 8; repeat 4"),
        (dict(layer_norm=True), "critic_layer_norm: network flash normalizes its layers already, got true"),
    ],
    ids=["widths", "layer_norm"],
)
def test_make_rejects_options(options, line):
    with pytest.raises(ValueError, match=f"^{line}"):
        network(OBS, 2, Options(kind="flash", **options))
