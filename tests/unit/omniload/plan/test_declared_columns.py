"""Columns that costs and strategies declare: the tags of samples that follow, and their values in a step."""

import numpy as np
import pytest

from omniload.base.errors import ConfigError
from omniload.base.ragged import Ragged
from omniload.base.settings.registry import Registered
from omniload.commands.faults import outcome_of
from omniload.plan import strategies
from omniload.plan.costs import declared
from omniload.plan.costs.declared import columns_of
from omniload.plan.records import PieceFacts, of_documents
from omniload.plan.strategies import columns_read, require_balance, tags_of_samples
from tests.support.plane.builders import a_mix, pieces_of

OWN = {
    "lang": {"column": "l", "dtype": "text", "of": "samples", "default": "en"},
    "speech": {"column": "s", "dtype": "float32", "of": "samples", "default": 0},
    "weight": {"column": "w", "dtype": "float32", "default": 1},
}
SOURCE = {"type": "parquet", "path": "a.parquet", "tokens": "t", "columns": OWN}
MIX = a_mix(sources={"web": SOURCE}, balance={"cost": "mine", "strategy": "mine"})
MIX = MIX.model_copy(update={"batch": MIX.batch.model_copy(update={"columns": tuple(OWN)})})


@pytest.fixture
def reading(monkeypatch):
    """Make the cost and the strategy ``mine`` read some columns."""

    def read(of_cost, of_strategy):
        for module, of in ((declared, of_cost), (strategies, of_strategy)):
            function = lambda *_: None  # noqa: E731 -- with an attribute of its own
            if of is not None:
                function.of = of
            known = Registered(name="mine", function=function, distribution="lab 1")
            monkeypatch.setattr(module, "registered", lambda *_, known=known: known)

    return read


def test_what_says_nothing_reads_lengths_as_a_cost_and_nothing_more_as_a_strategy(reading):
    reading(None, None)

    assert columns_read(MIX.balance) == ("lengths",)
    assert tags_of_samples(MIX) == ()


def test_the_tags_of_both_are_read_each_once_and_in_one_order(reading):
    reading(("columns.speech", "lengths", "columns.lang"), ("columns.lang", "tags.domain"))

    assert tags_of_samples(MIX) == ('lang:text:samples:"en"', "speech:float32:samples:0.0")


def test_a_value_of_each_token_is_no_tag(reading):
    reading(("columns.weight",), None)

    with pytest.raises(
        ConfigError, match=r"^balance.cost 'mine' reads 'columns.weight', and batches have"
    ):
        require_balance(MIX)


@pytest.mark.parametrize(
    ("of_cost", "of_strategy", "said"),
    [
        (("columns.tongue",), ("columns.lang",), "balance.cost 'mine' reads 'columns.tongue'"),
        (("lengths",), ("columns.tongue",), "balance.strategy 'mine' reads 'columns.tongue'"),
        (
            ("columns.tongue",),
            ("columns.tongue", "columns.word"),
            "balance.cost 'mine' and balance.strategy 'mine' read 'columns.tongue'",
        ),
    ],
)
def test_a_tag_that_no_batch_brings_is_refused_at_the_line_of_what_reads_it(
    reading, tmp_path, of_cost, of_strategy, said
):
    reading(of_cost, of_strategy)
    file = tmp_path / "mix.yaml"
    file.write_text("version: 1\nbalance:\n  cost: mine\n  strategy: mine\n")

    found = outcome_of(lambda: require_balance(MIX), file)

    line = 3 if "balance.cost" in said else 4
    assert str(found).startswith(f"{file}:{line}: {said}, and batches have")
    assert "name 'tongue' under batch.columns" in str(found)


@pytest.mark.parametrize(
    ("default", "said"),
    [
        ("é" * 32, ""),
        ("é" * 33, f"it is '{'é' * 33}' of 66 bytes, more than 64; have the cost"),
        ("e" * 65, f"it is '{'e' * 40}…' of 65 bytes, more than 64; have the cost"),
        ("de\0", r"it is 'de\x00', which ends in NUL, and an array of strings has it without"),
    ],
)
def test_a_default_that_no_cost_can_be_given_is_refused_at_its_line_where_one_reads_it(
    reading, tmp_path, default, said
):
    own = OWN["lang"] | {"default": default}
    mix = a_mix(
        sources={"my-web": SOURCE | {"columns": {"lang": own}}},
        balance={"cost": "mine"},
        batch={"tokens": 64, "micro_tokens": 32, "columns": ["lang"]},
    )
    file = tmp_path / "mix.yaml"
    file.write_text("sources:\n  my-web:\n    columns:\n      lang:\n        default: x\n")

    reading(("lengths", "columns.lang"), None)
    found = outcome_of(lambda: require_balance(mix), file)

    begins = f"{file}:5: sources.my-web.columns.lang.default: balance.cost 'mine' reads it, and"
    assert (found is None) if not said else str(found).startswith(begins)
    assert not said or said in str(found)
    reading(("lengths",), None)
    require_balance(mix)


@pytest.mark.parametrize("of", ["columns.lang", ["columns.lang"], ("lengths", 3)])
def test_columns_of_a_strategy_that_are_no_names_are_refused(reading, of):
    reading(None, of)

    with pytest.raises(ConfigError, match=r"balance\.strategy 'mine' has of=.*; give a tuple"):
        columns_read(MIX.balance)


def test_each_document_of_a_sample_that_joins_several_has_the_tags_of_the_sample():
    pieces = pieces_of([0, 0, 0, 0, 9, 9], [1, 0, 0, 0, 4, 4])
    documents = Ragged.of([np.array([2, 3, 4]), np.array([4])])
    tags = {"columns.lang": np.array(["de", "en"]), "columns.speech": np.array([7.0, 8.0])}

    rows = of_documents(pieces, np.array([0, 1, 2]), PieceFacts(documents=documents, tags=tags))
    columns = columns_of(rows, [{"domain": "math"}, {}], ("tags.domain",))

    assert rows.pieces.lengths_P.tolist() == [2, 3, 4, 4]
    assert columns["columns.lang"].tolist() == ["de", "de", "de", "en"]
    assert columns["columns.speech"].tolist() == [7, 7, 7, 8]
    assert columns["tags.domain"].tolist() == ["math"] * 3 + [""]


def test_patches_are_0_where_a_step_holds_no_image_and_a_cost_reads_them():
    rows = of_documents(pieces_of([(0, 0, 0, 0, 5, 5)]), np.array([0, 1]), PieceFacts())

    assert columns_of(rows, ({},), ("lengths", "patches"))["patches"].tolist() == [0]
    assert "patches" not in columns_of(rows, ({},), ("lengths",))


def test_a_column_that_no_step_has_is_refused_before_a_step(reading):
    reading(("lenghts",), None)

    with pytest.raises(
        ConfigError,
        match=r"'mine' reads 'lenghts', which no step has; there are lengths, sources, p",
    ):
        require_balance(MIX)
