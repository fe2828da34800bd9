"""networks: choice by observation, outputs, initialization, and equality of all implementations."""

import re
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import ShapeDtypeStruct

from jaxrl_fast import networks
from jaxrl_fast.kernels import conv, matmul
from jaxrl_fast.networks import Options, dense, torsos
from tests.helpers import slow
from tests.helpers.convolutions import WAYS, compute_by


def spec(*shape, dtype=jnp.float32):
    return ShapeDtypeStruct(shape, dtype)


VECTOR, BOARD, IMAGE = spec(4), spec(10, 10, 4, dtype=jnp.bool_), spec(84, 84, 4, dtype=jnp.uint8)
SMALL_IMAGE = spec(36, 40, 2, dtype=jnp.uint8)
TREE = {"grid": spec(2, 3, dtype=jnp.int32), "speed": spec()}


def draw(obs, *axes, seed=0):
    """Observations like `obs` with leading axes."""
    rng = np.random.default_rng(seed)
    values = {"b": lambda size: rng.random(size) < 0.5, "f": lambda size: rng.normal(size=size)}
    integers = lambda size: rng.integers(0, 256, size)
    return jax.tree.map(
        lambda leaf: jnp.asarray(values.get(leaf.dtype.kind, integers)((*axes, *leaf.shape)), leaf.dtype), obs
    )


def start(network, seed=0):
    return jax.jit(network.init)(jax.random.key(seed))


