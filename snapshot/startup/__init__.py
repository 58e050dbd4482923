"""Stages of a start-up: events, the critical path, stragglers, what explains a difference."""
