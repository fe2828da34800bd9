"""Test that a policy acts outside of jaxrl_fast as in its evaluation: from what the environment itself returns.

Each environment pays 2^t in step t for the right action. So a return names the steps with a right action, and equal
returns mean equal actions in all episodes. Its episodes depend on their number only.
"""

import json

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnax.environments import spaces

import jaxrl_fast

S = gymnasium.spaces
EPISODES, LENGTH = 6, 8
OPTIONS = {"num_envs": 8, "eval_envs": 1, "eval_episodes": EPISODES, "loggers": (), "log_level": "quiet"}
PPO = {"algo": "ppo", "rollout_length": 64, "total_steps": 2048, "learning_rate": 0.01, "host.workers": 0, **OPTIONS}
FORMATS = ("stablehlo", "onnx", "npz")


class Guess(gymnasium.Env):
    """Pays for the action that the secret number of a step tells, which the observation shows in some form."""

    observation_space = S.Box(0, 255, (2,), np.uint8)
    action_space = S.Discrete(2)
    episode = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.secrets = 0, np.random.default_rng(self.episode).integers(256, size=LENGTH + 1)
        self.episode += 1
        return self.show(int(self.secrets[0])), self.info()

    def step(self, action):
        reward = 2.0**self.t * self.is_right(action, int(self.secrets[self.t]))
        self.t += 1
        return self.show(int(self.secrets[self.t])), reward, False, self.t >= LENGTH, self.info()

    def show(self, secret):
        return np.array([secret, 255 - secret], np.uint8)

    def is_right(self, action, secret):
        return int(action) == (secret >= 128)

    def info(self):
        return {}


class Shifted(Guess):
    """An index of a state that does not begin at 0, and actions that do not."""

    observation_space, action_space = S.Discrete(256, start=-7), S.Discrete(2, start=3)

    def show(self, secret):
        return np.int64(secret - 7)

    def is_right(self, action, secret):
        return int(action) - 3 == (secret >= 128)


class Parts(Guess):
    """Parts of different kinds, in 64 bits, and a continuous action."""

    observation_space = S.Dict({"byte": S.Box(0, 255, (1,), np.uint8), "kind": S.Discrete(3), "x": S.Box(-1, 1, (1,))})
    action_space = S.Box(-2, 6, (1,))

    def show(self, secret):
        return {"byte": np.array([secret], np.uint8), "kind": np.int64(secret % 3), "x": np.array([secret / 256])}

    def is_right(self, action, secret):
        return float(action[0]) / 4  # shows the action itself


class Frames(Guess):
    """A picture with channels first."""

    observation_space = S.Box(0, 255, (3, 16, 16), np.uint8)

    def show(self, secret):
        return np.broadcast_to(np.array([secret, 128, 255 - secret], np.uint8)[:, None, None], (3, 16, 16)).copy()


class GrayFrames(Guess):
    """A gray picture without an axis for its channel."""

    observation_space = S.Box(0, 255, (16, 18), np.uint8)

    def show(self, secret):
        return np.full((16, 18), secret, np.uint8)


class Bits(Guess):
    """A board of bits, of which one column tells the secret number."""

    observation_space = S.Box(0, 1, (8, 8), np.bool_)

    def show(self, secret):
        return np.eye(8, dtype=bool) ^ np.array([secret >> i & 1 for i in range(8)], bool)[:, None] * (
            np.arange(8) == 3
        )


class Tiles(Bits):
    """A board of 0 and 1 with the size and the dtype of a picture."""

    observation_space = S.Box(0, 1, (16, 16), np.uint8)

    def show(self, secret):
        return np.tile(super().show(secret), (2, 2)).astype(np.uint8)


class Told(Guess):
    """Text and a list of any length, which are hidden, before and after what can be read."""

    observation_space = S.Dict(
        {"aim": S.Text(9), "b": Guess.observation_space, "rest": S.Tuple((S.Sequence(S.Discrete(2)), S.Discrete(2)))}
    )

    def show(self, secret):
        return {"aim": "guess", "b": super().show(secret), "rest": ([1] * (secret % 5), np.int64(secret % 2))}


