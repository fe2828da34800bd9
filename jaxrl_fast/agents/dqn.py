"""DQN: deep Q-learning from a replay (Mnih et al. 2015), with Rainbow's parts and Munchausen's as switches.

Every kind of value is a distribution here and every target a set of weighted `atoms`, so the switches combine without
cases.

Everything that is counted is counted in environment steps. An update adds T * N of them and then makes as many
gradient steps as the replay ratio owes: what is left over is owed to the next update, so the ratio holds exactly.

Deviations from Rainbow: epsilon-greedy unless its epsilons are 0, orthogonal initialization, and noise that is drawn
for each environment when acting, once for a batch when learning.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxrl_fast import networks
from jaxrl_fast.agents.configs import common, dqn
from jaxrl_fast.parallel import collectives
from jaxrl_fast.replay import ring as replay_ring
from jaxrl_fast.replay import sum_tree
from jaxrl_fast.rl import distributions, exploration, normalize, optim, value_distributions
from jaxrl_fast.types import Agent, Array, Decision, EnvSpec, Key, Metrics, PyTree, Rollout

Config = dqn.DQN
MIN_PRIORITY = 1e-6  # an error of 0 keeps some chance to be drawn


class Learner(NamedTuple):
    """What a gradient step changes."""

    params: PyTree
    target: PyTree
    optimizer: PyTree
    priorities: Any  # priorities.Tree, or () without
    largest: Array  # f32: the largest priority so far, which new transitions get; in an update, of the device alone
    since_target: Array  # int32: environment steps since the target moved, in parts of 1 / the ratio's numerator


class State(NamedTuple):
    """All that DQN carries from update to update."""

    learner: Learner
    replay: Any  # replay_ring.Ring; () where only acting is needed
    num_updates: Array  # int32
    owed: Array  # int32: gradient steps due, in parts of 1 / the ratio's denominator


class Noise(NamedTuple):
    """What T decisions need of chance."""

    explore: exploration.Noise
    network: PyTree  # [T, N, K] of each noisy layer, or ()


class Parts(NamedTuple):
    """What `make` builds once and the functions below share."""

    config: Config
    spec: EnvSpec
    layout: replay_ring.ReplayConfig
    rollout_length: int
    num_updates: int
    network: networks.Network
    form: value_distributions.ValueHead
    epsilon: exploration.Epsilon
    learning_rate: optax.Schedule
    optimizer: optax.GradientTransformation


def make(config: Config, spec: EnvSpec, num_updates: int) -> Agent:
    """DQN for environments of this spec, its schedules spread over `num_updates` updates.

    Raises ValueError where the numbers do not fit each other or the environment.
    """
    num_envs = spec.total_num_envs
    rollout_length = common.rollout_length(config, num_envs)
    check(config, spec, rollout_length)
    per_update = rollout_length * num_envs
    layout = replay_ring.ReplayConfig(
        config.buffer_size // per_update * rollout_length, spec.num_envs, config.n_step, spec.frame_stack
    )
    network = networks.network(
        spec.obs,
        exploration.num_actions(spec, "dqn"),
        num_atoms=None if config.value_head == "none" else config.num_atoms,
        dueling=config.dueling,
        noisy=config.noisy,
        kind=config.network,
        hidden=config.hidden_sizes,
        activation=config.activation,
        layer_norm=config.layer_norm,
        dtype=jnp.dtype(config.compute_dtype),
    )
    learning_steps = num_updates * per_update - config.first_learning(num_envs)
    learning_rate = optim.linear_schedule(
        config.learning_rate, config.anneal_lr, max(int(config.ratio * learning_steps), 1)
    )
    optimizer = optim.make_optimizer(learning_rate, epsilon=config.adam_epsilon, max_grad_norm=config.max_grad_norm)
    epsilon = exploration.Epsilon(config.epsilon_start, config.epsilon_end, config.epsilon_steps, config.apex_alpha)
    form = value_distributions.ValueHead(config.value_head, config.num_atoms, config.v_min, config.v_max)
    parts = Parts(config, spec, layout, rollout_length, num_updates, network, form, epsilon, learning_rate, optimizer)
    return Agent(
        init=partial(init, parts),
        explore=partial(explore, parts),
        exploit=partial(exploit, parts),
        update=partial(update, parts),
        noise=partial(noise, parts),
        rollout_length=rollout_length,
        policy_state=policy_state,
        on_env_restart=lambda state: state._replace(replay=replay_ring.discard_tail(layout, state.replay)),
    )


def check(config: Config, spec: EnvSpec, rollout_length: int) -> None:
    """The numbers that set shapes or are counted exactly; real numbers may be traced and are checked on the host."""
    num_envs = spec.total_num_envs
    num_devices = spec.num_shards * spec.num_grad_workers
    if config.batch_size % num_devices:
        raise ValueError(f"batch_size {config.batch_size} does not divide into {num_devices} devices")
    if config.buffer_size < config.batch_size:
        raise ValueError(f"buffer_size {config.buffer_size} is less than one batch of {config.batch_size}")
    if config.learning_starts > config.buffer_size:
        raise ValueError(
            f"learning_starts {config.learning_starts} is beyond the buffer_size {config.buffer_size}; "
            "the first steps would be forgotten before they are learned from"
        )
    per_update = rollout_length * num_envs
    num_rows = config.n_step + max(spec.frame_stack, 1) + rollout_length  # the least that can be written and read
    least = -(-num_rows // rollout_length) * per_update
    if config.buffer_size < least:
        raise ValueError(
            f"buffer_size {config.buffer_size} is too small for n_step {config.n_step} and {num_envs} environments "
            f"with rollouts of {rollout_length}; it must be at least {least}"
        )
    if config.value_head != "none" and config.num_atoms < 2:
        raise ValueError(f"num_atoms {config.num_atoms}: a distribution has at least 2")
    if config.value_head == "c51" and not config.v_min < config.v_max:
        raise ValueError(f"v_min {config.v_min} is not below v_max {config.v_max}")
    check_counts(config, per_update)


def check_counts(config: Config, per_update: int) -> None:
    """ValueError where the replay ratio, a fraction, cannot be counted exactly in int32."""
    most, longest = exploration.MAX_COUNT, max(per_update, config.target_update_interval)

    def countable(ratio):
        return ratio.numerator * longest <= most and ratio.denominator <= most

    if countable(config.ratio):
        return
    asked = config.replay_ratio
    tens = [q for q in (2**a * 5**b for a in range(31) for b in range(14)) if q <= most]  # whose fractions are decimals
    near = [max(1, min(round(asked * q), most // longest)) / q for q in tens]
    nearest = min((x for x in near if countable(common.as_fraction(x))), key=lambda x: abs(x - asked))
    raise ValueError(
        f"replay_ratio {asked} cannot be counted exactly with {per_update} steps in an update and "
        f"target_update_interval {config.target_update_interval}; the nearest that can is {nearest}"
    )


def init(parts: Parts, key: Key) -> State:
    """Fresh parameters, the target's equal to them, and an empty replay."""
    params, layout = parts.network.init(key), parts.layout
    learner = Learner(
        params=params,
        target=params,
        optimizer=parts.optimizer.init(params),
        priorities=sum_tree.init(layout.num_rows * layout.num_envs) if parts.config.prioritized else (),
        largest=jnp.float32(1),
        since_target=jnp.int32(0),
    )
    return State(learner, replay_ring.init(layout, parts.spec.obs, parts.spec.action), jnp.int32(0), jnp.int32(0))


