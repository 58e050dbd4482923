"""Lance data sets compared with the library's own reads: order, deletions, versions, further columns, refusals."""

import os
import re
import subprocess
import sys
from datetime import timedelta

import lance
import numpy as np
import pyarrow as pa
import pytest

from omniload.base.errors import ConfigError, IntegrityError, UnavailableError
from omniload.mix.columns import LOSS_MASK
from omniload.mix.config import ByteTokenizer
from omniload.mix.schema.records import ShuffleConfig
from omniload.mix.sources import LanceSource
from omniload.source.formats.opening import at_versions, open_format, shards_of
from omniload.source.record_source import open_source
from omniload.source.spec import SourceSpec
from omniload.source.token_cache.source_tokens import names_of_units
from tests.support.plane.sources.source_contract import expected_tokens, samples

STORED = ShuffleConfig(method="none")
N = 500
LIBRARY = "omniload.source.parsing.lance_dataset"


def a_table(first=0, count=N):
    numbers = np.arange(first, first + count)
    return pa.table(
        {
            "text": [f"row {i} é {'x' * (i % 37)}" for i in numbers],
            "ids": pa.array([[i, i + 1, 7][: 1 + i % 3] for i in numbers.tolist()]),
            "mask": pa.array([[0, 1, 1][: 1 + i % 3] for i in numbers.tolist()]),
            "lang": ["en" if i % 4 else "de" for i in numbers],
            "url": [f"https://a/{i}" for i in numbers],
        }
    )


@pytest.fixture
def root(tmp_path):
    lance.write_dataset(a_table(), tmp_path / "own.lance", max_rows_per_file=180)
    return tmp_path / "own.lance"


def a_config(**changes):
    said = {"path": "own.lance", "unit": 2_000, "shuffle": STORED, "text": "text", **changes}
    return LanceSource(type="lance", **said)


def opened(folder, **changes):
    config = a_config(**changes)
    tokenizer = ByteTokenizer(type="bytes") if config.holds_text else None
    return open_source(SourceSpec("web", config, seed=1, tokenizer=tokenizer, base_dir=folder))


def read(folder, **changes):
    source = opened(folder, **changes)
    return samples(source.read(0, source.positions_per_epoch))


def expected(dataset, **changes):
    return [expected_tokens(text) for text in dataset.to_table(**changes)["text"].to_pylist()]


def test_records_come_in_the_order_of_the_library_in_bounded_blocks(root):
    units = open_format(SourceSpec("web", a_config(), base_dir=root.parent)).format.units()

    assert read(root.parent) == expected(lance.dataset(root))
    assert units.rows_U.sum() == N
    assert units.rows_U.max() < 100
    assert units.shards_U.tolist() == sorted(units.shards_U.tolist())
    assert units.shards_U.max() == 2


def test_deleted_rows_are_no_records_and_those_after_them_close_up(root):
    dataset = lance.dataset(root)
    dataset.delete("lang = 'de' or url = 'https://a/181'")

    source = opened(root.parent)

    assert source.positions_per_epoch == lance.dataset(root).count_rows() < N
    assert samples(source.read(0, source.positions_per_epoch)) == expected(lance.dataset(root))
    assert samples(source.read(200, 260)) == expected(lance.dataset(root))[200:260]


def test_a_fragment_without_rows_gives_none(root):
    table = pa.table({"url": [f"https://a/{i}" for i in range(180, 360)]})
    dataset = lance.dataset(root)
    dataset.delete(f"url in ({', '.join(repr(u) for u in table['url'].to_pylist())})")

    assert read(root.parent) == expected(lance.dataset(root))


def test_rows_that_were_updated_added_and_compacted_are_read_as_the_library_does(root):
    dataset = lance.dataset(root)
    dataset.update({"text": "'new ' || url"}, where="lang = 'de'")
    dataset.insert(a_table(N, 40))
    before = read(root.parent)
    assert before == expected(lance.dataset(root))

    lance.dataset(root).optimize.compact_files(target_rows_per_fragment=1_000)

    assert read(root.parent) == expected(lance.dataset(root))
    assert sorted(read(root.parent)) == sorted(before)


def test_columns_of_several_files_of_a_fragment_are_read_together(root):
    dataset = lance.dataset(root)
    dataset.add_columns({"loud": "upper(text)"})

    assert read(root.parent, text="loud") == [
        expected_tokens(text.upper()) for text in a_table()["text"].to_pylist()
    ]


