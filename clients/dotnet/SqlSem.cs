// sqlsem for .NET: locks in the database that you already have. One file; put it into your project.
//
//     using (var grant = SqlSem.Acquire(connection, "etl", limit: 3, timeout: TimeSpan.FromSeconds(60)))
//     {
//         ... at most three at a time, whatever language the others are written in ...
//     }
//
// It needs the sqlsem tables (sqlsem init, or what `sqlsem sql` prints) in SQL Server or PostgreSQL, nothing but
// System.Data.Common, and C# 6. Any provider will do: SqlClient, Odbc, OleDb, Npgsql.
//
// How it works: the database session behind the connection is enrolled as a member, which holds an application lock
// (its beacon) for as long as the session lives. So keep the connection open while the lock is held; when the process
// dies, its session ends, and everybody else goes on as soon as the last sign of life (Acquire, Check) is older than the
// grace. Where no session can be kept, use a lease.

using System;
using System.Collections.Generic;
using System.Data;
using System.Data.Common;
using System.Diagnostics;
using System.Globalization;
using System.Reflection;
using System.Runtime.CompilerServices;
using System.Text;
using System.Text.RegularExpressions;
using System.Threading;

/// <summary>Something went wrong with a lock; the message names the resource and says what to do.</summary>
public class SqlSemException : Exception
{
    /// <summary>The resource's name.</summary>
    public string Resource { get; private set; }

    internal SqlSemTrouble Kind;

    internal SqlSemException(string resource, string message, Exception cause = null) : base(message, cause)
    {
        Resource = resource;
    }
}

/// <summary>The lock was not had in time. No row is left in the queue.</summary>
public class SqlSemTimeoutException : SqlSemException
{
    internal SqlSemTimeoutException(string resource, string message) : base(resource, message) { }
}

/// <summary>
/// The lock is no longer held (or the waiting row is no longer there): an operator took it away, the session or the
/// lease ended. Somebody else may be inside: stop, and leave what you have not committed undone.
/// </summary>
public class SqlSemLostException : SqlSemException
{
    internal SqlSemLostException(string resource, string message, Exception cause = null)
        : base(resource, message, cause) { }
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
    /// How long the others wait after this session was last seen alive before its locks are theirs. In that time
    /// whoever calls <see cref="SqlSemGrant.Check"/> learns that the connection is gone. The first Acquire on a
    /// connection decides.
    /// </summary>
    public TimeSpan Grace = TimeSpan.FromSeconds(5);

    /// <summary>Shown to people beside the row; the program's name when null.</summary>
    public string Program;

    /// <summary>Shown to people, column owner: who in the program waits; the thread's name when null.</summary>
    public string Owner;
}

/// <summary>Acquires locks. See the top of this file.</summary>
/// <remarks>
/// <para>The connection must be open, in autocommit (a call inside an open transaction is refused) and not in use by
/// another thread. Your CommandTimeout does not matter: waiting is done in slices of a few seconds. Several locks may
/// be held on one connection. No row stays behind when a call fails, whatever the reason.</para>
/// <para>A machine that loses its power says nothing to the server, which sees it by TCP keepalives only: set them
/// short there, or use a lease.</para>
/// </remarks>
public static class SqlSem
{
    internal static readonly TimeSpan Slice = TimeSpan.FromSeconds(3);

    // With a cancellation token a slice is this short, instead of cancelling a statement under way: that might hit the
    // next statement, or leave a session's application lock behind.
    internal static readonly TimeSpan CancellableSlice = TimeSpan.FromSeconds(1);

    /// <summary>
    /// Told what went wrong where nothing may be thrown: in a Dispose, that the lock had been lost or could not be
    /// given back now; when a call failed (the grant is null then), that its row could not be taken back and goes with
    /// the session, or when its lease is over. Called on the same thread; written to <see cref="Trace"/> as well.
    /// </summary>
    public static event Action<SqlSemGrant, SqlSemException> Trouble;

