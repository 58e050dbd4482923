"""Runs compared with the promises of the pages: documents are written, cut and counted here by Python alone."""

import json
from collections import Counter
from fractions import Fraction
from itertools import cycle, islice, pairwise

import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import omniload
from tests.support.examples import few

LENGTH = 16
END = 256
seldom = settings(few(6, soak=200), suppress_health_check=[HealthCheck.function_scoped_fixture])
methods = st.sampled_from(["none", "shards", "block", "units", "full"])


@st.composite
def corpora(draw, longest, sources):
    """Return the texts of the files of each source, all different."""
    lengths = st.lists(st.lists(st.integers(3, longest - 1), max_size=6), min_size=1, max_size=3)
    return {
        f"source{s}": [
            [f"{i:x}{j:x}" + "é" * (length // 2 - 1) for j, length in enumerate(shard)]
            for i, shard in enumerate(draw(lengths.filter(any)))
        ]
        for s in range(draw(sources))
    }


def write_mix(folder, corpus, draw, **keys):
    """Write files and their mix, with drawn options of the order; return its path, and each source's order."""
    (folder / "mix.yaml").unlink(missing_ok=True)
    sources, orders = {}, {name: draw(methods) for name in corpus}
    for name, shards in corpus.items():
        for i in range(3):
            (folder / f"{name}-{i}.jsonl").unlink(missing_ok=True)
        for i, texts in enumerate(shards):
            lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
            (folder / f"{name}-{i}.jsonl").write_text(lines)
        sources[name] = {"type": "jsonl", "path": f"{name}-*.jsonl", "unit": draw(UNITS)}
        sources[name]["shuffle"] = {"method": orders[name]}
    rows = draw(st.integers(1, 6))
    mix = {
        "version": 1,
        "seed": draw(st.integers(0, 99)),
        "tokenizer": {"type": "bytes"},
        "sources": sources,
        "batch": {"tokens": rows * LENGTH, "micro_tokens": LENGTH},
        **keys,
    }
    (folder / "mix.yaml").write_text(yaml.safe_dump(mix))
    return folder / "mix.yaml", orders


UNITS = st.sampled_from([1, 60, 1 << 20])


def batches_of(path, steps, resumed_at):
    """Return the batches of a run that ends in the middle and resumes from its state."""
    with omniload.open(path, steps=resumed_at, arrays="numpy") as loader:
        yield from loader
        state = loader.state_dict()
    with omniload.open(path, steps=steps, state=state, arrays="numpy") as loader:
        yield from loader


@given(data=st.data())
@seldom
def test_after_each_step_each_source_is_within_a_document_of_its_share_and_goes_round_evenly(
    tmp_path, data
):
    """How-to of a mix, and of a move from datasets: "what was drawn is within one document of its share, always"."""
    corpus = data.draw(corpora(LENGTH, st.integers(1, 4)))
    weights = {name: data.draw(st.integers(1, 9)) for name in corpus}
    level = data.draw(st.sampled_from(["sample", "token"]))
    path, orders = write_mix(
        tmp_path,
        corpus,
        data.draw,
        mix={"level": level, "stages": [{"weights": weights}]},
        pack={"length": LENGTH, "method": "none"},
    )
    documents = {
        name: [(*text.encode(), END) for shard in shards for text in shard]
        for name, shards in corpus.items()
    }
    drawn = {name: Counter() for name in corpus}

    for batch in batches_of(path, steps=9, resumed_at=data.draw(st.integers(1, 8))):
        for piece in batch.pieces():
            drawn[sorted(corpus)[piece.source]][tuple(piece.tokens.tolist())] += 1

        counted = {
            name: found.total() if level == "sample" else sum(map(len, found.elements()))
            for name, found in drawn.items()
        }
        total, most = sum(counted.values()), 1 if level == "sample" else LENGTH
        for name, found in drawn.items():
            share = Fraction(weights[name] * total, sum(weights.values()))
            # Weights are met to a part in a billion: parts of 2^30.
            assert abs(counted[name] - share) <= most + Fraction(total, 1 << 29)
            rounds, begun = divmod(found.total(), len(documents[name]))
            often = Counter(found[document] - rounds for document in documents[name])
            assert often == Counter({1: begun, 0: len(documents[name]) - begun}) - Counter()
            assert len(found) <= len(documents[name])
            if orders[name] == "none":
                assert found == Counter(islice(cycle(documents[name]), found.total()))


@given(data=st.data())
@seldom
def test_rows_that_are_filled_to_the_last_token_are_the_documents_end_to_end(tmp_path, data):
    """Reference of a mix: `concat_and_split` "fills rows to the last token and cuts documents"."""
    corpus = data.draw(corpora(3 * LENGTH, st.just(1)))
    path, _ = write_mix(
        tmp_path,
        corpus,
        lambda strategy: "none" if strategy is methods else data.draw(strategy),
        mix={"stages": [{"weights": {"source0": 1}}]},
        pack={"length": LENGTH, "method": "concat_and_split"},
    )
    documents = [(*text.encode(), END) for shard in corpus["source0"] for text in shard]
    stream = (token for document in cycle(documents) for token in document)
    # A label is the next token of its document, also across a cut; the last token of a document has none.
    labelled = ((token, -100 if token == END else after) for token, after in pairwise(stream))

    for batch in batches_of(path, steps=6, resumed_at=data.draw(st.integers(1, 5))):
        count = len(batch.tokens)
        expected = [tuple(islice(labelled, LENGTH)) for _ in range(count)]
        rows = zip(batch.tokens.tolist(), batch.labels.tolist(), strict=True)
        # Rows of a step are dealt by their cost.
        assert sorted(tuple(zip(*row, strict=True)) for row in rows) == sorted(expected)
