"""Runs that learn from data: a bit-exact resume, data that changed or are missing, teachers that do not fit."""

import json
import shutil

import jax
import numpy as np
import pytest
import yaml

import jaxrl_fast
from jaxrl_fast import envs, train
from jaxrl_fast.config import load
from jaxrl_fast.parallel import program
from jaxrl_fast.parallel.placement import Placement
from jaxrl_fast.rl.bonuses.bc import Demonstrations
from jaxrl_fast.training import bonus_data, memory, plan, teacher
from tests.helpers.runs import records, same, stop_after

TINY = dict(
    algo="ppo", env="CartPole-v1", num_envs=4, rollout_length=8, num_minibatches=2, num_epochs=2, hidden_sizes=(8,),
    total_steps=512, log_every=64, eval_episodes=0, log_level="quiet",
)  # fmt: skip


def fit(folder, **options):
    given = {"log_level": "quiet"} if "resume" in options else TINY | {"run_dir": str(folder)}
    return jaxrl_fast.fit(**given | options)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with a run, a teacher, and a dataset."""
    folder = tmp_path_factory.mktemp("made")
    fit(folder / "base", save_every=256)
    rng = np.random.default_rng(0)
    np.savez(folder / "demos.npz", observations=rng.normal(size=(50, 4)), actions=rng.integers(0, 2, 50))
    return folder


def bonus_of(made, kind):
    place = {"dataset": str(made / "demos.npz")} if kind == "bc" else {"run": str(made / "base")}
    return dict(kind=kind, weight=0.5, anneal=300, **place)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bc", "distill"])
def test_resumed_run_has_the_same_bits(kind, made, tmp_path, monkeypatch):
    """Two seeds learn in one program. The data may be at another place; they are in no checkpoint."""
    options = dict(bonus=bonus_of(made, kind), num_seeds=2, normalize_observations=kind == "bc")
    fit(tmp_path / "whole", **options)
    stop_after(monkeypatch, 192)
    fit(tmp_path / "stopped", **options)
    moved = tmp_path / "moved.npz"
    if kind == "bc":
        shutil.copy(made / "demos.npz", moved)
    fit(
        None,
        resume=str(tmp_path / "stopped"),
        **({"bonus": {"kind": "bc", "dataset": str(moved)}} if kind == "bc" else {}),
    )
    same(tmp_path / "whole", tmp_path / "stopped")
    weights = {(x["seed"], x["env_steps"]): x[f"{kind}_weight"] for x in records(tmp_path / "whole")}
    for seed in (0, 1):  # a record of two updates of 32 steps
        assert weights[seed, 64] == pytest.approx(0.5 * (1 - 16 / 300)) and weights[seed, 448] == 0
    losses = [x["bc_loss" if kind == "bc" else "distill_kl"] for x in records(tmp_path / "whole")]
    assert len({*losses}) == len(losses)


@pytest.mark.slow
def test_resumed_sac_has_the_same_bits(made, tmp_path, monkeypatch):
    """Steps are drawn in every gradient step, by the keys of the run."""
    options = dict(algo="sac", env="CartPole-v1", num_envs=4, total_steps=192, hidden_sizes=(8,), log_every=32)
    options |= dict(learning_starts=32, batch_size=8, replay={"size": 256}, replay_ratio=0.25, eval_episodes=0)
    options |= dict(log_level="quiet", num_seeds=2, bonus=bonus_of(made, "bc"))
    jaxrl_fast.fit(**options, run_dir=str(tmp_path / "whole"))
    stop_after(monkeypatch, 96)
    jaxrl_fast.fit(**options, run_dir=str(tmp_path / "stopped"))
    fit(None, resume=str(tmp_path / "stopped"))
    same(tmp_path / "whole", tmp_path / "stopped")
    assert all(np.isfinite(x["bc_loss"]) for x in records(tmp_path / "whole") if x["env_steps"] > 64)


@pytest.mark.slow
def test_resumed_sac_with_a_teacher_has_the_same_bits(tmp_path, monkeypatch):
    """The teacher is a policy of PPO, and then one of SAC. Two seeds learn in one program."""
    options = dict(env="Pendulum-v1", num_envs=4, total_steps=192, hidden_sizes=(8,), log_every=32, log_level="quiet")
    options |= dict(eval_episodes=0, normalize_observations=True)
    jaxrl_fast.fit(algo="ppo", **options, policy="tanh", rollout_length=16, run_dir=str(tmp_path / "teacher"))
    options |= dict(learning_starts=32, batch_size=8, replay={"size": 256}, replay_ratio=0.25)
    bonus = dict(kind="distill", weight=0.5, anneal=300, run=str(tmp_path / "teacher"))
    jaxrl_fast.fit(algo="sac", **options, bonus=bonus, run_dir=str(tmp_path / "sac"))
    options |= dict(num_seeds=2, bonus=bonus | dict(run=str(tmp_path / "sac")))
    jaxrl_fast.fit(algo="sac", **options, run_dir=str(tmp_path / "whole"))
    stop_after(monkeypatch, 96)
    jaxrl_fast.fit(algo="sac", **options, run_dir=str(tmp_path / "stopped"))
    fit(None, resume=str(tmp_path / "stopped"))
    same(tmp_path / "whole", tmp_path / "stopped")
    for name in ("sac", "whole"):
        assert all(np.isfinite(x["distill_kl"]) for x in records(tmp_path / name) if x["env_steps"] > 64)


def test_changed_and_missing_data_are_refused(made, tmp_path, monkeypatch, capsys):
    """Nothing is compiled or written."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(made / "demos.npz", tmp_path / "demos.npz")
    stop_after(monkeypatch, 64)
    run = fit("runs/mine", bonus=dict(kind="bc", dataset="demos.npz"))
    config = yaml.safe_load((run.folder / "config.yaml").read_text())
    assert config["bonus"] == dict(kind="bc", weight=1.0, anneal=None, dataset=str(tmp_path / "demos.npz"))
    before = sorted(p.name for p in run.folder.iterdir())
    monkeypatch.setattr(program, "build", None)
    with np.load("demos.npz") as found:
        np.savez("demos.npz", observations=found["observations"], actions=1 - found["actions"])
    assert train.main(["--resume", "runs/mine"]) == 2
    (tmp_path / "demos.npz").unlink()
    assert train.main(["--resume", "runs/mine"]) == 2
    lines = capsys.readouterr().err.splitlines()
    path = tmp_path / "demos.npz"
    others = f"got others in {path}; restore them, or name the place where they are"
    assert lines[0] == f"error: bonus.dataset: must have the data with which the run began, {others}"
    assert lines[1].startswith(f"error: bonus.dataset: {path} does not exist, got no file; give ")
    assert len(lines) == 2 and before == sorted(p.name for p in run.folder.iterdir())


