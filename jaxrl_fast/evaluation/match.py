"""Play the policies of a run against another run's policies, or against the environment's scripted opponent."""

from collections.abc import Callable
from typing import Any

from jaxrl_fast.utils import files
from jaxrl_fast.utils.files import path_of

SCRIPTED = "scripted"
MATCH = "match.json"


def play(saved: Any, options: Any, summarize: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    """Act for each player in turn with the run's policy. Return the content of match.json.

    Args:
        saved: The run's learners with environments for the evaluation and opponents (`saved_run.SavedRun`).
        options: `episodes.Options` with `against`: the folder of another run, whose first seed plays, or SCRIPTED.
        summarize: `episodes.summarize`.

    Returns:
        In `sides`, by player: statistics of the run's returns as that player (`episodes.summarize`), and `won`, the
        share of episodes with a positive return.
    """
    from jaxrl_fast.envs.host.env import original_errors
    from jaxrl_fast.utils import compile_cache, devices

    names = saved.env.spec.players
    side = against_script if options.against == SCRIPTED else against_run
    cache = compile_cache.compile_cache(saved.settings.options.compile_cache)
    with cache, original_errors():
        found = {name: side(saved, saved.opponents[i], i, options) for i, name in enumerate(names)}
    sides = {}
    for name, (score, length, ended) in found.items():
        won = float((score[ended] > 0).mean()) if ended.any() else None
        sides[name] = summarize(score, length, ended) | {"won": won}
    return {
        "algo": saved.settings.algo,
        "env_id": saved.env.spec.id,
        "checkpoint": saved.checkpoint.name,
        "env_steps": saved.env_steps,
        "against": options.against,
        "play_seed": options.play_seed,
        "seeds": saved.seeds,
        "sides": sides,
        "device": devices.device(),
    }


def open_opponent(saved: Any, options: Any) -> list[Any]:
    """Return the opponent of each player: environments with a scripted one, or the learner of another run.

    Raises:
        ValueError: If the environment does not have two players or no scripted opponent, or the other run has another
            environment.
    """
    from jaxrl_fast.evaluation import saved_run

    mine = saved.env.spec
    if options.explore:
        raise ValueError("explore: cannot be combined with against, got both; leave it out")
    if len(mine.players) != 2:
        raise ValueError(f"against: requires a game of 2 players, got {mine.id} with {len(mine.players) or 1}")
    if options.against == SCRIPTED:
        each = [options.env_options | {"opponent": SCRIPTED, "side": name} for name in mine.players]
        make = lambda own: saved_run.open_env(saved.folder, None, mine.num_games, options.play_seed, own)[1]
        with files.inside(saved.start):
            return [make(own) for own in each]
    with files.inside(saved.start):
        folder = path_of(options.against, "against")
        settings, env = saved_run.open_env(folder, None, 1, options.play_seed)
    theirs = env.spec
    if (mine.id, mine.obs, mine.action, mine.players) != (theirs.id, theirs.obs, theirs.action, theirs.players):
        same = f"a run in {mine.id} with the same observations and actions"
        raise ValueError(f"against: must be {same}, got {folder}, trained in {theirs.id}")
    other = saved_run.read_run(folder, options.which, settings, env, {}, saved.start)
    return [saved_run.select_seed(other, other.seeds[0])] * 2


def against_script(saved: Any, env: Any, player: int, options: Any) -> Any:
    """Return returns, lengths and ends [S, E] of the run's policy as `player` against the scripted opponent."""
    from jaxrl_fast.evaluation import policy
    from jaxrl_fast.training import evaluator

    agent = policy.player_agent(saved.agent, player)
    evaluation = evaluator.Evaluator(env, agent, saved.seeds, options.episodes)
    return evaluation.episodes(saved.learners, -1 - options.play_seed)


def against_run(saved: Any, other: Any, player: int, options: Any) -> Any:
    """Return returns, lengths and ends [S, E] of the run's policy as `player` against the policy of another run."""
    import jax
    import numpy as np

    from jaxrl_fast.evaluation import policy
    from jaxrl_fast.players.joint import joint_agent
    from jaxrl_fast.training import evaluator

    pair = [policy.player_agent(saved.agent, player), policy.player_agent(other.agent, 1 - player)]
    several = len(saved.seeds) > 1
    repeat = lambda x: np.broadcast_to(x, (len(saved.seeds), *np.shape(x))) if several else x
    states = saved.learners, jax.tree.map(repeat, other.learners)
    order = (0, 1) if player == 0 else (1, 0)
    agent, state = joint_agent([pair[i] for i in order]), tuple(states[i] for i in order)
    evaluation = evaluator.Evaluator(saved.env, agent, saved.seeds, options.episodes)
    found = evaluation.episodes(state, -1 - options.play_seed)
    return tuple(evaluator.by_player(saved.env.spec.players, x)[player] for x in found)
