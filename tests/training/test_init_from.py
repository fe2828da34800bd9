"""Test init_from: a run starts from the parameters and normalizers of another one, and needs it only once."""

import json
import re
import shutil
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import yaml

import jaxrl_fast
from jaxrl_fast import agents, players
from jaxrl_fast.options import ALGORITHMS
from jaxrl_fast.options.declare import configure
from jaxrl_fast.options.run import SelfPlay
from jaxrl_fast.parallel.placement import Placement
from jaxrl_fast.runs import checkpoint
from jaxrl_fast.training import init_from, init_source
from jaxrl_fast.training.init_source import Source
from jaxrl_fast.types import Box, Discrete, EnvSpec
from tests.helpers import slow
from tests.helpers.agents import CONTINUOUS, LITTLE, SHORT
from tests.helpers.runs import bits, records, same, stop_after

GRU = dict(kind="gru", size=4)
SMALL = {"ppo": SHORT, "pqn": SHORT, "dqn": LITTLE} | dict.fromkeys(CONTINUOUS, LITTLE)
CASES = {algo: (algo, {}) for algo in SMALL} | {
    "ppo_normalized": ("ppo", dict(normalize_observations=True, rewards="normalized")),
    "ppo_memory": ("ppo", dict(memory=GRU)),
    "dqn_memory": (
        "dqn",
        dict(memory=dict(**GRU, sequence_length=8, burn_in=2), noisy=True, replay=dict(size=96)),
    ),
    "sac_normalized": ("sac", dict(normalize_observations=True)),
    "crossq": ("td3", dict(target="none")),
}


def spec_of(action, size=3):
    return EnvSpec("probe/x", jax.ShapeDtypeStruct((size,), jnp.float32), action, 4)


def agent_of(algo, action=None, size=3, **options):
    action = action or (Box((2,)) if algo in CONTINUOUS else Discrete(3))
    values = {**SMALL[algo], **options}
    if "size" in values:
        values = {"replay": dict(size=values.pop("size")), **values}
    config = configure(ALGORITHMS[algo], **values)
    return agents.load(algo).make(config, spec_of(action, size), 10)


def state_of(agent, seed=0):
    """Return an initial state whose floating-point numbers are all different, except in replay and optimizer."""
    rng = np.random.default_rng(seed)
    mixed = lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype) if x.dtype == jnp.float32 else x
    return jax.tree.map(mixed, jax.eval_shape(agent.init, jax.random.key(0)) and agent.init(jax.random.key(seed)))


def named(state):
    return {name: np.asarray(x) for name, x in checkpoint.names({"agent": state}).items()}


def source_of(state, seeds=(), piece="", kind="run"):
    kept = {name: x for name, x in named(state).items() if "/replay/" not in name and "/optimizer/" not in name}
    return Source(kind, "runs/x", kept, piece, seeds)


def started(agent, source, seeds=(0,)):
    """Return the arrays of an agent's fresh state after it has been started from a source, and the note."""
    state = jax.vmap(agent.init)(jax.vmap(jax.random.key)(jnp.arange(len(seeds)) + 9)) if len(seeds) > 1 else None
    state = agent.init(jax.random.key(9)) if state is None else state
    start = init_from.fit(source, agent, "algo", seeds)
    after = init_from.apply(start, {"agent": state}, Placement(len(seeds)))
    return named(state), named(after["agent"]), start.note


def is_loaded(name):
    """Return whether a whole run is a source of this array."""
    kept = ("/params/", "/target_params/", "/observations/", "/batch_stats/", "/rewards/stats/")
    return any(part in name for part in kept) and "/optimizer/" not in name and "/replay/" not in name


@pytest.mark.parametrize("case", CASES)
def test_parameters_targets_and_normalizers_are_loaded_and_nothing_else(case):
    algo, options = CASES[case]
    agent = agent_of(algo, **options)
    other = state_of(agent)
    before, after, note = started(agent, source_of(other))
    wanted = named(other)
    for name in before:
        if is_loaded(name):
            online = name.replace("/target_params/", "/params/")
            np.testing.assert_array_equal(after[name], wanted[online], err_msg=name)
        else:
            np.testing.assert_array_equal(after[name], before[name], err_msg=name)
    assert any(map(is_loaded, before)) and note == "from runs/x"


