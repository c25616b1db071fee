"""Every routine that a role may call, with every argument: no call changes another login's rows, and sqlsem's own
messages refuse impossible values.

`ROUTINES` has a row for each routine and a word for each parameter: the word gives the kind of the value, and so the
values to try. `test_every_routine_and_parameter_is_listed` fails for a routine or a parameter without a row.

KIND       what the caller may name                            what is tried beside numbers or texts that cannot be
member     a member of its own login; 0 and -1 for none        the number of another login's member
position   a row of its own login                              another login's row, that holds or waits
task       a task that its role may change (CLAIMS_OF_ALL)     another login's task
...        and so on: see `Victim.named`
"""

import contextlib
import json
import math
import re

import psycopg
import pytest
from psycopg import errors, sql
from support.databases import name_of_login

import sqlsem
import sqlsem.sql

pytestmark = [pytest.mark.engines("postgresql"), pytest.mark.timeout(600)]

ROLES = {"u": "sqlsem_user", "p": "sqlsem_putter", "w": "sqlsem_worker", "o": "sqlsem_operator", "r": "sqlsem_reader"}

#: routine | roles that may call it | parameter:kind …  (INOUT parameters that only answer are left out.)
ROUTINES = """
abandon_batch | o | p_name:batch p_batch:batch_id
acquire | uo | resource:resource concurrency_limit:count access:choice weight:count timeout_ms:ms note:text
    requesting_id:me lease_seconds:seconds
acquire_row | uo | resource:resource concurrency_limit:count access:choice weight:count timeout_ms:ms note:text
    requesting_id:me lease_seconds:seconds keeps_open:flag
adopt | uo | token:token requesting_id:me lease_seconds:seconds
adopt_rows | uo | p_member:member p_requesting_id:me p_owner:text p_uid:uid p_token:token
task_controls | w | p_member:member p_tasks:tasks
assert_holding | uo | resource:resource queue_position:position requesting_id:me
renew_waiter_lease | uo | p_member:member p_resource:resource p_position:position
renew_rate_waiter_lease | uo | p_resource:rate_id p_position:position p_requesting_id:me
batch_callback_ended | uo | name:batch error:text
batch_part_finish | uo | name:batch part:part
batch_part_fail | uo | name:batch part:part error:text
batch_part_start | uo | name:batch part:part parts:parts window_seconds:seconds
batch_resume | uo | name:batch
begin_upgrade | uo | p_resource:resource p_position:position p_requesting_id:me p_try:flag
cancel | uo | p_member:member p_uid:uid p_outcome:outcome
cancel_task | po | p_task:task
check_not_reserved | uo | p_resource:resource
check_guard | uo |
check_lease | uo | p_seconds:seconds
check_name | upwo | p_what:text p_name:text
check_period | uo | p_name:once p_per:seconds p_offset:seconds
check_rate | uo | p_resource:rate_id p_cost:count p_limits:counts p_windows:counts p_burst:count
check_rate_name | uo | p_resource:rate_id
check_request | uo | p_resource:resource p_limit:count p_access:choice p_weight:count p_timeout_ms:ms
    p_note:text p_requesting_id:me
claim_callback | uo | p_member:member p_name:batch p_batch:batch_id p_owner:text p_uid:uid p_own:flag
claim_blocked | w | p_member:member p_queue:queue p_owner:text p_uid:uid p_again:flag p_requesting_id:me
    p_row_owner:text
claim_task | w | p_member:member p_queue:queue p_owner:text p_uid:uid p_again:flag
deadlock_rows | uo | p_member:member
describe_deadlock | uo | p_member:member
downgrade | uo | p_resource:resource p_position:position p_requesting_id:me
end_callback | uo | p_member:member p_batch:batch_id p_attempt:count p_error:text
end_part | uo | p_member:member p_name:batch p_part:part p_uid:uid p_outcome:part_end p_error:text p_owner:text
    p_callback_kind:kind p_callback_body:text
end_task | w | p_member:member p_task:task p_attempt:count p_outcome:end p_result:text p_error:text
row_outcome | uo | p_resource:resource p_position:position p_since:moment
register_member | upwo | p_host:text p_pid:count p_program:text p_grace_ms:ms p_lease_ms:ms
entries | uwor | p_resource:resource
format_error | w | p_state:choice p_message:text p_detail:text p_hint:text p_context:text
estimate | uor | queue_position:position
table_and_partitions | uor | p_table:table
find_deadlock | uo | p_member:member
fire_schedule | w | p_name:schedule p_due:moment p_last:moment p_next:moment p_put:flag
delete_commit_marker | uwo | p_marker:word
release_wait_locks | uo |
require_outside_transaction | upwo | p_what:choice
guard_table | uo | p_table:table p_resource:resource
guarded_tables | uor |
guards | uor |
hand_over | uo | resource:resource queue_position:position ttl_seconds:seconds to_login:login requesting_id:me
hand_over_rows | uwo | p_member:member p_positions:positions p_hash:hash p_ttl_ms:ms p_to:login
is_committed | uwo | p_marker:word
has_other_rows | uo | p_member:member p_position:position
retake_wakeup_lock | uo | p_resource:resource p_position:position p_requesting_id:me
is_outermost | uo | p_stack:text
restore_wakeup_locks | uo | p_member:member p_positions:positions
kept_locks | upwor | p_resource:resource
delete_empty_member | uo | p_member:member
release_on_commit | uwo | p_marker:word
list_batches | uor | p_name:batch p_batch:batch_id p_maximum:count
list_schedules | pwor | p_name:schedule p_queue:queue
list_tasks | pwor | p_queue:queue p_status:choice p_maximum:count
listen_for_tasks | pwor |
live_members | uo | p_members:members p_mine:member
poll_waiters | uo | p_member:member p_resources:resources p_positions:positions
detect_transaction | upwo | enclosed:flag
mark_once | uo | p_name:once p_position:position p_requesting_id:me
new_token | uo |
new_uid | uo |
may_enter | uwor | resource:resource queue_position:position
next_ready | pwor | p_queue:queue
next_task | w | p_member:member p_task:task p_attempt:count p_outcome:end p_result:text p_error:text
    p_queue:queue p_owner:text p_uid:uid p_again:flag
next_tasks | w | p_member:member p_ends:ends p_queue:queue p_owner:text p_uid:uid p_again:flag p_maximum:count
once_begin | uo | name:once per_seconds:seconds offset_seconds:seconds timeout_ms:ms note:text requesting_id:me
    lease_seconds:seconds
once_finish | uo | name:once queue_position:position requesting_id:me
once_due | uo | p_name:once p_position:position p_requesting_id:me p_per_ms:ms p_offset_ms:ms
once_forget | uo | name:once
once_runs | uor | p_name:once
operations | uor | p_name:resource p_maximum:count p_since:seconds p_until:seconds p_action:choice p_who:login
overview | upwor |
overview_rates | upwor |
past | uor | p_resource:resource p_maximum:count p_since:seconds p_until:seconds p_outcome:choice p_who:login
pause | o | resource:resource
pin | uwo | p_resource:resource p_position:position p_requesting_id:me
heartbeat | upwo | p_member:member
priorities | uor |
prune | upwo | p_maximum:count
prune_operations | upwo | p_maximum:count
prune_tasks | upwo | p_maximum:count
put | p | queue:queue body:text kind:kind order:count after_seconds:seconds max_attempts:count note:text
    on_failure:failure backoff_seconds:seconds unique_key:text replace_key:text time_limit_seconds:seconds key:text
    priority:count locks:json
put_tasks | p | p_queue:queue p_uid:uid p_tasks:new_tasks
put_tasks_once | p | p_queue:queue p_uid:uid p_tasks:new_tasks
queue_counts | pwor | p_queue:queue
queue_limits | pwor | p_queue:queue
queue_state | pwor | p_queue:queue
queue_waits | pwor | p_queue:queue
rates | uor | p_resource:rate_id
reap | o |
recover_batches | uo | p_name:batch p_mine:member
recover_tasks | pwo | p_queue:queue p_mine:member
commit_error | upwo |
register | uo | p_member:member p_requesting_id:me p_owner:text p_uid:uid p_try:flag p_resource:resource
    p_access:choice p_limit:count p_weight:count p_note:text
register_all | uo | p_member:member p_requesting_id:me p_owner:text p_uid:uid p_try:flag p_requests:requests
release | uwo | p_resource:resource p_position:position p_requesting_id:me p_outcome:outcome
release | uwo | resource:resource queue_position:position requesting_id:me
release_rows | uo | p_resource:resource p_position:position p_requesting_id:me
renew | uo | resource:resource queue_position:position requesting_id:me lease_seconds:seconds
renew_row | uo | p_resource:resource p_position:position p_requesting_id:me p_lease_ms:ms
reset_rate | o | p_resource:rate_id
deregister_member | upwo | p_member:member
resource_settings | uor |
resources | uor |
resume | o | resource:resource
reattach_member | upwo | p_member:member
return_callback | uo | p_member:member p_uid:uid
return_claim | w | p_member:member p_queue:queue p_uid:uid
revoke | o | p_position:position p_force:flag
revoke_members | o | p_member:member p_login:login p_force:flag
save_schedule | p | p_name:schedule p_queue:queue p_cron:cron p_zone:zone p_kind:kind p_body:text
    p_options:options p_next:moment
seconds_since | w | p_time:moment
session_task_controls | w | p_member:member p_task:task
session_batch_resume | uo | name:batch p_owner:text
session_claim | w | p_queue:queue
session_entry | uo | p_resource:resource p_position:position p_requesting_id:me
session_id | upwo |
recover_session_tasks | w | p_queue:queue
session_member | upwo | p_lease_ms:ms
session_part_end | uo | p_name:batch p_part:part p_outcome:end p_error:text p_owner:text
session_part_start | uo | name:batch part:part parts:parts window_seconds:seconds p_owner:text
session_rows | uo | p_resource:resource p_position:position p_requesting_id:me
set_limit | o | resource:resource concurrency_limit:count
set_queue | o | p_queue:queue p_key:text p_what:queue_change p_value:count p_per_ms:ms
set_rate | o | p_resource:rate_id p_window_ms:ms p_limit:count
set_resource | o | p_resource:resource p_what:resource_change p_value:count
set_schedule | po | p_name:schedule p_what:schedule_change p_next:moment
set_task | po | p_task:task p_what:task_change
settings | upwor |
adjust | uo | rate:rate taken_ms:ms cost:count actual:count
adjust_rate | uo | p_resource:rate_id p_taken_ms:ms p_more:count
show_tasks | pwor | p_queue:queue p_status:choice p_maximum:count p_skip:count
sleep_until_due | uo | p_resource:rate_id p_cost:count p_taken_ms:ms p_wait_ms:ms
drop_wakeup_locks | uo | p_member:member p_resource:resource p_positions:positions
missing_wakeup_locks | uo | p_member:member p_positions:positions
require_autocommit | upwo | what:choice
start_part | uo | p_member:member p_name:batch p_part:part p_parts:part_list p_window_ms:ms p_owner:text
    p_uid:uid p_callback_kind:kind p_callback_body:text
status | uor | resource:resource
take | uo | rate:rate rate_limit:count per_ms:ms cost:count timeout_ms:ms burst:count more_limits:counts
    more_per_ms:counts note:text requesting_id:me
take_rate | uo | p_resource:rate_id p_cost:count p_limits:counts p_windows:counts p_burst:count
    p_position:position p_requesting_id:me p_more:counts p_ahead:counts
acquire_by_priority | uo | p_member:member p_requesting_id:me p_owner:text p_uid:uid p_try:flag p_resource:resource
    p_access:choice p_limit:count p_weight:count p_note:text p_priority:count p_place:count
task_attempts | pwor | p_task:task
maintain_queue | pwo | p_queue:queue p_mine:member
remaining_ms | uo | p_timeout_ms:ms p_started:moment
token_hash | uo | p_token:token
try | uo | resource:resource concurrency_limit:count access:choice weight:count note:text requesting_id:me
    lease_seconds:seconds
unguard_table | uo | p_table:table
upgrade | uo | p_resource:resource p_position:position p_requesting_id:me p_timeout_ms:ms
wait | uo | p_resource:resource p_position:position p_timeout_ms:ms
waits_for_itself | uo | p_member:member p_resource:resource p_position:position
database_identity | upwor |
why | uor | queue_position:position
work | w | queue:queue idle_seconds:seconds
"""

