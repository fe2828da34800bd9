"""Draw figures of runs and sweeps."""
