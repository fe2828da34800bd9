"""Define memories: recurrent layers between a torso and the heads, whose carry is passed from step to step.

gru   gated recurrent unit (Cho et al. 2014, "Learning phrase representations ...", as in cuDNN and flax)
lstm  long short-term memory (Hochreiter & Schmidhuber 1997, with the forget gate of Gers et al. 2000)
lru   linear recurrent unit (Orvieto et al. 2023, "Resurrecting recurrent neural networks for long sequences"),
      computed in parallel over time on a GPU
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxrl_fast import kernels
from jaxrl_fast.networks.dense import LayerNorm
from jaxrl_fast.types import Key, PyTree
from jaxrl_fast.utils import importing, target

MIN_RADIUS, MAX_RADIUS, MAX_PHASE = 0.9, 0.999, np.pi / 10  # of an LRU's initial eigenvalues, for a long memory


def make(kind: str, size: int) -> "Memory | None":
    """Return the memory of this kind with outputs of `size` numbers.

    "none" returns None, "package.module:Class" a user's subclass of Memory. Raises ValueError for another kind.
    """
    if kind == "none":
        return None
    cells: dict[str, type[Memory]] = {"gru": GRU, "lstm": LSTM, "lru": LRU}
    if ":" in kind:
        return _custom(kind)(size)
    if kind not in cells:
        raise ValueError(f"memory: must be one of none, {', '.join(cells)}, got {kind!r}; choose one of these")
    return cells[kind](size)


def _custom(name: str) -> "type[Memory]":
    """Return a user's memory. Raise ValueError if it is not a subclass of Memory."""
    found = importing.attribute(name, f"memory {name!r}")
    if not (isinstance(found, type) and issubclass(found, Memory)):
        got = importing.describe(found)
        raise ValueError(f"memory: {name} must be a subclass of {__name__}.Memory, got {got}; derive it")
    return found


class Memory(nn.Module):
    """A recurrent layer: features of a step [B, F] or of sequences [B, L, F] to outputs of `size` numbers, in float32.

    It takes the carry before the first step, [B, ...], and returns the carry after the last step, and the outputs.
    After step l of a sequence, the carry is reset where `reset[:, l]` is True (bool [B, L]). In a rollout, `reset` is
    `~steps.valid`: the first step of the next episode follows the row whose action was ignored.
    """

    size: int

    @staticmethod
    def initial_carry(size: int) -> PyTree:
        """Return the carry at the start of an episode: zeros, f32 [size] or several of these."""
        return jnp.zeros(size)

    @nn.compact
    def __call__(self, carry: PyTree, x: Array, reset: Array | None = None) -> tuple[PyTree, Array]:
        inputs, weights = self.project(x.astype(jnp.float32))
        if reset is None:
            carry, result = self.step(weights, carry, inputs)
            return carry, self.output(inputs, result)
        carry, result = self.unroll(weights, carry, _swap(inputs), reset.T)
        return carry, self.output(inputs, _swap(result))

    def project(self, x: Array) -> tuple[Array, PyTree]:
        """Return carry-independent inputs of the recurrence [..., I] for x [..., F], and its weights."""
        raise NotImplementedError

    def step(self, weights: PyTree, carry: PyTree, inputs: Array) -> tuple[PyTree, PyTree]:
        """Return the carry after a step with inputs [B, I], and the step's result."""
        raise NotImplementedError

    def unroll(self, weights: PyTree, carry: PyTree, inputs: Array, reset: Array) -> tuple[PyTree, PyTree]:
        """Return the carry after L steps with inputs [L, B, I], and their results [L, B, ...]; `reset` is [L, B]."""

        def one(carry: PyTree, row: tuple[Array, Array]) -> tuple[PyTree, PyTree]:
            inputs, reset = row
            carry, result = self.step(weights, carry, inputs)
            return _cleared(carry, reset), result

        if target.platform() != "cpu":  # the backward pass computes gates again, instead of one kernel that writes each
            one = jax.checkpoint(one, prevent_cse=False)
        return jax.lax.scan(one, carry, (inputs, reset))

    def output(self, inputs: Array, result: PyTree) -> Array:
        """Return the output [..., size] for inputs and results of any steps."""
        return result

    def dense(self, name: str, x: Array, num_outputs: int) -> Array:
        """Return the output of a dense layer, its kernel drawn as in flax."""
        kernel = self.param(f"{name}_kernel", nn.initializers.lecun_normal(), (x.shape[-1], num_outputs))
        return kernels.dense(x, kernel, self.param(f"{name}_bias", nn.initializers.zeros, (num_outputs,)))

    def gates(self, num_gates: int) -> Array:
        """Return the kernel from the last output to the gates, [size, num_gates * size], orthogonal for each gate."""
        square = nn.initializers.orthogonal()

        def draw(key: Key, shape: tuple[int, int]) -> Array:
            parts = [square(key, (shape[0], shape[0])) for key in jax.random.split(key, num_gates)]
            return jnp.concatenate(parts, axis=1)

        return self.param("hidden_kernel", draw, (self.size, num_gates * self.size))