    /// <summary>
    /// At most <paramref name="limit"/> at a time (1: a mutex), in the order of asking.
    /// </summary>
    /// <param name="connection">Open, in autocommit; on the session behind it the lock depends.</param>
    /// <param name="resource">Its name: 1 to 255 characters, no blanks around it. Upper and lower case differ.</param>
    /// <param name="limit">
    /// How many may be inside; everybody should name the same (the smallest counts). Null: the limit that an operator
    /// has set for the resource (<c>sqlsem set etl --limit 5</c>), and changes while programs run; where none is set,
    /// asking is refused. What this connection holds of such a one may keep it out itself: then give a timeout.
    /// </param>
    /// <param name="timeout">How long to wait at most; null: for ever; zero: only if free.</param>
    /// <param name="weight">How many places to take.</param>
    /// <param name="note">For people who look at the queue.</param>
    /// <param name="lease">
    /// Not bound to the session, but held for so long after the last <see cref="SqlSemGrant.Renew()"/>. For connections
    /// that go back to a pool meanwhile, and for poolers that change sessions under a connection.
    /// </param>
    /// <param name="cancel">Ends the wait within about a second.</param>
    /// <param name="options">What is seldom needed.</param>
    /// <exception cref="SqlSemTimeoutException">It took longer than timeout.</exception>
    /// <exception cref="SqlSemLostException">The row was taken out of the queue while it waited.</exception>
    /// <exception cref="SqlSemException">Anything else: an open transaction, no tables, no permission, …</exception>
    /// <exception cref="ArgumentException">The name, limit, weight, timeout or lease cannot be right.</exception>
    /// <exception cref="OperationCanceledException">cancel was cancelled.</exception>
    public static SqlSemGrant Acquire(
        DbConnection connection, string resource, int? limit = 1, TimeSpan? timeout = null, int weight = 1,
        string note = null, TimeSpan? lease = null, CancellationToken cancel = default(CancellationToken),
        SqlSemOptions options = null)
    {
        var request = new SqlSemRequest(resource, "write", limit, weight, note);
        return Demand(request, connection, timeout, lease, cancel, options);
    }

    /// <summary>As Acquire, but gives null when it is not had in time: by default, when it is not free now.</summary>
    public static SqlSemGrant TryAcquire(
        DbConnection connection, string resource, int? limit = 1, TimeSpan timeout = default(TimeSpan), int weight = 1,
        string note = null, TimeSpan? lease = null, CancellationToken cancel = default(CancellationToken),
        SqlSemOptions options = null)
    {
        return SqlSemSession.Acquire(
            new SqlSemRequest(resource, "write", limit, weight, note), connection, timeout, lease, cancel, options);
    }

    /// <summary>As one of any number of readers, while no writer is inside or ahead.</summary>
    public static SqlSemGrant Read(
        DbConnection connection, string resource, TimeSpan? timeout = null, string note = null, TimeSpan? lease = null,
        CancellationToken cancel = default(CancellationToken), SqlSemOptions options = null)
    {
        return Demand(new SqlSemRequest(resource, "read", 1, 1, note), connection, timeout, lease, cancel, options);
    }

    /// <summary>As the only one: no reader, no other writer.</summary>
    public static SqlSemGrant Write(
        DbConnection connection, string resource, TimeSpan? timeout = null, string note = null, TimeSpan? lease = null,
        CancellationToken cancel = default(CancellationToken), SqlSemOptions options = null)
    {
        return Demand(new SqlSemRequest(resource, "write", 1, 1, note), connection, timeout, lease, cancel, options);
    }

    /// <summary>Together with others of the same order, after every earlier entry of another order.</summary>
    public static SqlSemGrant Stage(
        DbConnection connection, string resource, int order, TimeSpan? timeout = null, string note = null,
        TimeSpan? lease = null, CancellationToken cancel = default(CancellationToken), SqlSemOptions options = null)
    {
        var access = "stage:" + order.ToString(CultureInfo.InvariantCulture);
        return Demand(new SqlSemRequest(resource, access, 1, 1, note), connection, timeout, lease, cancel, options);
    }

    private static SqlSemGrant Demand(
        SqlSemRequest request, DbConnection connection, TimeSpan? timeout, TimeSpan? lease, CancellationToken cancel,
        SqlSemOptions options)
    {
        var grant = SqlSemSession.Acquire(request, connection, timeout, lease, cancel, options);
        if (grant == null)
            throw new SqlSemTimeoutException(request.Resource, string.Format(
                CultureInfo.InvariantCulture,
                "'{0}' was not had within {1:0.###} s ({2}); see who is inside with: sqlsem ls {0}, or routine "
                + "entries; wait longer, or try again later",
                request.Resource, timeout.Value.TotalSeconds,
                request.Limit == null ? "the server's limit" : "limit " + request.Limit));
        return grant;
    }

    internal static void Tell(SqlSemGrant grant, SqlSemException trouble)
    {
        System.Diagnostics.Trace.TraceWarning("sqlsem: " + trouble.Message);
        var listeners = Trouble;
        if (listeners != null)
            listeners(grant, trouble);
    }
}

/// <summary>A lock that is held. Dispose it before its connection.</summary>
/// <remarks>
/// <para>A lock is bound to the session behind its connection: it is held while that lives, and nothing needs to be
/// renewed. With a lease it is held until <see cref="LeaseLeft"/> is over: renew it in time, a third of the lease being
/// a good interval.</para>
/// <para>A connection that is closed by then (a pool has it) is opened for the call and closed again.</para>
/// </remarks>
public sealed class SqlSemGrant : IDisposable
{
    private readonly SqlSemSession session;
    private readonly SqlSemCalls calls;
    private readonly SqlSemRequest request;
    private readonly long member;
    private readonly int generation;
    private readonly TimeSpan? lease;
    private readonly Stopwatch clock;
    private TimeSpan renewed;
    private bool ended;

