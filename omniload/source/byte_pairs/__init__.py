"""Vocabularies of byte pairs: their files, and tiktoken's files with its encodings."""
