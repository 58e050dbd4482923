"""What the stores of sources are asked, and copies of their shards on a disk of the node; see ``shard_cache``."""
