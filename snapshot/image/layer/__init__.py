"""Indexes of the files and blocks of layers of any format."""
