"""The sandbox that chat templates run in. The only ``import jinja2`` beside the report's."""

import json
from collections.abc import Callable
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from typing_extensions import override

__all__ = ["TemplateError", "environment"]


class _Generation(Extension):
    """``{% generation %} ... {% endgeneration %}``: what the assistant says."""

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
    """Return a sandbox with the filters and functions that templates of models use.

    Args:
        begin: Put before what a generation block renders.
        end: Put behind it.
    """
    # Blanks around blocks go as in transformers, for which templates are written.
    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    # Among the globals: an extension is made by its environment, which hands it nothing else.
    env.globals["_generation_marks"] = (begin, end)
    # By this name templates refuse a conversation.
    env.globals["raise_exception"] = _raise
    env.filters["tojson"] = _to_json
    return env


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(
    value: Any,  # noqa: ANN401 -- whatever a conversation holds
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON as templates expect it: Jinja's own filter escapes for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