#: Output parameters.
ANSWERS = {"code", "fence", "queue_position", "taken_ms", "token", "done", "failed", "resource"}

#: The rights of a role to all logins' rows: an operator's, and a worker's to tasks and schedules.
CLAIMS_OF_ALL = {"o": {"*"}, "w": {"task", "task_log", "schedule", "queue_wait"}}

NUMBERS = [0, -1, 2**31 - 1, 2**31, 2**63 - 1, -(2**63), None]
FLOATS = [0.0, -1.0, 2.0**31, 2.0**63, 1e308, math.nan, math.inf, -math.inf, None]
MOMENTS = ["-infinity", "infinity", "0001-01-01 BC", "20000-01-01", None]
TEXTS = ["", " ", "x" * 100_000, "a\x01b\x1b[2J", "a\u202eb", "it's 100%", None]
JSONS = ["null", "[]", "{}", "[null]", '[{"body": 1}]', "1e999", json.dumps("x" * 100_000), None]
LISTS = [[], [None], [0], [-1, 2**63 - 1], [1, 1], None]

HOSTILE = {
    **dict.fromkeys(["member", "position", "task", "batch_id", "count", "ms"], NUMBERS),
    "seconds": FLOATS,
    "moment": MOMENTS,
    **dict.fromkeys(
        ["resource", "me", "queue", "part", "parts", "token", "word", "hash", "uid", "login", "choice", "text", "rate",
         "rate_id", "once", "batch", "schedule"],
        TEXTS,
    ),
    **dict.fromkeys(
        ["kind", "failure", "cron", "zone", "schedule_change", "task_change", "queue_change", "resource_change",
         "outcome", "part_end", "end"],
        TEXTS,
    ),
    **dict.fromkeys(["json", "new_tasks", "requests", "ends", "options", "part_list"], JSONS),
    **dict.fromkeys(["members", "positions", "tasks", "counts"], LISTS),
    "resources": [[], [None], [""], ["x" * 100_000], None],
    "flag": [True, None],
    "table": [None],
}  # fmt: skip


