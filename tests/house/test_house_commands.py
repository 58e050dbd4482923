"""The command line speaks a closed set of verbs, each explained by an example."""

from importlib.metadata import entry_points

import click
import pytest

VERBS = {"check", "plan", "show", "preview", "record", "prefetch", "mount", "umount", "export"}
VERBS |= {"save", "restore", "verify", "run", "set", "audit", "bench", "sample", "schema", "stat"}
VERBS |= {"startup", "drop", "convert", "prune", "serve", "top", "watch", "crossover"}
VERBS |= {"doctor", "add", "import", "retire", "undo", "skip", "stats", "diff", "simulate", "steer"}
VERBS |= {"drawn", "stop", "tokenise"}


def nouns():
    return {point.name: point.load() for point in entry_points(group="omniload.commands")}


def verbs(group):
    context = click.Context(group)
    return [(verb, group.get_command(context, verb)) for verb in group.list_commands(context)]


COMMANDS = [
    pytest.param(noun, verb, command, id=f"{noun} {verb}")
    for noun, group in nouns().items()
    for verb, command in verbs(group)
]


def test_a_verb_lies_where_its_group_says():
    assert [command.values[1] for command in COMMANDS if command.values[2] is None] == []
    assert all(verb == command.name for _, verb, command in (each.values for each in COMMANDS))


def test_every_noun_is_a_group_of_verbs():
    assert nouns()
    assert all(isinstance(noun, click.Group) for noun in nouns().values())


@pytest.mark.parametrize("group", nouns().values(), ids=nouns())
def test_a_noun_says_of_its_verbs_what_they_say_themselves(group):
    context = click.Context(group, terminal_width=300)
    formatter = context.make_formatter()
    group.format_commands(context, formatter)

    lines = [line.split(maxsplit=1) for line in formatter.getvalue().splitlines()[1:]]
    of_themselves = [[verb, command.get_short_help_str(300)] for verb, command in verbs(group)]
    assert [[verb, said.strip()] for verb, said in lines] == of_themselves


@pytest.mark.parametrize(("noun", "verb", "command"), COMMANDS)
def test_a_verb_is_one_of_the_closed_set(noun, verb, command):
    assert verb in VERBS


@pytest.mark.parametrize(("noun", "verb", "command"), COMMANDS)
def test_a_command_has_an_example_that_names_it(noun, verb, command):
    assert "Example" in (command.help or "")
    assert f"omniload {noun} {verb}" in command.help
