"""Settings by keyword: found by their key, checked like the file, refused by name."""

import pytest

from omniload.base.errors import ConfigError
from omniload.front.settings import with_settings
from tests.support.plane.builders import a_mix


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


def test_sources_are_no_setting():
    with pytest.raises(ConfigError, match="no setting is called 'sources'"):
        with_settings(a_mix(), {"sources": {}})


def test_a_value_is_checked_with_the_whole_mix():
    with pytest.raises(
        ConfigError, match=r"prefetch_steps: .*greater than or equal to 0, found -1"
    ):
        with_settings(a_mix(), {"prefetch_steps": -1})
    with pytest.raises(ConfigError, match=r"not a multiple of pack\.length"):
        with_settings(a_mix(), {"pack_length": 7})
