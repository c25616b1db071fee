// sqlsem for .NET: locks in the database that you already have. One file; put it into your project.
//
//     using (var grant = SqlSem.Acquire(connection, "etl", limit: 3, timeout: TimeSpan.FromSeconds(60)))
//     {
//         ... at most three at a time, whatever language the others are written in ...
//     }
//
// Each call has an asynchronous twin: AcquireAsync, CheckAsync, ReleaseAsync, DisposeAsync, …
//
// It needs the sqlsem tables (sqlsem init, or what `sqlsem sql` prints) in SQL Server or PostgreSQL, nothing but
// System.Data.Common, and C# 6. Any provider will do: SqlClient, Odbc, OleDb, Npgsql.
//
// How it works: the database session behind the connection is enrolled as a member, which holds an application lock
// (its beacon) for as long as the session lives. So keep the connection open while the lock is held; when the process
// dies, its session ends, and the others go on as soon as the last heartbeat (Acquire, Check) is older than the
// grace. Gateways cut connections that are idle for long: SqlSemOptions.KeepAlive sends heartbeats by a timer. Where
// no session can be kept, use a lease.

using System;
using System.Collections.Concurrent;
using System.Collections.Generic;
using System.Data;
using System.Data.Common;
using System.Diagnostics;
using System.Globalization;
using System.Reflection;
using System.Runtime.CompilerServices;
using System.Runtime.ExceptionServices;
using System.Text;
using System.Text.RegularExpressions;
using System.Threading;
using System.Threading.Tasks;

/// <summary>An error of a lock; the message names the resource and says what to do.</summary>
public class SqlSemException : Exception
{
    /// <summary>The resource's name.</summary>
    public string Resource { get; private set; }

    /// <summary>Whether the same call may succeed a moment later.</summary>
    public bool IsTransient
    {
        get { return Kind == SqlSemTrouble.Busy || Kind == SqlSemTrouble.Stopped || Kind == SqlSemTrouble.Lost; }
    }

    internal readonly SqlSemTrouble Kind;

    internal SqlSemException(string resource, string message, Exception cause, SqlSemTrouble kind) : base(message, cause)
    {
        Resource = resource;
        Kind = kind;
    }

    // The class that says what kind of error it is.
    internal static SqlSemException Of(SqlSemTrouble kind, string resource, string message, Exception cause = null)
    {
        switch (kind)
        {
            case SqlSemTrouble.Busy:
                return new SqlSemBusyException(resource, message, cause);
            case SqlSemTrouble.Stopped:
                return new SqlSemStoppedException(resource, message, cause);
            case SqlSemTrouble.Schema:
                return new SqlSemSchemaException(resource, message, cause);
            case SqlSemTrouble.Configuration:
            case SqlSemTrouble.OpenTransaction:
            case SqlSemTrouble.SessionChanged:
                return new SqlSemConfigurationException(resource, message, cause, kind);
            default:
                return new SqlSemUnavailableException(resource, message, cause, kind);
        }
    }
}

/// <summary>The lock was not granted in time. No row is left in the queue.</summary>
public sealed class SqlSemTimeoutException : SqlSemException
{
    /// <summary>The holders at that moment; empty when the last one had just left, or the database could not say.</summary>
    public IReadOnlyList<SqlSemHolder> Holders { get; private set; }

    internal SqlSemTimeoutException(string resource, string message, IReadOnlyList<SqlSemHolder> holders)
        : base(resource, message, null, SqlSemTrouble.Other)
    {
        Holders = holders;
    }
}

/// <summary>
/// The lock is no longer held (or the waiting row is no longer there): an operator revoked it, the session or the
/// lease ended. Another process may hold it: stop, and leave what you have not committed undone.
/// </summary>
public sealed class SqlSemLostException : SqlSemException
{
    internal readonly string Why;

    internal SqlSemLostException(string resource, string why, string message, Exception cause = null)
        : base(resource, message, cause, SqlSemTrouble.Other)
    {
        Why = why;
    }
}

/// <summary>The wait could never end: the holder waits for a lock of this connection. Release what is held, and try again.</summary>
public sealed class SqlSemDeadlockException : SqlSemException
{
    internal SqlSemDeadlockException(string resource, string message)
        : base(resource, message, null, SqlSemTrouble.Other) { }
}

/// <summary>
/// The call, the connection or the rights are wrong, and stay so: an open transaction, a closed connection, a login
/// that is in no role, a limit that no operator has set.
/// </summary>
public sealed class SqlSemConfigurationException : SqlSemException
{
    internal SqlSemConfigurationException(
        string resource, string message, Exception cause = null,
        SqlSemTrouble kind = SqlSemTrouble.Configuration) : base(resource, message, cause, kind) { }
}

/// <summary>The tables or routines are missing or too old; the message has the command that creates them.</summary>
public sealed class SqlSemSchemaException : SqlSemException
{
    internal SqlSemSchemaException(string resource, string message, Exception cause)
        : base(resource, message, cause, SqlSemTrouble.Schema) { }
}

/// <summary>The database is out of reach or refuses. Where IsTransient is true: connect, and ask again.</summary>
public class SqlSemUnavailableException : SqlSemException
{
    internal SqlSemUnavailableException(string resource, string message, Exception cause, SqlSemTrouble kind)
        : base(resource, message, cause, kind) { }
}

/// <summary>Another session kept a lock inside the database for too long, or the server had too much to do.</summary>
public sealed class SqlSemBusyException : SqlSemUnavailableException
{
    internal SqlSemBusyException(string resource, string message, Exception cause)
        : base(resource, message, cause, SqlSemTrouble.Busy) { }
}

/// <summary>A statement was stopped: by its own timeout, one of the server's, or an administrator.</summary>
public sealed class SqlSemStoppedException : SqlSemUnavailableException
{
    internal SqlSemStoppedException(string resource, string message, Exception cause)
        : base(resource, message, cause, SqlSemTrouble.Stopped) { }
}

/// <summary>A holder, as the database shows it.</summary>
public sealed class SqlSemHolder
{
    /// <summary>Its queue_position.</summary>
    public long Position { get; internal set; }

    /// <summary>The computer; null where the holder did not say.</summary>
    public string Host { get; internal set; }

    /// <summary>The process; null for a session of T-SQL or psql.</summary>
    public int? ProcessId { get; internal set; }

    /// <summary>The program.</summary>
    public string Program { get; internal set; }

    /// <summary>The thread, task or login in it.</summary>
    public string Owner { get; internal set; }

    /// <summary>The note that it gave.</summary>
    public string Note { get; internal set; }

    /// <summary>For how long it has held the lock.</summary>
    public TimeSpan Held { get; internal set; }

    /// <summary>As people read it: etl01:4711 (load.exe) at position 12 for 100 s.</summary>
    public override string ToString()
    {
        return string.Format(
            CultureInfo.InvariantCulture, "{0}{1}{2} at position {3} for {4:0} s", Host ?? "?",
            ProcessId == null ? "" : ":" + ProcessId, Program == null ? "" : " (" + Program + ")", Position,
            Held.TotalSeconds);
    }
}

/// <summary>Which database it is.</summary>
public enum SqlSemDialect
{
    /// <summary>Found from the connection.</summary>
    Automatic,
    /// <summary>PostgreSQL, version 13 or later.</summary>
    PostgreSql,
    /// <summary>SQL Server, 2016 or later, or one of Azure SQL.</summary>
    SqlServer,
}

/// <summary>What is seldom set otherwise.</summary>
public sealed class SqlSemOptions
{
    /// <summary>The schema that the tables are in.</summary>
    public string Schema = "sqlsem";

    /// <summary>Which database it is, where that cannot be found from the connection.</summary>
    public SqlSemDialect Dialect = SqlSemDialect.Automatic;

    /// <summary>
    /// How long the others wait after the last heartbeat of this session before its locks are free. In that time
    /// a caller of <see cref="SqlSemGrant.Check"/> learns that the connection is gone. The first Acquire on a
    /// connection decides.
    /// </summary>
    public TimeSpan Grace = TimeSpan.FromSeconds(5);

    /// <summary>
    /// A timer sends a heartbeat on the connection every third of the grace (or of the lease) while the lock is held,
    /// so that no gateway finds the connection idle, a lease never ends, and <see cref="SqlSemGrant.Lost"/> reports a
    /// loss before another process can be granted the lock. The connection must then be used for locks alone.
    /// </summary>
    public bool KeepAlive;

    /// <summary>Shown to people beside the row; the program's name when null.</summary>
    public string Program;

    /// <summary>The owner that people see in the column of that name; the thread's name when null.</summary>
    public string Owner;
}

/// <summary>Acquires locks. See the top of this file.</summary>
/// <remarks>
/// <para>The connection must be open, in autocommit (a call inside an open transaction is refused) and not in use by
/// another thread. Your CommandTimeout does not matter: a wait is a row of statements of a few seconds each. Several
/// locks may be held on one connection. No row stays behind when a call fails, whatever the reason.</para>
/// <para>A machine that loses its power says nothing to the server, which sees it by TCP keepalives only: set them
/// short there, or use a lease.</para>
/// </remarks>
public static class SqlSem
{
    internal static readonly TimeSpan Slice = TimeSpan.FromSeconds(3);

    /// <summary>
    /// Reports errors where nothing may be thrown: in a Dispose, that the lock had been lost or could not be
    /// released now; in a heartbeat of the timer, that it failed; when a call failed (the grant is null then), that its
    /// row could not be removed and goes with the session, or when its lease is over. Written to <see cref="Trace"/> as well.
    /// </summary>
    public static event Action<SqlSemGrant, SqlSemException> Trouble;

