"""`record`: immutable dataclasses with slots, made in a tenth of the time.

``@dataclass(frozen=True, slots=True)`` compiles seven methods for each class, which was a third of the time of
``import sqlsem``. A `record` compiles ``__init__`` alone, for its first instance; the other methods are functions that
all records share.
"""

from __future__ import annotations

import dataclasses
import inspect
import operator
from collections.abc import Callable
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypeVar

__all__ = ["AsDict", "plain", "record"]

T = TypeVar("T")

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:

    def dataclass_transform(**_: Any) -> Callable[[T], T]:
        """Return a decorator without effect: only type checkers need `typing.dataclass_transform`."""
        return lambda function: function


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def record(cls: type[T]) -> type[T]:
    """Make a class as ``@dataclass(frozen=True, slots=True)`` does. Functions such as `dataclasses.replace` work, too.

    >>> @record
    ... class Point:
    ...     x: int
    ...     y: int = 0
    >>> Point(1), Point(1) == Point(1, 0)
    (Point(x=1, y=0), True)
    """
    own = vars(cls)
    made: Any = dataclasses.dataclass(init=False, repr=False, eq=False, slots=True)(cls)
    fields = dataclasses.fields(made)

    def __init__(self: Any, *values: Any, **named: Any) -> None:
        made.__init__ = init = _compile_init(made, fields)  # (Two threads may do this, with the same result.)
        init(self, *values, **named)

    methods: dict[str, Any] = {
        "__init__": __init__,
        "__signature__": _Signature(fields),
        "__setattr__": _refuse_set,
        "__delattr__": _refuse_delete,
        "__getstate__": _get_state,
        "__setstate__": _set_state,
    }
    compared = _getter([field.name for field in fields if field.compare])

    def __eq__(self: Any, other: object) -> bool:
        return compared(self) == compared(other) if other.__class__ is self.__class__ else NotImplemented

    def __hash__(self: Any) -> int:
        return hash(compared(self))

    defaults = {"__repr__": _repr, "__eq__": __eq__, "__hash__": __hash__}
    methods.update((name, method) for name, method in defaults.items() if own.get(name) is None)
    for name, method in methods.items():
        setattr(made, name, method)
    result: type[T] = made
    return result


class _Signature:
    """The signature of a record class, as `inspect.signature` reads it. (`inspect` is loaded by dataclasses anyway.)"""

    def __init__(self, fields: tuple[dataclasses.Field[Any], ...]) -> None:
        self._fields = fields

    def __get__(self, instance: object, cls: type) -> inspect.Signature:
        signature = inspect.signature(_compile_init(cls, self._fields))
        return signature.replace(parameters=list(signature.parameters.values())[1:])


def _compile_init(cls: Any, fields: tuple[dataclasses.Field[Any], ...]) -> Any:
    """Return the method ``__init__``, with the signature that the fields give it."""
    known: dict[str, Any] = {"set_field": object.__setattr__}
    parameters, body = ["self"], []
    for field in fields:
        value = field.name
        if field.default_factory is not dataclasses.MISSING:
            known[f"make_{field.name}"] = field.default_factory
            known["MISSING"] = dataclasses.MISSING
            parameters.append(f"{field.name}=MISSING")
            value = f"make_{field.name}() if {field.name} is MISSING else {field.name}"
        elif field.default is not dataclasses.MISSING:
            known[f"default_{field.name}"] = field.default
            parameters.append(f"{field.name}=default_{field.name}")
        elif field.init:
            parameters.append(field.name)
        if field.init:
            body.append(f" set_field(self, {field.name!r}, {value})")
    if hasattr(cls, "__post_init__"):
        body.append(" self.__post_init__()")
    text = f"def __init__({', '.join(parameters)}):\n" + "\n".join(body or [" pass"])
    # (`exec` of a text would make Python forget that an interrupt ends the process: it would not end by SIGINT.)
    exec(compile(text, "<record>", "exec"), known)  # noqa: S102
    init = known["__init__"]
    init.__annotations__ = {**{field.name: field.type for field in fields if field.init}, "return": None}
    init.__qualname__, init.__module__ = f"{cls.__qualname__}.__init__", cls.__module__
    return init


def _getter(names: list[str]) -> Callable[[Any], Any]:
    return operator.attrgetter(*names) if names else lambda _: ()


def _repr(self: Any) -> str:
    texts = [f"{field.name}={getattr(self, field.name)!r}" for field in dataclasses.fields(self) if field.repr]
    return f"{self.__class__.__qualname__}({', '.join(texts)})"


def _refuse_set(self: Any, name: str, value: object) -> None:
    raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")


def _refuse_delete(self: Any, name: str) -> None:
    raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")


def _get_state(self: Any) -> list[Any]:
    return [getattr(self, field.name) for field in dataclasses.fields(self)]


def _set_state(self: Any, state: list[Any]) -> None:
    for field, value in zip(dataclasses.fields(self), state, strict=True):
        object.__setattr__(self, field.name, value)


def plain(value: Any) -> dict[str, Any]:
    """Return the fields of a record, ready for JSON; a record inside it by its own `AsDict.as_dict`, if it has one."""
    return {field.name: _json_value(getattr(value, field.name)) for field in dataclasses.fields(value)}


def _json_value(item: Any) -> Any:
    if isinstance(item, datetime):
        return item.isoformat()
    if isinstance(item, AsDict):
        return item.as_dict()
    if dataclasses.is_dataclass(item):
        return plain(item)
    if isinstance(item, dict):
        return {name: _json_value(inner) for name, inner in item.items()}
    return [_json_value(inner) for inner in item] if isinstance(item, list | tuple) else item


class AsDict:
    """A record whose fields are ready for JSON."""

    __slots__ = ()

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as JSON-ready values."""
        return plain(self)
