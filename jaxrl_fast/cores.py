"""How many cores of this CPU may sum by way of the memory that they share, as `across` does it."""

from jaxrl_fast import host, native

SHARE = {"processes": 1}  # of ours that use these cores at the same time


def most() -> int:
    """Cores that may sum together: 1 where they cannot, or are few to each of the processes that share them."""
    number = host.num_cores() // SHARE["processes"]
    return number if number > 1 and native.ready() else 1


def share(num_processes: int) -> None:
    """So many processes of ours use these cores."""
    SHARE["processes"] = num_processes