    // What an earlier session held went with it.
    internal bool OfThisSession { get { return generation == session.Generation; } }

    internal SqlSemGrant(
        SqlSemSession session, SqlSemCalls calls, SqlSemRequest request, long member, string requestingId, long position,
        TimeSpan? lease, Stopwatch clock, TimeSpan renewed)
    {
        this.session = session;
        this.calls = calls;
        this.request = request;
        this.member = member;
        this.lease = lease;
        this.clock = clock;
        this.renewed = renewed;
        generation = session.Generation;
        RequestingId = requestingId;
        Position = position;
        Waited = clock.Elapsed;
    }

    /// <summary>The resource's name.</summary>
    public string Resource { get { return request.Resource; } }

    /// <summary>The number in the queue: queue_position in the table.</summary>
    public long Position { get; private set; }

    /// <summary>
    /// A number that grows with every grant of a mutex: store it with what you write, and refuse smaller ones.
    /// </summary>
    public long Fence { get { return Position; } }

    /// <summary>The time between asking and being let in.</summary>
    public TimeSpan Waited { get; private set; }

    /// <summary>Who has it, as the table tells: host, process, thread, and a random part.</summary>
    public string RequestingId { get; private set; }

    /// <summary>Whether it was given back, or found lost.</summary>
    public bool Ended { get { return ended; } }

    /// <summary>How long the lease runs at least, unless renewed; without a lease TimeSpan.MaxValue.</summary>
    public TimeSpan LeaseLeft
    {
        get { return lease == null ? TimeSpan.MaxValue : renewed + lease.Value - clock.Elapsed; }
    }

    internal SqlSemRequest Request { get { return request; } }

    internal string Schema { get { return calls.Schema; } }

    internal bool SessionBound { get { return lease == null; } }

    /// <summary>Asks the database, now, whether the lock is still held (and renews its lease). A sign of life: from then
    /// on the grace counts, should the session end.</summary>
    /// <param name="transaction">The connection's transaction, where one is open.</param>
    /// <exception cref="SqlSemLostException">It is not.</exception>
    /// <exception cref="SqlSemException">The database did not answer. It is still held while the lease runs, and, where
    /// the session has ended, until the grace is over since the last call that succeeded.</exception>
    public void Check(DbTransaction transaction = null)
    {
        Ping(calls, transaction);
    }

    /// <summary>As <see cref="Check"/>, which for a lease means: held for that long again.</summary>
    public void Renew()
    {
        Ping(calls, null);
    }

    /// <summary>Renews a lease through another connection to the same database.</summary>
    public void Renew(DbConnection other)
    {
        if (lease == null)
            throw new SqlSemException(Resource, "'" + Resource + "' is bound to the session of its connection, and "
                + "cannot be renewed through another; acquire it with a lease");
        Ping(calls.Through(other), null);
    }

    /// <summary>
    /// Checks inside a transaction of yours that the lock is held, and keeps it held until the transaction ends. So
    /// what that commits was done under the lock. The transaction may be of another connection to the same database.
    /// </summary>
    /// <exception cref="SqlSemLostException">It is not held: roll back.</exception>
    public void AssertHeld(DbTransaction transaction)
    {
        if (transaction == null)
            throw new ArgumentNullException("transaction", "AssertHeld needs the transaction that is to be guarded");
        if (transaction.Connection == null)
            throw new SqlSemException(
                Resource, "The transaction to assert '" + Resource + "' in has ended; begin another");
        if (ended)
            throw LostNow();
        bool there;
        try
        {
            there = calls.Through(transaction.Connection).Pin(transaction, Resource, Position, RequestingId);
        }
        catch (SqlSemException failure)
        {
            if (failure.Kind == SqlSemTrouble.Serialization)
                throw LostNow(failure);
            throw;
        }
        if (!there)
            throw LostNow();
    }

    /// <summary>
    /// Gives the lock back and tells what Dispose cannot: that it was lost before. Call it last in the block, where
    /// that matters; Dispose does nothing then.
    /// </summary>
    /// <exception cref="SqlSemLostException">It had been lost: others may have been inside meanwhile.</exception>
    /// <exception cref="SqlSemException">It could not be given back now; call again, or end the session.</exception>
    public void Release()
    {
        if (ended)
            return;
        var code = calls.Opened(() => calls.Release(Resource, Position, RequestingId));
        if (code == SqlSemCalls.InTransaction)
            throw new SqlSemException(Resource, "'" + Resource + "' cannot be given back inside an open transaction; "
                + "commit or roll back first") { Kind = SqlSemTrouble.OpenTransaction };
        var lost = code == 0 ? null : LostNow();
        End();
        if (lease != null)
            calls.Opened(() => { calls.Resign(member); return 0; });
        if (lost != null)
            throw lost;
    }

