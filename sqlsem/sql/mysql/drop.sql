-- sqlsem, for MariaDB and MySQL: removes what only they have.
DROP TABLE IF EXISTS {schema}_gate;