def test_seeds_start_from_same_seeds_or_all_from_one():
    agent = agent_of("ppo")
    states = [state_of(agent, seed) for seed in range(3)]
    stacked = source_of(jax.tree.map(lambda *x: jnp.stack(x), *states), seeds=(4, 5, 6))
    name = "agent/params/network/params/torso/mlp/Dense_0/kernel"
    _, after, note = started(agent, stacked, (6, 4))
    np.testing.assert_array_equal(after[name], np.stack([named(states[2])[name], named(states[0])[name]]))
    assert note == "from runs/x, each seed from the same seed"
    _, after, note = started(agent, stacked, (5,))
    np.testing.assert_array_equal(after[name], named(states[1])[name])
    assert note == "from runs/x, seed 5"
    _, after, note = started(agent, source_of(states[0]), (0, 1))
    np.testing.assert_array_equal(after[name], np.stack([named(states[0])[name]] * 2))
    assert note == "from runs/x, all seeds from the same parameters"
    with pytest.raises(ValueError, match="runs/x, which has 4 to 6, got 7; use seed 4"):
        started(agent, stacked, (6, 7))


def test_arrays_fill_padded_seeds_and_all_shards():
    value = np.arange(6, dtype=np.float32).reshape(2, 3)
    start = init_from.Start({"x": value, "y": np.float32(7)}, "")
    state = {"x": jnp.zeros((3, 2, 3)), "y": jnp.zeros((3, 2)), "z": jnp.zeros((3, 2))}
    after = init_from.apply(start, state, Placement(2, num_shards=2))
    np.testing.assert_array_equal(after["x"], np.stack([[value[0]] * 2, [value[1]] * 2, [value[1]] * 2]))
    assert np.asarray(after["y"]).tolist() == [[7, 7]] * 3 and not np.asarray(after["z"]).any()
    after = init_from.apply(init_from.Start({"x": value[0]}, ""), {"x": jnp.zeros((2, 3))}, Placement(1, num_shards=2))
    np.testing.assert_array_equal(after["x"], [value[0]] * 2)


def test_opponents_of_self_play_are_the_loaded_policy():
    learning = players.learning(agents.load("ppo"), SelfPlay(kind="self-play", pool=3))
    config = configure(ALGORITHMS["ppo"], **SHORT, normalize_observations=True)
    agent = learning.make(config, spec_of(Discrete(3))._replace(players=("a", "b")), 10)
    other = state_of(agent)
    _, after, _ = started(agent, source_of(other))
    for name in ("params/network/params/torso/mlp/Dense_0/kernel", "params/log_std", "observations/0/mean"):
        if f"agent/learner/{name}" in after:
            learner = named(other)[f"agent/learner/{name}"]
            np.testing.assert_array_equal(after[f"agent/learner/{name}"], learner)
            np.testing.assert_array_equal(after[f"agent/pool/{name}"], np.stack([learner] * 3))


# Pieces


@pytest.mark.parametrize(
    ("algo", "piece", "loaded"),
    [
        ("ppo", "actor", ("/torso/", "/actor_head/", "log_std")),
        ("ppo", "critic", ("/critic_torso/", "/critic_head/")),
        ("ppo", "torso", ("/torso/", "/critic_torso/")),
        ("ppo", "network", ("/torso/", "/critic_torso/", "_head/", "log_std")),
        ("sac", "actor", ("/params/actor/",)),
        ("sac", "critic", ("/critic/",)),
        ("sac", "critic.torso", ("/critic/params/torso/",)),
        ("dqn", "network", ("/params/params/", "/target_params/params/")),
        ("dqn", "torso", ("/torso/",)),
    ],
)
def test_piece_is_loaded_alone_with_normalizer_of_observations(algo, piece, loaded):
    normal = {} if algo == "dqn" else dict(normalize_observations=True)
    agent = agent_of(algo, Box((2,)) if algo == "ppo" else None, **normal)
    before, after, note = started(agent, source_of(state_of(agent), piece=piece))
    changed = {name for name in before if not np.array_equal(before[name], after[name])}
    of_piece = {
        name
        for name in before
        if "/observations/" in name
        or is_loaded(name)
        and "/rewards/" not in name
        and any(part in name for part in loaded)
    }
    assert changed == of_piece and note.startswith(f"from runs/x, {piece} only")


