// What a test has a .NET process do: one command a line on standard input, its fields key=value between tabs; one JSON
// object a line on standard output. Arguments: the provider (odbc, sqlclient), a connection string, the schema, and how
// it calls (sync, async).

using System;
using System.Collections.Generic;
using System.Data;
using System.Data.Common;
using System.Diagnostics;
using System.Globalization;
using System.IO;
using System.Text;
using System.Threading;
using System.Threading.Tasks;

public static class Agent
{
    private static readonly Dictionary<string, DbConnection> Connections = new Dictionary<string, DbConnection>();
    private static readonly Dictionary<string, SqlSemGrant> Grants = new Dictionary<string, SqlSemGrant>();
    private static readonly Dictionary<string, DbTransaction> Transactions = new Dictionary<string, DbTransaction>();
    private static string[] arguments;
    private static volatile bool reported;

    public static int Main(string[] given)
    {
        arguments = given;
        SqlSem.Trouble +=
            (grant, trouble) => Tell("trouble", "error", trouble.GetType().Name, "message", trouble.Message);
        Connection("main");
        Tell("ready", "pid", Process.GetCurrentProcess().Id);
        string line;
        while ((line = Console.In.ReadLine()) != null)
        {
            var command = new Dictionary<string, string>();
            foreach (var field in line.Split('\t'))
                command[field.Substring(0, field.IndexOf('='))] = field.Substring(field.IndexOf('=') + 1);
            if (command["do"] == "end")
                break;
            try
            {
                Obey(command);
            }
            catch (Exception failure)
            {
                var timeout = failure as SqlSemTimeoutException;
                Tell("failed", "error", failure.GetType().Name, "message", failure.Message, "holders",
                     timeout == null ? 0 : timeout.Holders.Count);
            }
        }
        foreach (var connection in Connections.Values)
            connection.Dispose();
        return line == null ? 3 : 0;
    }

    private static void Obey(Dictionary<string, string> command)
    {
        var id = Word(command, "id", "it");
        var connection = Connection(Word(command, "on", "main"));
        switch (command["do"])
        {
            case "acquire":
                var grant = Acquire(connection, command);
                if (grant == null)
                {
                    Tell("timeout");
                    return;
                }
                Grants[id] = grant;
                if (command.ContainsKey("watch"))
                    grant.Lost.Register(() => { Tell("lost", "id", id); reported = true; });
                Granted(grant);
                return;
            case "work":  // in and out again, as often as told
                for (var round = 0; round < Number(command, "rounds", 1); round++)
                {
                    var one = Acquire(connection, command);
                    Granted(one);
                    Thread.Sleep(TimeSpan.FromSeconds(Real(command, "seconds").Value));
                    var left = Now;
                    Dispose(one);
                    Tell("released", "left", left);
                }
                return;
            case "fail":  // a block that throws
                using (Acquire(connection, command))
                    throw new ApplicationException("the block's own");
            case "release":
                if (Asynchronous)
                    Wait(Grants[id].ReleaseAsync());
                else
                    Grants[id].Release();
                Tell("released");
                return;
            case "dispose":
                Dispose(Grants[id]);
                Tell("disposed", "ended", Grants[id].Ended);
                return;
            case "check":
                if (Asynchronous)
                    Wait(Grants[id].CheckAsync());
                else
                    Grants[id].Check();
                Tell("held", "left", Grants[id].LeaseLeft.TotalSeconds);
                return;
            case "await lost":
                if (!Grants[id].Lost.WaitHandle.WaitOne(TimeSpan.FromSeconds(60)))
                    throw new TimeoutException("the loss was not reported");
                while (!reported)  // the callbacks come after that
                    Thread.Sleep(1);
                return;
            case "await file":
                AwaitFile(command["path"]);
                Tell("seen");
                return;
            case "sleep":
                Thread.Sleep(TimeSpan.FromSeconds(Real(command, "seconds").Value));
                Tell("slept");
                return;
            case "lost":  // whether it was reported, without asking the database
                Tell("looked", "lost", Grants[id].Lost.IsCancellationRequested);
                return;
            case "renew":
                if (command.ContainsKey("through") && Asynchronous)
                    Wait(Grants[id].RenewAsync(Connection(command["through"])));
                else if (command.ContainsKey("through"))
                    Grants[id].Renew(Connection(command["through"]));
                else if (Asynchronous)
                    Wait(Grants[id].RenewAsync());
                else
                    Grants[id].Renew();
                Tell("renewed", "left", Grants[id].LeaseLeft.TotalSeconds);
                return;
            case "begin":
                Transactions[Word(command, "on", "main")] = connection.BeginTransaction(IsolationLevel.ReadCommitted);
                Tell("begun");
                return;
            case "assert":
                if (Asynchronous)
                    Wait(Grants[id].AssertHeldAsync(Transactions[Word(command, "on", "main")]));
                else
                    Grants[id].AssertHeld(Transactions[Word(command, "on", "main")]);
                Tell("asserted");
                return;
            case "rollback":
                Transactions[Word(command, "on", "main")].Rollback();
                Tell("rolled back");
                return;
            case "execute":
                using (var statement = connection.CreateCommand())
                {
                    statement.CommandText = command["text"];
                    var value = statement.ExecuteScalar();
                    Tell("executed", "value", Convert.ToString(value, CultureInfo.InvariantCulture));
                }
                return;
            case "close":
                connection.Close();
                Tell("closed");
                return;
            case "open":
                connection.Open();
                Tell("opened");
                return;
            default:
                throw new ArgumentException("no such command: " + command["do"]);
        }
    }

