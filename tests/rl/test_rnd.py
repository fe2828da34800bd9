"""Random network distillation: whole updates of PPO against numpy, and the mistakes that other programs make."""

from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import yaml

import jaxrl_fast
from jaxrl_fast import train
from jaxrl_fast.agents import ppo
from jaxrl_fast.options.declare import configure
from jaxrl_fast.rl import distributions, frame_stack
from jaxrl_fast.types import Discrete, EnvSpec, Parallelism, Rollout, Transition
from tests.helpers import probes, slow
from tests.helpers.runs import records, same, stop_after

ROOT = Path(__file__).parents[2]
NUM_STEPS, NUM_ENVS = 20, 4
RND = dict(kind="rnd", features=3, share=1.0, gamma=0.8, coef=0.7, extrinsic_coef=1.5)
PPO = dict(
    rollout_length=NUM_STEPS, num_minibatches=1, num_epochs=2, hidden_sizes=(4,), learning_rate=1e-2, gamma=0.9,
    gae_lambda=0.6, clip_vloss=False, max_grad_norm=0.5, schedule="constant",
)  # fmt: skip


def agent_of(env, bonus=(), parallelism=Parallelism(), **options):
    config = configure(ppo.Config, **PPO | options | {"bonus": RND | dict(bonus)})
    return ppo.make(config, env.spec, 10, parallelism)


@cache
def two_updates(episodic=False):
    """The states before, between and after two updates on two rollouts of `probes.chain`, the rollouts and metrics."""
    env = probes.chain(NUM_ENVS)
    agent = agent_of(env, dict(episodic=episodic))
    states, rollouts, metrics = [jax.jit(agent.init)(jax.random.key(0))], [], []
    update = jax.jit(agent.update)
    for seed in range(2):
        rollouts.append(probes.experience(env, agent, states[-1], seed=10 * seed + 1))
        state, found = update(states[-1], rollouts[-1], jax.random.key(seed))
        states.append(state)
        metrics.append(found)
    return jax.device_get((jax.tree.map(plain, states), rollouts, metrics))


def plain(x):
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x


# An oracle in float64: parameters are a flat vector, gradients are central differences, and the rest are loops.


def mlp(network, x, torso="torso", head="heads_0"):
    tree = network["params"]
    for _, layer in sorted(tree[torso]["mlp"].items()):
        x = np.tanh(x @ layer["kernel"] + layer["bias"])
    return x @ tree[head]["kernel"] + tree[head]["bias"]


