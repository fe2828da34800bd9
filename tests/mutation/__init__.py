"""Bugs that the tests must catch, one patch each; `run` applies them and `refresh` keeps them applicable."""
