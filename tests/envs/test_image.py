"""Gray, resized, stacked and skipped frames. The oracle is a plain loop over the frames of the bare environment."""

from collections import deque
from functools import partial

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnax.environments import spaces
from PIL import Image

from jaxrl_fast import envs
from jaxrl_fast.agents import dqn, ppo
from jaxrl_fast.envs.host.config import HostEnvConfig, Workers, Wrappers
from jaxrl_fast.envs.host.pool import OPEN_POOLS
from jaxrl_fast.envs.wrappers import frames, image
from jaxrl_fast.evaluation import inputs
from jaxrl_fast.options.declare import configure
from jaxrl_fast.rl import frame_stack
from jaxrl_fast.types import Learning
from jaxrl_fast.utils.errors import EnvFault
from tests.helpers import gym_envs, probes, slow
from tests.helpers.host_envs import random_actions, run

T, N, H, W = 30, 3, 18, 20
MODULE = "tests.envs.test_image"


class Noise(gymnasium.Env):
    """An environment with random frames, except that frames 2 and 3 are equal. Episodes have 1 to 9 steps."""

    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, shape=(H, W, 3), limit=0):
        self.observation_space = gymnasium.spaces.Box(0, 255, shape, np.uint8)
        self.limit = limit

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.length = 0, self.limit or int(self.np_random.integers(1, 10))
        return self.frame(), {}

    def frame(self):
        if self.t != 3:
            self.shown = self.np_random.integers(256, size=self.observation_space.shape).astype(np.uint8)
        return self.shown

    def step(self, action):
        self.t += 1
        return self.frame(), float(self.t), self.t == self.length and self.t % 2 == 0, self.t >= self.length, {}


class Gray(Noise):
    """An environment with its own option `gray`, which has another meaning."""

    def __init__(self, gray=0.5):
        super().__init__()
        self.level = gray


class Ramp:
    """A device environment whose frame t is filled with t. After `ends` steps it terminates or is truncated."""

    default_params = ()

    def __init__(self, ends=5, terminal=False, shape=(H, W, 1)):
        self.ends, self.terminal, self.shape = ends, terminal, shape

    def reset_env(self, key, params):
        return self.frame(jnp.int32(0)), jnp.int32(0)

    def step_env(self, key, state, action, params):
        state += 1
        return self.frame(state), state, 10.0 ** state.astype(jnp.float32), self.terminal & (state >= self.ends), {}

    def frame(self, t):
        return jnp.full(self.shape, t, jnp.uint8)

    def is_truncated(self, state, params):
        return jnp.bool_(not self.terminal) & (state >= self.ends)

    def action_space(self, params):
        return spaces.Discrete(2)


def play(env, num_steps=T):
    """Return the observations [T + 1, N, ...] and the time steps [T, N, ...]."""
    try:
        first, steps = run(env, random_actions(env.spec, num_steps))
    finally:
        if env.host:
            env.host.close()
    return jax.tree.map(lambda a, b: np.concatenate([a[None], b]), first.obs, steps.obs), steps


def stacked(frames, last, num_frames):
    """Stack one environment's frames [T + 1, H, W, C] with a queue that each reset fills with its first frame."""
    queue, found = deque(maxlen=num_frames), []
    for t, frame in enumerate(frames):
        begins = t == 0 or t > 1 and last[t - 2]
        queue.extend([frame] * (num_frames if begins else 1))
        found.append(np.concatenate(list(queue), axis=-1))
    return np.stack(found)


@pytest.mark.parametrize(("shape", "num_pools"), [((H, W, 3), 0), ((H, W), 3), ((3, H, W), 0)])
def test_frame_stack_matches_queue_of_frames(shape, num_pools):
    config = HostEnvConfig(seed=(3, 0, 0), num_async_pools=num_pools, workers=Workers(0))
    bare, steps = play(envs.make(partial(Noise, shape), N, config))
    env = envs.make(partial(Noise, shape), N, config, frame_stack="4")
    assert env.spec.frame_stack == 4 and env.spec.obs.shape == (H, W, 4 if len(shape) == 2 else 12)
    found, after = play(env)
    bare = bare.reshape(T + 1, N, H, W, -1)
    for i in range(N):
        np.testing.assert_array_equal(found[:, i], stacked(bare[:, i], steps.last[:, i], 4))
    assert steps.last.any() and (steps.discount[steps.last] == 0).any() and (steps.discount[steps.last] == 1).any()
    for name in ("reward", "last", "discount"):
        np.testing.assert_array_equal(getattr(after, name), getattr(steps, name))


