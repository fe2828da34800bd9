"""replay_storage: the first store with room is chosen, and the placement on devices does not depend on it."""

import pytest

from jaxrl_fast.config import load
from jaxrl_fast.replay.host import codec
from jaxrl_fast.training import disk, memory, plan, replay_storage
from jaxrl_fast.utils.memory import nbytes

pytestmark = pytest.mark.unit
GB = 10**9


@pytest.fixture
def free(monkeypatch):
    """Set the free bytes of the machine's memory and of its disk."""

    def set_free(in_memory, on_disk=100 * GB):
        for module in (memory, replay_storage):
            name = "free_bytes" if module is memory else "host_free_bytes"
            monkeypatch.setattr(module, name, lambda *_: in_memory)
        monkeypatch.setattr(disk, "free_bytes", lambda folder: on_disk)

    return set_free


def planned(env="Breakout-MinAtar", buffer_size=1_000_000, players="", **agent):
    agent |= {"buffer_size": buffer_size, "learning_starts": 64}
    settings = load.from_keywords(algo="dqn", env=env, num_envs=8, players=players, agent=agent, devices=1)
    return plan.validate_plan(settings)


def storage_of(made):
    return made.settings.agent.replay_storage, made.settings.agent.replay_compression


def test_the_first_store_with_room_is_chosen(free):
    """A million boards of 400 bytes: twice on a CPU's device, an eighth in memory if packed; 14 bytes each remain."""
    free(GB)
    made = planned()
    assert storage_of(made) == ("device", "auto") and not made.agent.resources and not made.replay_note
    on_device = nbytes(memory.program.abstract(made.env, lambda env: made.agent.init(memory.key_of_seed(0))).replay)
    assert made.needs.replay == on_device
    free(GB // 5)
    made = planned()
    assert storage_of(made) == ("host", "zstd") and len(made.agent.resources) == 1
    assert made.needs.replay == on_device - 400 * 1_000_000 + 8
    assert "in the host memory" in made.replay_note and "400.0 MB as they are" in made.replay_note
    assert storage_of(planned(replay_compression="none")) == ("disk", "none")
    free(GB // 5, on_disk=GB // 100)
    with pytest.raises(ValueError, match=r"does not fit in any storage; .* fits is: device \d+, host \d+, disk \d+$"):
        planned(replay_compression="none")


@pytest.mark.parametrize("storage", ["host", "disk"])
def test_the_capacity_that_is_proposed_fits_and_more_does_not(storage, free):
    free(GB // 5, GB // 5)
    with pytest.raises(ValueError, match=f"with --agent.replay-storage {storage}") as refused:
        planned(buffer_size=10**7, replay_storage=storage, replay_compression="none")
    proposed = int(str(refused.value).partition(f"{storage} ")[2].rpartition(f"{storage} ")[2].partition(",")[0])
    assert storage_of(planned(buffer_size=proposed, replay_storage=storage, replay_compression="none"))[0] == storage
    with pytest.raises(ValueError, match="does not fit"):
        planned(buffer_size=int(1.02 * proposed), replay_storage=storage, replay_compression="none")


def test_only_bytes_are_compressed(free, monkeypatch, capsys):
    free(100 * GB)
    assert storage_of(planned("CartPole-v1", replay_storage="host")) == ("host", "none")
    assert storage_of(planned("CartPole-v1", replay_storage="host", replay_compression="zstd")) == ("host", "none")
    assert "observations are not bytes, got zstd; none is used" in capsys.readouterr().err
    monkeypatch.setattr(codec, "is_installed", lambda: False)
    assert storage_of(planned(replay_storage="host")) == ("host", "none")
    with pytest.raises(ValueError, match=r'zstandard is not installed, got zstd; use none or pip install "jaxrl_fast'):
        planned(replay_storage="host", replay_compression="zstd")


@pytest.mark.parametrize("storage", ["device", "host"])
def test_gradient_workers_do_not_depend_on_the_store(storage, free):
    """They decide in which order gradients are summed."""
    free(100 * GB)
    settings = load.from_keywords(algo="dqn", agent={"batch_size": 256, "replay_storage": storage})
    assert (
        plan.validate_plan(settings).placement
        == plan.validate_plan(load.from_keywords(algo="dqn", agent={"batch_size": 256})).placement
    )


@pytest.mark.parametrize("storage", ["host", "disk"])
def test_independent_players_keep_their_replay_on_the_device(storage, free):
    free(100 * GB)
    game = dict(env="games/Paddles", players="independent", buffer_size=4096)
    with pytest.raises(
        ValueError, match=f"^--agent.replay-storage: must be device for independent players, got {storage}"
    ):
        planned(replay_storage=storage, **game)
    assert storage_of(planned(**game))[0] == "device"