def leaves(params):
    """(path, leaf) with paths as strings."""
    return [(jax.tree_util.keystr(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(params)]


@pytest.mark.parametrize(
    ("obs", "kind"),
    [
        (spec(dtype=jnp.int32), "mlp"),
        (VECTOR, "mlp"),
        (spec(10, 5), "mlp"),
        (spec(128, dtype=jnp.uint8), "mlp"),
        (TREE, "mlp"),
        (BOARD, "minatar"),
        (spec(10, 10, 4), "minatar"),
        (spec(7, 7, 3, dtype=jnp.uint8), "minatar"),
        (spec(2, 9, 3), "mlp"),
        (IMAGE, "nature"),
        (SMALL_IMAGE, "nature"),
    ],
)
def test_choose_kind_depends_on_observation(obs, kind):
    assert torsos.choose_kind(obs) == kind


@pytest.mark.parametrize(
    ("obs", "observations", "described"),
    [
        (VECTOR, "auto", "mlp   reads vector 4"),
        (IMAGE, "auto", "nature   reads image 84x84x4 / 255"),
        (IMAGE, "board", "minatar   reads board 84x84x4"),
        (IMAGE, "vector", "mlp   reads vector 84x84x4"),
        (BOARD, "auto", "minatar   reads board 10x10x4"),
        (spec(16, 16, 3, dtype=jnp.uint8), "auto", "minatar   reads image 16x16x3 / 255"),
        (spec(16, 16, 3, dtype=jnp.uint8), "board", "minatar   reads board 16x16x3"),
        (spec(7, 7, 3, dtype=jnp.uint8), "image", "minatar   reads image 7x7x3 / 255"),
        (spec(3, 64, 64, dtype=jnp.uint8), "auto", "nature   reads image 3x64x64, channels first / 255"),
        (spec(4, 84, 84, dtype=jnp.uint8), "auto", "nature   reads image 4x84x84, channels first / 255"),
        (spec(12, 36, 48, dtype=jnp.uint8), "auto", "nature   reads image 12x36x48, channels first / 255"),
        (spec(3, 64, 64), "image", "nature   reads image 3x64x64, channels first / 255"),
        (spec(64, 64, 3), "auto", "nature   reads board 64x64x3"),
        (spec(64, 64, 3), "image", "nature   reads image 64x64x3 / 255"),
        (spec(4, 20, 20, dtype=jnp.bool_), "auto", "minatar   reads board 4x20x20"),
        (spec(84, 84, dtype=jnp.uint8), "auto", "mlp   reads image 84x84 / 255"),
        (spec(16, 16, dtype=jnp.uint8), "board", "mlp   reads vector 16x16"),
        (spec(16, 16, dtype=jnp.uint8), "vector", "mlp   reads vector 16x16"),
        (spec(84, 84), "image", "mlp   reads image 84x84 / 255"),
    ],
)
def test_describe_names_kind_and_type_of_observation(obs, observations, described):
    assert torsos.describe(obs, "auto", observations) == described


@pytest.mark.parametrize("kind", ["nature", slow("impala"), "mlp"])
def test_channels_first_image_has_output_of_channels_last_image(kind):
    """The oracle is the network for channels last, with the same parameters and the transposed image."""
    first, last = spec(3, 40, 36, dtype=jnp.uint8), spec(40, 36, 3, dtype=jnp.uint8)
    x = draw(first, 2)
    networks_of = {obs.shape: networks.network(obs, 2, Options(kind=kind, hidden=(8,))) for obs in (first, last)}
    if kind == "mlp":  # flattened, so only the output shape is tested
        assert networks_of[first.shape].apply(start(networks_of[first.shape]), x).shape == (2, 2)
        return
    params = start(networks_of[last.shape])
    expected = networks_of[last.shape].apply(params, jnp.moveaxis(x, 1, -1))
    np.testing.assert_allclose(networks_of[first.shape].apply(params, x), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["nature", "minatar", "mlp"])
def test_images_are_scaled_alike_as_uint8_and_as_float(kind):
    """Boards, and floats without the option `observations`, are not scaled."""
    shape = (40, 36, 3)
    x = draw(spec(*shape, dtype=jnp.uint8), 2)
    network_of = lambda obs, observations: networks.network(
        obs, 2, Options(kind=kind, hidden=(8,), observations=observations)
    )
    as_bytes, as_floats = spec(*shape, dtype=jnp.uint8), spec(*shape)
    params = start(network_of(as_bytes, "auto"))
    shades = network_of(as_bytes, "auto").apply(params, x)
    scaled = np.float32(x) / 255
    for obs, observations, given in (
        (as_bytes, "image", x),
        (as_floats, "image", jnp.float32(x)),
        (as_floats, "auto", jnp.asarray(scaled)),
        (as_bytes, "auto", jnp.asarray(scaled)),  # normalized before
    ):
        found = network_of(obs, observations).apply(params, given)
        np.testing.assert_allclose(found, shades, rtol=1e-4, atol=1e-5, err_msg=f"{obs} {observations}")
    numbers = network_of(as_bytes, "board").apply(params, x)
    np.testing.assert_allclose(numbers, network_of(as_floats, "auto").apply(params, jnp.float32(x)), rtol=1e-4)
    assert not np.allclose(numbers, shades, rtol=1e-2)


@pytest.mark.parametrize(
    ("obs", "kind", "words"),
    [
        (spec(2, 3, 4, 5), "auto", r"float32\[2, 3, 4, 5\]"),
        (VECTOR, "nature", r"^network: nature requires one \[H, W, C\] observation, got float32\[4\]; use mlp$"),
        (TREE, "minatar", "one .* observation"),
        (BOARD, "nature", "36x36 pixels or more"),
        (spec(2, 2, 1), "minatar", "3x3 pixels or more"),
        (
            VECTOR,
            "transformer",
            "^network: must be one of auto, mlp, simba, flash, minatar, nature, dqn2013, impala, got ",
        ),
    ],
)
def test_actor_critic_rejects_unsupported_observation_or_kind(obs, kind, words):
    with pytest.raises(ValueError, match=words):
        networks.actor_critic(obs, 2, Options(kind=kind))


def test_network_rejects_image_reading_of_vector():
    with pytest.raises(
        ValueError, match=r"^network.observations: image requires \[H, W\] or \[H, W, C\], got float32\[4\]"
    ):
        networks.network(VECTOR, 2, Options(observations="image"))


def test_network_rejects_convolutions_for_vector_observations():
    with pytest.raises(
        ValueError,
        match=r"^network.observations: network nature requires an image or a board, got vector; use network mlp$",
    ):
        networks.network(IMAGE, 2, Options(kind="nature", observations="vector"))


@pytest.mark.parametrize(
    ("obs", "kind"),
    [
        (spec(dtype=jnp.int32), "auto"),
        (VECTOR, "auto"),
        (spec(5, 3), "auto"),
        (TREE, "auto"),
        (BOARD, "auto"),
        (BOARD, "mlp"),
        (BOARD, "impala"),
        (SMALL_IMAGE, "auto"),
        (SMALL_IMAGE, "mlp"),
        (SMALL_IMAGE, "impala"),
    ],
)
def test_outputs_keep_any_leading_axes(obs, kind):
    network = networks.actor_critic(obs, 3, Options(kind=kind, hidden=(16,)))
    params = jax.eval_shape(network.init, jax.random.key(0))
    for axes in ((), (5,), (2, 3)):
        output, value = jax.eval_shape(network.both, params, draw(obs, *axes))
        assert (output.shape, value.shape) == ((*axes, 3), axes)
        assert output.dtype == value.dtype == jnp.float32


@pytest.mark.parametrize("obs", [spec(), TREE, BOARD])
def test_rows_of_batch_are_independent(obs):
    network = networks.network(obs, 3, Options(hidden=(16,)))
    params, x = start(network), draw(obs, 2, 3)
    apply = jax.jit(network.apply)
    alone = apply(params, jax.tree.map(lambda leaf: leaf[1, 2], x))
    np.testing.assert_allclose(apply(params, x)[1, 2], alone, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("obs", "shared"), [(VECTOR, False), (BOARD, True)])
def test_actor_and_critic_alone_match_both(obs, shared):
    network = networks.actor_critic(obs, 3, shared=shared)
    params, x = start(network), draw(obs, 5)
    output, value = jax.jit(network.both)(params, x)
    np.testing.assert_allclose(jax.jit(network.act)(params, x, ())[0], output, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(jax.jit(network.critic)(params, x), value, rtol=1e-5, atol=1e-6)


# The figure's 15 convolutions: 37 * 16 + 4 * 145 * 16 + 145 * 32 + 9 * 289 * 32 = 97,744 parameters.
RESIDUAL = [(3, 3, 4, 16), *4 * [(3, 3, 16, 16)], (3, 3, 16, 32), *9 * [(3, 3, 32, 32)]]
PAPERS = [  # kernels of a network with 4 outputs, and its parameters: of each layer (inputs + 1) * outputs
    # Mnih et al. 2015: sides 84, 20, 9, 7.  257 * 32 + 513 * 64 + 577 * 64 + 3137 * 512 + 513 * 4
    (IMAGE, "nature", [(8, 8, 4, 32), (4, 4, 32, 64), (3, 3, 64, 64), (7 * 7 * 64, 512), (512, 4)], 1_686_180),
    # Mnih et al. 2013: sides 84, 20, 9.  257 * 16 + 257 * 32 + 2593 * 256 + 257 * 4
    (IMAGE, "dqn2013", [(8, 8, 4, 16), (4, 4, 16, 32), (9 * 9 * 32, 256), (256, 4)], 677_172),
    # Espeholt et al. 2018, figure 3, right: sides 84, 42, 21, 11, halved and rounded up.  97744 + 3873 * 256 + 257 * 4
    (IMAGE, "impala", [*RESIDUAL, (11 * 11 * 32, 256), (256, 4)], 1_090_260),
    (BOARD, "impala", [*RESIDUAL, (2 * 2 * 32, 256), (256, 4)], 131_796),  # 10, 5, 3, 2
    # Young & Tian 2019: sides 10, 8.  37 * 16 + 1025 * 128 + 129 * 4
    (BOARD, "minatar", [(3, 3, 4, 16), (8 * 8 * 16, 128), (128, 4)], 132_308),
    (BOARD, "mlp", [(400, 64), (64, 64), (64, 4)], 30_084),  # 401 * 64 + 65 * 64 + 65 * 4
    # Lee et al. 2025: 5 * 128, then a block of 129 * 512 + 513 * 128 and a norm of 256, a norm of 256 and 129 * 4
    (VECTOR, "simba", [(4, 128), (128, 512), (512, 128), (128, 4)], 133_380),
    (IMAGE, "mlp", [(28_224, 64), (64, 64), (64, 4)], 1_810_820),  # 28225 * 64 + 65 * 64 + 65 * 4
]


@pytest.mark.parametrize(("obs", "kind", "kernels", "num_parameters"), PAPERS)
def test_kernel_shapes_and_number_of_parameters_match_paper(obs, kind, kernels, num_parameters):
    params = leaves(jax.eval_shape(networks.network(obs, 4, Options(kind=kind)).init, jax.random.key(0)))
    assert sorted(leaf.shape for path, leaf in params if "kernel" in path) == sorted(kernels)
    assert sum(leaf.size for _, leaf in params) == num_parameters


def normalized(x, layer):
    x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * layer["scale"] + layer["bias"]


@pytest.mark.parametrize("dueling", [False, True])
def test_simba_matches_plain_residual_blocks(dueling):
    """In float64: x + W2 relu(W1 norm(x)), and a norm at the end. Streams have the last block."""
    network = networks.network(VECTOR, 3, Options(kind="simba", hidden=(8, 8), dueling=dueling))
    params, obs = draw(jax.eval_shape(network.init, jax.random.key(0))), draw(VECTOR, 5)
    layers = jax.tree.map(lambda x: np.asarray(x, float), params)["params"]
    dense = lambda x, layer: x @ layer["kernel"] + layer["bias"]

    def block(x, layers, number, before):
        hidden = np.maximum(dense(normalized(x, layers[f"LayerNorm_{number}"]), layers[f"Dense_{before}"]), 0)
        return x + dense(hidden, layers[f"Dense_{before + 1}"])

    trunk = layers["torso"]["mlp"]
    x = block(dense(np.asarray(obs, float), trunk["Dense_0"]), trunk, 0, 1)
    if dueling:
        parts = [layers["streams_0"], layers["streams_1"]]
        value, advantage = (
            dense(normalized(block(x, part, 0, 0), part["LayerNorm_1"]), layers[f"heads_{i}"])
            for i, part in enumerate(parts)
        )
        expected = value + advantage - advantage.mean(-1, keepdims=True)
    else:
        expected = dense(normalized(block(x, trunk, 1, 3), trunk["LayerNorm_2"]), layers["heads_0"])
    np.testing.assert_allclose(network.apply(params, obs), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(hidden=(8, 4)), "^network.hidden_sizes: simba's blocks must have one width, got 8, 4; repeat 8$"),
        (dict(noisy=True), "^noisy: network simba has layers of its own, got true; use network mlp$"),
    ],
)
def test_simba_rejects_unsupported_options(options, words):
    with pytest.raises(ValueError, match=words):
        networks.network(VECTOR, 3, Options(kind="simba", **options))


@pytest.mark.parametrize(
    ("obs", "kind", "activation", "other"),
    [
        (VECTOR, "mlp", "tanh", "relu"),
        (VECTOR, "simba", "relu", "tanh"),
        (BOARD, "minatar", "relu", "tanh"),
        (SMALL_IMAGE, "nature", "relu", "tanh"),
        (SMALL_IMAGE, "dqn2013", "relu", "tanh"),
        (BOARD, "impala", "relu", "tanh"),
    ],
)
def test_default_activation_matches_paper(obs, kind, activation, other):
    """The option `activation` overrides it, also in the convolutions."""
    make = lambda name: networks.network(obs, 3, Options(kind=kind, activation=name, hidden=(8,)))
    params, x = draw(jax.eval_shape(make("auto").init, jax.random.key(0))), draw(obs, 5)
    by_itself, same, not_same = jax.jit(lambda: [make(name).apply(params, x) for name in ("auto", activation, other)])()
    np.testing.assert_array_equal(by_itself, same)
    assert np.abs(by_itself - not_same).max() > 1e-3


@pytest.mark.parametrize(("obs", "shared"), [(VECTOR, None), (BOARD, None), (VECTOR, True), (BOARD, False)])
def test_actor_critic_shares_convolutions_but_not_dense_torso_by_default(obs, shared):
    network = networks.actor_critic(obs, 3, Options(hidden=(8,)), shared=shared)
    params = start(network)
    gradient = jax.jit(jax.grad(lambda params: network.critic(params, draw(obs, 5)).sum()))(params)
    touched = any(bool((leaf != 0).any()) for path, leaf in leaves(gradient) if "['torso']" in path)
    assert touched == (obs is BOARD if shared is None else shared)
    assert all(bool((leaf == 0).all()) for path, leaf in leaves(gradient) if "actor_head" in path)


@pytest.mark.slow
@pytest.mark.parametrize(("obs", "kind"), [(VECTOR, "mlp"), (BOARD, "minatar"), (BOARD, "impala")])
def test_init_makes_scaled_orthogonal_kernels_and_zero_biases(obs, kind):
    params = start(networks.actor_critic(obs, 3, Options(kind=kind, hidden=(32, 32))))
    for path, leaf in leaves(params):
        if leaf.ndim == 1:
            np.testing.assert_array_equal(leaf, 0)
            continue
        gain = 0.01 if "actor_head" in path else 1.0 if "critic_head" in path else np.sqrt(2)
        matrix = np.asarray(leaf, float).reshape(-1, leaf.shape[-1]) / gain
        matrix = matrix.T if matrix.shape[0] < matrix.shape[1] else matrix
        np.testing.assert_allclose(matrix.T @ matrix, np.eye(matrix.shape[1]), atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "std", "most"),
    [
        ("lecun_normal", [1, 1, 1, 0.01], 2 / 0.8796),
        ("lecun_uniform", [1, 1, 1, 0.01], np.sqrt(3)),
        ("he_normal", [np.sqrt(2), np.sqrt(2), 1, 0.01], 2 / 0.8796),
        ("he_uniform", [np.sqrt(2), np.sqrt(2), 1, 0.01], np.sqrt(3)),
    ],
)
def test_kernel_init_option_sets_variance_and_bound_of_kernels(kind, std, most):
    """`std` and `most` are of two hidden layers, critic head and actor head, times sqrt(number of inputs)."""
    network = networks.actor_critic(spec(300), 400, Options(hidden=(400, 500), kernel_init=kind), shared=True)
    params = start(network)["params"]
    layers = [params["torso"]["mlp"]["Dense_0"], params["torso"]["mlp"]["Dense_1"]]
    for layer, expected in zip([*layers, params["critic_head"], params["actor_head"]], std, strict=True):
        unit = np.asarray(layer["kernel"], float) * np.sqrt(layer["kernel"].shape[0]) / expected
        assert unit.std() == pytest.approx(1, abs=4 / np.sqrt(2 * unit.size)), layer["kernel"].shape
        assert abs(unit.mean()) < 4 / np.sqrt(unit.size)
        assert 0.95 * most < np.abs(unit).max() <= most * 1.0001
        np.testing.assert_array_equal(layer["bias"], 0)