    /// <summary>
    /// At most <paramref name="limit"/> at a time (1: a mutex), in the order of asking.
    /// </summary>
    /// <param name="connection">Open, in autocommit; on the session behind it the lock depends.</param>
    /// <param name="resource">Its name: 1 to 255 characters, no blanks around it. Upper and lower case differ.</param>
    /// <param name="limit">
    /// How many may hold it at a time; all callers should name the same (the smallest counts). Null: the limit that an
    /// operator has set for the resource (<c>sqlsem set etl --limit 5</c>), and changes while programs run; where none
    /// is set, the call is refused. Locks that this connection holds on such a resource may keep it out itself: then give a timeout.
    /// </param>
    /// <param name="timeout">How long to wait at most; null: for ever; zero: only if free.</param>
    /// <param name="weight">How many of the limit to take.</param>
    /// <param name="note">For people who look at the queue.</param>
    /// <param name="lease">
    /// Not bound to the session, but held for so long after the last <see cref="SqlSemGrant.Renew()"/>. For connections
    /// that go back to a pool meanwhile, and for poolers that change sessions under a connection.
    /// </param>
    /// <param name="cancel">Ends the wait, by cancelling the statement that waits.</param>
    /// <param name="options">What is seldom needed.</param>
    /// <exception cref="SqlSemTimeoutException">It took longer than timeout.</exception>
    /// <exception cref="SqlSemLostException">The row was taken out of the queue while it waited.</exception>
    /// <exception cref="SqlSemDeadlockException">The wait could never end.</exception>
    /// <exception cref="SqlSemException">Anything else: an open transaction, no tables, no permission, …</exception>
    /// <exception cref="ArgumentException">The name, limit, weight, timeout or lease cannot be right.</exception>
    /// <exception cref="OperationCanceledException">cancel was cancelled.</exception>
    public static SqlSemGrant Acquire(
        DbConnection connection, string resource, int? limit = 1, TimeSpan? timeout = null, int weight = 1,
        string note = null, TimeSpan? lease = null, CancellationToken cancel = default(CancellationToken),
        SqlSemOptions options = null)
    {
        return Done(Ask(
            false, true, new SqlSemRequest(resource, "write", limit, weight, note), connection, timeout, lease, cancel,
            options));
    }

    /// <summary>As <see cref="Acquire"/>, without blocking a thread.</summary>
    public static Task<SqlSemGrant> AcquireAsync(
        DbConnection connection, string resource, int? limit = 1, TimeSpan? timeout = null, int weight = 1,
        string note = null, TimeSpan? lease = null, CancellationToken cancel = default(CancellationToken),
        SqlSemOptions options = null)
    {
        return Ask(
            true, true, new SqlSemRequest(resource, "write", limit, weight, note), connection, timeout, lease, cancel,
            options);
    }

    /// <summary>As Acquire, but returns null when it is not granted in time: by default, when it is not free now.</summary>
    public static SqlSemGrant TryAcquire(
        DbConnection connection, string resource, int? limit = 1, TimeSpan timeout = default(TimeSpan), int weight = 1,
        string note = null, TimeSpan? lease = null, CancellationToken cancel = default(CancellationToken),
        SqlSemOptions options = null)
    {
        return Done(Ask(
            false, false, new SqlSemRequest(resource, "write", limit, weight, note), connection, timeout, lease, cancel,
            options));
    }

    /// <summary>As <see cref="TryAcquire"/>, without blocking a thread.</summary>
    public static Task<SqlSemGrant> TryAcquireAsync(
        DbConnection connection, string resource, int? limit = 1, TimeSpan timeout = default(TimeSpan), int weight = 1,
        string note = null, TimeSpan? lease = null, CancellationToken cancel = default(CancellationToken),
        SqlSemOptions options = null)
    {
        return Ask(
            true, false, new SqlSemRequest(resource, "write", limit, weight, note), connection, timeout, lease, cancel,
            options);
    }

    /// <summary>As one of any number of readers, while no writer holds it or is ahead.</summary>
    public static SqlSemGrant Read(
        DbConnection connection, string resource, TimeSpan? timeout = null, string note = null, TimeSpan? lease = null,
        CancellationToken cancel = default(CancellationToken), SqlSemOptions options = null)
    {
        return Done(Ask(
            false, true, new SqlSemRequest(resource, "read", 1, 1, note), connection, timeout, lease, cancel, options));
    }

    /// <summary>As <see cref="Read"/>, without blocking a thread.</summary>
    public static Task<SqlSemGrant> ReadAsync(
        DbConnection connection, string resource, TimeSpan? timeout = null, string note = null, TimeSpan? lease = null,
        CancellationToken cancel = default(CancellationToken), SqlSemOptions options = null)
    {
        return Ask(true, true, new SqlSemRequest(resource, "read", 1, 1, note), connection, timeout, lease, cancel, options);
    }

    /// <summary>As the only one: no reader, no other writer.</summary>
    public static SqlSemGrant Write(
        DbConnection connection, string resource, TimeSpan? timeout = null, string note = null, TimeSpan? lease = null,
        CancellationToken cancel = default(CancellationToken), SqlSemOptions options = null)
    {
        return Done(Ask(
            false, true, new SqlSemRequest(resource, "write", 1, 1, note), connection, timeout, lease, cancel, options));
    }

    /// <summary>As <see cref="Write"/>, without blocking a thread.</summary>
    public static Task<SqlSemGrant> WriteAsync(
        DbConnection connection, string resource, TimeSpan? timeout = null, string note = null, TimeSpan? lease = null,
        CancellationToken cancel = default(CancellationToken), SqlSemOptions options = null)
    {
        return Ask(true, true, new SqlSemRequest(resource, "write", 1, 1, note), connection, timeout, lease, cancel, options);
    }

    /// <summary>Together with others of the same order, after every earlier entry of another order.</summary>
    public static SqlSemGrant Stage(
        DbConnection connection, string resource, int order, TimeSpan? timeout = null, string note = null,
        TimeSpan? lease = null, CancellationToken cancel = default(CancellationToken), SqlSemOptions options = null)
    {
        return Done(Ask(
            false, true, new SqlSemRequest(resource, Order(order), 1, 1, note), connection, timeout, lease, cancel,
            options));
    }

    /// <summary>As <see cref="Stage"/>, without blocking a thread.</summary>
    public static Task<SqlSemGrant> StageAsync(
        DbConnection connection, string resource, int order, TimeSpan? timeout = null, string note = null,
        TimeSpan? lease = null, CancellationToken cancel = default(CancellationToken), SqlSemOptions options = null)
    {
        return Ask(
            true, true, new SqlSemRequest(resource, Order(order), 1, 1, note), connection, timeout, lease, cancel,
            options);
    }

    private static string Order(int order)
    {
        return "stage:" + order.ToString(CultureInfo.InvariantCulture);
    }

    private static Task<SqlSemGrant> Ask(
        bool asynchronous, bool required, SqlSemRequest request, DbConnection connection, TimeSpan? timeout,
        TimeSpan? lease, CancellationToken cancel, SqlSemOptions options)
    {
        return new SqlSemAttempt(
            asynchronous, required, request, connection, timeout, lease, cancel, options ?? new SqlSemOptions()).Run();
    }

    // Everything is written once, as a Task. Where asynchronous is false nothing in it is awaited that has not ended.
    internal static T Done<T>(Task<T> task)
    {
        return task.GetAwaiter().GetResult();
    }

    internal static void Report(SqlSemGrant grant, SqlSemException trouble)
    {
        System.Diagnostics.Trace.TraceWarning("sqlsem: " + trouble.Message);
        var listeners = Trouble;
        if (listeners != null)
            listeners(grant, trouble);
    }

    internal static async Task Nap(bool asynchronous, TimeSpan time, CancellationToken cancel)
    {
        if (asynchronous)
            await Task.Delay(time, cancel).ConfigureAwait(false);
        else if (cancel.CanBeCanceled)
            cancel.WaitHandle.WaitOne(time);
        else
            Thread.Sleep(time);
        cancel.ThrowIfCancellationRequested();
    }
}

/// <summary>A lock that is held. Dispose it before its connection.</summary>
/// <remarks>
/// <para>A lock is bound to the session behind its connection: it is held while that lives, and nothing needs to be
/// renewed. With a lease it is held until <see cref="LeaseLeft"/> is over: renew it in time, a third of the lease being
/// a good interval. <see cref="SqlSemOptions.KeepAlive"/> does that by itself.</para>
/// <para>A connection that is closed by then (a pool has it) is opened for the call and closed again.</para>
/// </remarks>
public sealed class SqlSemGrant : IDisposable
#if SQLSEM_ASYNC_DISPOSABLE || NETSTANDARD2_1 || NETCOREAPP3_0 || NETCOREAPP3_1 || NET5_0_OR_GREATER
    , IAsyncDisposable
