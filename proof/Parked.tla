-------------------------------------- MODULE Parked ------------------------------------
(***************************************************************************************)
(* Tasks with locks (sql/postgresql/parked.sql): a parked task stands in the lines of  *)
(* its locks by rows of the parking member of its queue, which lives by a lease that   *)
(* claims alone renew. The claim that starts it grants all of its rows, and makes them *)
(* the worker's. Beside the tasks one process wants a lock for itself. Lines are of    *)
(* mutexes, each step is a transaction: what happens inside of one is Lines.tla's.     *)
(***************************************************************************************)
EXTENDS Integers, Sequences, FiniteSets

CONSTANTS
    Task, Worker, Resource,
    Wants,          \* of each task: its locks
    Wanted,         \* the lock that the process wants for itself
    MaxAttempts,
    Lease,          \* ticks without a claim after which the parking member is over
    MaxFaults,      \* workers that are given up, rows that an operator takes away
    Mutant

Parking == "parking"
Process == "process"
Nobody == "nobody"

VARIABLES
    line,           \* of each resource: its rows, in order: [who: a task, or the process; member, granted]
    status,         \* of each task: "pending", "running", "done"
    asked,          \* whether it stands in the lines (locks_left IS NOT NULL)
    attempt,
    runner,         \* whose claim it is
    age,            \* of the parking member's lease; above Lease it may be removed
    works,          \* what workers believe to have: [worker, task, attempt]
    there,          \* whether a worker is a member (not given up, not dead)
    alive,
    pc,             \* of the process: "idle", "waits", "holds", "done"
    faults

vars == <<line, status, asked, attempt, runner, age, works, there, alive, pc, faults>>

Init ==
    /\ line = [s \in Resource |-> <<>>]
    /\ status = [t \in Task |-> "pending"] /\ asked = [t \in Task |-> FALSE]
    /\ attempt = [t \in Task |-> 0] /\ runner = [t \in Task |-> Nobody]
    /\ age = 0 /\ works = {} /\ there = [w \in Worker |-> TRUE] /\ alive = [w \in Worker |-> TRUE]
    /\ pc = "idle" /\ faults = 0

Row(who, member) == [who |-> who, member |-> member, granted |-> FALSE]
Without(rows, Test(_)) == SelectSeq(rows, LAMBDA o : ~Test(o))
Rows(t) == {s \in Resource : \E n \in 1..Len(line[s]) : line[s][n].who = t}
First(t) == {s \in Resource : line[s] # <<>> /\ line[s][1].who = t}
Idle(w) == there[w] /\ alive[w] /\ \A t \in Task : runner[t] # w \/ status[t] # "running"
Busy(w) == {b \in works : b.worker = w} # {}

-----------------------------------------------------------------------------------------
(* claim_parked: each claim renews the lease. Who claims puts rows into the lines, of all locks at once. *)

AskForLocks(w, t) ==
    /\ Idle(w) /\ status[t] = "pending" /\ ~asked[t]
    /\ LET now == IF Mutant = "asked apart" THEN {s \in Wants[t] : s \notin Rows(t)} ELSE Wants[t]
       IN IF Mutant = "asked apart"
          THEN \E s \in now :
                /\ line' = [line EXCEPT ![s] = Append(@, Row(t, Parking))]
                /\ asked' = [asked EXCEPT ![t] = now = {s}]
          ELSE /\ line' = [s \in Resource |-> IF s \in now THEN Append(line[s], Row(t, Parking)) ELSE line[s]]
               /\ asked' = [asked EXCEPT ![t] = TRUE]
    /\ age' = 0
    /\ UNCHANGED <<status, attempt, runner, works, there, alive, pc, faults>>

(* Its turn has come in every line. (Those that lost a row leave the lines: LeaveLines.) *)
Claim(w, t) ==
    /\ Idle(w) /\ ~Busy(w) /\ status[t] = "pending" /\ asked[t]
    /\ Wants[t] \subseteq First(t) \/ (Mutant = "rows uncounted" /\ Rows(t) \subseteq First(t))
    /\ line' = [s \in Resource |-> IF s \in First(t) THEN [line[s] EXCEPT ![1].member = w, ![1].granted = TRUE] ELSE line[s]]
    /\ status' = [status EXCEPT ![t] = "running"] /\ asked' = [asked EXCEPT ![t] = FALSE]
    /\ attempt' = [attempt EXCEPT ![t] = @ + 1] /\ runner' = [runner EXCEPT ![t] = w]
    /\ age' = 0
    /\ UNCHANGED <<works, there, alive, pc, faults>>

(* To grant what can be granted: what the code does not do. *)
GrantOne(t) ==
    /\ Mutant = "granted apart" /\ status[t] = "pending" /\ asked[t]
    /\ \E s \in First(t) : ~line[s][1].granted /\ line' = [line EXCEPT ![s][1].granted = TRUE]
    /\ UNCHANGED <<status, asked, attempt, runner, age, works, there, alive, pc, faults>>

LeaveLines(w, t) ==
    /\ Idle(w) /\ status[t] = "pending" /\ asked[t] /\ Rows(t) # Wants[t] /\ Mutant # "rows uncounted"
    /\ line' = [s \in Resource |-> Without(line[s], LAMBDA o : o.who = t)]
    /\ asked' = [asked EXCEPT ![t] = FALSE] /\ age' = 0
    /\ UNCHANGED <<status, attempt, runner, works, there, alive, pc, faults>>

(* A worker that has nothing to do claims: it gets nothing, and the lease goes on. *)
ClaimNothing(w) ==
    /\ Idle(w) /\ age > 0
    /\ age' = 0
    /\ UNCHANGED <<line, status, asked, attempt, runner, works, there, alive, pc, faults>>

Start(w, t) ==      \* the answer
    /\ alive[w] /\ there[w] /\ status[t] = "running" /\ runner[t] = w
    /\ [worker |-> w, task |-> t, attempt |-> attempt[t]] \notin works
    /\ works' = works \cup {[worker |-> w, task |-> t, attempt |-> attempt[t]]}
    /\ UNCHANGED <<line, status, asked, attempt, runner, age, there, alive, pc, faults>>

-----------------------------------------------------------------------------------------
(* An attempt ends, with its rows, in one transaction. Who ends it must name it. *)

End(w, b, how) ==
    /\ alive[w] /\ b \in works /\ b.worker = w
    /\ works' = works \ {b}
    /\ IF status[b.task] = "running" /\ (Mutant = "ended by the dead" \/ (runner[b.task] = w /\ attempt[b.task] = b.attempt))
       THEN /\ status' = [status EXCEPT ![b.task] = IF how = "failed" /\ attempt[b.task] < MaxAttempts THEN "pending" ELSE "done"]
            /\ runner' = [runner EXCEPT ![b.task] = Nobody]
            /\ line' = IF Mutant = "locks kept" /\ how = "failed" THEN line
                       ELSE [s \in Resource |-> Without(line[s], LAMBDA o : o.who = b.task)]
       ELSE UNCHANGED <<status, runner, line>>
    /\ UNCHANGED <<asked, attempt, age, there, alive, pc, faults>>

-----------------------------------------------------------------------------------------
(* A worker is given up: dead, or out of reach; then it works on, and its locks it knows to be lost (Queue.tla). *)

Fault == faults < MaxFaults /\ faults' = faults + 1

Crash(w) ==
    /\ Fault /\ alive[w]
    /\ alive' = [alive EXCEPT ![w] = FALSE] /\ works' = {b \in works : b.worker # w}
    /\ UNCHANGED <<line, status, asked, attempt, runner, age, there, pc>>

CutOff(w) ==
    /\ Fault /\ there[w]
    /\ there' = [there EXCEPT ![w] = FALSE]
    /\ UNCHANGED <<line, status, asked, attempt, runner, age, works, alive, pc>>

(* Anybody finds it: its rows go, and its task is pending again. *)
Reap(w) ==
    /\ ~alive[w] \/ ~there[w]
    /\ \E t \in Task : runner[t] = w
    /\ line' = IF Mutant = "rows stay" THEN line ELSE [s \in Resource |-> Without(line[s], LAMBDA o : o.member = w)]
    /\ status' = [t \in Task |-> IF runner[t] = w THEN "pending" ELSE status[t]]
    /\ runner' = [t \in Task |-> IF runner[t] = w THEN Nobody ELSE runner[t]]
    /\ UNCHANGED <<asked, attempt, age, works, there, alive, pc, faults>>

Enrol(w) ==
    /\ alive[w] /\ ~there[w] /\ \A t \in Task : runner[t] # w
    /\ there' = [there EXCEPT ![w] = TRUE]
    /\ UNCHANGED <<line, status, asked, attempt, runner, age, works, alive, pc, faults>>

(* Nobody has claimed for long: those who wait behind a row of the parking member remove it, with its rows. *)
LeaseOver ==
    /\ age > Lease /\ Mutant # "no lease" /\ \E t \in Task : status[t] = "pending" /\ Rows(t) # {}
    /\ line' = [s \in Resource |-> Without(line[s], LAMBDA o : o.member = Parking)]
    /\ asked' = [t \in Task |-> FALSE]
    /\ UNCHANGED <<status, attempt, runner, age, works, there, alive, pc, faults>>

TakeAway(t, s) ==   \* an operator
    /\ Fault /\ status[t] = "pending" /\ s \in Rows(t)
    /\ line' = [line EXCEPT ![s] = Without(@, LAMBDA o : o.who = t)]
    /\ UNCHANGED <<status, asked, attempt, runner, age, works, there, alive, pc>>

Tick == \* (time passes between any two claims; the lease matters when no worker is free to claim)
    /\ age <= Lease /\ \A w \in Worker : ~Idle(w)
    /\ age' = age + 1
    /\ UNCHANGED <<line, status, asked, attempt, runner, works, there, alive, pc, faults>>

-----------------------------------------------------------------------------------------
Ask ==
    /\ pc = "idle" /\ pc' = "waits"
    /\ line' = [line EXCEPT ![Wanted] = Append(@, Row(Process, Process))]
    /\ UNCHANGED <<status, asked, attempt, runner, age, works, there, alive, faults>>
GoIn ==
    /\ pc = "waits" /\ line[Wanted][1].who = Process
    /\ line' = [line EXCEPT ![Wanted][1].granted = TRUE] /\ pc' = "holds"
    /\ UNCHANGED <<status, asked, attempt, runner, age, works, there, alive, faults>>
Release ==
    /\ pc = "holds" /\ pc' = "done"
    /\ line' = [line EXCEPT ![Wanted] = Without(@, LAMBDA o : o.who = Process)]
    /\ UNCHANGED <<status, asked, attempt, runner, age, works, there, alive, faults>>

Ends(w) == \E b \in works : End(w, b, "succeeded") \/ End(w, b, "failed")
Claims(w) == \E t \in Task : AskForLocks(w, t) \/ Claim(w, t) \/ LeaveLines(w, t)
Next ==
    \/ \E w \in Worker : Claims(w) \/ ClaimNothing(w) \/ Ends(w) \/ Crash(w) \/ CutOff(w) \/ Reap(w) \/ Enrol(w)
                         \/ \E t \in Task : Start(w, t)
    \/ \E t \in Task : GrantOne(t) \/ \E s \in Resource : TakeAway(t, s)
    \/ LeaseOver \/ Tick \/ Ask \/ GoIn \/ Release

Fairness ==
    /\ \A w \in Worker :
        /\ WF_vars(Claims(w)) /\ WF_vars(Ends(w)) /\ WF_vars(Reap(w)) /\ WF_vars(Enrol(w))
        /\ \A t \in Task : WF_vars(Start(w, t)) /\ SF_vars(Claim(w, t))
    /\ \A t \in Task : WF_vars(GrantOne(t))
    /\ WF_vars(LeaseOver) /\ WF_vars(Tick) /\ WF_vars(GoIn) /\ WF_vars(Release)
Spec == Init /\ [][Next]_vars /\ Fairness

-----------------------------------------------------------------------------------------
(* A parked task holds nothing. *)
HoldsNothing == \A s \in Resource : \A n \in 1..Len(line[s]) :
    line[s][n].granted => line[s][n].who = Process \/ status[line[s][n].who] = "running"
(* G1 for tasks: one that runs has all of its locks, granted, of its worker; and each lock is one's. *)
RunsWithAll == \A t \in Task : status[t] = "running" =>
    \A s \in Wants[t] : line[s] # <<>> /\ line[s][1].who = t /\ line[s][1].granted /\ line[s][1].member = runner[t]
OneEach == \A s \in Resource : \A n \in 2..Len(line[s]) : ~line[s][n].granted
(* An attempt is ended by who made it. *)
EndsItsOwn == [][\A t \in Task : status[t] = "running" /\ status'[t] = "done" =>
    [worker |-> runner[t], task |-> t, attempt |-> attempt[t]] \in works \ works']_vars
(* G3: the process goes in, whether there are workers or not; and while one lives every task ends. *)
Served == (pc = "waits") ~> (pc = "holds")
Done == \A t \in Task : <>(status[t] = "done" \/ \A w \in Worker : ~alive[w])
=========================================================================================
