"""Report what a run would need on a GPU that this machine does not have: `--dry-run --for h200`."""

import dataclasses
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from jaxrl_fast.config.settings import Settings
from jaxrl_fast.gpu_check import targets
from jaxrl_fast.gpu_check.launches import Loop, read
from jaxrl_fast.loggers.terminal import Console
from jaxrl_fast.training import console
from jaxrl_fast.training import plan as plans
from jaxrl_fast.training.plan import Plan
from jaxrl_fast.utils import devices
from jaxrl_fast.utils.memory import format_bytes

if TYPE_CHECKING:
    from jax.stages import Compiled


class DoesNotFit(Exception):
    """The program needs more memory than the GPU has."""


def make_plan(settings: Settings, gpu: str) -> Plan:
    """Return the plan of a run on a GPU of another machine. Raise ValueError if it cannot be compiled for it.

    `targets.start` must have started JAX.
    """
    cluster, asked = targets.read(gpu), settings.options.devices
    if cluster.num_gpus:
        total = cluster.num_hosts * cluster.num_gpus
        if asked not in ("auto", total):
            raise ValueError(f"devices: must be the {total} GPUs of {gpu}, got {asked}; leave it out")
        settings = settings._replace(options=dataclasses.replace(settings.options, devices=total))
    with compiling(settings, gpu):
        found = plans.make_plan(settings)
    where = f"{found.env.spec.id} runs on the host" if found.env.host else "the replay lies on the host"
    if found.env.host or found.agent.learning.resources:
        raise ValueError(f"for: {where}, which no other machine can be compiled for, got {gpu}; leave it out")
    return found._replace(gpu=gpu)


def compiling(settings: Settings, gpu: str) -> AbstractContextManager[None]:
    """Return the context that compiles a run for as many GPUs as it asks for: one by default."""
    asked = settings.options.devices
    return targets.compiling_for(targets.read(gpu), 1 if asked == "auto" else int(asked))


def compiled(plan: Plan) -> "Compiled":
    """Return the training program, compiled for the devices of `utils.target`."""
    from jaxrl_fast.parallel import program

    return program.lower(plan.env, plan.agent, plan.num_updates, plan.placement, plan.varied).compile()


def print_report(plan: Plan, terminal: Console) -> None:
    """Compile the program, and print its memory and its kernels. Raise DoesNotFit if it needs too much."""
    from jaxrl_fast.parallel import program

    gpu = targets.read(plan.gpu).gpu
    with compiling(plan.settings, plan.gpu):
        console.announce(plan, terminal)
        terminal.print(f"compiling for {gpu.name} ...")
        with targets.quiet():
            result = compiled(plan)
    needs, has = program.most_bytes(result), int(devices.DEFAULT_MEMORY_SHARE * gpu.memory)
    terminal.print(f"memory  {format_bytes(needs)} of the {format_bytes(has)} that JAX reserves of each GPU")
    for line in lines(read(result.as_text() or "")):
        terminal.print(line)
    if needs > has:
        num_envs = plan.settings.options.num_envs
        fits = max(int(num_envs * has / needs), 1)
        raise DoesNotFit(f"num_envs: does not fit into the memory of {gpu.name}, got {num_envs}; use about {fits}")
    terminal.print("dry run: nothing was trained or written")


def lines(program: Loop) -> list[str]:
    """Return a table of the kernels of a program."""
    rows: list[tuple[str, ...]] = [("", "kernels", "copies", "host waits", "collectives")]
    for name, number in counts(program).items():
        rows.append((name.replace("_", " "), *map(str, number.values())))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(x.rjust(w) if i else x.ljust(w) for i, (x, w) in enumerate(zip(row, widths))) for row in rows]


def counts(program: Loop) -> dict[str, dict[str, int]]:
    """Return the kernels, copies, host waits and collectives of an environment step, a gradient step and an update.

    Loops inside of a step count with all their passes. An update of one environment step has no loop of such steps: its
    row then has those kernels too.
    """
    update = program.inner[0]
    named = {"environment_step": "environment_steps", "gradient_step": "gradient_steps"}
    found: dict[str, Any] = {name: update.find(scope) for name, scope in named.items()}
    return {name: _numbers(loop) for name, loop in (found | {"update": update}).items() if loop}


def _numbers(loop: Loop) -> dict[str, int]:
    total = lambda name: _sum(loop, name)
    waits = loop.waits + (loop.trips is None)
    return {"kernels": loop.total, "copies": total("copies"), "host_waits": waits, "collectives": total("collectives")}


def _sum(loop: Loop, name: str) -> int:
    return int(getattr(loop, name)) + sum((inner.trips or 1) * _sum(inner, name) for inner in loop.inner)
