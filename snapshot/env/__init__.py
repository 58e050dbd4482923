"""Dependency snapshots: what an installation changed, kept once and restored anywhere."""
