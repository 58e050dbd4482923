"""Masks and scores of table sources: read with the tokens, checked against them, left out when unused."""

import re

import lance
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from omniload.base.errors import ConfigError, IntegrityError
from omniload.mix.columns import ALWAYS_USED, LOSS_SPANS
from omniload.mix.config import ByteTokenizer, OnError
from omniload.mix.sources import ArrowSource, LanceSource, ParquetSource
from omniload.source.formats.opening import open_format
from omniload.source.record_source import open_source
from omniload.source.spec import SourceSpec

TOKENS = [[7, 8, 9], [1], [], [4, 5], [6, 6, 6, 6]]
MASKS = [[0, 1, 1], [1], [], [0, 0], [1, 0, 1, 1]]
SCORES = [0.5, 1.0, 0.0, -2.0, 3.0]
BOTH = {"loss_mask": "mask", "scores": "reward"}


def written(folder, kind, **columns):
    table = pa.table({"ids": TOKENS, "mask": MASKS, "reward": SCORES} | columns)
    if kind == "parquet":
        pq.write_table(table, folder / "a.parquet", row_group_size=2)
        return ParquetSource(type="parquet", path="a.parquet", tokens="ids", columns=BOTH)
    if kind == "lance":
        lance.write_dataset(table, folder / "a.lance", max_rows_per_file=2)
        return LanceSource(type="lance", path="a.lance", tokens="ids", columns=BOTH)
    with (
        pa.OSFile(str(folder / "a.arrow"), "wb") as out,
        pa.ipc.new_file(out, table.schema) as writer,
    ):
        writer.write_table(table, max_chunksize=2)
    return ArrowSource(type="arrow", path="a.arrow", tokens="ids", columns=BOTH)


def opened(folder, config, tokenizer=None):
    return open_source(SourceSpec("web", config, seed=3, tokenizer=tokenizer, base_dir=folder))


def by_tokens(block):
    return {
        tuple(block.tokens[i].tolist()): (
            block.others["loss_mask"][i].astype(int).tolist(),
            block.others["scores"][i].tolist(),
        )
        for i in range(len(block.tokens))
    }


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_every_sample_has_its_own_mask_and_scores_however_it_is_read(tmp_path, kind):
    source = opened(tmp_path, written(tmp_path, kind))
    wanted = {tuple(t): (m, [s]) for t, m, s in zip(TOKENS, MASKS, SCORES, strict=True) if t}

    whole = source.read(0, 10)

    assert by_tokens(whole) == wanted
    assert len(whole.table) == 8
    for start in range(9):
        assert by_tokens(source.read(start, start + 1)).items() <= wanted.items()
    spans = whole.table.metadata[LOSS_SPANS]
    at = whole.tokens.lengths_N.tolist().index(4)
    assert spans[at].tolist() == [0, 1, 2, 4]


@pytest.mark.parametrize(
    ("columns", "fault"),
    [
        ({"mask": [[0, 1], [1], [], [0, 0], [1, 0, 1, 1]]}, "2 values for 3 tokens"),
        ({"mask": [None, [1], [], [0, 0], [1, 0, 1, 1]]}, "loss_mask is null"),
        ({"mask": [[0, 1, 2], [1], [], [0, 0], [1, 0, 1, 1]]}, "holds 2, not 0 or 1"),
        ({"mask": [[0, -1, 1], [1], [], [0, 0], [1, 0, 1, 1]]}, "holds -1, not 0 or 1"),
        (
            {"mask": [[-100, 8, 9], [1], [], [0, 0], [1, 0, 1, 1]]},
            "-100, not 0 or 1; labels are named as labels of a table, and of numpy written as labels",
        ),
        ({"mask": [[0, None, 1], [1], [], [0, 0], [1, 0, 1, 1]]}, "loss_mask holds a null"),
        ({"reward": [None, 1.0, 0.0, 0.0, 0.0]}, "scores is null"),
        ({"reward": [[1.0, None], [1.0], [], [0.0], [0.0]]}, "scores holds a null"),
        ({"reward": [-1e300, 1.0, 0.0, 0.0, 0.0]}, r"scores holds -1e\+300, which is more than a"),
    ],
)
def test_a_column_that_does_not_fit_is_told_with_its_row_and_skipped(tmp_path, columns, fault):
    config = written(tmp_path, "parquet", **columns)

    with pytest.raises(IntegrityError, match=f"row group 0: row 0: .*{fault}"):
        opened(tmp_path, config).read(0, 5)

    skipping = config.model_copy(update={"on_error": OnError(policy="skip")})
    block = opened(tmp_path, skipping).read(0, 5)
    assert block.skipped == 1
    assert by_tokens(block).keys() == {(1,), (4, 5), (6, 6, 6, 6)}


