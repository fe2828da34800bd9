"""Test exported policies: equal to the run's own in a process without jaxrl_fast, for every kind of network."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import flax.linen as nn
import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces as S
from gymnax.environments import spaces
from jax import ShapeDtypeStruct

import jaxrl_fast
from jaxrl_fast import envs, evaluation, export, kernels, rollout
from jaxrl_fast.config import load, presets
from jaxrl_fast.config.settings import Settings
from jaxrl_fast.envs.wrappers.hide import hide
from jaxrl_fast.evaluation import policy, saved_run
from jaxrl_fast.evaluation.export import Options, _build, card, check, function, numpy_mlp, stablehlo, write
from jaxrl_fast.evaluation.export import load as load_export
from jaxrl_fast.kernels import build
from jaxrl_fast.options import ALGORITHMS
from jaxrl_fast.options.declare import fields_of, options_of, value_of
from jaxrl_fast.types import Agent, Box, Discrete, Env, EnvSpec, PolicyInput, View
from jaxrl_fast.types.host import HostEnv
from jaxrl_fast.utils import target
from tests.helpers import slow

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("flatbuffers")
from jaxrl_fast.evaluation.export import onnx_model  # noqa: E402  # imports onnx

ROOT = Path(__file__).parents[2]
TINY = {"loggers": (), "log_level": "quiet", "eval_episodes": 4}
FORMATS = ("stablehlo", "onnx", "npz")
NUM_ROWS = 1000
# The loading process cannot import jaxrl_fast, nor JAX if the format does not need it.
LOADER = """
import json, os, sys
blocked = sys.argv[1].split(",")
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in blocked:
            raise ImportError(f"{name} is blocked")
sys.meta_path.insert(0, Blocker())
try:
    import jaxrl_fast
except ImportError:
    pass
else:
    raise SystemExit("jaxrl_fast can be imported")
import numpy as np
for folder in sys.argv[2:]:
    os.chdir(folder)
    sys.path[:0] = [folder]
    sys.modules.pop("policy", None)
    data = np.load("data.npz")
    names = {name: data[name] for name in data.files if name != "wanted"}
    lines = [line for line in json.load(open("policy.json"))["load"] if line.partition(" = ")[0] not in names]
    scope = dict(names)
    exec("\\n".join(lines).replace("print(", "found = ("), scope)
    found, wanted = np.asarray(scope["found"]), data["wanted"]
    assert found.dtype == wanted.dtype and found.shape == wanted.shape, (folder, found.dtype, found.shape)
    print(os.path.basename(folder), float(np.abs(found.astype(float) - wanted).max()), len(np.unique(wanted, axis=0)))
"""


def without_jaxrl_fast(folders, *blocked):
    """Run the printed lines of each export in a process without these packages; return the largest differences."""
    words = [sys.executable, "-I", "-c", LOADER, ",".join(["jaxrl_fast", "flax", "optax", *blocked])]
    environment = {name: x for name, x in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([*words, *map(str, folders)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    assert len(rows) == len(folders)
    return {name: (float(difference), int(count)) for name, difference, count in rows}


def untrained(env, algo, seed=0, num_envs=8, **options):
    """Return an untrained learner with enlarged parameters, so that actions depend on the observation."""
    request = load.from_keywords(None, algo, num_envs=num_envs, env="CartPole-v1", **options)
    return of_settings(request, env, seed)


def of_settings(settings: Settings, env, seed=0):
    env = env._replace(spec=env.spec._replace(num_envs=1))
    agent = saved_run._agent(settings, env, 1)
    state = agent.policy_state(agent.init(jax.random.key(seed)))
    rng = np.random.default_rng(seed)
    # Integers count updates. Values that are initially 0 or 1, such as biases and scales, are changed too.
    move = lambda x: x if not jnp.issubdtype(x.dtype, jnp.floating) else x * 1.5 + 0.1 * rng.normal(size=x.shape)
    learner = jax.tree.map(lambda x: np.asarray(move(x), x.dtype), state)
    if getattr(state, "observations", None) is not None:
        stats = jax.tree.map(lambda x: np.abs(x) + 0.5, learner.observations)
        learner = learner._replace(observations=stats)
    step = Path("run/checkpoints/step-000000000000")
    return saved_run.SavedRun(Path("run"), settings, env, agent, learner, [0], step, 0, [], {})


def image_env(num_actions=6, shape=(84, 84, 4)):
    """Return an environment with the spec of Atari, without a pool."""
    spec = EnvSpec("envpool/Pong-v5", ShapeDtypeStruct(shape, np.uint8), Discrete(num_actions), 1, shape[-1])
    return Env(None, None, spec, HostEnv())


def is_atari(name):
    return name.startswith("envpool/") and name.endswith("-v5")


def env_of(settings):
    return (
        image_env()
        if is_atari(settings.options.env)
        else envs.make(settings.options.env, 1, **settings.options.env_options)
    )


def kinds():
    """One preset for each algorithm, kind of environment and network."""
    found = {}
    for name in presets.shipped():
        settings = load.from_command_line(["--config", name])
        if settings.options.env.startswith("playground/"):
            continue  # not installed
        agent = settings.agent
        names = {"value", "dueling", "noisy", "normalize_observations", "policy", "policy.squash", "network"}
        names |= {f"network.{name}" for name in fields_of(type(agent.network))} - {"network.kernel_init"}
        of_network = {name: value_of(agent, name) for name in options_of(agent) if name in names}
        suite = "minatar" if "MinAtar" in settings.options.env else settings.options.env
        suite = "atari" if is_atari(suite) else suite
        classic = {"CartPole-v1", "Acrobot-v1", "MountainCar-v0"}
        suite = "classic" if suite.rpartition("/")[2] in classic else suite
        found.setdefault((settings.algo, suite, str(of_network)), name)
    return sorted(found.values())


def place(folder, saved, to, sampled=False):
    """Export into a folder, with observations and the actions of the run's own policy for them."""
    exported = _build(saved, Options(to=to, sampled=sampled), folder)
    write(exported)
    obs = check.observations(saved.env.spec.obs, NUM_ROWS, seed=1)
    act = jax.jit(lambda obs: policy.greedy(saved.agent, saved.learners, PolicyInput(obs), ())[0])
    wanted = saved.env.view.to_env_action(act(obs))
    np.savez(folder / "data.npz", obs=obs, wanted=np.asarray(wanted))
    return exported


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def cart(runs):
    """Return a short run with normalized observations and two seeds."""
    return jaxrl_fast.fit(
        algo="ppo", env="CartPole-v1", num_envs=4, num_seeds=2, seed=3, total_steps=512, run_dir=str(runs / "cart"),
        rollout_length=32, hidden_sizes=[8], normalize_observations=True, **TINY,
    )  # fmt: skip


