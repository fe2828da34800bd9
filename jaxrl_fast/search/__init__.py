"""Search for settings: `spaces` reads what is searched, and `report` writes what was found."""