def test_a_score_that_is_infinite_or_no_number_is_as_it_is_written(tmp_path):
    rewards = [np.inf, -np.inf, 0.0, np.nan, 1.0]

    block = opened(tmp_path, written(tmp_path, "parquet", reward=rewards)).read(0, 5)

    found = {tokens: scores for tokens, (_, scores) in by_tokens(block).items()}
    assert np.isnan(found.pop((4, 5))).all()
    assert found == {(7, 8, 9): [np.inf], (1,): [-np.inf], (6, 6, 6, 6): [1.0]}


@pytest.mark.parametrize(
    ("rewards", "row", "said"),
    [
        ([5, 2**24, 2**40, 2**24 + 1, 2**24 + 3], 3, "16777217, which float32 rounds to 16777216,"),
        ([0.1, 1e30, 123456792.0, 0.0, 123456789.0], 4, "123456789, which float32 rounds to"),
        ([[1.0], [2.0, -16777217.0], [], [0.5], []], 1, "-16777217, which float32 rounds to"),
        (np.array([0, 2**63, 0, 2**63 + 1, 0], np.uint64), 3, "9223372036854775809, which float32"),
    ],
)
def test_a_whole_number_of_scores_that_is_rounded_is_warned_of_once(
    tmp_path, caplog, rewards, row, said
):
    """The row of a table of answers was that of another answer, and nobody was told."""
    config = written(tmp_path, "arrow", reward=rewards)
    source = opened(tmp_path, config.model_copy(update={"on_error": OnError(policy="skip")}))

    for _ in range(2):
        source.read(0, 5)

    (told,) = caplog.messages
    assert re.search(rf"^sources\.web: .*row {row % 2}: scores holds {said}.*text: COLUMN", told)


@pytest.mark.parametrize(
    "rewards",
    [
        [0.1, 1e30, -(2.0**70), 0.30000000000000004, 16777216.5],
        [0, 2**24, -(2**62), 3 * 2**40, -(2**63)],
        np.array([0.1, 123456789, 1, 2, 3], np.float32),
    ],
)
def test_scores_that_lose_no_whole_number_are_not_warned_of(tmp_path, caplog, rewards):
    config = written(tmp_path, "parquet", reward=rewards)
    source = opened(tmp_path, config.model_copy(update={"on_error": OnError(policy="skip")}))

    source.read(0, 5)

    assert not [told for told in caplog.messages if "rounds" in told]


def test_of_two_faults_of_a_column_the_first_is_told(tmp_path):
    """Earlier, the message gave the first row the fault of the second one, a null."""
    config = written(tmp_path, "arrow", mask=[[0], None, [], [0, 0], [1, 0, 1, 1]])

    with pytest.raises(IntegrityError, match="row 0: loss_mask has 1 values for 3 tokens"):
        opened(tmp_path, config).read(0, 5)


LABELS = [
    [label if trained else -100 for label, trained in zip(tokens, mask, strict=True)]
    for tokens, mask in zip(TOKENS, MASKS, strict=True)
]
BY_LABELS = {"columns": {"labels": "labels", "scores": "reward"}}


