"""Run a policy in fresh environments: score their first episodes, or stream every observation."""

import threading
import time
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_fast import rollout
from jaxrl_fast.metrics import statistics, window
from jaxrl_fast.parallel.population import Varied
from jaxrl_fast.training.eval_limits import Limits
from jaxrl_fast.types import Agent, Array, Env, Key, PyTree, Transition
from jaxrl_fast.utils.random import key_of_seed
from jaxrl_fast.utils.signals import interruptible

REPORT_S = 2.0  # seconds after which an evaluation on the device is reported
BLOCK = 64  # steps between checks whether all episodes have ended
MAX_STEPS = window.MAX_STEPS  # of an episode
EVAL_FOLD = 2**32 - 1  # separates the keys from training, which uses the first splits of the same key


class EpisodeBatch(NamedTuple):
    """The first K episodes of each of N environments, since the first to end of all would be biased to short ones."""

    score: Array  # [N, K] f32
    length: Array  # [N, K] int32
    finished: Array  # [N] int32: number of episodes that have ended


class EvalState(NamedTuple):
    """The state of an evaluation."""

    actors: rollout.Actors
    episodes: EpisodeBatch
    truncated_score: Array  # [N] f32: an episode's return at `max_length`
    num_steps: Array  # [N] int32: steps of the environment so far, without reset steps
    num_blocks: Array  # int32: blocks so far
    max_length: Array  # int32: steps of an episode
    max_steps: Array  # int32: steps of an environment


def evaluate_policy(
    env: Env, agent: Agent, num_episodes: int, state: PyTree, seed: Array, index: Array
) -> EpisodeBatch:
    """Run `num_episodes` in each environment with the agent's state, until all have ended.

    `index` numbers the evaluations of a run: each has different episodes.
    """
    key_reset, key_noise = keys_of(seed, index)
    advance = partial(block, env, agent, state, key_noise)
    return jax.lax.while_loop(is_running, advance, start(env, agent, num_episodes, key_reset)).episodes


def keys_of(seed: Array, index: Array) -> Key:
    """Return the PRNG keys of a seed's evaluation number `index`, for resets and for actions. [2]"""
    return jax.random.split(jax.random.fold_in(jax.random.fold_in(key_of_seed(seed), EVAL_FOLD), index))


def start(env: Env, agent: Agent, num_episodes: int, key_reset: Key, most: Array | None = None) -> EvalState:
    """Return the state before the first step. `most`: other limits of steps, int32 [2], as in EvalState."""
    shape = env.spec.num_envs, num_episodes
    max_length, max_step = (jnp.int32(MAX_STEPS), jnp.int32(max_steps(num_episodes))) if most is None else most
    none = jnp.zeros(shape[0], jnp.int32)
    episodes = EpisodeBatch(jnp.zeros(shape), jnp.zeros(shape, jnp.int32), none)
    actors = rollout.reset(env, agent, key_reset)
    return EvalState(actors, episodes, jnp.zeros(shape[0]), none, jnp.int32(0), max_length, max_step)


def block(env: Env, agent: Agent, state: PyTree, key_noise: Key, now: EvalState) -> EvalState:
    """Take BLOCK more steps."""
    return scan_block(env, agent, state, key_noise, now, lambda now, row, after: None)[0]


def scan_block(
    env: Env, agent: Agent, state: PyTree, key_noise: Key, now: EvalState, kept: Callable[..., PyTree]
) -> tuple[EvalState, PyTree]:
    """Take BLOCK more steps. Also return of each what is kept: (state before, row of a rollout, state after) to it."""
    key_block = jax.random.fold_in(key_noise, now.num_blocks)
    first = lambda key: jax.tree.map(
        lambda x: x[0], agent.sample_noise(key, 1, env.spec.num_envs)
    )  # row 0: later rows may explore less
    noise = jax.vmap(first)(jax.random.split(key_block, BLOCK))
    policy = partial(agent.exploit, state)

    def once(now: EvalState, noise: PyTree) -> tuple[EvalState, PyTree]:
        after, row = step(env, agent, policy, now, noise)
        return after, kept(now, row, after)

    now, rows = jax.lax.scan(once, now, noise, BLOCK)
    return now._replace(num_blocks=now.num_blocks + 1), rows


def is_running(now: EvalState) -> Array:
    """Return whether an episode has not ended and has steps left, bool []."""
    num_episodes = now.episodes.score.shape[1]
    return ((now.num_steps < now.max_steps) & (now.episodes.finished < num_episodes)).any()


def max_steps(num_episodes: int, max_length: int | None = None) -> int:
    """Return the most steps that an environment makes for its episodes."""
    each = MAX_STEPS if max_length is None else max_length
    return min(each * num_episodes, 2**30 - BLOCK)  # with reset steps, other environments may take twice as many