@pytest.mark.slow
def test_run_acts_equally_in_processes_without_jaxrl_fast(cart, tmp_path):
    """Compare with `load(RUN).policy` on 1,000 observations."""
    obs = np.random.default_rng(0).normal(size=(NUM_ROWS, 4)).astype(np.float32)
    wanted = np.asarray(jaxrl_fast.load(cart, seed=4).policy(obs))
    for to in FORMATS:
        folder = cart.export(to=to, seed=4, out=str(tmp_path / to))
        assert folder == tmp_path / to
        np.savez(folder / "data.npz", obs=obs, wanted=wanted)
    for to in FORMATS:
        ((difference, count),) = without_jaxrl_fast([tmp_path / to], *["jax"] * (to != "stablehlo")).values()
        assert difference == 0 and count == 2, to


@pytest.mark.slow
def test_npz_and_onnx_equal_numbers_from_checkpoint(cart, tmp_path):
    """Read the parameters as docs/reference/run-directory.md does, and compute the network with numpy."""
    folder = cart.export(to="npz", seed=4, out=str(tmp_path / "out"))
    state = jaxrl_fast.load(cart, seed=4).checkpoint / "state.safetensors"
    data = state.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    kinds = {"F32": np.float32}

    def array(name):
        about = header[f"agent/{name}"]
        start, stop = about["data_offsets"]
        part = data[8 + length + start : 8 + length + stop]
        return np.frombuffer(part, kinds[about["dtype"]]).reshape(about["shape"])[1]  # the second seed

    obs = np.random.default_rng(0).normal(size=(NUM_ROWS, 4)).astype(np.float32)
    scaled = np.clip((obs - array("observations/mean")) / np.sqrt(array("observations/var") + 1e-8), -10, 10)
    network = "params/network/params"
    layer = lambda x, name: x @ array(f"{network}/{name}/kernel") + array(f"{network}/{name}/bias")
    wanted = layer(np.tanh(layer(scaled, "torso/mlp/Dense_0")), "actor_head").argmax(-1)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert 0 < wanted.mean() < 1
    np.testing.assert_array_equal(check.run("npz", files, PolicyInput(obs), ())[0], wanted)
    content = {"policy.onnx": onnx_model.serialize(function.make(of_run(cart, 4), False))}
    np.testing.assert_array_equal(check.run("onnx", content, PolicyInput(obs), ())[0], wanted)


def of_run(run, seed):
    """The learner of a finished run."""
    saved = saved_run.read_run(run.folder, "best", *saved_run.open_env(run.folder), {})
    return saved_run.select_seed(saved, seed)


@pytest.mark.slow
def test_exports_of_all_preset_networks_act_like_run(tmp_path):
    """Compare with the run's policy, which uses C kernels if available, on 1,000 random observations."""
    mlps = []
    for name in kinds():
        settings = load.from_command_line(["--config", name])
        saved = of_settings(settings, env_of(settings))
        for to in ("stablehlo", "onnx"):
            place(tmp_path / f"{name}-{to}", saved, to)
        try:
            place(tmp_path / f"{name}-npz", saved, "npz")
            mlps.append(name)
        except ValueError as error:
            assert "mlp" in str(error) and settings.algo in ALGORITHMS
    assert {name.partition("_")[0] for name in mlps} == {"ppo", "dqn", "rainbow", "pqn", "sac", "td3", "ddpg", "reppo"}
    found = without_jaxrl_fast(sorted(tmp_path.glob("*-stablehlo")))
    found |= without_jaxrl_fast(sorted(tmp_path.glob("*-onnx")), "jax")
    found |= without_jaxrl_fast(sorted(tmp_path.glob("*-npz")), "jax", "onnx")
    assert len(found) == 2 * len(kinds()) + len(mlps)
    assert {name: difference for name, (difference, _) in found.items() if difference > 1e-5} == {}
    constant = [name for name, (_, count) in found.items() if count == 1]
    assert len(constant) < len(found) / 4, constant  # otherwise the comparison would be trivial


