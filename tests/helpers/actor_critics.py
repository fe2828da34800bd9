"""Actor-critics for tests: small agents, tables in place of networks, and plain networks and Adam as oracles."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import ShapeDtypeStruct

from jaxrl_fast import replay
from jaxrl_fast.agents import actor_critic, ddpg, sac, td3
from jaxrl_fast.options.declare import configure
from jaxrl_fast.replay import ring as replay_ring
from jaxrl_fast.replay import sum_tree
from jaxrl_fast.rl import off_policy
from jaxrl_fast.rl.value_distributions import Atoms
from jaxrl_fast.types import Box, EnvSpec, Parallelism, Rollout, Transition
from tests.helpers.agents import network_of

MODULES = {"sac": sac, "td3": td3, "ddpg": ddpg}
RULES = {"sac": sac, "td3": td3, "ddpg": td3}  # the module with the algorithm's functions
LITTLE = dict(rollout_length=4, size=64, batch_size=8, replay_ratio=0.25, learning_starts=0, hidden_sizes=(8,))


def make(
    algo, num_envs=1, num_obs=1, num_actions=1, action=None, num_updates=100, num_shards=1, transform=None, **config
):
    """Return an agent for an EnvSpec without an environment."""
    spec = EnvSpec("test", ShapeDtypeStruct((num_obs,), jnp.float32), action or Box((num_actions,)), num_envs)
    module, parallelism = MODULES[algo], Parallelism(num_shards=num_shards)
    return module.make(configure(module.Config, **LITTLE | config), spec, num_updates, parallelism, transform)


def agent_of(algo, env, num_updates, **config):
    module = MODULES[algo]
    return module.make(configure(module.Config, **LITTLE | config), env.spec, num_updates, env.parallelism)


def context_of(agent):
    return agent.update.args[0]


# Tables: an observation is the index of a state. The actor's parameters are its outputs [S, K] in each state.
# A critic returns value [C, S] + slope [C, S, D] . action.


def _at(obs):
    return obs[..., 0].astype(jnp.int32)


def _value(tables, inputs, noise=()):
    state, action = _at(inputs[0]), inputs[1]
    return tables["value"][:, state] + (tables["slope"][:, state] * action[None]).sum(-1)


ACTOR = network_of(lambda key: (), lambda table, obs, noise=(): table[_at(obs)], lambda key, shape: ())
CRITIC = network_of(lambda key: (), _value, lambda key, shape: ())


def tables_of(algo, **options):
    """Return the context that `make` builds, with tables in place of its networks."""
    return context_of(make(algo, **options))._replace(actor=ACTOR, critic=CRITIC)


def critic_tables(value, slope=0.0, num_actions=1):
    """Return a critic's tables from value [C, S] and a slope that broadcasts to [C, S, D]."""
    value = jnp.float32(value)
    return {"value": value, "slope": jnp.float32(np.broadcast_to(slope, (*value.shape, num_actions)))}


def learner_of(context, actor, critic, target_actor=None, target_critic=None, log_temperature=None):
    """Return a learner with new optimizers. Target parameters default to the parameters."""
    params = actor_critic.Params(jnp.float32(actor), critic, log_temperature)
    target_actor = None if target_actor is None else jnp.float32(target_actor)
    targets = actor_critic.Params(target_actor, target_critic or critic)
    return actor_critic.Learner(params, targets, actor_critic.init_optimizer(context, params))


def means(target):
    """Targets [B] as atoms."""
    return Atoms(jnp.float32(target)[:, None], jnp.ones((len(target), 1)))


def td_target(algo, context, learner, batch, *noise):
    """The target [B] of means, or its atoms [B, K]."""
    action, target_of = RULES[algo].td_target(context, learner, batch, *noise)
    target = target_of(context.critic.apply(learner.target_params.critic, (batch.next_obs, action)))
    return target.mean if context.value_head.kind == "mean" else target


def agent_with(algo, context):
    """Return the agent of a modified context."""
    rules = RULES[algo]
    return actor_critic.make_agent(context, rules.init, rules.exploit, rules.explore, rules.gradient_step)


def state_of(learner, num_updates=0):
    """Return an agent state that suffices to act."""
    return off_policy.State(learner, (), off_policy.init(), jnp.int32(num_updates))


