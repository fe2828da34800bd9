"""networks.memory: GRU and LSTM against flax, LRU against a complex recurrence, sequences against single steps."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import ShapeDtypeStruct

from jaxrl_fast import networks
from jaxrl_fast.networks import Options, memory
from jaxrl_fast.utils import target

pytestmark = pytest.mark.unit

KINDS = ("gru", "lstm", "lru")
OBS = ShapeDtypeStruct((3,), jnp.float32)
B, L, F, SIZE = 3, 7, 5, 4


def sequences(seed=0):
    """Features [B, L, F], and resets [B, L]: at the first and last step, at two successive steps, and at no step."""
    reset = np.zeros((B, L), bool)
    reset[0, [0, L - 1]] = reset[1, [2, 3]] = True
    return jax.random.normal(jax.random.key(seed), (B, L, F)), jnp.array(reset)


def make_memory(kind, seed=1):
    """A memory, its parameters, and a carry [B, ...] in the middle of an episode."""
    layer = memory.make(kind, SIZE)
    x, reset = sequences()
    carry = jax.tree.map(lambda z: jax.random.normal(jax.random.key(seed), (B, *z.shape)), layer.initial_carry(SIZE))
    params = layer.init(jax.random.key(seed + 1), carry, x, reset)
    drawn = jax.tree.map(lambda p: p + 0.1 * jax.random.normal(jax.random.key(7), p.shape), params)  # biases too
    return layer, drawn, carry


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_sequence_matches_single_steps_and_reset_restores_initial_carry(kind):
    layer, params, start = make_memory(kind)
    x, reset = sequences()
    carry, expected = start, []
    for i in range(L):
        carry, y = layer.apply(params, carry, x[:, i])
        expected.append(y)
        carry = jax.tree.map(lambda c, i=i: jnp.where(reset[:, i, None], 0.0, c), carry)
    last, outputs = jax.jit(layer.apply)(params, start, x, reset)
    np.testing.assert_allclose(outputs, np.stack(expected, 1), rtol=1e-5, atol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), last, carry)
    for after, zero in zip(jax.tree.leaves(last), jax.tree.leaves(layer.initial_carry(SIZE)), strict=True):
        assert np.array_equal(after[0], zero) and not np.array_equal(after[1], zero)


def test_gru_matches_flax():
    layer, params, carry = make_memory("gru")
    x = sequences()[0][:, 0]
    own = params["params"]
    names = ("r", "z", "n")
    parts = {f"i{n}": {"kernel": k, "bias": b} for n, k, b in zip(
        names, np.split(own["input_kernel"], 3, 1), np.split(own["input_bias"], 3), strict=True)}  # fmt: skip
    parts |= {f"h{n}": {"kernel": k} for n, k in zip(names, np.split(own["hidden_kernel"], 3, 1), strict=True)}
    parts["hn"]["bias"] = own["hidden_bias"]
    expected = nn.GRUCell(SIZE).apply({"params": parts}, carry, x)
    got = layer.apply(params, carry, x)
    np.testing.assert_allclose(got[1], expected[1], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(got[0], got[1])


def test_lstm_matches_flax():
    layer, params, carry = make_memory("lstm")
    x = sequences()[0][:, 0]
    own = params["params"]
    names = ("i", "f", "g", "o")
    parts = {f"i{n}": {"kernel": k} for n, k in zip(names, np.split(own["input_kernel"], 4, 1), strict=True)}
    parts |= {f"h{n}": {"kernel": k, "bias": b} for n, k, b in zip(
        names, np.split(own["hidden_kernel"], 4, 1), np.split(own["input_bias"], 4), strict=True)}  # fmt: skip
    expected, y = nn.LSTMCell(SIZE).apply({"params": parts}, carry, x)
    got, output = layer.apply(params, carry, x)
    np.testing.assert_allclose(output, y, rtol=1e-5, atol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, expected)


def test_lru_matches_complex_recurrence():
    layer, params, carry = make_memory("lru")
    x, reset = sequences()
    p = jax.tree.map(np.float64, params["params"])
    sigmoid = lambda z: 1 / (1 + np.exp(-z))
    u = np.float64(x) @ p["input_kernel"] + p["input_bias"]
    v = (u - u.mean(-1, keepdims=True)) / np.sqrt(u.var(-1, keepdims=True) + 1e-6)
    v = v * p["LayerNorm_0"]["scale"] + p["LayerNorm_0"]["bias"]
    eigenvalue = np.exp(-np.exp(p["nu_log"]) + 1j * np.exp(p["theta_log"]))
    b_matrix, c_matrix = p["B"][:, :SIZE] + 1j * p["B"][:, SIZE:], p["C"][:SIZE] - 1j * p["C"][SIZE:]
    state = np.complex128(carry[0]) + 1j * np.complex128(carry[1])
    expected = []
    for i in range(L):
        state = eigenvalue * state + np.exp(p["gamma_log"]) * (v[:, i] @ b_matrix)
        y = (state @ c_matrix).real + p["D"] * v[:, i]
        expected.append(u[:, i] + y * sigmoid(np.float64(nn.gelu(y)) @ p["gate_kernel"] + p["gate_bias"]))
        state = np.where(np.array(reset)[:, i, None], 0, state)
    _, outputs = layer.apply(params, carry, x, reset)
    np.testing.assert_allclose(outputs, np.stack(expected, 1), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_lru_init_is_stable_with_unit_gain():
    layer = memory.make("lru", 512)
    params = layer.init(jax.random.key(0), layer.initial_carry(512), jnp.zeros(8))["params"]
    radius = np.exp(-np.exp(params["nu_log"]))
    assert 0.9 <= radius.min() < 0.91 and 0.99 < radius.max() <= 0.999
    np.testing.assert_allclose(np.exp(params["gamma_log"]) ** 2 + radius**2, 1, rtol=1e-4)


@pytest.mark.slow
def test_lru_eigenvalues_begin_uniform_in_their_ring():
    """Of 4096, |lambda|^2 is uniform between 0.9^2 and 0.999^2, and phases are uniform up to pi / 10."""
    layer = memory.make("lru", 4096)
    carry = jax.tree.map(lambda x: x[None], layer.initial_carry(4096))
    drawn = layer.init(jax.random.key(0), carry, jnp.zeros((1, F)))["params"]
    square, phase = np.exp(-2 * np.exp(drawn["nu_log"])), np.exp(drawn["theta_log"])
    for found, low, high in ((square, 0.9**2, 0.999**2), (phase, 0, np.pi / 10)):
        quantiles = np.quantile(found, [0, 0.25, 0.5, 0.75, 1])
        np.testing.assert_allclose(quantiles, np.linspace(low, high, 5), atol=0.03 * (high - low))


@pytest.mark.slow
def test_lru_parallel_scan_matches_sequential_scan():
    layer, params, start = make_memory("lru")
    x, reset = sequences()
    in_turn = layer.apply(params, start, x, reset)
    with target.tracing_for("any"):
        in_parallel = layer.apply(params, start, x, reset)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), in_parallel, in_turn)
    assert not np.array_equal(in_parallel[1], in_turn[1]), "the order of operations must differ"


@pytest.mark.slow
def test_networks_with_memory_depend_on_carry():
    options = dict(memory="gru", memory_size=SIZE, hidden=(6,))
    obs = jax.random.normal(jax.random.key(0), (B, L, 3))
    reset = sequences()[1]
    both, values = (
        networks.actor_critic(OBS, 2, Options(**options)),
        networks.network(OBS, 2, Options(num_atoms=5, dueling=True, **options)),
    )
    for network, shape in ((both, (B, L, 2)), (values, (B, L, 2, 5))):
        params = network.init(jax.random.key(1))
        carry = jax.tree.map(lambda z: jnp.ones((B, *z.shape)), network.initial_carry)
        outputs, _ = network.unroll(params, obs, carry, reset)
        outputs = outputs[0] if network is both else outputs
        first, _ = network.step(params, obs[:, 0], carry)
        assert outputs.shape == shape
        np.testing.assert_allclose(first, outputs[:, 0], rtol=1e-5, atol=1e-6)
        fresh, _ = network.step(params, obs[:, 0], jax.tree.map(jnp.zeros_like, carry))
        assert not np.allclose(fresh, first), "the outputs must depend on the carry"


class Squares(nn.Module):
    """A custom torso with features [B, H, W, C]."""

    @nn.compact
    def __call__(self, obs):
        return self.param("scale", nn.initializers.ones, ()) * obs**2


BOARD = ShapeDtypeStruct((5, 4, 2), jnp.bool_)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("torso", "spec", "hidden"),
    [
        ("simba", OBS, (6, 6)),
        ("minatar", BOARD, (6,)),
        (f"{__name__}:Squares", BOARD, (6, 6)),
    ],
)
def test_dueling_after_memory_unrolls_as_single_steps(torso, spec, hidden):
    """The width of the memory, 4, differs from that of the layers, and one layer leaves the trunk without any."""
    num_steps = 3
    options = dict(kind=torso, hidden=hidden, dueling=True, memory="gru", memory_size=SIZE)
    network = networks.network(spec, 2, Options(**options))
    params = network.init(jax.random.key(1))
    layers = params["params"]
    inputs = (layers[f"streams_{i}"]["Dense_0"]["kernel"].shape for i in range(2))
    assert [*inputs] == [(SIZE, 6), (SIZE, 6)]
    obs = jax.random.randint(jax.random.key(0), (B, num_steps, *spec.shape), 0, 2).astype(spec.dtype)
    reset = jnp.zeros((B, num_steps), bool).at[0, 1].set(True)
    carry = jax.tree.map(lambda z: jnp.ones((B, *z.shape)), network.initial_carry)
    outputs, last = jax.jit(network.unroll)(params, obs, carry, reset)
    assert outputs.shape == (B, num_steps, 2)
    step = jax.jit(network.step)
    for i in range(num_steps):
        output, carry = step(params, obs[:, i], carry)
        np.testing.assert_allclose(output, outputs[:, i], rtol=1e-4, atol=1e-5)
        carry = jax.tree.map(lambda c, i=i: jnp.where(reset[:, i, None], 0.0, c), carry)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), last, carry)


def test_make_rejects_unknown_memory():
    with pytest.raises(ValueError, match="memory: must be one of none, gru, lstm, lru, got 'rnn'"):
        memory.make("rnn", 4)


def test_lru_input_is_scaled_to_variance_one_at_first():
    """gamma is sqrt(1 - |lambda|^2) with |lambda| = exp(-exp(nu_log)) (section 3.4 of the paper)."""
    made = memory.LRU(4)
    params = jax.jit(made.init)(jax.random.key(0), made.initial_carry(4), jnp.zeros(4))["params"]
    radius = np.exp(-np.exp(np.asarray(params["nu_log"], float)))
    np.testing.assert_allclose(np.exp(params["gamma_log"]), np.sqrt(1 - radius**2), rtol=1e-4)