def policy_state(state: State) -> State:
    """Return the state without the replay and its priorities."""
    return state._replace(replay=(), learner=state.learner._replace(priorities=()))


def noise(parts: Parts, key: Key, num_steps: int, num_envs: int) -> Noise:
    """Uniform numbers for epsilon-greedy decisions, and normal ones for each noisy layer and environment."""
    key_explore, key_network = jax.random.split(key)
    return Noise(
        exploration.noise(key_explore, num_steps, num_envs), parts.network.noise(key_network, (num_steps, num_envs))
    )


def explore(parts: Parts, state: State, obs: PyTree, memory: PyTree, noise: Noise) -> Decision:
    """Epsilon-greedy: each environment tosses its own coin."""
    value = value_distributions.mean(parts.form, parts.network.apply(state.learner.params, obs, noise.network))
    num_envs = parts.spec.total_num_envs
    env_steps = num_env_steps(parts, state) + noise.explore.place * num_envs
    epsilon = exploration.epsilons(parts.epsilon, parts.spec, env_steps)
    return Decision(distributions.EpsilonGreedy(value, epsilon).sample_from(noise.explore.uniform))


def exploit(parts: Parts, state: State, obs: PyTree, memory: PyTree, noise: Noise) -> Decision:
    """The action of the highest value, without noise."""
    value = value_distributions.mean(parts.form, parts.network.apply(state.learner.params, obs))
    return Decision(distributions.EpsilonGreedy(value, 0.0).mode())