NETWORKS = {
    "tanh-gaussian": ("ppo", "Pendulum-v1", dict(policy="tanh", normalize_observations=True)),
    "gaussian": ("ppo", "MountainCarContinuous-v0", dict(policy={"kind": "state_dependent", "log_std_init": -0.5})),
    "quantile, layer norm": ("dqn", "CartPole-v1", dict(value={"kind": "quantile", "atoms": 11}, layer_norm=True)),
    "c51, dueling, noisy, layer norm": (
        "dqn", "CartPole-v1", dict(value="c51", dueling=True, noisy=True, layer_norm=True, hidden_sizes=[8, 8]),
    ),
    "relu, one layer, dueling": ("dqn", "CartPole-v1", dict(dueling=True, activation="relu", hidden_sizes=[8])),
    "pqn": ("pqn", "CartPole-v1", dict(hidden_sizes=[8, 8])),
    "sac": ("sac", "Pendulum-v1", dict(hidden_sizes=[8, 8])),
    "sac, discrete": ("sac", "CartPole-v1", dict(hidden_sizes=[8], normalize_observations=True)),
    "reppo": ("reppo", "Pendulum-v1", dict(hidden_sizes=[8, 8], critic_width=4)),
    "td3, critics with c51": ("td3", "Pendulum-v1", dict(hidden_sizes=[8], value={"kind": "c51", "atoms": 5})),
    "ddpg, correlated noise": (
        "ddpg", "MountainCarContinuous-v0",
        dict(hidden_sizes=[8], noise={"kind": "ou", "theta": 0.15}, normalize_observations=True),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", [name if name == "pqn" else slow(name) for name in NETWORKS])
def test_mlp_exports_act_like_run_in_all_formats(name):
    """`_build` compares actions in each format. Also check the size of the module, and that it imports only numpy."""
    algo, env_id, options = NETWORKS[name]
    saved = untrained(envs.make(env_id, 1), algo, **options)
    for to in FORMATS:
        exported = _build(saved, Options(to=to), Path("out"))
        found = exported.card["check"]
        assert found.get("num_different", 0) == 0 and found.get("max_difference", 0) <= 1e-5
    code = exported.files["policy.py"].decode()
    assert len(code.splitlines()) <= 40 and max(map(len, code.splitlines())) <= 120
    imported = [line for line in code.splitlines() if line.startswith(("import", "from"))]
    assert imported == ["from pathlib import Path", "import numpy as np"]


def test_export_has_nothing_of_a_bonus():
    """The networks of `bonus: rnd` do not act: all files but config.yaml and the card are those of a run without it."""
    runs = [untrained(envs.make("CartPole-v1", 1), "ppo", hidden_sizes=[8], bonus=kind) for kind in ("none", "rnd")]
    assert runs[1].agent.explore.args[0].bonus and jax.tree.leaves(runs[1].learners.params["bonus"]) == []
    for to in FORMATS:
        without, with_bonus = (_build(saved, Options(to=to), Path("out")).files for saved in runs)
        assert without.keys() == with_bonus.keys()
        policies = [name for name in without if name.startswith("policy.") and not name.endswith(".json")]
        assert policies and all(without[name] == with_bonus[name] for name in [*policies, "weights.safetensors"])


class Acts(gymnasium.Env):
    """An environment of which only the spaces and the mask matter."""

    observation_space = S.Box(-1, 1, (3,), np.float32)
    space = None
    mask = None

    def __init__(self):
        self.action_space = self.space

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(3, np.float32), {} if self.mask is None else {"action_mask": self.mask}

    def step(self, action):
        assert self.action_space.contains(action)
        return *self.reset()[:1], 0.0, True, False, self.reset()[1]


class Parts(Acts):
    space = S.Dict(
        b=S.Box(-2.0, 3.0, (2, 1), np.float64), a=S.Discrete(3, start=4),
        c=S.Tuple([S.MultiBinary(2), S.Box(0, 4, (1,), np.int8)]),
    )  # fmt: skip


class MaskedParts(Parts):
    def __init__(self):
        super().__init__()
        self.mask = {"a": np.array([1, 0, 1]), "b": None, "c": ((np.array([1, 1]), np.array([0, 1])), np.ones(5, int))}


class Choices(Acts):
    space = S.MultiDiscrete([2, 3], start=[1, -1])
    mask = np.array([1, 1, 0, 1, 1])


CASES = [
    (Parts, "ppo", dict(policy="tanh")),
    slow(MaskedParts, "ppo", dict(policy={"kind": "state_dependent", "log_std_init": -0.5})),
    slow(MaskedParts, "ppo", dict()),
    slow(Choices, "ppo", dict()),
    slow(Choices, "dqn", dict(dueling=True)),
    slow(Choices, "pqn", dict()),
    slow(Choices, "sac", dict(learning_starts=0)),
]


@pytest.mark.parametrize("sampled", [False, slow(True)])
@pytest.mark.parametrize(("env", "algo", "options"), CASES)
def test_exports_act_like_run(env, algo, options, sampled):
    """`_build` compares the actions of the exported file with those of the run."""
    made = envs.make(env, 1)
    saved = untrained(made, algo, hidden_sizes=[8], **options)
    if algo == "sac":  # after its first gradient step
        saved = saved._replace(env_steps=10**6, learners=saved.learners._replace(num_updates=np.int32(10**5)))
    for to in ("stablehlo", "onnx", "npz"):
        exported = _build(saved, Options(to=to, sampled=sampled), Path("out"))
        found = exported.card["check"]
        assert found.get("num_different", 0) == 0 and found.get("max_difference", 0) <= 1e-5, to
    card = json.loads(exported.files["policy.json"])
    action = np.asarray(made.view.to_env_action(made.spec.action.zeros(5)))
    parts = {name: eval(text, {"np": np, "action": action}) for name, text in card.get("action_parts", {}).items()}
    assert list(parts) == (["a", "b", "c/0", "c/1"] if issubclass(env, Parts) else [])
    if parts:
        one = lambda i: {"a": parts["a"][i], "b": parts["b"][i], "c": (parts["c/0"][i], parts["c/1"][i])}
        assert all(env.space.contains(one(i)) for i in range(5)) and parts["a"].tolist() == [4] * 5
        assert all(text in exported.files["README.md"].decode() for text in card["action_parts"].values())


def test_policy_of_run_returns_parts():
    saved = untrained(envs.make(Parts, 1), "ppo")
    act = policy.policy_of(saved.env, 8, saved.learners, saved.agent)
    assert Parts.space.contains(jax.device_get(act(np.zeros(3, np.float32))))


@pytest.mark.slow
@pytest.mark.parametrize("network", ["impala", "dqn2013"])
def test_image_network_exports_act_like_run(network):
    saved = untrained(image_env(shape=(36, 36, 2)), "ppo", network=network, hidden_sizes=[8])
    for to in ("stablehlo", "onnx"):
        assert _build(saved, Options(to=to), Path("out")).card["check"]["num_different"] == 0


class States:
    """A chain of five states, seen as an index."""

    default_params = ()

    def reset_env(self, key, params):
        return jnp.int32(0), jnp.int32(0)

    def step_env(self, key, state, action, params):
        state = jnp.minimum(state + action, 4)
        return state, state, jnp.float32(1), state == 4, {}

    def is_truncated(self, state, params):
        return jnp.bool_(False)

    def action_space(self, params):
        return spaces.Discrete(3)

    def observation_space(self, params):
        return spaces.Discrete(5)


@pytest.mark.slow
def test_exported_policy_encodes_state_index():
    """Compare with the policy for the one-hot vector of each state."""
    saved = untrained(envs.make(States, 1), "ppo")
    index = np.arange(5, dtype=np.int32)
    wanted = np.asarray(policy.greedy(saved.agent, saved.learners, PolicyInput(np.eye(5, dtype=np.float32)), ())[0])
    for to in FORMATS:
        exported = _build(saved, Options(to=to), Path("out"))
        assert exported.card["inputs"][0]["shape"] == ("b",) and exported.card["inputs"][0]["dtype"] == "int32"
        np.testing.assert_array_equal(check.run(to, exported.files, PolicyInput(index), ())[0], wanted)


@pytest.mark.slow
def test_npz_rejects_states_not_encoded_as_one_hot_from_0():
    """Check the states 1 to 3."""
    env = envs.make(States, 1)
    encode = lambda states: jax.nn.one_hot(states - 1, 3)
    env = env._replace(
        spec=env.spec._replace(obs=ShapeDtypeStruct((3,), np.float32)), view=env.view._replace(encode_obs=encode)
    )
    with pytest.raises(ValueError, match=r"^to npz: needs observations as vectors or as states 0, 1, ..., got int32"):
        _build(untrained(env, "ppo", hidden_sizes=[4]), Options(to="npz"), Path("out"))


@pytest.mark.slow
def test_sampled_categorical_matches_softmax_probabilities():
    """Compare frequencies of 20,000 samples with softmax(logits), within five standard errors."""
    saved = untrained(envs.make("Acrobot-v1", 1), "ppo")
    num = 20_000
    obs = np.repeat(np.random.default_rng(0).normal(size=(1, 6)).astype(np.float32), num, axis=0)
    network = saved.learners.params["network"]["params"]
    x = obs[:1]
    for i in range(2):
        layer = network["torso"]["mlp"][f"Dense_{i}"]
        x = np.tanh(x @ layer["kernel"] + layer["bias"])
    logits = (x @ network["actor_head"]["kernel"] + network["actor_head"]["bias"])[0]
    prob = np.exp(logits) / np.exp(logits).sum()
    noise = np.random.default_rng(1).gumbel(size=(num, 3)).astype(np.float32)
    for to in FORMATS:
        exported = _build(saved, Options(to=to, sampled=True), Path("out"))
        action = np.asarray(check.run(to, exported.files, PolicyInput(obs), (noise,))[0])
        frequency = np.bincount(action, minlength=3) / num
        assert np.all(np.abs(frequency - prob) < 5 * np.sqrt(prob * (1 - prob) / num)), to
        if to != "stablehlo":
            np.testing.assert_array_equal(action, (logits + noise).argmax(-1))
            assert exported.card["inputs"][1]["name"] == "gumbel"


@pytest.mark.slow
def test_sampled_gaussian_and_epsilon_greedy_use_noise_input():
    saved = untrained(envs.make("Pendulum-v1", 1), "ppo")
    obs, rng = np.zeros((64, 3), np.float32), np.random.default_rng(0)
    noise = rng.normal(size=(64, 1)).astype(np.float32)
    mean = np.asarray(saved.agent.exploit(saved.learners, policy.PolicyInput(obs), (), None).action)
    wanted = 2 * np.clip(mean + np.exp(saved.learners.params["log_std"]) * noise, -1, 1)
    for to in ("onnx", "npz"):
        files = _build(saved, Options(to=to, sampled=True), Path("out")).files
        np.testing.assert_allclose(check.run(to, files, PolicyInput(obs), (noise,))[0], wanted, rtol=1e-5, atol=1e-5)
    saved = untrained(envs.make("CartPole-v1", 1), "dqn", explore={"start": 0.25, "end": 0.25})
    obs = rng.normal(size=(64, 4)).astype(np.float32)
    uniform = rng.random(size=(64, 2)).astype(np.float32)
    greedy = np.asarray(policy.greedy(saved.agent, saved.learners, PolicyInput(obs), ())[0])
    wanted = np.where(uniform[:, 0] < 0.25, (uniform[:, 1] * 2).astype(int), greedy)
    for to in ("onnx", "npz"):
        files = _build(saved, Options(to=to, sampled=True), Path("out")).files
        np.testing.assert_array_equal(check.run(to, files, PolicyInput(obs), (uniform,))[0], wanted)


@pytest.mark.parametrize("to", ["npz", slow("onnx")])
def test_sampled_export_explores_with_epsilon_of_its_checkpoint(to):
    """After 80 of 200 steps from 1 to 0.1, epsilon is 0.64 in the first of eight environments, others explore less."""
    options = dict(rollout_length=1, hidden_sizes=[4], explore=dict(start=1.0, end=0.1, steps=200, apex_alpha=7.0))
    saved = untrained(envs.make("CartPole-v1", 1), "dqn", **options)
    saved = saved._replace(env_steps=80, learners=saved.learners._replace(num_updates=np.int32(10)))
    files = _build(saved, Options(to=to, sampled=True), Path("out")).files
    uniform = np.float32([[0.01, 0.99], [0.62, 0.49], [0.63, 0.51], [0.65, 0.0], [0.65, 0.99], [0.99, 0.51]])
    act = lambda uniform: check.run(to, files, PolicyInput(np.ones((6, 4), np.float32)), (uniform,))[0]
    greedy = act(np.full_like(uniform, 0.99))[0]
    np.testing.assert_array_equal(act(uniform), [1, 0, 1, greedy, greedy, greedy])


MOMENTS = {"uniform": (1 / 2, 1 / 12), "normal": (0, 1), "gumbel": (np.euler_gamma, np.pi**2 / 6)}  # mean, variance


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algo", "env", "options", "laws"),
    [
        ("ppo", "CartPole-v1", {}, ["gumbel"]),
        ("ppo", "Pendulum-v1", {}, ["normal"]),
        ("pqn", "CartPole-v1", {}, ["uniform"]),
        ("dqn", "CartPole-v1", {"noisy": True, "hidden_sizes": [8]}, ["uniform", "normal", "normal"]),
        ("sac", "Pendulum-v1", {}, ["normal"]),
        ("sac", "CartPole-v1", {}, ["gumbel"]),
    ],
)
def test_named_laws_of_noise_have_moments_of_draws(algo, env, options, laws):
    saved = untrained(envs.make(env, 1), algo, **options)
    assert [one.law for one in function.make(saved, True).noise] == laws
    drawn = jax.tree.leaves(saved.agent.sample_noise(jax.random.key(0), 1, 2**16))
    random = [x for x in drawn if jnp.issubdtype(x.dtype, jnp.floating)]
    for law, x in zip(laws, random, strict=True):
        np.testing.assert_allclose((x.mean(), x.var()), MOMENTS[law], rtol=0.05, atol=0.03)


def test_plain_function_of_noise_is_exported_without_law():
    normal = lambda key, num_steps, num_envs: jax.random.normal(key, (num_steps, num_envs, 2))
    agent = Agent(None, None, None, None, 1, sample_noise=normal)
    parts = [function._noise_of_row(agent, jax.random.key(0))]
    (noise,) = function._describe(agent, parts, function._row_axes(agent))
    assert (noise.name, noise.law, noise.spec.shape) == ("noise", "", (2,))


@pytest.mark.slow
def test_row_agent_has_epsilon_of_first_environment():
    """With Ape-X, eight environments have epsilons from 0.5 to 0.5^8. A single row has the largest."""
    saved = untrained(envs.make("CartPole-v1", 1), "dqn", explore={"start": 0.5, "end": 0.5, "apex_alpha": 7.0})
    agent = saved_run.row_agent(saved)
    noise = jax.tree.map(lambda x: x[0], agent.sample_noise(jax.random.key(0), 1, 2000))
    inputs = policy.PolicyInput(np.zeros((2000, 4), np.float32))
    action = np.asarray(agent.explore(saved.learners, inputs, (), noise).action)
    one = policy.PolicyInput(np.zeros((1, 4), np.float32))
    greedy = int(np.asarray(policy.greedy(saved.agent, saved.learners, one, ())[0])[0])
    assert abs((action != greedy).mean() - 0.25) < 5 * np.sqrt(0.25 * 0.75 / 2000)


def test_portable_layers_call_no_c():
    """Outside the context, a CPU with a compiler calls C for the same layers."""
    x, kernel, bias = jnp.ones((4, 3)), jnp.ones((3, 2)), jnp.ones(2)
    layers = lambda x: kernels.layer_norm(kernels.dense(x, kernel, bias), bias, bias)
    with target.tracing_for("any"):
        inside = str(jax.make_jaxpr(lambda x: layers(x))(x))
    outside = str(jax.make_jaxpr(lambda x: layers(x))(x))
    assert "ffi_call" not in inside
    assert "ffi_call" in outside or not build.is_available("dense")


# ONNX, operation by operation


class Mixed(nn.Module):
    """Operations that custom torsos may contain."""

    @nn.compact
    def __call__(self, x):  # [B, 6]
        index = (jnp.abs(x[..., 0]) * 3).astype(jnp.int32) % 5
        embedded = nn.Embed(5, 4)(index)
        y = nn.LayerNorm()(jnp.concatenate([jax.nn.gelu(x), jax.nn.softmax(embedded)], -1))
        y = jnp.where(y > 0, jnp.expm1(-y), jax.nn.silu(y)) + jnp.cumsum(y, -1)
        image = y.reshape(-1, 5, 2, 1)
        image = nn.Conv(3, (2, 2), padding="SAME")(image)
        image = nn.max_pool(image, (2, 2), (1, 1)) + nn.avg_pool(image, (2, 2), (1, 1))
        heads = nn.MultiHeadDotProductAttention(2, qkv_features=4)(image.reshape(-1, 4, 3))
        return nn.Dense(3)(heads.reshape(heads.shape[0], -1))


def functions():
    module = Mixed()
    params = module.init(jax.random.key(0), jnp.zeros((1, 6)))
    return {
        "network": lambda x: module.apply(params, x[None])[0],
        "numbers": lambda x: jnp.stack([x.max(), x.min(), x.prod(), jnp.linalg.norm(x), jnp.log1p(jnp.abs(x)).sum()]),
        "choices": lambda x: jnp.where(jnp.isfinite(x) & (x != 0) | ~(x > 1), jnp.sign(x), jnp.mod(x, 0.7)),
        "slices": lambda x: jnp.pad(x[1:5:2].reshape(1, 2).T.ravel(), 1)[:3] ** 3,
        "any": lambda x: jnp.stack([(x > 0).any(), (x > 0).all(), (x > 9).any()]).astype(jnp.int32),
        "columns": lambda x: x.reshape(1, 3, 2)[:, np.array([2, 0])][..., np.array([1])] + x[np.array([0, 4]), None],
        "split": lambda x: sum(jnp.split(x, 3)) / jnp.sqrt(1 + x[:2] ** 2) + jax.nn.sigmoid(x[2:4]) * jnp.exp2(x[:2]),
    }


def test_onnx_refuses_gather_of_single_numbers():
    """Several indices choose each number: `x[[0, 1], [1, 0]]`."""
    spec = ShapeDtypeStruct((2, 2), jnp.float32)
    act = lambda given, *_: (given.obs[np.array([0, 1]), np.array([1, 0])], ())
    given = function.PolicyFunction(act, None, PolicyInput(spec), (), ShapeDtypeStruct((2,), jnp.float32))
    with pytest.raises(ValueError, match=r"^to onnx: indexing other than along one axis .*, got gather; use stablehlo"):
        onnx_model.serialize(given)


@pytest.mark.slow
@pytest.mark.parametrize("name", [slow("network"), "numbers", "choices", "slices", "any", "columns", "split"])
def test_onnx_operations_equal_jax(name, any_ranks):
    act = functions()[name]
    spec = ShapeDtypeStruct((6,), jnp.float32)
    given = function.PolicyFunction(
        lambda given, *_: (act(given.obs), ()), None, PolicyInput(spec), (), jax.eval_shape(act, spec)
    )
    content = {"policy.onnx": onnx_model.serialize(given)}
    for num_rows in (1, 7):  # one file serves any number of rows
        x = np.random.default_rng(num_rows).normal(size=(num_rows, 6)).astype(np.float32)
        (found,) = check.run("onnx", content, PolicyInput(x), ())
        np.testing.assert_allclose(found, jax.vmap(act)(x), rtol=2e-5, atol=2e-6)


class Gated(nn.Module):
    """A custom torso."""

    @nn.compact
    def __call__(self, x):
        return nn.gelu(nn.LayerNorm()(nn.Dense(8)(x))) * nn.sigmoid(nn.Dense(8)(x))


@pytest.mark.slow
def test_custom_torso_is_exported_except_as_npz():
    saved = untrained(envs.make("CartPole-v1", 1), "ppo", network=f"{__name__}:Gated")
    for to in ("stablehlo", "onnx"):
        assert _build(saved, Options(to=to), Path("out")).card["check"]["num_different"] == 0
    with pytest.raises(ValueError, match=r"^to npz: needs a network of dense layers \(mlp\), got the parameter torso"):
        _build(saved, Options(to="npz"), Path("out"))


def test_npz_takes_whole_observation_of_which_parts_are_hidden():
    """The weights of the visible entries 0 and 2, by which the wanted values are computed, meet these entries alone."""
    raw, visible = np.array([[1.0, 50.0, 2.0, 70.0], [-1.0, 60.0, 3.0, 80.0]], np.float32), [0, 2]
    saved = untrained(hide(envs.make("CartPole-v1", 1), ["1", "3"]), "ppo", hidden_sizes=[4])
    exported = _build(saved, Options(to="npz"), Path("out"))
    assert exported.card["inputs"][0]["shape"] == ("b", 4)
    arrays = np.load(io.BytesIO(exported.files["policy.npz"]))
    x = np.tanh(raw[:, visible] @ arrays["hidden0.kernel"] + arrays["hidden0.bias"])
    wanted = (x @ arrays["head.kernel"] + arrays["head.bias"]).argmax(-1)
    for _ in range(2):  # the values of hidden entries are of no effect
        assert check.run("npz", exported.files, PolicyInput(raw), ())[0].tolist() == wanted.tolist()
        raw[:, [1, 3]] = -9


@pytest.mark.parametrize("dtype", [np.float32, np.uint8, bool])
def test_npz_orders_and_divides_entries_as_the_encoding_does(dtype):
    """An encoding may put the entries of an observation into another order, as where channels come first."""
    divide = lambda x: x / np.float32(256) if dtype == np.uint8 else x.astype(np.float32)
    view = View(raw_obs=ShapeDtypeStruct((2, 300), dtype), encode_obs=lambda x: divide(jnp.swapaxes(x, 1, 2)))
    env = Env(None, None, EnvSpec("x", ShapeDtypeStruct((300, 2), np.float32), Discrete(3), 1), view=view)
    saved = untrained(env, "ppo", hidden_sizes=[4], network="mlp")
    assert _build(saved, Options(to="npz"), Path("out")).card["check"]["num_different"] == 0


def test_onnx_error_message_names_unsupported_operation():
    spec = ShapeDtypeStruct((6,), jnp.float32)
    given = function.PolicyFunction(lambda given, *_: (jnp.sort(given.obs), ()), None, PolicyInput(spec), (), spec)
    with pytest.raises(ValueError, match=r"^to onnx: an operation of the policy is not supported, got sort; use"):
        onnx_model.serialize(given)


def test_onnx_model_states_opset_names_and_batch_axis():
    saved = untrained(envs.make("CartPole-v1", 1), "ppo", hidden_sizes=[4])
    model = onnx.load_from_string(onnx_model.serialize(function.make(saved, False)))
    assert [(x.domain, x.version) for x in model.opset_import] == [("", 18)] and model.ir_version == 8
    (given,), (result,) = model.graph.input, model.graph.output
    dims = lambda x: [d.dim_param or d.dim_value for d in x.type.tensor_type.shape.dim]
    assert (given.name, dims(given)) == ("obs", ["b", 4]) and (result.name, dims(result)) == ("action", ["b"])


def test_parts_of_observation_are_named_inputs():
    like = lambda *shape: ShapeDtypeStruct(shape, np.float32)
    assert list(function.named(PolicyInput(like(2), like(3)))) == ["obs", "action_mask"]
    assert list(function.named(PolicyInput({"image": like(2), "goal": like(1)}))) == ["obs_goal", "obs_image"]
    alike = {"arm_pos": like(2), "arm": {"pos": like(1)}}
    found = function.named(PolicyInput(alike))
    assert {name: x.shape for name, x in found.items()} == {"obs_arm_pos": (1,), "obs_arm_pos_2": (2,)}
    assert list(function.named(PolicyInput((like(2), {"a": like(1)})))) == ["obs_0", "obs_1_a"]
    spec = EnvSpec("x", {"goal": like(2), "speed": like(1)}, Box((2,)), 1)
    saved = untrained(Env(None, None, spec), "ppo", hidden_sizes=[4])
    for to in ("stablehlo", "onnx"):
        assert _build(saved, Options(to=to), Path("out")).card["check"]["max_difference"] < 1e-5
    with pytest.raises(ValueError, match=r"^to npz: needs observations of one array, got 2; use stablehlo or onnx"):
        _build(saved, Options(to="npz"), Path("out"))


def test_build_rejects_export_that_acts_differently(monkeypatch):
    saved = untrained(envs.make("CartPole-v1", 1), "ppo", hidden_sizes=[4])
    write_right = numpy_mlp.write

    def write_wrong(*given):
        arrays, code = write_right(*given)
        return arrays | {"head.kernel": -arrays["head.kernel"]}, code

    monkeypatch.setattr(numpy_mlp, "write", write_wrong)
    with pytest.raises(ValueError, match=r"^to npz: the exported policy acts differently, got .*num_different"):
        _build(saved, Options(to="npz"), Path("out"))


@pytest.mark.slow
@pytest.mark.parametrize(("algo", "kind", "to"), [("pqn", "lru", "onnx"), ("ppo", "lstm", "stablehlo")])
def test_memory_is_input_and_output_of_exported_policy(algo, kind, to):
    """Over three steps, the exported policy with its own memory output returns the actions and carry of the agent."""
    saved = untrained(envs.make("CartPole-v1", 1), algo, hidden_sizes=[4], memory={"kind": kind, "size": 3})
    policy = function.make(saved, False)
    serialize = onnx_model.serialize if to == "onnx" else stablehlo.serialize
    content = {f"policy.{to}": serialize(policy)}
    lines = card.usage(policy, to, function.inputs(policy, to == "stablehlo"))
    assert any("memory" in line and "zeros((2, 3)" in line for line in lines), lines
    memory = [np.zeros((5, 3), np.float32)] * len(policy.memory)
    carry = rollout.initial_carry(saved.agent, 5)
    for i in range(3):
        obs = check.observations(saved.env.spec.obs, 5, seed=i)
        action, *memory = check.run(to, content, PolicyInput(obs), (), memory)
        decision = saved.agent.exploit(saved.learners, PolicyInput(obs), carry, None)
        carry = decision.carry
        np.testing.assert_array_equal(action, decision.action)
        for got, wanted in zip(memory, jax.tree.leaves(carry[:1]), strict=True):  # without the critic's
            np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)
    assert all(np.abs(x).max() > 1e-3 for x in memory)


