"""Names of resources that sqlsem reserves for itself, and the words for a request's access."""

from __future__ import annotations

from sqlsem.values.errors import ConfigurationError

__all__ = ["ONCE_PREFIX", "PRIORITY_PREFIX", "RATE_PREFIX", "RESERVED", "TASKS_PREFIX", "access_in_words", "check_free"]

#: The prefixes of the resource names that sqlsem reserves.
RATE_PREFIX, ONCE_PREFIX, PRIORITY_PREFIX, TASKS_PREFIX = "rate:", "once:", "priority:", "tasks:"
#: For each prefix: its purpose, and what to do instead of locking it. (`check_not_reserved` in SQL has the same table.)
RESERVED = {
    RATE_PREFIX: ("the queue of a rate", "take from the rate (sqlsem.rate, run --rate), or choose another name"),
    ONCE_PREFIX: ("what runs once per period", "begin a run (sqlsem.once, run --once-per), or choose another name"),
    PRIORITY_PREFIX: (
        "the queue of a resource with priorities",
        "acquire the resource itself (priority=…, run --priority), or choose another name",
    ),
    TASKS_PREFIX: ("the rates of work queues", "choose another name"),
}


def check_free(name: str) -> None:
    """Raise `ConfigurationError` if a resource's name has a prefix that sqlsem reserves, or is a pattern of names."""
    if name.endswith("*"):
        raise ConfigurationError(
            f"The name {name!r} ends with '*', and so is a pattern of names, for which limits are set (sqlsem set); "
            f"choose another name",
            resource=name,
            code="name",
        )
    for prefix, (purpose, remedy) in RESERVED.items():
        if name.startswith(prefix):
            raise ConfigurationError(
                f"The name {name!r} begins with {prefix!r}, which sqlsem uses itself, for {purpose}: {remedy}",
                resource=name,
                code="name",
            )


def access_in_words(access: str, limit: int | None, weight: int = 1) -> str:
    """Return a request's access in words, for lists, messages, logs and the dashboard.

    A mutex and a writer are the same to the table (access ``write``, limit 1), and so have one word.

    >>> [access_in_words("write", limit) for limit in (1, 3, None)]  # None: the limit that is set on the server
    ['write', 'limit 3', 'limit']
    >>> access_in_words("read", 1), access_in_words("stage:200", 1), access_in_words("write", 8, weight=2)
    ('read', 'stage 200', 'limit 8 x2')
    """
    if access == "write" and limit != 1:
        words = "limit" if limit is None else f"limit {limit}"
    else:
        words = access.replace("stage:", "stage ", 1)
    return words if weight == 1 else f"{words} x{weight}"