#endif
{
    private readonly SqlSemSession session;
    private readonly SqlSemCalls calls;
    private readonly SqlSemRequest request;
    private readonly long member;
    private readonly int generation;
    private readonly TimeSpan? lease;
    private readonly TimeSpan life;
    private readonly Stopwatch clock;
    private readonly CancellationTokenSource lost = new CancellationTokenSource();
    private long renewedTicks;
    private volatile string loss;  // why it is held no more
    private volatile bool ended;
    private int reported;
    private bool unanswered;  // a release

    // The locks of an earlier session ended with it.
    internal bool OfThisSession { get { return generation == session.Generation; } }

    internal SqlSemGrant(SqlSemAttempt attempt, string requestingId, long position)
    {
        session = attempt.Session;
        calls = attempt.Calls;
        request = attempt.Request;
        member = attempt.Member;
        lease = attempt.Lease;
        life = attempt.Lease ?? attempt.Options.Grace;
        clock = attempt.Clock;
        Renewed = attempt.Renewed;
        generation = session.Generation;
        RequestingId = requestingId;
        Position = position;
        Waited = clock.Elapsed;
        KeepsAlive = attempt.Options.KeepAlive;
    }

    /// <summary>The resource's name.</summary>
    public string Resource { get { return request.Resource; } }

    /// <summary>The number in the queue: queue_position in the table.</summary>
    public long Position { get; private set; }

    /// <summary>
    /// A number that grows with every grant of a mutex: store it with what you write, and refuse smaller ones.
    /// </summary>
    public long Fence { get { return Position; } }

    /// <summary>The time between asking and the grant.</summary>
    public TimeSpan Waited { get; private set; }

    /// <summary>Who has it, as the table tells: host, process, thread, and a random part.</summary>
    public string RequestingId { get; private set; }

    /// <summary>Whether it was released.</summary>
    public bool Ended { get { return ended; } }

    /// <summary>
    /// Cancelled when the lock is found lost: by the timer of <see cref="SqlSemOptions.KeepAlive"/>, when the connection
    /// closes or breaks, or by Check. Pass it on to the work, or register a callback; after a Release nothing comes.
    /// </summary>
    public CancellationToken Lost { get { return lost.Token; } }

    /// <summary>How long the lease runs at least, unless renewed; without a lease TimeSpan.MaxValue.</summary>
    public TimeSpan LeaseLeft
    {
        get { return lease == null ? TimeSpan.MaxValue : Renewed + lease.Value - clock.Elapsed; }
    }

    internal SqlSemRequest Request { get { return request; } }

    internal string Schema { get { return calls.Schema; } }

    internal bool SessionBound { get { return lease == null; } }

    internal bool KeepsAlive { get; private set; }

    // A third of the time after which the others may go on.
    internal TimeSpan Interval
    {
        get
        {
            var third = TimeSpan.FromTicks(life.Ticks / 3);
            if (third <= TimeSpan.Zero || third > TimeSpan.FromSeconds(30))
                return TimeSpan.FromSeconds(30);
            return third < TimeSpan.FromMilliseconds(100) ? TimeSpan.FromMilliseconds(100) : third;
        }
    }

    // How often Overdue is asked.
    internal TimeSpan TickTime { get { return TimeSpan.FromTicks(Interval.Ticks / 4); } }

    private TimeSpan Renewed
    {
        get { return TimeSpan.FromTicks(Interlocked.Read(ref renewedTicks)); }
        set { Interlocked.Exchange(ref renewedTicks, value.Ticks); }
    }

    /// <summary>Asks the database, now, whether the lock is still held (and renews its lease). A heartbeat: from then
    /// on the grace counts, should the session end.</summary>
    /// <param name="transaction">The connection's transaction, where one is open.</param>
    /// <exception cref="SqlSemLostException">It is not.</exception>
    /// <exception cref="SqlSemException">The database did not answer. It is still held while the lease runs, and, where
    /// the session has ended, until the grace is over since the last call that succeeded.</exception>
    public void Check(DbTransaction transaction = null)
    {
        SqlSem.Done(Ping(false, calls, transaction, CancellationToken.None));
    }

    /// <summary>As <see cref="Check"/>, without blocking a thread.</summary>
    public Task CheckAsync(DbTransaction transaction = null, CancellationToken cancel = default(CancellationToken))
    {
        return Ping(true, calls, transaction, cancel);
    }

    /// <summary>As <see cref="Check"/>, which for a lease means: held for that long again.</summary>
    public void Renew()
    {
        SqlSem.Done(Ping(false, calls, null, CancellationToken.None));
    }

    /// <summary>As <see cref="Renew()"/>, without blocking a thread.</summary>
    public Task RenewAsync(CancellationToken cancel = default(CancellationToken))
    {
        return Ping(true, calls, null, cancel);
    }

    /// <summary>Renews a lease through another connection to the same database.</summary>
    public void Renew(DbConnection other)
    {
        SqlSem.Done(Ping(false, Elsewhere(other), null, CancellationToken.None));
    }

    /// <summary>As <see cref="Renew(DbConnection)"/>, without blocking a thread.</summary>
    public Task RenewAsync(DbConnection other, CancellationToken cancel = default(CancellationToken))
    {
        return Ping(true, Elsewhere(other), null, cancel);
    }

    /// <summary>
    /// Checks inside a transaction of yours that the lock is held, and keeps it held until the transaction ends. So
    /// what that commits was done under the lock. The transaction may be of another connection to the same database.
    /// </summary>
    /// <exception cref="SqlSemLostException">It is not held: roll back.</exception>
    public void AssertHeld(DbTransaction transaction)
    {
        SqlSem.Done(Assert(false, transaction, CancellationToken.None));
    }

    /// <summary>As <see cref="AssertHeld"/>, without blocking a thread.</summary>
    public Task AssertHeldAsync(DbTransaction transaction, CancellationToken cancel = default(CancellationToken))
    {
        return Assert(true, transaction, cancel);
    }

    /// <summary>
    /// Releases the lock and reports what Dispose cannot: that it was lost before. Call it last in the block, where
    /// that matters; Dispose does nothing then.
    /// </summary>
    /// <exception cref="SqlSemLostException">It had been lost: others may have held it meanwhile.</exception>
    /// <exception cref="SqlSemException">It could not be released now; call again, or end the session.</exception>
    public void Release()
    {
        SqlSem.Done(Release(false, CancellationToken.None));
    }

    /// <summary>As <see cref="Release()"/>, without blocking a thread.</summary>
    public Task ReleaseAsync(CancellationToken cancel = default(CancellationToken))
    {
        return Release(true, cancel);
    }

    /// <summary>
    /// Releases the lock. Never throws, so that it cannot hide what your block throws: when the lock had been lost,
    /// or cannot be released now, that goes to <see cref="SqlSem.Trouble"/> and to Trace. A failed release
    /// is tried again with the next Acquire on this connection, and the lock ends with its session (or its lease).
    /// </summary>
    public void Dispose()
    {
        SqlSem.Done(Dispose(false, false));
    }

#if SQLSEM_ASYNC_DISPOSABLE || NETSTANDARD2_1 || NETCOREAPP3_0 || NETCOREAPP3_1 || NET5_0_OR_GREATER
    /// <summary>As <see cref="Dispose()"/>, without blocking a thread.</summary>
    public ValueTask DisposeAsync()
    {
        return new ValueTask(Dispose(true, false));
    }
#else
    /// <summary>As <see cref="Dispose()"/>, without blocking a thread. (This framework has no IAsyncDisposable.)</summary>
    public Task DisposeAsync()
    {
        return Dispose(true, false);
    }
#endif

    // With inside the caller has the connection to itself already.
    internal async Task<bool> Dispose(bool asynchronous, bool inside)
    {
        if (ended)
            return true;
        try
        {
            if (inside)
                await GiveBack(asynchronous, CancellationToken.None).ConfigureAwait(false);
            else
                await Release(asynchronous, CancellationToken.None).ConfigureAwait(false);
        }
        catch (SqlSemException failure)
        {
            if (!ended)
                session.TryLater(this);
            SqlSem.Report(this, failure);
        }
        return true;
    }

    private async Task<bool> Release(bool asynchronous, CancellationToken cancel)
    {
        if (ended)
            return true;
        await session.Enter(asynchronous, cancel).ConfigureAwait(false);
        try
        {
            await GiveBack(asynchronous, cancel).ConfigureAwait(false);
        }
        finally
        {
            session.Leave();
        }
        return true;
    }

    private async Task<bool> GiveBack(bool asynchronous, CancellationToken cancel)
    {
        if (ended)
            return true;
        var again = unanswered;
        unanswered = true;
        var code = await calls.Opened(
            asynchronous, cancel,
            () => calls.Release(asynchronous, Resource, Position, RequestingId, again, cancel)).ConfigureAwait(false);
        unanswered = again;
        if (code == SqlSemCalls.InTransaction)
            throw SqlSemException.Of(
                SqlSemTrouble.OpenTransaction, Resource,
                "'" + Resource + "' cannot be released inside an open transaction; commit or roll back first");
        if (lease == null && !OfThisSession)
            loss = loss ?? "its connection was closed, or lost";
        var found = loss == null && code == 0 ? null : LostNow(null, loss);
        ended = true;
        session.Forget(this);
        if (lease != null)
            await calls.Opened(
                asynchronous, cancel, () => calls.Resign(asynchronous, member, cancel)).ConfigureAwait(false);
        if (found != null)
            throw found;
        return true;
    }

    private SqlSemCalls Elsewhere(DbConnection other)
    {
        if (lease == null)
            throw new SqlSemConfigurationException(Resource, "'" + Resource + "' is bound to the session of its "
                + "connection, and cannot be renewed through another; acquire it with a lease");
        return calls.Through(other);
    }

    private async Task<bool> Assert(bool asynchronous, DbTransaction transaction, CancellationToken cancel)
    {
        if (transaction == null)
            throw new ArgumentNullException("transaction", "AssertHeld needs the transaction that is to be guarded");
        if (transaction.Connection == null)
            throw new SqlSemConfigurationException(
                Resource, "The transaction to assert '" + Resource + "' in has ended; begin another");
        if (ended || loss != null)
            throw LostNow(null, loss);
        var through = calls.Through(transaction.Connection);
        var user = SqlSemSession.Of(through.Connection);
        bool there;
        await user.Enter(asynchronous, cancel).ConfigureAwait(false);
        try
        {
            there = await through.Pin(
                asynchronous, transaction, Resource, Position, RequestingId, cancel).ConfigureAwait(false);
        }
        catch (SqlSemException failure)
        {
            if (failure.Kind == SqlSemTrouble.Serialization)
                throw LostNow(failure);
            throw;
        }
        finally
        {
            user.Leave();
        }
        if (!there)
            throw LostNow();
        return true;
    }

    private async Task<bool> Ping(
        bool asynchronous, SqlSemCalls through, DbTransaction transaction, CancellationToken cancel)
    {
        SqlSemLostException found;
        var user = SqlSemSession.Of(through.Connection);
        await user.Enter(asynchronous, cancel).ConfigureAwait(false);
        try
        {
            found = await Beat(asynchronous, through, transaction, cancel).ConfigureAwait(false);
        }
        finally
        {
            user.Leave();
        }
        if (found == null)
            return true;
        if (!ended)
            Lose(found.Why);
        throw found;
    }

    // A heartbeat by the timer, or between two statements of a wait.
    internal Task<SqlSemLostException> Beat(bool asynchronous)
    {
        return Beat(asynchronous, calls, null, CancellationToken.None);
    }

    // Returns the loss, where the lock is held no more.
    private async Task<SqlSemLostException> Beat(
        bool asynchronous, SqlSemCalls through, DbTransaction transaction, CancellationToken cancel)
    {
        if (ended || loss != null)
            return LostNow(null, loss);
        if (lease == null && !OfThisSession)
            return LostNow(null, "its connection was closed, or lost");
        var began = clock.Elapsed;
        bool there;
        try
        {
            there = await through.Opened(
                asynchronous, cancel,
                () => through.Ping(asynchronous, member, Position, transaction, cancel)).ConfigureAwait(false);
        }
        catch (SqlSemException failure)
        {
            if (failure.Kind == SqlSemTrouble.SessionChanged || (lease == null && !OfThisSession))
                return LostNow(failure, "its session has ended");
            throw;
        }
        if (!there)
            return LostNow();
        Renewed = began;
        return null;
    }

    // Why it must be taken for lost, though no answer said so: the last heartbeat is so long ago that the others may go
    // on, if the session should have ended. Null: nothing is wrong.
    internal string Overdue()
    {
        if (life <= TimeSpan.Zero)
            return null;
        var silent = clock.Elapsed - Renewed;
        var margin = TickTime + TimeSpan.FromTicks(Math.Min(TimeSpan.FromSeconds(1).Ticks, life.Ticks / 10));
        return silent < life - margin ? null : string.Format(
            CultureInfo.InvariantCulture, "the database has not answered for {0:0.#} s", silent.TotalSeconds);
    }

    // Reports it once. Not while the connection is being used: a callback may dispose the grant.
    internal void Lose(string why)
    {
        if (ended || Interlocked.CompareExchange(ref reported, 1, 0) != 0)
            return;
        loss = why;
        session.StopKeeping(this);
        try
        {
            lost.Cancel();
        }
        catch (AggregateException failure)
        {
            SqlSem.Report(this, SqlSemException.Of(
                SqlSemTrouble.Other, Resource, "A callback of Lost for '" + Resource + "' failed: "
                + failure.GetBaseException().Message, failure));
        }
    }

    private SqlSemLostException LostNow(Exception cause = null, string why = null)
    {
        if (why == null)
            why = ended ? "it was released, or found lost, before"
                : "revoked by an operator, or its session or lease has ended";
        return new SqlSemLostException(Resource, why, string.Format(
            CultureInfo.InvariantCulture,
            "'{0}' at position {1} is not held any more ({2}); another process may hold it: stop, and roll back what "
            + "is not committed",
            Resource, Position, why), cause);
    }
}

