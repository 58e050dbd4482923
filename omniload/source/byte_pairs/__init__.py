"""Vocabularies of byte pairs: their files, and those of tiktoken with its encodings."""
