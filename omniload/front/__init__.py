"""The front room: what ``import omniload`` offers, and nothing that a user must know besides."""