    /// <summary>
    /// Gives the lock back. Never throws, so that it cannot hide what your block throws: when the lock had been lost,
    /// or cannot be given back now, that goes to <see cref="SqlSem.Trouble"/> and to Trace. What could not be given
    /// back is tried again with the next Acquire on this connection, and goes with its session (or its lease).
    /// </summary>
    public void Dispose()
    {
        if (ended)
            return;
        try
        {
            Release();
        }
        catch (SqlSemException failure)
        {
            if (!ended && !session.Later.Contains(this))
                session.Later.Add(this);
            SqlSem.Tell(this, failure);
        }
    }

    private void Ping(SqlSemCalls through, DbTransaction transaction)
    {
        if (ended)
            throw LostNow();
        if (lease == null && generation != session.Generation)
            throw LostNow(null, "its connection was closed, or lost");
        var began = clock.Elapsed;
        bool there;
        try
        {
            there = through.Opened(() => through.Ping(member, Position, transaction));
        }
        catch (SqlSemException failure)
        {
            if (failure.Kind == SqlSemTrouble.SessionChanged || (lease == null && generation != session.Generation))
                throw LostNow(failure, "its session has ended");
            throw;
        }
        if (!there)
            throw LostNow();
        renewed = began;
    }

    private void End()
    {
        ended = true;
        session.Held.Remove(this);
    }

    private SqlSemLostException LostNow(Exception cause = null, string why = null)
    {
        var told = ended && why == null ? "it was given back, or found lost, before" : why;
        return new SqlSemLostException(Resource, string.Format(
            CultureInfo.InvariantCulture,
            "'{0}' at position {1} is not held any more ({2}); somebody else may be inside: stop, and roll back what "
            + "is not committed",
            Resource, Position, told ?? "taken away by an operator, or its session or lease has ended"), cause);
    }
}

// What is asked for, checked.
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
    Busy,            // somebody keeps a lock in an open transaction
    Unknown,         // the member was given up
    OpenTransaction,
    SessionChanged,  // under the member
    Stopped,         // a statement, by a timeout of the server's or an administrator
    Serialization,
}

// What this process remembers about a connection.
internal sealed class SqlSemSession
{
    private static readonly ConditionalWeakTable<DbConnection, SqlSemSession> Known =
        new ConditionalWeakTable<DbConnection, SqlSemSession>();

    internal readonly List<SqlSemGrant> Held = new List<SqlSemGrant>();
    internal readonly List<SqlSemGrant> Later = new List<SqlSemGrant>();  // to be given back
    private readonly List<Action> unclean = new List<Action>();  // failed calls to clean up after
    internal int Generation;  // changes with every session behind the connection
    private readonly Dictionary<string, long> members = new Dictionary<string, long>();  // by schema
    private SqlSemDialect dialect;

    private SqlSemSession(DbConnection connection)
    {
        // A pool resets a session between Close and Open, or gives another one: the beacon is gone either way.
        connection.StateChange += (sender, change) =>
        {
            if (change.CurrentState == ConnectionState.Closed || change.CurrentState == ConnectionState.Broken)
            {
                Generation++;
                members.Clear();
            }
        };
    }

    internal static SqlSemGrant Acquire(
        SqlSemRequest request, DbConnection connection, TimeSpan? timeout, TimeSpan? lease, CancellationToken cancel,
        SqlSemOptions options)
    {
        if (connection == null)
            throw new ArgumentNullException("connection");
        if (timeout == Timeout.InfiniteTimeSpan)
            timeout = null;
        if (timeout < TimeSpan.Zero)
            throw new ArgumentOutOfRangeException("timeout", "The timeout for '" + request.Resource + "' is negative");
        if (lease != null && (lease < TimeSpan.FromSeconds(1) || lease > TimeSpan.FromDays(20)))
            throw new ArgumentOutOfRangeException("lease", "A lease takes 1 second to 20 days, not " + lease);
        if (connection.State != ConnectionState.Open)
            throw new SqlSemException(
                request.Resource, "To acquire '" + request.Resource + "' the connection must be open");
        cancel.ThrowIfCancellationRequested();
        var session = Known.GetValue(connection, one => new SqlSemSession(one));
        return session.Take(request, connection, timeout, lease, cancel, options ?? new SqlSemOptions());
    }

