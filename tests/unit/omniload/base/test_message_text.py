"""Names that others gave are fit for a terminal wherever a message quotes them."""

import logging
import pickle

import click
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rich.console import Console

from omniload.base import cli
from omniload.base.config import StrictModel, parse_yaml
from omniload.base.errors import ConfigError, OmniloadError
from omniload.base.log import set_up_logging
from omniload.base.message_text import SPELT_PLAINLY, message_text
from omniload.commands.display import bar, excerpt, say, table

HOSTILE = "a\u202etxt.exe\x1b[2J\x07\r\u2066\ud800\u2028b"
"""Turns the direction, clears the screen, rings, returns, and is no text of UTF-8."""
SPELT = r"a\u202etxt.exe\x1b[2J\x07\r\u2066\ud800\u2028b"
LONG = "n" * 100_000


class Anything(StrictModel):
    """No key is right."""


@pytest.mark.parametrize("text", ["", "a b", "größe 数 🙂", "two\nlines\tand a tab", "x" * 1024])
def test_what_a_terminal_prints_stays_as_it_is(text):
    assert message_text(text) == text


def test_what_it_does_not_print_is_spelt_out():
    assert message_text(HOSTILE) == SPELT


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_bars_are_of_plain_characters_where_the_encoding_has_no_others(encoding):
    drawn = f"{bar(0.5, 4)} {bar(0.05, 4)} {excerpt('abcdef', 4)} ±1%"

    plain = drawn.encode(encoding, SPELT_PLAINLY)
    assert plain.decode(encoding) in {"## | abc~ ~1%", "## | abc~ ±1%"}
    assert drawn.encode("utf-8", SPELT_PLAINLY).decode() == drawn


def test_other_characters_that_an_encoding_has_not_are_spelt_out():
    assert "größe 数 \udcff".encode("ascii", SPELT_PLAINLY) == rb"gr\xf6\xdfe \u6570 \udcff"
    with pytest.raises(UnicodeDecodeError):  # bytes are none of its business
        b"\xff".decode("utf-8", SPELT_PLAINLY)


def test_a_name_without_an_end_shows_its_start_and_its_end():
    said = message_text(f"a.yaml:6: sources.{LONG}.path: no such key; remove it")

    assert said.startswith("a.yaml:6: sources.nnn")
    assert said.endswith("nnn.path: no such key; remove it")
    assert "characters left out" in said
    assert len(said) < 400


def test_many_names_in_a_line_are_as_long_as_one():
    said = message_text(f"x: the names are {'name ' * 100_000}; choose one\nthe next line")

    assert said.startswith("x: the names are name name")
    assert said.endswith("name ; choose one\nthe next line")
    assert len(said) < 20_000


@given(st.text(max_size=60) | st.text("ab\u202e\x1b\n s:/@", min_size=1000, max_size=1100))
@example("\u202e://:@x")
def test_a_message_that_was_made_stays_as_it_is(text):
    assert message_text(message_text(text)) == message_text(text)


@given(st.text(max_size=200))
def test_no_message_moves_the_cursor(text):
    assert all(c.isprintable() or c in "\n\t" for c in message_text(text))


def test_every_error_is_made_so_and_crosses_a_process_boundary():
    error = OmniloadError(f"{HOSTILE} {LONG}")

    assert str(error).startswith(SPELT)
    assert len(str(error)) < 400
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_a_key_of_a_file_is_shown_so():
    with pytest.raises(ConfigError) as refused:
        parse_yaml(r'"z\u202e\e[31mx": 3', Anything, name="a.yaml")

    assert r"z\u202e\x1b[31mx" in str(refused.value)


def test_a_line_of_the_log_sends_a_terminal_no_commands_and_is_whole(capsys):
    set_up_logging("INFO")

    logging.getLogger("omniload.test").info("%s: %s", HOSTILE, LONG)

    said = capsys.readouterr().err
    assert SPELT in said
    assert LONG in said


def test_a_word_of_the_command_line_is_shown_so(capsys, monkeypatch):
    def refuse(**given):
        raise click.UsageError(f"No such command {HOSTILE}{LONG}")

    monkeypatch.setattr(cli.omniload, "main", refuse)

    with pytest.raises(SystemExit):
        cli.main(["x"])

    said = capsys.readouterr().err
    assert SPELT in said
    assert len(said) < 600


def test_what_commands_say_and_their_tables_are_made_so(capsys):
    console = Console(width=200)

    say(console, f"{HOSTILE}: valid")
    console.print(table("files", [("name", False)], [[HOSTILE]]))

    assert capsys.readouterr().out.count(SPELT) == 2