def test_kernel_init_of_convolution_uses_full_fan_in():
    kernel = start(networks.network(IMAGE, 3, Options(kind="nature", kernel_init="lecun_normal")))["params"]
    first = next(leaf for path, leaf in leaves(kernel) if leaf.ndim > 2)
    assert float(first.std()) == pytest.approx(1 / np.sqrt(8 * 8 * 4), rel=0.05)


def test_orthogonal_init_is_uniformly_distributed():
    """Entries have mean 0, variance 1 / 4 and equally frequent signs, as for uniform orthogonal matrices."""
    network = networks.network(VECTOR, 4, Options(hidden=(4,)))
    many = jax.jit(jax.vmap(network.init))(jax.random.split(jax.random.key(0), 4000))
    kernels = np.asarray(many["params"]["heads_0"]["kernel"])
    error = 1 / np.sqrt(4000)
    assert np.abs(kernels.mean(0)).max() < 4 * 0.5 * error
    assert np.abs((kernels**2).mean(0) - 0.25).max() < 4 * 0.25 * error
    assert np.abs((kernels > 0).mean(0) - 0.5).max() < 4 * 0.5 * error


def test_init_is_reproducible_and_no_two_kernels_are_equal():
    network = networks.actor_critic(VECTOR, 4, Options(hidden=(4, 4)), actor_gain=1.0)
    one, again, other = start(network, 1), start(network, 1), start(network, 2)
    jax.tree.map(np.testing.assert_array_equal, one, again)
    kernels = [leaf for tree in (one, other) for _, leaf in leaves(tree) if leaf.shape == (4, 4)]
    assert len(kernels) == 10
    assert not any(np.allclose(a, b) for i, a in enumerate(kernels) for b in kernels[:i])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("obs", "kind", "num_rows", "options"),
    [
        (BOARD, "minatar", 4, {}),
        (BOARD, "minatar", 256, {}),
        (SMALL_IMAGE, "nature", 4, {}),
        (SMALL_IMAGE, "nature", 11, {}),
        slow(SMALL_IMAGE, "nature", 24, dict(noisy=True, dueling=True)),
        slow(SMALL_IMAGE, "dqn2013", 24, dict(layer_norm=True)),
        slow(SMALL_IMAGE, "impala", 12, {}),
    ],
)
def test_convolution_implementation_does_not_change_loss_or_gradient(obs, kind, num_rows, options, monkeypatch):
    """The number of blocks has no effect either. For XLA on a CPU, 24 images are three blocks and 12 are two.

    11 images are one block, 256 boards are two.
    """
    weight = jnp.arange(1.0, num_rows + 1)[:, None] / num_rows  # detects reordered rows

    def answer(way):
        """Parameters, a loss, and its gradient."""
        with monkeypatch.context() as patched:
            compute_by(way, patched)
            network = networks.network(obs, 3, Options(kind=kind, hidden=(16,), **options))
            x, noise = draw(obs, num_rows), network.noise(jax.random.key(3), (num_rows,))
            loss = lambda params: jnp.sum(weight * network.apply(params, x, noise) ** 2)
            params = start(network)
            return params, jax.jit(jax.value_and_grad(loss))(params)

    (params, expected), *others = map(answer, ("xla", *(way for way in WAYS if way != "xla")))
    for other, found in others:
        jax.tree.map(np.testing.assert_array_equal, params, other)
        for one, two in zip(jax.tree.leaves(expected), jax.tree.leaves(found)):
            np.testing.assert_allclose(one, two, rtol=1e-3, atol=1e-4 * float(jnp.abs(one).max()))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_rows", "widths"), [(5, (7, 3)), (384, (7, 3)), (5, (9, 20)), (384, (9, 20)), (128, (64, 64))]
)
def test_dot_on_cpu_has_gradient_of_matmul(num_rows, widths):
    x, kernel = (
        jax.random.normal(jax.random.key(0), (2, num_rows, widths[0])),
        jax.random.normal(jax.random.key(1), widths),
    )
    x = x.reshape(-1, widths[0])
    loss = lambda product: lambda x, kernel: jnp.sum(jnp.sin(product(x, kernel)))
    expected = jax.grad(loss(jnp.matmul), argnums=(0, 1))(x, kernel)
    for one, other in zip(expected, jax.grad(loss(matmul.dot_on_cpu), argnums=(0, 1))(x, kernel)):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