def test_frame_stack_on_device_matches_expected_frames_after_resize():
    env = envs.make(Ramp, 1, frame_stack=3).view.resize(2, HostEnvConfig())
    assert env.spec.num_envs == 2 and env.spec.obs.shape == (H, W, 3)
    found, _ = play(env, 7)
    expected = [[0, 0, 0], [0, 0, 1], [0, 1, 2], [1, 2, 3], [2, 3, 4], [3, 4, 5], [0, 0, 0], [0, 0, 1]]
    np.testing.assert_array_equal(found[:, :, 5, 7], np.array(expected)[:, None].repeat(2, 1))


@pytest.mark.parametrize("size", [(9, 10), (18, 20), (40, 30)])
def test_gray_and_resize_match_gymnasium_and_pillow(size):
    bare, _ = play(envs.make(Noise, N))
    made = envs.make(Noise, N, gray=True, resize=f"{size[0]}x{size[1]}")
    assert made.spec.obs.shape == (*size, 1) and made.spec.frame_stack == 0
    found, _ = play(made)
    gray = gymnasium.wrappers.GrayscaleObservation(Noise()).observation
    for t in (0, 7):
        expected = Image.fromarray(gray(bare[t, 1])).resize(size[::-1], Image.Resampling.BILINEAR)
        difference = np.abs(np.asarray(expected, int) - found[t, 1, :, :, 0])
        assert difference.max() <= 2 and np.median(difference) <= 1  # gymnasium truncates gray values


@pytest.mark.parametrize(("size", "new"), [((210, 160), (84, 84)), ((7, 12), (20, 9)), ((18, 20), (18, 5))])
def test_gray_and_resize_on_host_match_device_bitwise(size, new):
    """Resizing is that of JAX to rounding: weights are 4096ths, and rows are kept in sixteenths."""
    raw = np.random.default_rng(0).integers(256, size=(2, *size, 3)).astype(np.uint8)
    raw[1] = 255 * (raw[1] > 127)
    for gray in (False, True):
        on_host = frames.change(gray, new, raw)
        on_device = jax.jit(partial(image.change, image.Frames(gray, new)))(raw)
        assert on_host.dtype == np.uint8 and on_host.shape == (2, *new, 1 if gray else 3)
        np.testing.assert_array_equal(on_host, on_device)
        before = frames.change(gray, None, raw).astype(np.float32)
        exact = jax.image.resize(before, on_host.shape, "linear", antialias=True)
        assert np.abs(on_host - exact).max() < 0.75
    gray = frames.change(True, None, raw)[..., 0]
    assert np.abs(gray - raw @ np.array([0.2125, 0.7154, 0.0721])).max() < 0.51


@pytest.mark.parametrize("shape", [(H, W, 3), (H, W), (3, H, W)])
@pytest.mark.parametrize("env_workers", [0, slow(2)])
def test_python_environments_change_frames_on_host(shape, env_workers):
    """A pool holds small frames, which are those that the device makes of whole ones."""
    config = HostEnvConfig(seed=(3, 0, 0), workers=Workers(env_workers))
    whole = envs.make(partial(Noise, shape), N, config)
    bare, _ = play(whole, 8)
    env = envs.make(partial(Noise, shape), N, config, gray=True, resize="9x10", frame_stack=2)
    found, _ = play(env, 8)
    assert env.spec.obs == jax.ShapeDtypeStruct((9, 10, 2), jnp.uint8) and env.spec.frame_stack == 2
    expected = image.change(image.Frames(True, (9, 10)), bare.reshape(-1, *whole.spec.obs.shape))
    np.testing.assert_array_equal(found[..., 1:], expected.reshape(9, N, 9, 10, 1))
    env.host.open()
    assert OPEN_POOLS[-1].row().obs.shape == (N, 9, 10, 1)
    env.host.close()


class Player(gymnasium.Env):
    """Random frames among other parts of an observation, one of which is text."""

    action_space = gymnasium.spaces.Discrete(3)

    def __init__(self, shape=(H, W, 3), nested=False, name="board"):
        camera = gymnasium.spaces.Box(0, 255, shape, np.uint8)
        parts = {"action_mask": gymnasium.spaces.MultiBinary(3), name: gymnasium.spaces.Box(0, 9, (4, 4), np.uint8)}
        parts |= {"says": gymnasium.spaces.Text(9), "eyes": camera}
        self.nested = nested
        if nested:
            parts["eyes"] = gymnasium.spaces.Tuple((gymnasium.spaces.Discrete(4), camera))
        self.observation_space = gymnasium.spaces.Dict(parts)

    def show(self):
        self.observation_space.seed(int(self.np_random.integers(99999)))
        return self.observation_space.sample()

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.show(), {}

    def step(self, action):
        self.t += 1
        return self.show(), 0.0, self.t >= 3, False, {}


