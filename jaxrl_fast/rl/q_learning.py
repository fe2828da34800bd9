"""Compute targets and losses of Q-learning from the outputs of a network, for every kind of value.

Outputs are [B, A], or [B, A, M] of distributions with M numbers. Targets are weighted atoms (`rl.value_distributions`).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxrl_fast.options.bonus import Munchausen
from jaxrl_fast.options.declare import Part
from jaxrl_fast.options.value import RescaledMean
from jaxrl_fast.rl import distributions, returns, value_distributions
from jaxrl_fast.rl.value_distributions import Atoms, CustomHead, ValueHead


class Rule(NamedTuple):
    """What the outputs represent, and how they are learned."""

    head: ValueHead | CustomHead
    rescales: bool  # outputs are h(q) (`returns.rescale`)
    huber: bool  # the loss is Huber's
    bonus: Munchausen | None


def rule_of(value: Part, bonus: Part) -> Rule:
    """Return the rule that the options choose. Raise ValueError if they contradict each other."""
    rescales = isinstance(value, RescaledMean) and value.rescaling
    munchausen = bonus if isinstance(bonus, Munchausen) else None
    if rescales and munchausen:
        raise ValueError("value.rescaling: cannot be combined with bonus munchausen, got both; switch one off")
    huber = getattr(value, "loss", "") == "huber"
    return Rule(value_distributions.head_of(value), rescales, huber, munchausen)


def target(rule: Rule, batch: Any, following: Array, chooser: Array, now: Array | None) -> Atoms:
    """Return the target of the value of (obs, action), as weighted atoms [B, K].

    `batch` has the action, reward, discount g and masks of a `replay.Sample`. `following` are the outputs at s' whose
    values q' enter the target, `chooser` those at s' that choose actions, and `now` those at s for a bonus.

    mean         r + g q'(s', a*), where a* is greedy for the chooser (Mnih et al. 2015; van Hasselt et al. 2016, eq. 4)
    munchausen   r + alpha max(clip, tau log pi(a|s)) + g sum_a' pi(a'|s') (q'(s', a') - tau log pi(a'|s')), with
                 pi = softmax(. / tau) of `now` and of the chooser (Vieillard et al. 2020, eq. 1). In an n-step target,
                 only the first step has the term with alpha.
    rescaled     h(r + g h^-1(q'(s', a*))) (Pohlen et al. 2018, section 3.2, over n steps as in Kapturowski et al. 2019,
                 section 2.3)
    """
    head, bonus, reward = rule.head, rule.bonus, batch.reward
    value = distributions.masked(value_distributions.mean(head, chooser), batch.next_action_mask)
    if bonus and now is not None:
        now = distributions.masked(value_distributions.mean(head, now), batch.action_mask)
        log_prob = bonus.temperature * distributions.chosen(jax.nn.log_softmax(now / bonus.temperature), batch.action)
        reward += bonus.alpha * jnp.clip(log_prob, bonus.clip, 0)
        log_policy = jax.nn.log_softmax(value / bonus.temperature)[..., None]
        atom, weight = value_distributions.from_outputs(head, following)  # [B, A, K]
        atom, weight = atom - bonus.temperature * log_policy, weight * jnp.exp(log_policy)
        atom, weight = (x.reshape(x.shape[0], -1) for x in (atom, weight))
    else:
        greedy = distributions.chosen(following, jnp.argmax(value, axis=-1))
        atom, weight = value_distributions.from_outputs(head, greedy)
    if rule.rescales:
        atom = returns.unrescale(atom)
    goal = reward[:, None] + batch.discount[:, None] * atom
    return Atoms(returns.rescale(goal) if rule.rescales else goal, weight)


def losses(rule: Rule, output: Array, action: Array, goal: Atoms) -> tuple[Array, Array, dict[str, Array]]:
    """Return the loss of each row [B], its error for priorities [B], and metrics [B], from the outputs at s."""
    value = distributions.chosen(value_distributions.mean(rule.head, output), action)
    td_error = goal.mean - value
    chosen = distributions.chosen(output, action)  # [B] or [B, M]
    losses, errors = value_distributions.losses(rule.head, chosen, goal, td_error, rule.huber)
    q_value = returns.unrescale(value) if rule.rescales else value
    return losses, errors, {"td_loss": losses, "q_value": q_value, "td_error_abs": jnp.abs(td_error)}
