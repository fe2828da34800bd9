"""Test memory estimates: they equal the size of the state, and the proposed replay.size is the largest that fits."""

import os
import re
import types

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_fast import agents, envs, loop
from jaxrl_fast.config import load
from jaxrl_fast.parallel.placement import Placement
from jaxrl_fast.training import memory
from jaxrl_fast.utils import devices
from jaxrl_fast.utils import memory as utils_memory

pytestmark = pytest.mark.unit

SMALL = dict(replay={"size": 4096}, learning_starts=64)


def make_env_and_agent(algo, **options):
    settings = load.from_keywords(algo=algo, **options)
    env = envs.make("CartPole-v1", 8)
    return env, agents.load(algo).make(settings.agent, env.spec, 10)


@pytest.mark.parametrize("num_seeds", [1, 3])
@pytest.mark.parametrize(
    ("algo", "options"),
    [
        ("ppo", {}),
        ("ppo", dict(bonus="rnd")),
        ("dqn", SMALL),
        ("dqn", SMALL | dict(replay={"kind": "prioritized", "size": 4096})),
    ],
)
def test_memory_estimate_equals_size_of_state(algo, options, num_seeds):
    """The estimate leaves out the PRNG key and the update counter, 12 bytes."""
    env, agent = make_env_and_agent(algo, **options)
    said = memory.estimate(env, agent, Placement(num_seeds))
    state = jax.eval_shape(lambda: loop.init(env, agent, jax.random.key(0)))
    kept = jax.tree.leaves((state.agent, state.actors))
    kept = [
        jax.eval_shape(jax.random.key_data, x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        for x in kept
    ]
    assert said.parameters + said.replay + said.environments == num_seeds * sum(x.size * x.dtype.itemsize for x in kept)
    assert said.total == said.copies * (said.parameters + said.replay + said.environments)
    assert (said.replay > 0) == (algo == "dqn") and said.parameters > 0 and said.environments > 0
    assert said.free is None or said.free > 0


@given(
    parameters=st.integers(0, 10**6),
    replay=st.integers(10**6, 10**9),
    environments=st.integers(0, 10**6),
    free=st.integers(10**6, 10**9),
    copies=st.sampled_from([1, 2]),
    buffer_size=st.integers(10, 10**6),
)
def test_proposed_buffer_size_is_largest_that_fits(parameters, replay, environments, free, copies, buffer_size):
    needed = memory.MemoryEstimate(parameters, replay, environments, free, copies)
    try:
        memory.check_fits(needed, buffer_size)
    except ValueError as error:
        assert needed.total > free
        proposed = re.search(r"use at most (\d+)$", str(error))
        if proposed is None:
            assert copies * (parameters + environments) + copies * replay / buffer_size > free - 2 * copies
            return
        fits = int(proposed[1])
        size = lambda capacity_: copies * (parameters + environments + replay * capacity_ / buffer_size)
        assert size(fits) <= free
        assert size(fits + 10 ** max(len(str(fits)) - 3, 0) + 1) > free - 2 * copies
    else:
        assert needed.total <= free


def test_memory_error_message_states_needed_and_free_bytes():
    """The replay buffer needs 7 GB and the rest 1 GB, each twice; 12 GB are free."""
    needed = memory.MemoryEstimate(10**9, 7 * 10**9, 0, 12 * 10**9, 2)
    says = r"^replay\.size: a replay of 7.0 GB, twice while saving, does not fit into 10.0 GB, got 1000000"
    with pytest.raises(ValueError, match=rf"{says}; use at most 714000$"):
        memory.check_fits(needed, 1_000_000)


def test_largest_replay_leaves_room_for_data():
    """As above, with 1 GB of data, which no checkpoint copies: 9 GB are left for a replay of 14 GB."""
    needed = memory.MemoryEstimate(10**9, 7 * 10**9, 0, 12 * 10**9, 2, data=10**9)
    with pytest.raises(ValueError, match=r"does not fit into 9.0 GB, got 1000000; use at most 642000$"):
        memory.check_fits(needed, 1_000_000)


def test_proposed_buffer_size_accounts_for_whole_updates():
    """60,000 steps hold three updates of 16,384 steps; at 30 bytes per step, 1 MB has room for two of them."""
    needed = memory.MemoryEstimate(0, 30 * 3 * 16_384, 0, 10**6, 1)
    with pytest.raises(ValueError, match=r"use at most 33300$"):
        memory.check_fits(needed, 60_000, 16_384)


def test_resumed_run_needs_one_copy_less_and_gets_no_proposed_buffer_size():
    needed = memory.MemoryEstimate(10**6, 10**9, 0, 2 * 10**9, 2)
    memory.check_fits(needed, 1000, resumed=True)
    with pytest.raises(ValueError, match=r"^this run does not fit into memory here \(.*replay 1.0 GB.*10.0 MB free\)$"):
        memory.check_fits(needed._replace(free=10**7), 1000, resumed=True)


class Accelerator:
    platform = "gpu"

    def __init__(self, limit, in_use):
        self.stats = {"bytes_limit": limit, "bytes_in_use": in_use}

    def memory_stats(self):
        return self.stats


def test_free_bytes_is_number_of_devices_times_least_free_memory(monkeypatch):
    monkeypatch.setattr(jax, "local_devices", lambda: [Accelerator(80, 10), Accelerator(80, 30), Accelerator(80, 79)])
    assert [utils_memory.free_bytes(n) for n in (1, 2, 3)] == [70, 100, 3]
    env, agent = make_env_and_agent("dqn", **SMALL)
    monkeypatch.setattr(jax, "local_device_count", lambda: 2)
    assert memory.estimate(env, agent, Placement(num_seeds=4)).free == 100


@pytest.fixture
def gpu(monkeypatch):
    """A GPU of 80 GB, none of JAX's variables set, and JAX not started."""
    for name in (*devices.MEMORY_SHARE, "XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_PYTHON_CLIENT_ALLOCATOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(jax, "local_devices", lambda: [Accelerator(60 * 10**9, 0)])
    monkeypatch.setattr(devices, "is_initialized", lambda: False)


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({}, "JAX reserves 75% (60.0 GB); gpu_memory changes it"),
        ({"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.4"}, "JAX reserves 40% (60.0 GB); gpu_memory changes it"),
        ({"XLA_CLIENT_MEM_FRACTION": ".5"}, "JAX reserves 50% (60.0 GB); gpu_memory changes it"),
        ({"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}, "allocated on demand"),
        ({"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}, "allocated on demand"),
    ],
)
def test_gpu_memory_reports_reserved_share(gpu, monkeypatch, variables, words):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert devices.gpu_memory() == words


def test_gpu_memory_option_overrides_jax_memory_variable(gpu, monkeypatch):
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.9")
    devices.reserve_gpu_memory(None)
    assert devices.memory_share() == 0.9
    devices.reserve_gpu_memory(0.4)
    assert "XLA_CLIENT_MEM_FRACTION" not in os.environ  # JAX rejects two names at once
    assert os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.4"
    monkeypatch.setattr(devices, "is_initialized", lambda: True)
    devices.reserve_gpu_memory(0.4)  # a second run in the process, with the same share
    with pytest.raises(ValueError, match=r"^gpu_memory: JAX has already started, got 0\.5; set .*=0\.5 "):
        devices.reserve_gpu_memory(0.5)


def test_gpu_memory_option_warns_on_cpu(gpu, monkeypatch, capsys):
    monkeypatch.setattr(jax, "local_devices", lambda: [types.SimpleNamespace(platform="cpu")])
    assert devices.gpu_memory() == ""
    for started, share in ((False, 0.4), (True, 0.5)):
        monkeypatch.setattr(devices, "is_initialized", lambda started=started: started)
        devices.reserve_gpu_memory(share)
        assert capsys.readouterr().err == "warning: gpu_memory: has no effect, because JAX uses the CPU\n"


def test_is_initialized_is_true_after_jax_has_started():
    jax.devices()
    assert devices.is_initialized()


@pytest.mark.parametrize(
    ("lines", "files", "left"),
    [
        ("0::/job/step", {"job/memory.max": "900", "job/step/memory.max": "max"}, 900 - 500 + 200),
        ("0::/job/step", {"job/memory.max": "900", "job/step/memory.max": "600"}, 600 - 500 + 200),
        ("0::/of/the/host", {"memory.max": "700"}, 700 - 500 + 200),  # in a container: its own group is the root
        ("4:memory:/job\n3:cpu:/other", {"memory/job/memory.limit_in_bytes": "800"}, 800 - 500 + 200),
        ("0::/job", {"job/memory.max": "max"}, None),
        ("", {}, None),
    ],
)
def test_free_bytes_respects_cgroup_limit_and_counts_page_cache_as_free(tmp_path, monkeypatch, lines, files, left):
    for name, text in files.items():
        group = (tmp_path / name).parent
        group.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
        (group / "memory.current").write_text("500\n")
        (group / "memory.usage_in_bytes").write_text("500\n")
        (group / "memory.stat").write_text("anon 300\ninactive_file 200\ntotal_inactive_file 200\n")
    (tmp_path / "own").write_text(lines)
    monkeypatch.setattr(utils_memory, "GROUPS", tmp_path)
    monkeypatch.setattr(utils_memory, "OWN_GROUP", tmp_path / "own")
    monkeypatch.setattr(utils_memory, "_available", lambda: None)
    assert utils_memory.free_bytes() == left


@pytest.mark.parametrize(
    ("count", "said"), [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (2_000_000, "2.0 MB"), (7_071_000_000, "7.1 GB")]
)
def test_format_bytes_uses_decimal_units(count, said):
    assert utils_memory.format_bytes(count) == said
