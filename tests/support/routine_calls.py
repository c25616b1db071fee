"""Calls of all routines of an installation on PostgreSQL, with example arguments by the names of their parameters.

The arguments name the objects that `many_rows` creates.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

#: Arguments by parameter (without p_), as SQL. "routine.parameter" and "parameter:type" come first.
EXAMPLES = {
    "access": "'write'",
    "action": "'cap'",
    "actual": "1",
    "after_seconds": "0",
    "again": "false",
    "ageing": "1000",
    "ahead": "'{{}}'",
    "all": "0",
    "asked": "true",
    "at": "clock_timestamp()",
    "at_us": "1",
    "attempt": "1",
    "backoff_ms": "1000",
    "backoff_seconds": "1",
    "beacon": "1",
    "before": "9223372036854775807",
    "beyond": "''",
    "body": "'1'",
    "burst": "NULL",
    "by": "session_user",
    "callback_body": "'x'",
    "callback_kind": "'sql'",
    "cap": "5",
    "claim": "'claim'",
    "claim:boolean": "true",
    "class": "1",
    "code": "NULL",
    "concurrency_limit": "1",
    "cost": "1",
    "costs": "ARRAY[1]",
    "cron": "'* * * * *'",
    "done": "0",
    "due": "'2020-01-01'",
    "enclosed": "NULL",
    "ends": "'[]'",
    "error": "NULL",
    "failed": "0",
    "failures": "0",
    "fence": "NULL",
    "force": "false",
    "from": "0",
    "grace_ms": "1000",
    "hash": "repeat('0', 64)",
    "host": "'host'",
    "idle_seconds": "0",
    "keeps_open": "false",
    "key": "''",
    "key:integer": "1",
    "kind": "'sql'",
    "last": "NULL",
    "lease_ms": "60000",
    "lease_seconds": "60",
    "limit": "1",
    "limits": "ARRAY[10]",
    "live": "ARRAY[11]",
    "lock": "false",
    "locks": """'[{{"resource": "mine", "limit": 1}}]'""",
    "maximum": "10",
    "mine": "{member}",
    "more": "1",
    "more:bigint[]": "'{{}}'",
    "more_limits": "'{{}}'",
    "more_per_ms": "'{{}}'",
    "new": "'1'",
    "next": "clock_timestamp()",
    "note": "'note'",
    "now": "1",
    "now_us": "1",
    "of_key": "0",
    "offset_seconds": "0",
    "old": "'1'",
    "on_failure": "'stop'",
    "only_look": "true",
    "options": "'{{}}'",
    "order": "0",
    "outcome": "'released'",
    "owner": "'me a'",
    "own": "true",
    "parts": "'part-1,part-2,part-3'",
    "per_ms": "1000",
    "per_seconds": "60",
    "pid": "1",
    "place": "1",
    "priority": "0",
    "program": "'program'",
    "put": "false",
    "ranked": "false",
    "rate_limit": "10",
    "replace": "false",
    "requesting_id": "'me'",
    "result": "NULL",
    "roles": "ARRAY['user']",
    "since": "clock_timestamp()",
    "since:double precision": "NULL",
    "skip": "0",
    "start": "false",
    "started": "clock_timestamp()",
    "states": "ARRAY['running']",
    "status": "NULL",
    "table": "'guarded'",
    "taken_ms": "1",
    "then": "1",
    "timeout_ms": "0",
    "time": "clock_timestamp()",
    "to": "session_user",
    "to_login": "NULL",
    "try": "true",
    "ttl_ms": "1000",
    "ttl_seconds": "60",
    "uid": "'uid-new'",
    "unique_key": "'another'",
    "until": "NULL",
    "used": "1",
    "value": "1",
    "wait_ms": "1",
    "waited": "false",
    "waits": "0",
    "was": "'write'",
    "weight": "1",
    "what": "'cap'",
    "who": "NULL",
    "window_ms": "1000",
    "window_seconds": "1000",
    "windows": "ARRAY[1000]",
    "ms": "1",
    "row_owner": "'x'",
    "offset_ms": "1",
    "max_attempts": "1",
    "replace_key": "NULL",
    "time_limit_seconds": "NULL",
    "requests": """'[{{"resource": "mine", "access": "write", "limit": 1, "weight": 1}}]'""",
    "zone": "'UTC'",
    "proxy": "NULL",
    **{f"{routine}.lease_seconds": "NULL" for routine in ("acquire", "acquire_row", "adopt", "once_begin", "try")},
    "check_grace_or_lease.what": "'grace'",
    "check_registration.limit": "NULL",
    "delete_member_rows.member": "(SELECT m FROM sqlsem.member AS m WHERE m.member_id = {member})",
    "put.key": "NULL",
    "put.locks": "NULL",
    "end_part.outcome": "'succeeded'",
    "end_task.outcome": "'finished'",
    "next_task.outcome": "'finished'",
    "revoke_members.login": "NULL",
    "set_queue.key": "NULL",
    "set_queue.what": "'limit'",
    "set_queue.per_ms": "NULL",
    "set_schedule.what": "'pause'",
    "set_task.what": "'cancel'",
}
NEW_TASKS = """'[{{"kind": "sql", "body": "x"}}]'"""
for _routine in ("check_tasks", "check_may_lock", "put_tasks", "put_tasks_by", "put_tasks_once", "store_task_locks"):
    EXAMPLES[f"{_routine}.tasks"] = NEW_TASKS
#: Arguments that name an object: first one that has few rows; then others, which have many.
OBJECTS = {
    "resource": ("'mine'", "'busy'", "'read'", "'rate:busy'"),
    "resources": ("ARRAY['mine']", "ARRAY['busy']", "ARRAY['read']"),
    "member": ("{member}", "500000"),
    "members": ("ARRAY[{member}]", "ARRAY[500000]"),
    "position": ("11", "20000001", "40000001"),
    "queue_position": ("11", "20000001", "40000001"),
    "positions": ("ARRAY[11]", "ARRAY[20000001]", "ARRAY[40000001]"),
    "queue": ("'mine'", "'busy'", "'keyed'", "'blocked'"),
    "task": ("12", "30000001", "50000001", "60000001"),
    "tasks": ("ARRAY[12]", "ARRAY[30000001]", "ARRAY[50000001]"),
    "batch": ("11", "12"),
    "name": ("'mine'", "'busy'"),
    "part": ("'part-1'",),
    "rate": ("'mine'", "'busy'"),
    "marker": ("'mine'",),
    "token": ("'token'",),
    "prefix": ("'mine:'", "'counted'"),
    "line": ("'priority:ranked'", "'priority:ranked busy'"),
    "login": ("session_user",),
    "acquire_by_priority.resource": ("'ranked'", "'ranked busy'"),
    "live_members.members": ("ARRAY[{member}]", "ARRAY(SELECT member_id FROM sqlsem.member)"),
    "poll_waiters.resources": ("ARRAY['mine']", "ARRAY(SELECT resource_id FROM sqlsem.ProcessControl)"),
    "poll_waiters.positions": ("ARRAY[12]", "ARRAY(SELECT queue_position FROM sqlsem.ProcessControl)"),
    "deadlock_rows.member": ("{member}", "1000001"),
    "estimate.queue_position": ("12", "20000002"),
    "wait.position": ("12", "20000002"),
    "why.queue_position": ("12", "20000002"),
}
for _routine in [
    "adjust_rate",
    "begin_rate",
    "raise_rate_error",
    "rate_login",
    "rate_room",
    "rate_wait",
    "rates",
    "reset_rate",
    "set_rate",
    "take_rate",
    "take_tokens",
    "use_rate",
    "window_waits",
    "windows_in_force",
]:
    OBJECTS[f"{_routine}.resource"] = ("'rate:mine'", "'rate:busy'")
#: Routines that read everything if these are NULL, beside the parameters with the default NULL.
WHOLE = {
    "past": "resource",
    "recover_batches": "name",
    "recover_tasks": "queue",
    "once_runs": "name",
    "show_tasks": "queue",
    "check_counted_on": "resource",
}
#: Routines that raise with these arguments, after they have read.
RAISES = frozenset(
    [
        "adjust",
        "adopt",
        "acquire",
        "acquire_row",
        "try",
        "once_begin",
        "take",
        "work",
        "batch_part_start",
        "renew",
        "renew_row",
        "session_part_start",
        "batch_callback_ended",
        "batch_part_fail",
        "batch_part_finish",
        "check_registration",
        "raise_rate_error",
        "require_priority",
        "session_part_end",
    ]
)
#: They need an open transaction, or a lock that this session has acquired.
RAISES_IN_AUTOCOMMIT = frozenset({"assert_holding", "hand_over"})

ROUTINES = """
SELECT p.proname, p.prokind = 'p', cardinality(p.proacl) > 1, coalesce(p.proargnames, '{}'), p.proargmodes::text[],
       ARRAY(SELECT format_type(t, NULL) FROM unnest(coalesce(p.proallargtypes, p.proargtypes::oid[])) AS t),
       p.pronargdefaults
