"""Adapt suites of environments that run on the device, in one module each.

A module gives each environment gymnax's interface: `reset_env`, `step_env` without an automatic reset, and
`is_truncated`. `envs.gymnax.adapter` makes N environments of it. If an adapter also has `action_mask(state, params)`,
time steps have masks. Keys come from the caller, whether or not the suite keeps keys in its state.
"""
