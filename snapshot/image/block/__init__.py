"""Blocks: fetched in an order of priorities, verified, kept on disk."""