def test_kernel_gradient_is_compiled_with_transposed_operand():
    """XLA would fold the transpose into the product. That is slower and does not change results."""
    if jax.default_backend() != "cpu":
        pytest.skip("only for CPUs")
    loss = lambda kernel, x: jnp.sum(matmul.dot_on_cpu(x, kernel) ** 2)
    compiled = lambda f: jax.jit(f).lower(jnp.ones((1024, 64)), jnp.ones((1024, 64))).compile().as_text()
    folded = "lhs_contracting_dims={0}, rhs_contracting_dims={0}"
    assert folded in compiled(lambda x, g: x.T @ g)  # XLA folds a plain product
    assert folded not in compiled(lambda x, _: jax.grad(loss)(jnp.ones((64, 64)), x))


def test_products_with_few_columns_are_compiled_in_given_order():
    """XLA would fold (g^T x)^T into x^T g. That is several times slower and does not change results."""
    if jax.default_backend() != "cpu":
        pytest.skip("only for CPUs")
    x, kernel = jnp.ones((500, 64)), jnp.ones((64, 3))
    dots = lambda f, *args: re.findall(r"= f32\[([\d,]+)\]\S* dot\(", jax.jit(f).lower(*args).compile().as_text())
    loss = lambda kernel: jnp.sum(matmul.dot_on_cpu(x, kernel) ** 2)
    assert "3,64" in dots(jax.grad(loss), kernel) and "64,3" not in dots(jax.grad(loss), kernel)
    assert dots(lambda x, g: (g.T @ x).T, x, jnp.ones((500, 3))) == ["64,3"]  # XLA folds a plain product
    images, patches = jnp.ones((2, 9, 9, 7)), jnp.ones((3, 3, 7, 5))
    loss = lambda kernel: jnp.sum(conv._sum_of_products(images, kernel, (1, 7, 7)) ** 2)
    assert "5,7" in dots(jax.grad(loss), patches) and "7,5" not in dots(jax.grad(loss), patches)


