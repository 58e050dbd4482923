"""What a token cache does to a run when it is killed in mid-write, full, gone, or refuses: nothing."""

import errno
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from omniload.base.clock import FakeClock
from omniload.base.errors import ConfigError, UnavailableError
from omniload.base.ragged import Ragged
from omniload.mix.runtime import TokenCacheConfig
from omniload.mix.schema.tokenizers import ByteTokenizer
from omniload.mix.sources import JsonlSource
from omniload.source.record_source import open_source
from omniload.source.spec import SourceSpec
from omniload.source.token_cache.cache import TokenCache
from omniload.source.token_cache.entry import EncodedUnit, Seal, packed, unpacked
from omniload.source.token_cache.opening import open_token_cache
from omniload.source.token_cache.places import LocalPlace

BYTES = ByteTokenizer(type="bytes")
CONFIG = JsonlSource(type="jsonl", path="*.jsonl", unit=4096)
RECORDS = 2000
ENDS = np.array([0, 3])

KILLED = """
import os, signal, sys
from pathlib import Path
from omniload.base import writing
from tests.faults.omniload.test_source_token_cache_faults import a_source

folder, left = Path(sys.argv[1]), int(sys.argv[2])
really = os.fdopen


class Dying:
    def __init__(self, file):
        self.file = file

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.file.close()

    def write(self, data):
        global left
        left -= 1
        if left:
            return self.file.write(data)
        self.file.write(data[: len(data) // 2])
        self.file.flush()
        os.kill(os.getpid(), signal.SIGKILL)


writing.os.fdopen = lambda descriptor, mode: Dying(really(descriptor, mode))
source = a_source(folder, "cache")
source.read(0, source.positions_per_epoch)
"""


def a_source(folder, cache, clock=None, **said):
    tokens = None
    if cache:
        config = TokenCacheConfig(path=cache, **said)
        tokens = open_token_cache(config, BYTES, Path(folder), clock)
    return open_source(
        SourceSpec("web", CONFIG, seed=1, tokenizer=BYTES, base_dir=Path(folder)),
        token_cache=tokens,
    )


def read_whole(source):
    tokens = source.read(0, source.positions_per_epoch).tokens
    return tokens.values_V.tobytes(), tokens.offsets.tobytes()


