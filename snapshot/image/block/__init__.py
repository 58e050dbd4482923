"""Blocks: fetched by priority, verified, kept on disk."""
