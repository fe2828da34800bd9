"""Write records to files, TensorBoard and trackers, and lines to the terminal."""
