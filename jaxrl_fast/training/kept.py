"""Keep the compiled functions of a run for later parts of it, in which members have other hyperparameters."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxrl_fast.parallel.program import Compiled, Program
    from jaxrl_fast.training.evaluator import Evaluator
    from jaxrl_fast.training.progress import RunProgress


class Kept:
    """The functions of the parts so far; none at first.

    Functions with host environments or host resources hold addresses, so they are not kept.
    """

    program: "Compiled | None" = None
    evaluator: "Evaluator | None" = None

    def add(self, progress: "RunProgress", built: "Program") -> None:
        """Keep the functions of a part that begins, and let its evaluations use those of an earlier part."""
        plan = progress.plan
        if plan.env.on_device and plan.eval_env.on_device and not plan.agent.learning.resources:
            if self.evaluator:
                progress.evaluator.share(self.evaluator)
            self.program, self.evaluator = built.compiled, progress.evaluator
