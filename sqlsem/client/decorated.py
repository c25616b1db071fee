"""Functions decorated by a lock. They keep their signature, work as methods, and can be pickled by their names."""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeVar, cast

import wrapt

from sqlsem.client.operations.terms import AnyRequest, Terms
from sqlsem.values.errors import ConfigurationError

__all__ = ["hold", "hold_awaiting", "is_coroutine", "run_once", "run_once_awaiting"]

F = TypeVar("F", bound=Callable[..., Any])

if TYPE_CHECKING:
    _FunctionWrapper = wrapt.FunctionWrapper[..., Any]
    _BoundWrapper = wrapt.BoundFunctionWrapper[..., Any]
else:
    _FunctionWrapper, _BoundWrapper = wrapt.FunctionWrapper, wrapt.BoundFunctionWrapper


class _Bound(_BoundWrapper):
    """A decorated method of an object or a class. It is pickled as that object or class, and the method's name."""

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        method = self.__wrapped__
        owner = getattr(method, "__self__", None)
        if owner is not None:
            return getattr, (owner, method.__name__)
        return _of_name, (method.__module__, method.__qualname__)  # a static method, or a function read from its class

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        make, (first, name) = self.__reduce_ex__(4)
        return make(copy.deepcopy(first, memo), name)


class _Decorated(_FunctionWrapper):
    """A decorated function or method. It is pickled by its name, as any function is."""

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


def is_coroutine(function: Callable[..., Any]) -> bool:
    """Return True for a coroutine function. Raises `ConfigurationError` for functions that no lock can guard."""
    inner = inspect.unwrap(getattr(function, "__func__", function))
    name = _name_of(function)
    if inspect.isclass(inner) or not callable(inner):
        raise ConfigurationError(f"A lock decorates functions and methods, not {name}")
    kinds = (inner, getattr(inner, "__call__", None))  # noqa: B004  (for a callable object, its method)
    if any(map(inspect.isgeneratorfunction, kinds)):
        raise ConfigurationError(
            f"{name} is a generator: its body runs long after the call returns, when the lock would be gone; "
            f"use 'with' inside it, or decorate the function that consumes it"
        )
    if any(map(inspect.isasyncgenfunction, kinds)):
        raise ConfigurationError(
            f"{name} is an asynchronous generator: its body runs long after the call returns, when the lock would "
            f"be gone; use 'async with' inside it, or decorate the coroutine function that consumes it"
        )
    return any(map(inspect.iscoroutinefunction, kinds))


def _require_coroutine(function: Callable[..., Any], remedy: str) -> None:
    if not is_coroutine(function):
        raise ConfigurationError(
            f"{getattr(function, '__qualname__', repr(function))} is no coroutine function{remedy}"
        )


def _name_of(function: Callable[..., Any]) -> str:
    inner = inspect.unwrap(getattr(function, "__func__", function))
    name: str = getattr(inner, "__qualname__", repr(inner))
    return name


def hold(function: F, terms: Terms, block: Callable[[Sequence[AnyRequest]], AbstractContextManager[object]]) -> F:
    """Return a decorated function, each call of which runs in a block with the requests of these terms."""

    def guarded(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # (Only 'with' leaves no gap for an interrupt between the entry and the code that ensures the exit.)
        with block(terms.requests_of(instance, args, kwargs)):
            result = wrapped(*args, **kwargs)
        return _refuse_coroutine(function, result)

    return cast(F, _Decorated(function, guarded))


def _refuse_coroutine(function: Callable[..., Any], result: Any) -> Any:
    if inspect.iscoroutine(result):
        result.close()
        raise ConfigurationError(
            f"{_name_of(function)} returned a coroutine, whose body would run when the lock is gone; decorate a "
            f"coroutine function ('async def'), or use 'async with' inside it"
        )
    return result


def hold_awaiting(
    function: F,
    terms: Terms,
    enter: Callable[[Sequence[AnyRequest]], Awaitable[object]],
    leave: Callable[..., Awaitable[object]],
    remedy: str,
) -> F:
    """Decorate a coroutine function as `hold` does. ``enter`` and ``leave`` work as ``__aenter__`` and ``__aexit__``.
    ``remedy`` ends the error for another function.
    """
    _require_coroutine(function, remedy)

    async def guarded(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        await enter(terms.requests_of(instance, args, kwargs))
        try:
            result = await wrapped(*args, **kwargs)
        except BaseException as exc:
            await leave(type(exc), exc, None)
            raise
        await leave(None, None, None)
        return result

    return cast(F, _Decorated(function, guarded))


def run_once(function: F, once: AbstractContextManager[object | None]) -> F:
    """Return a decorated function: it calls ``function`` if ``once`` begins a run, and else returns None."""

    def guarded(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with once as run:
            return None if run is None else _refuse_coroutine(function, wrapped(*args, **kwargs))

    return cast(F, _Decorated(function, guarded))


def run_once_awaiting(function: F, once: AbstractAsyncContextManager[object | None]) -> F:
    """Decorate a coroutine function as `run_once` does."""
    _require_coroutine(function, "; decorate it with sqlsem.once")

    async def guarded(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        async with once as run:
            return None if run is None else await wrapped(*args, **kwargs)

    return cast(F, _Decorated(function, guarded))
