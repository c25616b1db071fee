-- An example: a psql script that works under a lock. psql has one session from beginning to end, and the lock belongs to
-- it: if the script fails or is killed, the lock ends with the session.
--
--   psql -X -v ON_ERROR_STOP=1 -d "$SQLSEM_URL" -f guarded-load.sql
--
-- Do not use --single-transaction: acquire commits, and raises an error in an open transaction.

\set ON_ERROR_STOP on
\if :{?resource}
\else
    \set resource warehouse
\endif

-- Waits at most ten minutes. Sets the variables code, queue_position and fence.
CALL sqlsem.acquire(:'resource', timeout_ms => 600000, note => 'guarded-load.sql') \gset
SELECT :code < 0 AS missed \gset
\if :missed
    \warn :resource was not free within ten minutes, code :code
    \q
\endif

BEGIN;
-- If the lock was lost, this raises an error and nothing below is committed; otherwise it is held until the COMMIT.
CALL sqlsem.assert_holding(:'resource', :queue_position);
CREATE TABLE IF NOT EXISTS loaded (at timestamptz NOT NULL, fence bigint NOT NULL);  -- the work
INSERT INTO loaded VALUES (clock_timestamp(), :fence);
COMMIT;

SELECT sqlsem.release(:'resource', :queue_position);
