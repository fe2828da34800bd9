"""Test runs whose critic sees more than the actor: resume, seeds, export, and another run as the start."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from gymnax.environments import spaces

import jaxrl_fast
from jaxrl_fast.config.load import from_keywords
from jaxrl_fast.loggers.terminal import make_console
from jaxrl_fast.runs import checkpoint
from jaxrl_fast.training import console, plan
from tests.helpers import slow
from tests.helpers.agents import LITTLE
from tests.helpers.runs import same, stop_after


class Privileged:
    """A number to be matched, of which the policy sees a noisy copy, as in MuJoCo Playground: two parts of a Dict."""

    default_params = ()

    def reset_env(self, key, params):
        state = jax.random.uniform(key, (3,), minval=-1)
        return self._observe(state, key), (state, jnp.int32(0))

    def step_env(self, key, state, action, params):
        number, time = state
        reward = -jnp.abs(number[0] - jnp.ravel(action)[0])
        number = 0.9 * number + 0.1 * jax.random.uniform(key, (3,), minval=-1)
        return self._observe(number, key), (number, time + 1), reward, False, {}

    def is_truncated(self, state, params):
        return state[1] >= 10

    def _observe(self, state, key):
        return {"state": state[:2] + 0.1 * jax.random.normal(key, (2,)), "privileged_state": state}

    def observation_space(self, params):
        return spaces.Dict({"state": spaces.Box(-2, 2, (2,)), "privileged_state": spaces.Box(-1, 1, (3,))})

    def action_space(self, params):
        return spaces.Box(-1, 1, (1,))


ENV = f"{__name__}:Privileged"
SEES = dict(actor=dict(sees=["state"]), critic=dict(sees=["privileged_state"]))
TINY = dict(env=ENV, num_envs=4, total_steps=256, eval_episodes=4, save_every=64, loggers=(), log_level="quiet")
TINY |= dict(num_seeds=2, normalize_observations=True, hidden_sizes=(8,)) | SEES
RUNS = {
    "ppo": dict(algo="ppo", rollout_length=16, memory=dict(kind="gru", size=4)),
    "sac": dict(algo="sac", **LITTLE | dict(size=512)),
    "shards": dict(algo="ppo", rollout_length=16, devices=2, num_seeds=1),
    "td3": dict(algo="td3", **LITTLE | dict(size=512)),
}


@pytest.fixture(scope="module", params=["ppo", slow("sac"), slow("td3"), slow("shards")])
def unbroken(request, tmp_path_factory):
    """Return the options of a run, and the run."""
    options = TINY | RUNS[request.param]
    return options, jaxrl_fast.fit(**options, run_dir=str(tmp_path_factory.mktemp("unbroken") / request.param))


@pytest.mark.slow
def test_resumed_run_is_bit_identical(unbroken, tmp_path, monkeypatch):
    options, run = unbroken
    stop_after(monkeypatch, 128)
    stopped = jaxrl_fast.fit(**options, run_dir=str(tmp_path / "run"))
    assert stopped.summary["status"] == "stopped"
    jaxrl_fast.fit(resume=stopped.folder, log_level="quiet")
    same(stopped.folder, run.folder)
    content = yaml.safe_load((run.folder / "config.yaml").read_text())
    assert (content["actor"], content["critic"]) == ({"sees": ["state"]}, {"sees": ["privileged_state"]})


@pytest.mark.parametrize("to", ["stablehlo", slow("onnx")])
def test_exported_policy_needs_only_what_the_actor_sees(unbroken, tmp_path, to):
    _, run = unbroken
    folder = run.export(to=to, out=str(tmp_path / to))
    exported, trained = jaxrl_fast.load(folder).policy, jaxrl_fast.load(run).policy
    assert [x["name"] for x in exported.card["inputs"] if x["name"].startswith("obs")] == ["obs_state"]
    rng = np.random.default_rng(0)
    obs = {"state": rng.normal(size=(16, 2)).astype(np.float32)}
    whole = obs | {"privileged_state": rng.normal(size=(16, 3)).astype(np.float32)}
    has_memory = hasattr(trained, "initial_memory")
    memory = [policy.initial_memory(16) if has_memory else None for policy in (exported, trained)]
    call = lambda policy, obs, memory: policy(obs) if memory is None else policy(obs, memory)[0]
    wanted = call(trained, whole, memory[1])
    np.testing.assert_allclose(call(exported, obs, memory[0]), wanted, atol=1e-5)
    np.testing.assert_allclose(call(exported, whole, memory[0]), wanted, atol=1e-5)


@pytest.mark.slow
def test_export_to_numpy_is_refused_in_one_line(unbroken, tmp_path):
    _, run = unbroken
    with pytest.raises(ValueError, match="to npz: needs observations of one array, got a part of several; use stable"):
        run.export(to="npz", out=str(tmp_path / "npz"))


@pytest.mark.slow
def test_other_run_is_a_start_for_a_critic_of_the_same_parts(unbroken, tmp_path):
    options, run = unbroken
    given = options | dict(total_steps=128, run_dir=str(tmp_path / "run"), freeze=["actor"])
    again = jaxrl_fast.fit(**given, init_from=run)
    one, other = (checkpoint.newest(each.folder / "checkpoints")[0].arrays for each in (run, again))
    kept = [name for name in one if name.endswith(("/actor/params/heads_0/kernel", "/actor_head/kernel"))]
    kept = [name for name in kept if "optimizer" not in name and "target" not in name]
    assert kept and all(np.array_equal(one[name], other[name]) for name in kept)
    with pytest.raises(ValueError, match=r"init_from: .*critic.*kernel must be float32\[.*\], got float32\[.*\] in"):
        jaxrl_fast.fit(**given | dict(critic=dict(sees=["all"]), run_dir=str(tmp_path / "x")), init_from=run)


def test_header_states_what_each_reads(capfd):
    options = TINY | RUNS["ppo"] | dict(log_level="info", num_seeds=1)
    ready = plan.make_plan(from_keywords(dry_run=True, **options))
    console.announce(ready, make_console("info"))
    line = next(line for line in capfd.readouterr().out.splitlines() if line.startswith("network"))
    assert line == "network  mlp   reads vector 2   critic mlp   reads vector 3   gru of 4, sequences of 16 steps"


@pytest.mark.parametrize("option", ["actor", "critic"])
def test_unknown_part_is_refused_in_one_line_before_anything_is_written(option, tmp_path):
    options = TINY | RUNS["ppo"] | {option: dict(sees=["stat"])}
    message = f"{option}.sees: must name parts of the observation, which are privileged_state, state, got stat; did you"
    with pytest.raises(ValueError, match=message) as error:
        jaxrl_fast.fit(**options, run_dir=str(tmp_path / "run"))
    assert "\n" not in str(error.value) and not (tmp_path / "run").exists()
