"""A process that is forked while a thread of its parent reads the head of an array."""

import subprocess
import sys

LIMIT_S = 60
"""Limit for a process that starts and forks; a process that waits for a missing thread would wait for ever."""
FORK = """
import os, threading
from io import BytesIO
import numpy as np
from omniload.source.parsing.arrays.npy import npy_array

np.save(head := BytesIO(), np.arange(3))
parse, inside, go_on = np.lib.format.read_array_header_1_0, threading.Event(), threading.Event()

def held(*args, **options):
    inside.set()
    go_on.wait()
    return parse(*args, **options)

np.lib.format.read_array_header_1_0 = held
threading.Thread(target=npy_array, args=("a", head.getvalue())).start()
inside.wait()
# What is registered later is called before: the thread may go on only once the process is about to fork.
os.register_at_fork(before=go_on.set)
if (copy := os.fork()) == 0:
    npy_array("a", head.getvalue())
    os._exit(0)
assert os.waitpid(copy, 0)[1] == 0
"""


def test_a_process_that_is_forked_meanwhile_reads_arrays_too():
    subprocess.run([sys.executable, "-W", "ignore", "-c", FORK], timeout=LIMIT_S, check=True)
