"""Ray, imported with the environment that a private cluster needs.

Ray reads its authentication mode once, when it is imported, so the rest of the project
takes ``ray`` from here. Child processes inherit what is set: all processes of a job
share one token, and no other process of the machine can join.
"""

import os
import secrets
import sys

if (
    "ray" not in sys.modules
):  # else the program's own settings hold, and changing them now would lock it out
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# Silences a warning about a default that will change; the data plane asks for no GPUs.
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
# How long Ray's head may take to say its port; its own 30 s are too few where cores are scarce.
os.environ.setdefault("RAY_gcs_server_port_wait_time_s", "120")

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

__all__ = ["RayActorError", "RayError", "RayTaskError", "ray"]
