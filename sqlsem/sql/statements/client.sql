-- sqlsem, the statements that the Python client sends to a database without routines (sqlsem/engines/statements).
-- Every write is inside a transaction that is the gate: numbers become visible in their order.
--
-- Times are seconds since 1970. The words that differ between databases are in dialect.sql of the engine.
-- where {liveness} is m.beacon, CAST(m.lease_until AS {real}) AS lease_until, CAST(m.missing_since AS {real}) AS missing_since, CAST(m.heartbeat_at AS {real}) AS heartbeat_at, {clock} AS now
-- where {status_after} is CASE WHEN :outcome = 'finished' THEN 'finished' WHEN :outcome = 'cancelled' OR cancel_asked_at IS NOT NULL THEN 'cancelled' WHEN :outcome = 'returned' OR failures + 1 < max_attempts THEN 'pending' ELSE 'failed' END
-- where {error_after} is CASE WHEN cancel_asked_by IS NULL OR :outcome = 'finished' THEN :error ELSE 'cancelled by ' || cancel_asked_by || coalesce({newline} || :error, '') END
-- where {cap} is coalesce((SELECT cap FROM {schema}_resource WHERE resource_id = :resource), (SELECT cap FROM {schema}_limit_pattern WHERE substr(:resource, 1, {length}(prefix)) = prefix ORDER BY {length}(prefix) DESC LIMIT 1))
-- where {patterned} is EXISTS (SELECT 1 FROM {schema}_limit_pattern WHERE substr(:resource, 1, {length}(prefix)) = prefix)
-- where {upgrading} is SELECT t.queue_position FROM {schema}_upgrade AS u JOIN {table} AS t ON t.resource_id = u.resource_id AND t.queue_position = u.queue_position WHERE u.resource_id = :resource AND t.access_type = 'upgrade'
-- where {expired_tasks} is SELECT task_id FROM (SELECT task_id FROM {schema}_task WHERE is_open = 0 AND ended_at < {clock} - 86400.0 * (SELECT value FROM {schema}_setting WHERE name = 'history_days') ORDER BY ended_at LIMIT :maximum) AS expired

-- name: settings
SELECT name, value FROM {schema}_setting

-- name: set_version
UPDATE {schema}_setting SET value = ? WHERE name = 'schema_version'

-- name: register_member
INSERT INTO {schema}_member (beacon, host, pid, program, login, grace_ms, lease_ms, heartbeat_at, lease_until)
VALUES (:beacon, :host, :pid, :program, :login, :grace, :lease, {clock},
        {clock} + :lease / 1000.0)

-- name: reattach_member
UPDATE {schema}_member
SET beacon = :beacon, missing_since = NULL, heartbeat_at = {clock},
    lease_until = {clock} + lease_ms / 1000.0
WHERE member_id = :member

-- name: member
-- (CAST, here and below: SQLite stores any text in any column. An invalid row that was written by hand must not raise
-- errors in other processes.)
SELECT beacon, CAST(grace_ms AS {real}) AS grace_ms, CAST(lease_until AS {real}) AS lease_until,
       CAST(missing_since AS {real}) AS missing_since, CAST(heartbeat_at AS {real}) AS heartbeat_at, {clock} AS now
FROM {schema}_member WHERE member_id = ?

-- name: renew
UPDATE {schema}_member
SET missing_since = NULL, heartbeat_at = {clock},
    lease_until = {clock} + lease_ms / 1000.0
WHERE member_id = ?

-- name: renew_old
-- Before a grant, claim or start: renew the lease, but not within :fresh seconds after it was renewed.
UPDATE {schema}_member
SET heartbeat_at = {clock},
    lease_until = {clock} + lease_ms / 1000.0
WHERE member_id = :member AND lease_until < {clock} + lease_ms / 1000.0 - :fresh

-- name: positions
SELECT queue_position, revoked_at IS NOT NULL AS revoked FROM {table} WHERE member_id = ?

-- name: deregister_member
DELETE FROM {schema}_member WHERE member_id = ?

-- name: resource_state
SELECT EXISTS (SELECT 1 FROM {table} WHERE resource_id = :resource)
    OR EXISTS (SELECT 1 FROM {schema}_resource WHERE resource_id = :resource) OR {patterned} AS queued,
       {cap} AS cap,
       (SELECT ageing_ms FROM {schema}_resource WHERE resource_id = :resource) AS ageing,
       EXISTS (SELECT 1 FROM {schema}_member WHERE member_id = :member) AS known

-- name: fits
-- The rule, for a request at a position. `fits`: there is room for the request beside the conflicting rows ahead.
-- `let_in`: the row at the position is granted already, by a release or by a reader ahead that upgrades. Each row
-- weighs at least 1, so no more rows are read than the limit (:places). `edge` is the last row read.
-- Rows before :first are not read. Without them a request that does not fit does not fit either. One that fits really
-- does if none of them conflicts, and that is so if `granted_first` is true and `upgrading` is NULL: see
-- sqlsem/engines/statements/admission.py. `granted_first`: the row at :first is granted, with the same access and a limit
-- of 1. `upgrading`: the position of the reader that upgrades.
SELECT coalesce(sum(weight), 0) + :weight
           <= {least}(coalesce(min(concurrency_limit), 9223372036854775807), :places,
                  coalesce({cap}, 9223372036854775807)) AS fits,
       max(queue_position) AS edge,
       (SELECT paused_at FROM {schema}_resource WHERE resource_id = :resource) IS NOT NULL AS paused,
       EXISTS (SELECT 1 FROM {table}
               WHERE resource_id = :resource AND queue_position = :position AND granted_at IS NOT NULL AND revoked_at IS NULL)
           AS let_in,
       :first > 0 AND EXISTS (SELECT 1 FROM {table}
                              WHERE resource_id = :resource AND queue_position = :first AND access_type = :access
                                AND concurrency_limit = 1 AND granted_at IS NOT NULL) AS granted_first,
       CASE WHEN :first > 0 THEN ({upgrading}) END AS upgrading
FROM (SELECT queue_position, weight, concurrency_limit FROM {table}
      WHERE resource_id = :resource AND queue_position < :position AND (:access = 'write' OR access_type <> :access)
        AND queue_position >= :first
      ORDER BY queue_position LIMIT :places) AS ahead

-- name: granted_before
-- A row from which `fits` may read on, for an access that requests share: the reader that upgrades, or else the last
-- granted row of this access, if it is among the last rows before the position.
SELECT coalesce(({upgrading} AND t.queue_position < :position),
                (SELECT max(queue_position)
                 FROM (SELECT queue_position, access_type, concurrency_limit, granted_at FROM {table}
                       WHERE resource_id = :resource AND queue_position < :position
                       ORDER BY queue_position DESC LIMIT 8) AS nearest
                 WHERE access_type = :access AND concurrency_limit = 1 AND granted_at IS NOT NULL), 0) AS first

-- name: places
-- The limit of a request that names none: the operator's, or that of the first row ahead that names one.
SELECT coalesce({cap},
                (SELECT concurrency_limit FROM {table}
                 WHERE resource_id = :resource AND queue_position < :position AND (:access = 'write' OR access_type <> :access)
                   AND concurrency_limit IS NOT NULL
                 ORDER BY queue_position LIMIT 1),
                9223372036854775807) AS places

-- name: rows_between
-- The first rows from one position on, and before another.
SELECT queue_position, member_id, access_type AS access FROM {table}
WHERE resource_id = :resource AND queue_position >= :first AND queue_position < :position
ORDER BY queue_position LIMIT :reach

-- name: row_ahead
-- The last conflicting row before a position, among the last rows there.
SELECT max(queue_position) AS ahead
FROM (SELECT queue_position, access_type FROM {table}
      WHERE resource_id = :resource AND queue_position < :position
      ORDER BY queue_position DESC LIMIT :reach) AS there
WHERE :access = 'write' OR access_type <> :access

-- name: pass
-- The columns that the rule needs, of a resource's rows after a position, in order, and without one of them.
SELECT t.queue_position AS position, t.access_type AS access, t.concurrency_limit AS "limit", t.weight, t.member_id,
       t.granted_at IS NOT NULL AS granted, t.revoked_at IS NOT NULL AS revoked, {cap} AS cap, o.paused_at IS NOT NULL AS paused
FROM {table} AS t LEFT JOIN {schema}_resource AS o ON o.resource_id = t.resource_id
WHERE t.resource_id = :resource AND t.queue_position > :position AND t.queue_position <> :without
ORDER BY t.queue_position LIMIT :maximum

-- name: let_in
-- Grant a row of another member, if it has a beacon. (A member with a lease must renew it in the transaction that
-- grants its row, so it grants the row itself.)
UPDATE {table} SET granted_at = {clock}
WHERE queue_position = :position AND granted_at IS NULL AND revoked_at IS NULL
  AND EXISTS (SELECT 1 FROM {schema}_member AS m WHERE m.member_id = {table}.member_id AND m.lease_until IS NULL)

-- name: in_line
SELECT 1 FROM {table}
WHERE resource_id = :resource AND queue_position = :position AND requesting_id = :requesting_id AND revoked_at IS NULL

-- name: first_in_line
-- One row if a request waits before a position, or the resource is paused.
SELECT 1 WHERE EXISTS (SELECT 1 FROM {table} WHERE resource_id = :resource AND queue_position < :position)
   OR EXISTS (SELECT 1 FROM {schema}_resource WHERE resource_id = :resource AND paused_at IS NOT NULL)

-- name: rated_resources
-- (Without the rates of starts of tasks.)
SELECT DISTINCT resource_id FROM {schema}_rate_window
WHERE resource_id BETWEEN coalesce(:resource, 'rate:') AND coalesce(:resource, 'rate;') AND resource_id LIKE 'rate:%'
ORDER BY resource_id

