"""Divides long lists."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

__all__ = ["in_chunks"]

T = TypeVar("T")


def in_chunks(
    items: Iterable[T], size: Callable[[T], int], *, maximum: int, count: int | None = None
) -> Iterator[list[T]]:
    """Yield the items in lists, in order. Each has at most ``count`` items, and a total size of at most ``maximum``; an
    item that is larger is alone.

    >>> list(in_chunks(["a", "bc", "d"], len, maximum=3))
    [['a', 'bc'], ['d']]
    """
    chunk: list[T] = []
    total = 0
    for item in items:
        if chunk and (len(chunk) == count or total + size(item) > maximum):
            yield chunk
            chunk, total = [], 0
        chunk.append(item)
        total += size(item)
    if chunk:
        yield chunk