// The checked arguments of a request.
internal sealed class SqlSemRequest
{
    internal readonly string Resource, Access, Note;
    internal readonly int? Limit;  // null: the server's
    internal readonly int Weight;

    internal SqlSemRequest(string resource, string access, int? limit, int weight, string note)
    {
        if (string.IsNullOrEmpty(resource) || resource.Trim() != resource || resource.Length > 255
            || resource.IndexOf('\0') >= 0)
            throw new ArgumentException(
                "The resource's name must have 1 to 255 characters, without blanks around it or NUL in it, not "
                + (resource == null ? "null" : "'" + resource + "'"), "resource");
        if (weight < 1 || limit < weight)
            throw new ArgumentOutOfRangeException("limit", string.Format(
                CultureInfo.InvariantCulture, "'{0}' was asked for with limit {1} and weight {2}; 1 <= weight <= limit "
                + "must hold", resource, limit, weight));
        if (note != null && note.Length > 1000)
            throw new ArgumentException("The note for '" + resource + "' is longer than 1000 characters", "note");
        Resource = resource;
        Access = access;
        Limit = limit;
        Weight = weight;
        Note = note;
    }

    internal bool Conflicts(SqlSemRequest other)
    {
        return Access == "write" || Access != other.Access;
    }
}

internal enum SqlSemTrouble
{
    Other,
    Busy,            // another session keeps a lock in an open transaction, or the statement was a victim
    Stopped,         // a statement, by a timeout or an administrator
    Lost,            // the line or the session, or this server cannot serve the database now
    Unknown,         // the member was given up
    OpenTransaction,
    SessionChanged,  // under the member
    Serialization,
    Configuration,
    Schema,
}

// The state of a connection in this process.
internal sealed class SqlSemSession
{
    private static readonly ConditionalWeakTable<DbConnection, SqlSemSession> Known =
        new ConditionalWeakTable<DbConnection, SqlSemSession>();

    internal int Generation { get { return Volatile.Read(ref generation); } }  // changes with every session behind the connection
    internal readonly ConcurrentDictionary<string, long> Members = new ConcurrentDictionary<string, long>();  // by schema
    internal SqlSemDialect Dialect;

    private readonly SemaphoreSlim turn = new SemaphoreSlim(1, 1);
    private readonly List<SqlSemGrant> held = new List<SqlSemGrant>();  // under lock (held), as are the next two
    private readonly List<SqlSemGrant> kept = new List<SqlSemGrant>();  // held, and the timer sends heartbeats
    private Timer timer;
    private readonly List<SqlSemGrant> later = new List<SqlSemGrant>();  // to be released
    private readonly List<Func<bool, Task>> unclean = new List<Func<bool, Task>>();  // failed calls to clean up after
    private int generation;
    private readonly Stopwatch sinceBeat = Stopwatch.StartNew();

    private SqlSemSession(DbConnection connection)
    {
        // A pool resets a session between Close and Open, or gives another one: the beacon is gone either way.
        connection.StateChange += (sender, change) =>
        {
            if (change.CurrentState == ConnectionState.Closed || change.CurrentState == ConnectionState.Broken)
            {
                NextGeneration();
                Members.Clear();
            }
        };
    }

    internal static SqlSemSession Of(DbConnection connection)
    {
        return Known.GetValue(connection, one => new SqlSemSession(one));
    }

    internal void NextGeneration()
    {
        Interlocked.Increment(ref generation);
        foreach (var grant in Held())
            if (grant.SessionBound)
                LoseSoon(grant, "its connection was closed, or lost");
    }

    // -- one statement at a time ---------------------------------------------------------------------------------

    internal Task Enter(bool asynchronous, CancellationToken cancel)
    {
        if (asynchronous)
            return turn.WaitAsync(cancel);
        turn.Wait(cancel);
        return Task.FromResult(true);
    }

    internal void Leave()
    {
        turn.Release();
    }

    // -- what is held --------------------------------------------------------------------------------------------

    internal SqlSemGrant[] Held()
    {
        lock (held)
            return held.ToArray();
    }

    internal void Hold(SqlSemGrant grant)
    {
        lock (held)
        {
            held.Add(grant);
            if (!grant.KeepsAlive)
                return;
            kept.Add(grant);
            var time = TimeSpan.MaxValue;
            foreach (var one in kept)
                if (one.TickTime < time)
                    time = one.TickTime;
            // (Weak: a grant that its program has forgotten must not be kept for ever.)
            if (timer == null)
                timer = new Timer(Tick, new WeakReference<SqlSemSession>(this), time, time);
            else
                timer.Change(time, time);
        }
    }

    internal void Forget(SqlSemGrant grant)
    {
        lock (held)
            held.Remove(grant);
        StopKeeping(grant);
    }

    internal void StopKeeping(SqlSemGrant grant)
    {
        lock (held)
        {
            if (!kept.Remove(grant) || kept.Count > 0)
                return;
            timer.Dispose();
            timer = null;
        }
    }

    internal void TryLater(SqlSemGrant grant)
    {
        lock (held)
            if (!later.Contains(grant))
                later.Add(grant);
    }

    internal void CleanLater(Func<bool, Task> clean)
    {
        lock (held)
            unclean.Add(clean);
    }

    internal async Task GiveBackLate(bool asynchronous)
    {
        Func<bool, Task>[] cleans;
        SqlSemGrant[] grants;
        lock (held)
        {
            cleans = unclean.ToArray();
            grants = later.ToArray();
            unclean.Clear();
            later.Clear();
        }
        foreach (var clean in cleans)
            await clean(asynchronous).ConfigureAwait(false);  // comes back when it fails again
        foreach (var grant in grants)
            await grant.Dispose(asynchronous, true).ConfigureAwait(false);  // the same
    }

    // -- heartbeats ----------------------------------------------------------------------------------------------

    // The shortest that one of them needs; null: there are none.
    internal TimeSpan? KeepsAlive()
    {
        lock (held)
            return kept.Count == 0 ? (TimeSpan?)null : Interval();
    }

    private TimeSpan Interval()
    {
        var shortest = TimeSpan.MaxValue;
        foreach (var grant in kept)
            if (grant.Interval < shortest)
                shortest = grant.Interval;
        return shortest;
    }

    private SqlSemGrant[] Kept()
    {
        lock (held)
            return kept.ToArray();
    }

    private static void Tick(object weak)
    {
        SqlSemSession session;
        if (!((WeakReference<SqlSemSession>)weak).TryGetTarget(out session))
            return;
        foreach (var grant in session.Kept())
        {
            var why = grant.Overdue();
            if (why != null)
                grant.Lose(why);
        }
        // While another statement runs the connection is not idle; a wait sends heartbeats itself.
        if (session.turn.Wait(0))
            session.BeatAndLeave();
    }

    private async void BeatAndLeave()
    {
        try
        {
            await BeatWhenDue(true).ConfigureAwait(false);
        }
        finally
        {
            Leave();
        }
    }

    internal async Task BeatWhenDue(bool asynchronous)
    {
        var interval = KeepsAlive();
        if (interval != null && sinceBeat.Elapsed >= interval)
            await Beat(asynchronous).ConfigureAwait(false);
    }

    // By the caller who has the connection to itself.
    private async Task Beat(bool asynchronous)
    {
        sinceBeat.Restart();
        foreach (var grant in Kept())
        {
            try
            {
                var found = await grant.Beat(asynchronous).ConfigureAwait(false);
                if (found != null)
                    LoseSoon(grant, found.Why);
            }
            catch (Exception failure)  // nothing may be thrown here; Overdue decides what comes of it
            {
                SqlSem.Report(grant, failure as SqlSemException ?? SqlSemException.Of(
                    SqlSemTrouble.Other, grant.Resource,
                    "A heartbeat for '" + grant.Resource + "' failed: " + failure.Message, failure));
            }
        }
    }

    // A callback may want the connection, which is in use here.
    private static void LoseSoon(SqlSemGrant grant, string why)
    {
        Task.Run(() => grant.Lose(why));
    }
}

// One request, from the question to the grant.
internal sealed class SqlSemAttempt
{
    // For how long errors that pass by themselves are met by another try.
    private static readonly TimeSpan Persistence = TimeSpan.FromSeconds(30);

    // How often a wait looks for a deadlock.
    private static readonly TimeSpan SearchTime = TimeSpan.FromSeconds(1);

    internal readonly SqlSemRequest Request;
    internal readonly TimeSpan? Lease;
    internal readonly SqlSemOptions Options;
    internal readonly SqlSemSession Session;
    internal readonly Stopwatch Clock = new Stopwatch();
    internal SqlSemCalls Calls { get; private set; }
    internal long Member { get; private set; }
    internal TimeSpan Renewed { get; private set; }  // when the last heartbeat began

    private readonly bool asynchronous, required;
    private readonly DbConnection connection;
    private readonly TimeSpan? timeout;
    private readonly CancellationToken cancel;
    private readonly string uid = Guid.NewGuid().ToString("N");

    internal SqlSemAttempt(
        bool asynchronous, bool required, SqlSemRequest request, DbConnection connection, TimeSpan? timeout,
        TimeSpan? lease, CancellationToken cancel, SqlSemOptions options)
    {
        if (connection == null)
            throw new ArgumentNullException("connection");
        if (timeout == Timeout.InfiniteTimeSpan)
            timeout = null;
        if (timeout < TimeSpan.Zero)
            throw new ArgumentOutOfRangeException("timeout", "The timeout for '" + request.Resource + "' is negative");
        if (lease != null && (lease < TimeSpan.FromSeconds(1) || lease > TimeSpan.FromDays(20)))
            throw new ArgumentOutOfRangeException("lease", "A lease takes 1 second to 20 days, not " + lease);
        if (options.Grace < TimeSpan.Zero || options.Grace > TimeSpan.FromDays(20))
            throw new ArgumentOutOfRangeException(
                "options", "The grace must be between 0 and 20 days, not " + options.Grace);
        this.asynchronous = asynchronous;
        this.required = required;
        this.connection = connection;
        this.timeout = timeout;
        this.cancel = cancel;
        Request = request;
        Lease = lease;
        Options = options;
        Session = SqlSemSession.Of(connection);
    }

