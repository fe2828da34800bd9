"""PPO in Python environments: ours beside Stable-Baselines3, in turn, with equal hyperparameters.

    pip install stable-baselines3 "gymnasium[box2d]"
    python benchmarks/gymnasium_speed.py                         # about ten minutes on two cores
    python benchmarks/gymnasium_speed.py --sb3 /path/to/python   # of an environment that has Stable-Baselines3

Each contender trains in a process of its own, a short time, once in each round. Speeds are environment steps per second
of training, updates included, start and compilation excluded; ours counts valid steps. Ratios are medians over rounds.

`envs_alone` is the speed of gymnasium's environments stepped one after another in a plain loop, `network_alone` that of
our training in an environment on the device that costs nothing. 1 / (1 / envs_alone + 1 / network_alone) is the most
that a training can reach that does one after the other in one process.
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
GUESSES = {TASKS[0]: 20_000, TASKS[1]: 8_000, TASKS[2]: 1_000}  # steps per second, which decide the lengths of runs


def main() -> None:
    """Measure, and write the JSON after each case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sb3", default=sys.executable, help="a Python that has stable-baselines3")
    parser.add_argument("--num-envs", default="8,64")
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=8.0, help="aimed length of one training")
    parser.add_argument("--output", default="")
    parser.add_argument("--contender", default="", help=argparse.SUPPRESS)  # in a child process
    args = parser.parse_args()
    if args.contender:
        print(json.dumps(CONTENDERS[args.contender](args.tasks, int(args.num_envs), args.seconds)))
        return
    import side_by_side

    report = side_by_side.Report("gymnasium_speed", args.output)
    report.put("crossing", crossing())
    for task in args.tasks.split(","):
        for num_envs in args.num_envs.split(","):
            report.add("cases", compare(task, num_envs, args))


def compare(task: str, num_envs: str, args: argparse.Namespace) -> dict:
    """Return the speeds of all contenders in one task, round by round."""
    rates: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    for _ in range(args.rounds):
        for name, found in rates.items():
            python = args.sb3 if name.startswith("sb3") else sys.executable
            words = [python, __file__, "--contender", name, "--tasks", task, "--num-envs", num_envs]
            words += ["--seconds", str(args.seconds)]
            done = subprocess.run(words, capture_output=True, text=True, check=True)
            found.append(json.loads(done.stdout.splitlines()[-1]))
    ratio = lambda name, other: statistics.median(a / b for a, b in zip(rates[name], rates[other]))
    best_sb3 = [max(both) for both in zip(rates["sb3_dummy"], rates["sb3_subproc"])]
    best = [max(both) for both in zip(rates["ours"], rates["ours_two_workers"])]
    serial = [1 / (1 / env + 1 / net) for env, net in zip(rates["envs_alone"], rates["network_alone"])]
    return {
        "task": task,
        "num_envs": int(num_envs),
        "steps_per_s": {name: round(statistics.median(found)) for name, found in rates.items()},
        "rounds": {name: [round(x) for x in found] for name, found in rates.items()},
        "ours_over_sb3_dummy": round(ratio("ours", "sb3_dummy"), 2),
        "best_over_best_sb3": round(statistics.median(a / b for a, b in zip(best, best_sb3)), 2),
        "share_of_serial_limit": round(statistics.median(a / b for a, b in zip(rates["ours"], serial)), 2),
    }


def make_task(task: str):
    """Return a function that makes one environment."""
    import gymnasium

    if task != "sleeping":
        return lambda: gymnasium.make(task.removeprefix("gymnasium/"))

    class Sleeping(gymnasium.Wrapper):
        """CartPole that waits in each step, as for a simulator in another process."""

        def step(self, action):
            time.sleep(SLEEP_S)
            return self.env.step(action)

    return lambda: Sleeping(gymnasium.make("CartPole-v1"))


def ours(task: str, num_envs: int, seconds: float, **options) -> float:
    """Return the speed of our training."""
    import jaxrl_fast

    agent = dict(rollout_length=ROLLOUT, num_minibatches=MINIBATCHES, num_epochs=EPOCHS, hidden_sizes=HIDDEN)
    agent |= dict(learning_rate=RATE, anneal_lr=False)
    env = make_task(task) if task == "sleeping" else task
    quiet = dict(tensorboard=False, log_level="quiet", eval_episodes=1, agent=agent, algo="ppo", save_every="0")
    update = ROLLOUT * num_envs
    steps = max(int(GUESSES[task] * seconds) // update, 2) * update
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
    steps = max(int(GUESSES[task] * seconds / 4) // update, 2) * update
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
    while time.perf_counter() - start < seconds / 2:
        for row in actions:
            for env, action in zip(envs, row):
                _, _, terminated, truncated, _ = env.step(action)
                if terminated or truncated:
                    env.reset()
            steps += num_envs
    return steps / (time.perf_counter() - start)


def network_alone(task: str, num_envs: int, seconds: float) -> float:
    """Return the speed of our training in an environment of the same spaces that costs nothing."""
    import gymnasium
    import jax.numpy as jnp
    from gymnax.environments import spaces

    like = make_task(task)() if task != "sleeping" else gymnasium.make("CartPole-v1")
    obs, num_actions = jnp.zeros(like.observation_space.shape), int(like.action_space.n)

    class Still:
        """Nothing moves; 100 steps are an episode."""

        default_params = ()
        reset_env = staticmethod(lambda key, params: (obs, jnp.int32(0)))
        step_env = staticmethod(lambda key, t, action, params: (obs, t + 1, 1.0, jnp.bool_(False), {}))
        is_truncated = staticmethod(lambda t, params: t >= 100)
        action_space = staticmethod(lambda params: spaces.Discrete(num_actions))

    import jaxrl_fast

    agent = dict(rollout_length=ROLLOUT, num_minibatches=MINIBATCHES, num_epochs=EPOCHS, hidden_sizes=HIDDEN)
    quiet = dict(tensorboard=False, log_level="quiet", eval_episodes=1, agent=agent, algo="ppo", save_every="0")
    with tempfile.TemporaryDirectory() as folder:
        steps = max(int(2e5 * seconds / 4) // (ROLLOUT * num_envs), 2) * ROLLOUT * num_envs
        run = jaxrl_fast.fit(env=Still(), num_envs=num_envs, total_steps=steps, run_dir=f"{folder}/run", **quiet)
    return run.summary["env_steps_per_s"]


def crossing() -> dict:
    """Return the microseconds for one step of all environments that crossing into Python adds, by bridge."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from jaxrl_fast import envs
    from jaxrl_fast.envs import host_pool
    from jaxrl_fast.types import HostEnvConfig

    num_steps, found = 3000, {}
    for num_envs in (8, 64):
        for bridge in ("ffi", "callback"):
            env = envs.make("gymnasium/CartPole-v1", num_envs, HostEnvConfig(env_workers=0, bridge=bridge))
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
            env.close()
    return found


CONTENDERS = {
    "ours": ours,
    "ours_two_workers": lambda *task: ours(*task, env_workers=2),
    "sb3_dummy": lambda *task: sb3(*task, "dummy"),
    "sb3_subproc": lambda *task: sb3(*task, "subproc"),
    "envs_alone": envs_alone,
    "network_alone": network_alone,
}

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
