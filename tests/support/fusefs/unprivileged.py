"""Code that runs as a user without rights: as ``nobody`` if the tests run as root, else as the present user."""

import os
import subprocess
import sys

__all__ = ["NOBODY", "run_unprivileged"]

_ID = 65534
# The one capability lets it read this checkout in any place; it allows no mount and no write.
_READS_ALL = ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
_AS_NOBODY = ["setpriv", f"--reuid={_ID}", f"--regid={_ID}", "--clear-groups", *_READS_ALL]
NOBODY = _AS_NOBODY if os.getuid() == 0 else []
"""Words before a command; empty if the tests themselves have no rights."""


def run_unprivileged(code, folder, while_up):
    """Run ``code`` with ``folder``; it says ``up``, waits for a line and says ``down``. Return its log."""
    process = subprocess.Popen(
        [*NOBODY, sys.executable, "-c", code, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "up\n", process.communicate()[1]
    while_up()
    said, log = process.communicate("end\n", timeout=60)
    assert said == "down\n", log
    return log