def with_labels(folder, kind, labels, **changes):
    return written(folder, kind, labels=labels).model_copy(update=BY_LABELS | changes)


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
@pytest.mark.parametrize("type_", [pa.int16(), pa.int64()])
def test_labels_are_read_as_the_mask_that_they_were_made_by(tmp_path, kind, type_):
    labels = pa.array(LABELS, pa.list_(type_))
    config = with_labels(tmp_path, kind, labels).using(ALWAYS_USED)

    block = opened(tmp_path, config).read(0, 10)

    assert set(block.others) == {"loss_mask"}
    assert block.others["loss_mask"].values_V.dtype == np.bool_
    found = {
        tuple(block.tokens[i].tolist()): block.others["loss_mask"][i].tolist()
        for i in range(len(block.tokens))
    }
    assert found == {
        tuple(t): [bool(m) for m in mask] for t, mask in zip(TOKENS, MASKS, strict=True) if t
    }


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        (
            [8, 9, -100],
            "labels holds 8 for token 0, which is 7; a label is the id of its own token",
        ),
        ([-100, 8, 1 << 40], "labels holds 1099511627776 for token 2, which is 9"),
        ([-100, 8, -1], "labels holds -1 for token 2, which is 9"),
        ([-100, 8], "labels has 2 values for 3 tokens"),
        ([-100, 8, 9, 9], "labels has 4 values for 3 tokens"),
        ([-100, None, 9], "labels holds a null"),
        (None, "labels is null"),
    ],
)
def test_labels_of_another_token_are_told_with_their_row_and_skipped(tmp_path, row, fault):
    config = with_labels(tmp_path, "parquet", [row, *LABELS[1:]])

    with pytest.raises(IntegrityError, match=f"row group 0: row 0: {fault}"):
        opened(tmp_path, config).read(0, 5)

    skipping = config.model_copy(update={"on_error": OnError(policy="skip")})
    block = opened(tmp_path, skipping).read(0, 5)
    assert block.skipped == 1
    left = {
        tuple(t): (m, [s]) for t, m, s in list(zip(TOKENS, MASKS, SCORES, strict=True))[1:] if t
    }
    assert by_tokens(block) == left


def test_labels_are_refused_beside_a_mask_and_beside_text():
    both = {"labels": "labels", "loss_mask": "mask"}
    with pytest.raises(ValueError, match=r"columns\.labels and columns\.loss_mask both say which"):
        ParquetSource(type="parquet", path="a.parquet", tokens="ids", columns=both)
    with pytest.raises(ValueError, match="labels has a value for each token and the source holds"):
        ParquetSource(type="parquet", path="a.parquet", text="t", columns={"labels": "labels"})


@pytest.mark.parametrize("kind", ["parquet", "arrow", "lance"])
def test_labels_that_nobody_names_are_doubted(tmp_path, kind):
    config = with_labels(tmp_path, kind, LABELS)
    every = "the first records have 'labels' of -100 beside their tokens. These labels are not read"

    def doubt(**changes):
        spec = SourceSpec("web", config.model_copy(update=changes), base_dir=tmp_path)
        return open_format(spec).format.doubt()

    assert every in doubt(columns={})
    assert every in doubt(columns={"scores": "reward"})
    assert doubt() == doubt(columns={"loss_mask": "mask"}) == ""


def test_labels_of_every_token_are_not_doubted(tmp_path):
    config = with_labels(tmp_path, "parquet", TOKENS, columns={})

    assert open_format(SourceSpec("web", config, base_dir=tmp_path)).format.doubt() == ""


@pytest.mark.parametrize(
    ("columns", "fault"),
    [
        ({"mask": ["a"] * 5}, "not a list of 0 and 1"),
        ({"reward": ["a"] * 5}, "not a number"),
    ],
)
def test_a_column_of_another_type_is_refused(tmp_path, columns, fault):
    with pytest.raises(ConfigError, match=fault):
        opened(tmp_path, written(tmp_path, "parquet", **columns))