def step(env: Env, agent: Agent, policy: rollout.Policy, now: EvalState, noise: PyTree) -> tuple[EvalState, Transition]:
    """Take a step in all environments, and record the return of each episode that ends within the limit.

    Also return the row that a rollout would have.

    An episode that is longer than `max_length` counts with its return there. Otherwise, endless episodes, often the
    best ones, would have no return. The returns of players who wait for the end count too.
    """
    actors, (row, (over, score, length, _)) = rollout.step(env, agent, policy, now.actors, noise)
    in_game = partial(_in_game, max(len(env.spec.players), 1))
    # A failed step counts too: an environment may fail in every episode. So does one in which a player waits.
    is_step = in_game(~now.actors.timestep.last)
    num_steps, longest = now.num_steps + is_step, now.max_length
    truncated_score = jnp.where((length == longest) & row.valid, score, now.truncated_score)
    endless = (num_steps == now.max_steps) & row.valid & (length >= longest) & ~over
    score, length = jnp.where(endless, truncated_score, score), jnp.where(endless, longest, length)
    episodes = record_ended(now.episodes, (over | in_game(endless)) & (num_steps <= now.max_steps), score, length)
    return now._replace(actors=actors, episodes=episodes, truncated_score=truncated_score, num_steps=num_steps), row


def cut(now: EvalState) -> EvalState:
    """Record the episodes that have reached their limit, with their returns there."""
    over, length = now.actors.length >= now.max_length, jnp.full_like(now.actors.length, now.max_length)
    return now._replace(episodes=record_ended(now.episodes, over, now.truncated_score, length))


def _in_game(num_players: int, rows: Array) -> Array:
    """Return whether any player of the same environment has True, for rows [N] of players."""
    return jnp.tile(rows.reshape(num_players, -1).any(axis=0), num_players)


def record_ended(episodes: EpisodeBatch, over: Array, score: Array, length: Array) -> EpisodeBatch:
    """Append the returns and lengths of the environments [N] where an episode has ended."""
    place = over[:, None] & jax.nn.one_hot(episodes.finished, episodes.score.shape[1], dtype=bool)
    write = lambda old, new: jnp.where(place, new[:, None], old)
    return EpisodeBatch(write(episodes.score, score), write(episodes.length, length), episodes.finished + over)


class Frame(NamedTuple):
    """One environment at one step, on the host."""

    obs: PyTree
    score: float  # of this episode so far
    length: int  # environment steps of this episode so far
    over: bool  # the episode has ended


def stream_episodes(env: Env, agent: Agent, state: PyTree, seed: int) -> Iterator[Frame]:
    """Yield every frame of one environment under `exploit`, for an unlimited number of episodes.

    With several players, the frames show the first player. Observations are whole where agents see a part of them.
    """
    obs_of = lambda actors: env.view.whole_obs(actors.env, actors.timestep.obs)
    key_reset, key = jax.random.split(jax.random.fold_in(key_of_seed(seed), EVAL_FOLD))

    @jax.jit
    def next_frame(state, actors, time):
        noise = agent.sample_noise(jax.random.fold_in(key, time), 1, env.spec.num_envs)
        noise = jax.tree.map(lambda x: x[0], noise)
        after, (_, (*episode, _)) = rollout.step(env, agent, partial(agent.exploit, state), actors, noise)
        return after, (obs_of(after), *episode)

    actors = jax.jit(partial(rollout.reset, env, agent))(key_reset)
    seen = obs_of(actors), np.zeros(1, bool), actors.score, actors.length
    time = 0
    while True:
        obs, over, score, length = jax.tree.map(lambda x: x[0], jax.device_get(seen))
        yield Frame(obs, float(score), int(length), bool(over))
        actors, seen = next_frame(state, actors, np.int32(time))
        time += 1


class EvaluationInterrupted(Exception):
    """An evaluation was interrupted."""