def test_npz_rejects_policy_with_memory():
    saved = untrained(envs.make("CartPole-v1", 1), "ppo", hidden_sizes=[4], memory={"kind": "gru", "size": 3})
    with pytest.raises(ValueError, match=r"^to npz: needs a policy without memory"):
        numpy_mlp.write(saved, function.make(saved, False))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algo", "options", "got", "fits"),
    [
        ("ddpg", {"noise": "ou"}, "noise ou", ["stablehlo", "onnx"]),
        ("ppo", {"policy": "gsde"}, "policy gsde", ["stablehlo"]),
    ],
)
def test_npz_rejects_noise_that_lasts_only_when_sampled(algo, options, got, fits):
    """The remedy names the formats that take this noise."""
    saved = untrained(envs.make("Pendulum-v1", 1), algo, hidden_sizes=[4], **options)
    assert numpy_mlp.write(saved, function.make(saved, False))
    with pytest.raises(
        ValueError, match=rf"cannot sample with noise that lasts for several steps, got {got}; use {' or '.join(fits)}$"
    ):
        numpy_mlp.write(saved, function.make(saved, True))
    for to in ("stablehlo", "onnx"):
        if to in fits:
            _build(saved, Options(to=to, sampled=True), Path("out"))
        else:
            with pytest.raises(ValueError, match=f"^to {to}: sampled needs noise of real numbers, .*; use stablehlo"):
                _build(saved, Options(to=to, sampled=True), Path("out"))