def test_a_missing_column_is_refused_with_what_there_is(tmp_path):
    config = written(tmp_path, "arrow").model_copy(update={"columns": {"scores": "absent"}})

    with pytest.raises(
        ConfigError,
        match=r"no single column 'absent' for columns\.scores; it has ids, mask, reward",
    ):
        opened(tmp_path, config)


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_a_kept_index_hides_no_column_that_is_asked_for_as_another(tmp_path, kind):
    config, cache_dir = written(tmp_path, kind), tmp_path / "cache"
    before, after = (
        SourceSpec(
            "web",
            config.model_copy(update={"columns": {name: "reward"}}),
            base_dir=tmp_path,
            cache_dir=cache_dir,
        )
        for name in ("scores", "loss_mask")
    )
    open_format(before)

    with pytest.raises(ConfigError, match="column 'reward' is double, not a list of 0 and 1"):
        open_format(after)


def test_a_column_that_no_batch_uses_is_not_read(tmp_path):
    config = written(tmp_path, "parquet").using(ALWAYS_USED)

    block = opened(tmp_path, config).read(0, 5)

    assert set(config.columns) == set(block.others) == {"loss_mask"}


def test_text_takes_scores_and_no_mask(tmp_path):
    written(tmp_path, "parquet", text=["ab", "", "c", "de", "f"])
    config = ParquetSource(
        type="parquet", path="a.parquet", text="text", columns={"scores": "reward"}
    )

    block = opened(tmp_path, config, ByteTokenizer(type="bytes")).read(0, 5)

    scores = {
        bytes(block.tokens[i][:-1].astype(np.uint8)): block.others["scores"][i][0] for i in range(4)
    }
    assert scores == {b"ab": 0.5, b"c": 0.0, b"de": -2.0, b"f": 3.0}
    with pytest.raises(
        ValueError, match="loss_mask has a value for each token and the source holds text"
    ):
        ParquetSource(type="parquet", path="a.parquet", text="text", columns={"loss_mask": "mask"})


ANSWERS = ["zwölf", "", "\U0001f600 two", "4", "no"]


def with_answers(folder, kind, answers, **changes):
    config = written(folder, kind, answer=answers)
    return config.model_copy(update={"columns": {"text": "answer"}} | changes)


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
@pytest.mark.parametrize(
    "type_", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())]
)
def test_a_text_goes_with_its_sample(tmp_path, kind, type_):
    block = opened(tmp_path, with_answers(tmp_path, kind, pa.array(ANSWERS, type_))).read(0, 10)

    found = {
        tuple(block.tokens[i].tolist()): bytes(block.others["text"][i]).decode()
        for i in range(len(block.tokens))
    }

    assert found == {tuple(t): text for t, text in zip(TOKENS, ANSWERS, strict=True) if t}


def test_a_record_without_its_text_is_a_bad_record(tmp_path):
    answers = [*ANSWERS[:4], None]
    with pytest.raises(IntegrityError, match=r"row group 2: row 0: text is null"):
        opened(tmp_path, with_answers(tmp_path, "parquet", answers)).read(0, 5)

    skipping = with_answers(tmp_path, "parquet", answers, on_error=OnError(policy="skip"))
    assert opened(tmp_path, skipping).read(0, 5).skipped == 1


def test_what_is_no_text_is_refused(tmp_path):
    config = with_answers(tmp_path, "parquet", ANSWERS, columns={"text": "reward"})
    with pytest.raises(ConfigError, match=r"column 'reward' is double, not a text, as text is"):
        opened(tmp_path, config)

    spoilt = pa.array([b"a", b"\xff", b"c", b"d", b"e"]).view(pa.string())
    with pytest.raises(IntegrityError, match=r"row group 0: row 1: text is not UTF-8; fix it"):
        opened(tmp_path, with_answers(tmp_path, "parquet", spoilt)).read(0, 5)
    skipping = with_answers(tmp_path, "parquet", spoilt, on_error=OnError(policy="skip"))
    block = opened(tmp_path, skipping).read(0, 5)
    assert block.skipped == 1
    assert sorted(bytes(each) for each in map(block.others["text"].__getitem__, range(3))) == [
        *(b"a", b"d", b"e"),
    ]