@pytest.mark.parametrize(
    "kind", [pa.list_(pa.int32()), pa.large_list(pa.int64()), pa.list_(pa.uint16(), 4)]
)
def test_token_ids_of_any_list_of_integers_are_read(tmp_path, kind):
    lists = [[i, i + 1, 2, 3] for i in range(50)]
    lance.write_dataset(pa.table({"ids": pa.array(lists, kind)}), tmp_path / "own.lance")

    assert read(tmp_path, text=None, tokens="ids") == [tuple(each) for each in lists]


def test_a_mask_goes_with_its_tokens(root):
    source = opened(root.parent, text=None, tokens="ids", columns={LOSS_MASK: "mask"})
    block = source.read(0, N)

    table = a_table()
    assert samples(block) == [tuple(ids) for ids in table["ids"].to_pylist()]
    mask = block.others[LOSS_MASK]
    assert [mask[i].tolist() for i in range(N)] == table["mask"].to_pylist()


def test_conditions_and_keys_are_of_columns(root):
    assert read(root.parent, where={"lang": "de"}) == expected(
        lance.dataset(root), filter="lang = 'de'"
    )
    lance.dataset(root).insert(a_table(0, 30))
    assert read(root.parent, dedupe="key", key="url") == expected(lance.dataset(root))[:N]


def test_a_null_is_a_bad_record_with_its_row(tmp_path):
    table = pa.table({"text": pa.array(["one", None, "three"])})
    lance.write_dataset(table, tmp_path / "own.lance")

    with pytest.raises(IntegrityError, match=r"own\.lance/data/.*row 1: column 'text' is null"):
        read(tmp_path)


def test_a_version_is_read_as_it_was_and_the_newest_without_one(root):
    first = expected(lance.dataset(root))
    lance.dataset(root).delete("lang = 'de'")
    lance.dataset(root).insert(a_table(N, 10))

    assert read(root.parent, version=1) == first
    assert read(root.parent, version=2) == expected(lance.dataset(root, version=2))
    assert read(root.parent) == read(root.parent, version=3) == expected(lance.dataset(root))
    with pytest.raises(ConfigError, match=r"own\.lance: has no version 9, or no longer; name one"):
        read(root.parent, version=9)


def test_another_version_is_another_content(root):
    before = opened(root.parent)
    lance.dataset(root).delete("url = 'https://a/7'")
    lance.dataset(root).insert(a_table(7, 1))
    after = opened(root.parent)

    assert after.positions_per_epoch == before.positions_per_epoch
    assert after.facts.shards_digest != before.facts.shards_digest
    assert after.facts.content_digest != before.facts.content_digest
    assert opened(root.parent, version=1).facts.content_digest == before.facts.content_digest


def test_what_is_committed_meanwhile_does_not_touch_a_source_that_is_open(root):
    source, before = opened(root.parent), expected(lance.dataset(root))

    lance.dataset(root).insert(a_table(N, 10))
    lance.dataset(root).delete("lang = 'de'")

    assert samples(source.read(0, N)) == before


def test_a_version_that_is_cleaned_up_under_way_is_told(root):
    source = opened(root.parent)
    lance.dataset(root).optimize.compact_files(target_rows_per_fragment=1_000)
    lance.dataset(root).cleanup_old_versions(older_than=timedelta(0), delete_unverified=True)

    with pytest.raises(IntegrityError, match=r"data/.*: gone since the source was opened"):
        source.read(0, N)


def test_a_version_of_the_same_data_is_the_same_to_a_run(root):
    def found():
        opening = open_format(SourceSpec("web", a_config(), base_dir=root.parent))
        names = names_of_units(opening.format.units(), opening.files, digests_all=False)
        return names, opened(root.parent).facts

    before = found()
    lance.dataset(root).create_scalar_index("lang", "BITMAP")
    indexed = found()
    lance.dataset(root).insert(a_table(N, 10))
    longer = found()

    assert lance.dataset(root).version == 3
    assert indexed == before
    assert longer[1] != before[1]
    # The tokens of the earlier fragments are found again.
    assert longer[0][: len(before[0])] == before[0]


def test_versions_are_named_as_a_run_begins_and_found_again_by_their_shards(root):
    config, folder = a_config(), root.parent
    digest = opened(folder).facts.shards_digest
    named = at_versions("web", config, base_dir=folder)
    lance.dataset(root).insert(a_table(N, 10))

    again = at_versions("web", config, base_dir=folder, shards_digest=digest)
    newest = at_versions("web", config, base_dir=folder, shards_digest="of no version")

    assert read(folder, version=named.version) == read(folder, version=again.version)
    assert read(folder, version=again.version) == read(folder, version=1)
    assert read(folder, version=newest.version) == read(folder, version=2)
    given = a_config(version=1)
    assert at_versions("web", given, base_dir=folder, shards_digest="of no version") is given


