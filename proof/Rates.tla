-------------------------------------- MODULE Rates -------------------------------------
(***************************************************************************************)
(* Rates (sql/postgresql/rates.sql, engines/rate_windows.py): so much in so long. A    *)
(* request tries at once if no request waits, and otherwise joins the queue, in which  *)
(* only the first takes. The use is counted in its slot until all of that slot is out  *)
(* of the window. All of it under the gate of the resource.                            *)
(***************************************************************************************)
EXTENDS Integers, Sequences, FiniteSets

CONSTANTS
    Requester, MaxCost,
    Limit,          \* so much
    Window,         \* in so many ticks
    Slot,           \* ticks; the code has a hundredth of the window
    MaxTime,        \* the last tick
    MaxTakes,       \* the number of takes
    MaxFaults,      \* steps of the server's clock back
    Mutant

VARIABLES
    now,            \* the server's clock
    real,           \* the time that has passed, which no process can read
    seen,           \* rate_window.seen_ms: the latest time that was written
    slots,          \* rate_slot: the use of each
    gate,
    queue,           \* the queue of the rate: [requester, cost, number]
    call,           \* of each requester
    asked,          \* the last number
    taken,          \* the takes: [at, cost, number], at: in real time
    faults

vars == <<now, real, seen, slots, gate, queue, call, asked, taken, faults>>
None == "none"
Idle == [step |-> None]
Start == 2 * Window     \* so that no time is negative

RECURSIVE Sum(_, _)
Sum(S, f) == IF S = {} THEN 0 ELSE LET x == CHOOSE y \in S : TRUE IN f[x] + Sum(S \ {x}, f)
Most(S) == CHOOSE x \in S : \A y \in S : x >= y

Init ==
    /\ now = Start /\ real = Start /\ seen = Start
    /\ slots = [k \in {} |-> 0]
    /\ gate = None /\ queue = <<>> /\ call = [r \in Requester |-> Idle] /\ asked = 0 /\ taken = {} /\ faults = 0

(* The slots that count: all whose end is not out of the window yet. *)
Counts(k) ==
    CASE Mutant = "slot ends early" -> k > (now - Window) \div Slot
      [] Mutant = "fixed windows" -> k * Slot >= (now \div Window) * Window
      [] OTHER -> k >= (now - Window) \div Slot
Used(s) == Sum({k \in DOMAIN s : Counts(k)}, s)

(* A bucket that leaks evenly, and is as large as the limit, would do for the mutant. *)
Leaked == LET level(t) == t.cost * Window - (real - t.at) * Limit
              left == {t \in taken : level(t) > 0}
          IN Sum(left, [t \in left |-> level(t)])
Room(s, cost) == IF Mutant = "bucket" THEN Leaked + cost * Window <= Limit * Window ELSE Used(s) + cost <= Limit

(* Use that lies in the future after the clock went back counts as used now. *)
Righted(s) ==
    LET here == now \div Slot
        ahead == {k \in DOMAIN s : k > here}
        keep == DOMAIN s \ ahead
        more == IF Mutant = "future forgotten" THEN 0 ELSE Sum(ahead, s)
    IN IF seen <= now \/ ahead = {} THEN s
       ELSE [k \in keep \cup {here} |-> (IF k \in keep THEN s[k] ELSE 0) + IF k = here THEN more ELSE 0]

-----------------------------------------------------------------------------------------
Ask(r) ==
    /\ call[r] = Idle /\ asked < MaxTakes
    /\ \A n \in 1..Len(queue) : queue[n].requester # r
    /\ \E cost \in 1..MaxCost : call' = [call EXCEPT ![r] = [step |-> "gate", cost |-> cost]]
    /\ UNCHANGED <<now, real, seen, slots, gate, queue, asked, taken, faults>>

TakeGate(r) ==
    /\ call[r].step = "gate"
    /\ gate = None \/ Mutant = "no gate"
    /\ gate' = r
    /\ call' = [call EXCEPT ![r].step = "look"]
    /\ UNCHANGED <<now, real, seen, slots, queue, asked, taken, faults>>

InLine(r) == \E n \in 1..Len(queue) : queue[n].requester = r
First(r) == Mutant = "barging" \/ queue = <<>> \/ queue[1].requester = r

