"""What the program or its user had set for Ray, read before ``environment`` sets what a Ray of our own needs."""

import os

__all__ = ["AUTH_MODE", "AUTH_TOKEN"]

AUTH_MODE, AUTH_TOKEN = (os.environ.get(name) for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN"))