@pytest.mark.slow
def test_npz_of_actor_has_no_atoms_of_critics(tmp_path):
    saved = untrained(envs.make("Pendulum-v1", 1), "sac", hidden_sizes=[4], value="c51")
    exported = _build(saved, Options(to="npz"), tmp_path / "out")
    assert exported.card["check"]["max_difference"] <= 1e-5


@pytest.mark.slow
def test_npz_rejects_simba():
    saved = untrained(envs.make("CartPole-v1", 1), "ppo", hidden_sizes=[4], network="simba")
    with pytest.raises(ValueError, match=r"^to npz: needs network mlp, got simba; use stablehlo or onnx"):
        numpy_mlp.write(saved, function.make(saved, False))


def test_stablehlo_supports_all_platforms_and_any_batch_size():
    saved = untrained(envs.make("CartPole-v1", 1), "ppo", hidden_sizes=[4])
    exported = jax.export.deserialize(bytearray(stablehlo.serialize(function.make(saved, False))))
    assert exported.platforms == ("cpu", "cuda", "tpu")
    assert str(exported.in_avals[0]) == "float32[b,4]"
    for num_rows in (1, 5):
        assert exported.call(np.zeros((num_rows, 4), np.float32)).shape == (num_rows,)


# `load` of an exported policy


