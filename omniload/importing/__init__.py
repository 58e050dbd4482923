"""Imports of mix files of other tools: faithful, or refused with a list of what has no equivalent."""
