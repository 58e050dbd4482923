"""A process that keeps freed memory puts the next arrays in the place of the last ones."""

import os
import platform
import subprocess
import sys

import pytest

PAGES_OF_20_READS = """
import omniload, resource, sys
from omniload.base.linux.freed_memory import keep_freed

def read():
    return [bytearray(100_000) for _ in range(40)]

def pages():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

if sys.argv[1] == "kept":
    keep_freed()
elif sys.argv[1] != "given back":
    omniload.open(sys.argv[1], steps=1).close()
read()
before = pages()
for _ in range(20):
    read()
print(pages() - before)
"""


def pages_of_reads(kind, **environment):
    """Return the number of new pages of 20 reads, in a process that keeps freed memory or one that does not."""
    usual = {name: value for name, value in os.environ.items() if "MALLOC" not in name}
    read = subprocess.run(
        [sys.executable, "-c", PAGES_OF_20_READS, kind],
        capture_output=True,
        text=True,
        check=True,
        env=usual | environment,
    )
    return int(read.stdout)


MIX = """
version: 1
seed: 1
tokenizer: {type: bytes}
sources: {texts: {type: jsonl, path: texts.jsonl}}
mix: {stages: [{from_step: 0, weights: {texts: 1}}]}
pack: {length: 8}
batch: {tokens: 8, micro_tokens: 8}
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="what glibc does by itself")
@pytest.mark.parametrize("kept_by", ["a loader's process", "a local plane"])
def test_arrays_of_a_read_lie_on_the_pages_of_those_before_them_where_freed_memory_is_kept(
    tmp_path, kept_by
):
    (tmp_path / "texts.jsonl").write_text('{"text": "some text"}\n' * 9, encoding="utf-8")
    (tmp_path / "mix.yaml").write_text(MIX, encoding="utf-8")
    keeps = "kept" if kept_by == "a loader's process" else str(tmp_path / "mix.yaml")

    assert pages_of_reads(keeps) * 10 < pages_of_reads("given back")


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="what glibc is told")
def test_what_the_environment_tells_the_c_library_stands():
    told = {"MALLOC_TRIM_THRESHOLD_": "131072"}

    assert pages_of_reads("kept", **told) > 10 * pages_of_reads("kept")
