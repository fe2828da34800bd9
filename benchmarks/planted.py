"""Do the guards guard? Bugs are planted one at a time, and the tests that should notice are run.

    python benchmarks/planted.py                      # all of them, some ten minutes on two cores
    python benchmarks/planted.py --only replay
    python benchmarks/planted.py --list

Everything happens in a copy of the tree in a temporary folder. First the tests that are named below must pass there as
it is; then each bug replaces one piece of text by another. A test that fails has caught it, and the line says by which
kind of error. Whatever takes too long is killed, and has caught nothing. What no test notices stays in the table.

Prints a line for each bug and a line of JSON at the end, and exits with 1 if any was missed.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PARTS = ("configs", "jaxrl_fast", "tests", "pyproject.toml")  # of the tree, as far as the tests want it
PYTEST = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")
LIMIT_S, CONTROL_LIMIT_S = 180, 900
CRASHES = {-signal.SIGABRT: "the process was aborted", -signal.SIGSEGV: "segmentation fault"}
FAILED = re.compile(r"^FAILED (?:tests/)?(.+?)(?: - ([\w.]+).*)?$", re.MULTILINE)


class Bug(NamedTuple):
    """One mistake, and who should notice it."""

    name: str
    file: str
    old: str  # must be there exactly once
    new: str
    tests: str  # for pytest, separated by blanks


POOLS, EPOCHS = "jaxrl_fast/in_flight.py", "jaxrl_fast/epochs.py"
LOOP, RETURNS, REPLAY = "jaxrl_fast/loop.py", "jaxrl_fast/returns.py", "jaxrl_fast/replay.py"
PPO, DQN, PQN = (f"jaxrl_fast/agents/{name}.py" for name in ("ppo", "dqn", "pqn"))
CORES, DENSE, CONVOLVE, TILES = (f"jaxrl_fast/{name}" for name in ("cores.c", "dense.c", "convolve.c", "tiles.h"))
GYMNAX, SINGLE = "jaxrl_fast/envs/gymnax.py", "jaxrl_fast/envs/gymnax_single.py"
PROGRAM = "jaxrl_fast/program.py"
KEEPER, CHECKPOINT, SCORES, TRAINER = (
    f"jaxrl_fast/{name}.py" for name in ("keeper", "checkpoint", "scores", "trainer")
)
STOPPED = "tests/training/test_resume.py::test_it_does_not_matter_where_it_was_stopped[320]"
UNPACK = "program.shard_state(checkpoint.unflatten(program.like, saved))"  # where a checkpoint becomes a state

IN_FLIGHT = "tests/envs/test_envpool.py::test_pools_in_flight_play_the_same_games[2-ffi]"

BUGS = (
    # What all tests are held to
    Bug(
        "distributions: [B, 1] where [B] is meant, which would meet [B] as [B, B]",
        "jaxrl_fast/distributions.py",
        "return chosen(jax.nn.log_softmax(self.logits), action)\n",
        "return chosen(jax.nn.log_softmax(self.logits), action)[..., None]\n",
        "tests/agents/test_ppo.py::test_invalid_rows_change_nothing",
    ),
    Bug(
        "replay: rows beyond the ring's end, which a CPU clamps in silence",
        REPLAY,
        "        at = (row + i) % layout.num_rows\n",
        "        at = row + i\n",
        "tests/test_loop.py::test_no_index_is_out_of_bounds",
    ),
    Bug(
        "loop: one key to act and to learn, in an ordinary run",
        LOOP,
        "    key_noise, key_update, key = jax.random.split(state.key, 3)\n    actors, experience, scores = act(",
        "    key_noise, key = jax.random.split(state.key)\n"
        "    key_update = key_noise\n    actors, experience, scores = act(",
        "tests/training/test_train.py::test_one_compilation_for_any_number_of_chunks",
    ),
    # Atari
    Bug(
        "frames: the first stack of a rollout is copies of its newest frame",
        "jaxrl_fast/frames.py",
        "jnp.full(num_envs, older, jnp.uint8)",
        "jnp.full(num_envs, 255, jnp.uint8)",
        "tests/rl/test_frame_stack.py::test_a_rollout_of_single_frames_gives_its_stacks_back[grey]",
    ),
    Bug(
        "in_flight: a row is decided by the noise of the row before",
        POOLS,
        "lambda x: x[1:], noise)",
        "lambda x: x[:-1], noise)",
        "tests/envs/test_envpool.py::test_each_row_is_decided_by_the_noise_of_its_own_place",
    ),
    Bug(
        "play: an evaluation that explores does so less from step to step",
        "jaxrl_fast/play.py",
        "    noise = jax.vmap(first)(jax.random.split(key_block, BLOCK))\n",
        "    noise = agent.noise(key_block, BLOCK, env.spec.num_envs)\n",
        "tests/training/test_evaluator.py::test_what_explores_less_from_row_to_row_does_so_in_training_alone",
    ),
    Bug("in_flight: all pools have the chance of the first", POOLS, "ours, noise[i])", "ours, noise[0])", IN_FLIGHT),
    Bug(
        "loop: what overlaps learns from the first rollout for ever",
        LOOP,
        "state.num_updates + 1, experience)",
        "state.num_updates + 1, before)",
        "tests/test_loop.py::test_what_overlaps_learns_from_the_rollout_before",
    ),
    Bug(
        "loop: what overlaps plays by the policy that it is about to have",
        LOOP,
        "lesson = learning.begin(state.agent, before, key_of_shard(env, key_update))",
        "lesson = learning.begin(state.agent, before, key_of_shard(env, key_update))\n"
        "    state = state._replace(agent=learning.end(learning.take(lesson, 0, learning.num))[0])",
        "tests/test_loop.py::test_what_overlaps_learns_from_the_rollout_before",
    ),
    Bug(
        "loop: the last gradient steps of an update that overlaps are left out",
        LOOP,
        "learning.take(lesson, by_then(t), by_then(t + 1))",
        "learning.take(lesson, by_then(t - 1), by_then(t))",
        "tests/test_loop.py::test_every_gradient_step_is_taken_once_and_evenly_over_the_rollout",
    ),
    Bug(
        "in_flight: a rollout is bootstrapped from where it began",
        POOLS,
        "Rollout(steps, obs(end.flights), memory, obs(actors.flights))",
        "Rollout(steps, obs(actors.flights), memory, obs(actors.flights))",
        IN_FLIGHT,
    ),
    Bug(
        "trainer: an evaluation that was broken off counts as done",
        "jaxrl_fast/trainer.py",
        "if self.finished == self.end and self.scores.evaluated_at == self.env_steps:",
        "if self.finished == self.plan.num_updates:",
        "tests/envs/test_envpool.py::test_a_signal_ends_an_evaluation_on_the_host_which_comes_when_the_run_goes_on[480]",
    ),
    Bug(
        "replay: a stack is cleared at a lost life",
        REPLAY,
        "age = put(ring.age, frames.ages(stack, same, ring.age[ring.head - 1]))",
        "age = put(ring.age, jnp.where(steps.valid, frames.ages(stack, same, ring.age[ring.head - 1]), 0))",
        "tests/envs/test_envpool.py::test_a_ring_of_single_frames_gives_back_envpools_stacks",
    ),
    Bug(
        "envpool: all shards play the games of the first",
        "jaxrl_fast/envs/envpool.py",
        "range(shard * num_pools, (shard + 1) * num_pools)",
        "range(num_pools)",
        "tests/parallel/test_shards.py::test_the_same_games_as_in_one_pool[on_devices-ffi]",
    ),
    Bug(
        "envpool: side by side, every shard is sent the actions of the first",
        "jaxrl_fast/envs/shards.py",
        "x[i] if is_batched else x",
        "x[0] if is_batched else x",
        "tests/parallel/test_shards.py::test_the_same_games_as_in_one_pool[side_by_side-ffi]",
    ),
    Bug(
        "envpool: pools in flight are those of the first shard",
        "jaxrl_fast/envs/shards.py",
        "partial(getattr(part.pools, name), i)",
        "partial(getattr(first.pools, name), i)",
        "tests/parallel/test_shards.py::test_pools_in_flight_are_the_shards_own[on_devices]",
    ),
    Bug(
        "networks: blocks of images come back in another order",
        "jaxrl_fast/convolutions.py",
        "return blocks.reshape(-1, *blocks.shape[2:])",
        "return blocks[::-1].reshape(-1, *blocks.shape[2:])",
        "tests/networks/test_networks.py::test_how_convolutions_are_computed_does_not_change_the_network",
    ),
    Bug(
        "networks: a strided convolution's gradient towards its input is one pixel off",
        "jaxrl_fast/convolutions.py",
        "(i, below, stride - 1), (j, right, stride - 1)",
        "(below, i, stride - 1), (j, right, stride - 1)",
        "tests/networks/test_conv.py::test_patches_times_a_matrix_are_the_convolution",
    ),
    Bug(
        "products: a product of few columns is left to the compiler, which makes the slow one of it",
        "jaxrl_fast/products.py",
        "return jax.lax.optimization_barrier(multiply(g.T, x)).T",
        "return multiply(g.T, x).T",
        "tests/networks/test_networks.py::test_products_of_few_columns_are_compiled_as_they_were_written",
    ),
    Bug(
        "products: of few outputs the first alone has a gradient towards the inputs",
        "jaxrl_fast/products.py",
        "g[:, i, None] * kernel[None, :, i]",
        "g[:, i, None] * kernel[None, :, 0]",
        "tests/networks/test_networks.py::test_a_product_on_a_cpu_has_the_gradient_of_a_product",
    ),
    Bug(
        "products: a kernel's gradient is left to the compiler, which takes longer",
        "jaxrl_fast/products.py",
        "jax.lax.optimization_barrier(x.T)",
        "x.T",
        "tests/networks/test_networks.py::test_a_kernels_gradient_is_a_product_of_the_transposed_rows",
    ),
    Bug(
        "dense: what fills no register is written beside its place",
        TILES,
        "n = four(p, p->N - 4);",
        "n = four(p, n - 4) + 4;",
        "tests/kernels/test_dense.py::test_values_and_gradients_are_those_of_the_formula",
    ),
    Bug(
        "dense: columns are told by their steps, which one input has too",
        DENSE,
        "        if (l.columns) {\n            transpose(before",
        "        if (l.x_row == 1) {\n            transpose(before",
        "tests/kernels/test_dense.py::test_values_and_gradients_are_those_of_the_formula",
    ),
    Bug(
        "dense: a NaN before relu is 0 after it",
        "jaxrl_fast/activations.h",
        "y[i] = y[i] < 0 ? 0 : y[i];",
        "y[i] = y[i] > 0 ? y[i] : 0;",
        "tests/kernels/test_dense.py::test_what_is_not_finite_stays_so",
    ),
    Bug(
        "dense: every member of a batch has the bias of the first",
        DENSE,
        "kernel += l.I * l.O, bias += l.O)",
        "kernel += l.I * l.O)",
        "tests/kernels/test_dense.py::test_batches_are_layers_one_by_one",
    ),
    Bug(
        "convolve: patches that share a pixel are added up at once",
        CONVOLVE,
        "l.apart = (l.side + l.stride - 1) / l.stride;",
        "l.apart = l.side > l.stride ? l.side / l.stride : 1;",
        "tests/kernels/test_conv.py::test_layers_of_the_sizes_that_are_trained",
    ),
    Bug(
        "convolve: columns that are computed once more are added twice",
        TILES,
        "p->N >= 4 && !p->onto)",
        "p->N >= 4)",
        "tests/kernels/test_conv.py::test_values_and_gradients_are_those_of_the_formula",
    ),
    Bug(
        "convolve: every member of a batch learns from the images of the first",
        CONVOLVE,
        "f->i * l->B + b, f->rooms + part * l->size),\n            .rows",
        "b, f->rooms + part * l->size),\n            .rows",
        "tests/kernels/test_conv.py::test_batches_are_convolutions_one_by_one",
    ),
    Bug(
        "convolutions: shades go up to 255 where they are convolved in C",
        "jaxrl_fast/convolutions.py",
        "(x, kernel / WHITE)",
        "(x, kernel)",
        "tests/kernels/test_conv.py::test_only_float32_layers_are_ours",
    ),
    Bug(
        "convolve: a part's images are not all its own",
        CONVOLVE,
        "return l->B * part / l->parts;",
        "return l->B / l->parts * part;",
        "tests/kernels/test_conv.py::test_values_and_gradients_are_those_of_the_formula",
    ),
    Bug(
        "layer_norm: what its rows have in common with the gradient is not taken out",
        "jaxrl_fast/layer_norm.c",
        "to_x[o] - mean - normed[o] * along",
        "to_x[o] - mean",
        "tests/kernels/test_layer_norm.py::test_values_and_gradients_are_those_of_the_formula",
    ),
    Bug(
        "share: whoever has shared work does not wait for those that help",
        "jaxrl_fast/share.h",
        "atomic_load(&shared->done) < parts; ++looks)",
        "atomic_load(&shared->next) < parts; ++looks)",
        "tests/kernels/test_conv.py::test_threads_share_parts_and_change_no_bit",
    ),
    Bug(
        "native: what is left of a library is loaded",
        "jaxrl_fast/native.py",
        "if kept and _intact(kept):",
        "if kept and kept.is_file():",
        "tests/kernels/test_build.py::test_a_damaged_library_is_compiled_anew",
    ),
    Bug(
        "cores: of several arrays each core adds up the first",
        CORES,
        "return argument(core->call, i + 1)->data;",
        "return argument(core->call, 1)->data;",
        "tests/parallel/test_collectives.py::test_trees_are_summed_and_gathered_leaf_by_leaf",
    ),
    Bug(
        "cores: sums that lie one after another overwrite the first",
        CORES,
        "++i, before += size) {\n        size = size_of(me, i);\n        if (num",
        "++i) {\n        size = size_of(me, i);\n        if (num",
        "tests/parallel/test_collectives.py::test_trees_are_summed_and_gathered_leaf_by_leaf",
    ),
    Bug(
        "dqn: every hand draws the first hand's part",
        DQN,
        "own = partial(across.part, num_hands=num_hands, axis=-1)",
        "own = lambda numbers: numbers[..., : size // num_hands]",
        "tests/parallel/test_collectives.py::test_hands_learn_what_one_core_learns[dqn-2]",
    ),
    Bug(
        "dense_layers: noise that all rows share leaves out that of the inputs",
        "jaxrl_fast/dense_layers.py",
        "spread_kernel * jnp.outer(noise_in, noise_out)",
        "spread_kernel * jnp.broadcast_to(noise_out, spread_kernel.shape)",
        "tests/networks/test_networks.py::test_noise_that_all_rows_share_is_theirs_one_by_one",
    ),
    Bug(
        "envpool: a lost life ends the game",
        "jaxrl_fast/envs/envpool.py",
        "game=Game(reward, over | truncated) if task.lives else (),",
        "game=Game(reward, died | truncated) if task.lives else (),",
        "tests/envs/test_envpool.py::test_scores_are_of_whole_games_unclipped",
    ),
    Bug(
        "envpool: a game that ends on the limit step is none that was lost",
        "jaxrl_fast/envs/envpool.py",
        "died = terminated | over",
        "died = terminated",
        "tests/envs/test_envpool.py::test_a_game_that_is_over_on_the_very_step_of_the_limit_is_lost",
    ),
    Bug(
        "envpool: the gap after going on is learnt from",
        REPLAY,
        "return ring._replace(valid=ring.valid.at[newest].set(False))",
        "return ring",
        "tests/envs/test_envpool.py::test_without_that_it_goes_on_with_everything_but_the_games",
    ),
    # Where episodes end
    Bug(
        "gymnax: time that runs out is death",
        SINGLE,
        "discount=1.0 - terminated.astype(jnp.float32)",
        "discount=1.0 - (terminated | truncated).astype(jnp.float32)",
        "tests/envs/test_gymnax.py::test_time_that_runs_out_ends_an_episode_and_no_value[gymnax/CartPole-v1-4]",
    ),
    Bug(
        "gymnax: the last observation is the next episode's first",
        GYMNAX,
        "obs=episode.obs,",
        "obs=_where(timestep.last, stock.episode.obs, episode.obs),",
        "tests/envs/test_gymnax.py::test_every_step_is_gymnax_step_and_its_final_observation[gymnax/CartPole-v1]",
    ),
    Bug(
        "ppo: time that runs out is death",
        PPO,
        "discount = config.gamma * steps.discount",
        "discount = config.gamma * (1.0 - steps.last)",
        "tests/agents/test_ppo.py::test_value_where_time_runs_out_is_bootstrapped",
    ),
    Bug(
        "ppo: the last row bootstraps from itself",
        PPO,
        "critic(normalised(state, rollout.next_obs))[None]",
        "value[-1:]",
        "tests/agents/test_ppo.py::test_advantages_look_beyond_the_rollouts_end",
    ),
    Bug(
        "returns: lambda is not cut where an episode ends",
        RETURNS,
        "trace = jnp.where(last, 0.0, lambda_)",
        "trace = jnp.full_like(reward, lambda_)",
        "tests/rl/test_returns.py::test_truncation_bootstraps_and_cuts",
    ),
    Bug(
        "pqn: lambda returns off by one",
        PQN,
        "next_best = jnp.concatenate([steps.extras[1:], best_at_end[None]])",
        "next_best = steps.extras",
        "tests/agents/test_pqn.py::test_targets_worked_by_hand",
    ),
    # Rows whose action was ignored
    Bug(
        "ppo: reset rows in the loss",
        PPO,
        "weight = steps.valid.astype(jnp.float32)",
        "weight = jnp.ones_like(reward)",
        "tests/agents/test_ppo.py::test_invalid_rows_change_nothing",
    ),
    Bug(
        "ppo: advantages standardised with reset rows",
        EPOCHS,
        "return Deal(order, normalize.moments(x, weight))",
        "return Deal(order, normalize.moments(x, weight)._replace(mean=x.mean(-1)))",
        "tests/agents/test_ppo.py::test_invalid_rows_change_nothing",
    ),
    Bug(
        "ppo: observation statistics with reset rows",
        PPO,
        "normalize.seen(stats, obs, steps.valid)",
        "normalize.seen(stats, obs, steps.valid | True)",
        "tests/agents/test_ppo.py::test_statistics_of_observations_leave_reset_rows_out",
    ),
    Bug(
        "ppo: the scale of rewards with reset rows",
        PPO,
        "normalize.update_reward(rewards, reward, steps.last, steps.valid, parts.config.gamma, axis_name)",
        "normalize.update_reward(rewards, reward, steps.last, steps.valid | True, parts.config.gamma, axis_name)",
        "tests/agents/test_ppo.py::test_the_scale_of_rewards_leaves_reset_rows_out",
    ),
    Bug(
        "pqn: reset rows in the loss",
        PQN,
        "steps.valid.astype(jnp.float32)",
        "jnp.ones_like(target)",
        "tests/agents/test_pqn.py::test_reset_rows_change_nothing",
    ),
    Bug(
        "replay: reset rows are drawn",
        REPLAY,
        "valid = _at(ring.valid, row, env) & (readable > 0)",
        "valid = jnp.broadcast_to(readable > 0, row.shape)",
        "tests/replay/test_ring.py::test_resets_alone_give_nothing",
    ),
    Bug(
        "dqn: reset rows have a priority",
        DQN,
        "(offset < -layout.n_step)[:, None] & ring.valid[row]",
        "(offset < -layout.n_step)[:, None] & (ring.valid[row] | True)",
        "tests/agents/test_dqn.py::test_what_cannot_be_read_has_no_priority_and_what_is_new_the_largest[2-1-3-0]",
    ),
    # Replay
    Bug(
        "replay: gamma in the place of gamma^n",
        REPLAY,
        "_at(ring.action, row, env), reward, discount, look",
        "_at(ring.action, row, env), reward, gamma * (discount > 0), look",
        "tests/agents/test_dqn.py::test_three_steps_worked_by_hand",
    ),
    Bug(
        "replay: n steps go on beyond an episode's end",
        REPLAY,
        "going & ~_at(ring.last, at, env)",
        "going",
        "tests/agents/test_dqn.py::test_three_steps_worked_by_hand",
    ),
    Bug(
        "replay: the head is one row off",
        REPLAY,
        "head=(ring.head + num_new) % layout.num_rows",
        "head=(ring.head + num_new - 1) % layout.num_rows",
        "tests/replay/test_ring.py::test_stacks_worked_by_hand",
    ),
    Bug(
        "replay: draws begin one row late",
        REPLAY,
        "row = (ring.head - ring.size + place) % layout.num_rows",
        "row = (ring.head - ring.size + place + 1) % layout.num_rows",
        "tests/replay/test_ring.py::test_each_step_is_as_likely_as_another[9]",
    ),
    Bug(
        "replay: n steps do not wrap around",
        REPLAY,
        "at = (row + i) % layout.num_rows",
        "at = jnp.minimum(row + i, layout.num_rows - 1)",
        "tests/replay/test_ring.py::test_what_is_read_is_what_happened[vector-one-by-one]",
    ),
    Bug(
        "replay: rows are drawn before they have n successors",
        REPLAY,
        "ring.size - layout.n_step - num_lost(layout, ring)",
        "ring.size - 1 - num_lost(layout, ring)",
        "tests/replay/test_ring.py::test_a_ring_as_short_as_what_it_needs_has_nothing_to_read",
    ),
    Bug(
        "replay: a stack reaches into the episode before",
        "jaxrl_fast/frames.py",
        "back = row[:, None] - jnp.minimum(lag, age.astype(jnp.int32)[:, None])",
        "back = row[:, None] - lag",
        "tests/replay/test_ring.py::test_stacks_worked_by_hand",
    ),
    Bug(
        "replay: stacks are read whose frames were overwritten",
        REPLAY,
        "jnp.where(ring.size == layout.num_rows, max(layout.frame_stack - 1, 0), 0)",
        "jnp.zeros_like(ring.size)",
        "tests/replay/test_ring.py::test_rows_that_can_be_read_are_counted[grey-one-by-one]",
    ),
    Bug(
        "dqn: rows that cannot be read yet have a priority",
        DQN,
        "(offset < -layout.n_step)[:, None]",
        "(offset < 0)[:, None]",
        "tests/agents/test_dqn.py::test_what_cannot_be_read_has_no_priority_and_what_is_new_the_largest[2-1-3-0]",
    ),
    Bug(
        "dqn: stacks that were overwritten keep their priority",
        DQN,
        "lost = max(layout.frame_stack - 1, 0)",
        "lost = 0",
        "tests/agents/test_dqn.py::test_what_cannot_be_read_has_no_priority_and_what_is_new_the_largest[1-5-2-4]",
    ),
    Bug(
        "dqn: importance weights dropped",
        DQN,
        "weight = importance(chance, exponent_now(parts, num_updates), parts.spec.axis_name)",
        "weight = found.astype(jnp.float32)",
        "tests/agents/test_dqn.py::test_a_gradient_step_weighs_by_importance",
    ),
    # What is counted
    Bug(
        "dqn: the target never moves",
        DQN,
        "return move_target(config, learner), metrics",
        "return learner, metrics",
        "tests/agents/test_dqn.py::test_values_are_bootstrapped_where_time_runs_out[1]",
    ),
    Bug(
        "dqn: the target moves at every step",
        DQN,
        "since >= period",
        "since >= 0",
        "tests/agents/test_dqn.py::test_the_target_moves_whenever_a_period_of_environment_steps_has_passed",
    ),
    Bug(
        "dqn: the replay ratio counts updates",
        DQN,
        "jnp.clip(after - start, 0, per_update)",
        "jnp.clip(after - start, 0, 1)",
        "tests/agents/test_dqn.py::test_the_replay_ratio_holds_beyond_what_int32_counts",
    ),
    Bug(
        "dqn: learning starts at once",
        DQN,
        "jnp.clip(after - start, 0, per_update)",
        "jnp.clip(after, 0, per_update)",
        "tests/agents/test_dqn.py::test_the_replay_ratio_holds_exactly[10]",
    ),
    Bug(
        "dqn: epsilon falls with updates",
        DQN,
        "env_steps = num_env_steps(parts, state) + noise.explore.place * num_envs",
        "env_steps = state.num_updates",
        "tests/rl/test_exploration.py::test_agents_count_environment_steps[4-5-dqn]",
    ),
    Bug(
        "pqn: epsilon falls with updates",
        PQN,
        "before = exploration.env_steps(parts.spec, parts.config.rollout_length, state.num_updates)",
        "before = state.num_updates",
        "tests/rl/test_exploration.py::test_agents_count_environment_steps[4-5-pqn]",
    ),
    Bug(
        "scores: environment steps in int32",
        SCORES,
        '"env_steps": self.recorded * self.steps_per_update,',
        '"env_steps": int(np.int64(self.recorded * self.steps_per_update).astype(np.int32)),',
        "tests/training/test_resume.py::test_steps_are_counted_past_2_to_the_31[pqn]",
    ),
    # Chance
    Bug(
        "loop: each rollout has the same noise",
        LOOP,
        "TrainState(learner, actors, key, state.num_updates + 1)",
        "TrainState(learner, actors, state.key, state.num_updates + 1)",
        "tests/test_loop.py::test_no_key_is_used_twice",
    ),
    Bug(
        "program: all seeds are alike",
        PROGRAM,
        "jax.random.key(seed)",
        "jax.random.key(0 * seed)",
        "tests/training/test_train.py::test_seeds_are_trained_side_by_side",
    ),
    Bug(
        "program: a seed that takes its turn is put where the first was",
        PROGRAM,
        "return put(states, state, i), put(metrics, rows, i)",
        "return put(states, state, 0), put(metrics, rows, i)",
        "tests/parallel/test_program.py::test_a_seed_of_a_batch_is_its_single_run[8-True-2]",
    ),
    Bug(
        "program: who takes turns has the first one's hyperparameters",
        PROGRAM,
        "advance(member(states, i), member(values, i), num_updates)",
        "advance(member(states, i), member(values, 0), num_updates)",
        "tests/config/test_population.py::test_a_member_starts_as_its_single_run[pqn-True]",
    ),
    Bug(
        "keeper: seeds that only fill up a program are saved too",
        "jaxrl_fast/keeper.py",
        "checkpoint.flatten(state, num_seeds if num_seeds > 1 else None)",
        "checkpoint.flatten(state)",
        "tests/training/test_resume.py::test_seeds_that_were_filled_up_go_on_with_other_devices",
    ),
    Bug(
        "loop: all shards are alike",
        LOOP,
        "return key if axis_name is None else jax.random.fold_in(key, jax.lax.axis_index(axis_name))",
        "return key",
        "tests/parallel/test_program.py::test_shards_play_episodes_of_their_own",
    ),
    Bug(
        "dqn: each device goes by its own gradient",
        DQN,
        "gradient, of_hands = across.total((gradient, of_hands), parts.spec.sharing)",
        "",
        "tests/agents/test_dqn.py::test_shards_learn_what_one_device_does",
    ),
    Bug(
        "dqn: gradients of devices are added up for their mean",
        DQN,
        "weight / config.batch_size",
        "weight / size",
        "tests/agents/test_dqn.py::test_shards_learn_what_one_device_does",
    ),
    Bug(
        "dqn: importance is over the largest of one device",
        DQN,
        "most = across.gather(weight.max(), axis_name).max()",
        "most = weight.max()",
        "tests/agents/test_dqn.py::test_importance_is_over_the_largest_of_all_devices",
    ),
    Bug(
        "dqn: a hand knows only of its own part how wrong it was",
        DQN,
        "errors = of_hands if num_hands > 1 else errors",
        "errors = jnp.tile(errors, num_hands)",
        "tests/parallel/test_collectives.py::test_hands_learn_what_one_core_learns[dqn_all-2]",
    ),
    Bug(
        "epochs: each hand takes all rows",
        EPOCHS,
        "across.part(deal.order, epochs.num_hands, axis=1)",
        "deal.order",
        "tests/parallel/test_collectives.py::test_hands_learn_what_one_core_learns[pqn-2]",
    ),
    Bug(
        "ppo: each hand goes by its own KL",
        PPO,
        "gradient, approx_kl = across.total((gradient, approx_kl), parts.spec.sharing)",
        "gradient = across.total(gradient, parts.spec.sharing)",
        "tests/parallel/test_collectives.py::test_hands_learn_what_one_core_learns[ppo_kl-2]",
    ),
    Bug(
        "cores: nobody waits until others have read",
        CORES,
        "    if (!await_all(cores, num, offsetof(Core, done), now)) goto alone;\n    return NULL;",
        "    return NULL;",
        "tests/parallel/test_collectives.py::test_many_cores_sum_a_slice_each",
    ),
    Bug(
        "cores: what others have summed is not fetched",
        CORES,
        "if (core != mine && first < end)",
        "if (core == mine && first < end)",
        "tests/parallel/test_collectives.py::test_many_cores_sum_a_slice_each",
    ),
    Bug(
        "dqn: what is owed is counted by the environments of one device",
        DQN,
        """    num_envs = parts.spec.num_envs_in_all
    ratio, start""",
        """    num_envs = parts.spec.num_envs
    ratio, start""",
        "tests/agents/test_dqn.py::test_the_replay_ratio_holds_exactly",
    ),
    Bug(
        "program: a chunk keeps the ring that it was given",
        PROGRAM,
        """            donate_argnums=0,
        )
        .lower""",
        """        )
        .lower""",
        "tests/replay/test_ring.py::test_training_keeps_one_ring",
    ),
    Bug(
        "trainer: programs of pools are kept for processes that cannot find them",
        "jaxrl_fast/trainer.py",
        "host.compile_cache(self.options.compile_cache and self.plan.env.on_device)",
        "host.compile_cache(self.options.compile_cache)",
        "tests/envs/test_envpool.py::test_no_program_of_a_pool_is_kept_for_later_processes",
    ),
    Bug(
        "dqn: rewards are not clipped",
        DQN,
        "rollout = normalize.clip_rewards(rollout, parts.config.clip_rewards)",
        "",
        "tests/agents/test_agents.py::test_rewards_that_are_clipped_count_by_their_signs",
    ),
    Bug(
        "dqn: the learning rate is annealed over environment steps",
        DQN,
        "max(int(config.ratio * learning_steps), 1)",
        "learning_steps",
        "tests/agents/test_agents.py::test_the_learning_rate_falls_to_zero_counted_in_gradient_steps",
    ),
    Bug(
        "pqn: no layer normalisation",
        PQN,
        "layer_norm=config.layer_norm",
        "layer_norm=False",
        "tests/agents/test_agents.py::test_options_of_the_network_reach_it",
    ),
    Bug(
        "ppo: advantages are divided by their variance",
        EPOCHS,
        "/ (jnp.sqrt(var) + 1e-8)",
        "/ (var + 1e-8)",
        "tests/agents/test_ppo.py::test_advantages_are_standardised_in_each_minibatch",
    ),
    Bug(
        "convolutions: residual blocks without what they add to",
        "jaxrl_fast/convolutions.py",
        "x = x + convolve(activate(self, convolve(activate(self, x))))",
        "x = convolve(activate(self, convolve(activate(self, x))))",
        "tests/networks/test_conv.py::test_residual_stages_are_those_of_the_figure",
    ),
    Bug(
        "epochs: each has the same minibatches",
        EPOCHS,
        "jax.lax.map(deal, jax.random.split(key, epochs.num_epochs))",
        "jax.lax.map(deal, jnp.stack([key] * epochs.num_epochs))",
        "tests/test_loop.py::test_no_key_is_used_twice",
    ),
    Bug(
        "envpool: a limit that highway does not heed is taken",
        "jaxrl_fast/envs/envpool_tasks.py",
        'HEEDLESS = ("envpool.highway", ',
        "HEEDLESS = (",
        "tests/envs/test_envpool_options.py::test_a_limit_that_envpool_would_not_heed_is_refused",
    ),
    Bug(
        "envpool: what a death leaves is no number",
        "jaxrl_fast/envs/envpool.py",
        "inputs.readable(died, tasks.encode(task, obs))",
        "tasks.encode(task, obs)",
        "tests/envs/test_envpool.py::test_what_a_death_leaves_is_readable_and_what_time_leaves_is_left_alone",
    ),
    Bug(
        "ppo: a squashed action is scored in the place of what was drawn",
        "jaxrl_fast/agents/ppo.py",
        "Batch((), acted.drawn, acted.policy",
        "Batch((), steps.action, acted.policy",
        "tests/agents/test_ppo.py::test_what_was_drawn_for_a_squashed_action_is_learnt_from",
    ),
    Bug(
        "ppo: the score of a squashed action is of what float32 can tell of it",
        "jaxrl_fast/agents/ppo.py",
        "extras=Squashed(pi, drawn) if",
        "extras=Squashed(pi, jnp.arctanh(jnp.clip(jnp.tanh(drawn), -1 + 6e-8, 1 - 6e-8))) if",
        "tests/agents/test_ppo.py::test_squashed_actions_are_scored_where_tanh_rounds_to_one",
    ),
    Bug(
        "keeper: a replay is looked through for what is not finite",
        "jaxrl_fast/keeper.py",
        "if name not in of_replay",
        "if name",
        "tests/training/test_resume.py::test_what_is_in_a_replay_stops_no_checkpoint",
    ),
    Bug(
        "trainer: a lost seed keeps a run from stopping when solved",
        "jaxrl_fast/trainer.py",
        "solved[0] if solved else diverged",
        "solved[0] if solved else None",
        "tests/training/test_resume.py::test_a_lost_seed_keeps_no_run_from_stopping_when_solved",
    ),
    Bug(
        "normalize: devices' means are taken for the same",
        "jaxrl_fast/normalize.py",
        "(share * (var + (mean - of_all_mean) ** 2)).sum(0)",
        "(share * var).sum(0)",
        "tests/rl/test_normalize.py::test_moments_are_those_of_the_weighted_rows_of_all_devices",
    ),
    Bug(
        "program: games that begin anew go on with rewards of others",
        PROGRAM,
        "loop.cut(state.rollout)",
        "state.rollout",
        "tests/test_loop.py::test_games_that_begin_anew_cut_what_is_to_be_learnt_from",
    ),
    Bug(
        "shards: none plays while it learns",
        "jaxrl_fast/envs/shards.py",
        'first.pools._replace(send=of_pools("send"), receive=of_pools("receive"))',
        'first.pools._replace(send=of_pools("send"), receive=of_pools("receive"), overlap=False)',
        "tests/parallel/test_shards.py::test_shards_play_while_they_learn_if_one_does",
    ),
    Bug(
        "dqn: each gradient step of an update draws the same batch",
        DQN,
        "jax.random.clone(keys[i])",
        "jax.random.clone(keys[0])",
        "tests/agents/test_dqn.py::test_each_gradient_step_draws_a_batch_of_its_own",
    ),
    Bug(
        "dqn: the target's noise is that of what learns",
        DQN,
        "for key in jax.random.split(key_noise))",
        "for key in (key_noise, key_noise))",
        "tests/test_loop.py::test_no_key_is_used_twice",
    ),
    # What is saved
    Bug(
        "checkpoint: the arrays' sum is not looked at",
        CHECKPOINT,
        'if manifest["files"] != {ARRAYS: _digest(folder / ARRAYS)}:',
        "if False:",
        "tests/runs/test_checkpoint.py::test_read_detects_flipped_bit",
    ),
    Bug(
        "checkpoint: what is saved is no copy",
        CHECKPOINT,
        'array = np.array(x, order="C")',
        'array = np.asarray(x, order="C")',
        "tests/runs/test_checkpoint.py::test_flatten_copies_arrays",
    ),
    Bug(
        "scores: the host's lists are saved without a copy",
        SCORES,
        "copy.copy(getattr(self, name))",
        "getattr(self, name)",
        "tests/training/test_resume.py::test_stopped_twice_and_with_other_chunks_it_ends_with_the_same_bits[pqn] "
        + STOPPED
        + " tests/training/test_resume.py::test_a_full_disk_ends_no_run",
    ),
    Bug(
        "gymnax: reset gives the same memory twice",
        GYMNAX,
        "jax.tree.map(jnp.copy, episode)",
        "episode",
        "tests/envs/test_gymnax.py::test_what_reset_gives_may_be_donated",
    ),
    Bug(
        "keeper: the key is not restored",
        KEEPER,
        UNPACK,
        f"{UNPACK}._replace(key=program.init(np.int32(0)).key)",
        STOPPED,
    ),
    Bug(
        "keeper: the replay is not restored",
        KEEPER,
        UNPACK,
        f"(lambda s: s._replace(agent=s.agent._replace(replay=program.init(np.int32(0)).agent.replay)))({UNPACK})",
        "tests/training/test_resume.py::test_stopped_twice_and_with_other_chunks_it_ends_with_the_same_bits[dqn]",
    ),
    Bug(
        "keeper: updates without a record yet are not saved",
        KEEPER,
        "arrays | ledger",
        "arrays",
        STOPPED,
    ),
    Bug(
        "sinks: what was written after the checkpoint stays",
        "jaxrl_fast/sinks.py",
        "self.size = self.file.truncate(size or 0)",
        "self.size = self.file.seek(0, os.SEEK_END)",
        STOPPED,
    ),
    Bug(
        "checkpoint: a worse one is marked as the best, and the best removed",
        CHECKPOINT,
        "if known is None or known[0] == folder or known[1] < score:",
        "if score is not None:",
        "tests/training/test_resume.py::test_the_best_checkpoint_of_a_run_stays_when_that_goes_on",
    ),
    Bug(
        "trainer: where a run ends that stops when solved depends on its stops",
        TRAINER,
        "self.record()  # what an evaluation at this moment might have belonged to",
        "pass",
        "tests/training/test_resume.py::test_where_it_stops_when_solved_no_stop_changes",
    ),
    Bug(
        "population: all records of the last chunk wait, however long that was",
        "jaxrl_fast/population.py",
        "while self.available >= self.length + waiting or everything and self.available:",
        "while self.available >= self.length and not waiting or everything and self.available:",
        "tests/training/test_resume.py::test_a_checkpoint_does_not_depend_on_the_chunks",
    ),
    Bug(
        "journal: lines that find no room end the run",
        "jaxrl_fast/journal.py",
        "except OSError as error:  # a run cannot go on from lines that are not there",
        "except ZeroDivisionError as error:",
        "tests/training/test_resume.py::test_a_disk_that_is_really_full_ends_no_run",
    ),
    Bug(
        "keeper: nothing is ever saved by the clock",
        KEEPER,
        "return self.pace.over() and not self.saver.busy",
        "return False",
        "tests/training/test_resume.py::test_saved_by_the_clock_and_killed_it_ends_with_the_same_bits",
    ),
    Bug(
        "trainer: a stop saves nothing",
        TRAINER,
        "if not (self.exact and self.signal):",
        "if not self.signal:",
        "tests/training/test_resume.py::test_stopped_twice_and_with_other_chunks_it_ends_with_the_same_bits[pqn]",
    ),
    Bug(
        "trainer: parameters that are not finite are noticed by a save only",
        TRAINER,
        "if self.scores.diverged[member] is None:",
        "if False:",
        "tests/training/test_resume.py::test_a_parameter_that_is_not_finite_stops_the_run_after_the_chunk",
    ),
    Bug(
        "host: what nobody reads ends the run at a signal",
        "jaxrl_fast/host.py",
        "with contextlib.suppress(OSError, RuntimeError):",
        "with contextlib.suppress(ValueError):",
        "tests/training/test_train.py::test_a_signal_is_heard_where_nobody_reads_what_is_said",
    ),
    Bug(
        "host: a worker does not see that its sweep is gone",
        "jaxrl_fast/host.py",
        "while os.getppid() == parent:",
        "while True:",
        "tests/sweep/test_sweep.py::test_workers_stop_when_sweep_is_killed[False]",
    ),
    Bug(
        "gymnax: a preset may call what it likes",
        GYMNAX,
        "if env_id and not construct and _is_factory(source):",
        "if False:",
        "tests/envs/test_gymnax.py::test_an_unknown_environment_is_answered_with_the_nearest",
    ),
    Bug(
        "gymnax: observations have the dtype that reset gives them",
        SINGLE,
        "state, obs = (jax.tree.map(_joined, *both) for both in ((state, next_state), (obs, next_obs)))",
        "state = jax.tree.map(_joined, state, next_state)",
        "tests/envs/test_gymnax.py::test_observations_have_one_dtype_that_holds_those_of_reset_and_of_step",
    ),
    Bug(
        "networks: only pictures that nature can see become fractions",
        "jaxrl_fast/networks.py",
        "min(obs.shape[:2]) >= SMALLEST_PICTURE",
        "min(obs.shape[:2]) >= SMALLEST_IMAGE",
        "tests/networks/test_networks.py::test_white_is_1_whatever_the_network",
    ),
    Bug(
        "memory: files that can be read again count as used",
        "jaxrl_fast/memory.py",
        " + int(stat[files])",
        " + 0 * int(stat[files])",
        "tests/training/test_memory.py::test_the_limits_of_control_groups_are_kept_and_their_cached_files_count_as_free",
    ),
    Bug(
        "config: what a preset calls solved holds for any environment",
        "jaxrl_fast/config.py",
        'values.pop("solved", None)',
        "pass",
        "tests/config/test_config.py::test_what_a_preset_calls_solved_is_of_its_own_environment",
    ),
    # Time
    Bug(
        "feed: the metrics of every chunk are kept in a list",
        "jaxrl_fast/feed.py",
        "rows = jax.device_get(",
        "self.kept = [*getattr(self, 'kept', ()), chunk.rows]; rows = jax.device_get(",
        "tests/training/test_train.py::test_nothing_on_the_device_is_kept_from_chunk_to_chunk",
    ),
    Bug(
        "program: the number of updates is static",
        PROGRAM,
        "return Program(start_all, run,",
        "return Program(start_all, lambda state, n: jax.jit(lambda state: spread.advance(state, values, int(n)),"
        " donate_argnums=0)(state),",
        "tests/training/test_train.py::test_one_compilation_for_any_number_of_chunks",
    ),
    Bug(
        "program: every chunk is compiled anew",
        PROGRAM,
        "return Program(start_all, run,",
        "return Program(start_all, lambda state, n: jax.jit(lambda *y: spread.advance(*y), donate_argnums=0)("
        "state, values, jax.device_put(n, spread.limit)),",
        "tests/training/test_train.py::test_one_compilation_for_any_number_of_chunks",
    ),
)


def copy_tree(folder: Path) -> None:
    """What the tests want, and no caches."""
    for part in PARTS:
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__", ".*"))
        else:
            shutil.copy(ROOT / part, folder / part)


def run_tests(tree: Path, arguments: list[str], limit: float) -> tuple[int | None, str]:
    """pytest's exit status and what it said; None where it was killed.

    The same examples each time, and all that it writes beside the tree. SIGTERM would only ask a training to stop.
    """
    env = os.environ | {"CI": "1", "COLUMNS": "200", "PYTHONDONTWRITEBYTECODE": "1", "TMPDIR": str(tree.parent)}
    process = subprocess.Popen(
        [*PYTEST, *arguments],
        cwd=tree,
        env=env,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=limit)
        return process.returncode, said
    except subprocess.TimeoutExpired:
        return None, ""
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # and what the tests have started
            process.communicate()


def plant(tree: Path, bug: Bug) -> tuple[str, str]:
    """The test that noticed it and the kind of its error; or "" and why there is none."""
    path = tree / bug.file
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace(bug.old, bug.new), encoding="utf-8")
    try:
        status, said = run_tests(tree, ["-x", *bug.tests.split()], LIMIT_S)
    finally:
        path.write_text(text, encoding="utf-8")
    found = FAILED.search(said)
    if status == 1 and found:
        return found[1], found[2] or "?"
    if status in CRASHES:
        return "all that run in its process", CRASHES[status]
    return "", {None: f"killed after {LIMIT_S} s", 0: "the tests pass"}.get(status, f"pytest ended with {status}")


def check(tree: Path, bugs: list[Bug]) -> None:
    """SystemExit where a bug cannot be planted, or where a test fails without any."""
    for bug in bugs:
        if (count := (tree / bug.file).read_text(encoding="utf-8").count(bug.old)) != 1:
            raise SystemExit(f"{bug.name}: {bug.old!r} is {count} times in {bug.file}, not once")
    tests = list(dict.fromkeys(test for bug in bugs for test in bug.tests.split()))
    status, said = run_tests(tree, tests, CONTROL_LIMIT_S)
    if status != 0:
        raise SystemExit(f"the tests do not pass without a bug (pytest ended with {status}):\n{said[-3000:]}")


def main() -> int:
    """Prints a line for each bug, and what became of all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", metavar="SUBSTRING", help="bugs with this in their name")
    parser.add_argument("--list", action="store_true", help="names and tests, and nothing is run")
    args = parser.parse_args()
    bugs = [bug for bug in BUGS if args.only in bug.name]
    if not bugs:
        parser.error(f"--only {args.only}: no bug has that in its name")
    if args.list:
        print("\n".join(f"{bug.name}  [{bug.file}]  {bug.tests}" for bug in bugs))
        return 0
    missed = []
    with tempfile.TemporaryDirectory(prefix="planted_", ignore_cleanup_errors=True) as name:
        tree = Path(name, "tree")
        tree.mkdir()
        copy_tree(tree)
        check(tree, bugs)
        for bug in bugs:
            start = time.perf_counter()
            test, why = plant(tree, bug)
            outcome = f"caught by {test} ({why})" if test else f"NOT CAUGHT ({why})"
            print(f"{bug.name}: {outcome}, {time.perf_counter() - start:.0f} s", flush=True)
            missed += [] if test else [bug.name]
    print(json.dumps({"planted": len(bugs), "caught": len(bugs) - len(missed), "missed": missed}))
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