def num_env_steps(parts: Parts, state: State) -> Array:
    """int32: of all updates so far."""
    return exploration.env_steps(parts.spec, parts.rollout_length, state.num_updates)


def update(parts: Parts, state: State, rollout: Rollout, key: Key) -> tuple[State, Metrics]:
    """Keeps the rollout, then makes the gradient steps that are due."""
    rollout = normalize.clip_rewards(rollout, parts.config.clip_rewards)
    ring = replay_ring.add(parts.layout, state.replay, rollout.steps)
    learner = set_priorities(parts, state.learner, ring)
    num_steps, owed = num_grad_steps_due(parts, state)
    keys = jax.random.split(key, (max_grad_steps(parts), 2))  # all at once, which costs what a few do

    def step(i, carry):
        learner, sums = carry
        own = jax.random.clone(keys[i])  # taken once, which JAX cannot tell
        learner, metrics = gradient_step(parts, ring, state.num_updates, own, learner)
        return learner, jax.tree.map(jnp.add, sums, metrics)

    num_rows = parts.config.batch_size // (parts.spec.num_shards * parts.spec.num_grad_workers)
    sums = dict.fromkeys(("weight", "td_loss", "q_value", "td_error_abs"), jnp.zeros(num_rows))
    learner, sums = jax.lax.fori_loop(0, _same_for_all_seeds(num_steps), step, (learner, sums))
    sums = jax.tree.map(jnp.sum, sums)
    of_devices = collectives.all_gather((learner.largest, sums), parts.spec.grad_axis)
    learner, sums = learner._replace(largest=of_devices[0].max()), jax.tree.map(lambda x: x.sum(0), of_devices[1])
    state = State(learner, ring, state.num_updates + 1, owed)
    per_weight = num_steps / jnp.maximum(sums.pop("weight"), 1e-12)
    return state, {f"{name}_sum": x * per_weight for name, x in sums.items()} | {
        "epsilon": exploration.mean(parts.epsilon, parts.spec, num_env_steps(parts, state)),
        "gradient_steps": num_steps,
        "learning_rate": parts.learning_rate(learner.optimizer[-1].count),
        "replay_size": ring.size * parts.spec.total_num_envs,
    }


def num_grad_steps_due(parts: Parts, state: State) -> tuple[Array, Array]:
    """int32: gradient steps due after one more rollout, and what is owed beyond them.

    After s environment steps, floor(ratio * (s - start)) gradient steps have been made in all.
    """
    num_envs = parts.spec.total_num_envs
    ratio, start = parts.config.ratio, parts.config.first_learning(num_envs)
    per_update = parts.rollout_length * num_envs
    after = num_env_steps(parts, state) + per_update
    owed = state.owed + ratio.numerator * jnp.clip(after - start, 0, per_update)
    return owed // ratio.denominator, owed % ratio.denominator


def max_grad_steps(parts: Parts) -> int:
    """Gradient steps after a rollout, at the most."""
    ratio, per_update = parts.config.ratio, parts.rollout_length * parts.spec.total_num_envs
    return (ratio.denominator - 1 + ratio.numerator * per_update) // ratio.denominator


