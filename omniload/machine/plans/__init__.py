"""Steps that are planned: drawn ahead of the ranks, kept until all have them, and taken back where none has."""