class GRU(Memory):
    """h' = (1 - z) n + z h, with n = tanh(W_n x + r (U_n h + b)) and gates r, z = sigmoid(W x + U h)."""

    def project(self, x: Array) -> tuple[Array, PyTree]:
        bias = self.param("hidden_bias", nn.initializers.zeros, (self.size,))
        return self.dense("input", x, 3 * self.size), (self.gates(3), bias)

    def step(self, weights: PyTree, carry: PyTree, inputs: Array) -> tuple[PyTree, PyTree]:
        kernel, bias = weights
        of_x, of_h, size = inputs, carry @ kernel, self.size
        gates = jax.nn.sigmoid(of_x[..., : 2 * size] + of_h[..., : 2 * size])
        reset, update = gates[..., :size], gates[..., size:]
        new = jnp.tanh(of_x[..., 2 * size :] + reset * (of_h[..., 2 * size :] + _wide(bias, carry)))
        carry = (1 - update) * new + update * carry
        return carry, carry


class LSTM(Memory):
    """c' = f c + i g and h' = o tanh(c'), with i, f, o = sigmoid(W x + U h + b), and g with tanh instead."""

    @staticmethod
    def initial_carry(size: int) -> PyTree:
        return jnp.zeros(size), jnp.zeros(size)

    def project(self, x: Array) -> tuple[Array, PyTree]:
        return self.dense("input", x, 4 * self.size), self.gates(4)

    def step(self, weights: PyTree, carry: PyTree, inputs: Array) -> tuple[PyTree, PyTree]:
        cell, hidden = carry
        i, f, g, o = jnp.split(inputs + hidden @ weights, 4, axis=-1)
        cell = jax.nn.sigmoid(f) * cell + jax.nn.sigmoid(i) * jnp.tanh(g)
        hidden = jax.nn.sigmoid(o) * jnp.tanh(cell)
        return (cell, hidden), hidden


