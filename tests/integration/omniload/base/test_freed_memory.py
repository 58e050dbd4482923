"""A process that keeps what it frees makes the next arrays where the last ones were."""

import platform
import subprocess
import sys

import pytest

PAGES_OF_20_READS = """
import resource, sys
from omniload.base.linux.freed_memory import keep_freed

def read():
    return [bytearray(100_000) for _ in range(40)]

def pages():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

if sys.argv[1] == "kept":
    keep_freed()
read()
before = pages()
for _ in range(20):
    read()
print(pages() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="what glibc does by itself")
def test_arrays_of_a_read_lie_on_the_pages_of_those_before_them_where_freed_memory_is_kept():
    new = {
        kind: int(
            subprocess.run(
                [sys.executable, "-c", PAGES_OF_20_READS, kind],
                capture_output=True,
                text=True,
                check=True,
            ).stdout
        )
        for kind in ("kept", "given back")
    }

    assert new["kept"] * 10 < new["given back"]