class Oracle:
    """PPO with the bonus: the state of two updates, from the initial state of the agent."""

    def __init__(self, state, episodic):
        leaves, self.structure = jax.tree.flatten(state.params)
        self.shapes = [x.shape for x in leaves]
        self.params = np.concatenate([np.ravel(x) for x in leaves]).astype(np.float64)
        self.target, self.episodic = state.bonus.target, episodic
        self.moment, self.square, self.count = np.zeros_like(self.params), np.zeros_like(self.params), 0
        self.seen, self.sums, self.running = [], [], np.zeros(NUM_ENVS)  # all valid rows so far

    def tree(self, params):
        parts = np.split(params, np.cumsum([np.prod(s, dtype=int) for s in self.shapes])[:-1])
        return jax.tree.unflatten(self.structure, [x.reshape(s) for x, s in zip(parts, self.shapes, strict=True)])

    def prepare(self, rollout):
        steps, params = rollout.steps, self.tree(self.params)
        next_obs = np.concatenate([steps.obs[1:], rollout.next_obs[None]]).astype(np.float64)
        self.seen.extend(next_obs[steps.valid])
        rows = np.array(self.seen)
        obs = np.clip((next_obs - rows.mean(0)) / np.sqrt(rows.var(0) + 1e-8), -5, 5)
        features = mlp(self.target, obs)
        error = ((mlp(params["bonus"]["predictor"], obs) - features) ** 2).mean(-1) * steps.valid
        for t in range(NUM_STEPS):  # forward in time, over all environments at once
            self.running = RND["gamma"] * self.running + error[t]
            self.sums.extend(self.running[steps.valid[t]])
        self.reward = error / np.sqrt(np.var(self.sums) + 1e-8)
        every = np.concatenate([steps.obs, rollout.next_obs[None]])
        outer = mlp(params["network"], every, "critic_torso", "critic_head")[..., 0]
        inner = mlp(params["bonus"]["critic"], every)[..., 0]
        own, lambda_ = np.zeros((2, NUM_STEPS + 1, NUM_ENVS)), PPO["gae_lambda"]
        value = np.array([outer, inner])
        for n in range(NUM_ENVS):
            for t in reversed(range(NUM_STEPS)):
                discount = PPO["gamma"] * steps.discount[t, n]
                error = steps.reward[t, n] + discount * outer[t + 1, n] - outer[t, n]
                own[0, t, n] = error + discount * lambda_ * (not steps.last[t, n]) * own[0, t + 1, n]
                if self.episodic:
                    discount = RND["gamma"] * steps.discount[t, n]
                    trace = lambda_ * (not steps.last[t, n])
                else:
                    discount, trace = RND["gamma"] if steps.valid[t, n] else 1.0, lambda_
                    value[1, t, n] = value[1, t, n] if steps.valid[t, n] else value[1, t + 1, n]
                error = self.reward[t, n] + discount * value[1, t + 1, n] - value[1, t, n]
                own[1, t, n] = error + discount * trace * own[1, t + 1, n]
        advantage, target = own[:, :-1], own[:, :-1] + value[:, :-1]
        ok = steps.valid
        self.explained = 1 - advantage[1][ok].var() / target[1][ok].var()
        both = RND["extrinsic_coef"] * advantage[0] + RND["coef"] * advantage[1]
        both = (both - both[ok].mean()) / (both[ok].std() + 1e-8)
        logits = mlp(params["network"], steps.obs, head="actor_head")
        old = chosen(logits, steps.action)
        return [x[ok] for x in (steps.obs, steps.action, old, both, target[0], target[1], obs, features)]

    def loss(self, params, rows):
        obs, action, old, advantage, outer, inner, next_obs, features = rows
        params = self.tree(params)
        logits = mlp(params["network"], obs, head="actor_head")
        ratio = np.exp(chosen(logits, action) - old)
        policy = np.maximum(-ratio * advantage, -np.clip(ratio, 0.8, 1.2) * advantage)
        log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        entropy = -(np.exp(log_p) * log_p).sum(-1)
        outer = (mlp(params["network"], obs, "critic_torso", "critic_head")[..., 0] - outer) ** 2
        inner = (mlp(params["bonus"]["critic"], obs)[..., 0] - inner) ** 2
        self.distance = ((mlp(params["bonus"]["predictor"], next_obs) - features) ** 2).mean(-1)
        return (policy + 0.25 * outer + 0.25 * inner - 0.01 * entropy + self.distance).mean()

    def update(self, rollout):
        rows, step = self.prepare(rollout), 1e-5
        distances = []
        for _ in range(PPO["num_epochs"]):
            self.loss(self.params, rows)
            distances.append(self.distance.mean())
            moved = [self.params + sign * step * one for one in np.eye(len(self.params)) for sign in (1, -1)]
            up_down = np.array([self.loss(params, rows) for params in moved]).reshape(-1, 2)
            gradient = (up_down[:, 0] - up_down[:, 1]) / (2 * step)
            gradient *= min(1, PPO["max_grad_norm"] / np.linalg.norm(gradient))
            self.count += 1
            self.moment = 0.9 * self.moment + 0.1 * gradient
            self.square = 0.999 * self.square + 0.001 * gradient**2
            size = np.sqrt(self.square / (1 - 0.999**self.count)) + 1e-5
            self.params = self.params - PPO["learning_rate"] * self.moment / (1 - 0.9**self.count) / size
        return np.mean(distances)


