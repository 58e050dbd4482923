"""Command lines in the documentation are understood by the program."""

import shlex
from itertools import pairwise, takewhile

import click
import pytest
import yaml

from omniload.base.cli import omniload
from tests.docs.snippets import ROOT, blocks_of, documents


def parse(arguments):
    """Walk the arguments down the commands as click does, and run nothing.

    Returns:
        The command they reach.

    Raises:
        click.ClickException: A noun, verb, option or value is not understood.
    """
    command, context, name, rest = omniload, None, "omniload", list(arguments)
    while isinstance(command, click.Group):
        context = click.Context(command, info_name=name, parent=context, **command.context_settings)
        _, rest, _ = command.make_parser(context).parse_args(rest)
        if not rest:
            return command
        name, rest = rest[0], rest[1:]
        found = command.get_command(context, name)
        if found is None:
            raise click.UsageError(f"{context.command_path} has no {name!r}")
        command = found
    if {"-h", "--help"}.isdisjoint(rest):
        command.make_context(name, rest, parent=context)
    return command


def _command_lines():
    for path in documents():
        for block in blocks_of(path):
            if block.language in ("console", "sh"):
                for line, text in block.commands():
                    yield f"{path.relative_to(ROOT)}:{line}", text
            elif path.name == "cli.md":
                # Examples in the help of commands.
                for at, text in enumerate(block.text.splitlines(), start=block.line):
                    if text.strip().startswith("omniload ") and "[OPTIONS]" not in text:
                        yield f"{path.relative_to(ROOT)}:{at}", text.strip()


def arguments_of(line):
    """Return what the shell hands to the program: no comment, and nothing after a pipe or a redirection."""
    words = shlex.split(line, comments=True)[1:]
    return list(takewhile(lambda word: word not in {"|", ">", ">>", "&&", "&"}, words))


COMMANDS = dict(_command_lines())
OURS = {
    where: arguments_of(text) for where, text in COMMANDS.items() if text.startswith("omniload ")
}


@pytest.mark.parametrize("where", sorted(OURS))
def test_a_command_line_is_understood(where):
    parse(OURS[where])


def _sources_changed(verb, words):
    """Yield the sources that an example of a verb names."""
    for before, word in pairwise([verb, *words]):
        if verb == "set" and "=" in word:
            yield word.partition("=")[0]
        if before in {"retire", "--source", "--shard"}:
            yield word.partition("/")[0]


def test_examples_of_help_change_sources_that_the_demo_has():
    declared = yaml.safe_load((ROOT / "examples/quickstart.yaml").read_text())["sources"]

    named = [
        name
        for where, words in OURS.items()
        if "cli.md" in where and words[2:3] == ["demo/run"]
        for name in _sources_changed(words[1], words[3:])
    ]

    assert len(named) > 5
    assert set(named) <= declared.keys()


def _every_command(command, name):
    yield name, command
    if isinstance(command, click.Group):
        context = click.Context(command, info_name=name)
        for verb in command.list_commands(context):
            yield from _every_command(command.get_command(context, verb), f"{name} {verb}")


def test_the_help_of_every_command_has_an_example_of_it_or_of_its_verbs():
    without = [
        name
        for name, command in _every_command(omniload, "omniload")
        if f"  {name}" not in (command.help or "").partition("Example")[2]
    ]

    assert without == []


def test_the_tutorial_walks_through_every_verb_that_a_run_needs():
    walked = {tuple(arguments[:2]) for where, arguments in OURS.items() if "tutorial" in where}

    assert walked >= {
        ("mix", "check"),
        ("mix", "plan"),
        ("mix", "preview"),
        ("mix", "audit"),
        ("train", "run"),
        ("train", "verify"),
    }


@pytest.mark.parametrize(
    "arguments",
    [["mux", "check"], ["mix", "chek"], ["mix", "check", "a.yaml", "--no-such"], ["mix", "check"]],
    ids=["noun", "verb", "option", "argument"],
)
def test_a_command_line_that_is_wrong_is_not_understood(arguments):
    with pytest.raises(click.ClickException):
        parse(arguments)


def test_what_the_shell_keeps_for_itself_is_no_argument():
    line = "omniload mix schema --opt 'a b' > out.json  # a comment"

    assert arguments_of(line) == ["mix", "schema", "--opt", "a b"]


def test_a_command_line_is_parsed_and_not_run():
    assert parse(["mix", "check", "there-is-no-such.yaml"]).name == "check"
