"""Stages of a start-up: events, the critical path, stragglers, and the stage that explains a difference."""

from snapshot.startup.events import stage

__all__ = ["stage"]
