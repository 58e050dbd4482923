"""YAML files of settings: as a tree that knows its lines, and with the files that they include."""
