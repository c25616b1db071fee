------------------------------------- MODULE Blocked ------------------------------------
(***************************************************************************************)
(* Tasks with locks (sql/postgresql/blocked_tasks.sql): a blocked task waits in the queues of*)
(* its locks, by rows of a member of its work queue (the proxy member), whose lease    *)
(* only claims renew. The claim that starts the task grants all of its rows, and moves *)
(* them to the worker. Beside the tasks one process requests a lock for itself. The    *)
(* queues are of mutexes, and each step is a transaction, whose parts are in           *)
(* Queues.tla.                                                                         *)
(***************************************************************************************)
EXTENDS Integers, Sequences, FiniteSets

CONSTANTS
    Task, Worker, Resource,
    Wants,          \* of each task: its locks
    Wanted,         \* the lock that the process requests for itself
    MaxAttempts,
    Lease,          \* ticks without a claim after which the proxy member is over
    MaxFaults,      \* workers that are removed, rows that an operator revokes
    Mutant

Proxy == "proxy"
Process == "process"
Nobody == "nobody"

VARIABLES
    queue,           \* of each resource: its rows, in order: [who: a task, or the process; member, granted]
    status,         \* of each task: "pending", "running", "done"
    asked,          \* TRUE if it has rows in the queues
    attempt,
    runner,         \* the worker that claimed it
    age,            \* of the proxy member's lease; above Lease it may be removed
    works,          \* the attempts that workers believe to run: [worker, task, attempt]
    there,          \* TRUE while a worker is a member (not removed, not dead)
    alive,
    pc,             \* of the process: "idle", "waits", "holds", "done"
    faults

vars == <<queue, status, asked, attempt, runner, age, works, there, alive, pc, faults>>

Init ==
    /\ queue = [s \in Resource |-> <<>>]
    /\ status = [t \in Task |-> "pending"] /\ asked = [t \in Task |-> FALSE]
    /\ attempt = [t \in Task |-> 0] /\ runner = [t \in Task |-> Nobody]
    /\ age = 0 /\ works = {} /\ there = [w \in Worker |-> TRUE] /\ alive = [w \in Worker |-> TRUE]
    /\ pc = "idle" /\ faults = 0