class Evaluator:
    """The evaluation of every seed's greedy policy, compiled on the first call."""

    def __init__(self, env: Env, agent: Agent, seeds: list[int], num_episodes: int, varied: Varied | None = None):
        self.seeds = np.asarray(seeds if len(seeds) > 1 else seeds[0], np.int32)
        each = -(-num_episodes // env.spec.num_games)
        values, make, _ = varied or Varied({}, lambda _: agent)
        self.values = dict(values)
        one = lambda values, *given: evaluate_policy(env, make(values), each, *given)
        self.run: Any = jax.jit(jax.vmap(one, in_axes=(0, 0, 0, None)) if len(seeds) > 1 else one)
        if not env.on_device:
            self.run = jax.jit(lambda most, _, seed, index: start(env, agent, each, keys_of(seed, index)[0], most))
            advance = lambda learner, seed, index, now: block(env, agent, learner, keys_of(seed, index)[1], now)
            self.block: Any = jax.jit(advance)
            self.cut = jax.jit(cut)
        self.on_device, self.players = env.on_device, env.spec.players
        self.num_games, self.each = env.spec.num_games, each  # episodes of each environment
        self.report: Callable[[int | None, int, float], None] = lambda num_ended, num_episodes, seconds: None
        self.compiled, self.compile_time, self.time = False, 0.0, 0.0  # seconds

    def __call__(
        self,
        learner: PyTree,
        index: int,
        stopping: Callable[[], bool] = lambda: False,
        diverged: Collection[int] = (),
        limits: Limits | None = None,
    ) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Return statistics of each seed, and of all seeds that have not `diverged`; `index` numbers evaluations."""
        score, length, ended = self.episodes(learner, index, stopping, limits)
        each_seed = [summarize_all(self.players, *rows) for rows in zip(score, length, ended)]
        score, length, ended = (np.delete(x, [*diverged], axis=0) for x in (score, length, ended))
        return each_seed, summarize_all(self.players, score, length, ended)

    def episodes(
        self,
        learner: PyTree,
        index: int,
        stopping: Callable[[], bool] = lambda: False,
        limits: Limits | None = None,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return returns, lengths and whether an episode has ended at all, [S, episodes] each, player after player.

        Host environments are slow: raise EvaluationInterrupted once `stopping` returns True. With `limits`, they have
        fewer episodes, equally many of each environment.
        """
        began, num_episodes = time.perf_counter(), self.each * self.num_games * self.seeds.size
        first = self.values if self.on_device else self._most(limits)
        arguments = jax.device_put((first, learner, self.seeds, np.int32(index)))
        if not self.compiled:
            self.compile(arguments)
            self.compile_time, began = time.perf_counter() - began, time.perf_counter()
        timer = threading.Timer(REPORT_S, self.report, (None, num_episodes, REPORT_S))  # a program reports nothing
        if self.on_device:
            timer.start()
        try:
            found = interruptible(self.run, *arguments)
            while not self.on_device and is_running(found):
                if stopping():
                    raise EvaluationInterrupted
                num_ended = int(np.minimum(found.episodes.finished, self.each).sum())
                self.report(num_ended, num_episodes, time.perf_counter() - began)
                if limits and self._suffices(found, limits):
                    found = self.cut(found)
                    break
                found = interruptible(self.block, *arguments[1:], found)
            episodes = interruptible(jax.device_get, found if self.on_device else found.episodes)
        finally:
            timer.cancel()
            self.time += time.perf_counter() - began
        counted = min(max(int(episodes.finished.min()), 1), self.each) if limits else self.each
        ended = np.arange(counted) < episodes.finished[..., None]
        score, length = (x[..., :counted] for x in (episodes.score, episodes.length))
        score, length, ended = (x.reshape(self.seeds.size, -1) for x in (score, length, ended))
        return score, length, ended

    def _most(self, limits: Limits | None) -> np.ndarray:
        """Return the most steps of an episode and of an environment, int32 [2]."""
        if limits is None:
            return np.array([MAX_STEPS, max_steps(self.each)], np.int32)
        of_share = limits.num_steps // self.num_games
        rounds = -(-limits.min_episodes // self.num_games)
        most = max(max_steps(rounds, limits.max_length), min(of_share, max_steps(MAX_STEPS)))
        return np.array([limits.max_length, most], np.int32)

    def _suffices(self, now: EvalState, limits: Limits) -> bool:
        """Return whether the steps were made, and each environment has its episodes or is in one that is cut."""
        num_steps = int(now.num_blocks) * BLOCK * self.num_games
        has_enough = now.episodes.finished * self.num_games >= limits.min_episodes
        return num_steps >= limits.num_steps and bool((has_enough | (now.actors.length >= now.max_length)).all())

    def share(self, earlier: "Evaluator") -> None:
        """Take the compiled function of an earlier evaluator whose members had other values; both are on the device."""
        if earlier.compiled:
            self.run, self.compiled = earlier.run, True

    def compile(self, arguments: tuple[Any, ...]) -> None:
        """Compile the functions of an evaluation."""
        if not self.on_device:
            like = jax.eval_shape(self.run, *arguments)
            self.block = interruptible(self.block.lower(*arguments[1:], like).compile)
        self.run, self.compiled = interruptible(self.run.lower(*arguments).compile), True


def summarize_all(players: tuple[str, ...], score: np.ndarray, length: np.ndarray, ended: np.ndarray) -> dict[str, Any]:
    """Return statistics of episodes [..., E]; with players, also the mean return of each: "/left"."""
    found = summarize(score[ended], length[ended], ended.size)
    if players:
        found |= {name: found[name] // len(players) for name in ("eval_episodes", "eval_truncated")}
        for player, own_score, own_ended in zip(players, by_player(players, score), by_player(players, ended)):
            own = own_score[own_ended].astype("float64")
            found[f"eval_return_mean/{player}"] = statistics.finite(own.mean()) if own.size else None
    return found


def by_player(players: tuple[str, ...], x: np.ndarray) -> list[np.ndarray]:
    """Return the episodes [..., E / P] of each player, of episodes [..., E]."""
    return np.split(x, len(players), axis=-1)


def summarize(score: np.ndarray, length: np.ndarray, num_wanted: int) -> dict[str, Any]:
    """Return statistics of episodes that have ended; None if none has."""
    number = lambda of: statistics.finite(of()) if score.size else None
    return {
        "eval_return_mean": number(score.astype("float64").mean),
        "eval_return_std": number(score.astype("float64").std),
        "eval_return_min": number(score.min),
        "eval_return_max": number(score.max),
        "eval_length_mean": number(length.mean),
        "eval_episodes": int(score.size),
        "eval_truncated": int(num_wanted - score.size),
    }
