"""What a decorated function is: one that keeps its signature, works as a method, and can be pickled."""

from __future__ import annotations

import copy
import functools
import importlib
from typing import TYPE_CHECKING, Any

import wrapt

__all__ = ["Decorated"]

if TYPE_CHECKING:
    _FunctionWrapper = wrapt.FunctionWrapper[..., Any]
    _BoundWrapper = wrapt.BoundFunctionWrapper[..., Any]
else:
    _FunctionWrapper, _BoundWrapper = wrapt.FunctionWrapper, wrapt.BoundFunctionWrapper


class _Bound(_BoundWrapper):
    """A decorated method of an object or a class. Pickled by the object or the class, and its name there."""

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        method = self.__wrapped__
        owner = getattr(method, "__self__", None)
        if owner is not None:
            return getattr, (owner, method.__name__)
        return _of_name, (method.__module__, method.__qualname__)  # a static method, or one looked up in its class

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        make, (first, name) = self.__reduce_ex__(4)
        return make(copy.deepcopy(first, memo), name)


class Decorated(_FunctionWrapper):
    """A decorated function or method. Pickled by its name, as any function is."""

    __bound_function_wrapper__ = _Bound

    def __reduce_ex__(self, protocol: Any) -> str:
        name: str = self.__wrapped__.__qualname__
        return name

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self


def _of_name(module: str, name: str) -> Any:
    return functools.reduce(getattr, name.split("."), importlib.import_module(module))