@pytest.mark.parametrize("to", [slow("stablehlo"), "onnx", "npz"])
def test_loaded_export_is_called_as_policy_of_run(to, tmp_path):
    """One observation and a batch give the greedy actions of the run; `policy` is the same object."""
    saved = untrained(envs.make("CartPole-v1", 1), "ppo", hidden_sizes=[4])
    write(_build(saved, Options(to=to), tmp_path / "out"))
    loaded = jaxrl_fast.load(tmp_path / "out")
    assert loaded.policy is loaded and repr(loaded).startswith("ExportedPolicy(ppo on gymnax/CartPole-v1, greedy, ")
    obs = np.random.default_rng(0).normal(size=(9, 4))
    wanted = np.asarray(policy.greedy(saved.agent, saved.learners, PolicyInput(np.float32(obs)), ())[0])
    assert len(set(wanted)) == 2
    for given in (f"policy.{to}", "policy.json"):
        act = jaxrl_fast.load(tmp_path / "out" / given).policy
        assert np.asarray(act(obs)).tolist() == wanted.tolist()
        assert act(obs[3].tolist()).shape == () and act(obs[3].tolist()) == wanted[3]
    with pytest.raises(ValueError, match=r"^obs: gymnax/CartPole-v1 observes float32\[4\], got float64\[3\]"):
        loaded(obs[0, :3])
    with pytest.raises(ValueError, match=r"^mask: gymnax/CartPole-v1 has no action masks, got a mask"):
        loaded(obs, mask=[True, True])
    with pytest.raises(ValueError, match=r"^policy: this exported policy is greedy, got explore=True; pass explore=F"):
        loaded(obs, jax.random.key(0), explore=True)
    with pytest.raises(ValueError, match=r"^seed: an exported policy is complete, got 3; leave it out$"):
        jaxrl_fast.load(tmp_path / "out", seed=3)


