"""Where records and lines go."""
