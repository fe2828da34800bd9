"""From the numbers of updates to the records of a run."""