def test_evaluation_needs_neither_data_nor_teacher(made, tmp_path):
    shutil.copy(made / "demos.npz", tmp_path / "demos.npz")
    run = fit(tmp_path / "run", bonus=dict(kind="bc", dataset=str(tmp_path / "demos.npz")))
    (tmp_path / "demos.npz").unlink()
    assert int(jaxrl_fast.load(run).policy(np.zeros(4, np.float32))) in (0, 1)


def test_settings_of_the_run_keep_their_path_and_other_values(made):
    """The file holds options only, and the fingerprint of the data depends on all of them."""
    env = envs.make("CartPole-v1", 2)
    data = Demonstrations(np.zeros((3, 4), np.float32), np.array([0, 1, 1], np.int32))
    config = lambda data: jaxrl_fast.options.declare.configure(
        jaxrl_fast.options.ALGORITHMS["ppo"], bonus=dict(kind="bc", data=data)
    )
    prints = [bonus_data.fingerprint(config(x))["bonus_data"] for x in (data, data._replace(action=data.action[::-1]))]
    assert len({*prints}) == 2 and bonus_data.fingerprint(config(None)) == {} and env.spec.players == ()
    assert "data" not in jaxrl_fast.config.parts.to_plain(config(data))["bonus"]


def plan_of(made, **options):
    """The plan of a run that clones the dataset: 50 steps of four float32 and one int32, 1,000 bytes."""
    return plan.validate_plan(load.from_keywords(**TINY | options, bonus=bonus_of(made, "bc"), dry_run=True))


