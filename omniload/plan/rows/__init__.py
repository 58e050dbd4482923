"""Rows of a mix whose sources are packed in ways of their own."""