Row(who, member) == [who |-> who, member |-> member, granted |-> FALSE]
Without(rows, Test(_)) == SelectSeq(rows, LAMBDA o : ~Test(o))
Rows(t) == {s \in Resource : \E n \in 1..Len(queue[s]) : queue[s][n].who = t}
First(t) == {s \in Resource : queue[s] # <<>> /\ queue[s][1].who = t}
Idle(w) == there[w] /\ alive[w] /\ \A t \in Task : runner[t] # w \/ status[t] # "running"
Busy(w) == {b \in works : b.worker = w} # {}

-----------------------------------------------------------------------------------------
(* claim_blocked: each claim renews the lease, and inserts the rows of all locks of a task at once. *)

AskForLocks(w, t) ==
    /\ Idle(w) /\ status[t] = "pending" /\ ~asked[t]
    /\ LET now == IF Mutant = "asked apart" THEN {s \in Wants[t] : s \notin Rows(t)} ELSE Wants[t]
       IN IF Mutant = "asked apart"
          THEN \E s \in now :
                /\ queue' = [queue EXCEPT ![s] = Append(@, Row(t, Proxy))]
                /\ asked' = [asked EXCEPT ![t] = now = {s}]
          ELSE /\ queue' = [s \in Resource |-> IF s \in now THEN Append(queue[s], Row(t, Proxy)) ELSE queue[s]]
               /\ asked' = [asked EXCEPT ![t] = TRUE]
    /\ age' = 0
    /\ UNCHANGED <<status, attempt, runner, works, there, alive, pc, faults>>

(* It is first in every queue. (A task that lost a row leaves the queues: LeaveQueues.) *)
Claim(w, t) ==
    /\ Idle(w) /\ ~Busy(w) /\ status[t] = "pending" /\ asked[t]
    /\ Wants[t] \subseteq First(t) \/ (Mutant = "rows uncounted" /\ Rows(t) \subseteq First(t))
    /\ queue' = [s \in Resource |-> IF s \in First(t) THEN [queue[s] EXCEPT ![1].member = w, ![1].granted = TRUE] ELSE queue[s]]
    /\ status' = [status EXCEPT ![t] = "running"] /\ asked' = [asked EXCEPT ![t] = FALSE]
    /\ attempt' = [attempt EXCEPT ![t] = @ + 1] /\ runner' = [runner EXCEPT ![t] = w]
    /\ age' = 0
    /\ UNCHANGED <<works, there, alive, pc, faults>>

(* Grant single locks as soon as possible: the code does not do this. *)
GrantOne(t) ==
    /\ Mutant = "granted apart" /\ status[t] = "pending" /\ asked[t]
    /\ \E s \in First(t) : ~queue[s][1].granted /\ queue' = [queue EXCEPT ![s][1].granted = TRUE]
    /\ UNCHANGED <<status, asked, attempt, runner, age, works, there, alive, pc, faults>>

LeaveQueues(w, t) ==
    /\ Idle(w) /\ status[t] = "pending" /\ asked[t] /\ Rows(t) # Wants[t] /\ Mutant # "rows uncounted"
    /\ queue' = [s \in Resource |-> Without(queue[s], LAMBDA o : o.who = t)]
    /\ asked' = [asked EXCEPT ![t] = FALSE] /\ age' = 0
    /\ UNCHANGED <<status, attempt, runner, works, there, alive, pc, faults>>

(* An idle worker claims: it gets nothing, and the lease is renewed. *)
ClaimNothing(w) ==
    /\ Idle(w) /\ age > 0
    /\ age' = 0
    /\ UNCHANGED <<queue, status, asked, attempt, runner, works, there, alive, pc, faults>>

Start(w, t) ==      \* the answer
    /\ alive[w] /\ there[w] /\ status[t] = "running" /\ runner[t] = w
    /\ [worker |-> w, task |-> t, attempt |-> attempt[t]] \notin works
    /\ works' = works \cup {[worker |-> w, task |-> t, attempt |-> attempt[t]]}
    /\ UNCHANGED <<queue, status, asked, attempt, runner, age, there, alive, pc, faults>>

-----------------------------------------------------------------------------------------
(* An attempt ends, with its rows, in one transaction, which must name it. *)

End(w, b, how) ==
    /\ alive[w] /\ b \in works /\ b.worker = w
    /\ works' = works \ {b}
    /\ IF status[b.task] = "running" /\ (Mutant = "ended by the dead" \/ (runner[b.task] = w /\ attempt[b.task] = b.attempt))
       THEN /\ status' = [status EXCEPT ![b.task] = IF how = "failed" /\ attempt[b.task] < MaxAttempts THEN "pending" ELSE "done"]
            /\ runner' = [runner EXCEPT ![b.task] = Nobody]
            /\ queue' = IF Mutant = "locks kept" /\ how = "failed" THEN queue
                       ELSE [s \in Resource |-> Without(queue[s], LAMBDA o : o.who = b.task)]
       ELSE UNCHANGED <<status, runner, queue>>
    /\ UNCHANGED <<asked, attempt, age, there, alive, pc, faults>>

-----------------------------------------------------------------------------------------
(* A worker is removed: dead, or out of reach. The latter works on, and knows that its locks are lost (Queue.tla). *)

Fault == faults < MaxFaults /\ faults' = faults + 1

Crash(w) ==
    /\ Fault /\ alive[w]
    /\ alive' = [alive EXCEPT ![w] = FALSE] /\ works' = {b \in works : b.worker # w}
    /\ UNCHANGED <<queue, status, asked, attempt, runner, age, there, pc>>

CutOff(w) ==
    /\ Fault /\ there[w]
    /\ there' = [there EXCEPT ![w] = FALSE]
    /\ UNCHANGED <<queue, status, asked, attempt, runner, age, works, alive, pc>>

(* Any process finds it dead: its rows are removed, and its task is pending again. *)
Reap(w) ==
    /\ ~alive[w] \/ ~there[w]
    /\ \E t \in Task : runner[t] = w
    /\ queue' = IF Mutant = "rows stay" THEN queue ELSE [s \in Resource |-> Without(queue[s], LAMBDA o : o.member = w)]
    /\ status' = [t \in Task |-> IF runner[t] = w THEN "pending" ELSE status[t]]
    /\ runner' = [t \in Task |-> IF runner[t] = w THEN Nobody ELSE runner[t]]
    /\ UNCHANGED <<asked, attempt, age, works, there, alive, pc, faults>>

Enrol(w) ==
    /\ alive[w] /\ ~there[w] /\ \A t \in Task : runner[t] # w
    /\ there' = [there EXCEPT ![w] = TRUE]
    /\ UNCHANGED <<queue, status, asked, attempt, runner, age, works, alive, pc, faults>>

(* No worker has claimed for long: the waiters behind a row of the proxy member remove it, with its rows. *)
LeaseOver ==
    /\ age > Lease /\ Mutant # "no lease" /\ \E t \in Task : status[t] = "pending" /\ Rows(t) # {}
    /\ queue' = [s \in Resource |-> Without(queue[s], LAMBDA o : o.member = Proxy)]
    /\ asked' = [t \in Task |-> FALSE]
    /\ UNCHANGED <<status, attempt, runner, age, works, there, alive, pc, faults>>

Revoke(t, s) ==   \* by an operator
    /\ Fault /\ status[t] = "pending" /\ s \in Rows(t)
    /\ queue' = [queue EXCEPT ![s] = Without(@, LAMBDA o : o.who = t)]
    /\ UNCHANGED <<status, asked, attempt, runner, age, works, there, alive, pc>>

Tick == \* (time passes between any two claims; the lease matters when no worker is free to claim)
    /\ age <= Lease /\ \A w \in Worker : ~Idle(w)
    /\ age' = age + 1
    /\ UNCHANGED <<queue, status, asked, attempt, runner, works, there, alive, pc, faults>>

-----------------------------------------------------------------------------------------
Ask ==
    /\ pc = "idle" /\ pc' = "waits"
    /\ queue' = [queue EXCEPT ![Wanted] = Append(@, Row(Process, Process))]
    /\ UNCHANGED <<status, asked, attempt, runner, age, works, there, alive, faults>>
GoIn ==
    /\ pc = "waits" /\ queue[Wanted][1].who = Process
    /\ queue' = [queue EXCEPT ![Wanted][1].granted = TRUE] /\ pc' = "holds"
    /\ UNCHANGED <<status, asked, attempt, runner, age, works, there, alive, faults>>
Release ==
    /\ pc = "holds" /\ pc' = "done"
    /\ queue' = [queue EXCEPT ![Wanted] = Without(@, LAMBDA o : o.who = Process)]
    /\ UNCHANGED <<status, asked, attempt, runner, age, works, there, alive, faults>>

Ends(w) == \E b \in works : End(w, b, "succeeded") \/ End(w, b, "failed")
Claims(w) == \E t \in Task : AskForLocks(w, t) \/ Claim(w, t) \/ LeaveQueues(w, t)
Next ==
    \/ \E w \in Worker : Claims(w) \/ ClaimNothing(w) \/ Ends(w) \/ Crash(w) \/ CutOff(w) \/ Reap(w) \/ Enrol(w)
                         \/ \E t \in Task : Start(w, t)
    \/ \E t \in Task : GrantOne(t) \/ \E s \in Resource : Revoke(t, s)
    \/ LeaseOver \/ Tick \/ Ask \/ GoIn \/ Release

Fairness ==
    /\ \A w \in Worker :
        /\ WF_vars(Claims(w)) /\ WF_vars(Ends(w)) /\ WF_vars(Reap(w)) /\ WF_vars(Enrol(w))
        /\ \A t \in Task : WF_vars(Start(w, t)) /\ SF_vars(Claim(w, t))
    /\ \A t \in Task : WF_vars(GrantOne(t))
    /\ WF_vars(LeaseOver) /\ WF_vars(Tick) /\ WF_vars(GoIn) /\ WF_vars(Release)
Spec == Init /\ [][Next]_vars /\ Fairness

-----------------------------------------------------------------------------------------
(* A blocked task holds nothing. *)
HoldsNothing == \A s \in Resource : \A n \in 1..Len(queue[s]) :
    queue[s][n].granted => queue[s][n].who = Process \/ status[queue[s][n].who] = "running"
(* G1 for tasks: a running task has all of its locks, granted to its worker; and each lock has one holder. *)
RunsWithAll == \A t \in Task : status[t] = "running" =>
    \A s \in Wants[t] : queue[s] # <<>> /\ queue[s][1].who = t /\ queue[s][1].granted /\ queue[s][1].member = runner[t]
OneEach == \A s \in Resource : \A n \in 2..Len(queue[s]) : ~queue[s][n].granted
(* An attempt is ended by its worker. *)
EndsItsOwn == [][\A t \in Task : status[t] = "running" /\ status'[t] = "done" =>
    [worker |-> runner[t], task |-> t, attempt |-> attempt[t]] \in works \ works']_vars
(* G3: the process is granted its lock, whether there are workers or not; and while a worker lives every task ends. *)
Served == (pc = "waits") ~> (pc = "holds")
Done == \A t \in Task : <>(status[t] = "done" \/ \A w \in Worker : ~alive[w])
=========================================================================================
