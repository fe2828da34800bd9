"""Convert to plain values, which YAML and JSON files can hold. Standard library only."""

from typing import Any


def as_lists(value: Any) -> Any:
    """Return arrays as lists, also within lists and dictionaries, and other values unchanged."""
    if isinstance(value, list | tuple):
        return [as_lists(part) for part in value]
    if isinstance(value, dict):
        return {name: as_lists(part) for name, part in value.items()}
    return value.tolist() if hasattr(value, "tolist") else value


def fits_a_file(value: Any) -> bool:
    """Return whether both YAML and JSON can hold a value."""
    plain = (str, int, float, bool, type(None))
    if type(value) is dict:
        return all(type(name) in plain and fits_a_file(part) for name, part in value.items())
    return all(map(fits_a_file, value)) if type(value) in (list, tuple) else type(value) in plain
