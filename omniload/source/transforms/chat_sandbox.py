"""The sandbox that chat templates run in. Apart from the report, only this module imports jinja2."""

import json
import re
from collections.abc import Callable
from importlib.metadata import version
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from typing_extensions import override

from omniload.base.errors import ConfigError
from omniload.base.extras import install_line

__all__ = ["TemplateError", "environment"]

_SOUND = (3, 1, 6)
"""Release of Jinja that closed the known ways out of its sandbox.

Other packages, such as torch, install any release.
"""


class _Generation(Extension):
    """The block ``{% generation %} ... {% endgeneration %}``, which contains the words of the assistant."""

    tags = {"generation"}  # noqa: RUF012 -- as Jinja declares it

    @override
    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_marked")
        return nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _marked(self, caller: Callable[[], str]) -> str:
        marks: tuple[str, str] = self.environment.globals["_generation_marks"]  # type: ignore[assignment]
        return f"{marks[0]}{caller()}{marks[1]}"


def environment(begin: str, end: str) -> ImmutableSandboxedEnvironment:
    """Return a sandbox with the filters and functions that the templates of models use.

    Args:
        begin: Mark before the output of a generation block.
        end: Mark after it.

    Raises:
        ConfigError: The installed release of Jinja has a sandbox that templates can escape from.
    """
    found = version("jinja2")
    if tuple(map(int, re.findall(r"\d+", found)[:3])) < _SOUND:
        raise ConfigError(
            f"a chat template is untrusted code, and jinja2 {found}, which is installed, has known ways out "
            f"of its sandbox; {'.'.join(map(str, _SOUND))} has closed them: {install_line('chat')} --upgrade"
        )
    # Blanks around blocks are removed as in transformers, for which templates are written.
    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    # Stored in the globals, because an extension receives nothing but its environment.
    env.globals["_generation_marks"] = (begin, end)
    # Templates call this function to refuse a conversation.
    env.globals["raise_exception"] = _raise
    env.filters["tojson"] = _to_json
    return env


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(
    value: Any,  # noqa: ANN401 -- any value in a conversation
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON as templates expect it; Jinja's own filter would escape it for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