@pytest.mark.parametrize("to", FORMATS)
def test_loaded_sampled_export_draws_from_key(to, tmp_path):
    """Of 4,000 equal observations, the share of an action is its probability, within five standard errors."""
    saved = untrained(envs.make("CartPole-v1", 1), "ppo", hidden_sizes=[4])
    write(_build(saved, Options(to=to, sampled=True), tmp_path / "out"))
    act, obs = jaxrl_fast.load(tmp_path / "out").policy, np.full((4000, 4), 0.3, np.float32)
    pi = saved.agent.explore(saved.learners, PolicyInput(obs[:1]), (), np.zeros((1, 2), np.float32)).extras
    chance = float(jax.nn.softmax(pi.logits)[0, 1])
    found = np.asarray(act(obs, jax.random.key(0), explore=True))
    assert found.mean() == pytest.approx(chance, abs=5 * np.sqrt(chance * (1 - chance) / 4000)) and 0.1 < chance < 0.9
    assert (found != act(obs, jax.random.key(1), explore=True)).any()
    with pytest.raises(ValueError, match=r"^policy: this exported policy samples, got explore=False; pass explore=Tr"):
        act(obs)
    with pytest.raises(ValueError, match=r"^policy: explore=True requires a PRNG key"):
        act(obs, explore=True)


