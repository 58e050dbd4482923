"""A process may be forked while a loader is open, as workers of torch's ``DataLoader`` are.

If another thread is about to import a module at that moment, the module stays locked in the forked process for ever.
An import of it there, as each worker of torch imports ``numpy.random``, never returns.
"""

import json
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

LIMIT_S = 120
SCRIPT = """
import json, sys, threading

import yaml

import omniload

late = []


class Noted:
    def find_spec(self, name, path=None, target=None):
        if opened and threading.current_thread() is not threading.main_thread():
            late.append(name)


opened = False
sys.meta_path.insert(0, Noted())
mix = "mix.yaml" if sys.argv[1] == "file" else yaml.safe_load(open("mix.yaml"))
with omniload.open(mix, steps=3, arrays="numpy") as loader:
    opened = True
    for _ in loader:
        pass
print(json.dumps(late))
"""
MIX = """
version: 1
seed: 1
tokenizer: {type: bytes}
sources: {web: SOURCE}
mix: {stages: [{weights: {web: 1}}]}
pack: {length: 64}
batch: {tokens: 256, micro_tokens: 256}
"""

SOURCES = {
    "text": "{type: jsonl, path: web.jsonl}",
    "texts of a table": "{type: parquet, path: web.parquet, text: text}",
    "images": "{type: parquet, path: web.parquet, text: text, images: images, "
    "transforms: [{type: images, patch: 4, placeholder: 7}]}",
}


PANDAS = """
__version__ = "2.2.3"


class Kind(type):
    def __getattr__(cls, name):
        setattr(cls, name, Kind(name, (), {}))  # Arrow holds what it finds by its address alone
        return vars(cls)[name]


def __getattr__(name):
    return globals().setdefault(name, Kind(name, (), {}))
"""
"""A fake pandas, as far as Arrow looks at it.

Arrow loads an installed pandas when it first makes a scalar or an array.
"""


@pytest.mark.parametrize("given_as", ["file", "mapping"])  # a mapping has no index
@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_no_thread_of_an_open_plane_imports_what_a_forked_worker_may_need(
    source, given_as, tmp_path
):
    (tmp_path / "pandas.py").write_text(PANDAS, encoding="utf-8")
    (tmp_path / "mix.yaml").write_text(MIX.replace("SOURCE", source), encoding="utf-8")
    lines = [json.dumps({"text": f"document {i} " * 5}) + "\n" for i in range(50)]
    (tmp_path / "web.jsonl").write_text("".join(lines), encoding="utf-8")
    Image.new("RGB", (16, 12), (200, 90, 0)).save(tmp_path / "one.gif")
    rows = [{"text": f"image {i}", "images": (tmp_path / "one.gif").read_bytes()} for i in range(9)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "web.parquet")

    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, given_as],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=True,
    )

    assert json.loads(done.stdout) == []
