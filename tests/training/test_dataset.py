"""Datasets: what is read from files of both formats, and the line that names what does not fit."""

import json
import re

import numpy as np
import pytest

from jaxrl_fast import envs
from jaxrl_fast.envs import raw_form
from jaxrl_fast.envs.host.config import HostEnvConfig
from jaxrl_fast.envs.wrappers import hide
from jaxrl_fast.training import dataset
from tests.helpers.gym_envs import Guarded, Mixed, Slide, Walk

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module")
def cartpole():
    return envs.make("CartPole-v1", 2)


@pytest.fixture(scope="module")
def pendulum():
    return envs.make("Pendulum-v1", 2)


def make(env, **options):
    return envs.make(env, 1, HostEnvConfig(), **options)


def saved(path, **arrays):
    np.savez(path / "data.npz", **arrays)
    return str(path / "data.npz")


def steps(num=6, obs=4, seed=0):
    rng = np.random.default_rng(seed)
    return dict(observations=rng.normal(size=(num, obs)), actions=rng.integers(0, 2, num))


def test_steps_of_a_file_have_the_form_of_agents(tmp_path, cartpole):
    """float64 becomes float32 and int64 int32. Other arrays are not read."""
    given = steps()
    name = saved(tmp_path, **given, rewards=np.full(3, np.nan), infos=np.array(["x"]))
    found = dataset.load(name, cartpole)
    assert (found.obs.dtype, found.action.dtype, found.action_mask) == (np.float32, np.int32, None)
    np.testing.assert_array_equal(found.obs, given["observations"].astype(np.float32))
    np.testing.assert_array_equal(found.action, given["actions"])


def test_actions_are_scaled_to_the_bounds_of_agents(tmp_path, pendulum):
    """Pendulum's torque is within -2 and 2."""
    given = dict(observations=np.zeros((3, 3)), actions=np.array([[2.0], [-1], [0.5]]))
    np.testing.assert_allclose(dataset.load(saved(tmp_path, **given), pendulum).action, [[1], [-0.5], [0.25]])


def test_reset_rows_are_left_out(tmp_path, cartpole):
    given = steps() | dict(valid=np.array([True, False, True, True, False, True]))
    found = dataset.load(saved(tmp_path, **given), cartpole)
    np.testing.assert_array_equal(found.action, given["actions"][[0, 2, 3, 5]])


def test_observations_are_those_of_the_environment(tmp_path):
    """Walk's actions begin at 5. Mixed has an image [C, H, W], bits and indices, which agents see in another form."""
    found = dataset.load(saved(tmp_path, observations=np.ones((2, 2)), actions=np.array([6, 5])), make(Walk))
    assert found.action.tolist() == [1, 0]
    env, space = make(Mixed), Mixed().observation_space
    sampled = [space.sample() for _ in range(3)]
    names = {"camera": lambda x: x["camera"], "joints": lambda x: x["joints"], "bits": lambda x: x["bits"]}
    names |= {"choices": lambda x: x["choices"], "inner/0": lambda x: x["inner"][0], "inner/1": lambda x: x["inner"][1]}
    arrays = {f"observations/{name}": np.stack([of(x) for x in sampled]) for name, of in names.items()}
    found = dataset.load(saved(tmp_path, **arrays, actions=np.zeros((3, 3), int)), env)
    assert {name: x.shape[1:] for name, x in found.obs.items() if name != "inner"} == {
        name: x.shape for name, x in env.spec.obs.items() if name != "inner"
    }
    np.testing.assert_array_equal(found.obs["camera"], np.moveaxis(arrays["observations/camera"], 1, -1))