def set_priorities(parts: Parts, learner: Learner, ring: replay_ring.Ring) -> Learner:
    """The priorities after a rollout was added: the largest for what can be read now and could not before, else 0."""
    if not parts.config.prioritized:
        return learner
    layout = parts.layout
    lost = max(layout.frame_stack - 1, 0)  # rows that a write robs of their frames
    offset = jnp.arange(-layout.n_step - parts.rollout_length, lost)
    row = (ring.head + offset) % layout.num_rows
    priority = jnp.where((offset < -layout.n_step)[:, None] & ring.valid[row], learner.largest, 0.0)
    item = row[:, None] * layout.num_envs + jnp.arange(layout.num_envs)[None]
    return learner._replace(priorities=sum_tree.update(learner.priorities, item.reshape(-1), priority.reshape(-1)))


def gradient_step(
    parts: Parts, ring: replay_ring.Ring, num_updates: Array, keys: Key, learner: Learner
) -> tuple[Learner, Metrics]:
    """One gradient step on a batch from the replay, by two keys [2]; then the target may move.

    Metrics are of this device's rows, [B].
    """
    config, layout = parts.config, parts.layout
    key_draw, key_noise = keys
    size, num_grad_workers = config.batch_size // parts.spec.num_shards, parts.spec.num_grad_workers
    if config.prioritized:
        item, priority = sum_tree.draw(learner.priorities, key_draw, size)
        row, env, found = item // layout.num_envs, item % layout.num_envs, priority > 0
        chance = priority / jnp.maximum(sum_tree.total(learner.priorities), 1e-30)
        weight = importance(chance, exponent_now(parts, num_updates), parts.spec.axis_name)
        row, env, weight = collectives.local_rows((row, env, weight), num_grad_workers)
    else:
        own = partial(collectives.local_rows, num_grad_workers=num_grad_workers, axis=-1)
        row, env, found = replay_ring.draw(layout, ring, key_draw, size, own)
        weight = found.astype(jnp.float32)
    batch = replay_ring.read(layout, ring, row, env, config.gamma)
    noise_online, noise_target = (parts.network.noise(key, ()) for key in jax.random.split(key_noise))
    goal = target(parts, learner, batch, noise_online, noise_target)
    gradient, (errors, metrics) = jax.grad(partial(loss, parts), has_aux=True)(
        learner.params, batch, goal, weight / config.batch_size, noise_online
    )
    of_hands = collectives.scatter_rows(errors, num_grad_workers) if config.prioritized and num_grad_workers > 1 else ()
    gradient, of_hands = collectives.all_reduce_sum((gradient, of_hands), parts.spec.grad_axis)
    updates, optimizer = parts.optimizer.update(gradient, learner.optimizer, learner.params)
    learner = learner._replace(params=optax.apply_updates(learner.params, updates), optimizer=optimizer)
    if config.prioritized:
        errors = of_hands if num_grad_workers > 1 else errors  # of all rows that were drawn, [B]
        priority = jnp.where(found, (errors + MIN_PRIORITY) ** config.priority_exponent, 0)
        learner = learner._replace(
            priorities=sum_tree.update(learner.priorities, item, priority),
            largest=jnp.maximum(learner.largest, priority.max()),
        )
    return move_target(config, learner), metrics


def move_target(config: Config, learner: Learner) -> Learner:
    """A gradient step is worth 1 / ratio environment steps; whenever a period of them has passed, the target moves."""
    period = config.target_update_interval * config.ratio.numerator
    since = learner.since_target + config.ratio.denominator
    move = lambda: optax.incremental_update(learner.params, learner.target, config.tau)
    target = jax.lax.cond(_same_for_all_seeds(since >= period), move, lambda: learner.target)
    return learner._replace(target=target, since_target=since % period)


