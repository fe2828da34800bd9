"""--dry-run --for: what mistakes print, and what the command reports where the compiler of CUDA is installed."""

from importlib import metadata

import pytest

from jaxrl_fast import train
from jaxrl_fast.gpu_check import targets

ARGV = ["--config", "ppo_cartpole", "--dry-run", "--for"]


def test_cluster_has_hosts_and_gpus_of_each():
    assert targets.read("2x8xh200") == ("h200", 2, 8)
    assert targets.read("rtx4090") == ("rtx4090", 1, None)


def test_gpus_are_those_of_the_documentation():
    assert [*targets.GPUS] == ["t4", "a100", "rtx4090", "h100", "h200"]
    assert all(gpu.memory > 2**33 for gpu in targets.GPUS.values())


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([*ARGV, "h20"], "error: for: must be the name of a GPU, got h20; did you mean h200?"),
        ([*ARGV, "zx"], "error: for: must be the name of a GPU, got zx; use t4, a100, rtx4090, h100, h200"),
        ([*ARGV, "2x8xh20"], "error: for: must be the name of a GPU, got 2x8xh20; did you mean h200?"),
        ([*ARGV, "2xh200"], "error: for: must be the name of a GPU, got 2xh200; did you mean h200 or h100?"),
        ([*ARGV, "0x8xh200"], "error: for: must be the name of a GPU, got 0x8xh200; did you mean h200?"),
        (ARGV, "error: for: must be the name of a GPU, got nothing; use t4, a100, rtx4090, h100, h200"),
        (
            [*ARGV[:2], "--dry-run", "false", "--for", "t4"],
            "error: for: compiles without training, got t4; add --dry-run",
        ),
        (
            [*ARGV, "t4", "--num-envs", "auto"],
            "error: num_envs: cannot be measured on a t4 that is not there, got auto; give a number",
        ),
        (["ppo", "--for", "t4"], "error: for: compiles without training, got t4; add --dry-run"),
        (
            [*ARGV[:-1], "--for=t4"],
            'error: for: requires the package jax-cuda12-plugin, got t4; pip install "jaxrl_fast[gpu-check]"',
        ),
    ],
)
def test_mistake_is_one_line(argv, message, capsys, monkeypatch):
    def version(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)
    assert train.main(argv) == 2
    assert capsys.readouterr().err.splitlines() == [message]