def listed():
    """(routine, parameters) → (roles, kinds)."""
    claims = {}
    for line in ROUTINES.replace("\n    ", " ").strip().splitlines():
        name, roles, parameters = (part.strip() for part in line.split("|"))
        pairs = [pair.split(":") for pair in parameters.split()]
        claims[name, tuple(parameter for parameter, _ in pairs)] = roles, [kind for _, kind in pairs]
    return claims


def in_catalogue(connection):
    """Return the same from the database's catalogue: the routines that a role may call, with the roles."""
    rows = connection.execute(
        """
        SELECT p.proname, p.prokind = 'p', p.proargnames, p.proargmodes::text[],
               ARRAY(SELECT t::regtype::text FROM unnest(coalesce(p.proallargtypes, p.proargtypes::oid[])) AS t),
               ARRAY(SELECT r.rolname::text FROM aclexplode(p.proacl) AS a JOIN pg_roles AS r ON r.oid = a.grantee
                     WHERE a.privilege_type = 'EXECUTE')
        FROM pg_proc AS p WHERE p.pronamespace = 'sqlsem'::regnamespace
        """
    ).fetchall()
    letters = {role: letter for letter, role in ROLES.items()}
    routines = {}
    for name, procedure, names, modes, types, grantees in rows:
        roles = {letters[grantee] for grantee in grantees if grantee in letters}
        if roles:
            parameters = [
                (parameter, kind)
                for parameter, kind, mode in zip(names or [], types, modes or ["i"] * len(types), strict=False)
                if mode in ("i", "v") or (mode == "b" and not (procedure and parameter in ANSWERS))
            ]
            answers = [
                parameter
                for parameter, mode in zip(names or [], modes or [], strict=False)
                if procedure and mode == "b"
            ]
            routines[name, tuple(parameter for parameter, _ in parameters)] = (
                roles,
                [kind for _, kind in parameters],
                [answer for answer in answers if answer in ANSWERS] if procedure else None,
            )
    return routines


