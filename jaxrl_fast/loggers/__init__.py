"""Write records and lines: files, services, consoles."""
