"""Readers of sources: records of any format, addressed by position, as tokens.

``open_source`` is the way in; formats are in ``omniload.source.formats``.
"""
