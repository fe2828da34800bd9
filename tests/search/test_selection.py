"""Check that members go on from a checkpoint as if they had never been moved, and that copies are not twins."""

import jax
import numpy as np
import pytest

from jaxrl_fast.config import load
from jaxrl_fast.config.population import Member
from jaxrl_fast.loggers.terminal import QuietConsole
from jaxrl_fast.runs import checkpoint, directory
from jaxrl_fast.search import selection
from jaxrl_fast.sweep import grid, worker

OPTIONS = {
    "env": "gymnax/CartPole-v1",
    "total_steps": 480,
    "num_envs": 4,
    "network": {"hidden_sizes": [8]},
    "eval_episodes": 2,
    "eval_envs": 2,
    "loggers": [],
    "compile_cache": False,
}
ALGORITHMS = {
    "ppo": {"rollout_length": 20, "num_minibatches": 2, "num_epochs": 1, "normalize_observations": True},
    "dqn": {"replay": {"size": 400}, "learning_starts": 40, "batch_size": 8},
}


def group(algo: str, members: list[Member]) -> grid.Group:
    settings = load.from_keywords(algo=algo, **OPTIONS, **ALGORITHMS[algo])
    return grid.part(grid.Group(settings, ()), members)


def train(folder, group, until):
    result = worker.run_group(folder, group, QuietConsole(), lambda: None, until=until)
    assert not result["message"].startswith("failed"), result
    saved, _ = directory.checkpoint_to_resume(folder)
    return saved


@pytest.mark.slow
@pytest.mark.parametrize("algo", ALGORITHMS)
def test_moved_members_continue_with_same_bits(algo, tmp_path):
    members = [Member(3 + i % 2, {"learning_rate": 1e-3 * (i + 1)}) for i in range(4)]
    for name in ("stay", "move"):
        train(tmp_path / name, group(algo, members), 240)
    places = [2, 0, 3, 1]
    moved = group(algo, [members[i] for i in places])
    selection.start_from(tmp_path / "move", tmp_path / "moved", moved, places)
    assert not (tmp_path / "move" / "checkpoints").exists()
    stayed, after = train(tmp_path / "stay", group(algo, members), 480), train(tmp_path / "moved", moved, 480)
    assert stayed.folder.name == after.folder.name
    for name, array in stayed.arrays.items():
        if not name.startswith(selection.LEDGER):
            np.testing.assert_array_equal(after.arrays[name], array[places], err_msg=name)


@pytest.mark.slow
def test_copies_share_parameters_but_no_random_numbers(tmp_path):
    members = [Member(i, {"learning_rate": 1e-3}) for i in range(2)]
    train(tmp_path / "a", group("ppo", members), 240)
    before = checkpoint.read(checkpoint.folders(tmp_path / "a" / "checkpoints")[-1])
    arrays, manifest = selection.selected(before, [1, 1, 0, 1])
    keys = {name for name, kind in manifest["arrays"].items() if "key" in kind}
    assert keys, "the state has PRNG keys"
    for name, rows in arrays.items():
        np.testing.assert_array_equal(rows[0], before.arrays[name][1])
        np.testing.assert_array_equal(rows[2], before.arrays[name][0])
        for copy in (1, 3):
            if name in keys:
                assert not np.array_equal(rows[copy], rows[0]) and not np.array_equal(rows[1], rows[3])
                wanted = jax.random.fold_in(jax.random.wrap_key_data(rows[0].reshape(-1, 2)[0]), (copy + 1) // 2)
                np.testing.assert_array_equal(rows[copy].reshape(-1, 2)[0], jax.random.key_data(wanted))
            else:
                np.testing.assert_array_equal(rows[copy], rows[0])


@pytest.mark.slow
def test_single_member_loses_and_gains_the_axis_of_members(tmp_path):
    train(tmp_path / "a", group("ppo", [Member(0, {}), Member(1, {})]), 240)
    selection.start_from(tmp_path / "a", tmp_path / "b", group("ppo", [Member(1, {})]), [1])
    saved = train(tmp_path / "b", group("ppo", [Member(1, {})]), 320)
    arrays, manifest = selection.selected(saved, [0, 0, 0])
    assert {rows.shape[0] for rows in arrays.values()} == {3}
    assert all(manifest["arrays"][name]["shape"] == list(arrays[name].shape) for name in manifest["arrays"])
    assert len(manifest["host"]["scores"]["windows"]) == 3