@pytest.mark.slow
@pytest.mark.parametrize("obs", [VECTOR, BOARD])
def test_bfloat16_keeps_parameters_outputs_and_gradients_in_float32(obs):
    """Parameters, outputs and gradients are float32; bfloat16 has 8 bits, so results agree to a few percent."""
    exact, coarse = (
        networks.actor_critic(obs, 3, Options(dtype=dtype, layer_norm=True, hidden=(32,)), actor_gain=1.0)
        for dtype in (jnp.float32, jnp.bfloat16)
    )
    params, x = start(coarse), draw(obs, 8)
    jax.tree.map(np.testing.assert_array_equal, params, start(exact))
    gradient = jax.jit(jax.grad(lambda params: jnp.sum(coarse.both(params, x)[0])))(params)
    assert {leaf.dtype for tree in (params, gradient) for leaf in jax.tree.leaves(tree)} == {jnp.dtype(jnp.float32)}
    for one, other in zip(jax.jit(exact.both)(params, x), jax.jit(coarse.both)(params, x)):
        assert other.dtype == jnp.float32
        np.testing.assert_allclose(one, other, atol=0.05 * float(jnp.abs(one).max()))


@pytest.mark.parametrize("shape", [(), (8,)])
def test_noisy_network_in_bfloat16_approximates_float32(shape):
    """With noise that all rows share, and with separate noise for each row."""
    options = Options(hidden=(32,), noisy=True)
    exact, coarse = (networks.network(VECTOR, 3, options._replace(dtype=d)) for d in (jnp.float32, jnp.bfloat16))
    params, x, noise = start(exact), draw(VECTOR, 8), exact.noise(jax.random.key(1), shape)
    loss = lambda network: jax.jit(jax.value_and_grad(lambda params: jnp.sum(network.apply(params, x, noise) ** 2)))
    (one, gradient), (other, coarse_gradient) = loss(exact)(params), loss(coarse)(params)
    assert {leaf.dtype for leaf in jax.tree.leaves(coarse_gradient)} == {jnp.dtype(jnp.float32)}
    np.testing.assert_allclose(one, other, rtol=0.05)
    for wanted, found in zip(jax.tree.leaves(gradient), jax.tree.leaves(coarse_gradient)):
        np.testing.assert_allclose(wanted, found, atol=0.1 * float(jnp.abs(wanted).max()))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("obs", "dtype", "scale"),
    [
        (spec(36, 36, dtype=jnp.uint8), jnp.uint8, 255),
        (spec(16, 32, 3, dtype=jnp.uint8), jnp.uint8, 255),
        (spec(15, 32, 3, dtype=jnp.uint8), jnp.uint8, 1),
        (spec(6, dtype=jnp.int32), jnp.int32, 1),
        (BOARD, jnp.bool_, 1),
    ],
)
def test_uint8_images_are_divided_by_255_and_other_inputs_are_not(obs, dtype, scale):
    as_floats = networks.network(ShapeDtypeStruct(obs.shape, jnp.float32), 3, Options(hidden=(8,)))
    params, x = start(as_floats), draw(obs, 4)
    assert x.dtype == dtype
    result = jax.jit(networks.network(obs, 3, Options(hidden=(8,))).apply)(params, x)
    expected = jax.jit(as_floats.apply)(params, x.astype(jnp.float32) / scale)
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [slow("impala"), "minatar", "mlp"])
def test_uint8_255_equals_float_1_for_every_kind(kind):
    """The image is too small for the nature network, or is part of a dict."""
    within = (lambda x: {"part": x}) if kind == "mlp" else lambda x: x
    make = lambda dtype: networks.network(within(spec(20, 20, 3, dtype=dtype)), 3, Options(kind=kind, hidden=(8,)))
    params = start(make(jnp.float32))
    white, one = (within(jnp.full((20, 20, 3), *of)) for of in ((255, jnp.uint8), (1, jnp.float32)))
    found, wanted = make(jnp.uint8).apply(params, white), make(jnp.float32).apply(params, one)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["nature", slow("impala"), "minatar", "mlp"])