FROM pg_proc AS p JOIN pg_language AS l ON l.oid = p.prolang
WHERE p.pronamespace = 'sqlsem'::regnamespace AND p.prorettype <> 'trigger'::regtype
  -- An immutable routine reads no table. A routine in SQL that changes no setting is planned as a part of its callers.
  AND p.provolatile <> 'i' AND (l.lanname <> 'sql' OR p.proconfig IS NOT NULL)
ORDER BY p.proname, p.oid"""


@dataclass(frozen=True)
class Call:
    """A call of a routine.

    Attributes:
        is_public: True if a role may run it.
        variant: 0: about objects that have few rows; 1 to 3: about objects that have many; 4: about all objects.
    """

    routine: str
    is_procedure: bool
    is_public: bool
    variant: int
    about_few: bool
    statement: str


class Parameter(NamedTuple):
    name: str
    type: str
    is_variadic: bool
    is_optional: bool


def calls(connection: Any, member: int) -> Iterator[Call]:
    """Give the calls of all routines. Raises AssertionError for a parameter without an example."""
    for name, is_procedure, is_public, names, modes, types, defaults in connection.execute(ROUTINES).fetchall():
        given = [
            (parameter, type_, mode)
            for parameter, type_, mode in zip(names, types, modes or "i" * len(types), strict=True)
            if mode in "ibv"
        ]
        parameters = [
            Parameter(parameter, type_, mode == "v", number >= len(given) - defaults)
            for number, (parameter, type_, mode) in enumerate(given)
        ]
        for variant in range(5):
            arguments = [_argument(name, parameter, variant) for parameter in parameters]
            if variant == 0 or any(is_new for _, is_new in arguments):
                text = ", ".join(text.format(member=member) for text, _ in arguments)
                yield Call(
                    name,
                    is_procedure,
                    is_public,
                    variant,
                    variant == 0 and any(objects_of(name, parameter) for parameter in parameters),
                    f'{"CALL" if is_procedure else "SELECT * FROM"} sqlsem."{name}"({text})',
                )


def objects_of(routine: str, parameter: Parameter) -> tuple[str, ...] | None:
    short = parameter.name.removeprefix("p_")
    own = f"{routine}.{short}"
    return OBJECTS.get(own) or (None if own in EXAMPLES else OBJECTS.get(short))


def _argument(routine: str, parameter: Parameter, variant: int) -> tuple[str, bool]:
    """Return an argument, and if no earlier variant has it."""
    short = parameter.name.removeprefix("p_")
    objects = objects_of(routine, parameter)
    is_new = False
    if objects is None:
        names = (f"{routine}.{short}", f"{short}:{parameter.type}", short)
        example = next((EXAMPLES[name] for name in names if name in EXAMPLES), None)
        assert example, (
            f"add an example of {short} ({parameter.type}) for {routine} to EXAMPLES or OBJECTS in {__file__}"
        )
    elif variant < 4:
        is_new = 0 < variant < len(objects)
        example = objects[min(variant, len(objects) - 1)]
    else:
        is_new = parameter.is_optional or WHOLE.get(routine) == short
        example = "NULL" if is_new else objects[0]
    word = "VARIADIC " if parameter.is_variadic else ""
    return f'{word}"{parameter.name}" => CAST({example} AS {parameter.type})', is_new