def chosen(logits, action):
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return np.take_along_axis(log_p, action[..., None], -1)[..., 0]


@pytest.mark.parametrize("episodic", [False, slow(True)])
def test_two_updates_match_numpy(episodic):
    """Every parameter, statistic and metric after two updates, whose rollouts contain ends of episodes."""
    states, rollouts, metrics = two_updates(episodic)
    oracle = Oracle(states[0], episodic)
    for state, rollout, found in zip(states[1:], rollouts, metrics, strict=True):
        assert 0 < (~rollout.steps.valid).sum() < 16
        predictor_loss = oracle.update(rollout)
        bonus, seen, sums = state.bonus, np.array(oracle.seen), np.array(oracle.sums)
        close = partial(np.testing.assert_allclose, rtol=2e-3, atol=2e-5)
        jax.tree.map(close, state.params, oracle.tree(oracle.params))
        close(bonus.seen.mean, seen.mean(0))
        close(bonus.seen.var, seen.var(0))
        close(bonus.scale.stats.var, sums.var())
        close(bonus.scale.total, oracle.running)
        close(found["predictor_loss"], predictor_loss)
        close(found["intrinsic_reward"], oracle.reward[rollout.steps.valid].mean())
        close(found["intrinsic_explained_variance"], oracle.explained, atol=2e-3)
    jax.tree.map(np.testing.assert_array_equal, states[0].bonus.target, states[2].bonus.target)


def preparer(agent):
    """A function from (state, rollout) to the state of the bonus after it, and the rows of the update."""
    prepare = jax.jit(partial(ppo.prepare, agent.explore.args[0]))
    both = lambda update: (update.state.bonus, update.rows)
    return lambda state, rollout: both(prepare(state, rollout))


def test_rows_of_a_rollout():
    """Novelty is of next observations: the first observation was not reached in the rollout, the one after it was.

    With lambda 1, targets are sums of the rewards of valid rows, discounted by the number of valid rows between them.
    """
    states, rollouts, _ = two_updates()
    agent, rollout = agent_of(probes.chain(NUM_ENVS), gae_lambda=1.0), rollouts[0]
    prepare, state = preparer(agent), jax.jit(agent.init)(jax.random.key(0))
    first = rollout._replace(steps=rollout.steps._replace(obs=jnp.asarray(rollout.steps.obs).at[0].add(7)))
    end = rollout._replace(next_obs=jnp.asarray(rollout.next_obs).at[0].add(7))
    of_rollout, of_first, of_end = (prepare(state, x)[1].bonus for x in (rollout, first, end))
    np.testing.assert_array_equal(of_first.obs, of_rollout.obs)
    np.testing.assert_array_equal(of_first.features, of_rollout.features)
    assert (of_end.obs.reshape(NUM_STEPS, NUM_ENVS, -1)[-1, 0] == 5).all(), "an outlier, clipped to 5 deviations"
    assert np.abs(of_end.obs).max() == 5
    valid, oracle = rollout.steps.valid, Oracle(states[0], episodic=False)
    oracle.prepare(rollout)
    expected = np.zeros((NUM_STEPS, NUM_ENVS))
    for n in range(NUM_ENVS):
        total = mlp(states[0].params["bonus"]["critic"], rollout.next_obs[n])[0]
        for t in reversed(range(NUM_STEPS)):
            total = oracle.reward[t, n] + RND["gamma"] * total if valid[t, n] else total
            expected[t, n] = total
    found = np.reshape(of_rollout.target, expected.shape)
    np.testing.assert_allclose(found[valid], expected[valid], rtol=1e-4, atol=1e-5)