def test_several_data_sets_have_versions_in_their_order(root):
    for name in ("own-2.lance", "own-10.lance"):
        lance.write_dataset(a_table(0, 3), root.parent / name)
    lance.dataset(root.parent / "own-10.lance").insert(a_table(3, 1))
    folder, path = root.parent, "own-*.lance"

    assert len(read(folder, path=path)) == 7
    assert at_versions("web", a_config(path=path), base_dir=folder).version == (1, 2)
    assert len(read(folder, path=path, version=(1, 1))) == 6
    assert len(read(folder, path=["own-10.lance", "own-{2,10}.lance"])) == 7
    with pytest.raises(
        ConfigError, match=r"version names 1 versions, and path 2 data sets: .*own-2"
    ):
        read(folder, path=path, version=(1,))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"text": "body"}, r"own\.lance: has no column 'body'; it has text, ids"),
        ({"text": "ids"}, r"column 'ids' is list<.*>, not text"),
        ({"text": None, "tokens": "text"}, r"column 'text' is .*string, not token ids"),
        ({"path": "none.lance"}, r"'none.lance' matches no file of a Lance data set"),
        ({"path": "own.lance/data"}, r"matches no file of a Lance data set"),
        (
            {"path": "hdfs://node:8020/own.lance"},
            r"'hdfs://.*' is in a store that Lance does not read; it reads .*s3://.*: mount the store",
        ),
        ({"path": "{own"}, r"\{own"),
    ],
)
def test_what_is_no_such_data_set_is_refused(root, changes, said):
    with pytest.raises(ConfigError, match=said):
        read(root.parent, **changes)


def test_a_manifest_that_is_damaged_is_named(root):
    (manifest,) = (root / "_versions").glob("*.manifest")
    manifest.write_bytes(manifest.read_bytes()[:40])

    with pytest.raises(IntegrityError, match=r"own\.lance: cannot be opened as a Lance data set"):
        read(root.parent)


@pytest.mark.parametrize(
    ("gone", "said"),
    [
        ([3, 4], r"names 2 rows up to 4 as deleted where 1 of 180 are; it is damaged"),
        ([180], r"names 1 rows up to 180 as deleted"),
        (None, r"\.arrow: cannot be decoded"),
    ],
)
def test_a_damaged_list_of_deleted_rows_is_named_before_the_library_reads_it(root, gone, said):
    lance.dataset(root).delete("url = 'https://a/3'")
    (path,) = (root / "_deletions").glob("*.arrow")
    content = path.read_bytes()[:-20]
    if gone is not None:
        sink = pa.BufferOutputStream()
        table = pa.table({"row_id": pa.array(gone, pa.uint32())})
        with pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
        content = sink.getvalue()
    path.write_bytes(content)

    with pytest.raises(IntegrityError, match=rf"_deletions/.*{said}"):
        read(root.parent)


def test_rows_that_are_larger_than_they_look_as_stored_are_refused_before_all_are_decoded(
    tmp_path, monkeypatch
):
    lance.write_dataset(pa.table({"text": ["x" * 4_096] * 2_000}), tmp_path / "own.lance")
    source = opened(tmp_path, unit=1 << 30)
    monkeypatch.setattr(f"{LIBRARY}.MAX_UNIT_BYTES", 2 << 20)
    monkeypatch.setattr(f"{LIBRARY}._SLICE_BYTES", 1 << 19)

    with pytest.raises(ConfigError, match=r"rows 0 to [45]\d\d of fragment 0 hold 2.*lower unit"):
        source.read(0, 1)


def test_a_file_that_the_system_refuses_is_not_taken_for_damaged(root, monkeypatch):
    source = opened(root.parent)
    dataset = sys.modules[LIBRARY].lance.fragment.LanceFragment

    def refused(*args, **kwargs):
        raise OSError(
            "LanceError(IO): Unable to open file: Too many open files (os error 24), /a/b.rs:1:2"
        )

    monkeypatch.setattr(dataset, "take", refused)

    with pytest.raises(UnavailableError, match=r"Too many open files \(os error 24\); try again"):
        source.read(0, 10)


