"""Test frozen pieces of a network: they stay, and the others are trained as if only they existed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_fast.networks import flat, pieces
from jaxrl_fast.options.optimizer import Adam
from jaxrl_fast.rl import optim
from jaxrl_fast.utils import target

pytestmark = pytest.mark.unit
PATHS = {
    "params/network/params/torso/mlp/Dense_0/kernel": {"torso", "actor", "actor.torso"},
    "params/network/params/critic_torso/mlp/Dense_0/kernel": {"torso", "critic", "critic.torso"},
    "params/network/params/critic_memory/hidden_bias": {"memory", "critic", "critic.memory"},
    "params/network/params/actor_head/bias": {"head", "actor", "actor.head"},
    "params/network/params/critic_head/bias": {"head", "critic", "critic.head"},
    "params/log_std": {"head", "actor", "actor.head"},
    "params/log_temperature": set(),
}


def test_pieces_of_separate_networks():
    assert pieces.pieces(PATHS) == PATHS


def test_pieces_of_one_network_of_actor_and_critic():
    found = pieces.pieces([path for path in PATHS if "critic_torso" not in path and "critic_memory" not in path])
    shared = {"torso", "actor", "actor.torso", "critic", "critic.torso"}
    assert found["params/network/params/torso/mlp/Dense_0/kernel"] == shared


def test_pieces_of_values_and_of_separate_actor_and_critics():
    values = [
        "params/params/torso/mlp/Dense_0/bias",
        "params/params/heads_1/bias",
        "params/params/streams_0/Dense_0/bias",
    ]
    assert [*pieces.pieces(values).values()] == [{"torso"}, {"head"}, {"head"}]
    names = ["x/params/actor/params/heads_0/bias", "x/batch_stats/torso/mlp/BatchRenorm_0/mean"]
    assert [*pieces.pieces(names).values()] == [{"head", "actor", "actor.head"}, {"torso", "critic", "critic.torso"}]


def numpy_adam(gradients, params, max_norm, lr=0.1, b1=0.9, b2=0.999, eps=1e-8):
    """Return parameters after steps of Adam with clipping (Kingma & Ba 2015, algorithm 1), in numpy."""
    m, v = ({name: np.zeros_like(x) for name, x in params.items()} for _ in range(2))
    for t, gradient in enumerate(gradients, 1):
        norm = np.sqrt(sum((g**2).sum() for g in gradient.values()))
        for name in params:
            g = gradient[name] * min(1, max_norm / norm)
            m[name] = b1 * m[name] + (1 - b1) * g
            v[name] = b2 * v[name] + (1 - b2) * g**2
            step = m[name] / (1 - b1**t) / (np.sqrt(v[name] / (1 - b2**t)) + eps)
            params = {**params, name: params[name] - lr * step}
    return params


@pytest.mark.parametrize("size", [3, 200], ids=["one vector", "by array"])
@pytest.mark.parametrize("packed", [False, True])
def test_other_pieces_are_trained_as_if_frozen_ones_did_not_exist(size, packed, monkeypatch):
    rng = np.random.default_rng(0)
    draw = lambda: {"torso": rng.normal(size=(size, size)), "heads_0": rng.normal(size=(size,))}
    params, gradients = draw(), [draw() for _ in range(3)]
    wanted = numpy_adam([{"heads_0": g["heads_0"]} for g in gradients], {"heads_0": params["heads_0"]}, 0.5)
    rule = optim.make_optimizer(0.1, Adam(max_grad_norm=0.5, epsilon=1e-8, freeze=("torso",)))
    tree = lambda x: {"params": jax.tree.map(lambda y: jnp.asarray(y, jnp.float32), x)}
    pack = lambda x: x
    if packed:
        monkeypatch.setattr(target, "platform", lambda: "gpu")
        pack = flat.pack
    now, state = pack(tree(params)), pack(rule.init(tree(params)))
    for gradient in gradients:
        updates, state = rule.update(pack(tree(gradient)), state, now)
        now = jax.tree.map(jnp.add, now, updates)
    found = flat.unpack(now)["params"]
    np.testing.assert_array_equal(found["torso"], np.asarray(params["torso"], np.float32))
    np.testing.assert_allclose(found["heads_0"], wanted["heads_0"], rtol=1e-4, atol=1e-5)


def test_unknown_name_is_refused_with_those_that_exist():
    known = [frozenset({"torso"}), frozenset({"head"})]
    with pytest.raises(ValueError, match=r"freeze: must be .* got heads; there are head, torso"):
        pieces.check("freeze", ["torso", "heads"], known)
