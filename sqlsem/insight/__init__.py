"""What can be known from the tables: functions over rows, without a database and without a clock."""
