"""Validation of JSON documents: pydantic checks them, and clients get errors in plain words.

Unknown fields are ignored and `null` means absent, at every level, as in OpenAI's API. A wrong type is an
error that names the field.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    GetCoreSchemaHandler,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic_core import CoreSchema, ErrorDetails, core_schema

from app.intake.long_string import LongString
from deployments.errors import InvalidRequest

UNION = "union:"  # prefix of a union's tag; `param_path` leaves such tags out

LongStrings = Mapping[str, LongString]  # token in the document -> the string that the intake cut out there


class WireModel(BaseModel):
    """An object as a client sends it."""

    model_config = ConfigDict(strict=True, extra="ignore")

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: object) -> object:
        return {k: v for k, v in data.items() if v is not None} if isinstance(data, dict) else data


W = TypeVar("W", bound=WireModel)


class FieldError(ValueError):
    """A field of the object that is being validated is wrong."""

    def __init__(self, message: str, field: str) -> None:
        super().__init__(message, field)
        self.message, self.field = message, field


class EntryError(ValueError):
    """An entry of the list that is being validated is wrong."""

    def __init__(self, message: str, index: int) -> None:
        super().__init__(message, index)
        self.message, self.index = message, index


def long_strings(info: ValidationInfo) -> LongStrings:
    strings: LongStrings = info.context or {}
    return strings


class _LongStringsAllowed:
    """Validates a string. In the place of a token it puts the long string that the token stands for."""

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.with_info_after_validator_function(
            lambda text, info: long_strings(info).get(text, text), core_schema.str_schema(strict=True)
        )


def _refuse_long_string(text: str, info: ValidationInfo) -> str:
    if text in long_strings(info):
        raise ValueError("is too long")
    return text


LongText = Annotated[str | LongString, _LongStringsAllowed()]
# For other fields, in which a token could otherwise pass for the client's string.
NotLong = AfterValidator(_refuse_long_string)


def parse_as(model: type[W], document: object, strings: LongStrings | None = None) -> W:
    """Raises InvalidRequest naming the first wrong field: `messages[0].content[2].image_url.url`."""
    try:
        return model.model_validate(document, context=strings)
    except ValidationError as error:
        raise _first_error(error) from None


# Pydantic's name of an error -> a message, filled in from pydantic's context for it.
_MESSAGES = {
    "missing": "is missing",
    "string_type": "must be a string",
    **dict.fromkeys(
        ("int_type", "int_parsing", "int_from_float"),
        "must be an integer, of at most 64 bits and without a decimal point",
    ),
    **dict.fromkeys(("float_type", "float_parsing"), "must be a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "must be true or false"),
    "list_type": "must be a list",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "literal_error": "must be {expected}",
    "greater_than": "must be greater than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "too_short": "must have at least {min_length} entries",
    "too_long": "must have at most {max_length} entries",
    "string_too_short": "must have at least {min_length} characters",
    "string_too_long": "must have at most {max_length} characters",
    "string_pattern_mismatch": "must match {pattern}",
    "extra_forbidden": "is not known here",
    "value_error": "{error}",
    **dict.fromkeys(("part_type", "content_type", "tensor"), "{message}"),
}


def _first_error(error: ValidationError) -> InvalidRequest:
    first = error.errors(include_url=False, include_input=False)[0]
    param, context = param_path(first["loc"]), first.get("ctx", {})
    match context.get("error"):
        case EntryError() as wrong:
            return InvalidRequest(wrong.message, f"{param}[{wrong.index}]")
        case FieldError() as wrong:
            return InvalidRequest(wrong.message, f"{param}.{wrong.field}".lstrip("."))
    if not param:
        return InvalidRequest("The body must be a JSON object.")
    return InvalidRequest(f"{param}: {describe(first)}", param)


def describe(error: ErrorDetails) -> str:
    """Says in plain words why a value is wrong."""
    values = {"message": error["msg"], **error.get("ctx", {})}
    return _MESSAGES.get(error["type"], "is not valid").format(**values)


def param_path(location: tuple[str | int, ...]) -> str:
    """("messages", 0, "content", "union:list", 1) → "messages[0].content[1]"."""
    steps = [step for step in location if not (isinstance(step, str) and step.startswith(UNION))]
    path = "".join(f"[{step}]" if isinstance(step, int) else f".{step[:64]}" for step in steps)
    return path.removeprefix(".")
