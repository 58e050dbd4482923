"""Pages of ``mix audit --html`` and ``mix preview --html``: whole texts, images as trained on, no scripts."""

import base64
import io
import json
import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from PIL import Image

from omniload.batch.images import images_of
from omniload.commands.corpus.sample_page import Document, page_of
from omniload.source.tokenize import ByteEncoder
from omniload.source.transforms.image_patches import pixels_of
from tests.support.drawn import a_drawn_mix
from tests.support.plane.edits.mix_commands import a_run, json_of, run_mix

STEP = 2
IMAGE = re.compile(r'<img [^>]*src="data:image/png;base64,([^"]+)">')


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def page_at(tmp_path, *options):
    page = tmp_path / "step.html"
    result = run_mix("audit", tmp_path / "run", "--step", STEP, *options, "--html", page)
    assert result.exception is None, result.output
    assert f"page: {page}" in result.output
    return page.read_text()


def pixels_in(html):
    """Return the images of a page, as shapes and bytes, sorted."""
    images = [np.asarray(Image.open(io.BytesIO(base64.b64decode(d)))) for d in IMAGE.findall(html)]
    return sorted((pixels.shape, pixels.tobytes()) for pixels in images)


@pytest.mark.parametrize(
    ("strategy", "tiles"),
    [("balanced", None), ("hybrid", None), ("hybrid", {"size": 8, "max_tiles": 4})],
    ids=["balanced", "hybrid", "tiles"],
)
def test_every_image_of_a_step_is_shown_as_it_was_trained_on(tmp_path, strategy, tiles):
    mix = a_drawn_mix(tmp_path, balance={"strategy": strategy}, tiles=tiles)
    path = tmp_path / "mix.yaml"
    path.write_text(yaml.safe_dump(mix.model_dump(mode="json")))
    batches = a_run(tmp_path / "run", path, steps=4)[STEP]

    html = page_at(tmp_path)

    trained = [
        pixels_of(image.values_V.reshape(-1, 48), image.grid, 4, 1)
        for batch in batches
        for microbatch in batch.microbatches
        for image in images_of(microbatch)
    ]
    assert pixels_in(html) == sorted((pixels.shape, pixels.tobytes()) for pixels in trained)
    assert len(trained) > 5
    # Each image stands at its place: no placeholder token remains among the words.
    assert "\x07" not in html
    assert re.search(r"\w[^<]*<img [^>]*>\s*a \w", html), "no image stands between words"


def test_a_preview_shows_the_images_that_its_rows_would_be_trained_on(tmp_path):
    mix = a_drawn_mix(tmp_path)
    path, page = tmp_path / "mix.yaml", tmp_path / "rows.html"
    path.write_text(yaml.safe_dump(mix.model_dump(mode="json")))
    batches = a_run(tmp_path / "run", path, steps=4)[STEP]

    everything = run_mix(
        "preview", path, "--step", STEP, "--dp", len(batches), "--rows", 999, "--html", page
    )
    of_all = page.read_text()
    run_mix("preview", path, "--step", STEP, "--dp", len(batches), "--rows", 2, "--html", page)

    trained = [
        pixels_of(image.values_V.reshape(-1, 48), image.grid, 4, 1)
        for batch in batches
        for microbatch in batch.microbatches
        for image in images_of(microbatch)
    ]
    assert f"page: {page}" in everything.output
    assert pixels_in(of_all) == sorted((pixels.shape, pixels.tobytes()) for pixels in trained)
    assert 0 < page.read_text().count("<article>") < of_all.count("<article>")


def test_ranks_and_words_choose_what_the_page_holds(tmp_path):
    mix = a_drawn_mix(tmp_path)
    path = tmp_path / "mix.yaml"
    path.write_text(yaml.safe_dump(mix.model_dump(mode="json")))
    a_run(tmp_path / "run", path, steps=4)

    everything, of_one = page_at(tmp_path), page_at(tmp_path, "--rank", 1, "--grep", "circle")

    assert 0 < of_one.count("<article>") < everything.count("<article>")
    assert "rank 0" not in of_one
    assert of_one.count("<article>") == len(re.findall(r"<article>.*circle.*</article>", of_one))


