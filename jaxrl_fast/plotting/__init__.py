"""Figures of runs and sweeps."""
