"""Change environments: each wrapper is a function from `Env` to `Env`."""
