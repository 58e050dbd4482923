"""Verbs of ``omniload mix`` on a run: its progress, the content of its steps, and the work of its roles."""