class LRU(Memory):
    """s' = lambda s + gamma B v, with complex diagonal lambda and v = LayerNorm(W x); the output is W x + gate * y.

    y = Re(C s') + D v, and gate = sigmoid(V gelu(y)). |lambda| = exp(-exp(nu_log)), its phase is exp(theta_log), and
    gamma is sqrt(1 - |lambda|^2) at first (section 3 of the paper). Complex numbers are pairs of real ones.
    """

    @staticmethod
    def initial_carry(size: int) -> PyTree:
        return jnp.zeros(size), jnp.zeros(size)

    def project(self, x: Array) -> tuple[Array, PyTree]:
        """Return [W x, v, gamma B v], 4 * size numbers, and lambda."""
        size, x = self.size, self.dense("input", x, self.size)
        nu = jnp.exp(self.param("nu_log", _draw_nu_log, (size,)))
        draw_phase = lambda key: jnp.log(jax.random.uniform(key, (size,), minval=1e-3, maxval=MAX_PHASE))
        phase = jnp.exp(self.param("theta_log", draw_phase))
        gamma = jnp.exp(self.param("gamma_log", lambda key: 0.5 * jnp.log(1 - jnp.exp(-2 * nu))))
        kernel = self.param("B", nn.initializers.normal((2 * size) ** -0.5), (size, 2 * size))
        v = LayerNorm()(x)
        driven = kernels.dense(v, kernel, jnp.zeros(2 * size))
        driven *= _wide(jnp.concatenate([gamma, gamma]), driven)
        radius = jnp.exp(-nu)
        return jnp.concatenate([x, v, driven], axis=-1), (radius * jnp.cos(phase), radius * jnp.sin(phase))

    def step(self, weights: PyTree, carry: PyTree, inputs: Array) -> tuple[PyTree, PyTree]:
        driven = inputs[..., 2 * self.size :]
        carry = jax.tree.map(jnp.add, _times(weights, carry), (driven[..., : self.size], driven[..., self.size :]))
        return carry, carry

    def unroll(self, weights: PyTree, carry: PyTree, inputs: Array, reset: Array) -> tuple[PyTree, PyTree]:
        if target.platform() == "cpu":
            return super().unroll(weights, carry, inputs, reset)
        driven = inputs[..., 2 * self.size : 3 * self.size], inputs[..., 3 * self.size :]
        begins = jnp.concatenate([jnp.zeros_like(reset[:1]), reset[:-1]])  # [L, B]: an episode begins here
        factor = jax.tree.map(lambda x: jnp.where(begins[..., None], 0, _wide(x, driven[0])), weights)
        first = jax.tree.map(lambda x, more: x.at[0].add(more), driven, _times(weights, carry))

        def join(earlier: PyTree, later: PyTree) -> PyTree:
            (factor, x), (next_factor, next_x) = earlier, later
            return _times(next_factor, factor), jax.tree.map(jnp.add, _times(next_factor, x), next_x)

        _, states = jax.lax.associative_scan(join, (factor, first))
        return _cleared(jax.tree.map(lambda x: x[-1], states), reset[-1]), states

    def output(self, inputs: Array, result: PyTree) -> Array:
        size = self.size
        kernel = self.param("C", nn.initializers.normal((2 * size) ** -0.5), (2 * size, size))
        skip = self.param("D", nn.initializers.normal(1.0), (size,))
        x, v = inputs[..., :size], inputs[..., size : 2 * size]
        y = kernels.dense(jnp.concatenate(result, axis=-1), kernel, jnp.zeros(size)) + _wide(skip, v) * v
        return x + y * jax.nn.sigmoid(self.dense("gate", jax.nn.gelu(y), size))


def _swap(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: x.swapaxes(0, 1), tree)


def _cleared(carry: PyTree, reset: Array) -> PyTree:
    """Return the carry [B, ...], the initial one where `reset` [B] is True."""
    return jax.tree.map(lambda x: jnp.where(reset[:, None], 0, x), carry)


def _wide(x: Array, like: Array) -> Array:
    return jnp.broadcast_to(x, like.shape)


def _times(a: PyTree, b: PyTree) -> PyTree:
    """Return the products [..., F] of complex numbers (real, imaginary) [F] or [..., F] and others [..., F]."""
    a = _wide(a[0], b[0]), _wide(a[1], b[1])
    return a[0] * b[0] - a[1] * b[1], a[0] * b[1] + a[1] * b[0]


def _draw_nu_log(key: Key, shape: tuple[int, ...]) -> Array:
    """Return log(-log |lambda|), with |lambda|^2 uniform between the squares of the two radii."""
    square = jax.random.uniform(key, shape, minval=MIN_RADIUS**2, maxval=MAX_RADIUS**2)
    return jnp.log(-0.5 * jnp.log(square))