    private SqlSemGrant Take(
        SqlSemRequest request, DbConnection connection, TimeSpan? timeout, TimeSpan? lease, CancellationToken cancel,
        SqlSemOptions options)
    {
        var clock = Stopwatch.StartNew();
        if (options.Dialect != SqlSemDialect.Automatic)
            dialect = options.Dialect;
        else if (dialect == SqlSemDialect.Automatic)
            dialect = SqlSemCalls.Recognise(connection, request.Resource);
        var calls = new SqlSemCalls(connection, dialect, options.Schema, request.Resource);
        GiveBackLate();
        RefuseToWaitForItself(request, calls, lease);

        var uid = Guid.NewGuid().ToString("N");
        var requestingId = string.Format(
            CultureInfo.InvariantCulture, "{0}:{1}:{2}:{3}", Environment.MachineName, SqlSemCalls.ProcessId,
            Thread.CurrentThread.ManagedThreadId, uid.Substring(0, 8));
        var owner = options.Owner ?? Thread.CurrentThread.Name;
        var renewed = clock.Elapsed;
        var member = 0L;
        var attempts = 0;
        try
        {
            SqlSemTicket ticket;
            while (true)
            {
                cancel.ThrowIfCancellationRequested();
                try
                {
                    if (lease == null)
                        member = Member(calls, options);
                    else if (member == 0)
                        member = calls.Enrol(options, lease);
                    else
                        calls.Ping(member, 0, null);
                    ticket = calls.Register(member, requestingId, owner, uid, request, timeout == TimeSpan.Zero);
                    break;
                }
                catch (SqlSemException failure)
                {
                    if (failure.Kind == SqlSemTrouble.Unknown && lease == null && ++attempts < 3)
                        members.Remove(calls.Schema);  // given up a moment ago: come back as a new one
                    else if (failure.Kind != SqlSemTrouble.Busy)
                        throw;
                    else if (timeout != null && clock.Elapsed >= timeout)
                        return GiveUp(calls, member, uid, lease);
                }
            }
            if (ticket == null)
                return GiveUp(calls, member, uid, lease);
            if (!ticket.Granted && !Wait(calls, ticket, member, timeout, lease, cancel, clock, ref renewed))
                return GiveUp(calls, member, uid, lease);
            var grant = new SqlSemGrant(
                this, calls, request, member, requestingId, ticket.Position, lease, clock, renewed);
            Held.Add(grant);
            return grant;
        }
        catch (Exception failure)
        {
            // A routine that refuses an open transaction has written nothing, and that transaction may be past writing.
            var refused = failure as SqlSemException;
            if (member != 0 && (refused == null || refused.Kind != SqlSemTrouble.OpenTransaction))
                Clean(calls, member, uid, "cancelled", lease);
            throw;
        }
    }

    private static bool Wait(
        SqlSemCalls calls, SqlSemTicket ticket, long member, TimeSpan? timeout, TimeSpan? lease,
        CancellationToken cancel, Stopwatch clock, ref TimeSpan renewed)
    {
        var longest = cancel.CanBeCanceled ? SqlSem.CancellableSlice : SqlSem.Slice;
        if (lease != null && TimeSpan.FromTicks(lease.Value.Ticks / 3) < longest)
            longest = TimeSpan.FromTicks(lease.Value.Ticks / 3);
        var pause = 40.0;
        while (true)
        {
            cancel.ThrowIfCancellationRequested();
            var began = clock.Elapsed;
            var left = longest;
            if (timeout != null && timeout.Value - began < left)
                left = timeout.Value - began;
            if (left <= TimeSpan.Zero)
                return false;
            if (lease != null)
            {
                if (!calls.Ping(member, ticket.Position, null))
                    throw Gone(calls, ticket);
                renewed = began;
            }
            int code;
            try
            {
                code = calls.Wait(ticket.Position, left);
            }
            catch (SqlSemException failure)
            {
                // The server allows statements less time than that. What it stopped has changed nothing.
                if (failure.Kind != SqlSemTrouble.Stopped || longest < TimeSpan.FromMilliseconds(100))
                    throw;
                longest = TimeSpan.FromTicks(longest.Ticks / 2);
                continue;
            }
            if (code == 0)
                return true;
            if (code == -2)
                throw Gone(calls, ticket);
            left -= clock.Elapsed - began;
            // Early: there was no lock to wait for, or (2) as many sessions wait on the server as may (max_server_waiters).
            if ((code == -1 || code == 2) && left > TimeSpan.Zero)
            {
                if (code == 2)
                    pause = Math.Max(pause, 250);
                var nap = TimeSpan.FromMilliseconds(Math.Min(pause, left.TotalMilliseconds));
                if (cancel.CanBeCanceled)
                    cancel.WaitHandle.WaitOne(nap);
                else
                    Thread.Sleep(nap);
                pause = Math.Min(pause * 2, code == 2 ? 1000 : 800);
            }
        }
    }

    private static SqlSemLostException Gone(SqlSemCalls calls, SqlSemTicket ticket)
    {
        return new SqlSemLostException(calls.Resource, string.Format(
            CultureInfo.InvariantCulture, "The request for '{0}' at position {1} was taken out of the queue while it "
            + "waited (by an operator, or as its session or lease had ended); ask again",
            calls.Resource, ticket.Position));
    }

    private SqlSemGrant GiveUp(SqlSemCalls calls, long member, string uid, TimeSpan? lease)
    {
        Clean(calls, member, uid, "timeout", lease);
        return null;
    }