def test_every_routine_and_parameter_is_listed(database):
    with database.raw() as connection:
        installed, known = in_catalogue(connection), listed()
    assert {key: roles for key, (roles, _, _) in installed.items()} == {
        key: set(roles) for key, (roles, _) in known.items()
    }
    assert {kind for _, kinds in known.values() for kind in kinds} <= HOSTILE.keys()


class Party:
    """A login that owns rows of every kind that its role allows."""

    def __init__(self, login, owner, name, role):
        self.login, self.owner, self.role = login, owner, role
        self.connection = login.raw()
        self.name = name
        self.user = name_of_login(login)
        self.queue, self.resource = f"{name}-q", f"{name}-r"
        self.member = self.position = self.waits = self.task = self.batch_id = 0
        self.begin()

    def value(self, text, *parameters):
        row = self.connection.execute(f"SELECT * FROM sqlsem.{text}", parameters).fetchone()
        return None if row is None else row[0]

    def begin(self):
        """Acquire again all that this login has lost."""
        if self.role in "upwo":
            self.member = self.value("register_member('h', 1, 'p', 5000, 3600000)")
        if self.role in "uo":
            uids = [f"{self.name}-{self.member}-{number}" for number in range(3)]
            register = "register(%s, 'me', 'me', %s, false, %s, 'write', 1, 1, NULL)"
            self.connection.execute(
                "SELECT sqlsem.release(t.resource_id, t.queue_position, t.requesting_id) FROM sqlsem.status(%s) AS s, "
                "LATERAL (SELECT %s::varchar AS resource_id, s.queue_position, s.requesting_id) AS t",
                (self.resource, self.resource),
            )
            self.position = self.value(register, self.member, uids[0], self.resource)
            self.waits = self.value(register, self.member, uids[1], self.resource)
            self.connection.execute("CALL sqlsem.take(%s, 100, 3600000, timeout_ms => 0)", (self.name,))
            self.value(
                "start_part(%s, %s, 'a', '[\"a\", \"b\"]', 3600000, 'o', %s, NULL, NULL)",
                self.member,
                f"{self.name}-n",
                uids[2],
            )
        if self.role == "p":
            tasks = json.dumps([{"kind": "sql", "body": "select 1"}])
            self.task = self.value("put_tasks(%s, %s, %s::jsonb)", self.queue, f"{self.name}-{self.member}", tasks)

    def named(self, kind):
        """Return the values of this kind that name rows of this login."""
        return {
            "member": [self.member],
            "members": [[self.member]],
            "position": [self.position, self.waits],
            "positions": [[self.position], [self.waits, self.position]],
            "resource": [self.resource],
            "resources": [[self.resource]],
            "me": ["me"],
            "queue": [self.queue],
            "task": [self.task],
            "tasks": [[self.task]],
            "batch_id": [self.batch_id],
            "batch": [f"{self.name}-n"],
            "schedule": [f"{self.name}-s"],
            "once": [f"{self.name}-o"],
            "rate": [self.name],
            "rate_id": [f"rate:{self.name}"],
            "part": ["a"],
            "parts": ["a, b"],
            "login": [self.user],
            "uid": [f"{self.name}-{self.member}-0"],
            # (Secrets: another login does not know them.)
            "word": ["a word of its own"],
            "token": ["no token"],
            "hash": ["0" * 64],
            "choice": ["write"],
            "text": ["text"],
            "count": [1],
            "counts": [[1]],
            "ms": [50],
            "seconds": [1.0],
            "moment": ["2030-01-01"],
            "json": ["[]"],
            "new_tasks": ['[{"kind": "sql", "body": "select 1"}]'],
            "requests": [json.dumps([{"resource": self.resource, "access": "write", "limit": 1, "weight": 1}])],
            "ends": ["[]"],
            "options": ["{}"],
            "part_list": ['["a", "b"]'],
            "kind": ["sql"],
            "failure": ["stop"],
            "cron": ["* * * * *"],
            "zone": ["UTC"],
            "schedule_change": ["pause"],
            "task_change": ["retry"],
            "queue_change": ["limit"],
            "resource_change": ["cap"],
            "outcome": ["released"],
            "part_end": ["succeeded"],
            "end": ["finished"],
            "flag": [False],
            "table": [None],
        }[kind]


