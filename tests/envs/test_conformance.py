"""All backends keep the contract of `types.TimeStep`. The oracle is a plain loop over each suite's own functions.

A suite is tested if it is installed. `IN_CI` lists the suites that CI must install; with `--nightly`, it must install
all of them.
"""

import os
import subprocess
import sys
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_fast import envs
from jaxrl_fast.envs import spaces
from jaxrl_fast.envs.gymnax.batch import step_keys
from jaxrl_fast.rl import distributions
from jaxrl_fast.types import Box, Discrete, MultiDiscrete
from jaxrl_fast.utils.importing import install
from tests.helpers import own_apis, slow

IN_CI = ("pgx",)
# A few environments of each suite, with options that make episodes short.
SAMPLES = {
    "gymnax/CartPole-v1": {"max_steps_in_episode": 30},
    "gymnax/Pendulum-v1": {"max_steps_in_episode": 30},
    "brax/inverted_pendulum": {"max_steps_in_episode": 20, "backend": "positional"},
    "brax/ant": {"max_steps_in_episode": 20, "backend": "spring"},
    "craftax/Craftax-Classic-Symbolic-v1": {"max_timesteps": 30},
    "craftax/Craftax-Symbolic-v1": {"max_timesteps": 30},
    "jaxmarl/MPE_simple_v3": {"max_steps": 10},  # several players are tested in test_jaxmarl
    "jumanji/Snake-v1": {"time_limit": 15},
    "jumanji/Maze-v0": {"time_limit": 15},
    "jumanji/Minesweeper-v0": {},  # one discrete action for all combinations
    "jumanji/JobShop-v0": {},  # several discrete actions, each with a mask
    "jumanji/RubiksCube-partly-scrambled-v0": {"time_limit": 10},
    "navix/Navix-Empty-Random-5x5-v0": {"max_steps": 20},
    "navix/Navix-DoorKey-Random-16x16-v0": {"max_steps": 20},
    "pgx/2048": {"max_steps_in_episode": 30},
    "pgx/tic_tac_toe": {},
    "pgx/minatar-breakout": {"max_steps_in_episode": 30},
    "pgx/kuhn_poker": {},
    "pgx/backgammon": {},  # a player moves several times in a turn
    "playground/PendulumSwingup": {"max_steps_in_episode": 20},
    "xminigrid/MiniGrid-EmptyRandom-5x5": {"max_steps": 20},
    "xminigrid/MiniGrid-DoorKey-5x5": {"max_steps": 20},
}
PHYSICS = ("brax", "playground")
HOST = ("gymnasium/CartPole-v1", "envpool/CartPole-v1")
N, T = 4, 500  # 2000 steps per environment id
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}  # for single-use programs

INSTALLED = [env_id for env_id in SAMPLES if envs.is_installed(env_id.partition("/")[0])]
ALL = INSTALLED + [env_id for env_id in HOST if envs.is_installed(env_id.partition("/")[0])]
of = lambda ids: [slow(env_id) if env_id.startswith("pgx/") else env_id for env_id in ids]
each = pytest.mark.parametrize("env_id", of(INSTALLED), scope="module")


@pytest.fixture(autouse=True)
def allow_rank_promotion(any_ranks):
    """Allow rank promotion, which some suites rely on."""


@pytest.mark.skipif(not os.environ.get("CI"), reason="locally, only installed suites are tested")
def test_suites_of_ci_are_installed(request):
    required = set(envs.SUITES) - {"ale"} if request.config.getoption("--nightly") else IN_CI
    assert [suite for suite in required if not envs.is_installed(suite)] == []


def test_every_suite_has_a_sample():
    on_the_host = {"ale"}  # test_ale
    assert {env_id.partition("/")[0] for env_id in SAMPLES} | on_the_host == {"gymnax", *envs.SUITES}


class Played(NamedTuple):
    """A rollout of the adapter, and the same rollout by the suite's own functions. Leaves have shape [T, N]."""

    first: Any  # the time step of the reset
    begins: Any  # the step follows a last one, so it resets
    timesteps: Any
    own: Any
    in_bounds: Any  # the action lies within the suite's bounds


@cache
def make(env_id):
    return envs.make(env_id, N, **SAMPLES[env_id])


@cache
def own_api(env_id):
    backend, _, name = env_id.partition("/")
    return getattr(own_apis, backend)(name, **SAMPLES[env_id])


def random_action(spec, key, mask):
    """Return allowed actions; continuous ones also lie outside of [-1, 1]."""
    if isinstance(spec.action, Box):
        return jax.random.uniform(key, (spec.num_envs, *spec.action.shape), minval=-1.5, maxval=1.5)
    logits = jnp.zeros((spec.num_envs, spec.action.num_outputs))
    logits = distributions.masked(logits, mask)
    nums = (spec.action.num,) if isinstance(spec.action, Discrete) else spec.action.nums
    parts = jnp.split(logits, np.cumsum(nums)[:-1], axis=-1)
    choices = [jax.random.categorical(jax.random.fold_in(key, i), part) for i, part in enumerate(parts)]
    return choices[0] if isinstance(spec.action, Discrete) else jnp.stack(choices, -1)


