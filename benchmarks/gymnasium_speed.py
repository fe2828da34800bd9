"""Measure PPO in Python environments: jaxrl_fast and Stable-Baselines3 in turn, with equal hyperparameters.

    pip install stable-baselines3 "gymnasium[box2d]"
    python benchmarks/gymnasium_speed.py                         # less than eight minutes on two cores
    python benchmarks/gymnasium_speed.py --sb3 /path/to/python   # a Python with Stable-Baselines3
    python benchmarks/gymnasium_speed.py --tasks sleeping --num-envs 64 --workers 16

Each round trains every contender once, for a short time, in a separate process. Speeds are environment steps per second
of training, with updates, without start-up and compilation. For jaxrl_fast only valid steps count. Ratios are medians
over rounds.

`ours` decides by itself on worker processes; `ours_one_process` has none, and `ours_workers` has --workers processes.
`envs_alone` is the speed of gymnasium's environments stepped one after another in a plain loop, `network_alone` that of
our training in an environment on the device that costs nothing. 1 / (1 / envs_alone + 1 / network_alone) is the most
that a training can reach that does one after the other in one process. Environments that sleep 1 ms in each step allow
1000 steps per second and worker process.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROLLOUT, MINIBATCHES, EPOCHS, HIDDEN, RATE = 128, 4, 4, (64, 64), 2.5e-4
TASKS = ("gymnasium/CartPole-v1", "gymnasium/LunarLander-v3", "sleeping")
SLEEP_S = 1e-3
# Steps per second, which decide the lengths of runs: ours; Stable-Baselines3's; and in both with sleeping environments.
GUESSES = {TASKS[0]: (40_000, 5_000), TASKS[1]: (15_000, 3_000), TASKS[2]: (900, 800)}
MIN_UPDATES = 2


def main() -> None:
    """Measure, and write the JSON after each case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sb3", default=sys.executable, help="a Python that has stable-baselines3")
    parser.add_argument("--num-envs", default="8,64")
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=2.5, help="intended length of one training")
    parser.add_argument("--workers", type=int, default=8, help="worker processes of ours_workers")
    parser.add_argument("--contenders", default="", help="some of them only, without ratios")
    parser.add_argument("--output", default="")
    parser.add_argument("--contender", default="", help=argparse.SUPPRESS)  # in a child process
    args = parser.parse_args()
    if args.contender:
        more = {"host": {"workers": args.workers}, "devices": 1} if args.contender == "ours_workers" else {}
        print(json.dumps(CONTENDERS[args.contender](args.tasks, int(args.num_envs), args.seconds, **more)))
        return
    import side_by_side

    report = side_by_side.Report("gymnasium_speed", args.output)
    report.put("crossing", crossing())
    for task in args.tasks.split(","):
        for num_envs in args.num_envs.split(","):
            report.add("cases", compare(task, num_envs, args))


def compare(task: str, num_envs: str, args: argparse.Namespace) -> dict:
    """Return the speeds of all contenders in one task, round by round."""
    rates: dict[str, list[float]] = {name: [] for name in args.contenders.split(",") if name} or {
        name: [] for name in (OF_SLEEPING if task == "sleeping" else OF_COMPUTING)
    }
    for _ in range(args.rounds):
        for name, found in rates.items():
            python = args.sb3 if name.startswith("sb3") else sys.executable
            words = [python, __file__, "--contender", name, "--tasks", task, "--num-envs", num_envs]
            words += ["--seconds", str(args.seconds), "--workers", str(min(args.workers, int(num_envs)))]
            done = subprocess.run(words, capture_output=True, text=True, check=True)
            found.append(json.loads(done.stdout.splitlines()[-1]))
    found = {
        "task": task,
        "num_envs": int(num_envs),
        "steps_per_s": {name: round(statistics.median(each)) for name, each in rates.items()},
        "rounds": {name: [round(x) for x in each] for name, each in rates.items()},
    }
    if args.contenders:
        return found
    median = lambda values: round(statistics.median(values), 2)
    sb3 = next(name for name in rates if name.startswith("sb3"))
    found["ours_over_sb3"] = median(a / b for a, b in zip(rates["ours"], rates[sb3]))
    if task == "sleeping":
        workers = min(args.workers, int(num_envs))
        found["workers"], allowed = workers, workers / SLEEP_S
        found["share_of_what_sleep_allows"] = median(rate / allowed for rate in rates["ours_workers"])
        return found
    serial = [1 / (1 / env + 1 / net) for env, net in zip(rates["envs_alone"], rates["network_alone"])]
    found["share_of_serial_limit"] = median(a / b for a, b in zip(rates["ours"], serial))
    found["worker_processes_gain"] = median(a / b for a, b in zip(rates["ours"], rates["ours_one_process"]))
    return found


