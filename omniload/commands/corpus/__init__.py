"""Verbs on documents outside of a run: a sample corpus, pages that show samples, and tokens made before a run."""