    // Null where it is not required, and was not granted in time.
    internal async Task<SqlSemGrant> Run()
    {
        Clock.Start();
        cancel.ThrowIfCancellationRequested();
        await Session.Enter(asynchronous, cancel).ConfigureAwait(false);
        try
        {
            if (connection.State != ConnectionState.Open)
                throw new SqlSemConfigurationException(
                    Request.Resource, "To acquire '" + Request.Resource + "' the connection must be open");
            if (Options.Dialect != SqlSemDialect.Automatic)
                Session.Dialect = Options.Dialect;
            else if (Session.Dialect == SqlSemDialect.Automatic)
                Session.Dialect = await SqlSemCalls.Recognise(
                    asynchronous, connection, Request.Resource, cancel).ConfigureAwait(false);
            Calls = new SqlSemCalls(connection, Session.Dialect, Options.Schema, Request.Resource);
            await Session.GiveBackLate(asynchronous).ConfigureAwait(false);
            RefuseToWaitForItself();
            var grant = await Take().ConfigureAwait(false);
            if (grant == null && required)
                throw await TimedOut().ConfigureAwait(false);
            return grant;
        }
        finally
        {
            Session.Leave();
        }
    }

    private async Task<SqlSemGrant> Take()
    {
        var requestingId = string.Format(
            CultureInfo.InvariantCulture, "{0}:{1}:{2}:{3}", Environment.MachineName, SqlSemCalls.ProcessId,
            Thread.CurrentThread.ManagedThreadId, uid.Substring(0, 8));
        // (A search for deadlocks goes by the owner, so there is one.)
        var owner = Options.Owner ?? Thread.CurrentThread.Name ?? "connection";
        Exception failure;
        try
        {
            var ticket = await Register(requestingId, owner).ConfigureAwait(false);
            if (ticket == null || (!ticket.Granted && !await Wait(ticket).ConfigureAwait(false)))
            {
                await Clean(asynchronous, "timeout").ConfigureAwait(false);
                return null;
            }
            // A late cancellation must not hit a statement of the caller's.
            cancel.ThrowIfCancellationRequested();
            if (Options.KeepAlive && Lease == null)
                await Beat(ticket).ConfigureAwait(false);
            var grant = new SqlSemGrant(this, requestingId, ticket.Position);
            Session.Hold(grant);
            return grant;
        }
        catch (Exception caught)
        {
            failure = caught;
        }
        // A routine that refuses an open transaction has written nothing, and that transaction may be past writing.
        var refused = failure as SqlSemException;
        if (Member != 0 && (refused == null || refused.Kind != SqlSemTrouble.OpenTransaction))
            await Clean(asynchronous, "cancelled").ConfigureAwait(false);
        ExceptionDispatchInfo.Capture(failure).Throw();
        throw failure;  // not reached
    }

    // Null when there is no number: it was not free, or the time was over.
    private async Task<SqlSemTicket> Register(string requestingId, string owner)
    {
        var unknown = 0;
        var pause = TimeSpan.FromMilliseconds(10);
        TimeSpan? troubled = null;
        while (true)
        {
            cancel.ThrowIfCancellationRequested();
            try
            {
                Renewed = Clock.Elapsed;
                if (Lease == null)
                    await Enrol().ConfigureAwait(false);
                else if (Member == 0)
                    Member = await Calls.Enrol(asynchronous, Options, Lease, cancel).ConfigureAwait(false);
                else
                    await Calls.Ping(asynchronous, Member, 0, null, cancel).ConfigureAwait(false);
                return await Calls.Register(
                    asynchronous, Member, requestingId, owner, uid, Request, timeout == TimeSpan.Zero,
                    cancel).ConfigureAwait(false);
            }
            catch (SqlSemException failure)
            {
                long known;
                if (failure.Kind == SqlSemTrouble.Unknown && Lease == null && ++unknown < 3)
                    Session.Members.TryRemove(Calls.Schema, out known);  // given up a moment ago: come back as a new one
                else if (!failure.IsTransient || connection.State != ConnectionState.Open)
                    throw;
                else if (timeout != null && Clock.Elapsed >= timeout)
                    return null;
                else if (failure.Kind == SqlSemTrouble.Busy)
                    troubled = null;  // that is waiting, too
                else if (troubled == null)
                    troubled = Clock.Elapsed;
                else if (Clock.Elapsed - troubled > Persistence)
                    throw;
            }
            await SqlSem.Nap(asynchronous, pause, cancel).ConfigureAwait(false);
            pause = SqlSemCalls.Longer(pause);
        }
    }

    // Whether it was granted in time.
    private async Task<bool> Wait(SqlSemTicket ticket)
    {
        var longest = SqlSem.Slice;
        if (Lease != null)
            longest = Shorter(longest, TimeSpan.FromTicks(Lease.Value.Ticks / 3));
        if (Session.KeepsAlive() != null)
            longest = Shorter(longest, Session.KeepsAlive().Value);
        var searches = Lease == null && Array.Exists(Session.Held(), one => one.SessionBound && one.OfThisSession);
        var searched = Clock.Elapsed;
        if (searches)
            longest = Shorter(longest, SearchTime);
        var pause = TimeSpan.FromMilliseconds(40);
        TimeSpan? troubled = null;
        while (true)
        {
            cancel.ThrowIfCancellationRequested();
            await Session.BeatWhenDue(asynchronous).ConfigureAwait(false);
            var began = Clock.Elapsed;
            var left = longest;
            if (timeout != null)
                left = Shorter(left, timeout.Value - began);
            if (left <= TimeSpan.Zero)
                return false;
            int code;
            try
            {
                if (Lease != null)
                    await Beat(ticket).ConfigureAwait(false);
                code = await Calls.Wait(asynchronous, ticket.Position, left, cancel).ConfigureAwait(false);
                troubled = null;
            }
            catch (SqlSemException failure)
            {
                if (!failure.IsTransient || connection.State != ConnectionState.Open)
                    throw;
                if (troubled == null)
                    troubled = Clock.Elapsed;
                else if (Clock.Elapsed - troubled > Persistence)
                    throw;
                // The server may allow statements less time than that. A stopped statement has changed nothing.
                if (failure.Kind == SqlSemTrouble.Stopped && longest > TimeSpan.FromMilliseconds(100))
                    longest = TimeSpan.FromTicks(longest.Ticks / 2);
                code = -1;
            }
            if (code == 0)
                return true;
            if (code == -2)
                throw Gone(ticket);
            left -= Clock.Elapsed - began;
            if (searches && Clock.Elapsed - searched >= SearchTime)
            {
                searched = Clock.Elapsed;
                var deadlock = await Calls.FindDeadlock(
                    asynchronous, Member, ticket.Position, cancel).ConfigureAwait(false);
                if (deadlock != null)
                    throw new SqlSemDeadlockException(Request.Resource, deadlock);
            }
            // Early: there was no lock to wait for, or (2) as many sessions wait on the server as may (max_server_waiters).
            if (code != 1 && left > TimeSpan.Zero)
            {
                if (code == 2 && pause < TimeSpan.FromMilliseconds(250))
                    pause = TimeSpan.FromMilliseconds(250);
                await SqlSem.Nap(asynchronous, Shorter(pause, left), cancel).ConfigureAwait(false);
                pause = TimeSpan.FromMilliseconds(Math.Min(2 * pause.TotalMilliseconds, code == 2 ? 1000 : 800));
            }
        }
    }

    private async Task Beat(SqlSemTicket ticket)
    {
        var began = Clock.Elapsed;
        if (!await Calls.Ping(asynchronous, Member, ticket.Position, null, cancel).ConfigureAwait(false))
            throw Gone(ticket);
        Renewed = began;
    }

    private SqlSemLostException Gone(SqlSemTicket ticket)
    {
        return new SqlSemLostException(Request.Resource, "taken out of the queue", string.Format(
            CultureInfo.InvariantCulture, "The request for '{0}' at position {1} was taken out of the queue while it "
            + "waited (by an operator, or as its session or lease had ended); ask again",
            Request.Resource, ticket.Position));
    }

    // Removes the rows of a failed call. Does not throw, as another error is being thrown. The next Acquire repeats a
    // failed removal, and a row whose session, or lease, has ended goes by itself.
    private async Task Clean(bool asynchronous, string outcome)
    {
        for (var attempt = 1; ; attempt++)
        {
            SqlSemException caught;
            try
            {
                await Calls.Cancel(asynchronous, Member, uid, outcome).ConfigureAwait(false);
                if (Lease != null)
                    await Calls.Resign(asynchronous, Member, CancellationToken.None).ConfigureAwait(false);
                return;
            }
            catch (SqlSemException failure)
            {
                caught = failure;
            }
            if (attempt < 3 && connection.State == ConnectionState.Open && caught.Kind != SqlSemTrouble.OpenTransaction)
                continue;
            Session.CleanLater(later => Clean(later, outcome));
            SqlSem.Report(null, caught);
            return;
        }
    }

    // The member that the session behind this connection is: remembered, and verified.
    private async Task Enrol()
    {
        for (var attempt = 1; ; attempt++)
        {
            long known;
            if (!Session.Members.TryGetValue(Calls.Schema, out known))
            {
                known = await Calls.Enrol(asynchronous, Options, null, cancel).ConfigureAwait(false);
                Session.Members[Calls.Schema] = known;
            }
            try
            {
                if (await Calls.Verify(asynchronous, known, cancel).ConfigureAwait(false))
                {
                    Member = known;
                    return;
                }
            }
            catch (SqlSemException failure)
            {
                // SqlClient reconnects behind our back when an idle connection was lost. On PostgreSQL it is a pooler.
                if (failure.Kind != SqlSemTrouble.SessionChanged || Calls.Dialect != SqlSemDialect.SqlServer
                    || attempt > 1)
                    throw;
                Session.NextGeneration();
            }
            Session.Members.TryRemove(Calls.Schema, out known);
            if (attempt == 3)
                throw new SqlSemConfigurationException(Request.Resource, "'" + Request.Resource + "' cannot be asked "
                    + "for: the database forgets this session at once (does a pooler change sessions under the "
                    + "connection?); connect past it, or use a lease");
        }
    }

