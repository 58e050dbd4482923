"""Files of ours as JSON schemas, a mix file among them, and what the docstrings of its models say of their keys.

Pydantic can read docstrings whenever a model is defined; over the models of a mix that took a quarter of
the time that every process of a run needs to import them, and no run looks at them.
"""

import ast
import inspect
import textwrap
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Any, TypeAlias

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import core_schema
from typing_extensions import override

from omniload.mix.config import MixConfig

__all__ = ["file_schema", "json_schema_of", "meanings_of", "mix_schema"]

Schema: TypeAlias = dict[str, Any]
_VARIABLE = {"type": "string", "pattern": r"\$\{[A-Za-z_]"}
"""A word with a variable in it, which may stand for any number or word."""


def meanings_of(model: type[BaseModel]) -> dict[str, str]:
    """Return the docstrings below the keys of a model and of those that it extends, by key."""
    meanings: dict[str, str] = {}
    for extended in reversed(model.__mro__):
        if issubclass(extended, BaseModel) and extended is not BaseModel:
            meanings |= _docstrings(extended)
    return meanings


def json_schema_of(model: type[BaseModel]) -> Schema:
    """Return the JSON schema of a file that is read into ``model``: meanings in it, and variables allowed."""
    return model.model_json_schema(schema_generator=_WithVariables)


def file_schema(model: type[BaseModel], *, kind: str, version: int) -> Schema:
    """Return the JSON schema of a file of ``model`` that has no variables; its ``$id`` says kind and version."""
    return _published(model.model_json_schema(schema_generator=_WithMeanings), kind, version)


def _published(schema: Schema, kind: str, version: int) -> Schema:
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:omniload:{kind}:{version}",
        **schema,
    }


# Python parses a whole module to find one class in it, and a class is extended by many.
@cache
def _docstrings(model: type[BaseModel]) -> Mapping[str, str]:
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(model))).body
    assert isinstance(body, ast.ClassDef), f"{model.__name__} is no class of a file"
    found = {}
    for field, said in zip(body.body, body.body[1:], strict=False):
        match field, said:
            case (
                ast.AnnAssign(target=ast.Name(id=key)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                found[key] = inspect.cleandoc(text)
    return MappingProxyType(found)


class _WithMeanings(GenerateJsonSchema):
    """The schema of a file, each key with what it means."""

    @override
    def model_schema(self, schema: core_schema.ModelSchema) -> Schema:
        made = super().model_schema(schema)
        for key, meaning in meanings_of(schema["cls"]).items():
            if key in made.get("properties", {}):
                made["properties"][key].setdefault("description", meaning)
        return made


class _WithVariables(_WithMeanings):
    """The schema of what is written in a file, before variables of the environment are put in."""

    @override
    def int_schema(self, schema: core_schema.IntSchema) -> Schema:
        return _or_variable(super().int_schema(schema))

    @override
    def float_schema(self, schema: core_schema.FloatSchema) -> Schema:
        return _or_variable(super().float_schema(schema))

    @override
    def bool_schema(self, schema: core_schema.BoolSchema) -> Schema:
        return _or_variable(super().bool_schema(schema))

    @override
    def model_field_schema(self, schema: core_schema.ModelField) -> Schema:
        # Words only where they are values: keys are read as they stand, and so is a tag, a single word
        # that says which keys there may be.
        made = super().model_field_schema(schema)
        kinds = made.get("anyOf", [made])
        is_closed = any("enum" in kind or "pattern" in kind for kind in kinds)
        # Numbers have it already, by their own kind.
        return _or_variable(made) if is_closed and _VARIABLE not in kinds else made


def _or_variable(made: Schema) -> Schema:
    # A default is of the key, and not of one of the ways to write it.
    outside = {key: made[key] for key in ("default",) if key in made}
    inside = {key: value for key, value in made.items() if key not in outside}
    return {"anyOf": [*inside.get("anyOf", [inside]), _VARIABLE], **outside}


def mix_schema() -> dict[str, Any]:
    """Return the JSON schema of a mix file. Its ``$id`` changes with the version of the format."""
    schema = json_schema_of(MixConfig)
    file = {"type": "string", "minLength": 1}
    include = {
        "anyOf": [file, {"type": "array", "items": file, "minItems": 1}],
        "description": "Version 2: files whose keys are below those of this one; their names start at its folder.",
    }
    # What a file does not say, one that it includes may.
    whole = {
        "if": {"required": ["include"]},
        "then": {"required": ["version"]},
        "else": {"required": schema.pop("required")},
    }
    drawn = schema["$defs"]["WeightsConfig"]
    # Of a run that draws amounts the stages are made from them.
    drawn["anyOf"] = [{"required": [key]} for key in (*drawn.pop("required"), "amounts")]
    properties = {"include": include, **schema["properties"]}
    return _published({**schema, **whole, "properties": properties}, "mix", 2)