@pytest.mark.parametrize("shape", [(H, W, 3), (H, W), (3, H, W)])
@pytest.mark.parametrize(("nested", "env_workers"), [(False, 0), (True, 0), slow(True, 2)])
def test_image_among_other_parts_changes_and_they_do_not(shape, nested, env_workers):
    """Pools hold changed frames. A policy takes whole ones, and gives the same as an agent sees."""
    config = HostEnvConfig((3, 0, 0), workers=Workers(env_workers), wrappers=Wrappers(hide=("says",)))
    make = partial(Player, shape, nested)
    whole, changed = (envs.make(make, N, config, **options) for options in ({}, {"gray": True, "resize": "16x17"}))
    stacked_env = envs.make(make, N, config, gray=True, resize="16x17", frame_stack=3)
    bare, steps = play(whole, 7)
    found, _ = play(changed, 7)
    stacks, _ = play(stacked_env, 7)
    eyes = lambda obs: obs["eyes"][1] if nested else obs["eyes"]
    frame = image.change(image.Frames(True, (16, 17)), eyes(bare).reshape(-1, *eyes(bare).shape[2:]))
    np.testing.assert_array_equal(eyes(found), frame.reshape(8, N, 16, 17, 1))
    for i in range(N):
        np.testing.assert_array_equal(eyes(stacks)[:, i], stacked(eyes(found)[:, i], steps.last[:, i], 3))
    for obs in (found, stacks):
        np.testing.assert_array_equal(obs["board"], bare["board"])
        assert nested is False or (obs["eyes"][0] == bare["eyes"][0]).all()
    env = make()
    raw = env.reset(seed=5)[0]
    batch, _ = inputs.as_batch(changed, raw)
    assert eyes(inputs.raw_obs(changed)).shape == shape
    np.testing.assert_array_equal(
        inputs.seen(changed, batch).action_mask[0], raw["action_mask"].astype(bool) | ~raw["action_mask"].any()
    )
    given, told = (inputs.seen(each, batch).obs for each in (changed, whole))
    np.testing.assert_array_equal(eyes(given), image.change(image.Frames(True, (16, 17)), eyes(told)))
    np.testing.assert_array_equal(given["board"], told["board"])
    raws = [raw, env.step(0)[0], env.step(0)[0]]
    channels = np.concatenate([np.atleast_3d(eyes(raw)) for raw in raws], axis=0 if shape[0] == 3 else 2)
    together = raws[2] | {"eyes": (raws[2]["eyes"][0], channels) if nested else channels}
    batch, _ = inputs.as_batch(stacked_env, together)
    singles = [inputs.seen(changed, inputs.as_batch(changed, raw)[0]).obs for raw in raws]
    given = inputs.seen(stacked_env, batch).obs
    np.testing.assert_array_equal(eyes(given), np.concatenate([eyes(single) for single in singles], axis=-1))
    np.testing.assert_array_equal(given["board"], singles[2]["board"])


@pytest.mark.parametrize("wrong", [{}, {"eyes": ()}, {"eyes": None}, {"eyes": (0, None)}, None], ids=str)
def test_missing_frame_is_told_as_without_changes(wrong):
    class Blind(Player):
        def show(self):
            whole = super().show()
            whole.pop("eyes")
            return wrong if wrong is None else whole | wrong

    config = HostEnvConfig((3, 0, 0), workers=Workers(0), wrappers=Wrappers(hide=("says",)))
    says = r"observation\['(eyes|action_mask)'\](\[\d\])? (is missing|must be uint8.* as its space declares), got"
    for options in ({}, {"gray": True}):
        with pytest.raises(EnvFault, match=says):
            envs.make(partial(Blind, nested=True), 1, config, **options)


class Scenes(Ramp):
    """A device environment whose frame is one of several parts, and whose board is of bytes, but no picture."""

    def frame(self, t):
        levels = jnp.arange(H * W * 3, dtype=jnp.uint8).reshape(H, W, 3)
        return {"board": jnp.full((4, 4), t, jnp.uint8), "eye": (levels + t.astype(jnp.uint8),), "z": jnp.float32(t)}


