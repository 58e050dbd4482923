"""What a report of faults says of waits: longest of each fault, with and without the stops of the machine."""

import errno
import random
import struct

import pytest
from click.testing import CliRunner
from fsspec.core import url_to_fs

from benchmarks.faults import full_disk
from benchmarks.faults.chaos import main, mix_for, put_sources
from benchmarks.faults.full_disk import full_for
from benchmarks.faults.machine_stops import seconds_within, spans_in
from benchmarks.faults.ordeal import Ordeal, Struck, Wait, table_of
from benchmarks.faults.striking import damage
from benchmarks.loaders.mixed_sources import MixedSources, build_sources
from tests.support.disks import a_tmpfs


@pytest.mark.parametrize(
    ("begin_s", "end_s", "seconds"),
    [(0.0, 1.0, 0.0), (0.0, 2.5, 0.5), (2.1, 2.9, 0.8), (2.5, 7.0, 1.5), (3.0, 6.0, 0.0)],
)
def test_the_part_of_a_time_in_which_the_machine_stood_still(begin_s, end_s, seconds):
    assert seconds_within([(2.0, 3.0), (6.0, 9.0)], begin_s, end_s) == pytest.approx(seconds)
    assert seconds_within([], begin_s, end_s) == 0.0


def test_a_stop_is_taken_off_the_wait_in_which_it_was_and_off_no_other():
    ordeal = Ordeal(
        digests=[1, 2, 3],
        start=[Wait(0.5, 0.0, 0.5)],
        calm=[Wait(0.001, 1.0, 1.001)],
        struck={
            "kill loader": [Struck([Wait(0.4, 2.0, 2.4), Wait(0.2, 3.0, 3.2)], 0.01, 0.05)],
            "stop shadow": [Struck([Wait(0.0, 4.0, 4.0)], *each) for each in ((0.2, 1), (0.4, 2))],
        },
    )

    (start, calm, killed, stopped) = table_of(ordeal, True, 1, [(2.05, 2.35), (5.0, 6.0)]).rows

    assert start == ("its start", "1", *["500"] * 6, "-", "-", "-")
    assert calm == ("nothing", *["1"] * 7, "-", "-", "-")
    # The step that stood still leaves 100 ms, and another one then waited longest.
    assert killed == ("kill loader", "1", *["400"] * 3, *["200"] * 3, "10", "50", "50")
    assert stopped == ("stop shadow", "2", *["0"] * 6, "400", "1500", "2000")


def test_a_step_that_comes_once_more_with_other_samples_is_told():
    ordeal = Ordeal(start=[Wait(0.0, 0.0, 0.0)], calm=[Wait(0.0, 0.0, 0.0)])
    for step, digest in enumerate((5, 6, 7)):
        ordeal.note(step, digest)

    ordeal.note(1, 6)
    assert ordeal.others == []
    ordeal.note(2, 8)

    assert (ordeal.digests, ordeal.others) == ([5, 6, 7], [2])


def test_spans_of_cores_that_stood_still_together_are_one(tmp_path):
    (tmp_path / "0").write_bytes(_bytes_of([(1.0, 2.0), (5.0, 5.5)]))
    (tmp_path / "1").write_bytes(_bytes_of([(1.5, 2.5), (4.0, 4.5)]))

    assert spans_in(tmp_path) == [(1.0, 2.5), (4.0, 4.5), (5.0, 5.5)]


def _bytes_of(spans):
    return b"".join(struct.pack("=dd", *span) for span in spans)


def test_sources_are_put_to_a_store_and_read_from_there(tmp_path):
    corpus = MixedSources(sources=2, shards=1, documents=20, group_rows=10)
    build_sources(tmp_path, corpus)
    url = f"memory://{tmp_path.name}"

    put_sources(tmp_path, corpus, f"{url}/")
    mix = mix_for(corpus, ranks=1, loaders=1, shadows=1, url=url)

    assert [source.path for source in mix.sources.values()] == [
        f"{url}/{name}/*.parquet" for name in corpus.names
    ]
    store, _ = url_to_fs(url)
    for name in corpus.names:
        (path,) = (tmp_path / name).iterdir()
        assert store.cat(f"/{tmp_path.name}/{name}/{path.name}") == path.read_bytes()


def test_a_disk_is_full_for_a_while_and_has_its_room_again(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    with a_tmpfs(disk, "64k"):
        with full_for(disk, 0.01) as has_room:
            assert has_room.wait(timeout=30)
            assert list(disk.iterdir()) == []
        with full_for(disk, 3600):
            with pytest.raises(OSError, match="No space left") as told:
                (disk / "other").write_bytes(b"x")
            assert told.value.errno == errno.ENOSPC
            (disk / "other").unlink()
        assert list(disk.iterdir()) == []


def test_a_large_disk_is_not_filled_up(tmp_path, monkeypatch):
    monkeypatch.setattr(full_disk, "_MOST_BYTES", 8192)

    with pytest.raises(OSError, match="has more than 8192 bytes"), full_for(tmp_path, 1.0):
        raise AssertionError("it is refused")

    assert list(tmp_path.iterdir()) == []


def test_a_disk_to_fill_has_to_be_named():
    result = CliRunner().invoke(main, ["--kind", "full", "--no-report"])

    assert result.exit_code == 2
    assert "--kind full needs --disk" in result.output


@pytest.mark.parametrize("seed", range(5))
def test_a_journal_is_torn_cut_or_has_another_bit(tmp_path, seed):
    (whole, torn, cut, flipped), content = (
        [tmp_path / name for name in ("whole", "torn-journal", "cut-journal", "flipped-journal")],
        b"a base\n" + b"".join(b'{"step":%d}\n' % step for step in range(20)),
    )
    for path in (whole, torn, cut, flipped):
        path.write_bytes(content)
        if path is not whole:
            damage(path, path.name, random.Random(seed))

    last = content.splitlines(keepends=True)[-1]
    written, left = torn.read_bytes(), cut.read_bytes()
    assert written.startswith(content)
    assert last.startswith(written.removeprefix(content))
    assert len(content) < len(written) < len(content) + len(last)
    assert content.startswith(left)
    assert len(content) - len(last) < len(left) < len(content)
    bits = [(a ^ b).bit_count() for a, b in zip(content, flipped.read_bytes(), strict=True)]
    assert sorted(bits)[-2:] == [0, 1]


def told(*words, script=""):
    return CliRunner().invoke(main, [*words, "--no-report"], input=script).output


def test_a_script_is_refused_by_its_line_before_anything_begins():
    assert "--script: line 2: '40 loader-0 poke': 'poke' is no kind" in told(
        "--script", "-", script="20 loader-0 kill\n40 loader-0 poke\n"
    )


def test_what_a_script_strikes_has_to_be_there():
    assert "--kind full needs --disk" in told("--script", "-", script="20 - full\n")
    assert "--kind delay has a store of its own; leave --sources-at out" in told(
        "--kind", "delay", "--sources-at", "memory://store"
    )


def test_hosts_of_a_network_see_no_small_disk(tmp_path):
    assert "--kind network has hosts that see no --disk; leave one out" in told(
        "--kind", "network", "--disk", str(tmp_path)
    )
