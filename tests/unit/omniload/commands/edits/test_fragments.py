"""A source of a file of its own is found from wherever its run is."""

from pathlib import Path

from omniload.commands.edits.fragments import placed
from omniload.mix.config import JsonlSource

FOLDER = Path("/data/more")


def test_relative_paths_start_at_the_file_and_others_stay():
    source = JsonlSource(type="jsonl", path=("a/*.jsonl", "/b.jsonl", "s3://bucket/c.jsonl"))

    assert placed(source, FOLDER).paths == (
        "/data/more/a/*.jsonl",
        "/b.jsonl",
        "s3://bucket/c.jsonl",
    )


def test_the_template_of_a_chat_starts_at_the_file():
    source = JsonlSource(
        type="jsonl", path="a.jsonl", transforms=({"type": "chat", "template": "t.jinja"},)
    )

    assert placed(source, FOLDER).transforms[0].template == "/data/more/t.jinja"


def test_the_records_that_others_had_drawn_start_at_the_file():
    source = JsonlSource(type="jsonl", path="a.jsonl", drawn_before="web.arrow")

    assert placed(source, FOLDER).drawn_before == "/data/more/web.arrow"
    assert placed(source.model_copy(update={"drawn_before": None}), FOLDER).drawn_before is None