def test_float_input_of_image_network_is_not_divided_by_255(kind):
    """PPO passes standardized float32 observations to networks for uint8 images."""
    bytes_, floats = (
        networks.network(spec(40, 40, 3, dtype=dtype), 3, Options(kind=kind, hidden=(8,)))
        for dtype in (jnp.uint8, jnp.float32)
    )
    params, x = start(floats), jax.random.normal(jax.random.key(5), (2, 40, 40, 3))
    np.testing.assert_allclose(bytes_.apply(params, x), floats.apply(params, x), rtol=1e-5, atol=1e-6)


def test_tree_observation_is_concatenated():
    tree, flat = networks.network(TREE, 3), networks.network(spec(7), 3)
    params, x = start(tree), draw(TREE, 5)
    side_by_side = jnp.concatenate([x["grid"].reshape(5, 6).astype(jnp.float32), x["speed"][:, None]], axis=-1)
    np.testing.assert_allclose(tree.apply(params, x), flat.apply(params, side_by_side), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("obs", "kind"), [(VECTOR, "mlp"), (spec(10, 10, 4), "minatar")])
def test_layer_norm_removes_scale_of_observation(obs, kind):
    """Initial biases are zero, so the input of layer norm is proportional to the observation."""
    network = networks.network(obs, 3, Options(kind=kind, layer_norm=True))
    params, x = start(network), draw(obs, 5)
    apply = jax.jit(network.apply)
    np.testing.assert_allclose(apply(params, 100 * x), apply(params, 10 * x), rtol=1e-2, atol=1e-2)