def test_shared_torso_belongs_to_actor_and_critic():
    spec = spec_of(Discrete(3))._replace(obs=jax.ShapeDtypeStruct((6, 6, 2), jnp.bool_))
    agent = agents.load("ppo").make(configure(ALGORITHMS["ppo"], **SHORT), spec, 10)
    for piece, head in (("actor", "actor_head"), ("critic", "critic_head")):
        before, after, _ = started(agent, source_of(state_of(agent), piece=piece))
        changed = {name for name in before if not np.array_equal(before[name], after[name])}
        assert {name.split("/")[4] for name in changed} == {"torso", head}


@pytest.mark.parametrize(
    ("algo", "piece", "message"),
    [
        ("ppo", "critc", "got critc; there are network, actor, actor.head, actor.torso, critic, "),
        ("dqn", "actor", "got actor; there are network, head, torso"),
    ],
)
def test_unknown_piece_is_refused_with_those_that_exist(algo, piece, message):
    agent = agent_of(algo)
    with pytest.raises(ValueError, match=message):
        init_from.fit(source_of(state_of(agent), piece=piece), agent, algo, [0])


# Other actions


def test_head_is_new_for_other_actions():
    source = source_of(state_of(agent_of("ppo", Discrete(3))))
    for action in (Discrete(5), Box((2,)), Box((3,))):  # the last has a head of the same shape
        before, after, note = started(agent_of("ppo", action), source)
        new = {name for name in before if "actor_head" in name or "log_std" in name}
        assert all(np.array_equal(before[name], after[name]) for name in new)
        loaded = [name for name in before if is_loaded(name) and name not in new]
        assert loaded and all(np.array_equal(after[name], source.arrays[name]) for name in loaded)
        assert note == "from runs/x; new: actor head"


def test_head_of_values_is_new_for_other_actions():
    source = source_of(state_of(agent_of("dqn", Discrete(3), dueling=True, hidden_sizes=(8, 8))))
    before, after, note = started(agent_of("dqn", Discrete(2), dueling=True, hidden_sizes=(8, 8)), source)
    assert all(np.array_equal(before[n], after[n]) for n in before if "heads_" in n or "streams_" in n)
    assert note == "from runs/x; new: head"


def test_critic_that_reads_actions_is_new_for_other_actions():
    source = source_of(state_of(agent_of("sac", Box((2,)))))
    before, after, note = started(agent_of("sac", Box((3,))), source)
    new = {name for name in before if "/critic/" in name or "heads_0" in name or "temperature" in name}
    for name in before:
        same = source.arrays[name] if is_loaded(name) and name not in new else before[name]
        np.testing.assert_array_equal(after[name], same, err_msg=name)
    assert note == "from runs/x; new: actor head, critic head, critic torso, log temperature"


# Shapes and options that do not fit


