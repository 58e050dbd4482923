"""Cheap starts: container images read lazily, installed dependencies restored, stages measured."""
