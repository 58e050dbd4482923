"""Surveys of sources before training: lengths, and equal documents."""