#: For each table with rows of logins: a condition for the rows of %(user)s, and the columns that only it changes.
OWNED = {
    "member": ("login = %(user)s", "member_id, grace_ms, lease_ms, lease_until"),
    "ProcessControl": ("member_id IN (SELECT member_id FROM sqlsem.member WHERE login = %(user)s)", "*"),
    "rate_slot": ("login = %(user)s", "*"),
    "once_run": ("login = %(user)s", "*"),
    "batch": ("opened_by = %(user)s", "*"),
    "batch_part": ("login = %(user)s", "*"),
    "task": ("put_by = %(user)s", "*"),
    "schedule": ("put_by = %(user)s", "*"),
    "handover": ("given_by = %(user)s", "*"),
    "commit_marker": ("login = %(user)s", "*"),
    "setting": ("true", "*"),
    "resource": ("true", "*"),
    "limit_pattern": ("true", "*"),
    "queue_setting": ("true", "*"),
    "queue_key": ("true", "*"),
}


def owned(connection, victims):
    """Return all rows of other logins, and the settings."""
    owned_rows = {}
    for table, (condition, columns) in OWNED.items():
        for victim in victims:
            parameters = {"user": victim.user}
            rows = connection.execute(f"SELECT {columns} FROM sqlsem.{table} WHERE {condition}", parameters).fetchall()
            owned_rows[table, victim.user] = sorted(map(repr, rows))
    return owned_rows


@pytest.fixture
def victims(login, database, name):
    """Another login in each role that owns rows."""
    with contextlib.ExitStack() as stack, database.raw() as owner:
        parties = []
        for role in "up":
            party = Party(login(ROLES[role]), owner, str(name(f"victim-{role}")), role)
            stack.enter_context(party.connection)
            parties.append(party)
        user, putter = parties
        begun = user.connection.execute("CALL sqlsem.once_begin(%s, 3600)", (f"{user.name}-o",)).fetchone()
        user.value("once_finish(%s, %s)", f"{user.name}-o", begun[1])
        putter.value(
            "save_schedule(%s, %s, '* * * * *', 'UTC', 'sql', 'select 1', '{}', '2999-01-01')",
            f"{putter.name}-s",
            putter.queue,
        )
        user.connection.execute("BEGIN")
        user.connection.execute("SELECT sqlsem.release_on_commit(%s)", (f"{user.name}-word",))
        user.connection.execute("COMMIT")
        user.batch_id = owner.execute(
            "SELECT max(batch_id) FROM sqlsem.batch WHERE opened_by = %s", (user.user,)
        ).fetchone()[0]
        yield parties


