
CREATE OR REPLACE FUNCTION {schema}.settings() RETURNS TABLE (name text, value text)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$ SELECT s.name, s.value FROM {schema}.setting AS s UNION ALL SELECT 'colour', 'red' $$;
