"""Configuration faults: every one at once, with file, line and key."""

from typing import Annotated, Literal

import pytest
from pydantic import Field, ValidationError

from omniload.base.config import StrictModel, checked, load_yaml, parse_yaml
from omniload.base.errors import ConfigError
from omniload.mix.config import MixConfig


class Square(StrictModel):
    type: Literal["square"]
    side: int = Field(gt=0)


class Circle(StrictModel):
    type: Literal["circle"]
    radius: float


class Drawing(StrictModel):
    name: str
    shapes: tuple[Annotated[Square | Circle, Field(discriminator="type")], ...] = Field(
        min_length=1
    )
    limits: dict[str, Annotated[int, Field(ge=0)]] = Field(default_factory=dict)


def faults_of(text, model=Drawing):
    with pytest.raises(ConfigError) as caught:
        parse_yaml(text, model, name="a.yaml")
    return str(caught.value).splitlines()


def test_a_good_file_is_read(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text("name: x\nshapes:\n- {type: square, side: 2}\n", encoding="utf-8")

    assert load_yaml(file, Drawing) == Drawing(name="x", shapes=(Square(type="square", side=2),))


def test_faults_are_reported_all_at_once_each_with_its_line_and_key():
    text = """\
name: x
shapes:
- type: square
  side: 0
- type: circle
limits:
  wide: -1
colour: red
"""

    assert faults_of(text) == [
        "a.yaml:4: shapes.0.side: Input should be greater than 0",
        "a.yaml:5: shapes.1.radius: Field required",
        "a.yaml:7: limits.wide: Input should be greater than or equal to 0",
        "a.yaml:8: colour: Extra inputs are not permitted",
    ]


def test_the_tag_of_a_union_is_no_part_of_the_key():
    (fault,) = faults_of("name: x\nshapes:\n- {type: square, side: wide}\n")

    assert fault.startswith("a.yaml:3: shapes.0.side: ")


def test_an_unknown_tag_names_those_there_are():
    (fault,) = faults_of("name: x\nshapes:\n- {type: star}\n")

    assert fault.startswith("a.yaml:3: shapes.0: ")
    assert "'star'" in fault
    assert "'square', 'circle'" in fault


def test_a_key_given_twice_is_a_fault_even_where_the_values_agree():
    assert faults_of("name: x\nname: x\nshapes: [{type: circle, radius: 1, radius: 1}]\n") == [
        "a.yaml:2: name: key given twice",
        "a.yaml:3: shapes.0.radius: key given twice",
    ]


def test_a_missing_key_of_an_empty_file_is_placed_on_its_first_line():
    assert faults_of("")[0] == "a.yaml:1: name: Field required"


def test_a_list_where_keys_belong_is_a_fault_of_the_whole_file():
    (fault,) = faults_of("- 1\n- 2\n")

    assert fault.startswith("a.yaml:1: Input should be")


def test_text_that_is_no_yaml_is_reported_with_its_line():
    (fault,) = faults_of("name: x\nshapes: [\n")

    assert fault.startswith("a.yaml:3: not valid YAML: ")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[name]: x\n", "a key is a list or a mapping"),
        ("name: x\nshapes: &s [*s]\n", "shapes.0 refers to what holds it"),
        ("name: 2024-13-45\n", "month must be in 1..12"),
        ("name: !!python/object:os.system {}\n", "could not determine a constructor"),
    ],
)
def test_yaml_that_python_cannot_hold_is_a_fault_and_not_a_traceback(text, reason):
    faults = "\n".join(faults_of(text))

    assert "not valid YAML" in faults
    assert reason in faults


def test_a_value_used_twice_by_anchor_is_no_fault():
    text = "name: x\nshapes:\n- &a {type: circle, radius: 1}\n- *a\n"

    assert len(parse_yaml(text, Drawing, name="a.yaml").shapes) == 2


def test_a_missing_file_is_a_configuration_error(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.yaml: no such file; give the path"):
        load_yaml(tmp_path / "none.yaml", Drawing)


def test_a_folder_is_a_configuration_error(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read as UTF-8 text"):
        load_yaml(tmp_path, Drawing)


def test_bytes_that_are_no_text_are_a_configuration_error(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_bytes(b"name: \xff\n")

    with pytest.raises(ConfigError, match="cannot be read as UTF-8 text"):
        load_yaml(file, Drawing)


def test_a_model_cannot_be_changed():
    shape = Square(type="square", side=1)

    with pytest.raises(ValidationError, match="frozen"):
        shape.side = 2


def test_a_fault_of_a_whole_union_member_names_no_key_that_the_file_lacks(tmp_path):
    file = tmp_path / "mix.yaml"
    file.write_text("version: 1\nsources:\n  web: {type: parquet, path: web.parquet}\n")

    with pytest.raises(
        ConfigError, match=r"mix\.yaml:3: sources\.web: text is None and tokens is None"
    ):
        load_yaml(file, MixConfig)


@pytest.mark.parametrize(
    ("key", "meant"),
    [("nam", "name"), ("limts", "limits"), ("radius", None), ("name_of_all", None)],
)
def test_a_key_that_is_nearly_one_names_it(key, meant):
    (fault,) = faults_of(f"name: x\nshapes: [{{type: square, side: 1}}]\n{key}: 1\n")

    tail = f"; did you mean {meant!r}?" if meant else ""
    assert fault == f"a.yaml:3: {key}: Extra inputs are not permitted{tail}"


def test_a_key_of_an_item_is_looked_for_among_those_of_items():
    (fault,) = faults_of("name: x\nshapes:\n- {type: square, side: 1, sied: 2}\n")

    assert fault.endswith("; did you mean 'side'?")


def test_what_a_program_gives_is_checked_as_a_file_is_without_lines():
    fields = {"name": "x", "shapes": [{"type": "square", "side": 1}]}
    assert checked(fields, Drawing, name="given").shapes[0].side == 1

    with pytest.raises(ConfigError) as caught:
        checked({"nam": "x", "shapes": fields["shapes"]}, Drawing, name="given")

    assert str(caught.value).splitlines() == [
        "given: name: Field required",
        "given: nam: Extra inputs are not permitted; did you mean 'name'?",
    ]