def call(connection, answers, routine, parameters, types, values):
    """Return None if the call succeeded, else the error. A long wait is cancelled. ``answers``: output parameters of a
    procedure.
    """
    arguments = sql.SQL(", ").join(
        [
            *(
                sql.SQL("{} => %s::" + kind).format(sql.Identifier(parameter))
                for parameter, kind in zip(parameters, types, strict=True)
            ),
            *(sql.SQL("{} => NULL").format(sql.Identifier(answer)) for answer in answers or []),
        ]
    )
    statement = sql.SQL("SELECT {}({})" if answers is None else "CALL {}({})")
    try:
        connection.execute(statement.format(sql.Identifier("sqlsem", routine), arguments), values)
    except psycopg.Error as exc:
        return exc
    return None


def in_words(error):
    """True if sqlsem names the error, or if it is a timeout or a missing right."""
    named = (errors.QueryCanceled, errors.LockNotAvailable, errors.InsufficientPrivilege)
    # (A number that no integer can hold is refused by the call itself, before any routine sees it.)
    outside = "out of range" in str(error) and error.diag.context is None
    return isinstance(error, named) or outside or str(error.diag.message_primary).startswith("sqlsem: ")


#: Refusals that a routine for clients of sqlsem leaves to the types and constraints of its tables. The routines for
#: users leave none.
LEFT_TO_TABLES = {
    "check_guard": {"0A000", "42804"},  # a trigger's function, which cannot be called
    "put_tasks_once": {"23505"},  # the task was put before: the client relies on this
    "register": {"22001", "23505"},  # called at every lock; a uid is the client's own
    "register_all": {"22001", "22023", "23505"},
    "remaining_ms": {"22008"},  # PostgreSQL before 17 subtracts no infinite times
    "save_schedule": {"22001", "23502", "23514"},
}


@pytest.mark.parametrize("role", ROLES)
def test_no_argument_changes_rows_of_another_login(login, database, victims, name, role):
    known = listed()
    wrong, count = [], 0
    with database.raw() as owner:
        routines = in_catalogue(owner)
        caller = Party(login(ROLES[role]), owner, str(name(f"mine-{role}")), role)
        stranger = login().raw()
        with contextlib.closing(caller.connection), contextlib.closing(stranger):
            for (routine, parameters), (roles, types, answers) in sorted(routines.items(), key=repr):
                if role not in roles:
                    continue
                kinds = known[routine, parameters][1]
                caller.connection.execute("SET statement_timeout = '10s'")
                caller.begin()
                caller.connection.execute("SET statement_timeout = '100ms'")
                caller.connection.execute("SET lock_timeout = '50ms'")
                usual = [caller.named(kind)[0] for kind in kinds]
                tries = [usual]
                for number, kind in enumerate(kinds):
                    others = [value for victim in victims for value in victim.named(kind)]
                    for value in [*HOSTILE[kind], *others]:
                        tries.append([*usual[:number], value, *usual[number + 1 :]])
                for victim in victims:  # all values that name rows of it, at once
                    for last in (0, -1):
                        tries.append([victim.named(kind)[last] for kind in kinds])
                before, told = owned(owner, victims), set()
                for values in tries:
                    count += 1
                    error = call(caller.connection, answers, routine, parameters, types, values)
                    if error is None or in_words(error) or error.sqlstate in LEFT_TO_TABLES.get(routine, ()):
                        continue
                    if error.sqlstate not in told:
                        told.add(error.sqlstate)
                        wrong.append(f"{routine}{tuple(map(short, values))}: {error.sqlstate} {short(error)}")
                after = owned(owner, victims)
                changed = {table for (table, user), rows in after.items() if rows != before[table, user]}
                allowed = CLAIMS_OF_ALL.get(role, set())
                if "*" not in allowed and changed - allowed:
                    wrong.append(f"{routine} has changed {sorted(changed - allowed)}")
                    before = after
                refused = call(stranger, answers, routine, parameters, types, usual)
                assert isinstance(refused, errors.InsufficientPrivilege), (routine, refused)
    assert count > 100
    assert not wrong, f"{len(wrong)} of {count}:\n" + "\n".join(wrong[:60])