KERNEL = "agent/params/network/params/{}/mlp/Dense_0/kernel"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (dict(size=3), dict(size=4), f"{KERNEL.format('critic_torso')} must be float32[4, 8], got float32[3, 8] in"),
        (dict(), dict(hidden_sizes=(9,)), "critic_torso/mlp/Dense_0/bias must be float32[9], got float32[8]"),
        (dict(), dict(hidden_sizes=(8, 8)), "needs an array agent/params/network/params/critic_torso/mlp/Dense_1/bias"),
        (dict(hidden_sizes=(8, 8)), dict(), "runs/x has an array agent/params/network/params/critic_torso/mlp/Dense_1"),
        (
            dict(),
            dict(memory=GRU),
            "needs an array agent/params/network/params/critic_memory/hidden_bias float32",
        ),
        (
            dict(memory=GRU),
            dict(),
            "has an array agent/params/network/params/critic_memory/hidden_bias, got",
        ),
        (dict(), dict(normalize_observations=True), "normalize_observations: must be false, as in runs/x, got true"),
        (dict(normalize_observations=True), dict(), "normalize_observations: must be true, as in runs/x, got false"),
    ],
)
def test_source_that_does_not_fit_is_refused_by_name(old, new, message):
    source, agent = source_of(state_of(agent_of("ppo", **old))), agent_of("ppo", **new)
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        init_from.fit(source, agent, "ppo", [0])
    assert "\n" not in str(error.value)


def test_source_of_another_algorithm_or_with_nan_is_refused():
    agent = agent_of("ppo")
    with pytest.raises(ValueError, match=r"has an array agent/learner/params/params/torso.*; use the algorithm"):
        init_from.fit(source_of(state_of(agent_of("dqn"))), agent, "ppo", [0])
    source = source_of(state_of(agent))
    source.arrays[KERNEL.format("torso")] = np.full((3, 8), np.nan, np.float32)
    with pytest.raises(ValueError, match="torso/mlp/Dense_0/kernel must be finite, got NaN or infinity in runs/x"):
        init_from.fit(source, agent, "ppo", [0])


def test_algorithm_without_parameters_is_refused():
    agent = agent_of("ppo")._replace(parameters=lambda state: state)
    with pytest.raises(ValueError, match=r"algorithm mine must define Agent.parameters"):
        init_from.fit(source_of(state_of(agent)), agent, "mine", [0])


# Files of named arrays


@pytest.mark.parametrize("ending", ["npz", "safetensors"])
def test_file_with_some_arrays_fills_these(tmp_path, ending):
    kernel, bias = np.ones((3, 8), np.float64), np.full(8, 2, np.float32)
    arrays = {"actor/params/torso/mlp/Dense_0/kernel": kernel, "actor/params/torso/mlp/Dense_0/bias": bias}
    path = tmp_path / f"torso.{ending}"
    np.savez(path, **arrays) if ending == "npz" else safetensors.numpy.save_file(arrays, path)
    before, after, note = started(agent_of("td3"), init_source.read(str(path)))
    for name in before:
        if "/optimizer/" not in name and "/actor/params/torso/" in name:
            np.testing.assert_array_equal(after[name], kernel if name.endswith("kernel") else bias)
        else:
            np.testing.assert_array_equal(after[name], before[name])
    assert note == f"from {path}; new: actor head, critic head, critic torso"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("torso/mlp/Dense_0/kernal", "got torso/mlp/Dense_0/kernal in file; one is agent/learner"),
        ("torso/mlp/Dense_0/bias", "it may be agent/learner/params/actor/.* or agent/learner/params/critic/"),
    ],
)
def test_name_in_file_must_mean_one_array(name, message):
    with pytest.raises(ValueError, match=message):
        init_from.fit(Source("file", "file", {name: np.zeros(8)}), agent_of("sac"), "sac", [0])


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("a.npz", b"PK damaged", r"init_from: .*a.npz cannot be read \(.*; use another file"),
        ("a.safetensors", b"damaged", r"init_from: .*a.safetensors cannot be read \(.*; use another file"),
        (
            "a.bin",
            b"",
            "must be a run, an exported policy or an .* file, got .*a.bin; use one of these",
        ),
        ("policy.json", b"{}", "needs weights.safetensors, got none; export the policy again"),
        ("sub/x", b"", "is not a run directory"),
    ],
)
def test_file_that_cannot_be_read_is_refused(tmp_path, file, content, message):
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        init_source.read(str((tmp_path / file).parent if file == "sub/x" else tmp_path / file))
    assert "\n" not in str(error.value)