def test_image_among_other_parts_changes_on_device():
    bare, _ = play(envs.make(Scenes, 1), 7)
    env = envs.make(Scenes, 1, gray=True, resize="16x17", frame_stack=2)
    found, _ = play(env, 7)
    frames_of = image.change(image.Frames(True, (16, 17)), bare["eye"][0][:, 0])
    expected = stacked(np.asarray(frames_of), np.arange(7) == 4, 2)  # the fifth step is the last one of an episode
    np.testing.assert_array_equal(found["eye"][0][:, 0], expected)
    assert env.spec.frame_stack == 0 and found["board"].shape == (8, 1, 4, 4, 1) and (found["z"] == bare["z"]).all()
    eye = np.concatenate([bare["eye"][0][1, 0], bare["eye"][0][2, 0]], axis=-1)
    raw = {"board": np.full((4, 4), 3, np.uint8), "eye": (eye,), "z": np.float32(3)}
    given = inputs.seen(env, inputs.as_batch(env, raw)[0]).obs
    np.testing.assert_array_equal(given["eye"][0][0], found["eye"][0][2, 0])
    assert given["board"].shape == (1, 4, 4, 1) and given["z"].tolist() == [[3.0]]


def test_frame_without_channel_on_device_gets_one():
    env = envs.make(partial(Ramp, shape=(H, W)), 2)
    found, _ = play(env, 3)
    assert found.shape == (4, 2, H, W, 1) and found.dtype == np.uint8 and env.view.raw_obs.shape == (H, W)
    np.testing.assert_array_equal(env.view.encode_obs(np.full((1, H, W), 7, np.uint8)), np.full((1, H, W, 1), 7))


def test_envpool_frames_change_on_device():
    bare, steps = play(envs.make("envpool/CarRacing-v3", 2), 4)
    found, _ = play(envs.make("envpool/CarRacing-v3", 2, gray=True, resize="48x48", frame_stack=2), 4)
    expected = frames.change(True, (48, 48), bare.reshape(-1, 96, 96, 3)).reshape(5, 2, 48, 48, 1)
    np.testing.assert_array_equal(found[..., 1:], expected)
    assert not steps.last.any() and bare.std() > 0


def test_color_channels_are_resized_separately():
    frame = np.zeros((1, 4, 4, 3), np.uint8)
    frame[0, :2, :, 0], frame[0, :, 2:, 2] = 200, 100
    found = np.asarray(image.change(image.Frames(resize=(2, 2)), jnp.array(frame))[0], int)
    assert (np.sign(np.diff(found[..., 0], axis=0)) == -1).all() and not found[..., 1].any()
    assert (np.sign(np.diff(found[..., 2], axis=1)) == 1).all()


def test_frame_skip_stops_at_episode_end_in_python_environment():
    """Step t has reward t. Episodes have 7 steps, 3 at a time: 1 + 2 + 3, 4 + 5 + 6, and 7."""
    _, steps = play(envs.make(Noise, 2, frame_skip=3, limit=7), 8)
    np.testing.assert_array_equal(steps.reward[:, 0], [6, 15, 7, 0, 6, 15, 7, 0])
    np.testing.assert_array_equal(steps.last[:, 0], [False, False, True, False] * 2)


@pytest.mark.parametrize("terminal", [False, True])
def test_frame_skip_stops_at_episode_end_in_device_environment(terminal):
    """Step t has reward 10^t, so the sum shows which steps were taken."""
    found, steps = play(envs.make(Ramp, 2, frame_skip=3, terminal=terminal), 5)
    np.testing.assert_array_equal(found[:, 0, 0, 0, 0], [0, 3, 5, 0, 3, 5])
    np.testing.assert_array_equal(steps.reward[:, 0], [1110, 110000, 0, 1110, 110000])
    np.testing.assert_array_equal(steps.last[:, 0], [False, True, False, False, True])
    np.testing.assert_array_equal(steps.discount[:, 0], [1, 0 if terminal else 1, 1, 1, 0 if terminal else 1])


class MaskedRamp(Ramp):
    def action_mask(self, state, params):
        return jnp.array([True, False])


@pytest.mark.parametrize(
    "env, options", [(MaskedRamp, {}), (gym_envs.Guarded, {}), (gym_envs.Guarded, dict(in_obs=True))]
)
def test_frame_skip_is_refused_with_action_masks(env, options):
    """A repeated action may be one that the mask of the step between forbids."""
    with pytest.raises(
        ValueError, match=r"^frame_skip: the action masks of \S+ may forbid an action .*, got 2; use 1$"
    ):
        envs.make(env, 2, frame_skip=2, **options)
    assert envs.make(env, 2, frame_skip=1, **options).spec.has_action_mask


