"""Read and write the folder of a run."""