class Masked(Guess):
    """The right action is forbidden in each third step, and costs as much as it would have paid."""

    def allowed(self):
        right = int(self.secrets[self.t] >= 128)
        return np.array([self.t % 3 > 0 or right == 1, self.t % 3 > 0 or right == 0])

    def info(self):
        return {"action_mask": self.allowed()}

    def is_right(self, action, secret):
        return super().is_right(action, secret) if self.allowed()[int(action)] else -1


class MaskedPart(Masked):
    """The mask is a part of the observation."""

    observation_space = S.Dict({"obs": Guess.observation_space, "action_mask": S.MultiBinary(2)})

    def show(self, secret):
        return {"obs": super().show(secret), "action_mask": self.allowed().astype(np.int8)}

    def info(self):
        return {}


class Scene(MaskedPart):
    """A picture with channels first, a mask and a byte."""

    observation_space = S.Dict(
        {"action_mask": S.MultiBinary(2), "camera": Frames.observation_space, "x": S.Box(0, 255, (1,), np.uint8)}
    )

    def show(self, secret):
        camera, parts = Frames.show(self, secret), super().show(secret)
        return {"action_mask": parts["action_mask"], "camera": camera, "x": np.array([secret % 7], np.uint8)}


class MaskedChoices(Guess):
    """Two choices, with a mask for each."""

    action_space = S.MultiDiscrete([2, 3])

    def info(self):
        low = self.secrets[self.t] < 128
        return {"action_mask": (np.array([True, self.t % 2 == 0]), np.array([low, True, not low]))}

    def is_right(self, action, secret):
        parts = self.info()["action_mask"]
        return sum(i if mask[i] else -1 for mask, i in zip(parts, action, strict=True))


class Board:
    """A device environment with gymnax's interface, whose only episode shows bytes, and whose mask is not constant."""

    default_params = ()
    secrets = jnp.asarray(np.random.default_rng(0).integers(256, size=LENGTH + 1), jnp.uint8)

    def show(self, t):
        return jnp.stack([self.secrets[t], 255 - self.secrets[t]])

    def reset_env(self, key, params):
        return self.show(0), jnp.int32(0)

    def step_env(self, key, t, action, params):
        right = self.action_mask(t, params)[action] & (action == (self.secrets[t] >= 128))
        return self.show(t + 1), t + 1, 2.0**t * right, jnp.bool_(False), {}

    def is_truncated(self, t, params):
        return t >= LENGTH

    def action_mask(self, t, params):
        return jnp.stack([t % 3 > 0, jnp.bool_(True)])

    def action_space(self, params):
        return spaces.Discrete(2)

    def observation_space(self, params):
        return spaces.Box(0, 255, (2,), jnp.uint8)


def play(env, act):
    """Return the returns of EPISODES episodes; `act` maps what the environment returns to an action."""
    returns = []
    for _ in range(EPISODES):
        obs, info = env.reset(seed=0)
        total, ended, act_now = 0.0, False, act()
        while not ended:
            obs, reward, terminated, truncated, info = env.step(act_now(obs, info))
            total, ended = total + reward, terminated or truncated
        returns.append(total)
    return returns


def policy_of(run, read=lambda obs: obs):
    """Return the loaded policy as `play` takes it; `read` changes an observation."""
    policy = jaxrl_fast.load(run).policy
    of_info = lambda info: {"mask": info["action_mask"]} if "action_mask" in info else {}

    def begin():
        memory = policy.initial_memory() if hasattr(policy, "initial_memory") else None

        def act(obs, info):
            nonlocal memory
            if memory is None:
                return np.asarray(policy(read(obs), **of_info(info)))
            action, memory = policy(read(obs), memory, **of_info(info))
            return np.asarray(action)

        return act

    return begin


def export_of(folder, form):
    """Return an exported policy as `play` takes it, from its files alone."""
    card = json.loads((folder / "policy.json").read_text())
    start = {name: np.asarray(x, np.float32)[None] for name, x in card.get("initial_memory", {}).items()}
    call = LOADERS[form](folder, card)

    def begin():
        memory = dict(start)

        def act(obs, info):
            masks = info.get("action_mask")
            masks = np.concatenate(masks) if isinstance(masks, tuple) else masks
            masks = None if masks is None else masks[None]
            action, *after = call(batch_of(obs), masks, memory)
            memory.update(zip(memory, after, strict=True))
            return np.asarray(action)[0]

        return act

    return begin