    private void RefuseToWaitForItself()
    {
        var load = Request.Weight;
        var limit = Request.Limit ?? int.MaxValue;
        foreach (var held in Session.Held())
        {
            if (Lease == null && held.SessionBound && held.OfThisSession && held.Schema == Calls.Schema
                && held.Resource == Request.Resource && Request.Conflicts(held.Request))
            {
                load += held.Request.Weight;
                limit = Math.Min(limit, held.Request.Limit ?? int.MaxValue);
            }
        }
        if (load > limit)
            throw new SqlSemDeadlockException(Request.Resource, "'" + Request.Resource + "' is held on this connection "
                + "already, and would be waited for for ever; use what is held, or release it first");
    }

    private async Task<SqlSemTimeoutException> TimedOut()
    {
        var holders = new List<SqlSemHolder>();
        try
        {
            holders = await Calls.Holders(asynchronous, cancel).ConfigureAwait(false);
        }
        catch (SqlSemException failure)
        {
            System.Diagnostics.Trace.TraceWarning("sqlsem: the holders are not known: " + failure.Message);
        }
        var told = holders.Count == 0 ? ""
            : ", held by " + holders[0] + (holders.Count == 1 ? "" : " and " + (holders.Count - 1) + " more");
        return new SqlSemTimeoutException(Request.Resource, string.Format(
            CultureInfo.InvariantCulture,
            "'{0}' was not granted within {1:0.###} s ({2}){3}; see who holds it with: sqlsem ls {0}, or routine "
            + "entries; wait longer, or try again later",
            Request.Resource, timeout.Value.TotalSeconds,
            Request.Limit == null ? "the server's limit" : "limit " + Request.Limit, told), holders);
    }

    private static TimeSpan Shorter(TimeSpan one, TimeSpan other)
    {
        return one < other ? one : other;
    }
}

internal sealed class SqlSemTicket
{
    internal long Position;
    internal bool Granted;
}

// The meanings of error numbers of SQL Server and Azure SQL. The same as in sqlsem/engines/mssql/errors.py, by the same names.
internal static class SqlSemNumbers
{
    // A statement is the victim, or has waited for long: it may be repeated.
    internal static readonly HashSet<int> Busy = new HashSet<int> { 601, 701, 1204, 1205, 1222, 8645, 8651, 50002 };

    // The line or the session is gone, or this server cannot serve the database now: another session may do better.
    internal static readonly HashSet<int> Lost = new HashSet<int>
    {
        20, 64, 121, 233, 596, 997, 10053, 10054, 10060, 10061, 10928, 10929, 10936, 11001, 17142, 17197, 6002, 6005,
        20002, 20003, 20004, 20006, 20009, 20047, 40143, 40197, 40501, 40540, 40613, 42108, 42109, 49918, 49919, 49920,
        615, 904, 921, 922, 923, 924, 927, 942, 952, 954, 955, 976, 978, 979, 982, 983, 988, 4060, 4064, 4221,
        18401, 18451, 18461, 35250, 49510,
    };

    // Tables or routines are not there.
    internal static readonly HashSet<int> Missing = new HashSet<int> { 208, 2812 };

    // The login may not do that.
    internal static readonly HashSet<int> Denied = new HashSet<int> { 229, 230 };

    // The login may call the routines, but is in no role of sqlsem, and the application locks belong to such a role.
    internal static readonly HashSet<int> Role = new HashSet<int> { 1202 };

    // The database cannot be written to here: a secondary replica, or it has just been failed over.
    internal static readonly HashSet<int> ReadOnly = new HashSet<int> { 3906 };

    // SqlClient's own timeout.
    internal const int Timeout = -2;

    // No number, and the one that engines which only speak T-SQL give to all they have no number for: the text must do.
    internal static readonly HashSet<int> Vague = new HashSet<int> { 0, 33557097 };
}

// The routines of the database, one method each.
internal sealed class SqlSemCalls
{
    internal const int InTransaction = -9;
    internal static readonly int ProcessId = Process.GetCurrentProcess().Id;

    // A statement's time, beyond what it was asked to wait: a slow server is not dead.
    private static readonly TimeSpan Patience = TimeSpan.FromSeconds(30);

    // For how long a call that may be repeated is, while the database is busy.
    private static readonly TimeSpan Persistence = TimeSpan.FromSeconds(5);

    // An integer that is not there; a null is a text that is not there.
    private static readonly object NoNumber = new object();

    // SQL Server keeps one plan for each declaration of the parameters, so a text is declared by no length of its own.
    private const int TextSize = 4000;

    private static readonly Regex Identifier = new Regex(@"\A[A-Za-z_][A-Za-z0-9_]{0,47}\z");
    private static readonly Regex Mark = new Regex(@"\{(\d+)\}");

    internal readonly DbConnection Connection;
    internal readonly SqlSemDialect Dialect;
    internal readonly string Schema, Resource;
    private readonly bool postgres;
    private readonly string prefix;

    internal SqlSemCalls(DbConnection connection, SqlSemDialect dialect, string schema, string resource)
    {
        if (schema == null || !Identifier.IsMatch(schema))
            throw new ArgumentException(
                "The schema's name must be a plain identifier (a letter or _, then letters, digits or _; at most 48)",
                "options");
        Connection = connection;
        Dialect = dialect;
        Schema = schema;
        Resource = resource;
        postgres = dialect == SqlSemDialect.PostgreSql;
        prefix = postgres ? "SELECT " + schema + "." : "EXEC " + schema + ".";
    }

    internal SqlSemCalls Through(DbConnection other)
    {
        if (other == null)
            throw new ArgumentNullException("other");
        return other == Connection ? this : new SqlSemCalls(other, Dialect, Schema, Resource);
    }

    internal static TimeSpan Longer(TimeSpan pause)
    {
        return TimeSpan.FromMilliseconds(Math.Min(1.5 * pause.TotalMilliseconds, 1000));
    }

    // Does it on the connection, which is opened for it where it is closed.
    internal async Task<T> Opened<T>(bool asynchronous, CancellationToken cancel, Func<Task<T>> call)
    {
        if (Connection.State == ConnectionState.Open)
            return await call().ConfigureAwait(false);
        try
        {
            if (asynchronous)
                await Connection.OpenAsync(cancel).ConfigureAwait(false);
            else
                Connection.Open();
        }
        catch (Exception failure)
        {
            if (!(failure is DbException || failure is InvalidOperationException))
                throw;
            throw SqlSemException.Of(
                SqlSemTrouble.Lost, Resource, "The connection of '" + Resource + "' is closed and cannot be opened ("
                + OneLine(failure.Message) + "); the lock goes with its session, or when its lease is over", failure);
        }
        try
        {
            return await call().ConfigureAwait(false);
        }
        finally
        {
            Connection.Close();
        }
    }

    // Does it again while the database is busy. The call is told whether an earlier attempt may have taken effect.
    private async Task<T> Persistently<T>(bool asynchronous, CancellationToken cancel, Func<bool, Task<T>> call)
    {
        var clock = Stopwatch.StartNew();
        var pause = TimeSpan.FromMilliseconds(10);
        var uncertain = false;
        while (true)
        {
            try
            {
                return await call(uncertain).ConfigureAwait(false);
            }
            catch (SqlSemException failure)
            {
                if (!failure.IsTransient || Connection.State != ConnectionState.Open || clock.Elapsed > Persistence)
                    throw;
                uncertain = uncertain || failure.Kind != SqlSemTrouble.Busy;
            }
            await SqlSem.Nap(asynchronous, pause, cancel).ConfigureAwait(false);
            pause = Longer(pause);
        }
    }

    internal async Task<long> Enrol(bool asynchronous, SqlSemOptions options, TimeSpan? lease, CancellationToken cancel)
    {
        var program = options.Program ?? AppDomain.CurrentDomain.FriendlyName;
        if (program.Length > 255)
            program = program.Substring(0, 255);
        var rows = await Run(
            asynchronous, TimeSpan.Zero,
            postgres
                ? prefix + "register_member(CAST({0} AS varchar), CAST({1} AS integer), CAST({2} AS varchar), "
                    + "CAST({3} AS integer), CAST({4} AS integer))"
                : prefix + "register_member {0}, {1}, {2}, {3}, {4}, @answer = 1",
            null, cancel, Environment.MachineName, ProcessId, program, Milliseconds(options.Grace),
            lease == null ? NoNumber : Milliseconds(lease.Value)).ConfigureAwait(false);
        return Number(rows, 0);
    }

    // Whether the member is known. On PostgreSQL this takes a transaction number, from which the next statement can
    // tell that it is in the same transaction, and refuse: a transaction that has only read is not seen otherwise.
    internal async Task<bool> Verify(bool asynchronous, long member, CancellationToken cancel)
    {
        if (!postgres)
            return await PingOnce(asynchronous, member, 0, null, cancel).ConfigureAwait(false);
        var text = "SELECT CAST(known AS integer), txid_current() FROM " + Schema + ".heartbeat(CAST({0} AS bigint))";
        return Number(
            await Run(asynchronous, TimeSpan.Zero, text, null, cancel, member).ConfigureAwait(false), 0) == 1;
    }

    // Whether the member is known and, where a position is given, has that row.
    internal Task<bool> Ping(
        bool asynchronous, long member, long position, DbTransaction transaction, CancellationToken cancel)
    {
        if (transaction != null)  // after an error it is not what it was
            return PingOnce(asynchronous, member, position, transaction, cancel);
        return Persistently(
            asynchronous, cancel, uncertain => PingOnce(asynchronous, member, position, null, cancel));
    }

    private async Task<bool> PingOnce(
        bool asynchronous, long member, long position, DbTransaction transaction, CancellationToken cancel)
    {
        if (postgres)
        {
            var rows = await Run(
                asynchronous, TimeSpan.Zero,
                "SELECT CAST(known AND (CAST({0} AS bigint) = 0 OR coalesce(CAST({1} AS bigint) = ANY (positions), "
                + "false)) AND NOT coalesce(CAST({2} AS bigint) = ANY (revoked), false) AS integer) FROM " + Schema
                + ".heartbeat(CAST({3} AS bigint))",
                transaction, cancel, position, position, position, member).ConfigureAwait(false);
            return Number(rows, 0) == 1;
        }
        foreach (var row in await Run(
            asynchronous, TimeSpan.Zero, prefix + "heartbeat {0}", transaction, cancel, member).ConfigureAwait(false))
        {
            if (ToLong(row[0]) != 1)
                return false;
            if (position == 0 || (row[1] != DBNull.Value && ToLong(row[1]) == position))
                return position == 0 || ToLong(row[2]) == 0;
        }
        return false;
    }

