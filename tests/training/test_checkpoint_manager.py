"""What the manager of checkpoints restores of a run's results."""

from types import SimpleNamespace

import numpy as np
import pytest

from jaxrl_fast.metrics.tracker import MetricsTracker
from jaxrl_fast.runs import checkpoint
from jaxrl_fast.training.checkpoint_manager import CheckpointManager

pytestmark = pytest.mark.unit


def trained(threshold):
    """Return a tracker of two members with 100 episodes of returns 4 and 8 in 25 updates of 40 steps."""
    made = MetricsTracker([{"seed": 0}, {"seed": 1}], 1, 40, 10, threshold)
    for window, score in zip(made.windows, (4.0, 8.0)):
        window.add(100, 100 * score, 50, 5)
    made.updates = made.recorded = 25
    return made


@pytest.fixture
def restore(tmp_path, monkeypatch):
    """Return a function that restores a checkpoint of one tracker into another."""

    def restore(saved, threshold):
        options = SimpleNamespace(save_every="0", keep_checkpoints=1)
        plan = SimpleNamespace(
            settings=SimpleNamespace(options=options), folder=tmp_path, env=SimpleNamespace(on_device=True, host=None),
            eval_env=SimpleNamespace(host=None), shares_env=False,
            agent=SimpleNamespace(learning=SimpleNamespace(resources=())),
        )  # fmt: skip
        again = MetricsTracker(saved.labels, 1, 40, 10, threshold)
        manager, (results, arrays) = CheckpointManager(plan, again), saved.state_dict()
        manifest = {
            "host": {"scores": results, "num_saves": 3, "others": {"clock": 7}},
            "config": {"solved_threshold": saved.solved_threshold},
        }
        monkeypatch.setattr(checkpoint, "unflatten", lambda like, saved: "state")
        program = SimpleNamespace(state_spec=None, shard_state=lambda whole: whole)
        folder = tmp_path / "step-000000001000"
        folder.mkdir(exist_ok=True)
        given = SimpleNamespace(manifest=manifest, arrays=dict(arrays), folder=folder)
        assert manager.restore(given, program) == ("state", {"clock": 7})
        assert (manager.num_saved, manager.last, manager.resets_envs) == (3, given.folder, False)
        return again

    return restore


def test_step_to_solve_survives_resume_with_same_threshold(restore):
    """The second member was solved after 10 updates. The first is not solved, and does not become so by a resume."""
    before = trained(5.0)
    before.solved = [None, (400, 1.5)]
    assert restore(before, 5.0).solved == [None, (400, 1.5)]


@pytest.mark.parametrize(("threshold", "solved"), [(3.0, [True, True]), (9.0, [False, False]), (None, [False, False])])
def test_members_are_judged_anew_by_changed_threshold(threshold, solved, restore):
    """All that the last episodes show at the resume, after 25 updates of 40 steps."""
    before = trained(5.0)
    before.solved = [None, (400, 1.5)]
    assert [at and at[0] for at in restore(before, threshold).solved] == [1000 if now else None for now in solved]


def test_diverged_member_stays_unsolved(restore):
    before = trained(5.0)
    before.diverged = [None, 800]
    assert restore(before, 3.0).solved == [(1000, 0.0), None]
    np.testing.assert_array_equal(restore(before, 3.0).diverged, [None, 800])


@pytest.mark.parametrize(("num_seeds", "first", "found"), [(1, 0, 0), (2, 0, 1), (2, 1, 1), (2, 2, None)])
def test_parameter_that_is_a_number_is_checked(num_seeds, first, found):
    """A multiplier is an array without axes if there is one seed; else it has the seeds of this process as rows."""
    tracker = SimpleNamespace(diverged=[None] * num_seeds)
    rows = np.float32([0.5, np.inf])[first:]
    x = rows if num_seeds > 1 else np.array(np.inf, np.float32)
    name = "agent/params/actor/log_temperature"
    check = lambda x: CheckpointManager._not_finite(SimpleNamespace(tracker=tracker), {name: x}, {name}, first)
    assert check(x) == (None if found is None else (found, name))
    assert check(np.zeros_like(x)) is None
