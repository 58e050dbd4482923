"""Sources that an edit names."""

import pytest

from omniload.base.errors import ConfigError
from omniload.mix.edits.edit import AddSource
from omniload.mix.edits.history import History
from omniload.mix.edits.sources import require_known
from omniload.mix.sources import ParquetSource
from tests.support.plane.builders import a_mix

MANY = [f"s{i:02}" for i in range(37)]


@pytest.mark.parametrize(
    ("known", "said"),
    [(MANY[:12], "s10, s11; correct"), (MANY, "s10, s11 and 25 more; correct")],
)
def test_a_source_that_the_mix_does_not_have_is_told_with_those_that_it_has(known, said):
    require_known(known, known)

    with pytest.raises(
        ConfigError, match=rf"'s1o' is not in the mix \(did you mean 's\d\d'\?\), .*{said}"
    ):
        require_known(["s1o"], known)


def test_what_may_be_a_group_is_told_how_its_sources_are_changed():
    with pytest.raises(ConfigError, match="of a group give its sources, or edit the mix file"):
        require_known(["web"], ["web_de", "web_en"])


WEIGHT = {"column": "w", "dtype": "float32", "of": "labels"}


def with_columns(columns):
    return {"type": "parquet", "path": "x", "tokens": "ids", "columns": columns}


def an_addition(columns):
    source = ParquetSource.model_validate(with_columns(columns))
    return AddSource(name="new", source=source, weight=1)


@pytest.mark.parametrize(
    ("first", "columns", "said"),
    [
        (WEIGHT, {}, r"'new': batch.columns\[0\] is 'w', which 'new' of the sources lack, and no de"),
        (WEIGHT, {"w": WEIGHT | {"dtype": "float64"}}, "'new': columns.w is float64 of labels, .* 'web'"),
        (WEIGHT, {"w": WEIGHT | {"of": "tokens"}}, "columns.w is float32 of tokens, default None, and"),
        (WEIGHT | {"default": 1.0}, {"w": WEIGHT | {"default": 0.5}}, "default 0.5, and of 'web' .* 1.0"),
    ],
)  # fmt: skip
def test_a_source_that_is_added_has_each_column_of_the_batches_as_the_others_have_it(
    first, columns, said
):
    batch = {"tokens": 64, "micro_tokens": 64, "columns": ["w"]}
    mix = a_mix(sources={"web": with_columns({"w": first})}, batch=batch)
    history = History(mix)

    with pytest.raises(ConfigError, match=said):
        history.edited(an_addition(columns), 10)

    added = history.edited(an_addition({"w": first, "unused": WEIGHT}), 10)
    assert added.latest.columns_used == mix.columns_used
    if "default" in first:
        assert "new" in history.edited(an_addition({}), 10).latest.names
    # A run may have such a source from the time before this was refused.
    other = an_addition({"w": WEIGHT | {"dtype": "int8"}}).source
    older = mix.model_copy(update={"sources": {**mix.sources, "new": other}})
    assert older.columns_used == mix.columns_used
