"""Readers of sources: records of any format as tokens, addressed by position.

``open_source`` is the entry point; formats are in ``omniload.source.formats``.
"""