def batch_of(obs):
    """Return arrays [1, ...]; None in place of parts of a Tuple that are no arrays, which leave a Dict."""
    if isinstance(obs, dict):
        return {name: x for name, part in obs.items() if (x := batch_of(part)) is not None}
    if isinstance(obs, tuple):
        return tuple(map(batch_of, obs))
    return None if isinstance(obs, str | list) else np.asarray(obs)[None]


def stablehlo(folder, card):
    exported = jax.export.deserialize(bytearray((folder / "policy.stablehlo").read_bytes()))

    def call(obs, masks, memory):
        narrow = {"float64": np.float32, "int64": np.int32}
        obs = jax.tree.map(lambda x: x.astype(narrow.get(x.dtype.name, x.dtype)), obs)
        found = exported.call(obs, *([] if masks is None else [masks]), *memory.values())
        return found if memory else [found]

    return call


def onnx(folder, card):
    session = pytest.importorskip("onnxruntime").InferenceSession(folder / "policy.onnx")
    kinds = {one["name"]: one["dtype"] for one in card["inputs"]}

    def call(obs, masks, memory):
        paths = jax.tree_util.tree_leaves_with_path({"obs": obs})
        given = {jax.tree_util.keystr(path, simple=True, separator="_"): x for path, x in paths}
        given |= memory if masks is None else {"action_mask": masks, **memory}
        return session.run(None, {name: x.astype(kinds[name]) for name, x in given.items()})

    return call


def npz(folder, card):
    scope = {"__file__": str(folder / "policy.py"), "__name__": "policy"}
    exec((folder / "policy.py").read_text(), scope)
    return lambda obs, masks, memory: [scope["policy"](obs, *([] if masks is None else [masks]))]


LOADERS = {"stablehlo": stablehlo, "onnx": onnx, "npz": npz}


def evaluated(options, tmp_path):
    """Train and evaluate; return the run and the return of each episode, not all of which are the worst."""
    run = jaxrl_fast.fit(**PPO | options, run_dir=str(tmp_path / "run"))
    returns = run.evaluate(episodes=EPISODES)["seeds"][0]["returns"]
    assert max(returns) > 2 ** (LENGTH - 2), "else nothing was learned that a wrong input would spoil"
    return run, pytest.approx(returns, rel=1e-4)


