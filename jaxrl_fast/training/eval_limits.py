"""Limit an evaluation in host environments to a share of the training, where the user has not chosen its episodes."""

from typing import NamedTuple

from jaxrl_fast.options.run import MIN_EVAL_EPISODES, Options

SHARE = 10  # the steps of the training since the last evaluation, over those of the evaluation
MIN_LENGTH = 1000  # steps after which an episode may be cut, at least
LONGER = 5  # an episode may have that many times the steps of the longest one in training


class Limits(NamedTuple):
    """The limits of an evaluation in N environments."""

    num_steps: int  # of all environments together: with more, no further episode begins
    max_length: int  # an episode counts with its return after that many steps
    min_episodes: int = MIN_EVAL_EPISODES


def limits_of(options: Options, num_steps: int, longest: int, most: int) -> Limits | None:
    """Return the limits of an evaluation; None: it has all episodes, each of `most` steps at most.

    Without any end in training, one episode of each environment is enough: others would be as long.

    Args:
        options: Those of the run.
        num_steps: Environment steps of the training since the last evaluation.
        longest: Steps of the longest of the last episodes in training; 0 if none has ended yet.
        most: The most steps of any episode.
    """
    if options.eval_episodes != "auto":
        return None
    share = num_steps // SHARE
    if not longest:
        return Limits(share, min(max(share // options.num_envs, MIN_LENGTH), most), 1)
    return Limits(share, min(max(LONGER * longest, MIN_LENGTH), most))


def endless(limits: Limits) -> str:
    """Return a warning about an environment in which no episode has ended in training."""
    cut = f"the evaluation cuts each after {limits.max_length} steps"
    return f"no episode has ended in training, so {cut}; --env-option max_episode_steps=N ends episodes"
