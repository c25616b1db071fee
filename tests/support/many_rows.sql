-- Rows for the tables of an installation on PostgreSQL (many_rows.py). {low} and {high}: the numbers of the rows.

-- Objects with few rows, which do not become more.
-- name: few
INSERT INTO sqlsem.ProcessControl (queue_position, resource_id, requesting_id, owner, member_id, request_uid, concurrency_limit, granted_at)
VALUES (11, 'mine', 'me', 'me a', {member}, 'uid-11', 1, clock_timestamp()), (12, 'mine', 'me', 'me b', {member}, 'uid-12', 1, NULL),
       (13, 'mine', 'me', 'me c', {member}, 'uid-13', 1, NULL), (14, 'mine other', 'me', 'me h', {member}, 'uid-14', 1, clock_timestamp()),
       (15, 'priority:ranked', 'me', 'me d', {member}, 'uid-15', NULL, NULL), (16, 'rate:mine', 'me', 'me e', {member}, 'uid-16', 1, clock_timestamp()),
       (17, 'once:mine', 'me', 'me f', {member}, 'uid-17', 1, clock_timestamp()), (18, 'mine read', 'me', 'me g', {member}, 'uid-18', 1, clock_timestamp());
UPDATE sqlsem.ProcessControl SET access_type = 'read' WHERE resource_id = 'mine read';
INSERT INTO sqlsem.member (member_id, host, pid, program, grace_ms, lease_ms, lease_until) OVERRIDING SYSTEM VALUE
VALUES (500000, 'host', 1, 'busy', 0, 3600000, '2100-01-01'), (500001, '', 1, 'handed over', 0, 3600000, '2100-01-01');
INSERT INTO sqlsem.ProcessControl (queue_position, resource_id, requesting_id, owner, member_id, request_uid, concurrency_limit, granted_at)
VALUES (19, 'mine handed', 'me', 'handed over by me', 500001, 'uid-19', 1, clock_timestamp());
INSERT INTO sqlsem.handover (token_hash, member_id, row_count, resource_id, queue_position, given_by, given_to, ttl_ms)
VALUES (sqlsem.token_hash('token'), 500001, 1, 'mine handed', 19, session_user, session_user, 100000000);
INSERT INTO sqlsem.resource (resource_id, cap, stale_after_ms) VALUES ('mine', 5, 1000), ('busy', 5, 1000), ('*', NULL, NULL);
INSERT INTO sqlsem.resource (resource_id, ageing_ms) VALUES ('ranked', 1000), ('ranked busy', 1000);
INSERT INTO sqlsem.limit_pattern (prefix, cap) VALUES ('mine:', 3);
INSERT INTO sqlsem.history (resource_id, queue_position, requesting_id, access_type, weight, requested_at, granted_at, outcome)
SELECT 'mine', g, 'me', 'write', 1, clock_timestamp(), clock_timestamp(), 'released' FROM generate_series(1, 8) AS g;
INSERT INTO sqlsem.once_run (once_name, granted_at, done_at, queue_position, requesting_id, login)
VALUES ('mine', clock_timestamp(), clock_timestamp(), 3, 'me', session_user);
INSERT INTO sqlsem.rate_window (resource_id, window_ms, rate_limit, seen_ms) VALUES ('rate:mine', 1000, 10, 1), ('rate:busy', 1000, 10, 1);
INSERT INTO sqlsem.rate_slot (resource_id, window_ms, slot, login, used)
SELECT 'rate:mine', 1000, g, session_user, 1 FROM generate_series(1, 5) AS g;
INSERT INTO sqlsem.commit_marker (marker) VALUES ('mine');
INSERT INTO sqlsem.task (task_id, queue_name, kind, body, status, is_open, attempt, member_id, claim_uid, put_uid, claimed_at, ended_at, unique_key) OVERRIDING SYSTEM VALUE
VALUES (11, 'mine', 'sql', 'x', 'finished', false, 1, NULL, NULL, 'put.1', clock_timestamp(), clock_timestamp(), NULL),
       (12, 'mine', 'sql', 'x', 'running', true, 1, {member}, 'claim', 'put.2', clock_timestamp(), NULL, NULL),
       (13, 'mine', 'sql', 'x', 'pending', true, 0, NULL, NULL, 'put.3', NULL, NULL, 'key'),
       (14, 'mine', 'sql', 'x', 'pending', true, 0, NULL, NULL, 'put.4', NULL, NULL, NULL);
