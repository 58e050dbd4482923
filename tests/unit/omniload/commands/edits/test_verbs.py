"""Options of the verbs that change a mix."""

import pytest
from click.testing import CliRunner

from omniload.base.errors import ConfigError
from omniload.commands.edits.skip import skip
from omniload.commands.edits.verbs import add


@pytest.mark.parametrize(
    "steps",
    ["12", ":", "a:b", "-1:2", "\u0661:\u0662", pytest.param(f"0:{'9' * 5000}", id="long")],
)
def test_what_is_no_range_of_steps_is_refused(steps, tmp_path):
    with pytest.raises(ConfigError, match="is no range of steps; say A:B"):
        CliRunner().invoke(
            skip, [str(tmp_path), "--steps", steps], standalone_mode=False, catch_exceptions=False
        )


def test_a_range_of_no_step_is_refused_with_what_its_ends_mean(tmp_path):
    with pytest.raises(ConfigError, match="the second number is the first step that is not"):
        CliRunner().invoke(
            skip, [str(tmp_path), "--steps", "10:9"], standalone_mode=False, catch_exceptions=False
        )


@pytest.mark.parametrize(
    ("how_much", "said"),
    [
        ([], "^say how much of 'books' is drawn"),
        (["--weight", "1", "--amount", "2epochs"], "--weight and --amount are both given"),
        (["--weight", "-1"], "weight: found -1.0; give more than 0"),
    ],
)
def test_a_source_is_added_with_one_amount_or_weight(tmp_path, how_much, said):
    (tmp_path / "books.yaml").write_text("sources: {books: {type: jsonl, path: books.jsonl}}")
    words = [str(tmp_path), "books", "--from", str(tmp_path / "books.yaml"), *how_much]

    with pytest.raises(ConfigError, match=said):
        CliRunner().invoke(add, words, standalone_mode=False, catch_exceptions=False)