def test_a_text_is_whole_and_only_shown(tmp_path):
    hostile = "<script>alert(1)</script> & a word " + "of many " * 20
    lines = [json.dumps({"text": f"{i} {hostile}"}) for i in range(40)]
    (tmp_path / "web.jsonl").write_text("\n".join(lines))
    path = tmp_path / "mix.yaml"
    path.write_text(
        """
version: 1
seed: 1
tokenizer: {type: bytes}
sources: {web: {type: jsonl, path: web.jsonl}}
mix: {stages: [{weights: {web: 1}}]}
pack: {length: 256}
batch: {tokens: 1024, micro_tokens: 512}
"""
    )
    a_run(tmp_path / "run", path, steps=4)

    html = page_at(tmp_path)

    assert "&lt;script&gt;alert(1)&lt;/script&gt; &amp; a word " + "of many " * 20 in html
    assert "<script" not in html
    assert "default-src 'none'" in html


@pytest.fixture
def masked_mix(tmp_path):
    """A mix file of questions that are only read, and answers and ends that are trained on."""
    asked, answered = b"what & why? ", b"so it is."
    ids = [*asked, *answered, ByteEncoder().end_of_document_id]
    masks = [0] * len(asked) + [1] * (len(answered) + 1)
    table = pa.table({"ids": [ids] * 40, "mask": [masks] * 40})
    pq.write_table(table, tmp_path / "sft.parquet")
    path = tmp_path / "mix.yaml"
    path.write_text(
        """
version: 1
seed: 1
tokenizer: {type: bytes}
sources: {sft: {type: parquet, path: sft.parquet, tokens: ids, columns: {loss_mask: mask}}}
mix: {stages: [{weights: {sft: 1}}]}
pack: {length: 64}
batch: {tokens: 256, micro_tokens: 128}
"""
    )
    return path


def test_a_preview_shows_what_is_trained_on(masked_mix, tmp_path):
    page = tmp_path / "rows.html"
    trained = a_run(tmp_path / "run", masked_mix, steps=1)[0][0].loss_tokens

    rows = json_of("preview", masked_mix, "--rows", 99, "--html", page)["rows"]
    table = run_mix("preview", masked_mix, "--rows", 1).stdout

    documents = [document for row in rows for document in row["documents"]]
    assert sum(document["trained"] for document in documents) == trained
    whole = [document for document in documents if document["length"] == 22]
    assert {document["trained_text"] for document in whole} == {"so it is."}
    assert "trained on" in table
    marked = page.read_text().count("what &amp; why? <mark>so it is.</mark>")
    assert marked == len(whole) > 5


def test_a_preview_of_what_is_trained_on_whole_says_no_more_than_how_many_labels(
    masked_mix, tmp_path
):
    path = tmp_path / "whole.yaml"
    path.write_text(masked_mix.read_text().replace(", columns: {loss_mask: mask}", ""))

    document = json_of("preview", path, "--rows", 1)["rows"][0]["documents"][0]

    assert (document["trained"], document["trained_text"]) == (document["length"] - 1, None)
    assert "trained on" not in run_mix("preview", path, "--rows", 1).stdout


def test_a_page_of_very_many_documents_says_how_many_it_leaves_out():
    documents = [Document(heading=str(i), parts=["x"]) for i in range(2_003)]

    html = page_of("step 1", documents, "--rank chooses <others>")

    assert html.count("<article>") == 2_000
    assert "The first 2,000 of 2,003; --rank chooses &lt;others&gt;." in html


def test_tables_show_the_words_of_captions_and_count_the_tokens_of_their_images(tmp_path):
    mix = a_drawn_mix(tmp_path, sources=["captions"])
    path = tmp_path / "mix.yaml"
    path.write_text(yaml.safe_dump(mix.model_dump(mode="json")))
    a_run(tmp_path / "run", path, steps=4)

    audited = json_of("audit", tmp_path / "run", "--step", STEP)["samples"]
    rows = json_of("preview", path, "--step", STEP)["rows"]

    shown = [each for row in rows for each in row["documents"]]
    for found in (audited, shown):
        whole = [each["text"] for each in found if not each["first_token"] and not each["sub"]]
        assert len(whole) > 3
        assert all(re.match(r"<\d+ image tokens?>an? \w+", text) for text in whole)
