"""The closed table of types, and the keys of each."""

import ast
from pathlib import Path

import pytest
from pydantic import TypeAdapter, ValidationError

import omniload
from omniload.mix.sources import SOURCE_TYPES, NumpySource, SourceConfig

SOURCE = TypeAdapter(SourceConfig)
PACKAGE = Path(omniload.__file__).parent
FORMATS = PACKAGE / "source/formats"


def test_types_and_modules_are_the_same_names():
    modules = {path.stem for path in FORMATS.glob("*.py") if "\nFORMAT = " in path.read_text()}

    assert modules == set(SOURCE_TYPES)


@pytest.mark.parametrize("kind", ["arrow", "csv", "mds", "megatron", "webdataset"])
def test_a_type_is_named_in_its_module_and_in_the_table_alone(kind):
    """A format is added, and taken out, in its module, the table, the kinds of the contract and one page."""
    quoted = (f'"{kind}"', f"'{kind}'")
    naming = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        # Other tools use the same names, and mix files that come with a corpus of ours are as users write them.
        if "importing" not in path.parts
        and path.name != "sample.py"
        and any(each in (text := path.read_text()) for each in quoted)  # all are seconds to parse
        and any(
            isinstance(node, ast.Constant) and node.value == kind
            for node in ast.walk(ast.parse(text))
        )
    }

    own = f"source/formats/{kind}.py", f"source/parsing/{kind}_"
    assert [name for name in naming if not name.startswith(own)] == ["mix/sources.py"]


def test_another_type_is_refused_with_those_there_are():
    with pytest.raises(ValidationError) as caught:
        SOURCE.validate_python({"type": "tfrecord", "path": "x"})

    assert all(f"'{kind}'" in str(caught.value) for kind in SOURCE_TYPES)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (
            {
                "end_of_document": 1,
                "row_tokens": 4,
                "transforms": [{"type": "clamp", "tokens": 2}],
            },
            "clamp changes rows, and row_tokens 4 with end_of_document 1 keeps documents apart",
        ),
        ({"end_of_document": -1}, "greater than or equal to 0"),
        (
            {
                "row_tokens": 4,
                "transforms": [{"type": "fim", "prefix": 1, "suffix": 2, "middle": 3}],
            },
            "fim rearranges documents, and row_tokens 4 cuts rows",
        ),
        ({"row_tokens": 0}, "greater than or equal to 1"),
        ({"dtype": "float32"}, "Input should be 'uint8'"),
    ],
)
def test_keys_of_numpy_that_do_not_fit(keys, said):
    with pytest.raises(ValidationError, match=said):
        NumpySource(type="numpy", path="x", **keys)


@pytest.mark.parametrize("delimiter", ["", ",,", '"', "\n", "é"])
def test_a_delimiter_is_one_character_that_is_no_quote(delimiter):
    with pytest.raises(ValidationError, match="delimiter"):
        SOURCE.validate_python({"type": "csv", "path": "x", "delimiter": delimiter})


def test_numbers_may_be_written_with_units():
    source = SOURCE.validate_python(
        {"type": "numpy", "path": "x", "row_tokens": "4Ki", "header": "1KiB", "unit": "8MiB"}
    )

    assert (source.row_tokens, source.header, source.unit) == (4_096, 1_024, 8 << 20)
    assert not source.holds_text
