"""Test agents for several players: the rows each learns from, the policy that acts, and the metrics of each."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxrl_fast
from jaxrl_fast import envs, loop, players, rollout
from jaxrl_fast.agents import dqn, ppo, sac
from jaxrl_fast.options.declare import configure
from jaxrl_fast.options.run import Options
from jaxrl_fast.parallel.placement import max_grad_workers
from jaxrl_fast.players import rows, self_play
from jaxrl_fast.players.joint import joint_agent
from jaxrl_fast.training import env_check, evaluator
from jaxrl_fast.types import Agent, AgentPlayers, Decision, Discrete, PolicyInput
from tests.helpers import runs, slow
from tests.helpers.trees import same_bits

N = 4
SMALL = {
    "ppo": (ppo, configure(ppo.Config, rollout_length=8, num_minibatches=2, num_epochs=2, hidden_sizes=(8,))),
    "dqn": (dqn, configure(dqn.Config, rollout_length=8, size=256, batch_size=8, learning_starts=32, replay_ratio=0.25,
                           interval=64, hidden_sizes=(8,))),
    "sac": (sac, configure(sac.Config, rollout_length=8, size=256, batch_size=8, learning_starts=32, replay_ratio=0.25,
                           hidden_sizes=(8,))),
}  # fmt: skip


class Decoupled:
    """Each player moves on a line and is rewarded for its position, independently of the other players."""

    players = ("left", "right")
    default_params = SimpleNamespace()

    def reset_env(self, key, params):
        place = jax.random.uniform(key, (len(self.players), 2))
        return place, (place, jnp.int32(0))

    def step_env(self, key, state, action, params):
        place, time = state
        place = place.at[:, 0].add(0.1 * (action - 1))
        return place, (place, time + 1), place[:, 0], (place[:, 0] > 1.2).all(), {}

    def is_truncated(self, state, params):
        return state[1] >= 6

    def action_space(self, params):
        return Discrete(3)


class Three(Decoupled):
    players = ("a", "b", "c")


def mode_of(kind):
    return configure(Options, players={"kind": kind} | ({"pool": 5} if kind == "self-play" else {})).players


def make(algo, mode, env, num_updates=10):
    module, config = SMALL[algo]
    return players.learning(module, mode_of(mode)).make(config, env.spec, num_updates)


def first_rollout(env, agent):
    state = loop.init(env, agent, jax.random.key(0))
    return state, jax.jit(lambda state: loop.act(env, agent, state.agent, state.actors, jax.random.key(1)))(state)


def numpy_rows(tree, axis, player):
    own = np.arange(N) + player * N
    return jax.tree.map(lambda x: np.take(np.asarray(x), own, axis), tree)


@pytest.mark.slow
@pytest.mark.parametrize("algo", SMALL)
def test_independent_players_equal_single_agents(algo):
    env = envs.make(Decoupled, N)
    agent, (module, config) = make(algo, "independent", env), SMALL[algo]
    alone = module.make(config, env.spec._replace(num_envs=N, players=()), 10)
    state, updates = loop.init(env, agent, jax.random.key(0)), []
    act = jax.jit(lambda state: loop.act(env, agent, state.agent, state.actors, jax.random.key(1)))
    update = jax.jit(agent.update)
    for key in jax.random.split(jax.random.key(5), 2):  # DQN makes gradient steps in the second one
        actors, experience, _ = act(state)
        updates.append((key, state.agent, experience))
        learner, metrics = update(state.agent, experience, key)
        state = state._replace(agent=learner, actors=actors)
    one_update, of_player = jax.jit(alone.update), lambda tree, i: jax.tree.map(lambda x: x[i], tree)
    for i, name in enumerate(env.spec.players):
        for number, (key, before, experience) in enumerate(updates):
            own = rows.map_rows(experience, lambda tree, axis, i=i: numpy_rows(tree, axis, i))
            expected, single = one_update(of_player(before, i), own, jax.random.split(key)[i])
            found = of_player(state.agent if number == 1 else updates[1][1], i)
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-6), found, expected)
        of_loss = next(name for name in single if "loss" in name)
        suffix = "_sum" if of_loss.endswith("_sum") else ""
        reported = metrics[f"{of_loss.removesuffix('_sum')}/{name}{suffix}"]
        np.testing.assert_allclose(reported, single[of_loss], rtol=1e-3)
    assert any(float(x) for k, x in metrics.items() if k.endswith(("loss/left", "loss/left_sum")))


@pytest.mark.skipif(max_grad_workers() == 1, reason="one core, or no C compiler")
@pytest.mark.parametrize(("algo", "mode"), [("dqn", "independent"), ("ppo", "self-play"), ("ppo", "independent")])
@pytest.mark.slow
def test_players_with_grad_workers_learn_what_one_core_learns(algo, mode, tmp_path):
    """Results are equal up to rounding."""
    agents = {"dqn": dict(learning_starts=128, size=1024), "ppo": dict(rollout_length=32, num_minibatches=4)}
    options = dict(algo=algo, env="games/Paddles", players=mode, num_envs=16, total_steps=4096, log_every=2048)
    options |= agents[algo] | dict(hidden_sizes=(8,), loggers=(), log_level="quiet", eval_episodes=1)
    made = [jaxrl_fast.fit(**options, devices=n, run_dir=str(tmp_path / f"{n}")) for n in ("auto", 1)]
    assert [run.summary["num_grad_workers"] for run in made] == [2, 1]
    loss = "td_loss" if algo == "dqn" else "value_loss"
    names = [f"{loss}/left", f"{loss}/right"] if mode == "independent" else [loss]
    for one, other in zip(*(run.metrics for run in made), strict=True):
        assert [one[name] for name in names] == pytest.approx([other[name] for name in names], rel=1e-3)


def test_independent_players_have_different_noise_and_parameters():
    env = envs.make(Decoupled, N)
    agent = make("dqn", "independent", env)
    noise = agent.sample_noise(jax.random.key(0), 8, 2 * N)
    assert noise.explore.uniform.shape == (8, 2, 2, N)
    assert not np.isclose(noise.explore.uniform[:, 0], noise.explore.uniform[:, 1]).any()
    kernels = [x for x in jax.tree.leaves(agent.init(jax.random.key(0)).learner.params) if x.ndim == 3]
    assert kernels and not any(np.allclose(x[0], x[1]) for x in kernels)


@pytest.mark.slow
def test_shared_policy_observes_one_hot_player_number():
    env = envs.make(Three, 2)
    agent = make("ppo", "shared", env)
    state, (_, experience, _) = first_rollout(env, agent)
    obs, one_hot = experience.steps.obs
    assert obs.shape == (8, 6, 2)
    np.testing.assert_array_equal(one_hot, np.broadcast_to(np.repeat(np.eye(3), 2, axis=0), (8, 6, 3)))
    same = jnp.ones((6, 2))
    logits = lambda agent: agent.explore(state.agent, PolicyInput(same), (), jnp.zeros((6, 3))).extras.logits
    in_order = logits(agent)
    assert not np.isclose(in_order[0], in_order[2]).all()
    for player in range(3):
        np.testing.assert_allclose(
            logits(agent.players.of_player(player)), np.repeat(in_order[2 * player][None], 6, 0), rtol=1e-5
        )


@pytest.mark.slow
def test_check_counts_steps_of_episodes_not_of_players():
    found = env_check.check(Decoupled, env_check.Options(algo="none", steps=30))
    texts = {finding.text.split()[0]: finding.text for finding in found}
    assert (
        "16 in 4 environments of 30 steps each, by random actions: 0 terminated, 16 truncated" in texts["episodes"]
    )  # 7 rows an episode
    assert "with 4 environments" in texts["speed"]


@pytest.mark.parametrize("mode", ["shared", "self-play"])
def test_no_key_is_used_twice(mode, strict_keys):
    env = envs.make(Decoupled, N)
    agent = make("ppo", mode, env)
    jax.eval_shape(jax.jit(lambda: loop.train_once(env, agent, loop.init(env, agent, jax.random.key(0)))))


def test_rows_are_split_by_player_and_join_inverts_split():
    x = jnp.arange(24).reshape(2, 6, 2)
    np.testing.assert_array_equal(rows.split(3, x, axis=1), np.stack([x[:, :2], x[:, 2:4], x[:, 4:]]))
    np.testing.assert_array_equal(rows.join(rows.split(3, x[0])), x[0])


class TestSelfPlay:
    env = envs.make(Decoupled, N)

    def test_learner_is_left_in_even_and_right_in_odd_environments(self):
        assert self_play.learner_rows(8).tolist() == [0, 5, 2, 7]
        assert self_play.opponent_rows(8).tolist() == [4, 1, 6, 3]
        assert self_play.is_learner(8).tolist() == [True, False, True, False, False, True, False, True]

    @pytest.mark.slow
    def test_opponent_acts_with_selected_snapshot(self):
        agent, inner = make("ppo", "self-play", self.env), make("ppo", "shared", self.env)
        state = agent.init(jax.random.key(0))
        other = inner.init(jax.random.key(9))
        assert {len(x) for x in jax.tree.leaves(state.pool)} == {5}
        pool = jax.tree.map(lambda xs, x: xs.at[3].set(x), state.pool, other)
        state = state._replace(pool=pool, opponent=jnp.int32(3))
        obs = PolicyInput(jax.random.normal(jax.random.key(1), (8, 2)))
        noise = jax.tree.map(lambda x: x[0], agent.sample_noise(jax.random.key(2), 1, 8))
        found = agent.explore(state, obs, (), noise)
        all_rows = [
            inner.explore(learner, obs, (), jnp.zeros((8, 3))).extras.logits for learner in (state.learner, other)
        ]
        mine = self_play.is_learner(8)
        expected = jnp.where(mine[:, None], all_rows[0], all_rows[1])
        np.testing.assert_allclose(found.extras.logits, expected, rtol=1e-5)
        greedy = agent.exploit(state, obs, (), noise).action
        np.testing.assert_array_equal(greedy, all_rows[0].argmax(1))

    @pytest.mark.slow
    def test_update_ignores_rows_of_opponent(self):
        agent = make("ppo", "self-play", self.env)
        state, (_, found, scores) = first_rollout(self.env, agent)
        mine = self_play.is_learner(8)
        keep = lambda x, axis: jnp.where(
            mine.reshape([8 if i == axis else 1 for i in range(x.ndim)]), x, jnp.ones_like(x)
        )
        other = rows.map_rows(found, lambda tree, axis: jax.tree.map(lambda x: keep(x, axis), tree))
        update = jax.jit(agent.update)
        one, changed = (update(state.agent, x, jax.random.key(3)) for x in (found, other))
        assert not same_bits(found, other) and same_bits(one, changed)
        assert scores["episodes"] == found.steps.last[:, :N].sum() == scores["episodes/left"] + scores["episodes/right"]

    def test_new_snapshot_replaces_oldest_one(self):
        pool = jnp.zeros(8)
        for number in range(1, 31):  # a snapshot in every third update
            pool = self_play.add_snapshot(3, pool, jnp.float32(number), jnp.int32(number))
        assert sorted(pool.tolist()) == [9, 12, 15, 18, 21, 24, 27, 30]

    def test_resumed_self_play_run_equals_uninterrupted_run(self, tmp_path, monkeypatch):
        small = dict(rollout_length=8, num_minibatches=1, num_epochs=1, hidden_sizes=[4])
        options = dict(algo="ppo", env=Decoupled, players="self-play", num_envs=N, total_steps=320)
        options |= small | dict(log_every=32, eval_episodes=4, eval_envs=2, save_every="64", devices=1)
        options |= dict(loggers=(), log_level="quiet")
        whole = jaxrl_fast.fit(**options, run_dir=tmp_path / "whole")
        runs.stop_after(monkeypatch, 96)
        jaxrl_fast.fit(**options, run_dir=tmp_path / "parts")
        jaxrl_fast.fit(resume=str(tmp_path / "parts"), env=Decoupled)
        runs.same_numbers(tmp_path / "whole", tmp_path / "parts")
        record, names = whole.metrics[-1], {"return_mean/left", "return_mean/right"}
        assert names <= record.keys() and names == {k for k in record if k.startswith("return_mean/")}
        policies = jaxrl_fast.load(whole, env=Decoupled).policies
        assert {*policies} == {"left", "right"} and int(policies["right"](np.zeros(2, np.float32))) in range(3)
        with pytest.raises(ValueError, match=r"each of the players left and right has one; use .policies\['left'\]"):
            jaxrl_fast.load(whole, env=Decoupled).policy(np.zeros(2, np.float32))


def test_scores_are_reported_per_episode_and_per_player():
    env = SimpleNamespace(spec=envs.make(Decoupled, 2).spec)
    over = jnp.array([[False, True, False, True], [True, False, True, False]])
    score = jnp.array([[9.0, 1.0, 9.0, -1.0], [2.0, 9.0, -4.0, 9.0]])
    valid, length = ~over, jnp.full((2, 4), 3)
    found = rollout.scores_of_games(
        env, SimpleNamespace(players=AgentPlayers()), valid, rollout.Scores(over, score, length, None)
    )
    expected = {"episodes": 2, "valid_steps": 2, "return_sum": -1, "return_min": -4, "return_max": 2, "length_sum": 6}
    expected |= {"episodes/left": 2, "episodes/right": 2, "return_sum/left": 3, "return_sum/right": -5}
    assert {name: float(found[name]) for name in expected} == expected
    learner = SimpleNamespace(players=AgentPlayers(is_scored=self_play.is_learner))
    found = rollout.scores_of_games(env, learner, valid, rollout.Scores(over, score, length, None))
    expected = {"episodes": 2, "valid_steps": 2, "return_sum": 1, "episodes/left": 1, "return_sum/right": -1}
    assert {name: float(found[name]) for name in expected} == expected


@pytest.mark.parametrize(
    ("mode", "env", "problem"),
    [
        ("shared", "CartPole-v1", "^players: gymnax/CartPole-v1 has no players, got shared; leave it out"),
        ("self-play", Three, "^players: self-play requires 2 players, got the 3 of .*Three"),
    ],
)
def test_players_option_rejects_mode_that_environment_does_not_support(mode, env, problem):
    with pytest.raises(ValueError, match=problem):
        make("ppo", mode, envs.make(env, N))


def test_self_play_needs_game_for_each_side():
    options = dict(algo="ppo", env="games/Paddles", players="self-play")
    with pytest.raises(
        ValueError, match=r"^num_envs: self-play needs 2 games, one for each side, got 1; use 2 or more$"
    ):
        jaxrl_fast.fit(**options, num_envs=1)


@pytest.mark.parametrize("names", [("left",), ["left", "right"], ("left", "left"), ("left", 2)])
def test_environment_rejects_invalid_names_of_players(names):
    with pytest.raises(ValueError, match="its players must be a tuple of 2 or more different names"):
        envs.make(type("Odd", (Decoupled,), {"players": names}), 1)


def test_environment_rejects_reward_without_number_for_each_player():
    class Unpaid(Decoupled):
        def step_env(self, *given):
            obs, state, reward, *rest = super().step_env(*given)
            return obs, state, reward.sum(), *rest

    with pytest.raises(ValueError, match="its reward must be one number for each of 2 players, got shape"):
        envs.make(Unpaid, 1)


def test_joint_agent_uses_each_agent_for_its_player():
    def constant(number):
        act = lambda state, inputs, carry, noise: Decision(inputs.obs[:, 0] + state + noise, carry + number)
        noise = lambda key, num_steps, num_envs: jnp.full((num_steps, num_envs), 0.1 * number)
        return Agent(lambda key: (), act, act, lambda *given: (), 1, noise, initial_carry=jnp.float32(0))

    agent = joint_agent([constant(1), constant(2)])
    noise = jax.tree.map(lambda x: x[0], agent.sample_noise(jax.random.key(0), 1, 6))
    carry = rollout.initial_carry(agent, 6)
    found = agent.exploit((10.0, 20.0), PolicyInput(jnp.arange(6.0)[:, None]), carry, noise)
    np.testing.assert_allclose(found.action, [10.1, 11.1, 12.1, 23.2, 24.2, 25.2], rtol=1e-6)
    own = [found.carry[player][row] for player in range(2) for row in range(3 * player, 3 * player + 3)]
    np.testing.assert_array_equal(own, [1, 1, 1, 2, 2, 2])


def test_evaluate_against_other_run_itself_and_scripted_opponent(tmp_path):
    small = dict(rollout_length=8, num_minibatches=1, num_epochs=1, hidden_sizes=[4])
    options = dict(algo="ppo", env="Paddles", num_envs=2, total_steps=16, eval_episodes=2, eval_envs=2)
    options |= small | dict(loggers=(), log_level="quiet", devices=1, env_options={"max_steps_in_episode": 60})
    one, _ = (jaxrl_fast.fit(**options, players=mode, run_dir=tmp_path / mode) for mode in ("independent", "shared"))
    found = one.evaluate(against=str(tmp_path / "shared"), episodes=4)
    assert {*found["sides"]} == {"left", "right"} and found["sides"]["left"]["eval_episodes"] == 4
    # Against itself, the left player's returns are the negated returns of the right player in the same episodes.
    own = jaxrl_fast.Run.open(one.folder).evaluate(episodes=4)["players"]
    assert own["left"]["eval_return_mean"] == -own["right"]["eval_return_mean"]
    again = one.evaluate(against=str(one.folder), episodes=4)["sides"]
    assert again["left"]["eval_return_mean"] == own["left"]["eval_return_mean"]
    assert again["right"]["eval_return_mean"] == own["right"]["eval_return_mean"]
    scripted = one.evaluate(against="scripted", episodes=4)["sides"]
    assert all(-5 <= side["eval_return_mean"] <= 5 and side["eval_length_mean"] <= 60 for side in scripted.values())
    with pytest.raises(ValueError, match="not a run directory"):
        one.evaluate(against=str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match="explore: cannot be combined with against, got both; leave it out"):
        one.evaluate(against="scripted", explore=True)


class Lives:
    """Players live for different numbers of steps; afterwards the environment rewards them with -100 for waiting."""

    players = ("a", "b", "c")
    default_params = SimpleNamespace()
    pays = jnp.asarray([1.0, 2.0, 3.0])

    def reset_env(self, key, params):
        lifetime = jax.random.randint(key, (3,), 1, 6)
        return self.observe(lifetime, 0), (lifetime, jnp.int32(0))

    def observe(self, lifetime, time):
        return jnp.stack([lifetime.astype(float), jnp.full(3, time, float)], axis=1)

    def step_env(self, key, state, action, params):
        lifetime, time = state
        reward = jnp.where(time < lifetime, self.pays, -100.0)
        terminal = (time + 1 == lifetime) & (jnp.arange(3) < 2)  # the flag of a moment: afterwards it is False again
        return self.observe(lifetime, time + 1), (lifetime, time + 1), reward, terminal, {}

    def is_truncated(self, state, params):
        lifetime, time = state
        return (time >= lifetime) & (jnp.arange(3) == 2)

    def action_space(self, params):
        return Discrete(2)


class TestPlayersWithSeparateEnds:
    """The rows of a player whose episode has ended are invalid until the game ends."""

    def collect(self, num_steps=60):
        env = envs.make(Lives, N)
        agent = make("ppo", "shared", env)
        state = loop.init(env, agent, jax.random.key(3))
        noise = agent.sample_noise(jax.random.key(1), num_steps, 3 * N)
        policy = lambda *given: agent.explore(state.agent, *given)
        return jax.jit(lambda: rollout.collect(env, agent, policy, state.actors, noise, num_steps))()

    @pytest.mark.slow
    def test_rows_equal_those_of_plain_loop(self):
        _, experience, scores = self.collect()
        steps = jax.tree.map(np.asarray, experience.steps)
        lifetimes, times = (steps.obs[0][..., i].reshape(60, 3, N) for i in (0, 1))
        games = 0
        expected = {name: np.zeros((60, 3, N)) for name in ("reward", "discount", "last", "valid")}
        returns = np.zeros(3)
        for game in range(N):
            row = 0
            while row < 60:  # one game after another: its steps, then the row that resets
                lives, start = lifetimes[row, :, game], row
                for row in range(start, min(start + int(max(lives)) + 1, 60)):
                    time = row - start
                    for player, life in enumerate(lives):
                        assert times[row, player, game] == time
                        alive, over = time < life, time == max(lives)
                        values = (player + 1.0) * alive, float(not (time == life - 1 and player < 2)), time >= life - 1
                        for name, value in zip(("reward", "discount", "last"), values, strict=True):
                            expected[name][row, player, game] = value if not over else {"discount": 1.0}.get(name, 0.0)
                        expected["valid"][row, player, game] = alive
                    if time == max(lives) - 1:
                        games += 1
                        returns += lives * [1.0, 2.0, 3.0]
                row += 1
        for name, value in expected.items():
            np.testing.assert_array_equal(getattr(steps, name).reshape(60, 3, N), value, err_msg=name)
        assert int(scores["episodes"]) == games > 20
        assert int(scores["valid_steps"]) == expected["valid"].any(axis=1).sum()
        for player, value in zip("abc", returns, strict=True):
            assert int(scores[f"episodes/{player}"]) == games
            assert float(scores[f"return_sum/{player}"]) == value
        assert float(scores["return_sum"]) == pytest.approx(returns.mean())

    @pytest.mark.slow
    def test_replay_marks_steps_of_waiting_players_as_invalid(self):
        env = envs.make(Lives, N)
        agent = make("dqn", "independent", env)
        state = jax.jit(lambda state: loop.train(env, agent, state, 4)[0])(loop.init(env, agent, jax.random.key(0)))
        ring = state.agent.replay  # [P, R, N, ...]
        rows = int(ring.size[0])
        lifetime, time = (np.asarray(ring.obs)[:, :rows, :, i] for i in (0, 1))
        assert rows == 32 and (time > lifetime).any()
        np.testing.assert_array_equal(np.asarray(ring.valid)[:, :rows], time < lifetime)

    def test_frame_skip_sums_rewards_up_to_end_of_player(self):
        env = envs.make(Lives, N, frame_skip=2)
        state, first = jax.jit(env.reset)(jax.random.key(3))
        after = jax.jit(env.step)(state, jnp.zeros(3 * N, jnp.int32))[1]
        lifetime = np.asarray(first.obs[:, 0]).reshape(3, N)
        taken = np.minimum(lifetime, 2)
        np.testing.assert_array_equal(after.reward.reshape(3, N), taken * [[1.0], [2.0], [3.0]])
        np.testing.assert_array_equal(after.last.reshape(3, N), lifetime <= 2)
        np.testing.assert_array_equal(after.discount.reshape(3, N)[:2], (lifetime > 2)[:2])
        assert (after.discount.reshape(3, N)[2] == 1).all()

    @pytest.mark.slow
    @pytest.mark.parametrize(("algo", "mode"), [("ppo", "shared"), slow("dqn", "independent")])
    def test_learner_stays_finite_when_waiting_players_observe_nan(self, algo, mode):
        class Gone(Lives):
            def observe(self, lifetime, time):
                return jnp.where((time > lifetime)[:, None], jnp.nan, super().observe(lifetime, time))

        env = envs.make(Gone, N)
        agent = make(algo, mode, env)
        state = jax.jit(lambda state: loop.train(env, agent, state, 6)[0])(loop.init(env, agent, jax.random.key(0)))
        learner = state.agent.params if algo == "ppo" else state.agent.learner.params
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(learner))

    def test_frame_skip_ends_player_that_is_truncated_before_last_step(self):
        """The flag is that of a moment. A life of 1 or 3 steps ends in the first of two steps of an action."""

        class Moment(Lives):
            def is_truncated(self, state, params):
                lifetime, time = state
                return (time == lifetime) & (jnp.arange(3) == 2)

        env = envs.make(Moment, N, frame_skip=2)
        state, first = jax.jit(env.reset)(jax.random.key(3))
        lifetime = np.asarray(first.obs[:, 0]).reshape(3, N)
        assert {1, 3} <= {*lifetime[2]} and (lifetime.max(0) > 2).all()
        for taken in (2, 4):
            state, after = jax.jit(env.step)(state, jnp.zeros(3 * N, jnp.int32))
            np.testing.assert_array_equal(after.last.reshape(3, N)[2], lifetime[2] <= taken)
            rewarded = np.clip(lifetime[2] - taken + 2, 0, 2)
            np.testing.assert_array_equal(after.reward.reshape(3, N)[2], 3.0 * rewarded)

    @pytest.mark.slow
    def test_evaluation_ends_when_one_player_waits_for_another_that_never_ends(self, monkeypatch):
        """The return of the one who waits counts, and so does that of the other at the most steps, 8."""

        class Endless(Lives):
            players, pays = ("a", "b"), jnp.asarray([1.0, 2.0])

            def reset_env(self, key, params):
                lifetime = jnp.asarray([2, 10**6])
                return jnp.zeros((2, 1)), (lifetime, jnp.int32(0))

            def step_env(self, key, state, action, params):
                lifetime, time = state
                return jnp.zeros((2, 1)), (lifetime, time + 1), self.pays, time + 1 == lifetime, {}

            def is_truncated(self, state, params):
                return False

        monkeypatch.setattr(evaluator, "MAX_STEPS", 8)
        env = envs.make(Endless, 2)
        agent = make("ppo", "shared", env)
        learner = agent.init(jax.random.key(0))
        now = evaluator.start(env, agent, 1, jax.random.key(0))
        now = jax.jit(lambda now: evaluator.block(env, agent, learner, jax.random.key(1), now))(now)
        assert not evaluator.is_running(now)
        np.testing.assert_array_equal(now.episodes.score[:, 0], [2, 2, 16, 16])
        np.testing.assert_array_equal(now.episodes.length[:, 0], [2, 2, 8, 8])
        np.testing.assert_array_equal(now.episodes.finished, 1)


def test_environment_rejects_ends_for_another_number_of_players():
    class Two(Lives):
        def is_truncated(self, state, params):
            return jnp.zeros(2, bool)

    with pytest.raises(ValueError, match="is_truncated must be one number, or one for each of 3 players, got shape"):
        envs.make(Two, N)