    // Leaves no row behind. Does not throw: something else is on its way. What cannot be done now is done with the next
    // Acquire, and a row whose session, or lease, has ended goes by itself.
    private void Clean(SqlSemCalls calls, long member, string uid, string outcome, TimeSpan? lease)
    {
        for (var attempt = 1; ; attempt++)
        {
            try
            {
                calls.Cancel(member, uid, outcome);
                if (lease != null)
                    calls.Resign(member);
                return;
            }
            catch (SqlSemException failure)
            {
                if (attempt < 3 && calls.Connection.State == ConnectionState.Open
                    && failure.Kind != SqlSemTrouble.OpenTransaction)
                    continue;
                unclean.Add(() => Clean(calls, member, uid, outcome, lease));
                SqlSem.Tell(null, failure);
                return;
            }
        }
    }

    // The member that the session behind this connection is: remembered, and verified.
    private long Member(SqlSemCalls calls, SqlSemOptions options)
    {
        for (var attempt = 1; ; attempt++)
        {
            long member;
            if (!members.TryGetValue(calls.Schema, out member))
            {
                member = calls.Enrol(options, null);
                members[calls.Schema] = member;
            }
            try
            {
                if (calls.Verify(member))
                    return member;
            }
            catch (SqlSemException failure)
            {
                // SqlClient reconnects behind our back when an idle connection was lost. On PostgreSQL it is a pooler.
                if (failure.Kind != SqlSemTrouble.SessionChanged || calls.Dialect != SqlSemDialect.SqlServer
                    || attempt > 1)
                    throw;
                Generation++;
            }
            members.Remove(calls.Schema);
            if (attempt == 3)
                throw new SqlSemException(calls.Resource, "'" + calls.Resource + "' cannot be asked for: the database "
                    + "forgets this session at once (does a pooler change sessions under the connection?); connect "
                    + "past it, or use a lease");
        }
    }

    private void GiveBackLate()
    {
        var again = unclean.ToArray();
        unclean.Clear();
        foreach (var clean in again)
            clean();  // comes back when it fails again
        foreach (var grant in Later.ToArray())
        {
            Later.Remove(grant);
            grant.Dispose();  // the same
        }
    }

    private void RefuseToWaitForItself(SqlSemRequest request, SqlSemCalls calls, TimeSpan? lease)
    {
        var load = request.Weight;
        var limit = request.Limit ?? int.MaxValue;
        foreach (var held in Held)
        {
            if (lease == null && held.SessionBound && held.OfThisSession && held.Schema == calls.Schema && held.Resource == request.Resource
                && request.Conflicts(held.Request))
            {
                load += held.Request.Weight;
                limit = Math.Min(limit, held.Request.Limit ?? int.MaxValue);
            }
        }
        if (load > limit)
            throw new SqlSemException(request.Resource, "'" + request.Resource + "' is held on this connection "
                + "already, and would be waited for for ever; use what is held, or release it first");
    }
}

internal sealed class SqlSemTicket
{
    internal long Position;
    internal bool Granted;
}

// The routines of the database, one method each.
internal sealed class SqlSemCalls
{
    internal const int InTransaction = -9;
    internal static readonly int ProcessId = Process.GetCurrentProcess().Id;

    // A statement's time, beyond what it was asked to wait: a slow server is not dead.
    private static readonly TimeSpan Patience = TimeSpan.FromSeconds(30);

    // An integer that is not there; a null is a text that is not there.
    private static readonly object NoNumber = new object();

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

    // Does it on the connection, which is opened for it where it is closed.
    internal T Opened<T>(Func<T> call)
    {
        if (Connection.State == ConnectionState.Open)
            return call();
        try
        {
            Connection.Open();
        }
        catch (Exception failure)
        {
            if (!(failure is DbException || failure is InvalidOperationException))
                throw;
            throw new SqlSemException(Resource, "The connection of '" + Resource + "' is closed and cannot be opened ("
                + OneLine(failure.Message) + "); the lock goes with its session, or when its lease is over", failure);
        }
        try
        {
            return call();
        }
        finally
        {
            Connection.Close();
        }
    }

    internal long Enrol(SqlSemOptions options, TimeSpan? lease)
    {
        var program = options.Program ?? AppDomain.CurrentDomain.FriendlyName;
        if (program.Length > 255)
            program = program.Substring(0, 255);
        if (options.Grace < TimeSpan.Zero || options.Grace > TimeSpan.FromDays(20))
            throw new ArgumentOutOfRangeException(
                "options", "The grace must be between 0 and 20 days, not " + options.Grace);
        var rows = Run(
            TimeSpan.Zero,
            postgres
                ? prefix + "enrol(CAST({0} AS varchar), CAST({1} AS integer), CAST({2} AS varchar), "
                    + "CAST({3} AS integer), CAST({4} AS integer))"
                : prefix + "enrol {0}, {1}, {2}, {3}, {4}, @answer = 1",
            null, Environment.MachineName, ProcessId, program, Milliseconds(options.Grace),
            lease == null ? NoNumber : Milliseconds(lease.Value));
        return Number(rows, 0);
    }