def test_a_share_of_valid_rows_trains_the_predictor():
    """Rows that train have the weight 1 / share, so that the mean gradient does not depend on the share."""
    env = probes.chain(64)
    agent = agent_of(env, dict(share=0.25), rollout_length=64)
    state = jax.jit(agent.init)(jax.random.key(0))
    rollout = probes.experience(env, agent, state)
    prepare = preparer(agent)
    bonus, rows = prepare(state, rollout)
    weight, valid = np.asarray(rows.bonus.weight), np.asarray(rollout.steps.valid).ravel()
    assert set(weight) == {0, 4} and not weight[~valid].any()
    np.testing.assert_allclose((weight[valid] > 0).mean(), 0.25, atol=0.02)  # 3,640 rows: the deviation is 0.007
    _, again = prepare(state._replace(bonus=bonus), rollout)
    assert (again.bonus.weight != rows.bonus.weight).any(), "each update draws other rows"


@pytest.mark.slow
def test_bonus_does_not_change_policy_if_its_advantages_have_no_weight():
    """No gradient of the predictor or of the intrinsic value reaches the policy. Seeds have different targets."""
    env, (_, rollouts, _) = probes.chain(NUM_ENVS), two_updates()
    after = []
    for bonus in ({"kind": "none"}, RND | dict(coef=0.0, extrinsic_coef=1.0)):
        agent = ppo.make(configure(ppo.Config, **PPO | dict(max_grad_norm=0.0, bonus=bonus)), env.spec, 10)
        state = jax.jit(agent.init)(jax.random.key(0))
        after.append(jax.jit(agent.update)(state, rollouts[0], jax.random.key(1))[0])
    close = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7)
    jax.tree.map(close, after[0].params["network"], after[1].params["network"])
    targets = [agent.init(jax.random.key(seed)).bonus.target for seed in range(2)]
    assert all((a != b).any() for a, b in zip(*map(jax.tree.leaves, targets), strict=True) if a.ndim > 1)