@pytest.mark.slow
def test_rollout_stores_single_frames_and_rebuilds_stacks():
    """Stacks decoded for minibatches equal the policy's stacks, also across episode ends and equal frames."""

    def collect(**changes):
        env = envs.make(Noise, N, frame_stack=4)
        network = {"kind": "mlp", "observations": "vector"}
        config = configure(ppo.Config, rollout_length=T, num_minibatches=1, network=network)
        agent = ppo.make(config, env.spec, 1)
        try:
            return probes.experience(env, agent._replace(**changes), agent.init(jax.random.key(0)))
        finally:
            if env.host:
                env.host.close()

    kept, whole = collect(), collect(learning=Learning())
    assert kept.steps.obs.newest.shape == (T, N, H, W, 3) and whole.steps.obs.shape == (T, N, H, W, 12)
    rows, frames = frame_stack.encode_rollout(4, kept)
    decoded = jax.jit(frame_stack.decode)(frames, rows)
    np.testing.assert_array_equal(decoded, whole.steps.obs)
    assert whole.steps.last.any()


def test_replay_buffer_stores_single_frames():
    spec = envs.make(Ramp, 2, frame_stack=4).spec
    agent = dqn.make(configure(dqn.Config, size=64, batch_size=8, learning_starts=8), spec, 10)
    assert jax.eval_shape(agent.init, jax.random.key(0)).replay.obs.shape[2:] == (H, W, 1)


@pytest.mark.parametrize(
    ("env", "options", "message"),
    [
        (
            "CartPole-v1",
            {"gray": True},
            r"gray: the observation of gymnax/CartPole-v1 must have one image, .* float32\[4\]",
        ),
        (
            partial(Player, name="other"),
            {"gray": True},
            "unsupported parts of the observation, got says Text; use --wrap",
        ),
        (
            "gymnasium/CartPole-v1",
            {"frame_stack": 4},
            "frame_stack: the observation of gymnasium/CartPole-v1 must have",
        ),
        ("Breakout-MinAtar", {"resize": "84x84"}, r"resize: .* must have one image, uint8 .*, got bool\[10, 10, 4\]"),
        ("envpool/Pong-v5", {"frame_stack": 4}, "frame_stack: envpool/Pong-v5 stacks 4 frames already; leave"),
        (Ramp, {"frame_stack": 17}, "frame_stack: must be 1 to 16 for .*, got 17"),
        (Ramp, {"frame_stack": "two"}, "frame_stack: must be int for .*, got 'two'"),
        (Ramp, {"frame_skip": 0}, "frame_skip: must be 1 to 16 for .*, got 0"),
        (Ramp, {"frame_skip": "2..4"}, "frame_skip: must be one value for .*, got 2..4"),
        (Ramp, {"resize": 84}, "resize: must be height x width of 1 to 1024 for .*, got 84; use 84x84"),
        (Ramp, {"resize": "0x84"}, "resize: must be height x width .*, got 0x84"),
        (partial(Ramp, shape=(H, W, 4)), {"gray": "yes"}, "gray: the frames of .* must have 3 channels, got 4; leave"),
        (Ramp, {"frame_stak": 4}, "has no option 'frame_stak'; did you mean frame_stack?"),
        (Noise, {"frame_skp": 4}, "has no option 'frame_skp'; did you mean frame_skip?"),
        ("envpool/CartPole-v1", {"frame_skip": 4}, "envpool/CartPole-v1 has no option 'frame_skip'"),
    ],
)
def test_make_rejects_invalid_image_option_with_one_line_message(env, options, message):
    with pytest.raises(ValueError, match=message) as error:
        envs.make(env, 2, **options)
    assert "\n" not in str(error.value)


@pytest.mark.slow
def test_environment_option_takes_precedence_over_image_option():
    assert envs.make(Gray, 1, gray=0.25).spec.obs.shape == (H, W, 3)
    assert envs.make("envpool/Pong-v5", 1, frame_skip=2).spec.frame_stack == 4
    assert envs.make("envpool/HopperHop-v1", 1, frame_skip=2).spec.frame_stack <= 1


def test_resize_to_same_size_keeps_frames_of_async_pools():
    config = HostEnvConfig((3, 0, 0), num_async_pools=3, workers=Workers(0))
    (bare, _), (found, _) = (play(envs.make(Noise, N, config, **o), 3) for o in ({}, {"resize": "18x20"}))
    np.testing.assert_array_equal(found, bare)