(* take_rate: read the clock and the slots; a request that cannot take joins the queue. *)
Read(r) ==
    /\ call[r].step = "look"
    /\ slots' = Righted(slots)
    /\ seen' = IF seen > now THEN now ELSE seen
    /\ LET mine == IF InLine(r) THEN CHOOSE n \in 1..Len(queue) : queue[n].requester = r ELSE 0
           number == IF mine > 0 THEN queue[mine].number ELSE asked + 1
       IN IF First(r) /\ Room(slots', call[r].cost)
          THEN /\ call' = [call EXCEPT ![r] = [step |-> "take", cost |-> call[r].cost, at |-> now, real |-> real, number |-> number,
                                               used |-> slots']]
               /\ asked' = IF mine > 0 THEN asked ELSE asked + 1
               /\ UNCHANGED <<queue, gate>>
          ELSE /\ queue' = IF mine > 0 THEN queue ELSE Append(queue, [requester |-> r, cost |-> call[r].cost, number |-> number])
               /\ asked' = IF mine > 0 THEN asked ELSE asked + 1
               /\ call' = [call EXCEPT ![r] = Idle] /\ gate' = None
    /\ UNCHANGED <<now, real, taken, faults>>

(* Write the computed slots and remove the row, in one commit. *)
Take(r) ==
    /\ call[r].step = "take"
    /\ LET k == call[r].at \div Slot
           was == call[r].used
       IN slots' = [j \in DOMAIN was \cup {k} |-> (IF j \in DOMAIN was THEN was[j] ELSE 0) + IF j = k THEN call[r].cost ELSE 0]
    /\ seen' = Most({seen, call[r].at})
    /\ taken' = taken \cup {[at |-> call[r].real, cost |-> call[r].cost, number |-> call[r].number]}
    /\ queue' = SelectSeq(queue, LAMBDA one : one.requester # r)
    /\ gate' = None
    /\ call' = [call EXCEPT ![r] = Idle]
    /\ UNCHANGED <<now, real, asked, faults>>

(* The first of the queue tries again. *)
Again(r) ==
    /\ call[r] = Idle /\ InLine(r) /\ First(r)
    /\ LET n == CHOOSE m \in 1..Len(queue) : queue[m].requester = r
       IN call' = [call EXCEPT ![r] = [step |-> "gate", cost |-> queue[n].cost]]
    /\ UNCHANGED <<now, real, seen, slots, gate, queue, asked, taken, faults>>

(* It gives up, or its row is removed with a dead process: Queues.tla. *)
Leave(r) ==
    /\ call[r] = Idle /\ InLine(r)
    /\ queue' = SelectSeq(queue, LAMBDA one : one.requester # r)
    /\ UNCHANGED <<now, real, seen, slots, gate, call, asked, taken, faults>>

Tick ==
    /\ real < Start + MaxTime
    /\ now' = now + 1 /\ real' = real + 1
    /\ UNCHANGED <<seen, slots, gate, queue, call, asked, taken, faults>>

ClockBack ==
    /\ faults < MaxFaults /\ faults' = faults + 1
    /\ \E back \in 1..Window : now' = now - back
    /\ UNCHANGED <<real, seen, slots, gate, queue, call, asked, taken>>

Next == Tick \/ ClockBack \/ \E r \in Requester : Ask(r) \/ TakeGate(r) \/ Read(r) \/ Take(r) \/ Again(r) \/ Leave(r)

-----------------------------------------------------------------------------------------
(* No interval as long as the window has more takes than the limit. *)
NeverMore ==
    \A t \in taken :
        LET after == {o \in taken : o.at >= t.at /\ o.at < t.at + Window}
        IN Sum(after, [o \in after |-> o.cost]) <= Limit

(* A take has overtaken no request in the queue. *)
InTurn == \A t \in taken : \A n \in 1..Len(queue) : queue[n].number > t.number

(* No request waits longer than necessary by more than a slot: use older than the window and a slot does not count. *)
Prompt == faults = 0 =>
    LET lately == {o \in taken : o.at > real - Window - Slot}
    IN Used(slots) <= Sum(lately, [o \in lately |-> o.cost])
=========================================================================================
