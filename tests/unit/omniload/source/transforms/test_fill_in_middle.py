"""Fill in the middle, against a plain loop over documents."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from omniload.base.config import checked
from omniload.base.errors import ConfigError
from omniload.base.ragged import Ragged
from omniload.mix.config import BpeTokenizer, ByteTokenizer
from omniload.mix.sources import JsonlSource, NumpySource, ParquetSource
from omniload.source.record_source import open_source
from omniload.source.spec import SourceSpec
from omniload.source.transforms.encoders import Samples
from omniload.source.transforms.fill_in_middle import MiddleFiller, draws_at

PRE, SUF, MID, END = 1000, 1001, 1002, 7
MASK = (1 << 64) - 1

documents = st.lists(st.lists(st.integers(0, 40), max_size=12), max_size=8)
shares = st.sampled_from((0.0, 0.3, 0.5, 1.0))


def drawn(key, position):
    """Return the four numbers of a position: SplitMix64, one at a time."""
    found = []
    for i in range(4):
        z = (key + (position * 4 + i + 1) * 0x9E3779B97F4A7C15) & MASK
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & MASK
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB & MASK
        found.append(((z ^ (z >> 31)) >> 11) / (1 << 53))
    return found


def rearranged(document, numbers, rate, spm, end):
    """Rearrange one document as described on the page."""
    tail = [end] if document and document[-1] == end else []
    body = document[: len(document) - len(tail)]
    chosen, form, *cuts = numbers
    if chosen >= rate or not body:
        return document
    a, b = sorted(int(cut * (len(body) + 1)) for cut in cuts)
    first, inner, last = body[:a], body[a:b], body[b:]
    if form < spm:
        return [PRE, SUF, *last, MID, *first, *inner, *tail]
    return [PRE, *first, SUF, *last, MID, *inner, *tail]


@given(documents, st.integers(0, 1 << 62), st.integers(0, MASK), shares, shares)
def test_documents_are_those_of_a_plain_loop(given_documents, first, key, rate, spm):
    filler = MiddleFiller(rate=rate, spm=spm, marks=(PRE, SUF, MID), end=END, key=key)
    samples = Samples(tokens=Ragged.of([np.asarray(d, np.int32) for d in given_documents]))
    positions = first + np.arange(len(given_documents))

    made = filler.of(samples, positions).tokens

    assert [made[i].tolist() for i in range(len(made))] == [
        rearranged(d, drawn(key, p), rate, spm, END)
        for d, p in zip(given_documents, positions.tolist(), strict=True)
    ]


@given(documents, st.integers(0, 1 << 62), st.sampled_from([END, 9]), st.none() | st.just(END))
def test_what_begins_a_document_stays_its_first_token(given_documents, first, begin, end):
    def made_of(held, **said):
        filler = MiddleFiller(rate=0.7, spm=0.5, marks=(PRE, SUF, MID), end=end, key=5, **said)
        samples = Samples(tokens=Ragged.of([np.asarray(each, np.int32) for each in held]))
        tokens = filler.of(samples, first + np.arange(len(held))).tokens
        return [tokens[i].tolist() for i in range(len(tokens))]

    bare = [[each for each in document if each != begin] for document in given_documents]
    ended = [[*each, end] if each and end is not None else each for each in bare]
    begun = [[begin, *each] if each else each for each in ended]

    assert made_of(begun, begin=begin) == [
        [begin, *each] if each else each for each in made_of(ended)
    ]
    assert made_of([[begin]], begin=begin) == [[begin]]


def test_draws_are_spread_evenly_and_no_two_columns_go_together():
    columns = draws_at(12345, np.arange(20_000))

    assert abs(columns.mean(axis=1) - 0.5).max() < 0.01
    assert np.abs(np.corrcoef(columns) - np.eye(4)).max() < 0.03


def a_source(folder, seed=3, **changes):
    ids = [list(range(i, i + 20)) for i in range(100)]
    table = pa.table({"ids": pa.array(ids, pa.list_(pa.int32()))})
    pq.write_table(table, folder / "a.parquet", row_group_size=7)
    fim = {"type": "fim", "prefix": PRE, "suffix": SUF, "middle": MID} | changes
    config = ParquetSource(type="parquet", path="a.parquet", tokens="ids", transforms=(fim,))
    return open_source(SourceSpec("code", config, seed=seed, tokenizer=None, base_dir=folder))


def rows(block):
    return [tuple(block.tokens[i].tolist()) for i in range(len(block.tokens))]


def test_a_sample_is_the_same_however_it_is_read_and_another_in_the_next_epoch(tmp_path):
    whole = rows(a_source(tmp_path).read(0, 200))

    source = a_source(tmp_path)
    assert [rows(source.read(p, p + 1))[0] for p in range(199, -1, -1)] == whole[::-1]
    assert sum(PRE in row for row in whole) == pytest.approx(100, abs=30)
    assert sorted(x for row in whole[:100] for x in row if x < PRE) == sorted(
        x for row in whole[100:] for x in row if x < PRE
    )
    assert set(whole[:100]) != set(whole[100:])
    assert rows(a_source(tmp_path, seed=4).read(0, 100)) != whole[:100]
    assert not any(PRE in row for row in rows(a_source(tmp_path, rate=0).read(0, 100)))


def test_marks_are_tokens_of_the_vocabulary_and_the_end_stays_last(tmp_path):
    names = ("<eos>", "<pre>", "<suf>", "<mid>", "def", "f", "pass")
    library = Tokenizer(WordLevel({name: i for i, name in enumerate(names)}, unk_token="f"))
    library.pre_tokenizer = Whitespace()
    library.save(str(tmp_path / "tokenizer.json"))
    marks = {"prefix": "<pre>", "suffix": "<suf>", "middle": "<mid>"}
    (tmp_path / "a.jsonl").write_text("".join(f'{{"text": "def f{i} pass"}}\n' for i in range(9)))
    config = JsonlSource(
        type="jsonl", path="a.jsonl", transforms=({"type": "fim", "rate": 1, **marks},)
    )
    tokenizer = BpeTokenizer(type="bpe", path="tokenizer.json", end_of_document="<eos>")

    found = rows(
        open_source(SourceSpec("a", config, seed=1, tokenizer=tokenizer, base_dir=tmp_path)).read(
            0, 9
        )
    )

    assert {row[0] for row in found} == {1}
    assert {row[-1] for row in found} == {0}
    assert {tuple(sorted(row)) for row in found} == {(0, 1, 2, 3, 4, 5, 6)}
    wrong = config.model_copy(
        update={"transforms": (config.transforms[0].model_copy(update={"middle": "<end>"}),)}
    )
    with pytest.raises(
        ConfigError, match=r"sources.a.transforms: fim: middle is '<end>', and the tok"
    ):
        open_source(SourceSpec("a", wrong, seed=1, tokenizer=tokenizer, base_dir=tmp_path))
    with pytest.raises(ConfigError, match=r"prefix is .*, and the tokenizer has 257 others"):
        open_source(
            SourceSpec(
                "a", config, seed=1, tokenizer=ByteTokenizer(type="bytes"), base_dir=tmp_path
            )
        )


FIM = {"type": "fim", "prefix": 1, "suffix": 2, "middle": 3}


@pytest.mark.parametrize(
    "fields",
    [
        {"type": "jsonl", "path": "a", "transforms": [{"type": "chat"}, FIM]},
        {
            "type": "parquet",
            "path": "a",
            "tokens": "t",
            "columns": {"loss_mask": "m"},
            "transforms": [FIM],
        },
    ],
)
def test_a_source_with_a_mask_is_refused(fields):
    model = JsonlSource if fields["type"] == "jsonl" else ParquetSource
    with pytest.raises(
        ConfigError, match="fim rearranges tokens, and the source has a mask of them"
    ):
        checked(fields, model, name="code")


def test_a_source_that_says_how_documents_end_keeps_that_token_last(tmp_path):
    np.array([1, 2, 3, END, 4, 5, 6, 8, END], np.uint16).tofile(tmp_path / "a.bin")
    config = NumpySource(
        type="numpy",
        path="a.bin",
        dtype="uint16",
        end_of_document=END,
        transforms=({**FIM, "rate": 1},),
    )

    found = rows(
        open_source(SourceSpec("a", config, seed=1, tokenizer=None, base_dir=tmp_path)).read(0, 2)
    )

    assert [row[-1] for row in found] == [END, END]
