"""Names of resources that sqlsem uses itself, and that nobody else can lock."""

from __future__ import annotations

from sqlsem.errors import ConfigurationError

__all__ = ["ONCE_PREFIX", "PRIORITY_PREFIX", "RATE_PREFIX", "RESERVED", "TASKS_PREFIX", "check_free"]

#: What the names of resources begin with that sqlsem uses itself.
RATE_PREFIX, ONCE_PREFIX, PRIORITY_PREFIX, TASKS_PREFIX = "rate:", "once:", "priority:", "tasks:"
#: For each of them what that is, and what to do instead of locking it. (`check_free` of the SQL is the same table.)
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
    """Raise `ConfigurationError` when a resource's name is one that sqlsem uses itself, or a pattern of names."""
    if name.endswith("*"):
        raise ConfigurationError(
            f"The name {name!r} ends with '*', and so is a pattern of names, for which limits are set (sqlsem set); "
            f"choose another name",
            resource=name,
        )
    for prefix, (what, cure) in RESERVED.items():
        if name.startswith(prefix):
            raise ConfigurationError(
                f"The name {name!r} begins with {prefix!r}, which sqlsem uses itself, for {what}: {cure}", resource=name
            )