def short(value):
    text = " ".join(str(value).split())
    return text if len(text) < 90 else f"{text[:40]}…"


# -- single claims ----------------------------------------------------------------------------------------------------


def party(login, owner, name, role):
    return Party(login(ROLES[role]), owner, str(name), role)


def test_a_dead_members_row_is_kept_by_no_other_login(login, database, name):
    pin = "SELECT sqlsem.pin(%s, %s, 'me')"
    with database.raw() as owner:
        victim, stranger = party(login, owner, name("v"), "u"), party(login, owner, name("s"), "u")
        operator = login("sqlsem_operator").raw()
        with victim.connection, stranger.connection, operator:
            victim.connection.execute("BEGIN")
            assert victim.connection.execute(pin, (victim.resource, victim.position)).fetchone() == (True,)
            owner.execute("DELETE FROM sqlsem.member WHERE member_id = %s", (victim.member,))
            for other in (stranger, party(login, owner, name("t"), "u")):
                assert other.connection.execute(pin, (victim.resource, victim.position)).fetchone() == (False,)
            # The transaction that locked it before keeps it.
            assert victim.connection.execute(pin, (victim.resource, victim.position)).fetchone() == (True,)
            victim.connection.execute("COMMIT")
            assert victim.connection.execute(pin, (victim.resource, victim.position)).fetchone() == (False,)
            assert operator.execute(pin, (victim.resource, victim.position)).fetchone() == (True,)


def test_comparisons_with_a_login_are_null_safe():
    """``<>`` with a login that is NULL is never true, so it may be used only where the column cannot be NULL."""
    login = r"(\w+\.)?@?(\w*login|\w+_by|by)"
    unequal = re.compile(rf"{login}\s*(<>|!=)|(<>|!=)\s*(session_user|ORIGINAL_LOGIN\(\)|{login}\b)")
    safe = (
        "member WHERE member_id = p_member AND login <> session_user",  # NOT NULL
        "adopted_by <> p_member",  # a number, and there, as is adopted_at
    )
    wrong = [
        f"{engine}/{script}: {line.strip()}"
        for engine in ("postgresql", "mssql")
        for script in ("schema", *sqlsem.sql.rerunnable(engine))
        for line in sqlsem.sql.script(engine, script, schema="schema").splitlines()
        if unequal.search(re.sub(r"<> N?''", "", line.split("--")[0]))
        and not any(phrase in line for phrase in safe)
        and not re.search("IS NOT NULL AND|IS NULL OR", line)
    ]
    assert wrong == []


def test_login_refunds_only_its_own_uses_of_a_rate(login, database, name):
    rate = f"{name}-shared"
    with database.raw() as owner:
        first, other = party(login, owner, name("a"), "u"), party(login, owner, name("b"), "u")
        with first.connection, other.connection:
            code, taken_ms = first.connection.execute(
                "CALL sqlsem.take(%s, 1, 3600000, timeout_ms => 0)", (rate,)
            ).fetchone()
            assert code == 0
            other.value("adjust(%s, %s, 2147483647, 0)", rate, taken_ms)
            assert (
                other.connection.execute("CALL sqlsem.take(%s, 1, 3600000, timeout_ms => 0)", (rate,)).fetchone()[0]
                == -1
            )
            first.value("adjust(%s, %s, 1, 0)", rate, taken_ms)
            assert (
                other.connection.execute("CALL sqlsem.take(%s, 1, 3600000, timeout_ms => 0)", (rate,)).fetchone()[0]
                == 0
            )


def test_a_debt_of_a_burst_is_shown_bounded_and_reset(login, database, name):
    rate, take = f"{name}-burst", "CALL sqlsem.take(%s, 5, 1000, timeout_ms => 0, burst => 5)"
    with database.raw() as owner:
        participant = party(login, owner, name("a"), "u")
        operator = login("sqlsem_operator").raw()
        with participant.connection, operator:
            taken_ms = participant.connection.execute(take, (rate,)).fetchone()[1]
            for _ in range(3):
                participant.value("adjust(%s, %s, 1, 2147483647)", rate, taken_ms)
            free_in = participant.connection.execute(
                "SELECT free_in FROM sqlsem.rates(%s)", (f"rate:{rate}",)
            ).fetchone()[0]
            assert 1 < free_in <= 10
            with pytest.raises(errors.InsufficientPrivilege):
                participant.value("reset_rate(%s)", f"rate:{rate}")
            assert operator.execute("SELECT sqlsem.reset_rate(%s)", (f"rate:{rate}",)).fetchone() == (0,)
            assert participant.connection.execute(take, (rate,)).fetchone()[0] == 0
            done = operator.execute(
                "SELECT action, login::text FROM sqlsem.operations(%s)", (f"rate:{rate}",)
            ).fetchall()
            assert [action for action, _ in done] == ["reset"]


