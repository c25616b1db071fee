// The C# participant of `python -m clients.mixed`. One line an event on standard output.
// Arguments: odbc or sqlclient, the schema, the resource, the limit, turns, seconds for each turn. The connection
// string is in the environment, as it may hold a password.

using System;
using System.Data.Common;
using System.Globalization;
using System.Threading;

public static class Demo
{
    public static void Main(string[] arguments)
    {
        var odbc = arguments[0] == "odbc";
        var place = Environment.GetEnvironmentVariable("SQLSEM_DEMO_CONNECTION");
        using (var connection = odbc
            ? (DbConnection)new System.Data.Odbc.OdbcConnection(place)
            : new System.Data.SqlClient.SqlConnection(place))
        {
            connection.Open();
            var options = new SqlSemOptions { Schema = arguments[1], Program = "C#" };
            var turns = int.Parse(arguments[4], CultureInfo.InvariantCulture);
            var work = TimeSpan.FromSeconds(double.Parse(arguments[5], CultureInfo.InvariantCulture));
            Tell("ready");
            Console.In.ReadLine();
            for (var turn = 0; turn < turns; turn++)
            {
                var limit = int.Parse(arguments[3], CultureInfo.InvariantCulture);
                using (var grant = SqlSem.Acquire(connection, arguments[2], limit, note: "C#", options: options))
                {
                    Tell("in", grant.Position, Clock(connection, odbc));
                    Thread.Sleep(work);
                    Tell("out", grant.Position, Clock(connection, odbc));
                }
            }
        }
    }

    // The database's, which all participants read: microseconds.
    private static long Clock(DbConnection connection, bool postgres)
    {
        using (var command = connection.CreateCommand())
        {
            command.CommandText = postgres
                ? "SELECT CAST(extract(epoch FROM clock_timestamp()) * 1000000 AS bigint)"
                : "SELECT DATEDIFF_BIG(microsecond, '2020-01-01', SYSUTCDATETIME())";
            return Convert.ToInt64(command.ExecuteScalar(), CultureInfo.InvariantCulture);
        }
    }

    private static void Tell(params object[] words)
    {
        Console.Out.WriteLine(string.Join(" ", words));
        Console.Out.Flush();
    }
}
