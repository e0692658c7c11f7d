"""Strict settings: a frozen dataclass read from a mapping, every mistake named by its dotted path.

Nothing is coerced except int to float. NaN, infinity, unknown keys and values out of range are refused. Leaves out
reading files (policies.file) and composing overrides (conf).
"""

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from specdial.policies.errors import UserError

T = TypeVar("T")


def setting(
    default: Any = dataclasses.MISSING, *, low: float | None = None, high: float | None = None, later: bool = False
) -> Any:
    """A dataclass field with inclusive bounds that `parse` checks (for tuples, on every element).

    later: the field is younger than files in use. `to_plain` leaves it out while at its default, so that those files
    keep their bytes and their digests.
    """
    return dataclasses.field(default=default, metadata={"low": low, "high": high, "later": later})


def parse(cls: type[T], value: object, where: str = "") -> T:
    """Build `cls` from a mapping of its fields, recursively. Raises UserError naming the dotted path of the fault."""
    if not isinstance(value, Mapping):
        raise UserError(
            f"{where or cls.__name__} must be a mapping, got {shown(value)}",
            "write it as key: value pairs",
            field=where,
        )
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for key in value:
        if key not in fields:
            path = _join(where, str(key))
            raise UserError(f"unknown field {path}", f"use one of {', '.join(fields)}", field=path)
    hints = typing.get_type_hints(cls)
    arguments = {}
    for name, field in fields.items():
        path = _join(where, name)
        if name not in value:
            if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
                raise UserError(f"{path} is missing", f"add {name}", field=path)
            continue
        arguments[name] = _convert(hints[name], value[name], path)
        _check_range(arguments[name], field.metadata, path)
    return cls(**arguments)


def to_plain(value: Any, *, complete: bool = False) -> Any:
    """The mapping `parse` reads back: dataclasses to dicts in field order, tuples to lists.

    complete: with the `later` settings that are at their defaults.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        kept = [f for f in dataclasses.fields(value) if complete or not _left_out(f, value)]
        return {f.name: to_plain(getattr(value, f.name), complete=complete) for f in kept}
    if isinstance(value, (list, tuple)):
        return [to_plain(item, complete=complete) for item in value]
    if isinstance(value, Mapping):
        return {str(key): to_plain(item, complete=complete) for key, item in value.items()}
    return value


def _left_out(field: Any, value: Any) -> bool:
    return bool(field.metadata.get("later")) and getattr(value, field.name) == field.default


def _convert(hint: Any, value: object, path: str) -> Any:
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        options = get_args(hint)
        if value is None and type(None) in options:
            return None
        (inner,) = [option for option in options if option is not type(None)]
        return _convert(inner, value, path)
    if origin is Literal:
        if not any(type(value) is type(option) and value == option for option in get_args(hint)):
            options_text = ", ".join(map(str, get_args(hint)))
            raise UserError(f"{path} is {shown(value)}", f"use one of {options_text}", field=path)
        return value
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise UserError(f"{path} must be a list, got {shown(value)}", "write it as [a, b, ...]", field=path)
        return tuple(_convert(get_args(hint)[0], item, f"{path}[{i}]") for i, item in enumerate(value))
    if origin is dict:
        if not isinstance(value, Mapping):
            raise UserError(f"{path} must be a mapping, got {shown(value)}", "write it as key: value pairs", field=path)
        return _plain_data(value, path)
    if dataclasses.is_dataclass(hint):
        return parse(typing.cast(type, hint), value, path)
    if hint is float:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise UserError(f"{path} must be a number, got {shown(value)}", "give a finite number", field=path)
        return _finite(value, path)
    if hint is int and (isinstance(value, bool) or not isinstance(value, int)):
        raise UserError(f"{path} must be a whole number, got {shown(value)}", "give a whole number", field=path)
    if hint is bool and not isinstance(value, bool):
        raise UserError(f"{path} must be true or false, got {shown(value)}", "write true or false", field=path)
    if hint is str and not isinstance(value, str):
        raise UserError(f"{path} must be text, got {shown(value)}", "give a text value", field=path)
    return value


def _finite(value: int | float, path: str) -> float:
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise UserError(f"{path} is {shown(value)}", "give a finite number", field=path)
    return number


def _plain_data(value: object, path: str) -> Any:
    """A copy of free-form settings, of which only JSON's kinds of value may be made."""
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise UserError(f"{path} has the key {shown(key)}", "use text for keys", field=path)
        return {key: _plain_data(item, _join(path, key)) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain_data(item, f"{path}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, float):
        return _finite(value, path)
    if value is None or isinstance(value, (bool, int, str)):
        return value
    raise UserError(f"{path} is {shown(value)}", "give text, numbers, lists or mappings", field=path)


def _check_range(value: Any, bounds: Mapping[str, Any], path: str) -> None:
    items = value if isinstance(value, tuple) else (value,)
    low, high = bounds.get("low"), bounds.get("high")
    for item in items:
        if item is None or not isinstance(item, (int, float)):
            continue
        if low is not None and item < low:
            raise UserError(f"{path} is {item}", f"use at least {low}", field=path)
        if high is not None and item > high:
            raise UserError(f"{path} is {item}", f"use at most {high}", field=path)


def _join(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


def shown(value: object) -> str:
    """A value as messages show it, at most 60 characters of it."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
