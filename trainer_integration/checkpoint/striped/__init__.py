"""Distributed checkpoints (DCP) as stripes of a namespace, without a mount."""