    // Null when it was only tried, and not free. May be repeated: the uid finds the row of the first time.
    internal async Task<SqlSemTicket> Register(
        bool asynchronous, long member, string requestingId, string owner, string uid, SqlSemRequest request, bool only,
        CancellationToken cancel)
    {
        // Both wait for the gate for a second, then answer that they are busy.
        var rows = await Run(
            asynchronous, TimeSpan.Zero,
            postgres
                ? "SELECT r.queue_position, CAST(r.granted AS integer) "
                    + "FROM set_config('lock_timeout', '1000', true) AS s (value), LATERAL " + Schema + ".register("
                    + "CAST({0} AS bigint), CAST({1} AS varchar), CAST({2} AS varchar), CAST({3} AS varchar), "
                    + "CAST({4} AS integer) = 1, CAST({5} AS varchar), CAST({6} AS varchar), CAST({7} AS integer), "
                    + "CAST({8} AS integer), CASE WHEN s.value IS NOT NULL THEN CAST({9} AS varchar) END) AS r"
                : prefix + "register {0}, {1}, {2}, {3}, {4}, {5}, {6}, {7}, {8}, {9}, 1000, @answer = 1",
            null, cancel, member, requestingId, owner, uid, only ? 1 : 0, request.Resource, request.Access,
            request.Limit == null ? NoNumber : request.Limit.Value, request.Weight, request.Note).ConfigureAwait(false);
        if (rows.Count == 0)
            throw NoAnswer("register");
        if (rows[0][0] == DBNull.Value)
            return null;
        return new SqlSemTicket { Position = ToLong(rows[0][0]), Granted = ToLong(rows[0][1]) == 1 };
    }

    internal async Task<int> Wait(bool asynchronous, long position, TimeSpan slice, CancellationToken cancel)
    {
        return (int)Number(
            await Run(
                asynchronous, slice,
                postgres
                    ? prefix + "wait(CAST({0} AS varchar), CAST({1} AS bigint), CAST({2} AS integer))"
                    : prefix + "wait {0}, {1}, {2}, 1",
                null, cancel, Resource, position, Milliseconds(slice)).ConfigureAwait(false), 0);
    }

    // The words of a deadlock that this request has to end; null: there is none.
    internal async Task<string> FindDeadlock(
        bool asynchronous, long member, long position, CancellationToken cancel)
    {
        var rows = await Run(
            asynchronous, TimeSpan.Zero,
            postgres
                ? "SELECT member_id, host, pid, session_id, owner, ahead_resource, ahead_position, "
                    + "CAST(ahead_granted AS integer), resource_id, queue_position, CAST(upgrade AS integer), "
                    + "behind_position FROM " + Schema + ".find_deadlock(CAST({0} AS bigint)) ORDER BY step"
                : prefix + "find_deadlock {0}, @answer = 1",
            null, cancel, member).ConfigureAwait(false);
        if (rows.Count == 0 || ToLong(rows[0][9]) != position)
            return null;
        var words = new StringBuilder("Deadlock: ");
        foreach (var row in rows)
        {
            if (row != rows[0])
                words.Append("; ");
            words.Append(Word(row[1]) ?? "?");
            if (row[2] != DBNull.Value)
                words.Append(':').Append(ToLong(row[2]));
            else if (row[3] != DBNull.Value)
                words.Append(" session ").Append(ToLong(row[3]));
            if (row[4] != DBNull.Value)
                words.Append(" (").Append(Word(row[4])).Append(')');
            if (ToLong(row[6]) != ToLong(row[9]))
                words.AppendFormat(
                    CultureInfo.InvariantCulture, " {0} '{1}' at {2},", ToLong(row[7]) == 1 ? "holds" : "queues for",
                    row[5], row[6]);
            words.AppendFormat(
                CultureInfo.InvariantCulture, " waits {0} '{1}' at {2} behind {3}",
                ToLong(row[10]) == 1 ? "to be the writer of" : "for", row[8], row[9], row[11]);
        }
        return words.AppendFormat(
            CultureInfo.InvariantCulture, ". The youngest request, {0}, has been given up: release what is held and "
            + "try again; take both in the same order everywhere", position).ToString();
    }

    // The holders of the resource now.
    internal async Task<List<SqlSemHolder>> Holders(bool asynchronous, CancellationToken cancel)
    {
        var rows = await Run(
            asynchronous, TimeSpan.Zero,
            postgres
                ? "SELECT resource_id, queue_position, state, access_type, concurrency_limit, weight, requesting_id, "
                    + "member_id, owner, host, pid, program, note, requested_at, granted_at, seconds FROM " + Schema
                    + ".entries(CAST({0} AS varchar)) ORDER BY queue_position"
                : prefix + "entries {0}",
            null, cancel, Resource).ConfigureAwait(false);
        var found = new List<SqlSemHolder>();
        foreach (var row in rows)
        {
            if (Word(row[2]) != "holds")
                continue;
            found.Add(new SqlSemHolder
            {
                Position = ToLong(row[1]), Owner = Word(row[8]), Host = Word(row[9]),
                ProcessId = row[10] == DBNull.Value ? (int?)null : (int)ToLong(row[10]), Program = Word(row[11]),
                Note = Word(row[12]),
                Held = TimeSpan.FromSeconds(Convert.ToDouble(row[15], CultureInfo.InvariantCulture)),
            });
        }
        return found;
    }

    internal Task<int> Release(
        bool asynchronous, string resource, long position, string requestingId, bool again, CancellationToken cancel)
    {
        return Persistently(asynchronous, cancel, async uncertain =>
        {
            if (postgres)  // a transaction that has only read is not seen otherwise; see Verify
                await Run(asynchronous, TimeSpan.Zero, "SELECT txid_current()", null, cancel).ConfigureAwait(false);
            var code = (int)Number(
                await Run(
                    asynchronous, TimeSpan.Zero,
                    postgres
                        ? "SELECT CASE WHEN pg_current_xact_id_if_assigned() IS NULL THEN " + Schema
                            + ".release(CAST({0} AS varchar), CAST({1} AS bigint), CAST({2} AS varchar), 'released') "
                            + "ELSE -9 END"
                        : prefix + "release {0}, {1}, {2}, N'released', 1",
                    null, cancel, resource, position, requestingId).ConfigureAwait(false), 0);
            return code == -1 && (again || uncertain) ? 0 : code;  // an attempt did it, and its answer was lost
        });
    }

    internal async Task Cancel(bool asynchronous, long member, string uid, string outcome)
    {
        await Run(
            asynchronous, TimeSpan.Zero,
            postgres
                ? prefix + "cancel(CAST({0} AS bigint), CAST({1} AS varchar), CAST({2} AS varchar))"
                : prefix + "cancel {0}, {1}, {2}, 1",
            null, CancellationToken.None, member, uid, outcome).ConfigureAwait(false);
    }

    internal Task<bool> Resign(bool asynchronous, long member, CancellationToken cancel)
    {
        return Persistently(asynchronous, cancel, async uncertain =>
        {
            await Run(
                asynchronous, TimeSpan.Zero,
                postgres ? prefix + "deregister_member(CAST({0} AS bigint))" : prefix + "deregister_member {0}", null, cancel,
                member).ConfigureAwait(false);
            return true;
        });
    }

    internal async Task<bool> Pin(
        bool asynchronous, DbTransaction transaction, string resource, long position, string requestingId,
        CancellationToken cancel)
    {
        return Number(
            await Run(
                asynchronous, TimeSpan.Zero,
                postgres
                    ? "SELECT CAST(" + Schema + ".pin(CAST({0} AS varchar), CAST({1} AS bigint), CAST({2} AS varchar)) "
                        + "AS integer)"
                    : prefix + "pin {0}, {1}, {2}, 1",
                transaction, cancel, resource, position, requestingId).ConfigureAwait(false), 0) == 1;
    }

    internal static async Task<SqlSemDialect> Recognise(
        bool asynchronous, DbConnection connection, string resource, CancellationToken cancel)
    {
        var product = connection.GetType().FullName;
        if (product.IndexOf("Npgsql", StringComparison.OrdinalIgnoreCase) >= 0)
            return SqlSemDialect.PostgreSql;
        if (product.IndexOf("SqlClient", StringComparison.OrdinalIgnoreCase) >= 0)
            return SqlSemDialect.SqlServer;
        // Odbc, OleDb and wrappers: ask. PostgreSQL does not understand the first question, nor SQL Server the second.
        var told = "";
        foreach (var question in new[] { "SELECT @@VERSION", "SELECT version()" })
        {
            try
            {
                using (var command = connection.CreateCommand())
                {
                    command.CommandText = question;
                    var answer = asynchronous
                        ? await command.ExecuteScalarAsync(cancel).ConfigureAwait(false) : command.ExecuteScalar();
                    told = Convert.ToString(answer, CultureInfo.InvariantCulture);
                }
            }
            catch (DbException failure)
            {
                told = OneLine(failure.Message);
                continue;
            }
            catch (InvalidOperationException failure)
            {
                throw new SqlSemCalls(connection, SqlSemDialect.Automatic, "sqlsem", resource).Translate(failure);
            }
            return question.Contains("@@") ? SqlSemDialect.SqlServer : SqlSemDialect.PostgreSql;
        }
        throw new SqlSemConfigurationException(resource, "To acquire '" + resource + "' one must know whether this is SQL "
            + "Server or PostgreSQL, which the server does not tell (" + told + "); set SqlSemOptions.Dialect");
    }

    // -- statements ----------------------------------------------------------------------------------------------

    private async Task<List<object[]>> Run(
        bool asynchronous, TimeSpan waits, string text, DbTransaction transaction, CancellationToken cancel,
        params object[] values)
    {
        cancel.ThrowIfCancellationRequested();
        // Some providers know no CommandTimeout in asynchronous calls.
        var overdue = asynchronous ? CancellationTokenSource.CreateLinkedTokenSource(cancel) : null;
        try
        {
            using (var command = Prepared(waits, text, transaction, values))
            {
                var rows = new List<object[]>();
                if (asynchronous)
                {
                    overdue.CancelAfter(waits + Patience);
                    using (var reader = await command.ExecuteReaderAsync(overdue.Token).ConfigureAwait(false))
                    {
                        do
                        {
                            while (await reader.ReadAsync(overdue.Token).ConfigureAwait(false))
                                rows.Add(Values(reader));
                        }
                        while (await reader.NextResultAsync(overdue.Token).ConfigureAwait(false));  // as below
                    }
                    return rows;
                }
                using (cancel.Register(Stop, command))
                using (var reader = command.ExecuteReader())
                {
                    do
                    {
                        while (reader.Read())
                            rows.Add(Values(reader));
                    }
                    while (reader.NextResult());  // an error may come after the rows
                }
                if (rows.Count == 0)  // some drivers drop the rows of what has ended when it is cancelled
                    cancel.ThrowIfCancellationRequested();
                return rows;
            }
        }
        catch (Exception failure)
        {
            var cut = failure is OperationCanceledException;
            // Providers say InvalidOperationException for a connection in the wrong state, or in a transaction.
            if (!(cut || failure is DbException || failure is InvalidOperationException))
                throw;
            if (cancel.IsCancellationRequested)  // a provider has an exception of its own for that, or this one
                throw new OperationCanceledException(
                    "'" + Resource + "' was cancelled while the database was asked", failure, cancel);
            if (cut || (overdue != null && overdue.IsCancellationRequested))
                throw SqlSemException.Of(
                    SqlSemTrouble.Stopped, Resource, string.Format(
                        CultureInfo.InvariantCulture, "'{0}': the database has not answered within {1:0} s: ask again",
                        Resource, (waits + Patience).TotalSeconds), failure);
            throw Translate(failure);
        }
        finally
        {
            if (overdue != null)
                overdue.Dispose();
        }
    }

