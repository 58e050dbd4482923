"""Stores behind a client library: its calls under deadlines, its errors translated, its files replaced."""
