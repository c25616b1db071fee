-- For tests alone: the version after this one, for SQL Server.

ALTER TABLE {schema}.entry ADD colour nvarchar(16) NULL;
ALTER TABLE {schema}.member ADD colour nvarchar(16) NULL;
ALTER TABLE {schema}.member ALTER COLUMN program nvarchar(300);
CREATE TABLE {schema}.added (made_by int NOT NULL CONSTRAINT added_made_by_default DEFAULT @@SPID);
INSERT INTO {schema}.added DEFAULT VALUES;
GO
-- feature: queue
ALTER TABLE {schema}.task ADD colour nvarchar(16) NOT NULL CONSTRAINT task_colour_default DEFAULT N'red';
GO
-- end of feature: queue