def test_file_with_python_objects_is_not_unpickled(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.array([SimpleNamespace()], object))
    with pytest.raises(ValueError, match=r"a.npz cannot be read"):
        init_source.read(str(tmp_path / "a.npz"))


# Runs


TINY = dict(num_envs=4, total_steps=256, eval_episodes=0, save_every=64, loggers=(), log_level="quiet")
PPO = TINY | dict(algo="ppo", env="CartPole-v1", rollout_length=8, hidden_sizes=(8,), normalize_observations=True)
SAC = TINY | dict(
    algo="sac", env="Pendulum-v1", **{k: v for k, v in LITTLE.items() if k not in ("size", "rollout_length")}
)
SAC |= dict(replay=dict(size=512), normalize_observations=True)


@pytest.fixture(scope="module", params=["ppo", slow("sac")])
def chain(request, tmp_path_factory):
    """Return the options, a run, and a run that started from it and then lost it."""
    options, folder = PPO if request.param == "ppo" else SAC, tmp_path_factory.mktemp("chain")
    first = jaxrl_fast.fit(**options, run_dir=str(folder / "first"), num_seeds=2)
    shutil.copytree(first.folder, folder / "copy")
    second = jaxrl_fast.fit(**options, run_dir=str(folder / "second"), num_seeds=2, init_from=first, freeze=["torso"])
    return options, folder, first, second


def test_run_starts_where_other_ended_and_frozen_pieces_stay(chain):
    *_, first, second = chain
    one, other = (checkpoint.newest(run.folder / "checkpoints")[0].arrays for run in (first, second))
    learned = {name for name in one if is_loaded(name) and "/target_params/" not in name and "/params/" in name}
    frozen = {name for name in learned if "torso/" in name}
    assert frozen and all(np.array_equal(one[name], other[name]) for name in frozen)
    assert not any(np.array_equal(one[name], other[name]) for name in learned - frozen)
    rows = next(name for name in one if name.endswith("/observations/num_rows") and "optimizer" not in name)
    assert (other[rows] > one[rows]).all()  # the normalizer counts from where it was
    assert json.loads((second.folder / "summary.json").read_text())["init_from"] == str(first.folder)
    assert yaml.safe_load((second.folder / "config.yaml").read_text())["init_from"] == str(first.folder)


def test_resume_needs_no_other_run_and_is_bit_exact(chain, monkeypatch, tmp_path):
    options, folder, _, second = chain
    source = tmp_path / "source"
    shutil.copytree(folder / "copy", source)
    stop_after(monkeypatch, 128)
    given = dict(num_seeds=2, freeze=["torso"])
    stopped = jaxrl_fast.fit(**options, run_dir=str(tmp_path / "run"), init_from=str(source), **given)
    assert stopped.summary["status"] == "stopped"
    shutil.rmtree(source)
    jaxrl_fast.fit(resume=stopped.folder, log_level="quiet")
    same(stopped.folder, second.folder)


@pytest.mark.slow
def test_resume_before_first_checkpoint_needs_no_other_run(chain, tmp_path):
    options, folder, _, second = chain
    source = tmp_path / "source"
    shutil.copytree(folder / "copy", source)
    run = jaxrl_fast.fit(
        **options, run_dir=str(tmp_path / "run"), init_from=str(source), num_seeds=2, freeze=["torso"]
    ).folder
    shutil.rmtree(source)
    shutil.rmtree(run / "checkpoints")
    (run / ".saved").unlink()
    for name in ("metrics.jsonl", "summary.json"):
        (run / name).unlink()
    jaxrl_fast.fit(resume=run, log_level="quiet")
    assert bits(run) == bits(second.folder) and records(run) == records(second.folder)
    (run / init_from.FILE).unlink()
    shutil.rmtree(run / "checkpoints")
    (run / ".saved").unlink()
    (run / "metrics.jsonl").unlink()
    with pytest.raises(ValueError, match=r"resume: needs .*init.safetensors, which cannot be read"):
        jaxrl_fast.fit(resume=run, log_level="quiet")


