"""Hostile or mistaken input at the command line: told in a line or two, with an exit code that says what to do."""

import os
import subprocess
import sys
import tarfile

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from omniload.base import cli

TOLD = {2, 3, 4, 5}
MOST_LINES = 12
PROGRAM = (sys.executable, "-c", "from omniload.base.cli import main; main()")

pytestmark = pytest.mark.timeout(180)  # a hang is the fault that is looked for


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Small sound sources, which the cases spoil one at a time."""
    folder = tmp_path_factory.mktemp("corpus")
    lines = b"".join(orjson.dumps({"text": f"line {i} " * 9, "id": i}) + b"\n" for i in range(50))
    (folder / "web.jsonl").write_bytes(lines)
    (folder / "a.txt").write_text("some words\n" * 20)
    table = pa.table({"tokens": [[1, 2, 3]] * 9, "text": ["x"] * 9})
    pq.write_table(table, folder / "ids.parquet")
    (folder / "bad.jsonl").write_bytes(b'{"text": 5}\n' * 3)
    (folder / "late.jsonl").write_bytes(lines + b"bad\n")
    (folder / "latin.txt").write_bytes(b"caf\xe9\n" * 9)
    (folder / "empty.jsonl").write_bytes(b"")
    (folder / "notparquet.parquet").write_bytes(b"PAR1" + b"\0" * 99)
    (folder / "wrong.json").write_bytes(b"{}")
    (folder / "notes.jsonl.gz").write_bytes(b"no gzip")
    (folder / "deep.jsonl").write_bytes(b"[" * 100_000 + b"\n")
    with tarfile.open(folder / "docs.tar", "w") as tar:
        tar.add(folder / "a.txt", "a.txt")
    for name in ("_SUCCESS", "x.tmp", ".hidden", "part-0.jsonl"):
        (folder / "spark").mkdir(exist_ok=True)
        (folder / "spark" / name).write_bytes(lines)
    os.mkfifo(folder / "pipe")
    (folder / "folder").mkdir()
    (folder / "file").touch()
    (folder / "circle").symlink_to("circle")
    (folder / "zeros.jsonl").touch()
    os.truncate(folder / "zeros.jsonl", 2 << 40)
    return folder


@pytest.fixture
def place(corpus, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(cli, "set_up_logging", lambda level: None)
    monkeypatch.chdir(corpus)
    return tmp_path


def a_mix(**changes):
    """Return a sound mix file with values at dotted keys replaced."""
    tree = {
        "version": 1,
        "seed": 1,
        "sources": {"web": {"type": "jsonl", "path": "web.jsonl"}},
        "mix": {"stages": [{"from_step": 0, "weights": {"web": 1}}]},
        "tokenizer": {"type": "bytes"},
        "pack": {"length": 32},
        "batch": {"tokens": 128, "micro_tokens": 64},
    }
    for key, value in changes.items():
        node, *path = tree, *key.split("__")
        for part in path[:-1]:
            node = node[int(part) if part.isdigit() else part]
        node[path[-1]] = value
    # In C where it is there: a value of megabytes takes half a second in Python, in every worker that collects.
    return yaml.dump(tree, Dumper=getattr(yaml, "CSafeDumper", yaml.SafeDumper), sort_keys=False)


def source(**fields):
    return a_mix(sources__web={"type": "jsonl", **fields})


def stage(**fields):
    return a_mix(mix__stages=[{"from_step": 0, "weights": {"web": 1}, **fields}])


NINE = range(9)
BOMB = "a: &a0 [x, x]\n" + "".join(
    f"b{i}: &a{i} [{', '.join(f'*a{i - 1}' for _ in NINE)}]\n" for i in range(1, 40)
)
MIX_TEXTS = {
    "an alias bomb": BOMB,
    "deep brackets": "[" * 200_000,
    "deep dashes": "- " * 100_000,
    "not YAML": "a: [",
    "an empty file": "",
    "a list": "- 1\n",
    "a scalar": "hello\n",
    "two documents": "a: 1\n---\nb: 2\n",
    "a tag that builds an object": "!!python/object/apply:os.system [true]\n",
    "a control character": "a: \x01\n",
    "a comment beyond the limit": "# " + "x" * (2 << 20),
    "50,000 unknown keys": "".join(f"k{i}: 1\n" for i in range(50_000)),
    "a truth as seed": a_mix(seed=True),
    "a seed of 5,000 digits": a_mix().replace("seed: 1", "seed: " + "9" * 5000),
    "a seed with a leading zero": a_mix().replace("seed: 1", "seed: 012"),
    "a date as seed": a_mix().replace("seed: 1", "seed: 2024-13-45"),
    "a sexagesimal weight": a_mix().replace("web: 1", "web: 1:30"),
    "a truth as weight": stage(weights={"web": True}),
    "a weight that is not a number": stage(weights={"web": float("nan")}),
    "a weight too large": stage(weights={"web": 1e300}),
    "rows of 1T": a_mix(pack__length="1T"),
    "a look-ahead of 10^12 rows": a_mix(pack__lookahead_rows=10**12),
    "a batch of 10^15 tokens": a_mix(batch__tokens=10**15),
    "a count of a million digits": a_mix(pack__length="9" * 900_000),
    "a unit of 1 EiB": source(path="web.jsonl", unit=1 << 60),
    "a step beyond any run": stage(from_step=10**18),
    "a yes for a number": a_mix().replace("length: 32", "length: yes"),
    "a missing file": source(path="none.jsonl"),
    "a folder as source": source(path="folder"),
    "a pipe as source": source(path="pipe"),
    "a device as source": source(path="/dev/zero"),
    "a circle of links as source": source(path="circle"),
    "an empty source": source(path="empty.jsonl"),
    "zeros of 2 TiB": source(path="zeros.jsonl"),
    "a path with a NUL": source(path="a\0b"),
    "a path of 10,000 bytes": source(path="a" * 10_000),
    "an empty path": source(path=""),
    "no path": source(path=[]),
    "below a file": source(path="file/x.jsonl"),
    "a glob that takes x.tmp": source(path="spark/*"),
    "a wrong key": source(path="web.jsonl", text="body"),
    "a text that is a number": source(path="bad.jsonl"),
    "only bad lines, skipped": source(path="bad.jsonl", on_error={"policy": "skip"}),
    "nested too deep": source(path="deep.jsonl"),
    "no gzip": source(path="notes.jsonl.gz"),
    "a tar as lines": source(path="docs.tar"),
    "Parquet as lines": source(path="ids.parquet"),
    "a tar as text": source(type="text", path="docs.tar"),
    "Parquet as text": source(type="text", path="ids.parquet"),
    "Latin-1 as text": source(type="text", path="latin.txt"),
    "lines as Parquet": source(type="parquet", path="web.jsonl", text="text"),
    "no Parquet": source(type="parquet", path="notparquet.parquet", text="text"),
    "no such column": source(type="parquet", path="ids.parquet", text="body"),
    "a column of another type": source(type="parquet", path="ids.parquet", tokens="text"),
    "an unknown protocol": source(path="nonesuch://x/y"),
    "a store that is not reached": source(path="hf://datasets/a/b/*.jsonl"),
    "one file of a store that is not reached": source(path="hf://datasets/a/b/c.jsonl"),
    "ftp that is not reached": source(path="ftp://127.0.0.1:9/x.jsonl"),
    "a URL that is none": source(path="http://[::1"),
    "a tokenizer that is not there": a_mix(tokenizer={"type": "bpe", "path": "none.json"}),
    "a tokenizer that is none": a_mix(tokenizer={"type": "bpe", "path": "wrong.json"}),
    "a tokenizer that is a pipe": a_mix(tokenizer={"type": "bpe", "path": "pipe"}),
    "a tokenizer that is a device": a_mix(tokenizer={"type": "bpe", "path": "/dev/zero"}),
    "a tokenizer that is a folder": a_mix(tokenizer={"type": "bpe", "path": "folder"}),
}


def outcome(capsys, *arguments):
    """Run a command in this process; return its exit code and what it said."""
    with pytest.raises(SystemExit) as ended:
        cli.main([str(argument) for argument in arguments])
    shown = capsys.readouterr()
    return ended.value.code, shown.err


def require_told(code, said):
    assert code in TOLD, said
    assert "Traceback" not in said
    assert "fault of omniload itself" not in said
    assert said.strip()


@pytest.mark.parametrize("text", MIX_TEXTS.values(), ids=MIX_TEXTS)
def test_a_hostile_mix_is_told_by_check(text, corpus, place, capsys):
    mix = corpus / "mix.yaml"
    mix.write_bytes(text.encode("utf-8", "surrogatepass"))

    code, said = outcome(capsys, "mix", "check", mix)

    require_told(code, said)
    assert len(said.splitlines()) <= 60
    assert "mix.yaml" in said or "sources.web" in said or "tokenizer" in said


MIX = "mix.yaml"
COMMANDS = {
    "check of a pipe": ("mix", "check", "pipe"),
    "check of a device": ("mix", "check", "/dev/zero"),
    "check of a folder": ("mix", "check", "folder"),
    "check of a missing file": ("mix", "check", "none.yaml"),
    "check of a circle": ("mix", "check", "circle"),
    "check of a name too long": ("mix", "check", "x" * 5000),
    "check of binary": ("mix", "check", "ids.parquet"),
    "check for no rank": ("mix", "check", MIX, "--dp", "0"),
    "check for too many ranks": ("mix", "check", MIX, "--dp", "99999"),
    "plan of a pipe": ("mix", "plan", "pipe", "--steps", "1"),
    "plan of no steps": ("mix", "plan", MIX, "--steps", "0"),
    "preview of a device": ("mix", "preview", "/dev/zero"),
    "bench of a pipe": ("mix", "bench", "pipe"),
    "sample into a file": ("mix", "sample", "file"),
    "sample below a file": ("mix", "sample", "file/x"),
    "sample into what cannot be written": ("mix", "sample", "/proc/none"),
    "images into a file": ("mix", "sample", "file", "--images"),
    "sample of a size that is none": ("mix", "sample", "new", "--size", "much"),
    "show of a file": ("mix", "show", "file"),
    "show of a device": ("mix", "show", "/dev/null"),
    "show of an empty folder": ("mix", "show", "folder"),
    "show of nothing": ("mix", "show", "none"),
    "audit of a file": ("mix", "audit", "file", "--step", "0"),
    "audit of an empty folder": ("mix", "audit", "folder", "--step", "0"),
    "train of a pipe": ("train", "run", "pipe"),
    "train of a device": ("train", "run", "/dev/zero"),
    "train of a mix": ("train", "run", MIX),
    "train of nothing": ("train", "run", "none.yaml"),
    "verify of nothing": ("train", "verify", "none"),
    "verify of an empty folder": ("train", "verify", "folder"),
    "verify of a pipe": ("train", "verify", "pipe"),
    "show of a run that is none": ("train", "show", "folder"),
    "show of a pipe as a run": ("train", "show", "pipe"),
    "a mount on nothing": ("fs", "mount", "file:///tmp", "none"),
    "a mount with settings from a pipe": ("fs", "mount", "file:///tmp", "folder", "-c", "pipe"),
    "a mount with an option that is none": (
        "fs",
        "mount",
        "file:///tmp",
        "folder",
        "-o",
        "colour=red",
    ),
    "a mount with a cache of 1 ZiB": (
        "fs",
        "mount",
        "file:///tmp",
        "folder",
        "-o",
        f"cache={1 << 70}",
    ),
    "stat of what is on no mount": ("fs", "stat", "file"),
    "stat of nothing": ("fs", "stat", "none"),
    "stat in no store": ("fs", "stat", "x", "--store", "nonesuch://x"),
    "verify of no store": ("fs", "verify", "nonesuch://x"),
    "export of nothing": ("fs", "export", "none", "out"),
    "umount of nothing": ("fs", "umount", "none"),
    "an image that is none": ("image", "show", "A//B"),
    "an image mounted with an option that is none": (
        "image",
        "mount",
        "a/b:c",
        "folder",
        "-o",
        "x=1",
    ),
    "an image mounted on nothing": ("image", "mount", "127.0.0.1:9/a:b", "none"),
    "an image of a registry that is not reached": ("image", "show", "127.0.0.1:9/a:b"),
    "a start-up report of nothing": ("image", "startup", "none"),
    "an environment of nothing": ("env", "show", "none", "-o", "none"),
    "a restore from nothing": ("env", "restore", "none", "-o", "none"),
    "no such noun": ("brew",),
    "no such verb": ("mix", "brew"),
    "no such option": ("mix", "check", "--colour"),
}


@pytest.mark.parametrize("arguments", COMMANDS.values(), ids=COMMANDS)
def test_a_mistaken_command_is_told(arguments, corpus, place, capsys):
    (corpus / MIX).write_text(a_mix())

    code, said = outcome(capsys, *arguments)

    require_told(code, said)
    assert len(said.splitlines()) <= MOST_LINES


RUN_DIRS = {
    "a file": "file",
    "below a file": "file/run",
    "what cannot be written": "/proc/none",
    "a circle of links": "circle",
    "a device": "/dev/null/run",
    "a name too long": "x" * 5000,
}


@pytest.mark.parametrize("run_dir", RUN_DIRS.values(), ids=RUN_DIRS)
def test_a_folder_that_no_run_can_use_is_told(run_dir, corpus, place, capsys):
    (corpus / MIX).write_text(a_mix())
    train = {"version": 1, "mix": MIX, "steps": 2, "run_dir": run_dir, "vocab_size": 300}
    (corpus / "train.yaml").write_text(yaml.safe_dump(train))

    code, said = outcome(capsys, "train", "run", "train.yaml")

    require_told(code, said)
    assert len(said.splitlines()) <= MOST_LINES


@pytest.mark.parametrize("path", ["pipe", "/dev/zero", "none.yaml"])
def test_a_process_of_its_own_answers_the_same(path, corpus, place):
    command = [*PROGRAM, "mix", "check", path]

    ended = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)

    require_told(ended.returncode, ended.stderr)


def test_a_name_that_is_no_utf8_is_shown_and_not_refused(corpus, place):
    command = [*PROGRAM, "mix", "check", b"caf\xe9.yaml"]

    ended = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)

    require_told(ended.returncode, ended.stderr)