def test_a_periodic_run_is_forgotten_by_its_login_or_an_operator(login, database, name):
    once = f"{name}-once"
    with database.raw() as owner:
        first, other = party(login, owner, name("a"), "u"), party(login, owner, name("b"), "u")
        operator = login("sqlsem_operator").raw()
        with first.connection, other.connection, operator:
            for forgets in (first.connection, operator):
                position = first.connection.execute("CALL sqlsem.once_begin(%s, 3600)", (once,)).fetchone()[1]
                assert first.value("once_finish(%s, %s)", once, position) == 0
                with pytest.raises(errors.InsufficientPrivilege, match="was run by login"):
                    other.value("once_forget(%s)", once)
                assert forgets.execute("SELECT sqlsem.once_forget(%s)", (once,)).fetchone() == (0,)
            assert first.value("once_forget(%s)", once) == -1
            done = operator.execute("SELECT action FROM sqlsem.operations(%s)", (f"once:{once}",)).fetchall()
            assert done == [("forget",), ("forget",)]


def test_members_of_a_login_are_bounded_and_removed_by_operators(login, database, name):
    with database.raw() as owner:
        before = owner.execute("SELECT value FROM sqlsem.setting WHERE name = 'max_members'").fetchone()
        assert before == ("5000",)
        first, other = party(login, owner, name("a"), "u"), party(login, owner, name("b"), "u")
        operator = login("sqlsem_operator").raw()
        with first.connection, other.connection, operator:
            owner.execute("UPDATE sqlsem.setting SET value = '3' WHERE name = 'max_members'")
            try:
                enrol = "register_member('h', 1, 'p', 5000, 3600000)"
                assert [first.value(enrol) is not None for _ in range(2)] == [True, True]
                with pytest.raises(errors.ProgramLimitExceeded, match="has 3 members, and no more are allowed"):
                    first.value(enrol)
                assert other.value(enrol) is not None, "another login's are not counted"
            finally:
                owner.execute("UPDATE sqlsem.setting SET value = %s WHERE name = 'max_members'", before)
            with pytest.raises(errors.InvalidParameterValue, match="either a member or a login"):
                operator.execute("SELECT sqlsem.revoke_members(1, 'x')")
            # A living holder is notified first: its member stays.
            revoke = "SELECT sqlsem.revoke_members(%s, %s, %s)"
            assert operator.execute(revoke, (None, first.user, False)).fetchone() == (2,)
            assert operator.execute(revoke, (first.member, None, True)).fetchone() == (1,)
            rows = "SELECT count(*) FROM sqlsem.member AS m WHERE m.login = %s"
            assert owner.execute(rows, (first.user,)).fetchone() == (0,)
            assert owner.execute(rows, (other.user,)).fetchone() == (2,)
            assert operator.execute("SELECT count(*) FROM sqlsem.status(%s)", (first.resource,)).fetchone() == (0,)
            done = operator.execute(
                "SELECT count(*) FROM sqlsem.operations() WHERE action = 'revoke_members'"
            ).fetchone()
            assert done[0] >= 2


def test_commit_markers_are_bounded_per_login(login, database, name):
    with database.raw() as owner:
        first, other = party(login, owner, name("a"), "u"), party(login, owner, name("b"), "u")
        with first.connection, other.connection:
            with pytest.raises(errors.ProgramLimitExceeded, match="10000 releases on commit"):
                first.connection.execute(
                    "SELECT sqlsem.release_on_commit(%s || n) FROM generate_series(1, 10001) AS n", (str(name),)
                )
            other.connection.execute("SELECT sqlsem.release_on_commit(%s)", (f"{name}-w",))
            assert other.value("is_committed(%s)", f"{name}-w") is True
            other.value("delete_commit_marker(%s)", f"{name}-w")


def test_a_putter_sees_the_error_of_its_own_failed_task_only(login, database, name):
    with database.raw() as owner:
        first, other = party(login, owner, name("a"), "p"), party(login, owner, name("b"), "p")
        with first.connection, other.connection:
            owner.execute(
                "UPDATE sqlsem.task SET status = 'failed', error = 'secret', ended_at = now(), is_open = true "
                "WHERE queue_name = %s",
                (first.queue,),
            )
            state = "SELECT failed IS NOT NULL, error FROM sqlsem.queue_state(%s)"
            assert first.connection.execute(state, (first.queue,)).fetchone() == (True, "secret")
            assert other.connection.execute(state, (first.queue,)).fetchone() == (True, None)