    private static SqlSemGrant Acquire(DbConnection connection, Dictionary<string, string> command)
    {
        var name = command.ContainsKey("null") ? null : command["name"];
        var limit = Word(command, "limit", "1") == "server" ? (int?)null : (int)Number(command, "limit", 1);
        var weight = (int)Number(command, "weight", 1);
        var note = Word(command, "note", null);
        var timeout = Span(command, "timeout");
        var lease = Span(command, "lease");
        var grace = Span(command, "grace");
        var options = new SqlSemOptions
        {
            Schema = Word(command, "schema", arguments[2]), Program = "agent", KeepAlive = Word(command, "keep", "0") == "1",
        };
        if (grace != null)
            options.Grace = grace.Value;
        var source = new CancellationTokenSource();
        var token = default(CancellationToken);
        if (command.ContainsKey("cancel"))
        {
            if (Span(command, "cancel") == TimeSpan.Zero)
                source.Cancel();
            else
                source.CancelAfter(Span(command, "cancel").Value);
            token = source.Token;
        }
        if (command.ContainsKey("cancel_when"))  // this file is there
        {
            var thread = new Thread(() => { AwaitFile(command["cancel_when"]); source.Cancel(); });
            thread.IsBackground = true;
            thread.Start();
            token = source.Token;
        }
        var order = (int)Number(command, "order", 0);
        switch (Word(command, "kind", "limit") + (Asynchronous ? " async" : ""))
        {
            case "limit":
                return SqlSem.Acquire(connection, name, limit, timeout, weight, note, lease, token, options);
            case "limit async":
                return Wait(SqlSem.AcquireAsync(connection, name, limit, timeout, weight, note, lease, token, options));
            case "try":
                return SqlSem.TryAcquire(
                    connection, name, limit, timeout ?? TimeSpan.Zero, weight, note, lease, token, options);
            case "try async":
                return Wait(SqlSem.TryAcquireAsync(
                    connection, name, limit, timeout ?? TimeSpan.Zero, weight, note, lease, token, options));
            case "read":
                return SqlSem.Read(connection, name, timeout, note, lease, token, options);
            case "read async":
                return Wait(SqlSem.ReadAsync(connection, name, timeout, note, lease, token, options));
            case "write":
                return SqlSem.Write(connection, name, timeout, note, lease, token, options);
            case "write async":
                return Wait(SqlSem.WriteAsync(connection, name, timeout, note, lease, token, options));
            case "stage":
                return SqlSem.Stage(connection, name, order, timeout, note, lease, token, options);
            case "stage async":
                return Wait(SqlSem.StageAsync(connection, name, order, timeout, note, lease, token, options));
            default:
                throw new ArgumentException("no such kind: " + command["kind"]);
        }
    }