def is_in_bounds(env, own, action):
    """Return whether each environment's action lies in the suite's bounds."""
    if own.bounds:
        low, high = (jnp.broadcast_to(jnp.asarray(bound), action.shape) for bound in own.bounds)
        return ((low <= action) & (action <= high)).reshape(action.shape[0], -1).all(1)
    return (action >= 0).reshape(action.shape[0], -1).all(1)


@cache
def random_rollout(env_id):
    """Return T random steps of N environments, by the adapter and by the plain loop."""
    env, own = make(env_id), own_api(env_id)

    def one(carry, key):
        state, timestep, own_state = carry
        action = random_action(env.spec, key, timestep.action_mask)
        given = env.view.to_env_action(action)
        keys, begins = step_keys(state), timestep.last
        own_state, result = jax.vmap(own.step)(own_state, keys, given)
        state, timestep = env.step(state, action)
        choose = lambda a, b: jnp.where(begins.reshape(begins.shape + (1,) * (a.ndim - 1)), a, b.astype(a.dtype))
        starts = jax.vmap(own.of_adapter)(state.env)
        own_state = jax.tree.map(choose, starts, own_state)
        return (state, timestep, own_state), (begins, timestep, result, is_in_bounds(env, own, given))

    def run(key):
        state, timestep = env.reset(key)
        start = (state, timestep, jax.vmap(own.of_adapter)(state.env))
        _, rows = jax.lax.scan(one, start, jax.random.split(jax.random.fold_in(key, 1), T))
        return Played(timestep, *rows)

    found = jax.jit(run, compiler_options=QUICK)(jax.random.key(7))
    return jax.tree.map(np.asarray, found)


def tolerance(env_id):
    """Return the tolerance for rounding errors. Physics amplifies them, and two programs sum in different orders."""
    is_physics = env_id.startswith(PHYSICS)
    return {"rtol": 2e-3, "atol": 2e-3} if is_physics else {"rtol": 1e-6, "atol": 1e-7}


def flattened(obs):
    """Return an observation [T, N, ...] flattened to float64 [T, N, num]."""
    leaves = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(obs)]
    return np.concatenate([leaf.reshape(*leaf.shape[:2], -1) for leaf in leaves], axis=-1)


@pytest.mark.slow
@each
def test_rollout_matches_loop_over_suite_functions(env_id):
    """Compare observations (including terminal ones), rewards, terminations and truncations."""
    rows = random_rollout(env_id)
    steps = ~rows.begins
    assert rows.begins.any() and steps.any()
    found, own = rows.timesteps, rows.own
    close = tolerance(env_id)
    np.testing.assert_allclose(flattened(found.obs)[steps], flattened(own.obs)[steps], **close)
    np.testing.assert_allclose(found.reward[steps], own.reward.reshape(T, N)[steps], **close)
    terminated, truncated = (np.asarray(x, bool).reshape(T, N) for x in (own.terminated, own.truncated))
    np.testing.assert_array_equal(found.discount[steps], 1.0 - terminated[steps])
    np.testing.assert_array_equal(found.last[steps], (terminated | truncated)[steps])


@each
def test_episode_returns_match_loop_over_suite_functions(env_id):
    rows = random_rollout(env_id)
    ends = np.asarray(rows.own.terminated, bool) | np.asarray(rows.own.truncated, bool)
    scores = {"found": [], "own": []}
    for i in range(N):
        totals = dict.fromkeys(scores, 0.0)
        for t in range(T):
            begins = rows.begins[t, i]
            totals["found"] += rows.timesteps.reward[t, i]
            totals["own"] += 0.0 if begins else float(rows.own.reward.reshape(T, N)[t, i])
            for name, last in (("found", rows.timesteps.last[t, i]), ("own", ends.reshape(T, N)[t, i] and not begins)):
                if last:
                    scores[name].append(totals[name])
                    totals[name] = 0.0
    assert scores["found"]
    close = tolerance(env_id)
    np.testing.assert_allclose(scores["found"], scores["own"], rtol=10 * close["rtol"], atol=10 * close["atol"])


@each
def test_step_after_last_resets_with_reward_zero_and_discount_one(env_id):
    rows = random_rollout(env_id)
    np.testing.assert_array_equal(rows.begins[1:], rows.timesteps.last[:-1])
    assert (rows.timesteps.reward[rows.begins] == 0).all()
    assert (rows.timesteps.discount[rows.begins] == 1).all()
    assert not rows.timesteps.last[rows.begins].any()


