"""A tiny sweep, and a fake trainer that writes the files of a run without training."""

import json
import signal

from jaxrl_fast.training import trainer

TINY = "ppo --env CartPole-v1 --total-steps 512 --eval-episodes 2 --rollout-length 16 --hidden-sizes 4 "
TINY += "--num-epochs 1 --num-minibatches 1 --solved-threshold 2 --log-level quiet "
TINY += "--env-option max_steps_in_episode=3"  # so 512 steps give 128 episodes


class Pretence:
    """A fake trainer that writes the summary of a run without training."""

    ran: list = []  # noqa: RUF012
    why = "seed 0: loss is not finite at step 64; there is no checkpoint; try a lower learning rate"
    behave = staticmethod(lambda plan: "done")

    @classmethod
    def execute(cls, plan, terminal, until=None, kept=None):
        status = cls.behave(plan)
        cls.ran.append(plan.folder.name)
        summary = {
            "status": "done" if status == "too late" else status,
            "env_steps": plan.settings.options.total_steps,
            "env_steps_per_s": 10.0,
            "train_time_s": 1.0,
            "final_return_iqm": 3.0,
        }
        summary |= {"final_return_per_seed": [3.0] * len(plan.members), "device": "cpu"}
        summary |= dict.fromkeys(("steps_to_solve_per_seed", "diverged_at_per_seed"), [None] * len(plan.members))
        summary |= {"failure": cls.why if status == "diverged" else None}
        (plan.folder / "summary.json").write_text(json.dumps(summary))
        came = signal.SIGTERM if status in ("stopped", "too late") else None
        return trainer.Outcome(plan.folder, summary, None, came if status == "stopped" else None, "", came)