    private static void AwaitFile(string path)
    {
        for (var patience = Stopwatch.StartNew(); !File.Exists(path); Thread.Sleep(5))
            if (patience.Elapsed > TimeSpan.FromSeconds(60))
                throw new TimeoutException("there is no file " + path);
    }

    private static bool Asynchronous { get { return arguments[3] == "async"; } }

    private static void Wait(Task task)
    {
        task.GetAwaiter().GetResult();
    }

    private static T Wait<T>(Task<T> task)
    {
        return task.GetAwaiter().GetResult();
    }

    private static void Dispose(SqlSemGrant grant)
    {
        if (!Asynchronous)
            grant.Dispose();
        else
#if SQLSEM_ASYNC_DISPOSABLE || NETCOREAPP3_1
            Wait(((IAsyncDisposable)grant).DisposeAsync().AsTask());  // (mcs does not know "await using")
#else
            Wait(grant.DisposeAsync());
#endif
    }

    private static DbConnection Connection(string name)
    {
        DbConnection connection;
        if (Connections.TryGetValue(name, out connection))
            return connection;
#if !WITHOUT_ODBC
        if (arguments[0] == "odbc")
            connection = new System.Data.Odbc.OdbcConnection(arguments[1]);
        else
#endif
        connection = new System.Data.SqlClient.SqlConnection(arguments[1]);
        connection.Open();
        Connections[name] = connection;
        return connection;
    }

    private static void Granted(SqlSemGrant grant)
    {
        Tell("granted", "position", grant.Position, "fence", grant.Fence, "waited", grant.Waited.TotalSeconds,
             "requesting_id", grant.RequestingId);
    }

    // The clock that all processes of this host share.
    private static double Now
    {
        get { return (double)Stopwatch.GetTimestamp() / Stopwatch.Frequency; }
    }

    private static string Word(Dictionary<string, string> command, string name, string otherwise)
    {
        string value;
        return command.TryGetValue(name, out value) ? value : otherwise;
    }

    private static long Number(Dictionary<string, string> command, string name, long otherwise)
    {
        var value = Word(command, name, null);
        return value == null ? otherwise : long.Parse(value, CultureInfo.InvariantCulture);
    }

    private static double? Real(Dictionary<string, string> command, string name)
    {
        var value = Word(command, name, null);
        return value == null ? (double?)null : double.Parse(value, CultureInfo.InvariantCulture);
    }

    private static TimeSpan? Span(Dictionary<string, string> command, string name)
    {
        var value = Real(command, name);
        return value == null ? (TimeSpan?)null : TimeSpan.FromSeconds(value.Value);
    }

    private static void Tell(string what, params object[] data)
    {
        var line = new StringBuilder("{\"event\": ").Append(Quoted(what)).Append(", \"at\": ").Append(
            Now.ToString("R", CultureInfo.InvariantCulture));
        for (var index = 0; index < data.Length; index += 2)
        {
            var value = data[index + 1];
            line.Append(", ").Append(Quoted((string)data[index])).Append(": ").Append(
                value is string ? Quoted((string)value)
                : value is bool ? ((bool)value ? "true" : "false")
                : Convert.ToString(value, CultureInfo.InvariantCulture));
        }
        lock (Grants)
        {
            Console.Out.WriteLine(line.Append('}'));
            Console.Out.Flush();
        }
    }

    private static string Quoted(string text)
    {
        var quoted = new StringBuilder("\"");
        foreach (var one in text)
        {
            if (one == '"' || one == '\\' || one < ' ' || one > '~')
                quoted.AppendFormat(CultureInfo.InvariantCulture, "\\u{0:x4}", (int)one);
            else
                quoted.Append(one);
        }
        return quoted.Append('"').ToString();
    }
}
