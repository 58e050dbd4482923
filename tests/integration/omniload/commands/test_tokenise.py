"""``omniload mix tokenise``: a run uses the tokens that it makes; if it is killed, the next command continues."""

import errno
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from multiprocessing import resource_tracker
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

import omniload
from omniload.base.errors import DefectError, UnavailableError
from omniload.commands.corpus.tokenise import serve, tokenise
from omniload.commands.opening import open_spec
from omniload.source.record_source import RecordSource
from omniload.source.token_cache.ahead import Stretch
from omniload.source.transforms.pipeline import Pipeline

LIMIT_S = 60
MIX = """
version: 2
seed: 3
tokenizer: {type: bytes}
sources:
  lines: {type: jsonl, path: lines.jsonl, unit: 2KiB, splits: {held: 0.2}}
  rows: {type: parquet, path: "rows-*.parquet", text: text}
  ids: {type: parquet, path: ids.parquet, tokens: ids}
mix: {stages: [{from_step: 0, weights: {lines: 1, rows: 1, ids: 1}}]}
pack: {length: 256}
batch: {tokens: 1024, micro_tokens: 512}
loader: {token_cache: {path: tokens}}
"""


@pytest.fixture
def _own_program():
    """Start the helper process that Python's processes share, which stays."""
    resource_tracker.ensure_running()


pytestmark = pytest.mark.usefixtures("_own_program", "leaves_nothing_behind")


