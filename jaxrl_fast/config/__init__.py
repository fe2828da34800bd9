"""Convert a command line, a preset or Python keywords to the settings of a run."""