@pytest.fixture
def folder(tmp_path):
    lines = [json.dumps({"text": f"record {i} " * 3}) for i in range(RECORDS)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    return tmp_path


def entries(folder):
    return [path for path in (folder / "cache").rglob("*") if path.is_file()]


@pytest.mark.scripts_start_warm
@pytest.mark.parametrize("writes", [1, 3, 7])
def test_a_writer_killed_in_the_middle_of_an_entry_leaves_none_that_is_torn(folder, writes):
    ended = subprocess.run(
        [sys.executable, "-c", KILLED, str(folder), str(writes)], timeout=120, check=False
    )

    assert ended.returncode == -signal.SIGKILL
    found = entries(folder)
    assert sum(path.name[0] == "." for path in found) == 1  # the half that it left
    assert len(found) == writes
    assert read_whole(a_source(folder, "cache")) == read_whole(a_source(folder, None))


def test_a_cache_that_cannot_be_written_costs_a_line_in_the_log(folder, caplog):
    (folder / "cache").write_text("a file where the folder should be")

    assert read_whole(a_source(folder, "cache")) == read_whole(a_source(folder, None))
    assert caplog.text.count("the run continues without it") == 1


def test_a_full_cache_is_read_on_and_filled_again_once_there_is_room(folder, caplog, monkeypatch):
    clock, place = FakeClock(), LocalPlace(folder / "cache")
    cache = TokenCache(place, Seal(), "", clock)
    yes, tokens = np.ones(1, bool), Ragged(values_V=np.arange(3, dtype=np.int32), offsets=ENDS)
    unit = EncodedUnit(
        tokens=tokens, bad_B=~yes, kept_B=yes, given_B=yes, made_B=yes, spoilt_B=~yes
    )
    assert cache.put("folder/kept", unit)

    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr("omniload.source.token_cache.places.write_whole", full)
        assert [cache.put(f"folder/{n}", unit) for n in range(3)] == [False] * 3
    assert cache.get("folder/kept", 1) is not None
    assert not cache.put("folder/3", unit), "it is asked once a minute"
    clock.advance(61)
    assert cache.put("folder/3", unit)
    (told,) = caplog.messages
    assert f"{folder / 'cache'}: No space left on device, " in told
    assert "are free there; " in told
    assert told.endswith("free space")


class Failing(LocalPlace):
    """A place that does not answer, and counts how often it is asked."""

    asked = 0

    def read(self, path):
        self.asked += 1
        raise UnavailableError(f"{path}: no answer")


def test_a_store_that_does_not_answer_is_left_alone_for_a_minute(tmp_path):
    clock, place = FakeClock(), Failing(tmp_path)
    cache = TokenCache(place, Seal(), "", clock)

    assert [cache.get("folder/unit", 1) for _ in range(5)] == [None] * 5
    assert place.asked == 1
    clock.advance(61)
    assert cache.get("folder/unit", 1) is None
    assert place.asked == 2


def test_an_entry_of_fewer_records_than_its_unit_is_made_anew(folder, caplog):
    whole = read_whole(a_source(folder, "cache"))
    for entry in entries(folder):
        name = f"{entry.parent.name}/{entry.name}"
        held = unpacked(name, entry.read_bytes(), Seal())
        rows = np.arange(len(held.tokens) - 1)
        flags = ("bad_B", "kept_B", "given_B", "made_B", "spoilt_B")
        shorter = {flag: getattr(held, flag)[rows] for flag in flags}
        short = replace(held, tokens=held.tokens.take(rows), **shorter)
        entry.write_bytes(packed(name, short, Seal()))

    assert read_whole(a_source(folder, "cache")) == whole
    assert caplog.text.count("made anew") == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_entries_that_another_user_planted_are_not_believed_and_not_needed(folder, caplog):
    read_whole(a_source(folder, "cache"))
    for path in entries(folder):
        os.chown(path, 12345, -1)

    assert read_whole(a_source(folder, "cache")) == read_whole(a_source(folder, None))
    assert caplog.text.count("belongs to user 12345") == 1
    assert {path.stat().st_uid for path in entries(folder)} == {os.geteuid()}  # made anew


def test_those_who_have_the_key_share_entries_and_others_do_not(folder):
    for name in ("one", "two"):
        (folder / name).write_text(f"key {name} " * 8)
        (folder / name).chmod(0o600)
    read_whole(a_source(folder, "cache", key_file="one"))
    of_one = len(entries(folder))

    read_whole(a_source(folder, "cache", key_file="one"))
    assert len(entries(folder)) == of_one
    read_whole(a_source(folder, "cache", key_file="two"))
    assert len(entries(folder)) == 2 * of_one


@pytest.mark.parametrize(
    ("content", "mode", "said"),
    [("short", 0o600, "holds 5 bytes"), ("x" * 64, 0o644, "chmod o-r"), (None, 0, "no such file")],
)
def test_a_key_that_protects_nothing_is_refused(folder, content, mode, said):
    if content is not None:
        (folder / "key").write_text(content)
        (folder / "key").chmod(mode)

    with pytest.raises(ConfigError, match=said):
        a_source(folder, "cache", key_file="key")


@pytest.mark.scripts_start_warm
def test_two_processes_that_fill_a_cache_at_once_leave_it_whole(folder):
    code = (
        "import sys; from pathlib import Path\n"
        "from tests.faults.omniload.test_source_token_cache_faults import a_source\n"
        "s = a_source(Path(sys.argv[1]), 'cache'); s.read(0, s.positions_per_epoch)\n"
    )
    both = [subprocess.Popen([sys.executable, "-c", code, str(folder)]) for _ in range(2)]

    assert [process.wait(timeout=120) for process in both] == [0, 0]
    assert all(path.name[0] != "." for path in entries(folder))
    assert read_whole(a_source(folder, "cache")) == read_whole(a_source(folder, None))