def sample_of(obs, action, reward, discount, next_obs):
    """Return a batch. Actions have shape [B] or [B, D]."""
    column = lambda x: jnp.float32(x)[:, None]
    action = jnp.float32(action)
    action = action[:, None] if action.ndim == 1 else action
    return replay.Sample(column(obs), action, jnp.float32(reward), jnp.float32(discount), column(next_obs))


def buffer_of(context, obs, action, reward, discount, last, valid):
    """Return a replay buffer with one rollout of one environment. Actions are scalars."""
    column = lambda x, dtype: jnp.asarray(x, dtype)[:, None]
    steps = Transition(
        column(obs, jnp.float32)[..., None], column(action, jnp.float32)[..., None], column(reward, jnp.float32),
        column(discount, jnp.float32), column(last, bool), column(valid, bool), (),
    )  # fmt: skip
    return jax.jit(lambda steps: context.replay.add(context.replay.init(), steps))(steps)


def read(context, ring, rows):
    """Return the transitions that begin at these rows of the first environment."""
    config, rows = context.replay.add.args[0], jnp.int32(rows)
    look = lambda ring, rows: replay_ring.read(config, ring, rows, jnp.zeros_like(rows), context.config.gamma)
    return jax.jit(look)(ring, rows)


def with_priorities(buffer, keys, priorities, num):
    """Return a buffer of 16 items with priorities for items 1 and 3, and how often a key draws each item."""
    item, priority = jnp.int32([1, 3]), jnp.float32(priorities)
    tree = jax.jit(lambda: sum_tree.update(sum_tree.init(16), item, priority))()
    drawn = jax.jit(lambda tree, key: sum_tree.draw(tree, key, num)[0])(tree, keys[0])
    return buffer._replace(priorities=tree), np.bincount(np.asarray(drawn), minlength=4)


def rollout_of(num_steps, num_envs, num_obs, num_actions, seed=0):
    """Return random steps. One in five ends an episode, half of these by termination. A reset row follows each end."""
    rng = np.random.default_rng(seed)
    last, valid = np.zeros((2, num_steps, num_envs), bool)
    before = np.zeros(num_envs, bool)
    for t in range(num_steps):
        valid[t] = ~before
        last[t] = before = valid[t] & (rng.random(num_envs) < 0.2)
    terminal = last & (rng.random(last.shape) < 0.5)
    normal = lambda *shape: jnp.float32(rng.normal(size=shape))
    steps = Transition(
        normal(num_steps, num_envs, num_obs),
        jnp.tanh(normal(num_steps, num_envs, num_actions)),
        jnp.where(valid, normal(num_steps, num_envs), 0),
        1 - jnp.float32(terminal),
        jnp.asarray(last),
        jnp.asarray(valid),
        (),
    )
    return Rollout(steps, normal(num_envs, num_obs), ())


# Plain networks with one hidden ReLU layer, and Adam


def outputs(params, obs):
    """Return the outputs of an actor, [B, K]."""
    hidden, head = params["params"]["torso"]["mlp"]["Dense_0"], params["params"]["heads_0"]
    return jnp.maximum(obs @ hidden["kernel"] + hidden["bias"][None], 0) @ head["kernel"] + head["bias"][None]


def values(params, obs, action):
    """Return the values of all critics, [C, B]."""
    inputs = jnp.concatenate([obs, action], axis=-1)
    num = len(params["params"]["heads_0"]["bias"])
    each = [jax.tree.map(lambda x, i=i: x[i], params) for i in range(num)]
    return jnp.stack([outputs(one, inputs)[:, 0] for one in each])


class Adam:
    """Kingma & Ba 2015, algorithm 1, on a tree of arrays."""

    def __init__(self, params, rate, epsilon):
        self.rate, self.epsilon, self.count = rate, epsilon, 0
        self.first = self.second = jax.tree.map(lambda x: np.zeros(np.shape(x)), params)

    def step(self, params, gradient):
        self.count += 1
        gradient = jax.tree.map(lambda x: np.asarray(x, float), gradient)
        self.first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, self.first, gradient)
        self.second = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g**2, self.second, gradient)

        def move(x, m, v):
            m, v = m / (1 - 0.9**self.count), v / (1 - 0.999**self.count)
            return np.float32(np.asarray(x, float) - self.rate * m / (np.sqrt(v) + self.epsilon))

        return jax.tree.map(move, params, self.first, self.second)


def average(params, target, tau):
    """Return the target parameters after a soft update with rate tau."""
    return jax.tree.map(lambda x, y: np.float32(tau * x + (1 - tau) * y), params, target)


def assert_close(found, expected):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5), found, expected)
