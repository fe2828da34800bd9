"""Seeds and shards on devices."""