@each
def test_reset_observation_matches_suite_reset(env_id):
    env, own = make(env_id), own_api(env_id)
    key = jax.random.key(7)
    keys = jax.vmap(partial(jax.random.split, num=3))(jax.random.split(key, N))[:, 0]
    obs = jax.jit(jax.vmap(own.reset), compiler_options=QUICK)(keys)
    _, timestep = jax.jit(env.reset, compiler_options=QUICK)(key)
    expand = partial(jax.tree.map, lambda x: x[None])
    np.testing.assert_allclose(flattened(expand(timestep.obs)), flattened(expand(obs)), **tolerance(env_id))


@each
def test_time_step_dtypes_and_shapes_match_spec(env_id):
    spec, rows = make(env_id).spec, random_rollout(env_id)
    for timestep, lead in ((rows.first, (N,)), (rows.timesteps, (T, N))):
        assert jax.tree.structure(timestep.obs) == jax.tree.structure(spec.obs)
        for part, expected in zip(jax.tree.leaves(timestep.obs), jax.tree.leaves(spec.obs)):
            assert (part.dtype, part.shape) == (expected.dtype, (*lead, *expected.shape))
        for part, dtype in ((timestep.reward, np.float32), (timestep.discount, np.float32), (timestep.last, bool)):
            assert (part.dtype, part.shape) == (dtype, lead)
        if spec.has_action_mask:
            assert (timestep.action_mask.dtype, timestep.action_mask.shape) == (bool, (*lead, spec.action.num_outputs))
        else:
            assert timestep.action_mask is None


@each
def test_action_mask_matches_suite_mask(env_id):
    spec, rows = make(env_id).spec, random_rollout(env_id)
    if not spec.has_action_mask:
        assert rows.own.mask is None
        return
    expected = spaces.allowed(spec.action, jnp.asarray(rows.own.mask[~rows.begins]))
    np.testing.assert_array_equal(rows.timesteps.action_mask[~rows.begins], expected)
    assert rows.timesteps.action_mask.any(-1).all()


@each
def test_actions_are_clipped_to_suite_bounds(env_id):
    env, own = make(env_id), own_api(env_id)
    assert random_rollout(env_id).in_bounds.all()
    if isinstance(env.spec.action, Box):
        ends = jnp.stack([jnp.full(env.spec.action.shape, x) for x in (-1.0, 1.0, jnp.nan, jnp.inf)])
        given = env.view.to_env_action(ends)
        low, high = (np.broadcast_to(bound, given.shape[1:]) for bound in own.bounds)
        np.testing.assert_allclose(given, [low, high, (low + high) / 2, high], rtol=1e-6, atol=1e-7)
    else:
        nums = env.spec.action.nums if isinstance(env.spec.action, MultiDiscrete) else env.spec.action.num
        wild = jnp.stack([jnp.full(env.spec.action.shape, x, jnp.int32) for x in (-5, 2**30)])
        limits = [np.zeros(env.spec.action.shape), np.asarray(nums) - 1]
        clipped = spaces.to_env_action(env.spec, (), wild)
        np.testing.assert_array_equal(clipped, np.stack(limits))


@each
def test_reset_keys_are_distinct_and_same_seed_is_bitwise_reproducible(env_id):
    env = envs.make(env_id, 64, **SAMPLES[env_id])
    reset = jax.jit(env.reset, compiler_options=QUICK)
    (state, timestep), again, other = (reset(jax.random.key(seed)) for seed in (0, 0, 1))
    keys = np.concatenate([jax.random.key_data(state.key), state.resets.key_data, jax.random.key_data(other[0].key)])
    assert len(np.unique(keys.reshape(len(keys), -1), axis=0)) == 3 * 64
    as_bits = lambda tree: [
        np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)
        for x in jax.tree.leaves(tree)
    ]
    for a, b in zip(as_bits((state, timestep)), as_bits(again)):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
