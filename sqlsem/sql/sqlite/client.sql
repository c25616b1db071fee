-- sqlsem, the statements that the Python client sends to SQLite.
-- Every write happens inside BEGIN IMMEDIATE, which is the gate: numbers appear in commit order.

-- name: version
SELECT name FROM sqlite_master WHERE type = 'table' AND name = '{schema}_setting'

-- name: settings
SELECT name, value FROM {schema}_setting

-- name: set_version
UPDATE {schema}_setting SET value = ? WHERE name = 'schema_version'

-- name: enrol
INSERT INTO {schema}_member (beacon, host, pid, program, grace_ms, lease_ms, lease_until)
VALUES (:beacon, :host, :pid, :program, :grace, :lease, (julianday('now') - 2440587.5) * 86400.0 + :lease / 1000.0)

-- name: resume_member
UPDATE {schema}_member
SET beacon = :beacon, missing_since = NULL,
    lease_until = (julianday('now') - 2440587.5) * 86400.0 + lease_ms / 1000.0
WHERE member_id = :member

-- name: member
SELECT beacon, grace_ms, lease_until, missing_since, (julianday('now') - 2440587.5) * 86400.0 AS now
FROM {schema}_member WHERE member_id = ?

-- name: renew
UPDATE {schema}_member
SET missing_since = NULL, lease_until = (julianday('now') - 2440587.5) * 86400.0 + lease_ms / 1000.0
WHERE member_id = ?

-- name: positions
SELECT queue_position, revoked_at IS NOT NULL FROM {table} WHERE member_id = ?

-- name: resign
DELETE FROM {schema}_member WHERE member_id = ?

-- name: anybody
SELECT EXISTS (SELECT 1 FROM {table} WHERE resource_id = :resource)
    OR EXISTS (SELECT 1 FROM {schema}_resource WHERE resource_id = :resource),
       EXISTS (SELECT 1 FROM {schema}_member WHERE member_id = :member)

-- name: ahead
-- The rule. Looks at the conflicting rows ahead of a position: their number and weight, the lowest limit that anybody
-- declares or the operator sets, whether the resource is paused, and the last and the first of them.
SELECT count(*) AS number,
       coalesce(sum(weight), 0) AS load,
       min(coalesce(min(concurrency_limit), 9223372036854775807), coalesce(:limit, 9223372036854775807),
           coalesce((SELECT cap FROM {schema}_resource WHERE resource_id = :resource), 9223372036854775807)) AS lowest,
       (SELECT paused_at FROM {schema}_resource WHERE resource_id = :resource) IS NOT NULL AS paused
FROM {table}
WHERE resource_id = :resource AND queue_position < :position AND (:access = 'write' OR access_type <> :access)

-- name: owners_ahead
SELECT min(queue_position), member_id FROM {table}
WHERE resource_id = :resource AND queue_position < :position AND (:access = 'write' OR access_type <> :access)
GROUP BY coalesce(member_id, -queue_position) ORDER BY 1 LIMIT 32

-- name: find
SELECT resource_id, queue_position, requesting_id, granted_at IS NOT NULL FROM {table}
WHERE member_id = :member AND (request_uid = :uid OR substr(request_uid, 1, length(:uid) + 1) = :uid || '.')
ORDER BY queue_position

-- name: insert
INSERT INTO {table} (resource_id, requesting_id, access_type, concurrency_limit, weight, member_id, owner, request_uid,
                     granted_at, note)
VALUES (:resource, :requesting_id, :access, :limit, :weight, :member, :owner, :uid,
        CASE WHEN :granted THEN (julianday('now') - 2440587.5) * 86400.0 END, :note)

-- name: row
SELECT access_type, concurrency_limit, weight, member_id, granted_at IS NOT NULL AS granted, revoked_at IS NOT NULL AS revoked,
       revoked_at, requested_at
FROM {table} WHERE resource_id = :resource AND queue_position = :position

-- name: grant
UPDATE {table} SET granted_at = (julianday('now') - 2440587.5) * 86400.0
WHERE resource_id = :resource AND queue_position = :position AND revoked_at IS NULL

-- name: keep_one
INSERT INTO {schema}_history (resource_id, queue_position, requesting_id, access_type, weight, member_id, owner, note,
                              requested_at, granted_at, outcome)
SELECT resource_id, queue_position, requesting_id, access_type, weight, member_id, owner, note, requested_at, granted_at, :outcome
FROM {table}
WHERE resource_id = :resource AND queue_position = :position AND (:requesting_id IS NULL OR requesting_id = :requesting_id)

-- name: delete_one
DELETE FROM {table}
WHERE resource_id = :resource AND queue_position = :position AND (:requesting_id IS NULL OR requesting_id = :requesting_id)

-- name: keep_all
INSERT INTO {schema}_history (resource_id, queue_position, requesting_id, access_type, weight, member_id, owner, note,
                              requested_at, granted_at, outcome)
SELECT resource_id, queue_position, requesting_id, access_type, weight, member_id, owner, note, requested_at, granted_at, :outcome
FROM {table} WHERE member_id = :member

-- name: delete_all
DELETE FROM {table} WHERE member_id = :member

-- name: miss
UPDATE {schema}_member SET missing_since = (julianday('now') - 2440587.5) * 86400.0
WHERE member_id = :member AND beacon = :beacon AND missing_since IS NULL