INSERT INTO sqlsem.task_log (task_id, attempt, outcome) VALUES (12, 0, 'lost'), (11, 1, 'finished');
INSERT INTO sqlsem.queue_proxy (queue_name, member_id) VALUES ('mine', NULL), ('blocked', NULL), ('busy', NULL);
INSERT INTO sqlsem.schedule (schedule_name, queue_name, cron, kind, body, next_due) VALUES ('mine', 'mine', '* * * * *', 'sql', 'x', '2020-01-01');
INSERT INTO sqlsem.batch (batch_id, batch_name, window_ms, status, opened_by) OVERRIDING SYSTEM VALUE
VALUES (11, 'mine', 1000000, 'open', session_user), (12, 'busy', 1000000, 'open', session_user);
INSERT INTO sqlsem.batch_part (batch_id, part, status, member_id, start_uid, attempt, owner, started_at, login)
SELECT 11, 'part-' || g, 'running', {member}, 'part-uid', 1, 'me', clock_timestamp(), session_user FROM generate_series(1, 3) AS g;

-- By table.
-- name: member
INSERT INTO sqlsem.member (member_id, host, pid, program, grace_ms, lease_ms, lease_until) OVERRIDING SYSTEM VALUE
SELECT 1000000 + g, 'host', g, 'program', 0, 3600000, '2100-01-01' FROM generate_series({low}, {high}) AS g;
INSERT INTO sqlsem.member (member_id, beacon, backend_pid, program, grace_ms, lease_ms, lease_until) OVERRIDING SYSTEM VALUE
SELECT 2000000 + g, 2000000000 + g, 2000000000 + g, 'program', 86400000, NULL::integer, NULL::timestamptz FROM generate_series({low}, {high}) AS g
UNION ALL
SELECT 3000000 + g, NULL, 2000000000 + g, 'program', 0, 3600000, '2100-01-01' FROM generate_series({low}, {high}) AS g

-- name: processcontrol
INSERT INTO sqlsem.ProcessControl (queue_position, resource_id, requesting_id, access_type, owner, member_id, request_uid, concurrency_limit, granted_at)
SELECT 10000000 * r.n + g, r.resource || CASE WHEN r.own THEN '-' || g ELSE '' END, 'someone', r.access, 'owner',
       r.member, r.n || '-' || g, r.maximum, CASE WHEN r.granted THEN clock_timestamp() END
FROM generate_series({low}, {high}) AS g
CROSS JOIN LATERAL (VALUES (1, 'held', true, 'write', 1000000 + g, 1, true), (2, 'busy', false, 'write', 1000000 + g, 1, g = 1),
                           (3, 'owned', true, 'write', 500000, 1, g > 1), (4, 'read', false, 'read', 1000000 + g, 1, true),
                           (5, 'bare', true, 'write', NULL, 1, false), (6, 'priority:ranked busy', false, 'write', 1000000 + g, NULL, false),
                           (7, 'rate:busy', false, 'write', 1000000 + g, 1, false), (8, 'counted', true, 'write', 1000000 + g, NULL, true))
    AS r (n, resource, own, access, member, maximum, granted)

-- name: resource
INSERT INTO sqlsem.resource (resource_id, cap, stale_after_ms)
SELECT 'set-' || g, 5, 1000 FROM generate_series({low}, {high}) AS g
UNION ALL SELECT 'counted-' || g, 5, NULL FROM generate_series({low}, {high}) AS g

-- name: limit_pattern
INSERT INTO sqlsem.limit_pattern (prefix, cap) SELECT 'tenant-' || g, 5 FROM generate_series({low}, {high} / 50) AS g ON CONFLICT DO NOTHING

-- name: low_water
INSERT INTO sqlsem.low_water (resource_id, mark, survivors) SELECT 'held-' || g, 10000000, ARRAY[]::bigint[] FROM generate_series({low}, {high}) AS g
UNION ALL SELECT E'\tmember ' || 1000000 + g, 100, ARRAY[]::bigint[] FROM generate_series({low}, {high}) AS g

-- name: history
INSERT INTO sqlsem.history (resource_id, queue_position, requesting_id, access_type, weight, requested_at, granted_at, ended_at, outcome)
SELECT r, g, 'someone', 'write', 1, '2020-01-01', '2020-01-01', clock_timestamp(), o FROM generate_series({low}, {high}) AS g
CROSS JOIN LATERAL (VALUES ('busy', 'released'), ('held-' || g, 'timeout')) AS r (r, o)

-- name: operation
INSERT INTO sqlsem.operation (action, resource_id) SELECT 'cap', 'held-' || g FROM generate_series({low}, {high}) AS g

-- name: rate_window
INSERT INTO sqlsem.rate_window (resource_id, window_ms, rate_limit, seen_ms)
SELECT 'rate:rate-' || g, 1000, 10, 1 FROM generate_series({low}, {high}) AS g

-- name: rate_slot
INSERT INTO sqlsem.rate_slot (resource_id, window_ms, slot, login, used)
SELECT r, 1000, g % 100, 'login-' || g, 1 FROM generate_series({low}, {high}) AS g
CROSS JOIN LATERAL (VALUES ('rate:busy'), ('rate:rate-' || g)) AS r (r)

