"""Merge the metrics of updates into records, and track episodes, evaluations and divergence."""