def test_observations_as_agents_see_them_are_taken_if_the_file_says_so(tmp_path):
    env = hide.hide(envs.make("CartPole-v1", 2), ["1"])
    seen = json.dumps({"observations": raw_form.SEEN})
    given = steps(obs=3)
    found = dataset.load(saved(tmp_path, **given, metadata=np.array(seen)), env)
    np.testing.assert_array_equal(found.obs, given["observations"].astype(np.float32))
    with pytest.raises(ValueError, match=r"observations must be float\[6, 4\], got float64\[6, 3\]"):
        dataset.load(saved(tmp_path, **given), env)
    whole = dataset.load(saved(tmp_path, **steps(obs=4)), env)
    np.testing.assert_array_equal(whole.obs, steps()["observations"][:, [0, 2, 3]].astype(np.float32))


def test_masks_are_read_from_an_array_or_from_observations(tmp_path):
    masks = np.array([[1, 1, 0, 1], [0, 1, 1, 1]], bool)
    given = dict(observations=np.ones((2, 4)), actions=np.array([3, 1]))
    apart = dataset.load(saved(tmp_path, **given, action_masks=masks), make(Guarded))
    np.testing.assert_array_equal(apart.action_mask, masks)
    parts = {"observations/observation": np.ones((2, 4)), "observations/action_mask": masks.astype(np.int8)}
    within = dataset.load(saved(tmp_path, **parts, actions=np.array([3, 1])), make(Guarded, in_obs=True))
    np.testing.assert_array_equal(within.action_mask, masks)
    assert within.obs.shape == (2, 4)
    with pytest.raises(ValueError, match=r"needs an array action_masks bool\[2, 4\], got none"):
        dataset.load(saved(tmp_path, **given), make(Guarded))
    with pytest.raises(ValueError, match="action_masks must allow each action, got a forbidden one in step 1"):
        dataset.load(saved(tmp_path, **given | {"actions": np.array([3, 0])}, action_masks=masks), make(Guarded))