-- name: give_up
-- Decided by this one statement: a member that returns changes its beacon, or its lease, and is not found here.
DELETE FROM {schema}_member
WHERE member_id = :member AND beacon IS :beacon
  AND CASE WHEN lease_until IS NOT NULL THEN lease_until < (julianday('now') - 2440587.5) * 86400.0
           ELSE :dead OR missing_since + grace_ms / 1000.0 <= (julianday('now') - 2440587.5) * 86400.0 END

-- name: stale
SELECT requested_at + (SELECT stale_after_ms FROM {schema}_resource WHERE resource_id = :resource) / 1000.0
       <= (julianday('now') - 2440587.5) * 86400.0
FROM {table} WHERE resource_id = :resource AND queue_position = :position

-- name: pin
-- Writes nothing new; as a write it keeps everybody else's away until the caller's transaction ends.
UPDATE {table} SET granted_at = granted_at
WHERE resource_id = ? AND queue_position = ? AND requesting_id = ? AND granted_at IS NOT NULL

-- name: entries
SELECT t.resource_id, t.queue_position,
       CASE WHEN t.revoked_at IS NOT NULL THEN 'revoked' WHEN t.granted_at IS NOT NULL THEN 'holds'
            WHEN t.member_id IS NULL
                 AND (SELECT coalesce(sum(a.weight), 0) + t.weight
                             <= min(coalesce(min(a.concurrency_limit), 9223372036854775807),
                                    coalesce(t.concurrency_limit, 9223372036854775807),
                                    coalesce((SELECT cap FROM {schema}_resource AS o WHERE o.resource_id = t.resource_id),
                                             9223372036854775807))
                      FROM {table} AS a
                      WHERE a.resource_id = t.resource_id AND a.queue_position < t.queue_position
                        AND (t.access_type = 'write' OR a.access_type <> t.access_type))
                 AND NOT EXISTS (SELECT 1 FROM {schema}_resource AS o
                                 WHERE o.resource_id = t.resource_id AND o.paused_at IS NOT NULL) THEN 'holds'
            ELSE 'waits' END,
       t.access_type, t.concurrency_limit, t.weight, t.requesting_id, t.member_id, t.owner, m.host, m.pid, m.program, t.note,
       t.requested_at, t.granted_at,
       max(0.0, (julianday('now') - 2440587.5) * 86400.0 - coalesce(t.granted_at, t.requested_at)),
       (julianday('now') - 2440587.5) * 86400.0 - m.missing_since
FROM {table} AS t LEFT JOIN {schema}_member AS m ON m.member_id = t.member_id
WHERE :resource IS NULL OR t.resource_id = :resource
ORDER BY t.resource_id, t.queue_position

-- name: past
SELECT resource_id, queue_position, access_type, weight, requesting_id, owner, note, requested_at, granted_at, ended_at,
       max(0.0, coalesce(granted_at, ended_at) - requested_at), max(0.0, ended_at - granted_at), outcome
FROM {schema}_history
WHERE :resource IS NULL OR resource_id = :resource
ORDER BY rowid DESC LIMIT :most

-- name: resources
SELECT n.resource_id, o.cap, o.paused_at IS NOT NULL, o.stale_after_ms / 1000.0
FROM (SELECT resource_id FROM {table} UNION SELECT resource_id FROM {schema}_resource) AS n
LEFT JOIN {schema}_resource AS o ON o.resource_id = n.resource_id
ORDER BY 1

-- name: set_resource
INSERT INTO {schema}_resource (resource_id, cap, stale_after_ms, paused_at)
VALUES (:resource, CASE WHEN :what = 'cap' THEN :value END, CASE WHEN :what = 'stale_after' THEN :value END,
        CASE WHEN :what = 'paused' AND :value = 1 THEN (julianday('now') - 2440587.5) * 86400.0 END)
ON CONFLICT (resource_id) DO UPDATE
SET cap = CASE WHEN :what = 'cap' THEN :value ELSE cap END,
    stale_after_ms = CASE WHEN :what = 'stale_after' THEN :value ELSE stale_after_ms END,
    paused_at = CASE WHEN :what <> 'paused' THEN paused_at
                     WHEN :value = 1 THEN coalesce(paused_at, (julianday('now') - 2440587.5) * 86400.0) END

-- name: tidy_resource
DELETE FROM {schema}_resource
WHERE resource_id = :resource AND cap IS NULL AND stale_after_ms IS NULL AND paused_at IS NULL

-- name: revoke
UPDATE {table} SET revoked_at = coalesce(revoked_at, (julianday('now') - 2440587.5) * 86400.0) WHERE queue_position = ?

-- name: revoked_row
SELECT resource_id, granted_at IS NOT NULL, member_id FROM {table} WHERE queue_position = ?

-- name: all_rows
SELECT resource_id, queue_position FROM {table}

-- name: idle_members
SELECT member_id, beacon FROM {schema}_member
WHERE member_id NOT IN (SELECT member_id FROM {table} WHERE member_id IS NOT NULL)
  AND coalesce(lease_until, joined_at + grace_ms / 1000.0) < (julianday('now') - 2440587.5) * 86400.0

-- name: prune
DELETE FROM {schema}_history WHERE rowid IN (
    SELECT rowid FROM {schema}_history
    WHERE ended_at < (julianday('now') - 2440587.5) * 86400.0
                     - 86400.0 * (SELECT value FROM {schema}_setting WHERE name = 'history_days')
    ORDER BY rowid LIMIT ?)

-- name: data_version
PRAGMA data_version