def test_activation_option_is_applied():
    """With an identity kernel, the features are relu or tanh of the observation."""
    for name, function in (("relu", nn.relu), ("tanh", jnp.tanh)):
        torso = torsos.make(VECTOR, Options(hidden=(4,), activation=name))
        params = {"params": {"mlp": {"Dense_0": {"kernel": jnp.eye(4), "bias": jnp.zeros(4)}}}}
        x = draw(VECTOR, 5)
        np.testing.assert_allclose(torso.apply(params, x), function(x), rtol=1e-5, atol=1e-6)


# Noisy layers


def test_noisy_dense_matches_equation_10():
    """The oracle computes each weight in numpy, for several inputs and outputs."""
    layer = dense.NoisyDense(3, gain=1.0)
    rng = np.random.default_rng(0)
    mean, spread, x = rng.normal(size=(4, 3)), rng.normal(size=(4, 3)), rng.normal(size=(5, 4))
    bias, spread_bias, noise = rng.normal(size=3), rng.normal(size=3), rng.normal(size=7)
    params = {"kernel": mean, "bias": bias, "spread_kernel": spread, "spread_bias": spread_bias}
    f = np.sign(noise) * np.sqrt(np.abs(noise))
    expected = x @ (mean + spread * np.outer(f[:4], f[4:])) + bias + spread_bias * f[4:]
    variables = jax.tree.map(jnp.float32, {"params": params, "noise": {"noise": noise}})
    np.testing.assert_allclose(layer.apply(variables, jnp.float32(x)), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_noisy_network_uses_separate_noise_for_each_row():
    """Rows with equal observations differ, and each matches a call with its noise alone.

    Rows are equal with shared noise and without noise.
    """
    network = networks.network(VECTOR, 3, Options(num_atoms=5, hidden=(8, 8), noisy=True, dueling=True))
    params, x = start(network), jnp.ones((6, 4))
    noise = network.noise(jax.random.key(1), (6,))
    assert len(jax.tree.leaves(noise)) == 5  # each dense layer and each head
    apply = jax.jit(network.apply)
    together = apply(params, x, noise)
    assert all(np.abs(together[i] - together[j]).max() > 1e-3 for i in range(6) for j in range(i))
    alone = apply(params, x[2], jax.tree.map(lambda leaf: leaf[2], noise))
    np.testing.assert_allclose(together[2], alone, rtol=1e-4, atol=1e-5)
    shared = apply(params, x, network.noise(jax.random.key(2), ()))
    for same in (shared, apply(params, x)):
        np.testing.assert_allclose(same, jnp.broadcast_to(same[0], same.shape), rtol=1e-5, atol=1e-6)
    assert np.abs(shared[0] - apply(params, x)[0]).max() > 1e-3


@pytest.mark.slow
def test_shared_noise_matches_same_noise_repeated_for_each_row():
    """Shared noise needs one product with the noisy weights, separate noise needs two. Gradients agree too."""
    network = networks.network(VECTOR, 3, Options(hidden=(8,), noisy=True))
    params, x, noise = start(network), draw(VECTOR, 6), network.noise(jax.random.key(1), ())
    each = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (6, *leaf.shape)), noise)
    gradient = jax.jit(jax.grad(lambda params, noise: (network.apply(params, x, noise) ** 2).sum()))
    np.testing.assert_allclose(network.apply(params, x, noise), network.apply(params, x, each), rtol=1e-4, atol=1e-5)
    jax.tree.map(
        partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-4), gradient(params, noise), gradient(params, each)
    )


def test_noise_is_empty_without_noisy_layers_and_separate_for_each_layer():
    assert networks.network(VECTOR, 3).noise(jax.random.key(0), (7,)) == ()
    noise = networks.network(VECTOR, 3, Options(hidden=(8,), noisy=True)).noise(jax.random.key(0), (2, 7))
    parts = [np.asarray(leaf) for leaf in jax.tree.leaves(noise)]
    assert sorted(part.shape for part in parts) == [(2, 7, 8 + 3), (2, 7, 4 + 8)]
    numbers = np.concatenate([part.reshape(-1) for part in parts])
    assert len(np.unique(numbers)) == numbers.size


def test_noisy_spreads_start_as_in_paper_and_have_gradient():
    """Spreads of weights and biases start at 0.5 / sqrt(inputs). Their gradient is 0 only without noise."""
    network = networks.network(VECTOR, 3, Options(hidden=(16,), noisy=True))
    params, x = start(network), draw(VECTOR, 5)
    spreads = {path: leaf for path, leaf in leaves(params) if "spread" in path}
    assert sorted({leaf.shape for leaf in spreads.values()}) == [(3,), (4, 16), (16,), (16, 3)]
    for path, leaf in spreads.items():
        np.testing.assert_allclose(leaf, 0.5 / np.sqrt(16 if "heads" in path else 4), rtol=1e-6)
    gradient = jax.jit(jax.grad(lambda params, noise: (network.apply(params, x, noise) ** 2).sum()))
    noisy, quiet = gradient(params, network.noise(jax.random.key(0), ())), gradient(params, ())
    size = lambda tree: {path: float(jnp.abs(leaf).max()) for path, leaf in leaves(tree) if "spread" in path}
    assert min(size(noisy).values()) > 0
    assert set(size(quiet).values()) == {0.0}