    // Whether the member is known. On PostgreSQL this takes a transaction number, from which the next statement can
    // tell that it is in the same transaction, and refuse: a transaction that has only read is not seen otherwise.
    internal bool Verify(long member)
    {
        if (!postgres)
            return Ping(member, 0, null);
        var text = "SELECT CAST(known AS integer), txid_current() FROM " + Schema + ".ping(CAST({0} AS bigint))";
        return Number(Run(TimeSpan.Zero, text, null, member), 0) == 1;
    }

    // Whether the member is known and, where a position is given, has that row.
    internal bool Ping(long member, long position, DbTransaction transaction)
    {
        if (postgres)
        {
            var rows = Run(
                TimeSpan.Zero,
                "SELECT CAST(known AND (CAST({0} AS bigint) = 0 OR coalesce(CAST({1} AS bigint) = ANY (positions), "
                + "false)) AND NOT coalesce(CAST({2} AS bigint) = ANY (revoked), false) AS integer) FROM " + Schema
                + ".ping(CAST({3} AS bigint))",
                transaction, position, position, position, member);
            return Number(rows, 0) == 1;
        }
        foreach (var row in Run(TimeSpan.Zero, prefix + "ping {0}", transaction, member))
        {
            if (ToLong(row[0]) != 1)
                return false;
            if (position == 0 || (row[1] != DBNull.Value && ToLong(row[1]) == position))
                return position == 0 || ToLong(row[2]) == 0;
        }
        return false;
    }

    // Null when it was only tried, and not free.
    internal SqlSemTicket Register(
        long member, string requestingId, string owner, string uid, SqlSemRequest request, bool only)
    {
        // Both wait for the gate for a second, then tell that they are busy.
        var rows = Run(
            TimeSpan.Zero,
            postgres
                ? "SELECT r.queue_position, CAST(r.granted AS integer) "
                    + "FROM set_config('lock_timeout', '1000', true) AS s (value), LATERAL " + Schema + ".register("
                    + "CAST({0} AS bigint), CAST({1} AS varchar), CAST({2} AS varchar), CAST({3} AS varchar), "
                    + "CAST({4} AS integer) = 1, CAST({5} AS varchar), CAST({6} AS varchar), CAST({7} AS integer), "
                    + "CAST({8} AS integer), CASE WHEN s.value IS NOT NULL THEN CAST({9} AS varchar) END) AS r"
                : prefix + "register {0}, {1}, {2}, {3}, {4}, {5}, {6}, {7}, {8}, {9}, 1000, @answer = 1",
            null, member, requestingId, owner, uid, only ? 1 : 0, request.Resource, request.Access, request.Limit,
            request.Weight, request.Note);
        if (rows.Count == 0)
            throw NoAnswer("register");
        if (rows[0][0] == DBNull.Value)
            return null;
        return new SqlSemTicket { Position = ToLong(rows[0][0]), Granted = ToLong(rows[0][1]) == 1 };
    }

    internal int Wait(long position, TimeSpan slice)
    {
        return (int)Number(
            Run(slice,
                postgres
                    ? prefix + "wait(CAST({0} AS varchar), CAST({1} AS bigint), CAST({2} AS integer))"
                    : prefix + "wait {0}, {1}, {2}, 1",
                null, Resource, position, Milliseconds(slice)), 0);
    }

    internal int Release(string resource, long position, string requestingId)
    {
        if (postgres)  // a transaction that has only read is not seen otherwise; see Verify
            Run(TimeSpan.Zero, "SELECT txid_current()", null);
        return (int)Number(
            Run(TimeSpan.Zero,
                postgres
                    ? "SELECT CASE WHEN pg_current_xact_id_if_assigned() IS NULL THEN " + Schema
                        + ".release(CAST({0} AS varchar), CAST({1} AS bigint), CAST({2} AS varchar), 'released') "
                        + "ELSE -9 END"
                    : prefix + "release {0}, {1}, {2}, N'released', 1",
                null, resource, position, requestingId), 0);
    }

    internal void Cancel(long member, string uid, string outcome)
    {
        Run(TimeSpan.Zero,
            postgres
                ? prefix + "cancel(CAST({0} AS bigint), CAST({1} AS varchar), CAST({2} AS varchar))"
                : prefix + "cancel {0}, {1}, {2}, 1",
            null, member, uid, outcome);
    }

    internal void Resign(long member)
    {
        Run(TimeSpan.Zero, postgres ? prefix + "resign(CAST({0} AS bigint))" : prefix + "resign {0}", null, member);
    }