@pytest.mark.slow
def test_export_and_checkpoint_are_sources(chain, tmp_path):
    options, _, first, _ = chain
    arrays = checkpoint.newest(first.folder / "checkpoints")[0].arrays
    export = first.export(out=str(tmp_path / "export"), seed=1, which="last")
    step = max((first.folder / "checkpoints").glob("step-*"))
    of_export, of_step = init_source.read(str(export)), init_source.read(str(step))
    assert of_export.arrays and not any("critic" in name for name in of_export.arrays)
    for name, x in of_export.arrays.items():
        np.testing.assert_array_equal(x, arrays[name][1])
    for name in ("policy.json", "policy.stablehlo", "weights.safetensors"):
        assert init_source.read(str(export / name)).arrays.keys() == of_export.arrays.keys()
    alone = shutil.copy(export / "weights.safetensors", tmp_path)
    assert init_source.read(str(alone)).kind == "file"
    assert init_source.read(str(step / "state.safetensors")).seeds == (0, 1)
    assert of_step.seeds == (0, 1) and of_step.arrays.keys() >= of_export.arrays.keys()
    second = jaxrl_fast.fit(
        **options | dict(total_steps=64), run_dir=str(tmp_path / "run"), init_from=f"{export}:actor"
    )
    assert second.summary["status"] == "done"


def test_mistakes_are_refused_before_anything_is_written(tmp_path, chain):
    options, _, first, _ = chain
    for given, message in (
        (dict(init_from=tmp_path / "none"), "init_from .*none: is not a run directory"),
        (dict(init_from=first, num_seeds=3), "got 2; use seed 0"),
        (
            dict(init_from=first, freeze=["tosro"]),
            "freeze: must be a piece of .*, got tosro; there are actor, ",
        ),
        (dict(freeze=["memory"]), "freeze: must be a piece of .*, got memory; there are actor,"),
    ):
        with pytest.raises(ValueError, match=message):
            jaxrl_fast.fit(**options | given, run_dir=str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_sweep_starts_every_member_from_the_other_run(tmp_path):
    first = jaxrl_fast.fit(**PPO, run_dir=str(tmp_path / "first"), num_seeds=2)
    options = {name: value for name, value in PPO.items() if name not in ("loggers", "log_level")}
    jaxrl_fast.sweep(
        **options,
        seed=[0, 1],
        learning_rate=[1e-9, 1e-8],
        init_from=str(first.folder),
        sweep_dir=str(tmp_path / "sweep"),
        log_level="quiet",
    )
    (group,) = [path for path in (tmp_path / "sweep").iterdir() if path.is_dir()]
    one, other = (checkpoint.newest(path / "checkpoints")[0].arrays for path in (first.folder, group))
    kernel = KERNEL.format("torso")
    seeds = [member["seed"] for member in yaml.safe_load((group / "config.yaml").read_text())["meta"]["members"]]
    np.testing.assert_allclose(other[kernel], one[kernel][seeds], atol=1e-5)
    with pytest.raises(ValueError, match="must differ only in the seed, got learning_rate; export one of them"):
        init_source.read(str(group))


@pytest.mark.slow
def test_shards_and_asynchronous_pools_start_from_other_run(tmp_path):
    first = jaxrl_fast.fit(**PPO, run_dir=str(tmp_path / "first"))
    kernel, tiny = KERNEL.format("torso"), dict(init_from=first, learning_rate=1e-9)
    shards = jaxrl_fast.fit(**PPO | tiny, run_dir=str(tmp_path / "shards"), devices=2)
    pools = jaxrl_fast.fit(
        **PPO | tiny | dict(env="gymnasium/CartPole-v1"), run_dir=str(tmp_path / "pools"), async_pools=2
    )
    before, *after = (checkpoint.newest(run.folder / "checkpoints")[0].arrays[kernel] for run in (first, shards, pools))
    np.testing.assert_allclose(after[0], np.stack([before] * 2), atol=1e-5)
    np.testing.assert_allclose(after[1], before, atol=1e-5)
