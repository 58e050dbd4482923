"""Formats of shards: each cuts files into units and decodes one unit at a time."""