def make_task(task: str):
    """Return a function that makes one environment."""
    import gymnasium

    if task != "sleeping":
        return lambda: gymnasium.make(task.removeprefix("gymnasium/"))

    class Sleeping(gymnasium.Wrapper):
        """CartPole that sleeps in each step, like an environment that waits for another process."""

        def step(self, action):
            time.sleep(SLEEP_S)
            return self.env.step(action)

    return lambda: Sleeping(gymnasium.make("CartPole-v1"))


def ours(task: str, num_envs: int, seconds: float, **options) -> float:
    """Return the training speed of jaxrl_fast."""
    import jaxrl_fast

    agent = dict(rollout_length=ROLLOUT, num_minibatches=MINIBATCHES, num_epochs=EPOCHS, hidden_sizes=HIDDEN)
    agent |= dict(learning_rate=RATE, schedule="constant")
    env = make_task(task) if task == "sleeping" else task
    quiet = dict(loggers=(), log_level="quiet", eval_episodes=1, algo="ppo", save_every="0") | agent
    update = ROLLOUT * num_envs
    workers = options.get("host", {}).get("workers", num_envs)
    guess = GUESSES[task][0] * (min(workers, num_envs) if task == "sleeping" else 1)
    steps = max(int(guess * seconds) // update, MIN_UPDATES) * update
    with tempfile.TemporaryDirectory() as folder:
        run = jaxrl_fast.fit(env=env, num_envs=num_envs, total_steps=steps, run_dir=f"{folder}/run", **quiet, **options)
    return run.summary["env_steps_per_s"]


def sb3(task: str, num_envs: int, seconds: float, vector: str) -> float:
    """Return the speed of Stable-Baselines3's PPO."""
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.monitor import Monitor
    from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv

    make = make_task(task)
    kind = DummyVecEnv if vector == "dummy" else SubprocVecEnv
    envs = kind([lambda: Monitor(make())] * num_envs)
    update = ROLLOUT * num_envs
    shape = dict(n_steps=ROLLOUT, batch_size=update // MINIBATCHES, n_epochs=EPOCHS, learning_rate=RATE)
    policy = dict(net_arch=list(HIDDEN), activation_fn=torch.nn.Tanh)
    model = PPO("MlpPolicy", envs, **shape, policy_kwargs=policy, device="cpu")
    guess = GUESSES[task][1] * (num_envs if task == "sleeping" and vector == "subproc" else 1)
    steps = max(int(guess * seconds) // update, MIN_UPDATES) * update
    model.learn(update)
    start = time.perf_counter()
    model.learn(steps)
    rate = steps / (time.perf_counter() - start)
    envs.close()
    return rate


def envs_alone(task: str, num_envs: int, seconds: float) -> float:
    """Return the speed of a plain loop over the environments, without a policy."""
    envs = [make_task(task)() for _ in range(num_envs)]
    for i, env in enumerate(envs):
        env.reset(seed=i)
        env.action_space.seed(i)
    actions = [[env.action_space.sample() for env in envs] for _ in range(64)]
    steps, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        for row in actions:
            for env, action in zip(envs, row):
                _, _, terminated, truncated, _ = env.step(action)
                if terminated or truncated:
                    env.reset()
            steps += num_envs
    return steps / (time.perf_counter() - start)


def network_alone(task: str, num_envs: int, seconds: float) -> float:
    """Return the training speed of jaxrl_fast in an environment with the same spaces that costs nothing."""
    import gymnasium
    import jax.numpy as jnp
    from gymnax.environments import spaces

    like = make_task(task)() if task != "sleeping" else gymnasium.make("CartPole-v1")
    obs, num_actions = jnp.zeros(like.observation_space.shape), int(like.action_space.n)

    class Still:
        """A constant environment with episodes of 100 steps."""

        default_params = ()
        reset_env = staticmethod(lambda key, params: (obs, jnp.int32(0)))
        step_env = staticmethod(lambda key, t, action, params: (obs, t + 1, 1.0, jnp.bool_(False), {}))
        is_truncated = staticmethod(lambda t, params: t >= 100)
        action_space = staticmethod(lambda params: spaces.Discrete(num_actions))

    import jaxrl_fast

    agent = dict(rollout_length=ROLLOUT, num_minibatches=MINIBATCHES, num_epochs=EPOCHS, hidden_sizes=HIDDEN)
    quiet = dict(loggers=(), log_level="quiet", eval_episodes=1, algo="ppo", save_every="0") | agent
    with tempfile.TemporaryDirectory() as folder:
        steps = max(int(2e5 * seconds) // (ROLLOUT * num_envs), 2) * ROLLOUT * num_envs
        run = jaxrl_fast.fit(env=Still(), num_envs=num_envs, total_steps=steps, run_dir=f"{folder}/run", **quiet)
    return run.summary["env_steps_per_s"]


def crossing() -> dict:
    """Return microseconds per step of all environments: in a compiled scan, and of the pool alone, by bridge."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from jaxrl_fast import envs
    from jaxrl_fast.envs.host import pool as host_pool
    from jaxrl_fast.envs.host.config import HostEnvConfig, Workers

    num_steps, found = 1000, {}
    for num_envs in (8, 64):
        for bridge in ("ffi", "callback"):
            env = envs.make("gymnasium/CartPole-v1", num_envs, HostEnvConfig(workers=Workers(0), bridge=bridge))
            actions = jnp.zeros((num_steps, num_envs), jnp.int32)
            play = lambda actions, env=env: jax.lax.scan(env.step, env.reset(jax.random.key(0))[0], actions)[
                1
            ].reward.sum()
            compiled = jax.jit(play).lower(actions).compile()
            compiled(actions).block_until_ready()
            in_scan, alone = [], []
            pool, row = host_pool.OPEN_POOLS[-1], np.zeros(num_envs, np.int64)
            for _ in range(5):
                start = time.perf_counter()
                compiled(actions).block_until_ready()
                in_scan.append(time.perf_counter() - start)
                pool.reset()
                start = time.perf_counter()
                for _ in range(num_steps):
                    pool.send(row)
                    pool.recv()
                alone.append(time.perf_counter() - start)
            microseconds = lambda times: round(1e6 * statistics.median(times) / num_steps, 1)
            found[f"{bridge}_{num_envs}_envs"] = {"in_scan": microseconds(in_scan), "pool_alone": microseconds(alone)}
            env.host.close()
    return found


CONTENDERS = {
    "ours": ours,
    "ours_one_process": lambda *task: ours(*task, host={"workers": 0}),
    "ours_workers": ours,
    "sb3_dummy": lambda *task: sb3(*task, "dummy"),
    "sb3_subproc": lambda *task: sb3(*task, "subproc"),
    "envs_alone": envs_alone,
    "network_alone": network_alone,
}
# Worker processes pay for environments that wait, and cost more than they save for CartPole.
OF_COMPUTING = ("ours", "ours_one_process", "sb3_dummy", "envs_alone", "network_alone")
OF_SLEEPING = ("ours", "ours_workers", "sb3_subproc")

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