WRONG = {
    "no observations": (lambda x: x.pop("observations"), "needs an array observations, got none in .*; it has actions"),
    "another name": (
        lambda x: x.update(observation=x.pop("observations")),
        "needs an array observations, got none in .*; did you mean observation",
    ),
    "no actions": (lambda x: x.pop("actions"), "needs an array actions, got none in "),
    "more numbers": (
        lambda x: x.update(observations=np.zeros((6, 5))),
        r"observations must be float\[6, 4\], got float64\[6, 5\] in ",
    ),
    "text": (lambda x: x.update(observations=np.full((6, 4), "a")), r"observations must be float\[6, 4\], got <U1"),
    "bytes": (
        lambda x: x.update(observations=np.zeros((6, 4), np.uint8)),
        r"observations must be float\[6, 4\], got uint8 in .*; scale it",
    ),
    "NaN": (
        lambda x: x["observations"].__setitem__((3, 1), np.nan),
        "observations must be finite, got NaN or infinity in step 3 of ",
    ),
    "infinite in float32": (
        lambda x: x["observations"].__setitem__((3, 1), 1e300),
        "observations must fit into float32, got ",
    ),
    "real actions": (lambda x: x.update(actions=np.zeros(6)), r"actions must be int\[6\], got float64\[6\] in "),
    "another number of actions": (
        lambda x: x["actions"].__setitem__(4, 2),
        r"actions must be within the action space of gymnax/CartPole-v1 \(2 actions\), got 2 in step 4 of ",
    ),
    "several choices": (
        lambda x: x.update(actions=np.zeros((6, 2), int)),
        r"actions must be int\[6\], got int64\[6, 2\]",
    ),
    "one more observation": (
        lambda x: x.update(observations=np.zeros((7, 4))),
        r"actions must have as many steps as observations \(7\), got 6 in .*; leave out the last observation",
    ),
    "empty": (lambda x: x.update(steps(0)), "observations must have a step, got none in "),
    "only resets": (lambda x: x.update(valid=np.zeros(6, bool)), "must have a step, got none"),
    "valid of numbers": (lambda x: x.update(valid=np.ones(6)), r"valid must be bool\[6\], got float64\[6\]"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", WRONG)
def test_mistakes_are_named_in_one_line(mistake, tmp_path, cartpole):
    arrays = steps()
    change, message = WRONG[mistake]
    change(arrays)
    with pytest.raises(ValueError, match=f"^bonus.dataset: {message}|^bonus.dataset: .*{message}") as refused:
        dataset.load(saved(tmp_path, **arrays), cartpole)
    assert "\n" not in str(refused.value) and "; " in str(refused.value)


def test_numbers_outside_of_the_bounds_are_refused(tmp_path, pendulum):
    given = dict(observations=np.zeros((2, 3)), actions=np.array([[2.0], [-2.5]]))
    message = r"actions must be within the action space of gymnax/Pendulum-v1 \(1 number\), got \[-2.5\] in step 1"
    with pytest.raises(ValueError, match=message):
        dataset.load(saved(tmp_path, **given), pendulum)
    with pytest.raises(ValueError, match="actions must be finite, got NaN or infinity in step 1"):
        dataset.load(saved(tmp_path, **given | {"actions": np.array([[1.0], [np.nan]])}), pendulum)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "must be a file or minari:ID, got none; write one with evaluate --collect"),
        ("nothing.npz", "nothing.npz does not exist, got no file; give an .npz file"),
        ("text.npz", "text.npz cannot be read"),
        ("objects.npz", "objects.npz cannot be read"),
        ("array.npy", "array.npy cannot be read"),
        ("empty.npz", "empty.npz cannot be read"),
        ("minari:nobody/nothing-v0", "minari:nobody/nothing-v0 cannot be read"),
    ],
)
def test_files_that_cannot_be_read(name, message, tmp_path, cartpole, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    (tmp_path / "text.npz").write_text("not a zip file")
    np.save(tmp_path / "array.npy", np.zeros(3))
    (tmp_path / "empty.npz").touch()
    np.savez(tmp_path / "objects.npz", observations=np.array([{}]), actions=np.zeros(1))
    if name.startswith("minari"):
        pytest.importorskip("minari")
    with pytest.raises(ValueError, match=f"^bonus.dataset: {re.escape(message)}"):
        dataset.load(name, cartpole)


def test_a_file_that_does_not_fit_into_memory_is_refused(tmp_path, cartpole, monkeypatch):
    """Six observations and actions take 6 * (32 + 8) bytes and two headers of 128, and a copy as much again."""
    name = saved(tmp_path, **steps())
    monkeypatch.setattr(dataset, "host_free_bytes", lambda: 2 * (240 + 256))
    dataset.load(name, cartpole)
    monkeypatch.setattr(dataset, "host_free_bytes", lambda: 2 * (240 + 256) - 1)
    with pytest.raises(ValueError, match=r"does not fit into memory, got 992 B, of which 991 B are free"):
        dataset.load(name, cartpole)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_minari_is_read_by_id_and_by_folder(tmp_path, monkeypatch):
    """Minari's package writes two episodes, of which the last observation is left out."""
    minari = pytest.importorskip("minari")
    import gymnasium

    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    gymnasium.register("tests/Slide-v0", entry_point="tests.helpers.gym_envs:Slide", kwargs={"limit": 5})
    try:
        collector = minari.DataCollector(gymnasium.make("tests/Slide-v0"))
        taken, seen = [], []
        for seed in range(2):
            obs, _ = collector.reset(seed=seed)
            ended = False
            while not ended:
                taken.append(np.float32([np.sin(len(taken))]))
                seen.append(obs)
                obs, _, terminated, truncated, _ = collector.step(taken[-1])
                ended = terminated or truncated
        collector.create_dataset("tests/slide-v0", author="us", description="two episodes")
    finally:
        gymnasium.registry.pop("tests/Slide-v0")
    for name in ("minari:tests/slide-v0", str(tmp_path / "tests" / "slide-v0")):
        found = dataset.load(name, make(Slide))
        np.testing.assert_array_equal(found.obs, seen)
        np.testing.assert_allclose(found.action, np.array(taken) / 2, rtol=1e-6)