@each
def test_vmapped_seeds_match_single_seed(env_id):
    env = envs.make(env_id, 2, **SAMPLES[env_id])

    def play(key):
        def one(carry, key):
            state, timestep = carry
            carry = env.step(state, random_action(env.spec, key, timestep.action_mask))
            return carry, carry[1]

        return jax.lax.scan(one, env.reset(key), jax.random.split(jax.random.fold_in(key, 1), 30))[1]

    keys = jax.random.split(jax.random.key(3), 2)
    together = jax.jit(jax.vmap(play), compiler_options=QUICK)(keys)
    alone = jax.jit(play, compiler_options=QUICK)(keys[1])
    for a, b in zip(jax.tree.leaves(together), jax.tree.leaves(alone)):
        np.testing.assert_allclose(a[1], b, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("env_id", [env_id for env_id in ALL if env_id in HOST])
def test_host_environment_keeps_time_step_contract(env_id):
    """The step after a last one has reward 0 and resets. Observations match the spec; the env is not on the device."""
    env = envs.make(env_id, N)
    state, timestep = jax.jit(env.reset)(jax.random.key(0))
    step, num_ends = jax.jit(env.step), 0
    for _ in range(120):
        before = timestep
        state, timestep = step(state, jnp.ones(N, jnp.int32))
        assert not (timestep.last & before.last).any()
        assert (timestep.reward == jnp.where(before.last, 0.0, 1.0)).all()
        assert timestep.obs.dtype == env.spec.obs.dtype and timestep.obs.shape == (N, *env.spec.obs.shape)
        num_ends += int(timestep.last.sum())
    assert num_ends > 4 and not env.on_device
    env.host.close()


@pytest.mark.parametrize(
    ("env_id", "options", "words"),
    [
        (
            "navix/Navix-Empty-8x8",
            {},
            "'navix/Navix-Empty-8x8'; did you mean navix/Navix-Empty-8x8-v0",
        ),
        ("brax/ants", {}, "unknown environment 'brax/ants'; did you mean brax/ant?"),
        ("brax/ant", {"backend": "sprint"}, "backend: not an engine of brax, got 'sprint'; choose generalized or mjx"),
        ("jumanji/Snake", {}, "unknown environment 'jumanji/Snake'; did you mean jumanji/Snake-v1?"),
        ("jumanji/Snake-v1", {"time_limt": 3}, "jumanji/Snake-v1 has no option 'time_limt'; did you mean time_limit?"),
        ("jumanji/Connector-v3", {}, "cannot be used: it has a reward for each of several agents"),
        ("craftax/Craftax-Classic", {}, "did you mean craftax/Craftax-Classic-Symbolic-v1"),
        ("craftax/Craftax-Symbolic-v1", {"max_timestep": 9}, "no option 'max_timestep'; did you mean max_timesteps"),
        ("pgx/tictactoe", {}, "unknown environment 'pgx/tictactoe'; did you mean pgx/tic_tac_toe?"),
        ("pgx/2048", {"max_steps_in_episode": 0}, "max_steps_in_episode: must be at least 1"),
        ("navix/zzz", {}, "unknown environment 'navix/zzz'; `python -m jaxrl_fast.envs navix/` lists those of navix"),
        ("navix/Navix-Empty-8x8-v0", {"max_stps": 3}, "has no option 'max_stps'; did you mean max_steps?"),
        (
            "navix/Navix-Empty-8x8-v0",
            {"observation_fn": "symbolik"},
            "of navix, got 'symbolik'; did you mean symbolic",
        ),
        ("navix/Navix-Empty-8x8-v0", {"max_steps": 0}, "max_steps: must be at least 1, got 0"),
        ("playground/PendulumSwing", {}, "did you mean playground/PendulumSwingup"),
        ("xminigrid/MiniGrid-Empty-8x8", {"view_size": 4}, "view_size: must be odd and at least 3, got 4"),
        ("xminigrid/XLand-MiniGrid-R1-9x9", {}, "cannot be used: its rules"),
    ],
)
def test_make_rejects_wrong_id_or_option_with_one_line_message(env_id, options, words):
    if not envs.is_installed(env_id.partition("/")[0]):
        words = "is not installed"
    with pytest.raises(ValueError) as caught:
        envs.make(env_id, 2, **options)
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("suite", envs.SUITES)
def test_missing_suite_error_names_pip_extra(suite, monkeypatch):
    monkeypatch.setattr(envs, "is_installed", lambda backend: backend not in envs.SUITES)
    with pytest.raises(ValueError) as caught:
        envs.make(f"{suite}/anything", 2)
    assert str(caught.value) == f"{suite} is not installed; {install(envs.EXTRAS[suite])}"


@pytest.mark.parametrize("suite", [suite for suite in envs.SUITES if envs.is_installed(suite)])
def test_registered_ids_are_unique_and_have_suite_prefix(suite):
    ids = envs.registered(suite)
    assert len(ids) == len(set(ids)) > 1 and all(env_id.startswith(f"{suite}/") for env_id in ids)


@pytest.mark.slow
def test_unknown_id_and_listing_do_not_import_suites():
    """An unknown id is searched for in all other backends; the listing filters all names. Neither imports a suite."""
    code = (
        "import sys\nfrom jaxrl_fast import envs\nfrom jaxrl_fast.envs import __main__ as listing\n"
        "try: envs.make('NoSuchEnvironment-v1', 2)\nexcept ValueError: pass\n"
        "assert listing.main(['*CartPole*']) == 0\n"
        "names = [envs.PACKAGES.get(suite, suite) for suite in envs.SUITES]\n"
        "sys.exit(' '.join(name for name in names if name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr.strip() == ""