def importance(chance: Array, exponent: float | Array, axis_name: str | None = None) -> Array:
    """[B] f32: (1 / P)^exponent over the largest in the batch, for rows drawn with chance P; 0 where P is 0.

    Schaul et al. 2016, section 3.4; the size of the replay, which is there too, cancels. Each shard draws its part of
    the batch from its own environments, as likely in all as in any other shard.
    """
    found = chance > 0
    weight = jnp.where(found, jnp.where(found, chance, 1) ** -exponent, 0)
    most = collectives.all_gather(weight.max(), axis_name).max()
    return weight / jnp.maximum(most, 1e-30)


def exponent_now(parts: Parts, num_updates: Array) -> Array:
    """f32: from importance_exponent at the start to 1 at the end."""
    return optax.linear_schedule(parts.config.importance_exponent, 1.0, parts.num_updates)(num_updates)


def target(
    parts: Parts, learner: Learner, batch: replay_ring.Sample, noise_online: PyTree, noise_target: PyTree
) -> value_distributions.Atoms:
    """What the value of (obs, action) should be, as weighted atoms [B, K].

    mean         r + g q'(s', a*), where a* is greedy for q', or with `double` for q (van Hasselt et al. 2016, eq. 4)
    munchausen   r + alpha max(clip, tau log pi(a|s)) + g sum_a' pi(a'|s') (q'(s', a') - tau log pi(a'|s')), with
                 pi = softmax(q' / tau) (Vieillard et al. 2020, eq. 1); with `double`, pi(.|s') is that of q.
                 Of an n-step target only the first step gets it.
    """
    config = parts.config
    apply = parts.network.apply
    following = apply(learner.target, batch.next_obs, noise_target)
    chooser = apply(learner.params, batch.next_obs, noise_online) if config.double else following
    reward, value = batch.reward, value_distributions.mean(parts.form, chooser)
    if config.munchausen:
        temperature = config.munchausen_temperature
        now = jax.nn.log_softmax(
            value_distributions.mean(parts.form, apply(learner.target, batch.obs, noise_target)) / temperature
        )
        log_prob = temperature * distributions.chosen(now, batch.action)
        reward += config.munchausen_alpha * jnp.clip(log_prob, config.munchausen_clip, 0)
        log_policy = jax.nn.log_softmax(value / temperature)[..., None]
        atom, weight = value_distributions.from_outputs(parts.form, following)  # [B, A, K]
        atom, weight = atom - temperature * log_policy, weight * jnp.exp(log_policy)
        atom, weight = (x.reshape(x.shape[0], -1) for x in (atom, weight))
    else:
        atom, weight = value_distributions.from_outputs(
            parts.form, distributions.chosen(following, jnp.argmax(value, axis=-1))
        )
    return value_distributions.Atoms(reward[:, None] + batch.discount[:, None] * atom, weight)


def loss(
    parts: Parts,
    params: PyTree,
    batch: replay_ring.Sample,
    goal: value_distributions.Atoms,
    weight: Array,
    noise: PyTree,
) -> tuple[Array, tuple[Array, Metrics]]:
    """The weighted sum of the rows' losses; beside it what priorities go by, and weighted metrics, [B] each."""
    output = parts.network.apply(params, batch.obs, noise)
    value = distributions.chosen(value_distributions.mean(parts.form, output), batch.action)
    td_error = goal.mean - value
    chosen = distributions.chosen(output, batch.action)  # [B] or [B, K]
    losses, priority = value_distributions.losses(parts.form, chosen, goal, td_error, parts.config.loss == "huber")
    metrics = {"weight": jnp.float32(1), "td_loss": losses, "q_value": value, "td_error_abs": jnp.abs(td_error)}
    return (weight * losses).sum(), (priority, jax.tree.map(lambda x: weight * x, metrics))


@jax.custom_batching.custom_vmap
def _same_for_all_seeds(x: Array) -> Array:
    """A number that is the same in every seed of a batch, so that loops and conditions need not be taken apart."""
    return x


@_same_for_all_seeds.def_vmap
def _first(num_seeds: int, in_batched: list[bool], x: Array) -> tuple[Array, bool]:
    return (_same_for_all_seeds(x[0]) if in_batched[0] else x), False  # shards may be a batch within that of seeds