def test_memory_of_a_run_includes_its_data(made, monkeypatch):
    """Every device has all data once, whatever the seeds. The limit is where the estimate says."""
    ready = plan_of(made)
    needs, each = ready.needs, ready.needs.parameters + ready.needs.environments
    assert needs.data == 1000 * ready.placement.num_devices
    assert needs.replay == 0 and needs.total == needs.copies * each + needs.data
    placement = Placement(num_seeds=8)
    shared = memory.estimate(ready.env, ready.agent, placement, bonus_data.of_program(ready.settings.agent))
    assert shared.data == 1000 * placement.num_devices
    monkeypatch.setattr(memory, "free_bytes", lambda _=1: needs.total)
    plan_of(made)
    monkeypatch.setattr(memory, "free_bytes", lambda _=1: needs.total - 1)
    words = r"^this does not fit into memory \(.*data 1\.0 kB.*\); fewer environments or seeds, or a smaller dataset"
    with pytest.raises(ValueError, match=words):
        plan_of(made)


WRONG = {
    "": "bonus.run: must be the directory of a run, got none; give one",
    "{tmp}/nothing": "bonus.run {tmp}/nothing: is not a run directory",
}


@pytest.mark.parametrize("name", WRONG)
def test_runs_that_do_not_exist_are_refused(name, tmp_path, capsys):
    place = lambda text: text.format(tmp=tmp_path)
    assert train.main(["ppo", "--bonus", "distill", *(["--bonus.run", place(name)] if name else [])]) == 2
    assert capsys.readouterr().err.startswith(f"error: {place(WRONG[name])}")


def test_teacher_of_another_environment_is_refused(made, capsys, tmp_path):
    """The line names the array whose shape differs: Acrobot has three actions and six numbers."""
    arguments = ["ppo", "--env", "Acrobot-v1", "--bonus", "distill", "--bonus.run", str(made / "base")]
    assert train.main([*arguments, "--run-dir", str(tmp_path / "new")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: bonus.run: agent/params/network/params/")
    assert "must be float32[6, 8], got float32[4, 8] in " in error or "must be float32[3], got float32[2] in " in error
    assert not (tmp_path / "new").exists()


def test_teacher_is_the_policy_of_the_run(made):
    """Its logits are those of the run's agent, for a checkpoint too."""
    env = envs.make("CartPole-v1", 2)
    obs = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
    trained = jaxrl_fast.load(made / "base", which="last")
    last = sorted((made / "base" / "checkpoints").glob("step-*"))[-1]
    inputs = jaxrl_fast.types.PolicyInput(obs)
    noise = jax.tree.map(lambda x: x[0], trained.agent.sample_noise(jax.random.key(0), 1, 5))
    expected = trained.agent.explore(trained.agent_state, inputs, (), noise).extras.logits
    for name in (made / "base", last):
        np.testing.assert_allclose(teacher.load(str(name), env)(inputs).logits, expected, rtol=1e-6)
    assert json.loads((last / "manifest.json").read_text())["env_steps"] == 512


@pytest.mark.slow
def test_policies_of_other_kinds_are_no_teachers(tmp_path, made, capsys):
    """DQN has no distribution, and a recurrent policy has a memory."""
    fit(tmp_path / "gru", memory=dict(kind="gru", size=4), total_steps=64)
    dqn = dict(env="CartPole-v1", num_envs=2, total_steps=64, hidden_sizes=(4,), learning_starts=32, batch_size=8)
    jaxrl_fast.fit(algo="dqn", **dqn, run_dir=str(tmp_path / "dqn"), eval_episodes=0, log_level="quiet")
    for name, line in {"gru": "a policy without memory", "dqn": "a policy that is a distribution, got dqn"}.items():
        arguments = ["ppo", "--bonus", "distill", "--bonus.run", str(tmp_path / name), "--hidden-sizes", "8"]
        assert train.main(arguments) == 2
        assert f"error: bonus.run: must have {line}" in capsys.readouterr().err