@pytest.fixture
def file(tmp_path):
    texts = [f"document {i} " * (1 + i % 9) for i in range(300)]
    (tmp_path / "lines.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    for shard in range(2):
        table = pa.table({"text": texts[shard::2]})
        pq.write_table(table, tmp_path / f"rows-{shard}.parquet", row_group_size=20)
    pq.write_table(pa.table({"ids": [[1, 2, 3]] * 50}), tmp_path / "ids.parquet")
    (tmp_path / "mix.yaml").write_text(MIX)
    return tmp_path / "mix.yaml"


def made(file, *options):
    """Run the verb; return its line about each kept source."""
    shown = CliRunner().invoke(tokenise, [str(file), "--workers", "2", "--json", *options])
    assert shown.exit_code == 0, (shown.output, shown.exception)
    return {each["source"]: each for each in json.loads(shown.stdout)["sources"]}


def refused(file, *options):
    shown = CliRunner().invoke(tokenise, [str(file), "--workers", "2", *options])
    assert shown.exit_code
    return (
        str(shown.exception)
        if isinstance(shown.exception, omniload.OmniloadError)
        else shown.output
    )


def steps_of(file, **arguments):
    with omniload.open(
        file, arrays="numpy", runtime="local", rank=0, world_size=1, **arguments
    ) as loader:
        return [batch.tokens for batch, _ in zip(loader, range(30), strict=False)]


def entries(file):
    return {path for path in (file.parent / "tokens").rglob("*") if path.is_file()}


def left_of(found):
    return {
        name: each["units"] - each["kept_before"] - each["made"] for name, each in found.items()
    }


def test_a_run_takes_all_its_tokens_from_what_was_made_and_has_the_same_steps(file, monkeypatch):
    without = file.with_name("without.yaml")
    without.write_text(MIX.partition("loader:")[0])
    expected, held = steps_of(without), steps_of(without, split="held")

    found, of_held = made(file), made(file, "--split", "held")

    assert (found["lines"]["made"], found["rows"]["made"]) == (found["lines"]["units"], 16)
    assert found["ids"]["why"] == "it holds token ids"
    assert found["rows"]["tokens"] == sum(
        len(f"document {i} ") * (1 + i % 9) + 1 for i in range(300)
    )
    assert of_held.keys() == {"lines"}
    monkeypatch.setattr(Pipeline, "encoded", None)
    assert np.array_equal(np.stack(steps_of(file)), np.stack(expected))
    assert np.array_equal(np.stack(steps_of(file, split="held")), np.stack(held))


def test_what_is_kept_is_passed_over_and_what_was_lost_is_made_anew(file):
    first, before = made(file), entries(file)
    lost = sorted(before)[::5]
    for path in lost:
        path.unlink()

    again, last = made(file), made(file)

    assert sum(each["made"] for each in first.values()) == len(before)
    assert sum(each["made"] for each in again.values()) == len(lost)
    assert sum(each["made"] for each in last.values()) == 0
    assert {left for found in (first, again, last) for left in left_of(found).values()} == {0}
    assert entries(file) == before


def test_what_is_damaged_is_found_and_made_anew_where_that_is_asked_for(file):
    """A unit counted as kept for its name alone, and each run made its tokens anew."""
    count = sum(each["made"] for each in made(file).values())
    sound = {path: path.read_bytes() for path in entries(file)}
    empty, cut, other = sorted(sound)[::5][:3]
    empty.write_bytes(b"")
    cut.write_bytes(sound[cut][:-40])
    other.write_bytes(sound[other][:-40] + bytes(40))

    shares = [made(file, "--verify", "--share", f"{number}/2") for number in (1, 2)]

    assert sum(each["made"] for share in shares for each in share.values()) == 3
    assert {left for share in shares for left in left_of(share).values()} == {0}
    assert {path: path.read_bytes() for path in entries(file)} == sound
    again = made(file, "--verify")
    assert sum(each["kept_before"] for each in again.values()) == count
    assert sum(each["made"] for each in again.values()) == 0


def test_hosts_make_a_share_each(file):
    shares = [made(file, "--share", f"{number}/3") for number in (3, 1, 2)]

    counts = [sum(each["made"] for each in share.values()) for share in shares]
    assert sum(counts) == len(entries(file))
    assert min(counts) > len(entries(file)) // 6
    assert set(left_of(shares[-1]).values()) == {0}


@pytest.mark.parametrize("share", ["0/3", "4/3", "3", "a/b", "-1/2"])
def test_a_share_that_there_is_not_is_refused(file, share):
    assert "is no share; give one such as 3/16" in refused(file, f"--share={share}")


def test_a_mix_without_a_cache_is_told_what_to_say(file):
    file.write_text(MIX.partition("loader:")[0])

    assert "names no token cache to fill; say loader: {token_cache: {path: FOLDER}}" in refused(
        file
    )


def test_a_folder_that_is_full_ends_it_with_what_is_kept_in_place(file):
    with (file.parent / "lines.jsonl").open("a") as lines:
        lines.writelines(json.dumps({"text": f"{i} " * 10_000}) + "\n" for i in range(30))
    file.write_text(MIX.replace("path: tokens}", "path: tokens, limit: 1MiB}"))

    said = refused(file)

    assert "loader.token_cache: takes no more, at unit" in said
    assert (
        0 < sum(path.stat().st_size for path in entries(file)) <= 1.1 * (1 << 20)
    )  # several writers exceed it slightly
    file.write_text(MIX)
    assert set(left_of(made(file)).values()) == {0}


@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_a_bad_record_is_told_as_in_a_run(file, policy):
    with (file.parent / "lines.jsonl").open("a") as lines:
        lines.write('{"text": 1}\n')
    if policy == "raise":
        said = refused(file)
        assert "lines.jsonl:301: 'text' is 1, not a string" in said
        return
    file.write_text(MIX.replace("splits:", "on_error: {policy: skip}, splits:"))

    assert set(left_of(made(file)).values()) == {0}


class Command:
    """``omniload mix tokenise`` of many documents in a terminal, as the leader of a process group."""

    def __init__(self, file):
        self.process = subprocess.Popen(
            [Path(sys.executable).with_name("omniload"), "mix", "tokenise", file, "--workers", "2"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )

    def workers(self):
        """Wait until it has started its processes."""
        until_s = time.monotonic() + LIMIT_S
        while True:
            assert time.monotonic() < until_s, self.process.poll()
            children = psutil.Process(self.process.pid).children()
            found = [each for each in children if "spawn_main" in " ".join(each.cmdline())]
            if len(found) == 2:
                return found

    def end(self):
        _, said = self.process.communicate(timeout=LIMIT_S)
        return self.process.returncode, said.decode()


def test_a_process_that_is_killed_is_told_and_the_next_command_goes_on(file):
    command = Command(file)

    command.workers()[0].kill()

    code, said = command.end()
    assert code == 3
    assert "has ended (exit -9), most often for want of memory" in said
    assert "Traceback" not in said
    assert set(left_of(made(file)).values()) == {0}


@pytest.mark.parametrize(
    ("raised", "kind", "said"),
    [
        (KeyError("of ours"), DefectError, "a fault of omniload itself in the tokens of unit"),
        (OSError(errno.ENOSPC, "No space left"), UnavailableError, "free space there"),
    ],
)
def test_what_fails_in_a_process_is_told_as_what_it_is(file, monkeypatch, raised, kind, said):
    def fails(*_):
        raise raised

    monkeypatch.setattr(RecordSource, "make_tokens", fails)
    module = sys.modules["omniload.commands.corpus.tokenise"]
    for name in ("end_with", "spare_host", "keep_freed"):  # this process must continue
        monkeypatch.setattr(module, name, lambda *_: None)
    ours, its = multiprocessing.Pipe()
    ours.send(Stretch(source="lines", units=(0, 1)))

    serve(open_spec(file, dp=1, cache_dir=None), its, 0)

    found = ours.recv()
    assert type(found) is kind
    assert said in str(found)
    assert not ours.poll()


def test_its_processes_are_deaf_to_ctrl_c_from_their_first_moment(file):
    command = Command(file)

    said = [Path(f"/proc/{each.pid}/status").read_text() for each in command.workers()]
    command.process.kill()
    command.end()

    blocked = [int(each.partition("SigBlk:")[2].split()[0], 16) for each in said]
    assert [signals >> (signal.SIGINT - 1) & 1 for signals in blocked] == [1, 1]


def test_ctrl_c_ends_it_with_all_its_processes(file):
    command = Command(file)
    workers = command.workers()

    os.killpg(command.process.pid, signal.SIGINT)

    code, said = command.end()
    assert code in {130, -signal.SIGINT, 1}, said
    assert "Traceback" not in said
    assert psutil.wait_procs(workers, LIMIT_S)[1] == []
    assert set(left_of(made(file)).values()) == {0}


def test_its_processes_end_with_it(file):
    command = Command(file)
    workers = command.workers()

    command.process.kill()

    command.end()
    assert psutil.wait_procs(workers, LIMIT_S)[1] == []
