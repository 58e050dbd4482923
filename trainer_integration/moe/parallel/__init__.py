"""One group of ranks for sequence parallelism and expert parallelism at once, as in MegaScale-MoE."""
