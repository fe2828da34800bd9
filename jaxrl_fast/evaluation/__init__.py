"""Use a trained policy: load it, evaluate it, record a video."""
