"""Settings by keyword: found by their key, checked like the file, refused by name."""

import inspect
import json
import re

import pytest

from omniload.base.config import checked, parse_yaml
from omniload.base.errors import ConfigError
from omniload.front.opening import open_mix
from omniload.front.spec import _IN_ITS_PLACE, _OF_OPEN, _places, text_as_run, with_settings
from omniload.mix.config import MixConfig, load_mix
from tests.support.plane.builders import a_mix

MIX = {
    "version": 1,
    "seed": 1,
    "tokenizer": {"type": "bytes"},
    "sources": {"web": {"type": "text", "path": "*.txt", "tags": {"level": "1e5"}}},
    "mix": {"stages": [{"from_step": 0, "weights": {"web": 0.00001}}]},
    "pack": {"length": 8},
    "batch": {"tokens": 16, "micro_tokens": 8},
}


def test_a_setting_is_found_by_its_key():
    mix = with_settings(a_mix(), {"prefetch_steps": 9, "seed": 4})

    assert (mix.runtime.prefetch_steps, mix.seed) == (9, 4)


def test_a_key_of_two_sections_is_named_with_its_section():
    mix = with_settings(a_mix(), {"pack_method": "concat_and_split", "balance_method": "none"})

    assert (mix.pack.method, mix.balance.method) == ("concat_and_split", "none")


def test_nothing_changed_is_the_mix_itself():
    mix = a_mix()

    assert with_settings(mix, {}) is mix


def test_a_key_of_two_sections_alone_is_refused():
    with pytest.raises(ConfigError, match="pack_method or balance_method"):
        with_settings(a_mix(), {"method": "none"})


def test_an_unknown_setting_names_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'prefetch_steps'"):
        with_settings(a_mix(), {"prefetch_step": 9})


@pytest.mark.parametrize(
    ("given", "meant"),
    [("rundir", "run_dir"), ("world", "world_size"), ("label", "labels"), ("num_steps", "steps")],
)
def test_a_keyword_of_open_itself_may_be_meant_too(given, meant):
    with pytest.raises(ConfigError, match=f"did you mean '{meant}'"):
        with_settings(a_mix(), {given: 1})


def test_every_keyword_of_open_that_is_no_setting_is_among_those():
    kinds = inspect.signature(open_mix).parameters.values()

    assert [each.name for each in kinds if each.kind is each.KEYWORD_ONLY] == list(_OF_OPEN)


def test_a_keyword_of_torchs_loader_is_told_with_what_stands_in_its_place():
    with pytest.raises(
        ConfigError, match=r"called 'batch_size'; batch_tokens= sets the tokens of a step"
    ):
        with_settings(a_mix(), {"batch_size": 8})
    # Near to 'memory', which is a setting and no answer.
    with pytest.raises(ConfigError, match=r"called 'pin_memory'; device='cuda' copies[^;]*$"):
        with_settings(a_mix(), {"pin_memory": True})


def test_what_stands_in_the_place_of_a_keyword_exists_and_the_keyword_does_not():
    places = _places(a_mix())
    meant = {name for said in _IN_ITS_PLACE.values() for name in re.findall(r"(\w+)=", said)}

    assert meant <= {*places, *_OF_OPEN}
    assert not _IN_ITS_PLACE.keys() & {*places, *_OF_OPEN}


def test_a_keyword_that_nobody_knows_is_told_with_those_of_open_and_the_settings():
    with pytest.raises(
        ConfigError, match=r"'colour'; .*keywords are .* steps, .* mix: .* shadows,"
    ):
        with_settings(a_mix(), {"colour": 1})


def test_sources_are_no_setting():
    with pytest.raises(ConfigError, match="no setting is called 'sources'"):
        with_settings(a_mix(), {"sources": {}})


def test_the_list_of_settings_has_the_long_name_of_those_that_two_sections_have():
    with pytest.raises(ConfigError, match=r"settings of the mix: .*balance_method.*, pack_method,"):
        with_settings(a_mix(), {"no_such_thing": 1})


def test_a_value_is_checked_with_the_whole_mix():
    with pytest.raises(ConfigError, match=r"runtime\.prefetch_steps: found -1; give at least 0"):
        with_settings(a_mix(), {"prefetch_steps": -1})
    with pytest.raises(ConfigError, match=r"not a multiple of pack\.length"):
        with_settings(a_mix(), {"pack_length": 7})


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mix.yaml"
    path.write_text("# mine\n" + json.dumps(MIX), encoding="utf-8")
    return path


def test_a_file_is_kept_as_it_reads(file):
    model, _ = load_mix(file)

    kept = text_as_run(file, model)

    assert kept.path == file
    assert kept.text == file.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"seed": "x"}, "seed: found 'x'; give a whole number"),
        (
            {"pack_method": "best"},
            r"found 'best' \(did you mean 'best_fit'\?\); give 'best_fit', 'concat_and_split'",
        ),
        (
            {"runtime_journal": ["s3://KEY:SECRET@runs"]},
            "runtime.journal: found a URL; give a text",
        ),
    ],
)
def test_a_value_that_is_refused_is_told_as_that_of_a_mix_file(settings, said):
    with pytest.raises(ConfigError, match=said) as caught:
        with_settings(a_mix(), settings)

    assert "SECRET" not in str(caught.value)


def test_settings_of_the_call_are_part_of_what_is_kept(file):
    model = with_settings(load_mix(file)[0], {"pack_length": 4, "balance_linear": 1e-7})

    kept = text_as_run(str(file), model)

    assert kept.path == file
    assert parse_yaml(kept.text, MixConfig, name="kept") == model != load_mix(file)[0]


def test_a_mix_without_a_file_is_kept_beside_what_its_paths_start_at(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = checked(MIX, MixConfig, name="the mix")

    for given in (MIX, model):
        kept = text_as_run(given, model)

        assert kept.path.parent == tmp_path
        assert parse_yaml(kept.text, MixConfig, name="kept") == model


def test_a_mix_with_credentials_is_not_kept_and_the_log_says_so(tmp_path, caplog):
    source = {"type": "text", "path": "s3://AKIA123:hush-hush@bucket/*.txt"}
    model = checked(MIX | {"sources": {"web": source}}, MixConfig, name="the mix")

    assert text_as_run(model, model) is None

    assert "keeps no record" in caplog.text
    assert "hush" not in caplog.text
