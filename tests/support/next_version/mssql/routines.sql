
ALTER PROCEDURE {schema}.settings
AS
BEGIN
    SET NOCOUNT ON;
    SET ROWCOUNT 0;
    SELECT s.name, s.value FROM {schema}.setting AS s UNION ALL SELECT N'colour', N'red';
END;
GO
