-- An example: a psql script that does its work under a lock. psql keeps one session from beginning to end, so the lock
-- is this script's; it goes with the session, should the script fail or be killed.
--
--   psql -X -v ON_ERROR_STOP=1 -d "$SQLSEM_URL" -f guarded-load.sql
--
-- Do not use --single-transaction: acquire commits, and refuses inside an open transaction.

\set ON_ERROR_STOP on
\if :{?resource}
\else
    \set resource warehouse
\endif

-- At most ten minutes. Gives the variables code, queue_position and fence.
CALL sqlsem.acquire(:'resource', timeout_ms => 600000, note => 'guarded-load.sql') \gset
SELECT :code < 0 AS missed \gset
\if :missed
    \warn :resource was not free within ten minutes, code :code
    \q
\endif

BEGIN;
-- Should the lock be lost, this raises and nothing below is committed; else it is ours until the COMMIT.
CALL sqlsem.assert_holding(:'resource', :queue_position);
CREATE TABLE IF NOT EXISTS loaded (at timestamptz NOT NULL, fence bigint NOT NULL);  -- the work
INSERT INTO loaded VALUES (clock_timestamp(), :fence);
COMMIT;

SELECT sqlsem.release(:'resource', :queue_position);
