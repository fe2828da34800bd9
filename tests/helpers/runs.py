"""Stop a run, and compare the files of two runs."""

import json
import signal

from jaxrl_fast.config import paths
from jaxrl_fast.runs import checkpoint
from jaxrl_fast.training import trainer

TIMES = ("wall_time_s", "train_time_s", "env_steps_per_s")
CLOCKS = ("ledger/train_time_s", "ledger/wall_time_s")


def stop_after(monkeypatch, *env_steps):
    """Send each later run a signal at the chunk in which it reaches the next of these numbers of steps."""
    left, process_chunk = list(env_steps), trainer.Trainer.process_chunk

    def process_and_stop(self, done):
        process_chunk(self, done)
        if left and self.env_steps >= left[0] and self.signal is None:
            left.pop(0)
            self.stop(signal.SIGTERM)

    monkeypatch.setattr(trainer.Trainer, "process_chunk", process_and_stop)


def records(folder):
    """Return the records of metrics.jsonl without times."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in TIMES} for line in lines]


def bits(folder):
    """Return the bytes of each array in the last checkpoint, without times."""
    saved, wrong = checkpoint.newest(folder / paths.CHECKPOINTS)
    assert saved is not None and not wrong
    return {name: x.tobytes() for name, x in saved.arrays.items() if name not in CLOCKS}


def same_numbers(one, other):
    assert records(one) == records(other)
    assert bits(one) == bits(other)


def same(one, other):
    same_numbers(one, other)
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in (one, other)]
    for key in ("env_steps", "valid_steps", "final_return_per_seed", "evaluations", "status", "last_checkpoint"):
        assert summaries[0][key] == summaries[1][key], key