@pytest.mark.slow
def test_two_shards_learn_as_one():
    """Statistics, metrics and parameters of two shards with half of the environments each."""
    env = probes.chain(NUM_ENVS)
    states, rollouts, metrics = two_updates()
    half = env._replace(spec=env.spec._replace(num_envs=NUM_ENVS // 2))
    agent = agent_of(half, parallelism=Parallelism("shards", 2))
    update = jax.jit(jax.vmap(agent.update, in_axes=(0, 0, None), axis_name="shards"))
    state = jax.tree.map(lambda x: jnp.stack([x, x]), agent.init(jax.random.key(0)))
    close = partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-5)
    cut = lambda axis, x: np.stack(np.split(np.asarray(x), 2, axis))
    of_steps = lambda tree: jax.tree.map(partial(cut, 1), tree)
    for seed in range(2):
        whole = rollouts[seed]
        parts = whole._replace(steps=of_steps(whole.steps), next_obs=cut(0, whole.next_obs), first_obs=None)
        state, found = update(state, parts, jax.random.key(seed))
        jax.tree.map(lambda x, one: close(x, np.stack([one, one])), found, metrics[seed])
        bonus, whole_bonus = state.bonus, states[seed + 1].bonus
        jax.tree.map(lambda x, one: close(x, np.stack([one, one])), bonus.seen, whole_bonus.seen)
        jax.tree.map(lambda x, one: close(x, np.stack([one, one])), bonus.scale.stats, whole_bonus.scale.stats)
    jax.tree.map(lambda x, one: close(x, np.stack([one, one])), state.params, states[2].params)


def rollout_of(obs, next_obs, **options):
    """A rollout of observations [T, N, ...] with random actions and a reset row."""
    num_steps, num_envs = jax.tree.leaves(obs)[0].shape[:2]
    rng = np.random.default_rng(0)
    pi = distributions.Categorical(jnp.zeros((num_steps, num_envs, 2)))
    valid = np.ones((num_steps, num_envs), bool)
    valid[2, 0] = False
    last = np.roll(valid, -1, axis=0) == 0
    reward = jnp.asarray(rng.normal(size=valid.shape), jnp.float32)
    action = jnp.asarray(rng.integers(0, 2, valid.shape))
    steps = Transition(obs, action, reward, jnp.ones(valid.shape), jnp.asarray(last), jnp.asarray(valid), pi)
    return Rollout(steps, next_obs, **{"carry": (), **options})


@pytest.mark.slow
def test_stacks_are_scored_by_their_newest_frame_in_either_form():
    """Frames of 2 channels in stacks of 3: stored once or as stacks, the rows of the bonus are the same."""
    rng = np.random.default_rng(1)
    frames = rng.integers(0, 255, (7 + 2, 2, 4, 4, 2)).astype(np.uint8)
    stacks = jnp.asarray(np.concatenate([frames[i : i + 7] for i in range(3)], axis=-1))
    spec = EnvSpec("test", jax.ShapeDtypeStruct((4, 4, 6), jnp.uint8), Discrete(2), 2, frame_stack=3)
    options = dict(rollout_length=6, num_minibatches=2, network="mlp", hidden_sizes=(4,))
    agent = ppo.make(configure(ppo.Config, **PPO | options | {"bonus": RND}), spec, 10)
    compressed = jax.vmap(partial(frame_stack.compress, 3))(stacks[:-1])
    state = jax.jit(agent.init)(jax.random.key(0))
    _, rows = preparer(agent)(state, rollout_of(compressed, stacks[-1], first_obs=stacks[0]))
    assert rows.bonus.obs.shape == (12, 4, 4, 2)
    x = frames[3:].astype(np.float64)
    seen = x[np.array([[t, n] != [2, 0] for t in range(6) for n in range(2)]).reshape(6, 2)]
    expected = (x - seen.mean(0)) / np.sqrt(seen.var(0) + 1e-8)
    np.testing.assert_allclose(rows.bonus.obs, np.clip(expected, -5, 5).reshape(12, 4, 4, 2), rtol=1e-3, atol=1e-4)
    wide = agent.explore.args[0].bonus.prepare(state, rollout_of(stacks[:-1], stacks[-1]), rows.advantage.reshape(6, 2))
    np.testing.assert_allclose(np.reshape(wide.rows.obs, rows.bonus.obs.shape), rows.bonus.obs, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(np.ravel(wide.rows.target), rows.bonus.target, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_memory_and_views():
    """With a memory, rows are sequences. The bonus scores what the actor sees; its value reads what the critic sees."""
    rng = np.random.default_rng(2)
    obs = {name: jnp.asarray(rng.normal(size=(7, 2, 3)), jnp.float32) for name in ("hidden", "seen")}
    shapes = {name: jax.ShapeDtypeStruct((3,), jnp.float32) for name in obs}
    spec = EnvSpec("test", shapes, Discrete(2), 2)
    options = dict(rollout_length=6, num_minibatches=2, memory=dict(kind="gru", size=4), actor=dict(sees=["seen"]))
    agent = ppo.make(configure(ppo.Config, **PPO | options | {"bonus": RND}), spec, 10)
    state = jax.jit(agent.init)(jax.random.key(0))
    carry = jax.tree.map(lambda x: jnp.zeros((2, *x.shape)), agent.initial_carry)
    rollout = rollout_of(jax.tree.map(lambda x: x[:-1], obs), jax.tree.map(lambda x: x[-1], obs), carry=carry)
    _, rows = preparer(agent)(state, rollout)
    assert jax.tree.map(jnp.shape, rows.bonus.obs) == {"seen": (2, 6, 3)}
    after, metrics = jax.jit(agent.update)(state, rollout, jax.random.key(1))
    assert all(np.isfinite(x) for x in metrics.values())
    kernel = lambda state: state.params["bonus"]["critic"]["params"]["torso"]["mlp"]["Dense_0"]["kernel"]
    assert kernel(state).shape == (6, 4) and (kernel(after) != kernel(state)).all()


def test_image_of_floats_is_refused():
    spec = EnvSpec("test", jax.ShapeDtypeStruct((40, 40, 3), jnp.float32), Discrete(2), 2)
    config = configure(ppo.Config, bonus="rnd", network=dict(observations="image"))
    with pytest.raises(ValueError, match=r"^network.observations: image cannot be combined with bonus rnd, got both;"):
        ppo.make(config, spec, 10)


def test_metrics_are_those_that_the_documentation_explains():
    told = yaml.safe_load((ROOT / "docs" / "data" / "metrics.yml").read_text())
    assert {name for metrics in two_updates()[2] for name in metrics} == told["ppo"].keys() | told["rnd"].keys()


def test_players_are_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    given = ["ppo", "--env", "games/Paddles", "--num-envs", "4", "--bonus", "rnd"]
    assert train.main(given) == 2
    line = "error: bonus: rnd requires an environment without players, got games/Paddles; use none"
    assert capsys.readouterr().err.strip() == line and not list(tmp_path.iterdir())


@pytest.mark.slow
def test_evaluation_reads_the_policy_only(tmp_path):
    """The checkpoint has the networks of the bonus, with which the run resumes. Acting neither reads nor needs them."""
    run = jaxrl_fast.fit(
        algo="ppo", env="CartPole-v1", num_envs=4, rollout_length=8, hidden_sizes=(8,), total_steps=128, bonus="rnd",
        normalize_observations=True, eval_episodes=2, log_level="quiet", run_dir=str(tmp_path / "run"),
    )  # fmt: skip
    trained = jaxrl_fast.load(run)
    assert jax.tree.leaves((trained.agent_state.bonus, trained.agent_state.params["bonus"])) == []
    saved = safetensors.numpy.load_file(trained.checkpoint / "state.safetensors")
    assert any(name.startswith("agent/params/bonus/predictor/") for name in saved)
    obs = np.random.default_rng(0).normal(size=(50, 4)).astype(np.float32)
    stats = [saved[f"agent/observations/{name}"] for name in ("mean", "var")]
    of = lambda name: [saved[f"agent/params/network/params/{name}/{x}"] for x in ("kernel", "bias")]
    (kernel, bias), (of_head, shift) = of("torso/mlp/Dense_0"), of("actor_head")
    hidden = np.tanh(np.clip((obs - stats[0]) / np.sqrt(stats[1] + 1e-8), -10, 10) @ kernel + bias)
    np.testing.assert_array_equal(trained.policy(obs), (hidden @ of_head + shift).argmax(-1))
    assert len(run.evaluate(episodes=2)["seeds"][0]["returns"]) == 2


@pytest.mark.slow
def test_resumed_run_has_the_same_bits(tmp_path, monkeypatch):
    """Two seeds learn in one program, with a memory and normalized observations."""
    options = dict(
        algo="ppo", env="CartPole-v1", num_envs=4, rollout_length=8, num_minibatches=2, num_epochs=2, hidden_sizes=(8,),
        total_steps=256, log_every=64, eval_episodes=0, log_level="quiet", num_seeds=2, bonus={"kind": "rnd"},
        normalize_observations=True, memory={"kind": "gru", "size": 4},
    )  # fmt: skip
    jaxrl_fast.fit(**options, run_dir=str(tmp_path / "whole"))
    stop_after(monkeypatch, 128)
    jaxrl_fast.fit(**options, run_dir=str(tmp_path / "stopped"))
    jaxrl_fast.fit(resume=str(tmp_path / "stopped"), log_level="quiet")
    same(tmp_path / "whole", tmp_path / "stopped")
    found = [x["intrinsic_reward"] for x in records(tmp_path / "whole")]
    assert len({*found}) == len(found) > 2, "seeds and updates differ"
