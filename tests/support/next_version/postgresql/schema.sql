-- For tests alone: the version after this one, for PostgreSQL.

-- Names mean what the system means by them, whatever else the installing login may see.
SET search_path = pg_catalog, pg_temp;

ALTER TABLE {schema}.{table} ADD COLUMN colour text;
ALTER TABLE {schema}.member ADD COLUMN colour text;
-- feature: queue
ALTER TABLE {schema}.task ADD COLUMN colour text NOT NULL DEFAULT 'red';
-- end of feature: queue
ALTER TABLE {schema}.history ALTER COLUMN outcome TYPE varchar(20);
CREATE TABLE {schema}.added (made_by integer NOT NULL DEFAULT pg_backend_pid());
INSERT INTO {schema}.added DEFAULT VALUES;
-- As where the parameters of a routine change: sessions that run the old one go on with it, under another name.
DO $$
BEGIN
    IF to_regprocedure('{schema}.wait(varchar, bigint, integer)') IS NOT NULL THEN
        ALTER FUNCTION {schema}.wait(varchar, bigint, integer) RENAME TO wait_before;
    END IF;
END
$$;
