"""What someone may have meant by a word that is not known. Standard library only."""

import difflib
from collections.abc import Callable, Iterable


def nearest(word: str, names: Iterable[object], spell: Callable[[str], str] = str) -> str:
    """For a message about an unknown word: "; did you mean a or b?", or nothing if no name is near.

    A name that has the word as its last part, as "agent.clip" has "clip", is nearest of all.
    """
    by_lower = {str(name).lower(): str(name) for name in names}
    tail = word.lower().rpartition(".")[2]
    close = [name for name in by_lower if name.rpartition(".")[2] == tail]
    close = close or difflib.get_close_matches(word.lower(), by_lower, n=2, cutoff=0.6)
    return f"; did you mean {' or '.join(spell(by_lower[name]) for name in close)}?" if close else ""