GET = "LanceError(IO): Generic N/A error: LanceError(IO): Generic S3 error: Error performing GET http://a:1/b/own"


@pytest.mark.parametrize(
    ("raised", "error", "told"),
    [
        (
            f"{GET} in 102ms, after 1 retries - HTTP error: error sending request, /a/b.rs:1:2",
            UnavailableError,
            r"cannot be read: .*error sending request; try again",
        ),
        (
            f"{GET} in 2ms - Server returned non-2xx status code: 503 Slow Down: <?xml?>\n<Error>",
            UnavailableError,
            r"503 Slow Down: <\?xml\?>; try again",
        ),
        (
            "LanceError(IO): Failed to get AWS credentials: ProviderError(no answer)",
            UnavailableError,
            "Failed to get AWS credentials.*; try again",
        ),
        (
            "LanceError(IO): The operation lacked the necessary privileges to complete for path own",
            UnavailableError,
            "lacked the necessary privileges.*; get the rights to it, and try again",
        ),
        (
            f"{GET} in 2ms - Server returned non-2xx status code: 416 Range Not Satisfiable: <Error>",
            IntegrityError,
            "416 Range Not Satisfiable.*; the file is cut short or corrupt",
        ),
    ],
)
def test_a_store_that_does_not_answer_lance_is_not_taken_for_a_damaged_file(
    root, monkeypatch, raised, error, told
):
    source = opened(root.parent)

    def refused(*args, **kwargs):
        raise OSError(raised)

    monkeypatch.setattr(sys.modules[LIBRARY].lance.fragment.LanceFragment, "take", refused)

    with pytest.raises(error, match=told):
        source.read(0, 10)


def test_a_file_of_another_size_than_its_data_set_says_is_named_as_it_is_found(root):
    first, *_ = sorted((root / "data").iterdir())
    size = first.stat().st_size
    with first.open("ab") as file:
        file.write(b"more")

    with pytest.raises(
        IntegrityError, match=rf"data/.*: holds {size + 4} bytes, and version 1 .* says {size};"
    ):
        shards_of("web", a_config(), base_dir=root.parent)


@pytest.mark.parametrize(
    ("number", "error", "told"),
    [
        (5, UnavailableError, r"Input/output error .*; try again"),
        (13, ConfigError, "Permission denied"),
    ],
)
def test_what_the_system_refuses_as_a_data_set_is_opened_is_told_of_the_source(
    root, monkeypatch, number, error, told
):
    def refused(*args, **kwargs):
        raise OSError(f"LanceError(IO): {os.strerror(number)} (os error {number}), /a/b.rs:1:2")

    monkeypatch.setattr(lance, "dataset", refused)

    with pytest.raises(error, match=rf"sources\.web\.path cannot be (listed|opened): .*{told}"):
        at_versions("web", a_config(), base_dir=root.parent)
    with pytest.raises(error, match=rf"sources\.web\.path cannot be (listed|opened): .*{told}"):
        shards_of("web", a_config(), base_dir=root.parent)


def test_without_the_library_the_extra_is_named(root, monkeypatch):
    monkeypatch.delitem(sys.modules, LIBRARY)
    monkeypatch.setitem(sys.modules, "lance", None)

    with pytest.raises(ConfigError, match=r"needs the package lance.*'omniload-data\[lance\]'"):
        shards_of("web", a_config(), base_dir=root.parent)


def forked(root, *, read_first):
    """Fork a process that reads, from a new one, and return its message."""
    script = f"""
import os
from pathlib import Path
from omniload.base.errors import StateError
from omniload.mix.sources import LanceSource
from omniload.source.record_source import open_source
from omniload.source.spec import SourceSpec

config = LanceSource(type="lance", path="own.lance", tokens="ids")

def opened():
    return open_source(SourceSpec("web", config, base_dir=Path({str(root.parent)!r})))

if {read_first}:
    opened().read(0, 1)
if not os.fork():
    try:
        print(len(opened().read(0, {N}).tokens), flush=True)
    except StateError as error:
        print(error, flush=True)
    os._exit(0)
os.wait()
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return done.stdout


def test_a_process_that_is_forked_before_lance_is_asked_reads(root):
    assert forked(root, read_first=False) == f"{N}\n"


def test_a_process_that_is_forked_behind_it_is_refused_and_told_the_remedy(root):
    said = forked(root, read_first=True)

    assert re.search(
        r"process \d+ was forked from \d+, .* Lance .*: start it by spawn or forkserver", said
    )
