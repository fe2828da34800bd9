"""Test views: which parts of an observation the names of `sees` mean, and that networks read no other part."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import ShapeDtypeStruct

from jaxrl_fast.networks import Options, actor_critic, network, views
from jaxrl_fast.networks.ensemble import critics
from jaxrl_fast.options.declare import configure
from jaxrl_fast.options.ppo import PPO

pytestmark = pytest.mark.unit
OBS = {
    "arm": {"pos": ShapeDtypeStruct((2,), jnp.float32), "vel": ShapeDtypeStruct((3,), jnp.float32)},
    "pair": (ShapeDtypeStruct((4,), jnp.float32), ShapeDtypeStruct((1,), jnp.float32)),
    "state": ShapeDtypeStruct((5,), jnp.float32),
}


def draw(seed=0, batch=(6,), obs=OBS):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(size=(*batch, *x.shape)), jnp.float32), obs)


@pytest.mark.parametrize(
    ("names", "seen"),
    [
        (["state"], {"state": OBS["state"]}),
        (["arm"], {"arm": OBS["arm"]}),
        (["arm/vel", "state"], {"arm": {"vel": OBS["arm"]["vel"]}, "state": OBS["state"]}),
        (["pair/1"], {"pair": (OBS["pair"][1],)}),
        (["arm", "pair", "state"], OBS),
        (["all"], OBS),
        (["all", "state"], OBS),
    ],
    ids=" ".join,
)
def test_names_select_parts_in_their_structure(names, seen):
    view = views.view("actor.sees", OBS, names)
    assert view(OBS) == seen
    assert (view is views.everything) == (seen == OBS)
    obs = draw(batch=(2, 3))
    chosen = view(obs)
    assert jax.tree.structure(chosen) == jax.tree.structure(seen)
    assert all(any(x is y for y in jax.tree.leaves(obs)) for x in jax.tree.leaves(chosen))


@pytest.mark.parametrize(
    ("obs", "names", "message"),
    [
        (OBS, ["stat"], "which are arm, arm/pos, arm/vel, pair, pair/0, pair/1, state, got stat; did you mean state"),
        (OBS, ["arm/x"], "got arm/x; did you mean arm"),
        (OBS, ["7"], "got 7; use all or some of these"),
        (OBS, [], "got none; use all or some of these"),
        (OBS["state"], ["0"], r"needs an observation with parts, such as a Dict, got 0 for one array \[5\]; use all"),
    ],
)
def test_unknown_part_is_refused_with_those_that_exist(obs, names, message):
    with pytest.raises(ValueError, match=f"critic.sees: .*{message}") as error:
        views.view("critic.sees", obs, names)
    assert "\n" not in str(error.value)


def views_of(actor, critic):
    return views.views(configure(PPO, actor=dict(sees=actor), critic=dict(sees=critic)), OBS)


def test_same_parts_are_one_view_so_that_networks_stay_alike():
    one, other = views_of(["arm", "state"], ["state", "arm"])
    assert one is other
    one, other = views_of(["arm"], ["all"])
    assert one is not other and other is views.everything


def sensitive_to(function, obs):
    """Return the paths of the parts with a gradient that is not exactly 0."""
    gradient = jax.grad(lambda obs: (function(obs) * jnp.arange(1.0, 7)).sum())(obs)
    paths = {"/".join(str(key).strip("[]'") for key in path): x for path, x in jax.tree.leaves_with_path(gradient)}
    return {path for path, x in paths.items() if np.asarray(x).any()}


@pytest.mark.parametrize("memory", ["none", "gru"])
def test_actor_and_critic_depend_on_their_parts_alone(memory):
    net = actor_critic(OBS, 3, Options(hidden=(8,), memory=memory, memory_size=4), sees=views_of(["arm"], ["state"]))
    params, obs = net.init(jax.random.key(0)), draw()
    carry = jax.tree.map(lambda x: jnp.zeros((6, *x.shape)), net.initial_carry)
    arm, state = {"arm/pos", "arm/vel"}, {"state"}
    assert sensitive_to(lambda obs: net.step(params, obs, carry)[0].sum(-1), obs) == arm
    assert sensitive_to(lambda obs: net.act(params, obs, carry)[0].sum(-1), obs) == arm
    sequences = lambda obs: jax.tree.map(lambda x: x[:, None], obs)
    unroll = lambda obs: net.unroll(params, sequences(obs), carry, jnp.zeros((6, 1), bool) if carry else None)[0]
    assert sensitive_to(lambda obs: unroll(obs)[0].sum((1, 2)), obs) == arm
    assert sensitive_to(lambda obs: unroll(obs)[1].sum(1), obs) == state
    if not carry:
        assert sensitive_to(lambda obs: net.actor(params, obs).sum(-1), obs) == arm
        assert sensitive_to(lambda obs: net.critic(params, obs), obs) == state
    else:  # each memory remembers what its network sees
        own = lambda i: lambda obs: net.step(params, obs, carry)[1][i].sum(-1)
        assert sensitive_to(own(0), obs) == arm and sensitive_to(own(1), obs) == state


def test_images_are_shared_by_actor_and_critic_unless_these_see_different_parts():
    obs = {"image": ShapeDtypeStruct((10, 10, 2), jnp.bool_), "state": ShapeDtypeStruct((5,), jnp.float32)}
    given = lambda **sees: {name: dict(sees=parts) for name, parts in sees.items()}
    of = lambda actor, critic: views.views(configure(PPO, **given(actor=actor, critic=critic)), obs)
    has = lambda sees: actor_critic(obs, 2, Options(kind="minatar", hidden=(8,)), sees=sees).init(jax.random.key(0))
    assert "critic_torso" not in has(of(["image"], ["image"]))["params"]
    params = has(of(["image"], ["all"]))["params"]
    assert (
        params["critic_torso"]["mlp"]["Dense_0"]["kernel"].shape[0]
        == 5 + params["torso"]["mlp"]["Dense_0"]["kernel"].shape[0]
    )


def test_critics_of_actions_see_their_parts_and_the_action():
    view = views_of(["arm"], ["state", "pair"])[1]
    net = views.through(view, critics(view(OBS), 2, 3, Options(hidden=(8,))), with_action=True)
    params, obs = net.init(jax.random.key(0)), draw()
    action = draw(1, obs=ShapeDtypeStruct((2,), jnp.float32))
    q = lambda obs: net.apply(params, (obs, action)).sum(0)
    assert sensitive_to(q, obs) == {"pair/0", "pair/1", "state"}
    kernel = params["params"]["torso"]["mlp"]["Dense_0"]["kernel"]
    assert kernel.shape == (3, 4 + 1 + 5 + 2, 8)
    assert np.asarray(jax.grad(lambda action: net.apply(params, (obs, action)).sum())(action)).all()


def test_network_through_a_view_equals_network_of_the_part():
    view = views_of(["arm"], ["all"])[0]
    plain = network(OBS["arm"], 3, Options(hidden=(8,)))
    net = views.through(view, network(view(OBS), 3, Options(hidden=(8,))))
    params, obs = plain.init(jax.random.key(0)), draw()
    np.testing.assert_array_equal(net.apply(params, obs), plain.apply(params, obs["arm"]))
    assert views.through(views.everything, plain) is plain