# Dueling streams and distributions


@pytest.mark.parametrize(("num_atoms", "shape"), [(None, (3,)), (1, (3, 1)), (5, (3, 5))])
@pytest.mark.parametrize("obs", [VECTOR, BOARD])
@pytest.mark.parametrize("dueling", [False, True])
def test_num_atoms_adds_one_output_axis(obs, dueling, num_atoms, shape):
    network = networks.network(obs, 3, Options(num_atoms=num_atoms, dueling=dueling, hidden=(8,)))
    params = jax.eval_shape(network.init, jax.random.key(0))
    for axes in ((), (2, 5)):
        output = jax.eval_shape(network.apply, params, draw(obs, *axes))
        assert (output.shape, output.dtype) == ((*axes, *shape), jnp.float32)


@pytest.mark.parametrize("num_atoms", [None, 5])
def test_dueling_mean_over_actions_is_state_value(num_atoms):
    """For each atom, a constant added to all advantages has no effect; added to the value, it shifts all actions."""
    network = networks.network(VECTOR, 3, Options(num_atoms=num_atoms, dueling=True, hidden=(8,)))
    params, x = start(network), draw(VECTOR, 6)
    apply, axis = jax.jit(network.apply), -1 if num_atoms is None else -2
    size = num_atoms or 1

    def with_bias(head, bias):
        heads = {head: {**params["params"][head], "bias": bias}}
        return apply({"params": {**params["params"], **heads}}, x)

    output = apply(params, x)
    common = jnp.arange(1.0, size + 1)
    more_advantage = with_bias("heads_1", jnp.tile(common, 3))
    np.testing.assert_allclose(more_advantage, output, rtol=1e-4, atol=1e-5)
    more_value = with_bias("heads_0", common)
    np.testing.assert_allclose(
        more_value - output, jnp.broadcast_to(common if num_atoms else 1.0, output.shape), rtol=1e-4
    )
    one_action = with_bias("heads_1", jnp.repeat(jnp.float32([3, 0, 0]), size))  # minus the mean: 2, -1, -1
    difference = np.moveaxis(np.asarray(one_action - output), axis, -1)
    np.testing.assert_allclose(difference, np.broadcast_to([2, -1, -1], difference.shape), rtol=1e-4)
    np.testing.assert_allclose(one_action.mean(axis), output.mean(axis), rtol=1e-4, atol=1e-5)


def test_dueling_streams_share_all_but_last_hidden_layer():
    network = networks.network(VECTOR, 3, Options(hidden=(8, 5), dueling=True))
    kernels = sorted(leaf.shape for path, leaf in leaves(start(network)) if "kernel" in path)
    assert kernels == sorted([(4, 8), (8, 5), (8, 5), (5, 1), (5, 3)])


@pytest.mark.slow
def test_network_concatenates_image_features_with_vector():
    """Like a critic of images and actions: both parts affect the output, and leading axes are kept."""
    shape = (10, 10, 4)
    parts = jax.ShapeDtypeStruct(shape, jnp.uint8), jax.ShapeDtypeStruct((2,), jnp.float32)
    critic = networks.network(parts, 1, Options(kind="minatar", hidden=(8,)))
    params = critic.init(jax.random.key(0))
    key_image, key_action = jax.random.split(jax.random.key(1))
    image = jax.random.randint(key_image, (3, 2, *shape), 0, 255).astype(jnp.uint8)
    action = jax.random.normal(key_action, (3, 2, 2))
    value = critic.apply(params, (image, action))
    assert value.shape == (3, 2, 1)
    one = critic.apply(params, (image[1, 1], action[1, 1]))
    np.testing.assert_allclose(one, value[1, 1], rtol=1e-4, atol=1e-5)
    assert (critic.apply(params, (image, -action)) != value).all()
    assert (critic.apply(params, (255 - image, action)) != value).all()


@pytest.mark.parametrize(
    ("shapes", "dtype", "kind"),
    [
        ([(64, 64, 3), (2,)], jnp.uint8, "nature"),
        ([(4, 84, 84), (2,)], jnp.uint8, "nature"),
        ([(20, 20, 3), (2,)], jnp.uint8, "minatar"),
        ([(7, 7, 3), (2,)], jnp.uint8, "mlp"),  # object numbers, as in MiniGrid
        ([(64, 64, 3), (2,)], jnp.float32, "mlp"),
        ([(64, 64, 3), (64, 64, 3)], jnp.uint8, "mlp"),
        ([(7, 7, 3), (64, 64, 3)], jnp.uint8, "nature"),
        ([(3,), (2,)], jnp.uint8, "mlp"),
    ],
)
def test_choose_kind_uses_convolutions_for_image_next_to_vector(shapes, dtype, kind):
    parts = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    assert torsos.choose_kind(parts) == kind


def test_mlp_is_not_noisy_unless_asked():
    from jaxrl_fast.networks.torsos.mlp import MLP

    assert MLP.noisy is False