CASES = {  # options, and the formats that fit
    "bytes": ({"env": Guess}, FORMATS),
    "mask": ({"env": Masked}, FORMATS),
    "mask as a part": ({"env": MaskedPart}, FORMATS[:2]),
    "masks of choices": ({"env": MaskedChoices}, FORMATS),
    "index": ({"env": Shifted}, FORMATS[:2]),
    "parts": ({"env": Parts}, FORMATS[:2]),
    "image": ({"env": Frames, "network": "mlp"}, FORMATS[:2]),
    "gray": ({"env": GrayFrames}, FORMATS[:2]),
    "gray, mlp": ({"env": GrayFrames, "network": "mlp"}, FORMATS),
    "board": ({"env": Bits, "network": "mlp"}, FORMATS),
    "board, convolved": ({"env": Bits}, FORMATS[:2]),
    "tiles": ({"env": Tiles}, FORMATS[:2]),
    "text": ({"env": Told, "wrap": ["hide=aim", "hide=rest/0"]}, FORMATS[:2]),
    "resized part": ({"env": Scene, "env_options": {"gray": True, "resize": "17x8"}}, FORMATS[:2]),
    "memory": ({"env": Masked, "memory": "gru", "memory.size": 8, "rollout_length": 16}, FORMATS[:2]),
    "normalized": ({"env": Guess, "normalize_observations": True}, FORMATS),
    "hide": ({"env": Guess, "wrap": "hide=1"}, FORMATS),
    "dqn": ({"env": Masked, "algo": "dqn", "rollout_length": "auto", "learning_starts": 256}, FORMATS),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_policy_and_exports_play_episodes_of_evaluation(name, tmp_path):
    """Raw observations and masks of the environment give the evaluation's return in every episode."""
    options, formats = CASES[name]
    run, wanted = evaluated(options, tmp_path)
    assert play(options["env"](), policy_of(run)) == wanted
    for form in formats:
        folder = run.export(to=form)
        assert play(options["env"](), export_of(folder, form)) == wanted, form
        assert play(options["env"](), policy_of(folder / f"policy.{form}")) == wanted, form


@pytest.mark.slow
@pytest.mark.parametrize("name", ["previous", "frames"])
def test_policy_of_wrapped_environment_takes_what_environment_returns(name, tmp_path):
    """A loop adds the previous action and reward, or stacks raw frames."""
    env, options, reader = {
        "previous": (Guess, {"wrap": "previous"}, Remembering),
        "frames": (Frames, {"env_options": {"frame_stack": 2, "gray": True, "resize": "8x8"}}, Stacking),
    }[name]
    run, wanted = evaluated({"env": env, "network": "mlp", **options}, tmp_path)
    assert play(reader(env()), policy_of(run)) == wanted


class Remembering(gymnasium.Wrapper):
    """Shows the previous action, as a one-hot vector, and reward."""

    def reset(self, **options):
        obs, info = self.env.reset(**options)
        return (obs, np.zeros(2, np.float32), np.zeros(1, np.float32)), info

    def step(self, action):
        obs, reward, *rest, info = self.env.step(action)
        return (obs, np.eye(2, dtype=np.float32)[int(action)], np.float32([reward])), reward, *rest, info


class Stacking(gymnasium.Wrapper):
    """Shows the last two frames as channels, the oldest first."""

    def reset(self, **options):
        self.frame, info = self.env.reset(**options)
        return np.concatenate([self.frame, self.frame]), info

    def step(self, action):
        before = self.frame
        self.frame, *rest = self.env.step(action)
        return np.concatenate([before, self.frame]), *rest


@pytest.mark.slow
def test_device_policy_takes_bytes_and_mask_of_environment(tmp_path):
    """A loop with gymnax's interface gives the evaluation's return; bytes are divided by 256 as on the host."""
    run, wanted = evaluated({"env": Board, "host.workers": "auto"}, tmp_path)
    env, policy, total, t = Board(), jaxrl_fast.load(run).policy, 0.0, 0
    for _ in range(LENGTH):
        action = policy(env.show(t), mask=env.action_mask(t, ()))
        _, t, reward, *_ = env.step_env(None, t, action, ())
        total += float(reward)
    assert [total] * EPISODES == wanted


def test_policy_refuses_missing_and_wrong_mask(tmp_path):
    """An environment with masks needs one that fits; others take none. Each error is one line with a remedy."""
    run = jaxrl_fast.fit(**PPO | {"env": Masked, "total_steps": 512}, run_dir=str(tmp_path / "run"))
    policy, obs = jaxrl_fast.load(run).policy, np.zeros(2, np.uint8)
    assert policy(obs, mask=[False, True]) == 1 and policy(obs, mask=(np.array([True]), [False])) == 0
    both = policy(np.stack([obs, obs]), mask=np.array([[True, False], [False, True]]))
    assert both.tolist() == [0, 1]
    explored = policy(np.stack([obs] * 64), jax.random.key(0), explore=True, mask=np.array([[True, False]] * 64))
    assert not np.asarray(explored).any()
    with pytest.raises(ValueError, match=r'^mask: .*Masked forbids some actions, got no mask; pass mask=info\["act'):
        policy(obs)
    with pytest.raises(
        ValueError, match=r"^mask: must have 2 entries for each observation of .*, got 3 for 1; pass one for each"
    ):
        policy(obs, mask=[True, True, False])
    with pytest.raises(
        ValueError, match=r"^mask: must have 2 entries for each observation of .*, got .*; pass one for"
    ):
        policy(np.stack([obs, obs]), mask=[True, False, True])
    with pytest.raises(ValueError, match=r"^obs: .* observes uint8\[2\], got float64\[2\]"):
        policy(obs / 256, mask=[True, True])
