"""Train PPO with a reward for new observations, next to the same training without it, and store the returns.

   python benchmarks/exploration.py deep_sea deep_sea_rnd --num-seeds 5
   python benchmarks/exploration.py                     # only prints the table of stored results

The columns are those of learning_from_data.py. All seeds of a case share a program.
"""

from pathlib import Path

from learning_from_data import main

KEPT = Path(__file__).parent / "results" / "exploration_cpu.json"
DEEP_SEA = {"preset": "ppo_rnd_deep_sea", "solved_threshold": None}
CASES = {
    "deep_sea": (DEEP_SEA, {"kind": "none"}),
    "deep_sea_rnd": (DEEP_SEA, {"kind": "rnd"}),
}

if __name__ == "__main__":
    main(__doc__, CASES, KEPT)