-- name: once_run
INSERT INTO sqlsem.once_run (once_name, granted_at, done_at, queue_position, requesting_id, login)
SELECT 'once-' || g, clock_timestamp(), clock_timestamp(), g, 'someone', session_user FROM generate_series({low}, {high}) AS g

-- name: commit_marker
INSERT INTO sqlsem.commit_marker (marker) SELECT 'marker-' || g FROM generate_series({low}, {high}) AS g

-- name: handover
INSERT INTO sqlsem.handover (token_hash, member_id, row_count, resource_id, queue_position, given_by, given_to, ttl_ms)
SELECT 'hash-' || g, 1000000 + g, 1, 'held-' || g, 10000000 + g, session_user, session_user, 1000 FROM generate_series({low}, {high}) AS g

-- name: task
INSERT INTO sqlsem.task (task_id, queue_name, task_key, task_hash, kind, body, status, is_open, attempt, member_id, claim_uid,
                      put_uid, claimed_at, ended_at, lock_count, enqueue_locks_at, ready_at, put_at) OVERRIDING SYSTEM VALUE
SELECT 10000000 * r.n + g, r.queue || CASE WHEN r.own THEN '-' || g ELSE '' END, r.key, sqlsem.key_hash(r.key), 'sql', 'x', r.status,
       r.status IN ('pending', 'running'), 1, CASE r.status WHEN 'running' THEN 1000000 + g END,
       CASE r.status WHEN 'running' THEN 'claim-' || g END, r.n || '.' || g, CASE WHEN r.status <> 'pending' THEN clock_timestamp() END,
       CASE r.status WHEN 'finished' THEN '2020-01-01'::timestamptz END, CASE r.queue WHEN 'blocked' THEN 1 END,
       CASE r.queue WHEN 'blocked' THEN '2020-01-01'::timestamptz END,
       CASE r.queue WHEN 'blocked' THEN sqlsem.end_of_time() ELSE '2020-01-01' END, '2020-01-01'
FROM generate_series({low}, {high}) AS g
CROSS JOIN LATERAL (VALUES (1, 'busy', false, NULL, 'pending'), (2, 'busy', false, NULL, 'finished'), (3, 'busy', false, NULL, 'running'),
                           (4, 'queue', true, NULL, 'pending'), (5, 'keyed', false, 'key-' || g, 'pending'), (6, 'blocked', false, NULL, 'pending'))
    AS r (n, queue, own, key, status)

-- name: task_log
INSERT INTO sqlsem.task_log (task_id, attempt, outcome) SELECT 20000000 + g, 1, 'finished' FROM generate_series({low}, {high}) AS g

-- name: task_low_water
INSERT INTO sqlsem.task_low_water (queue_name, task_order, mark, survivors)
SELECT 'queue-' || g, 0, 1, ARRAY[]::bigint[] FROM generate_series({low}, {high}) AS g

-- name: queue_setting
INSERT INTO sqlsem.queue_setting (queue_name, task_limit) SELECT 'queue-' || g, 1000000 FROM generate_series({low}, {high}) AS g
UNION ALL SELECT 'keyed', 1000000 WHERE {low} = 1

-- name: queue_key
INSERT INTO sqlsem.queue_key (queue_name, task_key, task_limit) SELECT 'keyed', 'key-' || g, 10 FROM generate_series({low}, {high}) AS g

-- name: queue_wait
INSERT INTO sqlsem.queue_wait (queue_name, task_key, since_ms, free_ms) SELECT 'keyed', 'key-' || g, 1, 2 FROM generate_series({low}, {high}) AS g

-- name: task_lock
INSERT INTO sqlsem.task_lock (task_id, number, queue_name, resource_id, access_type, concurrency_limit, weight)
SELECT 60000000 + g, 1, 'blocked', 'locked-' || g, 'write', 1, 1 FROM generate_series({low}, {high}) AS g

-- name: queue_proxy
INSERT INTO sqlsem.queue_proxy (queue_name) SELECT 'queue-' || g FROM generate_series({low}, {high}) AS g

-- name: schedule
INSERT INTO sqlsem.schedule (schedule_name, queue_name, cron, kind, body, next_due)
SELECT 'schedule-' || g, 'queue-' || g, '* * * * *', 'sql', 'x', '2100-01-01' FROM generate_series({low}, {high}) AS g

-- name: batch
INSERT INTO sqlsem.batch (batch_id, batch_name, window_ms) OVERRIDING SYSTEM VALUE
SELECT 10000000 + g, 'batch-' || g, 1000000 FROM generate_series({low}, {high}) AS g

-- name: batch_part
INSERT INTO sqlsem.batch_part (batch_id, part, status, member_id, start_uid, attempt, owner, started_at, login)
SELECT r, 'part-' || g, 'running', 1000000 + g, 'uid', 1, 'someone', clock_timestamp(), session_user
FROM generate_series({low}, {high}) AS g CROSS JOIN LATERAL (VALUES (12), (10000000 + g)) AS r (r)
