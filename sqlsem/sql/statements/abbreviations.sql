-- sqlsem, abbreviations in the scripts for databases without routines: {keep_rows} stands for the lines under its name.
--
-- keep_rows: writes rows of the queue (t), with their members (m), to the history; the values of the last three columns and
-- FROM follow it. end_of_time: ready_at of a task with locks, the year 9999.
-- where {end_of_time} is 253370764800.0

-- name: keep_rows
INSERT INTO {schema}_history (resource_id, queue_position, requesting_id, access_type, concurrency_limit, weight, member_id,
                              owner, note, requested_at, granted_at, host, pid, program, login, outcome, ended_by, heartbeat_at)
SELECT t.resource_id, t.queue_position, t.requesting_id, t.access_type, t.concurrency_limit, t.weight, t.member_id, t.owner,
       t.note, t.requested_at, t.granted_at, m.host, m.pid, m.program, m.login,