    internal bool Pin(DbTransaction transaction, string resource, long position, string requestingId)
    {
        return Number(
            Run(TimeSpan.Zero,
                postgres
                    ? "SELECT CAST(" + Schema + ".pin(CAST({0} AS varchar), CAST({1} AS bigint), CAST({2} AS varchar)) "
                        + "AS integer)"
                    : prefix + "pin {0}, {1}, {2}, 1",
                transaction, resource, position, requestingId), 0) == 1;
    }

    internal static SqlSemDialect Recognise(DbConnection connection, string resource)
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
                    told = Convert.ToString(command.ExecuteScalar(), CultureInfo.InvariantCulture);
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
        throw new SqlSemException(resource, "To acquire '" + resource + "' one must know whether this is SQL Server or "
            + "PostgreSQL, which the server does not tell (" + told + "); set SqlSemOptions.Dialect");
    }

    // -- statements ----------------------------------------------------------------------------------------------

    private List<object[]> Run(TimeSpan waits, string text, DbTransaction transaction, params object[] values)
    {
        try
        {
            using (var command = Connection.CreateCommand())
            {
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
                var rows = new List<object[]>();
                using (var reader = command.ExecuteReader())
                {
                    do
                    {
                        while (reader.Read())
                        {
                            var row = new object[reader.FieldCount];
                            reader.GetValues(row);
                            rows.Add(row);
                        }
                    }
                    while (reader.NextResult());  // an error may come after the rows
                }
                return rows;
            }
        }
        catch (Exception failure)
        {
            // Providers say InvalidOperationException for a connection in the wrong state, or in a transaction.
            if (!(failure is DbException || failure is InvalidOperationException))
                throw;
            throw Translate(failure);
        }
    }

    private static DbParameter Parameter(DbCommand command, string name, object value)
    {
        var parameter = command.CreateParameter();
        parameter.ParameterName = name;
        parameter.DbType =
            value is int || value == NoNumber ? DbType.Int32 : value is long ? DbType.Int64 : DbType.String;
        parameter.Value = value == null || value == NoNumber ? DBNull.Value : value;
        return parameter;
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

    private SqlSemException NoAnswer(string what)
    {
        return new SqlSemException(Resource, "'" + Resource + "': " + what + " gave no answer; is this the schema of "
            + "sqlsem's tables (" + Schema + "), up to date (sqlsem init)?");
    }

    // -- errors --------------------------------------------------------------------------------------------------

    private SqlSemException Translate(Exception failure)
    {
        var text = OneLine(failure.Message);
        var low = text.ToLowerInvariant();
        var state = Detail(failure, "SqlState") ?? "";
        int number;
        int.TryParse(Detail(failure, "Number") ?? Detail(failure, "NativeError") ?? "", out number);
        var kind = SqlSemTrouble.Other;
        string advice = "";
        if (state == "55P03" || number == 50002 || number == 1222 || low.Contains("sqlsem: busy"))
        {
            kind = SqlSemTrouble.Busy;
            advice = "; somebody keeps a lock in an open transaction";
        }
        else if (state == "P0002" || number == 50005 || low.Contains("is not there: it was given up")
            || low.Contains("not known here"))
        {
            kind = SqlSemTrouble.Unknown;
            advice = "; ask again";
        }
        else if (number == 50003 || low.Contains("changed sessions"))
        {
            kind = SqlSemTrouble.SessionChanged;
            advice = "; connect past the pool, or acquire with a lease";
        }
        else if (state == "25001" || number == 50001 || low.Contains("open transaction")
            || (failure is InvalidOperationException && low.Contains("transaction")))
        {
            kind = SqlSemTrouble.OpenTransaction;
            advice = "; commit or roll back first, then call it outside of any transaction (TransactionScope "
                + "included), at READ COMMITTED";
        }
        else if (state == "40001")
        {
            kind = SqlSemTrouble.Serialization;
            advice = "; roll back and try again";
        }
        else if (state == "40P01" || number == 1205)
            advice = "; chosen as the deadlock victim: ask again";
        else if (state == "57014")
        {
            kind = SqlSemTrouble.Stopped;
            advice = "; a timeout of the server's, or an administrator, stopped it: ask again";
        }
        else if (state == "42883" || state == "42P01" || state == "3F000" || number == 208 || number == 2812
            || low.Contains("does not exist") || low.Contains("could not find stored procedure"))
            advice = "; create or upgrade the sqlsem tables with: sqlsem init (and look whether schema " + Schema
                + " is right)";
        else if (state == "42501" || number == 229)
            advice = "; an administrator can add this login to role " + Schema + "_user";
        else if (Connection.State != ConnectionState.Open || state.StartsWith("08", StringComparison.Ordinal)
            || state.StartsWith("57P", StringComparison.Ordinal))
            advice = "; the connection is lost, and with its session goes what it held or waited for: connect and ask "
                + "again";
        return new SqlSemException(Resource, "'" + Resource + "': " + text + advice, failure) { Kind = kind };
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
