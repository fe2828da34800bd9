"""From words on a command line, in a preset or in Python to the settings of a run."""