-- name: wanted_rates
-- The rates with the most waiters, then with the latest use. (Ranges of names, as LIKE uses no index.)
SELECT w.resource_id FROM {schema}_rate_window AS w
LEFT JOIN (SELECT resource_id, count(*) AS waiting FROM {table} WHERE resource_id BETWEEN 'rate:' AND 'rate;' GROUP BY resource_id) AS q
    ON q.resource_id = w.resource_id
WHERE w.resource_id BETWEEN 'rate:' AND 'rate;' AND w.resource_id LIKE 'rate:%'
GROUP BY w.resource_id ORDER BY max(coalesce(q.waiting, 0)) DESC, max(w.seen_ms) DESC, w.resource_id LIMIT ?

-- name: rate_windows
SELECT window_ms, rate_limit, seen_ms, full_us, taken, returned, waits, burst, cap FROM {schema}_rate_window WHERE resource_id = ?

-- name: rate_slots
SELECT window_ms, slot, used, rate_limit, burst FROM {schema}_rate_slot WHERE resource_id = ?

-- name: put_rate_window
INSERT INTO {schema}_rate_window (resource_id, window_ms, rate_limit, seen_ms, full_us, taken, returned, waits, burst, cap, cap_by)
VALUES (:resource, :window, :limit, :seen, :full, :taken, :returned, :waits, :burst, :cap, CASE WHEN :cap IS NOT NULL THEN :login END)
{upsert:resource_id, window_ms} rate_limit = {new:rate_limit}, seen_ms = {new:seen_ms}, full_us = {new:full_us}, taken = {new:taken},
    returned = {new:returned}, waits = {new:waits}, burst = {new:burst},
    cap_by = CASE WHEN cap {same} {new:cap} THEN cap_by ELSE {new:cap_by} END, cap = {new:cap}

-- name: drop_rate_window
DELETE FROM {schema}_rate_window WHERE resource_id = :resource AND window_ms = :window

-- name: put_rate_slot
{replace_into} {schema}_rate_slot (resource_id, window_ms, slot, used, rate_limit, burst)
VALUES (:resource, :window, :slot, :used, :limit, :burst)

-- name: drop_rate_slot
DELETE FROM {schema}_rate_slot WHERE resource_id = :resource AND window_ms = :window AND slot = :slot

-- name: prune_rate_slots
-- Delete the slots of rates that were not used for a day and have no current window.
DELETE FROM {schema}_rate_slot WHERE (resource_id, window_ms) IN (
    SELECT resource_id, window_ms FROM {schema}_rate_window WHERE seen_ms + 2 * window_ms < ({clock} - 86400) * 1000)