    private DbCommand Prepared(TimeSpan waits, string text, DbTransaction transaction, object[] values)
    {
        var command = Connection.CreateCommand();
        // Odbc and OleDb know parameters by their order, which is the order of the marks in the text.
        var provider = Connection.GetType().FullName;
        var ordered = provider.IndexOf("Odbc", StringComparison.OrdinalIgnoreCase) >= 0
            || provider.IndexOf("OleDb", StringComparison.OrdinalIgnoreCase) >= 0;
        command.CommandText = Mark.Replace(text, match => ordered ? "?" : "@p" + match.Groups[1].Value);
        command.CommandTimeout = (int)Math.Ceiling((waits + Patience).TotalSeconds);
        if (transaction != null)
            command.Transaction = transaction;
        for (var index = 0; index < values.Length; index++)
        {
            var name = "@p" + index.ToString(CultureInfo.InvariantCulture);
            command.Parameters.Add(Parameter(command, name, values[index]));
        }
        return command;
    }

    private DbParameter Parameter(DbCommand command, string name, object value)
    {
        var parameter = command.CreateParameter();
        parameter.ParameterName = name;
        parameter.DbType =
            value is int || value == NoNumber ? DbType.Int32 : value is long ? DbType.Int64 : DbType.String;
        if (!postgres && parameter.DbType == DbType.String)
            parameter.Size = TextSize;
        parameter.Value = value == null || value == NoNumber ? DBNull.Value : value;
        return parameter;
    }

    private static void Stop(object command)
    {
        try
        {
            ((DbCommand)command).Cancel();
        }
        catch (Exception failure)
        {
            if (!(failure is DbException || failure is InvalidOperationException || failure is NotSupportedException))
                throw;
            // Then the statement ends by itself, with its slice.
            System.Diagnostics.Trace.TraceWarning("sqlsem: a statement could not be cancelled: " + failure.Message);
        }
    }

    private static object[] Values(DbDataReader reader)
    {
        var row = new object[reader.FieldCount];
        reader.GetValues(row);
        return row;
    }

    private static int Milliseconds(TimeSpan time)
    {
        return (int)Math.Ceiling(time.TotalMilliseconds);
    }

    private long Number(List<object[]> rows, int column)
    {
        if (rows.Count == 0 || rows[0][column] == DBNull.Value)
            throw NoAnswer("the database");
        return ToLong(rows[0][column]);
    }

    private static long ToLong(object value)
    {
        return Convert.ToInt64(value, CultureInfo.InvariantCulture);
    }

    private static string Word(object value)
    {
        return value == DBNull.Value ? null : Convert.ToString(value, CultureInfo.InvariantCulture);
    }

    private SqlSemException NoAnswer(string what)
    {
        return SqlSemException.Of(SqlSemTrouble.Schema, Resource, "'" + Resource + "': " + what + " gave no answer; is "
            + "this the schema of sqlsem's tables (" + Schema + "), up to date (sqlsem init)?");
    }

    // -- errors --------------------------------------------------------------------------------------------------

    private SqlSemException Translate(Exception failure)
    {
        var text = OneLine(failure.Message);
        var low = text.ToLowerInvariant();
        var state = Detail(failure, "SqlState") ?? "";
        int number;
        int.TryParse(Detail(failure, "Number") ?? Detail(failure, "NativeError") ?? "", out number);
        var kind = failure is InvalidOperationException && low.Contains("transaction") ? SqlSemTrouble.OpenTransaction
            : Dialect == SqlSemDialect.PostgreSql ? OfState(state)
            : SqlSemNumbers.Vague.Contains(number) ? OfWords(low, state) : OfNumber(number, text);
        // (A login may have rights to the routines, and not be in the role of the locks.)
        var outside = Dialect == SqlSemDialect.SqlServer
            && (SqlSemNumbers.Role.Contains(number) || low.Contains("user is not a member"));
        if (outside)
            kind = SqlSemTrouble.Configuration;
        if (kind == SqlSemTrouble.Other && Connection.State != ConnectionState.Open)
            kind = SqlSemTrouble.Lost;
        var advice = outside
            ? "; the login is not in role " + Schema + "_locks, which the locks belong to; an administrator adds its "
                + "user: ALTER ROLE " + Schema + "_locks ADD MEMBER … (or the role that it is in)"
            : state == "42501" || SqlSemNumbers.Denied.Contains(number) || low.Contains("permission denied")
            ? "; an administrator can add this login to role " + Schema + "_user"
            : Advice(kind);
        return SqlSemException.Of(kind, Resource, "'" + Resource + "': " + text + advice, failure);
    }

    private string Advice(SqlSemTrouble kind)
    {
        switch (kind)
        {
            case SqlSemTrouble.Busy:
                return "; another session keeps a lock in an open transaction, or the server has too much to do: ask again";
            case SqlSemTrouble.Unknown:
                return "; ask again";
            case SqlSemTrouble.SessionChanged:
                return "; connect past the pool, or acquire with a lease";
            case SqlSemTrouble.OpenTransaction:
                return "; commit or roll back first, then call it outside of any transaction (TransactionScope "
                    + "included), at READ COMMITTED";
            case SqlSemTrouble.Serialization:
                return "; roll back and try again";
            case SqlSemTrouble.Stopped:
                return "; a timeout, or an administrator, stopped it: ask again";
            case SqlSemTrouble.Schema:
                return "; create or upgrade the sqlsem tables with: sqlsem init (and look whether schema " + Schema
                    + " is right)";
            case SqlSemTrouble.Lost:
                return "; the connection is lost, or the server cannot serve the database now. With its session goes "
                    + "what it held or waited for: connect and ask again";
            default:
                return "";
        }
    }

    // As SqlServerConnection.meaning in Python.
    private static SqlSemTrouble OfNumber(int number, string text)
    {
        if (SqlSemNumbers.Busy.Contains(number))
            return SqlSemTrouble.Busy;
        if (SqlSemNumbers.Lost.Contains(number) || SqlSemNumbers.ReadOnly.Contains(number))
            return SqlSemTrouble.Lost;
        if (SqlSemNumbers.Missing.Contains(number))
            return SqlSemTrouble.Schema;
        if (SqlSemNumbers.Denied.Contains(number) || SqlSemNumbers.Role.Contains(number))
            return SqlSemTrouble.Configuration;
        switch (number)
        {
            case SqlSemNumbers.Timeout:
                return SqlSemTrouble.Stopped;
            case 50001:
                return SqlSemTrouble.OpenTransaction;
            case 50003:
                return SqlSemTrouble.SessionChanged;
            case 50005:
                return SqlSemTrouble.Unknown;
            case 50000: // the number of any RAISERROR with a text, too
                return text.StartsWith("sqlsem: ", StringComparison.Ordinal)
                    ? SqlSemTrouble.Configuration : SqlSemTrouble.Other;
            case 50006:
            case 50008:
            case 50009:
                return SqlSemTrouble.Configuration;
            default:
                return SqlSemTrouble.Other;
        }
    }

    private static SqlSemTrouble OfState(string state)
    {
        switch (state)
        {
            case "55P03":
            case "40P01":
                return SqlSemTrouble.Busy;
            case "P0002":
                return SqlSemTrouble.Unknown;
            case "25001":
                return SqlSemTrouble.OpenTransaction;
            case "40001":
                return SqlSemTrouble.Serialization;
            case "57014":
                return SqlSemTrouble.Stopped;
            case "42883":
            case "42P01":
            case "3F000":
                return SqlSemTrouble.Schema;
            case "42501":
            case "22023":
                return SqlSemTrouble.Configuration;
            default:
                return state.StartsWith("08", StringComparison.Ordinal) || state.StartsWith("57P", StringComparison.Ordinal)
                    ? SqlSemTrouble.Lost : SqlSemTrouble.Other;
        }
    }

    // Where the server gives no number (Babelfish), or the dialect is not known yet.
    private static SqlSemTrouble OfWords(string low, string state)
    {
        if (low.Contains("sqlsem: busy") || low.Contains("lock timeout") || low.Contains("deadlock"))
            return SqlSemTrouble.Busy;
        if (low.Contains("not known here"))
            return SqlSemTrouble.Unknown;
        if (low.Contains("changed sessions"))
            return SqlSemTrouble.SessionChanged;
        if (low.Contains("open transaction"))
            return SqlSemTrouble.OpenTransaction;
        if (low.Contains("sqlsem: no limit is set") || low.Contains("sqlsem: no priority is named")
            || low.Contains("permission denied"))
            return SqlSemTrouble.Configuration;
        if (low.Contains("does not exist") || low.Contains("could not find stored procedure"))
            return SqlSemTrouble.Schema;
        return OfState(state);
    }

    private static string OneLine(string text)
    {
        return (text ?? "").Trim().Split('\r', '\n')[0].Trim();
    }

    // A property that providers have, each on a class of its own: on the exception, or on the first of its errors.
    private static string Detail(object failure, string name)
    {
        foreach (var property in failure.GetType().GetProperties(BindingFlags.Public | BindingFlags.Instance))
        {
            if (property.GetIndexParameters().Length > 0)
                continue;
            if (string.Equals(property.Name, name, StringComparison.OrdinalIgnoreCase))
            {
                var value = property.GetValue(failure, null);
                return value == null ? null : Convert.ToString(value, CultureInfo.InvariantCulture);
            }
            if (property.Name == "Errors" && failure is DbException)
            {
                var errors = property.GetValue(failure, null) as System.Collections.IEnumerable;
                if (errors == null)
                    continue;
                foreach (var error in errors)
                {
                    var found = Detail(error, name);
                    if (found != null)
                        return found;
                    break;
                }
            }
        }
        return null;
    }
}