@pytest.mark.slow
@pytest.mark.parametrize("to", FORMATS[:2])
def test_loaded_export_with_memory_returns_next_memory(to, tmp_path):
    saved = untrained(envs.make("CartPole-v1", 1), "ppo", hidden_sizes=[4], memory={"kind": "lstm", "size": 3})
    write(_build(saved, Options(to=to), tmp_path / "out"))
    act, wanted = jaxrl_fast.load(tmp_path / "out").policy, policy.policy_of(saved.env, 8, saved.learners, saved.agent)
    memory, carry = act.initial_memory(), wanted.initial_memory()
    memories = act.initial_memory(2)
    for i in range(4):
        obs = np.random.default_rng(i).normal(size=4).astype(np.float32)
        action, memory = act(obs, memory)
        actions, memories = act(np.stack([obs, obs]), memories)
        expected, carry = wanted(obs, carry)
        assert action == expected and (actions == expected).all()
        np.testing.assert_allclose(memory[0], jax.tree.leaves(carry)[0], rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(memories[0][1], memory[0], rtol=1e-4, atol=1e-6)
    with pytest.raises(ValueError, match=r"^policy: memory must have the shapes .*; pass policy.initial_memory"):
        act(obs, memories)


def test_load_names_parts_of_observation_as_export_does(tmp_path):
    like = lambda *shape: ShapeDtypeStruct(shape, np.float32)
    spec = EnvSpec("x", {"goal": like(2), "arm": {"speed": like(1)}}, Box((2,)), 1)
    saved = untrained(Env(None, None, spec), "ppo", hidden_sizes=[4])
    one = {"goal": [0.5, -2.0], "arm": {"speed": np.float32([3])}}
    batch = {"goal": np.float32([[0.5, -2.0]]), "arm": {"speed": np.float32([[3]])}}
    wanted = policy.greedy(saved.agent, saved.learners, PolicyInput(batch), ())[0][0]
    for to in FORMATS[:2]:
        write(_build(saved, Options(to=to), tmp_path / to))
        np.testing.assert_allclose(jaxrl_fast.load(tmp_path / to).policy(one), wanted, rtol=1e-5, atol=1e-6)


def test_load_of_anything_else_is_refused_in_one_line(tmp_path, monkeypatch):
    def refused(path):
        with pytest.raises(ValueError) as caught:
            jaxrl_fast.load(path)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    (tmp_path / "notes.txt").write_text("")
    files = "policy.stablehlo, policy.onnx, policy.npz"
    for name in ("notes.txt", "absent.onnx"):
        what = f"must be a run's folder or the file of an export ({files}), got {tmp_path / name}; export one"
        assert refused(tmp_path / name) == f"load: {what}"
    assert "is not a run directory" in refused(tmp_path / "absent")
    saved = untrained(envs.make("CartPole-v1", 1), "ppo", hidden_sizes=[4])
    for to in FORMATS:
        write(_build(saved, Options(to=to), tmp_path / to))
        file = tmp_path / to / ("policy.py" if to == "npz" else f"policy.{to}")
        file.write_bytes(b"(damaged")
        found = refused(tmp_path / to)
        assert found.startswith(f"load: {tmp_path / to / f'policy.{to}'} is damaged (")
        assert found.endswith("); export the policy again")
    monkeypatch.setattr(load_export.util, "find_spec", lambda name: None)
    assert refused(tmp_path / "onnx").endswith("needs onnxruntime, got no such package; pip install onnxruntime")
    (tmp_path / "npz" / "policy.json").write_text("[]")
    assert "policy.json is damaged" in refused(tmp_path / "npz" / "policy.npz")
    (tmp_path / "npz" / "policy.json").unlink()
    assert "needs policy.json in its folder, got none; copy the whole" in refused(tmp_path / "npz" / "policy.npz")


# The folder


def test_export_from_python_rejects_existing_folder(tmp_path):
    with pytest.raises(ValueError, match=r"^out: must be a new folder, got .*, which exists"):
        jaxrl_fast.Run(tmp_path, {}).export(to="npz", out=str(tmp_path))


@pytest.mark.slow
def test_card_describes_the_policy(cart, tmp_path, monkeypatch):
    folder = cart.export(to="npz", out=str(tmp_path / "out"), which="last", sampled=True)
    found = json.loads((folder / "policy.json").read_text())
    assert sorted(path.name for path in folder.iterdir()) == [
        "README.md", "config.yaml", "policy.json", "policy.npz", "policy.py", "weights.safetensors",
    ]  # fmt: skip
    assert (found["policy"], found["env_id"], found["seed"]) == ("sampled", "gymnax/CartPole-v1", 3)
    assert found["inputs"][1] == {
        "name": "gumbel", "shape": ["b", 2], "dtype": "float32",
        "meaning": "random numbers, drawn again for each call: gumbel",
    }  # fmt: skip
    assert found["outputs"][0]["dtype"] == "int32" and found["versions"]["jax"] == jax.__version__
    assert found["evaluation"] is None  # only the greedy policy was evaluated
    text = (folder / "README.md").read_text()
    assert "Not evaluated" in text and all(line in text for line in found["load"])
    monkeypatch.chdir(folder)
    again = load.from_command_line(found["training_command"].split()[3:])
    assert again.agent == of_run(cart, 3).settings.agent and again.options.env == "gymnax/CartPole-v1"


@pytest.mark.slow
def test_card_has_the_newest_evaluation(cart):
    saved = of_run(cart, 4)
    during = card.evaluation(saved, False)
    (last,) = cart.summary["evaluations"]
    assert (during["return_mean"], during["episodes"]) == (last["eval_return_mean"], last["eval_episodes"])
    half = 1.96 * last["eval_return_std"] / np.sqrt(last["eval_episodes"])
    assert during["return_high"] - during["return_mean"] == pytest.approx(half)
    after = cart.evaluate(episodes=8)["seeds"][1]
    found = card.evaluation(saved, False)
    assert found["source"] == "evaluation.json" and found["episodes"] == 8
    assert (found["return_low"], found["return_high"]) == (after["eval_return_low"], after["eval_return_high"])


MISTAKES = [
    ("", ["RUN is missing"]),
    ("empty", ["empty has no checkpoint"]),
    ("cart --to onx", ["error: to: ", "'onx'", "did you mean onnx?"]),
    ("cart --seed 9", ["error: seed: must be 3 to 4, which cart has trained, got 9; leave it out\n"]),
    ("cart --out empty", ["error: out: must be a new folder, got empty, which exists"]),
    (f"cart --out {'x' * 250}", ["error: out: the name xxx", "got 250 characters; use a shorter one"]),
    ("cart --out no/where", ["error: out: must be in an existing folder", "no/where"]),
    ("cart --to onnx", ["error: to onnx: needs onnx", "pip install ", "[onnx]"]),
    ("board --to npz", ["error: to npz: needs a network of dense layers (mlp)", "use stablehlo or onnx"]),
]


@pytest.fixture(scope="module")
def invalid_runs(runs, cart):
    (runs / "empty").mkdir()
    (runs / "empty" / "config.yaml").write_bytes((cart.folder / "config.yaml").read_bytes())
    jaxrl_fast.fit(
        algo="pqn", env="Breakout-MinAtar", num_envs=2, total_steps=64, run_dir=str(runs / "board"),
        rollout_length=4, hidden_sizes=[4], num_minibatches=1, **TINY,
    )  # fmt: skip
    return runs


@pytest.mark.slow
@pytest.mark.parametrize(("line", "words"), MISTAKES, ids=[line or "nothing" for line, _ in MISTAKES])
def test_invalid_command_line_prints_one_line_and_writes_nothing(line, words, invalid_runs, monkeypatch, capsys):
    monkeypatch.chdir(invalid_runs)
    if "onnx" in line:
        find = evaluation.export.util.find_spec
        monkeypatch.setattr(evaluation.export.util, "find_spec", lambda name: None if "onnx" in name else find(name))
    before = sorted(invalid_runs.rglob("*"))
    assert export.main(line.split()) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1, err
    for word in words:
        assert word in err
    assert sorted(invalid_runs.rglob("*")) == before


@pytest.mark.slow
def test_command_prints_how_to_load_and_never_overwrites(cart, capsys):
    for name in ("export-npz", "export-npz-2"):
        assert export.main([str(cart.folder), "--to", "npz"]) == 0
        printed = capsys.readouterr().out
        assert "def policy(obs):" in printed and "from policy import policy" in printed
        assert printed.splitlines()[-1].endswith(name) and (cart.folder / name / "policy.json").is_file()


def test_export_folder_is_complete_or_absent_after_write_error(tmp_path, monkeypatch, capsys):
    exported = evaluation.export.Export(tmp_path / "out", {"a": b"1", "b": b"2"}, {})
    calls = []

    def full(path):
        calls.append(path)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(evaluation.export.files, "sync", full)
    with pytest.raises(OSError, match="No space"):
        write(exported)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    assert sorted(path.name for path in write(exported).iterdir()) == ["a", "b"]
    with pytest.raises(FileExistsError):
        write(exported)
    capsys.readouterr()
    assert export.act(exported) == 1
    assert (
        capsys.readouterr().err == f"error: out: was created meanwhile, got {exported.folder}; choose another folder\n"
    )
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a", "b", "out"]


def test_export_folder_is_where_the_command_began(tmp_path, monkeypatch):
    """Write a relative folder after an environment has changed the current directory."""
    exported = evaluation.export.Export(Path("out"), {"a": b"1"}, {}, start=tmp_path)
    monkeypatch.chdir("/")
    assert write(exported) == Path("out") and (tmp_path / "out" / "a").read_bytes() == b"1"


@pytest.mark.parametrize("seeds", [1, [1], None])
def test_card_ignores_damaged_evaluations(seeds, tmp_path):
    (tmp_path / "evaluation.json").write_text(json.dumps({"seeds": seeds}))
    (tmp_path / "summary.json").write_text(json.dumps({"evaluations": seeds}))
    saved = SimpleNamespace(folder=tmp_path, checkpoint=tmp_path, member={}, seeds=[0], env_steps=1)
    assert card.evaluation(saved, False) is None