-- name: prune_rate_windows
-- (An operator's limit stays.)
DELETE FROM {schema}_rate_window WHERE cap IS NULL AND seen_ms + 2 * window_ms < ({clock} - 86400) * 1000

-- name: find
SELECT resource_id, queue_position, requesting_id, granted_at IS NOT NULL AND revoked_at IS NULL AS granted FROM {table}
WHERE member_id = :member AND request_uid >= :uid AND request_uid < :uid || '/'
  AND (request_uid = :uid OR substr(request_uid, 1, {length}(:uid) + 1) = :uid || '.')
ORDER BY queue_position

-- name: insert
INSERT INTO {table} (resource_id, requesting_id, access_type, concurrency_limit, weight, member_id, owner, request_uid,
                     granted_at, note)
VALUES (:resource, :requesting_id, :access, :limit, :weight, :member, :owner, :uid,
        CASE WHEN :granted THEN {clock} END, :note)

-- Priorities: see the comments of PostgreSQL's priorities.sql.

-- name: ageing
SELECT CAST(ageing_ms AS {real}) AS ageing FROM {schema}_resource WHERE resource_id = ? AND ageing_ms IS NOT NULL

-- name: priorities
SELECT resource_id, ageing_ms / 1000.0 FROM {schema}_resource WHERE ageing_ms IS NOT NULL

-- name: own_place
SELECT queue_position, CAST(requested_at AS {real}) AS requested_at FROM {table}
WHERE resource_id = :line AND member_id = :member AND request_uid = :uid || '.1' AND revoked_at IS NULL

-- name: preceding_request
-- The priority entry right before another one, and the number of entries ahead. :position NULL: before a request
-- without an entry.
SELECT queue_position, member_id, count(*) OVER () AS ahead
FROM {table}
WHERE resource_id = :line AND access_type = 'read' AND concurrency_limit = :places AND member_id IS NOT NULL AND revoked_at IS NULL
  AND NOT queue_position {same} :position
  AND (requested_at - (weight - 1) * :ageing / 1000.0, queue_position)
      < (coalesce(:at, {clock}) - :priority * :ageing / 1000.0, coalesce(:position, 9223372036854775807))
ORDER BY requested_at - (weight - 1) * :ageing / 1000.0 DESC, queue_position DESC LIMIT 1

-- name: row
SELECT access_type AS access, concurrency_limit AS "limit", weight, member_id, owner, granted_at IS NOT NULL AS granted,
       CAST(revoked_at AS {real}) AS revoked_at
FROM {table} WHERE resource_id = :resource AND queue_position = :position

-- name: grant
UPDATE {table} SET granted_at = {clock}
WHERE resource_id = :resource AND queue_position = :position AND revoked_at IS NULL

-- Conversions: see the comments of PostgreSQL's conversions.sql.

-- name: granted_row
SELECT access_type AS access, concurrency_limit AS "limit", member_id FROM {table}
WHERE resource_id = :resource AND queue_position = :position AND requesting_id = :requesting_id
  AND granted_at IS NOT NULL AND revoked_at IS NULL

-- name: other_upgrading
SELECT t.revoked_at IS NULL AND m.member_id IS NOT NULL AND m.missing_since IS NULL AS lives
FROM {table} AS t LEFT JOIN {schema}_member AS m ON m.member_id = t.member_id
WHERE t.resource_id = :resource AND t.queue_position <> :position AND t.access_type = 'upgrade'

-- name: others_inside
SELECT queue_position, member_id FROM {table}
WHERE resource_id = :resource AND queue_position <> :position AND (queue_position < :position OR granted_at IS NOT NULL)
ORDER BY queue_position LIMIT 32

-- name: proxies
-- The members of blocked tasks, which must hold nothing.
SELECT member_id FROM {schema}_queue_proxy WHERE member_id IS NOT NULL

-- name: set_access
UPDATE {table} SET access_type = :access WHERE resource_id = :resource AND queue_position = :position

-- name: note_upgrade
{replace_into} {schema}_upgrade (resource_id, queue_position) VALUES (:resource, :position)

-- name: forget_upgrade
DELETE FROM {schema}_upgrade WHERE resource_id = :resource

-- Runs once per period: see the comments of PostgreSQL's once.sql. Times are compared as whole milliseconds.

-- name: once_turn
SELECT granted_at FROM {table}
WHERE resource_id = :resource AND queue_position = :position AND requesting_id = :requesting_id AND granted_at IS NOT NULL

-- name: once_due
SELECT NOT EXISTS (
    SELECT 1 FROM {schema}_once_run
    WHERE once_name = :name
      AND {whole:granted_at * 1000} >= ({whole:coalesce(:at, {clock}) * 1000} - :offset_ms) {div} :per_ms * :per_ms + :offset_ms) AS due

-- name: mark_once
INSERT INTO {schema}_once_run (once_name, granted_at, done_at, queue_position, requesting_id, login)
VALUES (:name, :at, {clock}, :position, :requesting_id, :login)
{upsert:once_name} granted_at = {greatest}(granted_at, {new:granted_at}), done_at = {new:done_at}, queue_position = {new:queue_position},
    requesting_id = {new:requesting_id}, login = {new:login}

-- name: once_runs
SELECT once_name AS name, granted_at, done_at, queue_position AS position, requesting_id, login, {clock} AS taken_at
FROM {schema}_once_run WHERE :name IS NULL OR once_name = :name ORDER BY once_name

-- name: once_forget
DELETE FROM {schema}_once_run WHERE once_name = ?

-- Hand-overs: see the comments of PostgreSQL's handovers.sql.

-- name: handover
SELECT member_id, row_count, resource_id, queue_position, given_by, given_to, adopted_at IS NOT NULL AS adopted, adopted_by,
       adopted_uid, adopter, {clock} - coalesce(adopted_at, given_at) AS seconds
FROM {schema}_handover WHERE token_hash = ?

-- name: forget_handovers
DELETE FROM {schema}_handover WHERE given_at < {clock} - 86400.0
AND NOT EXISTS (SELECT 1 FROM {schema}_member AS m WHERE m.member_id = {schema}_handover.member_id)

-- name: enrol_transit
-- Register the member in transit, with the giver's process, for displays.
INSERT INTO {schema}_member (beacon, host, pid, program, login, grace_ms, lease_ms, heartbeat_at, lease_until)
SELECT NULL, host, pid, program, :to, 0, :ttl, {clock}, {clock} + :ttl / 1000.0 FROM {schema}_member WHERE member_id = :member

-- name: move_row
UPDATE {table}
SET member_id = :member, requesting_id = :requesting_id, owner = :owner, request_uid = :uid,
    granted_at = CASE WHEN :anew THEN {clock} ELSE granted_at END
WHERE resource_id = :resource AND queue_position = :position

-- name: add_handover
INSERT INTO {schema}_handover (token_hash, member_id, row_count, resource_id, queue_position, given_by, given_to, given_at, ttl_ms)
VALUES (:hash, :member, :count, :resource, :position, :by, :to, {clock}, :ttl)

-- name: rows_in_transit
SELECT resource_id AS resource, queue_position AS position, access_type AS access, concurrency_limit AS "limit", weight, note
FROM {table} WHERE member_id = ? AND revoked_at IS NULL ORDER BY queue_position

-- name: adopted_rows
SELECT resource_id AS resource, queue_position AS position, access_type AS access, concurrency_limit AS "limit", weight, note
FROM {table}
WHERE member_id = :member AND (request_uid = :uid OR substr(request_uid, 1, {length}(:uid) + 1) = :uid || '.')
ORDER BY queue_position

-- name: note_adoption
UPDATE {schema}_handover
SET adopted_at = {clock}, adopted_by = :member, adopted_uid = :uid,
    adopter = (SELECT host || ':' || pid || ' ' || program FROM {schema}_member WHERE member_id = :member)
WHERE token_hash = :hash

-- name: keep_one
{keep_rows}
       :outcome, CASE :outcome WHEN 'revoked' THEN t.revoked_by WHEN 'reaped' THEN :login END, NULL
FROM {table} AS t LEFT JOIN {schema}_member AS m ON m.member_id = t.member_id
WHERE t.resource_id = :resource AND t.queue_position = :position
  AND (:requesting_id IS NULL OR t.requesting_id = :requesting_id)

-- name: delete_one
DELETE FROM {table}
WHERE resource_id = :resource AND queue_position = :position AND (:requesting_id IS NULL OR requesting_id = :requesting_id)

-- name: keep_all
-- Write the history of a member's rows, before the member is removed: host, pid and login are in its row.
{keep_rows}
       :outcome, CASE :outcome WHEN 'revoked' THEN t.revoked_by WHEN 'reaped' THEN :login END, :seen
FROM {table} AS t LEFT JOIN {schema}_member AS m ON m.member_id = t.member_id
WHERE t.member_id = :member

-- name: delete_all
DELETE FROM {table} WHERE member_id = :member

-- name: miss
-- (:seen: the last sign of life, where heartbeats are written.)
UPDATE {schema}_member SET missing_since = coalesce(:seen, {clock})
WHERE member_id = :member AND beacon {same} :beacon AND missing_since IS NULL

-- name: given_up
-- Test if a member is dead, in the transaction that removes it. (A member that has returned has changed its beacon or
-- its lease, and is not found.)
SELECT 1 FROM {schema}_member
WHERE member_id = :member AND beacon {same} :beacon
  AND CASE WHEN lease_until IS NOT NULL THEN CAST(lease_until AS {real}) < {clock}
           ELSE :dead OR missing_since + grace_ms / 1000.0 <= {clock} END

-- name: stale
SELECT requested_at + (SELECT stale_after_ms FROM {schema}_resource WHERE resource_id = :resource) / 1000.0
       <= {clock} AS stale
FROM {table} WHERE resource_id = :resource AND queue_position = :position

-- name: pin
-- Change nothing: but a write keeps out all other writers until the caller's transaction ends.
UPDATE {table} SET granted_at = granted_at
WHERE resource_id = ? AND queue_position = ? AND requesting_id = ? AND granted_at IS NOT NULL

-- name: release_on_commit
INSERT INTO {schema}_commit_marker (marker, marked_at) VALUES (?, {clock})

-- name: is_committed
SELECT 1 AS there FROM {schema}_commit_marker WHERE marker = ?

-- name: delete_commit_marker
DELETE FROM {schema}_commit_marker WHERE marker = ? OR marked_at < {clock} - 86400.0

-- name: holds_and_waits
-- One row if an owner of this member waits and has another row. (Most searches for deadlocks end here.)
SELECT 1 FROM {table} WHERE member_id = ? AND owner IS NOT NULL AND revoked_at IS NULL
GROUP BY owner HAVING max(access_type = 'upgrade') OR count(*) > 1 AND max(granted_at IS NULL)
LIMIT 1

-- name: deadlock_candidates
-- The rows of owners that wait and have two rows, and the rows that wait ahead of them: without these there is no
-- deadlock. (Sums and counts, as MariaDB reads the whole partition for each row to find a maximum.)
WITH q AS (
    SELECT *, granted_at IS NULL OR access_type = 'upgrade' AS waits,
           owner IS NOT NULL AND sum(granted_at IS NULL OR access_type = 'upgrade') OVER one > 0
           AND (count(*) OVER one > 1 OR access_type = 'upgrade') AS busy
    FROM {table} WHERE member_id IS NOT NULL AND revoked_at IS NULL
    WINDOW one AS (PARTITION BY member_id, owner)
), r AS (
    SELECT *, count(CASE WHEN busy AND waits THEN 1 END) OVER (PARTITION BY resource_id ORDER BY queue_position DESC) AS busy_behind
    FROM q
)
SELECT r.queue_position AS position, r.resource_id AS resource, r.member_id AS member, r.owner, r.access_type AS access,
       CAST(r.concurrency_limit AS {integer}) AS "limit", CAST(r.weight AS {integer}) AS weight,
       r.granted_at IS NOT NULL AS granted, m.host, m.pid
FROM r LEFT JOIN {schema}_member AS m ON m.member_id = r.member_id
WHERE r.busy OR r.waits AND r.busy_behind > 0

-- name: entries
-- The last columns are for the liveness check of members. (Bare participants are always shown as waiting.)
SELECT t.resource_id AS resource, t.queue_position AS position,
       CASE WHEN t.revoked_at IS NOT NULL THEN 'revoked' WHEN t.granted_at IS NOT NULL THEN 'holds' ELSE 'waits' END AS state,
       t.access_type AS access, t.concurrency_limit AS "limit", t.weight, t.requesting_id, t.member_id, t.owner, m.host, m.pid,
       m.program, t.note, t.requested_at, t.granted_at,
       {greatest}(0.0, {clock} - coalesce(t.granted_at, t.requested_at)) AS seconds,
       m.grace_ms / 1000.0 AS grace, t.member_id IS NOT NULL AS owned, {liveness}
FROM {table} AS t LEFT JOIN {schema}_member AS m ON m.member_id = t.member_id
WHERE :resource IS NULL OR t.resource_id = :resource
ORDER BY t.resource_id, t.queue_position

-- name: outcomes
-- The outcomes in the history, by one index lookup for each.
WITH RECURSIVE o (outcome) AS (
    SELECT min(outcome) FROM {schema}_history
    UNION ALL
    SELECT (SELECT min(outcome) FROM {schema}_history WHERE outcome > o.outcome) FROM o WHERE o.outcome IS NOT NULL
)
SELECT outcome FROM o WHERE outcome IS NOT NULL

-- name: past
SELECT resource_id AS resource, queue_position AS position, access_type AS access, weight, requesting_id, owner, note,
       requested_at, granted_at, ended_at, {greatest}(0.0, coalesce(granted_at, ended_at) - requested_at) AS waited,
       CASE WHEN granted_at IS NOT NULL THEN {greatest}(0.0, {least}(ended_at, coalesce(heartbeat_at, ended_at)) - granted_at) END AS held,
       outcome, concurrency_limit AS "limit", host, pid, program, login, ended_by, history_id AS rowid
FROM {schema}_history {index:history_outcome}
WHERE outcome = :outcome AND ended_at >= coalesce({clock} - :since, -1e300)
  AND ended_at <= coalesce({clock} - :until, {after_all})
  AND (:who IS NULL OR :who IN (login, host, host || ':' || pid, program, requesting_id, ended_by))
ORDER BY ended_at DESC, history_id DESC LIMIT :maximum

-- name: past_of_resource
SELECT resource_id AS resource, queue_position AS position, access_type AS access, weight, requesting_id, owner, note,
       requested_at, granted_at, ended_at, {greatest}(0.0, coalesce(granted_at, ended_at) - requested_at) AS waited,
       CASE WHEN granted_at IS NOT NULL THEN {greatest}(0.0, {least}(ended_at, coalesce(heartbeat_at, ended_at)) - granted_at) END AS held,
       outcome, concurrency_limit AS "limit", host, pid, program, login, ended_by, history_id AS rowid
FROM {schema}_history {index:history_resource}
WHERE resource_id = :resource AND outcome = :outcome AND ended_at >= coalesce({clock} - :since, -1e300)
  AND ended_at <= coalesce({clock} - :until, {after_all})
  AND (:who IS NULL OR :who IN (login, host, host || ':' || pid, program, requesting_id, ended_by))
ORDER BY ended_at DESC, history_id DESC LIMIT :maximum

-- name: resources
SELECT resource_id AS resource FROM {table} UNION SELECT resource_id FROM {schema}_resource
UNION SELECT prefix || '*' FROM {schema}_limit_pattern
ORDER BY 1

-- name: members
-- Some columns are for the liveness check of members.
SELECT member_id, host, pid, program, login, joined_at, CASE WHEN lease_ms IS NULL THEN 'beacon' ELSE 'lease' END AS kind,
       coalesce(lease_ms, grace_ms) / 1000.0 AS grace, {greatest}(0.0, lease_until - {clock}) AS lease_left,
       {greatest}(0.0, coalesce(missing_since, heartbeat_at) + grace_ms / 1000.0 - {clock}) AS grace_left,
       1 AS owned, beacon, CAST(lease_until AS {real}) AS lease_until, CAST(missing_since AS {real}) AS missing_since,
       CAST(heartbeat_at AS {real}) AS heartbeat_at, {clock} AS now
FROM {schema}_member ORDER BY member_id

-- name: resource_settings
-- Patterns of limits are shown as 'tenant:*'; their effect on a resource is not calculated here.
SELECT o.resource_id, coalesce(l.cap, o.cap), o.paused_at, o.stale_after_ms / 1000.0 AS stale_after, o.paused_by, coalesce(l.cap_by, o.cap_by)
FROM {schema}_resource AS o LEFT JOIN {schema}_limit_pattern AS l ON l.prefix || '*' = o.resource_id
UNION ALL
SELECT prefix || '*', cap, NULL, NULL, NULL, cap_by FROM {schema}_limit_pattern AS l
WHERE NOT EXISTS (SELECT 1 FROM {schema}_resource AS o WHERE o.resource_id = l.prefix || '*')

-- name: unfinished_batches
-- Batches that are open, that have failed and have no successor, or whose callback has not finished.
SELECT r.batch_id FROM {schema}_batch AS r
WHERE r.status = 'open' OR r.callback_status IN ('pending', 'running')
   OR (r.status = 'failed' OR r.callback_status = 'failed')
      AND NOT EXISTS (SELECT 1 FROM {schema}_batch AS n WHERE n.batch_name = r.batch_name AND n.batch_id > r.batch_id)
ORDER BY r.batch_id DESC

-- name: recent_holds
-- The newest holds of each of these resources that ended normally, read by the index.
SELECT h.resource_id, {greatest}(0.0, h.ended_at - h.granted_at) AS held, {greatest}(0.0, h.granted_at - h.requested_at) AS waited, h.note, h.program
FROM {texts:resources} AS w JOIN {schema}_history AS h {index:history_resource}
    ON h.resource_id = w.value AND h.outcome = 'released'
       AND h.ended_at >= coalesce((SELECT p.ended_at FROM {schema}_history AS p {index:history_resource}
                                   WHERE p.resource_id = w.value AND p.outcome = 'released'
                                   ORDER BY p.ended_at DESC LIMIT 1 OFFSET 199), -1e300)
WHERE h.granted_at IS NOT NULL
ORDER BY w.value, h.ended_at DESC, h.queue_position DESC

-- name: set_resource
INSERT INTO {schema}_resource (resource_id, cap, stale_after_ms, ageing_ms, paused_at, cap_by, paused_by)
VALUES (:resource, CASE WHEN :what = 'cap' THEN :value END, CASE WHEN :what = 'stale_after' THEN :value END,
        CASE WHEN :what = 'ageing' THEN :value END,
        CASE WHEN :what = 'paused' AND :value = 1 THEN {clock} END, CASE WHEN :what = 'cap' AND :value IS NOT NULL THEN :login END,
        CASE WHEN :what = 'paused' AND :value = 1 THEN :login END)
{upsert:resource_id} cap_by = CASE WHEN :what <> 'cap' OR cap {same} :value THEN cap_by WHEN :value IS NOT NULL THEN :login END,
    paused_by = CASE WHEN :what <> 'paused' OR :value = 1 AND paused_at IS NOT NULL THEN paused_by WHEN :value = 1 THEN :login END,
    cap = CASE WHEN :what = 'cap' THEN :value ELSE cap END,
    stale_after_ms = CASE WHEN :what = 'stale_after' THEN :value ELSE stale_after_ms END,
    ageing_ms = CASE WHEN :what = 'ageing' THEN :value ELSE ageing_ms END,
    paused_at = CASE WHEN :what <> 'paused' THEN paused_at
                     WHEN :value = 1 THEN coalesce(paused_at, {clock}) END

-- name: setting_of
SELECT cap, stale_after_ms AS stale_after, ageing_ms AS ageing, paused_at IS NOT NULL AS paused FROM {schema}_resource WHERE resource_id = ?

-- name: cap
-- The limit that an operator has set for a resource.
SELECT {cap} AS cap

-- name: pattern
SELECT cap FROM {schema}_limit_pattern WHERE prefix = ?

-- name: set_pattern
INSERT INTO {schema}_limit_pattern (prefix, cap, cap_by) VALUES (:prefix, :cap, :login)
{upsert:prefix} cap = :cap, cap_by = :login, set_at = {clock}

-- name: drop_pattern
DELETE FROM {schema}_limit_pattern WHERE prefix = ?

-- name: without_limit
-- The number of requests that name no limit and for which no limit is set any more, and one of their resources.
SELECT count(*) AS number, min(t.resource_id) AS resource
FROM {table} AS t
WHERE (t.resource_id = :resource OR substr(t.resource_id, 1, {length}(:prefix)) = :prefix)
  AND t.concurrency_limit IS NULL AND t.member_id IS NOT NULL
  AND NOT EXISTS (SELECT 1 FROM {schema}_resource AS o WHERE o.resource_id = t.resource_id AND o.cap IS NOT NULL)
  AND NOT EXISTS (SELECT 1 FROM {schema}_limit_pattern WHERE substr(t.resource_id, 1, {length}(prefix)) = prefix)

-- name: members_of
SELECT member_id FROM {schema}_member WHERE member_id = :member OR login = :login ORDER BY member_id

-- name: positions_of
SELECT queue_position FROM {table} WHERE member_id = ? ORDER BY queue_position

-- name: drop_member_without_rows
DELETE FROM {schema}_member
WHERE member_id = :member AND NOT EXISTS (SELECT 1 FROM {table} WHERE member_id = :member)

-- name: note_operation
INSERT INTO {schema}_operation (login, host, pid, program, action, resource_id, queue_position, queue_name, task_id, old_value, new_value)
VALUES (:login, :host, :pid, :program, :action, :resource, :position, :queue, :task, :old, :new)

-- name: operations
SELECT operation_id, done_at, login, host, pid, program, action, resource_id AS resource, queue_position AS position,
       queue_name AS queue, task_id, old_value AS "old", new_value AS "new"
FROM {schema}_operation
WHERE (:name IS NULL OR :name IN (resource_id, queue_name)) AND (:since IS NULL OR done_at >= {clock} - :since)
  AND (:until IS NULL OR done_at <= {clock} - :until) AND (:action IS NULL OR action = :action)
  AND (:who IS NULL OR :who IN (login, host, host || ':' || pid, program))
ORDER BY operation_id DESC LIMIT :maximum

-- name: prune_operations
DELETE FROM {schema}_operation WHERE operation_id IN (
    SELECT operation_id FROM (SELECT operation_id, done_at FROM {schema}_operation ORDER BY operation_id LIMIT ?) AS oldest,
                             (SELECT max(operation_id) AS last_id FROM {schema}_operation) AS newest
    WHERE done_at < {clock}
                    - 86400.0 * (SELECT value FROM {schema}_setting WHERE name = 'history_days')
       OR operation_id <= last_id - (SELECT value FROM {schema}_setting WHERE name = 'history_rows'))

-- name: delete_empty_settings
DELETE FROM {schema}_resource
WHERE resource_id = :resource AND cap IS NULL AND stale_after_ms IS NULL AND paused_at IS NULL AND ageing_ms IS NULL

-- name: revoke
UPDATE {table}
SET revoked_at = coalesce(revoked_at, {clock}), revoked_by = coalesce(revoked_by, :login)
WHERE queue_position = :position

-- name: revoked_row
SELECT resource_id, granted_at IS NOT NULL AS granted, member_id FROM {table} WHERE queue_position = ?

-- name: all_rows
SELECT resource_id, queue_position FROM {table}

-- name: idle_members
SELECT member_id, beacon FROM {schema}_member
WHERE member_id NOT IN (SELECT member_id FROM {table} WHERE member_id IS NOT NULL)
  AND member_id NOT IN (SELECT member_id FROM {schema}_task WHERE is_open = 1 AND member_id IS NOT NULL)
  AND member_id NOT IN (SELECT member_id FROM {schema}_batch_part WHERE status = 'running' AND member_id IS NOT NULL)
  AND member_id NOT IN (SELECT callback_member FROM {schema}_batch WHERE callback_status = 'running' AND callback_member IS NOT NULL)
  AND coalesce(lease_until, joined_at + grace_ms / 1000.0) < {clock}

-- name: prune_upgrades
DELETE FROM {schema}_upgrade
WHERE NOT EXISTS (SELECT 1 FROM {table} WHERE {table}.queue_position = {schema}_upgrade.queue_position)

-- name: prune
-- (Reads only the oldest rows, however long the history is.)
DELETE FROM {schema}_history WHERE history_id IN (
    SELECT number FROM (SELECT history_id AS number, ended_at FROM {schema}_history ORDER BY history_id LIMIT ?) AS oldest,
                       (SELECT max(history_id) AS last_number FROM {schema}_history) AS newest
    WHERE ended_at < {clock}
                     - 86400.0 * (SELECT value FROM {schema}_setting WHERE name = 'history_days')
       OR number <= last_number - (SELECT value FROM {schema}_setting WHERE name = 'history_rows'))

-- The work queue: see the comments of PostgreSQL's tasks.sql.

-- name: put_task
INSERT INTO {schema}_task (queue_name, task_order, kind, body, note, on_failure, max_attempts, backoff_ms, put_uid, put_by,
                           ready_at, time_limit_ms, unique_key, task_key, task_hash, task_priority, lock_count, enqueue_locks_at)
VALUES (:queue, :order, :kind, :body, :note, :on_failure, :max_attempts, :backoff, :uid, :login,
        CASE WHEN :locks IS NULL THEN {clock} + :after ELSE {end_of_time} END, :time_limit, :unique, :key, :turn, :priority, :locks,
        CASE WHEN :locks IS NOT NULL THEN {clock} + :after END)
{keep_row:put_uid}

-- name: put_lock
INSERT INTO {schema}_task_lock (task_id, number, queue_name, resource_id, access_type, concurrency_limit, weight)
SELECT task_id, :number, queue_name, :resource, :access, :limit, :weight FROM {schema}_task AS t
WHERE put_uid = :uid AND lock_count IS NOT NULL
{keep_row:task_id, number}

-- name: put_before
SELECT t.task_id FROM {texts:uids} AS u JOIN {schema}_task AS t ON t.put_uid = u.value ORDER BY t.task_id

-- name: task_of_key
SELECT task_id, status, put_by FROM {schema}_task WHERE queue_name = :queue AND unique_key = :key AND is_open = 1

-- name: give_up_key
UPDATE {schema}_task SET unique_key = NULL WHERE task_id = ?

-- name: supersede
UPDATE {schema}_task SET status = 'cancelled', is_open = 0, ended_at = {clock} WHERE task_id = ?

-- name: superseded_by
UPDATE {schema}_task SET error = :error WHERE task_id = :task

-- name: next_group
-- The first tasks without a key. In a queue with fair queueing they were put before it had keys, limits or priorities, and
-- so have no priority.
SELECT task_id, kind, losses, task_priority FROM {schema}_task {index:task_plain}
WHERE queue_name = :queue AND is_open = 1 AND status = 'pending' AND task_key IS NULL AND lock_count IS NULL
  AND ready_at <= {greatest}({clock}, put_at)  -- (put_at: the clock may have gone back since)
  AND task_order = (SELECT min(task_order) FROM {schema}_task WHERE queue_name = :queue AND is_open = 1)
ORDER BY task_id LIMIT :maximum

-- name: uses_fair_queueing
-- True if the queue has limits, or tasks with keys. PostgreSQL's tasks.sql explains fair queueing.
SELECT EXISTS (SELECT 1 FROM {schema}_queue_setting WHERE queue_name = :queue)
    OR EXISTS (SELECT 1 FROM {schema}_task {index:task_fair}
               WHERE queue_name = :queue AND is_open = 1 AND status = 'pending' AND task_hash IS NOT NULL AND lock_count IS NULL) AS turns

-- name: order_of_turns
SELECT (SELECT min(task_order) FROM {schema}_task {index:task_open} WHERE queue_name = :queue AND is_open = 1) AS task_order,
       (SELECT task_limit FROM {schema}_queue_setting WHERE queue_name = :queue) AS task_limit

-- name: running_keys
SELECT coalesce(task_key, '') AS task_key, count(*) AS many FROM {schema}_task
WHERE queue_name = :queue AND status = 'running' GROUP BY 1

-- name: next_key_hashes
-- The task_hash of the next keys after a hash that have pending tasks.
WITH RECURSIVE turns (task_hash, number) AS (
    SELECT min(task_hash), 1 FROM {schema}_task {index:task_fair}
    WHERE queue_name = :queue AND is_open = 1 AND status = 'pending' AND task_hash IS NOT NULL AND lock_count IS NULL
      AND task_order = :order AND task_hash > :beyond AND task_hash < :until
    UNION ALL
    SELECT (SELECT min(t.task_hash) FROM {schema}_task AS t {index:task_fair}
            WHERE t.queue_name = :queue AND t.is_open = 1 AND t.status = 'pending' AND t.lock_count IS NULL AND t.task_hash > k.task_hash
              AND t.task_hash < :until AND t.task_order = :order), number + 1
    FROM turns AS k WHERE k.task_hash IS NOT NULL AND number < :maximum)
SELECT task_hash FROM turns WHERE task_hash IS NOT NULL

-- name: heavy_keys
SELECT task_key FROM {schema}_queue_key WHERE queue_name = :queue AND weight > 1 ORDER BY weight DESC LIMIT :maximum

-- name: keys_in_turn
-- The settings of these keys, without the keys whose rate is used up.
SELECT k.value AS task_key, coalesce(s.weight, 1) AS weight, CASE WHEN k.value <> '' THEN coalesce(s.task_limit, q.key_limit) END AS maximum
FROM {texts:keys} AS k
LEFT JOIN {schema}_queue_key AS s ON s.queue_name = :queue AND s.task_key = k.value
LEFT JOIN {schema}_queue_setting AS q ON q.queue_name = :queue
LEFT JOIN {schema}_queue_wait AS w ON w.queue_name = :queue AND k.value <> ''
    AND w.task_key = CASE WHEN coalesce(s.task_rate, q.key_rate) IS NOT NULL THEN k.value END
WHERE ({clock} * 1000 >= w.since_ms AND {clock} * 1000 < w.free_ms) IS NOT TRUE

-- name: first_task_of_key
SELECT task_id, task_priority FROM {schema}_task {index:task_fair}
WHERE queue_name = :queue AND is_open = 1 AND status = 'pending' AND lock_count IS NULL AND task_hash = :turn AND task_order = :order
  AND ready_at <= {greatest}({clock}, put_at)
ORDER BY task_priority DESC, task_id LIMIT 1

-- name: queue_limits
SELECT * FROM (
    SELECT queue_name AS queue, NULL AS task_key, task_limit, key_limit, NULL AS weight, set_at, set_by,
           task_rate, task_ms / 1000.0 AS task_per, key_rate, key_ms / 1000.0 AS key_per FROM {schema}_queue_setting
    UNION ALL
    SELECT queue_name, task_key, task_limit, NULL, weight, set_at, set_by, task_rate, task_ms / 1000.0, NULL, NULL
    FROM {schema}_queue_key) AS s
WHERE :queue IS NULL OR queue = :queue
ORDER BY queue, task_key

-- name: start_rates
-- The rates of starts: of the queue (task_key ''), and of this key.
SELECT '' AS task_key, task_rate AS maximum, task_ms AS ms FROM {schema}_queue_setting
WHERE queue_name = :queue AND task_rate IS NOT NULL
UNION ALL
SELECT :key, coalesce(k.task_rate, s.key_rate), CASE WHEN k.task_rate IS NULL THEN s.key_ms ELSE k.task_ms END
FROM {schema}_queue_setting AS s
LEFT JOIN {schema}_queue_key AS k ON k.queue_name = :queue AND k.task_key = :key
WHERE s.queue_name = :queue AND :key <> '' AND coalesce(k.task_rate, s.key_rate) IS NOT NULL

-- name: queue_waits
SELECT queue_name AS queue, nullif(task_key, '') AS task_key, free_ms / 1000.0 - {clock} AS seconds FROM {schema}_queue_wait
WHERE (:queue IS NULL OR queue_name = :queue) AND {clock} * 1000 >= since_ms AND {clock} * 1000 < free_ms
ORDER BY queue_name, task_key

-- name: key_waits
SELECT 1 FROM {schema}_queue_wait
WHERE queue_name = :queue AND task_key = :key AND {clock} * 1000 >= since_ms AND {clock} * 1000 < free_ms

-- name: put_queue_wait
{replace_into} {schema}_queue_wait (queue_name, task_key, since_ms, free_ms) VALUES (:queue, :key, :since, :free)

-- name: forget_queue_waits
DELETE FROM {schema}_queue_wait WHERE queue_name = ?

-- name: prune_queue_waits
-- Delete notes about keys that are no longer used.
DELETE FROM {schema}_queue_wait WHERE free_ms < ({clock} - 86400) * 1000

-- name: make_queue_setting
INSERT INTO {schema}_queue_setting (queue_name) VALUES (:queue) {keep_row:queue_name}

-- name: make_queue_key
INSERT INTO {schema}_queue_key (queue_name, task_key) VALUES (:queue, :key) {keep_row:queue_name, task_key}

-- name: set_queue
UPDATE {schema}_queue_setting
SET task_limit = CASE :what WHEN 'limit' THEN :value ELSE task_limit END,
    key_limit = CASE :what WHEN 'key_limit' THEN :value ELSE key_limit END,
    task_rate = CASE :what WHEN 'rate' THEN :value ELSE task_rate END,
    task_ms = CASE :what WHEN 'rate' THEN :per_ms ELSE task_ms END,
    key_rate = CASE :what WHEN 'key_rate' THEN :value ELSE key_rate END,
    key_ms = CASE :what WHEN 'key_rate' THEN :per_ms ELSE key_ms END, set_at = {clock}, set_by = :login
WHERE queue_name = :queue

-- name: set_queue_key
UPDATE {schema}_queue_key
SET task_limit = CASE :what WHEN 'limit' THEN :value ELSE task_limit END,
    weight = CASE :what WHEN 'weight' THEN :value ELSE weight END,
    task_rate = CASE :what WHEN 'rate' THEN :value ELSE task_rate END,
    task_ms = CASE :what WHEN 'rate' THEN :per_ms ELSE task_ms END, set_at = {clock}, set_by = :login
WHERE queue_name = :queue AND task_key = :key

-- name: tidy_queue_key
DELETE FROM {schema}_queue_key
WHERE queue_name = :queue AND task_key = :key AND task_limit IS NULL AND weight IS NULL AND task_rate IS NULL

-- name: tidy_queue_setting
DELETE FROM {schema}_queue_setting
WHERE queue_name = :queue AND task_limit IS NULL AND key_limit IS NULL AND task_rate IS NULL AND key_rate IS NULL
  AND NOT EXISTS (SELECT 1 FROM {schema}_queue_key WHERE queue_name = :queue)

-- Tasks with locks: see the comments of PostgreSQL's blocked_tasks.sql.

-- name: has_blocked_tasks
SELECT 1 FROM {schema}_task {index:task_blocked}
WHERE queue_name = :queue AND is_open = 1 AND status = 'pending' AND lock_count IS NOT NULL LIMIT 1

-- name: queue_proxy
-- left: the rest of the proxy member's lease, in seconds; NULL: the member was removed.
SELECT p.member_id, m.lease_until - {clock} AS "left"
FROM {schema}_queue_proxy AS p LEFT JOIN {schema}_member AS m ON m.member_id = p.member_id WHERE p.queue_name = :queue

-- name: register_proxy
INSERT INTO {schema}_member (beacon, program, login, grace_ms, lease_ms, heartbeat_at, lease_until)
VALUES (NULL, 'blocked tasks', '', 0, :lease, {clock}, {clock} + :lease / 1000.0)

-- name: set_proxy
INSERT INTO {schema}_queue_proxy (queue_name, member_id) VALUES (:queue, :member)
{upsert:queue_name} member_id = :member

-- name: forget_lines
UPDATE {schema}_task_lock SET queue_position = NULL, waits = 0
WHERE task_id IN (SELECT task_id FROM {schema}_task {index:task_blocked}
                  WHERE queue_name = :queue AND is_open = 1 AND status = 'pending' AND lock_count IS NOT NULL)

-- name: forget_asked
UPDATE {schema}_task SET locks_pending = NULL
WHERE queue_name = :queue AND is_open = 1 AND status = 'pending' AND lock_count IS NOT NULL AND locks_pending IS NOT NULL

-- name: waiting_locks
SELECT task_id, number, resource_id AS resource, access_type AS access, concurrency_limit AS "limit", weight, queue_position AS position
FROM {schema}_task_lock {index:task_lock_waits} WHERE queue_name = :queue AND waits
ORDER BY resource_id, access_type, weight, concurrency_limit, queue_position

-- name: turn_has_come
UPDATE {schema}_task_lock SET waits = 0 WHERE task_id = :task AND number = :number

-- name: one_lock_less
UPDATE {schema}_task SET locks_pending = locks_pending - 1 WHERE task_id = ?

-- name: all_locks_wait
UPDATE {schema}_task_lock SET waits = 1 WHERE task_id = ?

-- name: no_locks_wait
UPDATE {schema}_task_lock SET waits = 0, queue_position = NULL WHERE task_id = ?

-- name: lock_waits
UPDATE {schema}_task_lock SET waits = 1, queue_position = :position WHERE task_id = :task AND number = :number

-- name: locks_pending
UPDATE {schema}_task SET locks_pending = :left WHERE task_id = :task

-- name: locks_of
SELECT number, resource_id AS resource, access_type AS access, concurrency_limit AS "limit", weight, queue_position AS position
FROM {schema}_task_lock WHERE task_id = ? ORDER BY number

-- name: key_of
SELECT coalesce(task_key, '') AS task_key FROM {schema}_task WHERE task_id = ?

-- name: enqueued_blocked_tasks
SELECT task_id, task_order, task_key FROM {schema}_task {index:task_blocked}
WHERE queue_name = :queue AND is_open = 1 AND status = 'pending' AND lock_count IS NOT NULL AND locks_pending = 0
ORDER BY task_order, task_priority DESC, task_id

-- name: unqueued_blocked_tasks
SELECT task_id, task_key, note FROM {schema}_task {index:task_blocked}
WHERE queue_name = :queue AND is_open = 1 AND status = 'pending' AND lock_count IS NOT NULL AND locks_pending IS NULL
  AND enqueue_locks_at <= {greatest}({clock}, put_at)
  AND task_order = (SELECT min(task_order) FROM {schema}_task {index:task_open} WHERE queue_name = :queue AND is_open = 1)
ORDER BY task_priority DESC, task_id

-- name: has_room
SELECT count(t.task_id) < coalesce(q.task_limit, 9223372036854775807)
       AND (coalesce(:key, '') = '' OR count(CASE WHEN t.task_key = :key THEN 1 END)
            < coalesce((SELECT task_limit FROM {schema}_queue_key WHERE queue_name = :queue AND task_key = :key), q.key_limit,
                       9223372036854775807)) AS room,
       count(CASE WHEN t.status = 'pending' THEN 1 END) AS ask,
       count(CASE WHEN t.status = 'pending' AND t.task_key = :key THEN 1 END) AS ask_of_key
FROM (SELECT 1) AS one LEFT JOIN {schema}_queue_setting AS q ON q.queue_name = :queue
LEFT JOIN {schema}_task AS t
    ON q.queue_name IS NOT NULL AND t.queue_name = :queue AND t.is_open = 1
       AND (t.status = 'running' OR :asked AND t.status = 'pending' AND t.locks_pending IS NOT NULL)

-- name: claim_task
UPDATE {schema}_task
SET status = 'running', attempt = attempt + 1, member_id = :member, owner = :owner, claim_uid = :uid,
    claimed_at = {clock}, host = (SELECT host FROM {schema}_member WHERE member_id = :member),
    pid = (SELECT pid FROM {schema}_member WHERE member_id = :member),
    login = (SELECT login FROM {schema}_member WHERE member_id = :member)
WHERE task_id = :task AND EXISTS (SELECT 1 FROM {schema}_member WHERE member_id = :member)

-- name: claimed
SELECT task_id, task_order, kind, body, note, attempt, failures, max_attempts FROM {schema}_task WHERE task_id = ?

-- name: claimed_before
SELECT task_id, attempt FROM {schema}_task
WHERE queue_name = :queue AND status = 'running' AND member_id = :member AND claim_uid = :uid
ORDER BY task_id

-- name: keep_attempt
-- Write the log of an attempt before its end, while the task's row still has the worker and the start.
INSERT INTO {schema}_task_log (task_id, attempt, outcome, member_id, owner, host, pid, login, started_at, error, result)
SELECT t.task_id, t.attempt, :outcome, t.member_id, t.owner, m.host, m.pid, m.login, t.claimed_at, {error_after}, :result
FROM {schema}_task AS t JOIN {schema}_member AS m ON m.member_id = t.member_id
WHERE t.task_id = :task AND t.attempt = :attempt AND t.member_id = :member AND t.status = 'running'

-- name: end_task
UPDATE {schema}_task
SET status = {status_after},
    is_open = {status_after} = 'pending' OR {status_after} = 'failed' AND on_failure = 'stop',
    ready_at = CASE WHEN :outcome = 'failed' AND failures + 1 < max_attempts
                    -- The pause doubles with each failure, up to five minutes; half of it is random.
                    THEN {clock} + {least}(300.0, backoff_ms / 1000.0 * (1 << {least}(failures, 20)))
                         * (0.5 + {random} / 2)
                    ELSE ready_at END,
    ended_at = CASE WHEN {status_after} <> 'pending' THEN {clock} END,
    error = {error_after}, result = :result, member_id = NULL, claim_uid = NULL,
    failures = failures + (:outcome = 'failed')
WHERE task_id = :task

-- name: ended_before
SELECT t.status FROM {schema}_task_log AS l JOIN {schema}_task AS t ON t.task_id = l.task_id
WHERE l.task_id = :task AND l.attempt = :attempt AND l.member_id = :member AND l.outcome = :outcome

-- name: task_members
SELECT DISTINCT member_id FROM {schema}_task
WHERE (:queue IS NULL OR queue_name = :queue) AND status = 'running'

-- name: keep_lost
INSERT INTO {schema}_task_log (task_id, attempt, outcome, member_id, owner, host, pid, login, started_at, error)
SELECT task_id, attempt, 'lost', member_id, owner, host, pid, login, claimed_at, 'its worker died' FROM {schema}_task
WHERE (:queue IS NULL OR queue_name = :queue) AND status = 'running'
  AND member_id NOT IN (SELECT member_id FROM {schema}_member)

-- name: recover_tasks
UPDATE {schema}_task
SET status = CASE WHEN cancel_asked_at IS NOT NULL THEN 'cancelled' WHEN losses < 4 THEN 'pending' ELSE 'failed' END,
    is_open = cancel_asked_at IS NULL AND (losses < 4 OR on_failure = 'stop'),
    ended_at = CASE WHEN cancel_asked_at IS NOT NULL OR losses >= 4 THEN {clock} END,
    error = CASE WHEN cancel_asked_at IS NOT NULL THEN 'cancelled by ' || cancel_asked_by || {newline} || 'its worker died'
                 WHEN losses < 4 THEN error ELSE 'its worker died five times' END,
    losses = losses + 1, member_id = NULL, claim_uid = NULL
WHERE (:queue IS NULL OR queue_name = :queue) AND status = 'running'
  AND member_id NOT IN (SELECT member_id FROM {schema}_member)

-- name: next_ready
-- See the comments of PostgreSQL's tasks.sql.
WITH waits AS (
    SELECT task_key, free_ms / 1000.0 AS free_at FROM {schema}_queue_wait
    WHERE queue_name = :queue AND {clock} * 1000 >= since_ms AND {clock} * 1000 < free_ms + 100),
later AS (
    SELECT ready_at FROM {schema}_task {index:task_later}
    WHERE queue_name = :queue AND status = 'pending' AND lock_count IS NULL AND ready_at > put_at
      AND task_order = (SELECT min(task_order) FROM {schema}_task {index:task_open} WHERE queue_name = :queue AND is_open = 1)
      AND ready_at > {clock} - CASE WHEN EXISTS (SELECT 1 FROM waits) THEN 0.1 ELSE 10 END
    ORDER BY ready_at LIMIT 1),
next AS (
    SELECT {greatest}(0.0, coalesce((SELECT free_at FROM waits WHERE task_key = ''),
                             (SELECT min(free_at) FROM (SELECT free_at FROM waits UNION ALL SELECT ready_at FROM later) AS either)) - {clock})
           AS seconds)
SELECT CASE WHEN EXISTS (SELECT 1 FROM {schema}_task {index:task_blocked}
                         WHERE queue_name = :queue AND is_open = 1 AND status = 'pending' AND lock_count IS NOT NULL)
            THEN {least}(0.25, coalesce(seconds, 0.25)) ELSE seconds END AS seconds
FROM next

-- name: queue_state
SELECT EXISTS (SELECT 1 FROM {schema}_task WHERE queue_name = :queue AND is_open = 1 AND status = 'pending'),
       EXISTS (SELECT 1 FROM {schema}_task WHERE queue_name = :queue AND status = 'running'),
       EXISTS (SELECT 1 FROM {schema}_task WHERE queue_name = :queue AND is_open = 1 AND status = 'pending'
               AND task_order = (SELECT min(task_order) FROM {schema}_task WHERE queue_name = :queue AND is_open = 1)),
       f.task_id, f.error
FROM (SELECT 1) AS one LEFT JOIN (SELECT task_id, error FROM {schema}_task
                           WHERE queue_name = :queue AND is_open = 1 AND status = 'failed'
                           ORDER BY task_order, task_id LIMIT 1) AS f ON 1 = 1

-- name: queue_counts
-- The client counts the lost tasks, as it tests their members.
SELECT t.queue_name AS queue, count(CASE WHEN t.status = 'pending' THEN 1 END) AS pending,
       count(CASE WHEN t.status = 'running' THEN 1 END) AS running, count(CASE WHEN t.status = 'finished' THEN 1 END) AS finished,
       count(CASE WHEN t.status = 'failed' THEN 1 END) AS failed, count(CASE WHEN t.status = 'cancelled' THEN 1 END) AS cancelled,
       {greatest}(0.0, max(CASE WHEN t.status = 'pending' AND t.ready_at <= {greatest}({clock}, t.put_at) THEN {clock} - {greatest}(t.put_at, t.ready_at) END)) AS oldest,
       count(CASE WHEN t.ended_at > {clock} - 300 THEN 1 END) / 5.0 AS rate,
       (SELECT b.task_id FROM {schema}_task AS b
        WHERE b.queue_name = t.queue_name AND b.is_open = 1 AND b.status = 'failed'
          AND b.task_order < (SELECT max(l.task_order) FROM {schema}_task AS l
                              WHERE l.queue_name = t.queue_name AND l.is_open = 1 AND l.status = 'pending')
        ORDER BY b.task_order, b.task_id LIMIT 1) AS blocked_by
FROM {schema}_task AS t WHERE :queue IS NULL OR t.queue_name = :queue
GROUP BY t.queue_name ORDER BY t.queue_name

-- name: running_members
SELECT t.queue_name AS queue, m.grace_ms / 1000.0 AS grace, 1 AS owned, {liveness}
FROM {schema}_task AS t LEFT JOIN {schema}_member AS m ON m.member_id = t.member_id
WHERE t.status = 'running' AND (:queue IS NULL OR t.queue_name = :queue)

-- name: page_tasks
-- The last columns are for the liveness check of members.
SELECT t.task_id, t.queue_name AS queue, t.task_order AS "order", t.kind, t.body, t.note, t.status, t.on_failure, t.attempt,
       t.failures, t.losses, t.max_attempts, t.put_at, CASE WHEN t.lock_count IS NULL THEN t.ready_at ELSE t.enqueue_locks_at END AS ready_at,
       t.claimed_at, t.ended_at,
       CASE WHEN t.status IN ('finished', 'failed') THEN {greatest}(0.0, t.ended_at - t.claimed_at)
            WHEN t.status = 'running' THEN {greatest}(0.0, {clock} - t.claimed_at) END AS seconds,
       t.member_id, t.owner, t.host, t.pid, t.error, t.result, t.put_by, t.login, t.time_limit_ms / 1000.0 AS time_limit,
       t.unique_key AS "unique", t.cancel_asked_at, t.cancel_asked_by, nullif(t.task_key, '') AS "key",
       t.task_priority AS priority,
       CASE WHEN t.lock_count IS NOT NULL THEN
           (SELECT {json_array_of}(json_array(number, resource_id, queue_position, access_type, concurrency_limit, weight))
            FROM {schema}_task_lock AS l WHERE l.task_id = t.task_id) END AS locks, m.grace_ms / 1000.0 AS grace, t.status = 'running' AS owned, {liveness}
FROM (-- A page of open tasks (those with a priority have an index of their own), and one of ended tasks.
      SELECT * FROM (SELECT * FROM {schema}_task
                     WHERE is_open = 1 AND task_priority = 0 AND (:queue IS NULL OR queue_name = :queue)
                       AND (:status IS NULL OR status = :status)
                     ORDER BY queue_name, task_order, task_id LIMIT :maximum) AS plain
      UNION ALL
      SELECT * FROM (SELECT * FROM {schema}_task
                     WHERE is_open = 1 AND task_priority <> 0 AND (:queue IS NULL OR queue_name = :queue)
                       AND (:status IS NULL OR status = :status)
                     ORDER BY queue_name, task_order, task_priority DESC, task_id LIMIT :maximum) AS ranked
      UNION ALL
      SELECT * FROM (SELECT * FROM {schema}_task
                     WHERE NOT :status {same} 'pending' AND is_open = 0 AND (:queue IS NULL OR queue_name = :queue)
                       AND (:status IS NULL OR status = :status)
                     ORDER BY ended_at DESC, task_id DESC LIMIT :maximum) AS ended) AS t
LEFT JOIN {schema}_member AS m ON m.member_id = t.member_id
ORDER BY t.is_open = 0, CASE WHEN t.is_open THEN t.queue_name END, CASE WHEN t.is_open THEN t.task_order END,
         CASE WHEN t.is_open THEN t.task_priority END DESC, CASE WHEN t.is_open THEN t.task_id END, t.ended_at DESC, t.task_id DESC
LIMIT :maximum

-- name: task_attempts
SELECT task_id, attempt, outcome, member_id, owner, host, pid, started_at, ended_at,
       {greatest}(0.0, ended_at - started_at) AS seconds, error, result, login, NULL AS grace, 0 AS owned, NULL AS beacon,
       NULL AS lease_until, NULL AS missing_since, NULL AS heartbeat_at, NULL AS now
FROM {schema}_task_log WHERE task_id = :task
UNION ALL
SELECT t.task_id, t.attempt, 'running', t.member_id, t.owner, t.host, t.pid, t.claimed_at, NULL,
       {greatest}(0.0, {clock} - t.claimed_at), NULL, NULL, t.login, m.grace_ms / 1000.0, 1, m.beacon,
       CAST(m.lease_until AS {real}), CAST(m.missing_since AS {real}), CAST(m.heartbeat_at AS {real}), {clock}
FROM {schema}_task AS t LEFT JOIN {schema}_member AS m ON m.member_id = t.member_id
WHERE t.task_id = :task AND t.status = 'running'
ORDER BY 2

-- name: task_status
SELECT status, queue_name, member_id FROM {schema}_task WHERE task_id = ?

-- name: retry_task
-- (ready_at = put_at: ready at once, even if the clock has gone back.)
UPDATE {schema}_task
SET status = 'pending', is_open = 1, failures = 0, losses = 0, ready_at = put_at, ended_at = NULL,
    cancel_asked_at = NULL, cancel_asked_by = NULL
WHERE task_id = :task

-- name: rival
-- Another open task with the same key.
SELECT 1 FROM {schema}_task AS t JOIN {schema}_task AS o ON o.queue_name = t.queue_name AND o.unique_key = t.unique_key
WHERE t.task_id = ? AND o.is_open = 1 AND o.task_id <> t.task_id

-- name: cancel_task
UPDATE {schema}_task
SET status = 'cancelled', is_open = 0, ended_at = {clock}, cancel_asked_at = {clock}, cancel_asked_by = :login
WHERE task_id = :task

-- name: ask_to_cancel
UPDATE {schema}_task
SET cancel_asked_at = coalesce(cancel_asked_at, {clock}), cancel_asked_by = coalesce(cancel_asked_by, :login)
WHERE task_id = :task AND status = 'running'

-- name: task_controls
SELECT t.task_id, t.time_limit_ms / 1000.0 AS time_limit, t.cancel_asked_by
FROM {numbers:tasks} AS j JOIN {schema}_task AS t ON t.task_id = j.value
WHERE t.member_id = :member AND t.status = 'running' AND (t.time_limit_ms IS NOT NULL OR t.cancel_asked_at IS NOT NULL)

-- name: prune_task_log
DELETE FROM {schema}_task_log WHERE task_id IN ({expired_tasks})

-- name: prune_task_locks
DELETE FROM {schema}_task_lock WHERE task_id IN ({expired_tasks})

-- name: prune_tasks
DELETE FROM {schema}_task WHERE task_id IN ({expired_tasks})

-- name: clock
SELECT {clock} AS now

-- name: batch_members
SELECT p.member_id FROM {schema}_batch_part AS p JOIN {schema}_batch AS r ON r.batch_id = p.batch_id
WHERE p.status = 'running' AND (:name IS NULL OR r.batch_name = :name)
UNION
SELECT callback_member FROM {schema}_batch WHERE callback_status = 'running' AND (:name IS NULL OR batch_name = :name)

-- name: orphaned_batches
SELECT DISTINCT p.batch_id FROM {schema}_batch_part AS p JOIN {schema}_batch AS r ON r.batch_id = p.batch_id
WHERE p.status = 'running' AND (:name IS NULL OR r.batch_name = :name)
  AND p.member_id NOT IN (SELECT member_id FROM {schema}_member)
ORDER BY 1

-- name: recover_callback
UPDATE {schema}_batch SET callback_status = 'pending', callback_uid = NULL
WHERE callback_status = 'running' AND (:name IS NULL OR batch_name = :name)
  AND callback_member NOT IN (SELECT member_id FROM {schema}_member)

-- name: recover_parts
UPDATE {schema}_batch_part
SET status = 'failed', ended_at = {clock}, error = 'its process died'
WHERE batch_id = ? AND status = 'running' AND member_id NOT IN (SELECT member_id FROM {schema}_member)

-- name: fail_batch
UPDATE {schema}_batch SET status = 'failed', ended_at = {clock}
WHERE batch_id = :batch AND status = 'open'
  AND NOT EXISTS (SELECT 1 FROM {schema}_batch_part WHERE batch_id = :batch AND status IN ('expected', 'running'))
  AND EXISTS (SELECT 1 FROM {schema}_batch_part WHERE batch_id = :batch AND status = 'failed')

-- name: latest_batch
-- The last columns are for the liveness check of the member that runs the callback.
SELECT r.batch_id, r.status, r.opened_at, r.window_ms / 1000.0 AS "window", r.opened_by, r.callback_status,
       m.grace_ms / 1000.0 AS grace, r.callback_status = 'running' AS owned, {liveness}
FROM {schema}_batch AS r LEFT JOIN {schema}_member AS m ON m.member_id = r.callback_member
WHERE r.batch_name = ? ORDER BY r.batch_id DESC LIMIT 1

-- name: batch_parts
SELECT part, status, start_uid, member_id, attempt, started_at, is_last FROM {schema}_batch_part WHERE batch_id = ?

-- name: expire_batch
UPDATE {schema}_batch SET status = 'expired', ended_at = :now WHERE batch_id = :batch

-- name: batch_to_abandon
-- The batch of a number, or the newest one of a name.
SELECT batch_id, batch_name, status FROM {schema}_batch
WHERE batch_id = coalesce(:batch, (SELECT max(batch_id) FROM {schema}_batch WHERE batch_name = :name))
  AND (status IN ('open', 'failed') OR status = 'succeeded' AND callback_status IN ('pending', 'failed'))

-- name: abandon_batch
UPDATE {schema}_batch
SET status = 'abandoned', ended_at = coalesce(ended_at, {clock}),
    callback_ended = CASE callback_status WHEN 'pending' THEN {clock} ELSE callback_ended END,
    callback_error = CASE callback_status WHEN 'pending' THEN 'the batch was abandoned' ELSE callback_error END,
    callback_status = CASE callback_status WHEN 'pending' THEN 'failed' ELSE callback_status END
WHERE batch_id = :batch

-- name: open_batch
INSERT INTO {schema}_batch (batch_name, window_ms, opened_at, opened_by) VALUES (:name, :window, :now, :login)

-- name: open_part
INSERT INTO {schema}_batch_part (batch_id, part) VALUES (?, ?)

-- name: prune_batch_parts
DELETE FROM {schema}_batch_part WHERE batch_id IN (
    SELECT batch_id FROM {schema}_batch
    WHERE batch_name = :name AND callback_status NOT IN ('pending', 'running')
      AND ended_at < :now - 86400.0 * (SELECT value FROM {schema}_setting WHERE name = 'history_days'))

-- name: prune_batches
DELETE FROM {schema}_batch
WHERE batch_name = :name AND callback_status NOT IN ('pending', 'running')
  AND ended_at < :now - 86400.0 * (SELECT value FROM {schema}_setting WHERE name = 'history_days')

-- name: reopen_batch
UPDATE {schema}_batch
SET status = 'open', ended_at = NULL, window_ms = :window, callback_status = 'none', callback_uid = NULL, callback_ended = NULL,
    callback_error = NULL
WHERE batch_id = :batch

-- name: start_part
UPDATE {schema}_batch_part
SET status = 'running', attempt = attempt + 1, start_uid = :uid, member_id = :member, owner = :owner,
    host = (SELECT host FROM {schema}_member WHERE member_id = :member),
    pid = (SELECT pid FROM {schema}_member WHERE member_id = :member),
    login = (SELECT login FROM {schema}_member WHERE member_id = :member),
    started_at = :now, ended_at = NULL, error = NULL, is_last = 0
WHERE batch_id = :batch AND part = :part

-- name: store_callback
UPDATE {schema}_batch SET callback_kind = :kind, callback_body = :body, callback_kept_by = :login WHERE batch_id = :batch

-- name: expired_by
SELECT batch_id FROM {schema}_batch
WHERE batch_name = :name AND batch_id < :batch AND status = 'expired'
  AND ended_at = (SELECT opened_at FROM {schema}_batch WHERE batch_id = :batch)
ORDER BY batch_id DESC LIMIT 1

-- name: started_part
SELECT r.batch_id, r.status, r.opened_at + r.window_ms / 1000.0, p.status, p.member_id, p.error
FROM {schema}_batch AS r JOIN {schema}_batch_part AS p ON p.batch_id = r.batch_id
WHERE r.batch_name = :name AND p.part = :part AND p.start_uid = :uid
ORDER BY r.batch_id DESC LIMIT 1

-- name: end_part
UPDATE {schema}_batch_part SET status = :status, ended_at = :now, error = :error
WHERE batch_id = :batch AND part = :part

-- name: succeed_batch
UPDATE {schema}_batch SET status = 'succeeded', ended_at = :now
WHERE batch_id = :batch AND status = 'open'
  AND NOT EXISTS (SELECT 1 FROM {schema}_batch_part WHERE batch_id = :batch AND status <> 'succeeded')

-- name: mark_last
UPDATE {schema}_batch_part SET is_last = 1 WHERE batch_id = :batch AND part = :part

-- name: begin_callback
-- (A callback of kind local stays pending until a process that has it claims it.)
UPDATE {schema}_batch
SET callback_status = CASE WHEN callback_kind = 'local' AND NOT :own THEN 'pending' ELSE 'running' END,
    callback_attempt = callback_attempt + (callback_kind <> 'local' OR :own), callback_uid = :uid, callback_member = :member,
    callback_owner = :owner, callback_login = :login, callback_started = CASE WHEN callback_kind <> 'local' OR :own THEN :now END
WHERE batch_id = :batch AND callback_kind IS NOT NULL

-- name: return_callback
UPDATE {schema}_batch SET callback_status = 'pending', callback_uid = NULL
WHERE callback_status = 'running' AND callback_member = :member AND callback_uid = :uid

-- name: ended_part
SELECT r.status, p.is_last FROM {schema}_batch AS r JOIN {schema}_batch_part AS p ON p.batch_id = r.batch_id
WHERE r.batch_id = :batch AND p.part = :part

-- name: claimed_callback
SELECT batch_id, batch_name, callback_attempt, callback_kind, callback_body FROM {schema}_batch
WHERE callback_status = 'running' AND callback_member = :member AND callback_uid = :uid

-- name: claim_callback
UPDATE {schema}_batch
SET callback_status = 'running', callback_attempt = callback_attempt + 1, callback_uid = :uid, callback_member = :member,
    callback_owner = :owner, callback_login = :login, callback_started = {clock}, callback_ended = NULL, callback_error = NULL
WHERE batch_id = (
    SELECT batch_id FROM (SELECT batch_id FROM {schema}_batch
                          WHERE CASE WHEN :batch IS NULL THEN batch_name = :name AND callback_status = 'pending'
                                     ELSE batch_id = :batch AND status = 'succeeded' AND callback_status IN ('pending', 'failed') END
                            AND (:own OR callback_kind NOT IN ('local', 'session'))
                          ORDER BY batch_id LIMIT 1) AS oldest)

-- name: end_callback
UPDATE {schema}_batch
SET callback_status = CASE WHEN :error IS NULL THEN 'finished' ELSE 'failed' END,
    callback_ended = {clock}, callback_error = :error
WHERE batch_id = :batch AND callback_status = 'running' AND callback_attempt = :attempt AND callback_member = :member
  AND EXISTS (SELECT 1 FROM {schema}_member WHERE member_id = :member)

-- name: ended_callback
SELECT batch_id FROM {schema}_batch
WHERE batch_id = :batch AND callback_status IN ('finished', 'failed') AND callback_attempt = :attempt AND callback_member = :member

-- name: list_batches
-- The last columns are for the liveness check of members.
SELECT r.batch_id, r.batch_name AS name, r.status, r.window_ms / 1000.0 AS "window", r.opened_at, r.ended_at,
       {greatest}(0.0, coalesce(r.ended_at, {clock}) - r.opened_at) AS seconds,
       r.callback_status, r.callback_kind, r.callback_body, r.callback_attempt, r.callback_owner, r.callback_started, r.callback_ended,
       {greatest}(0.0, coalesce(r.callback_ended, {clock}) - r.callback_started) AS callback_seconds, r.callback_error, r.opened_by, r.callback_kept_by, r.callback_login,
       p.part, p.status AS part_status, p.is_last, p.attempt, p.member_id, p.owner, p.host, p.pid, p.started_at,
       p.ended_at AS part_ended_at, {greatest}(0.0, coalesce(p.ended_at, {clock}) - p.started_at) AS part_seconds, p.error, p.login,
       m.grace_ms / 1000.0 AS grace, p.status = 'running' AS owned, {liveness}
FROM (SELECT * FROM {schema}_batch
      WHERE (:name IS NULL OR batch_name = :name) AND (:batch IS NULL OR batch_id = :batch)
      ORDER BY batch_id DESC LIMIT :maximum) AS r
JOIN {schema}_batch_part AS p ON p.batch_id = r.batch_id
LEFT JOIN {schema}_member AS m ON m.member_id = p.member_id
ORDER BY r.batch_id DESC, p.part

-- name: due_schedule
SELECT 1 FROM {schema}_schedule WHERE queue_name = ? AND paused_at IS NULL AND next_due <= {clock} LIMIT 1

-- name: save_schedule
INSERT INTO {schema}_schedule (schedule_name, queue_name, cron, time_zone, kind, body, options, next_due, put_by)
VALUES (:name, :queue, :cron, :zone, :kind, :body, :options, :due, :login)
{upsert:schedule_name}
    -- (A due time that no client has noticed yet is not lost if the same schedule is saved again.)
    next_due = CASE WHEN cron = :cron AND time_zone = :zone AND paused_at IS NULL THEN coalesce(next_due, :due) ELSE :due END,
    queue_name = :queue, kind = :kind, body = :body, options = :options, cron = :cron, time_zone = :zone

-- name: fire_schedule
UPDATE {schema}_schedule SET next_due = :next, last_due = CASE WHEN :put THEN {least}(:last, {clock}) ELSE last_due END
WHERE schedule_name = :name AND next_due = :due AND paused_at IS NULL AND next_due <= {clock} AND :next > {clock}
  AND (:put OR {json_text:options, '$.missed'} = 'skip')

-- name: pause_schedule
UPDATE {schema}_schedule SET paused_at = coalesce(paused_at, {clock}), paused_by = coalesce(paused_by, :login)
WHERE schedule_name = :name

-- name: resume_schedule
UPDATE {schema}_schedule
SET next_due = CASE WHEN paused_at IS NULL THEN next_due ELSE :due END, paused_at = NULL, paused_by = NULL
WHERE schedule_name = :name

-- name: remove_schedule
DELETE FROM {schema}_schedule WHERE schedule_name = :name

-- name: list_schedules
SELECT schedule_name AS name, queue_name AS queue, cron, time_zone, kind, body, options,
       {greatest}({least}(next_due, 253402128000.0), -62135424000.0) AS next_due, {greatest}({least}(last_due, 253402128000.0), -62135424000.0) AS last_due,
       put_at, put_by, paused_at, paused_by, {clock} AS taken_at
FROM {schema}_schedule WHERE (:name IS NULL OR schedule_name = :name) AND (:queue IS NULL OR queue_name = :queue)
ORDER BY schedule_name
