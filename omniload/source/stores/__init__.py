"""Requests to the stores of sources, and copies of their shards on a disk of the node; see ``shard_cache``."""
