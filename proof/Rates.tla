-------------------------------------- MODULE Rates -------------------------------------
(***************************************************************************************)
(* Rates (sql/postgresql/rates.sql, engines/rate_windows.py): so much in so long. Who  *)
(* asks tries at once where nobody stands in line, and else stands in line, where the  *)
(* first alone takes. What was used is counted in the slot in which it was used, until *)
(* all of that slot is out of the window. All of it under the gate of the resource.    *)
(***************************************************************************************)
EXTENDS Integers, Sequences, FiniteSets

CONSTANTS
    Requester, MaxCost,
    Limit,          \* so much
    Window,         \* in so many ticks
    Slot,           \* ticks; the code has a hundredth of the window
    MaxTime,        \* so many ticks are looked at
    MaxTakes,       \* so often is something taken
    MaxFaults,      \* steps of the server's clock back
    Mutant

VARIABLES
    now,            \* the server's clock
    real,           \* the time that has passed, which nobody can read
    seen,           \* rate_window.seen_ms: the latest time that was written
    slots,          \* rate_slot: what was used in each
    gate,
    line,           \* who stands in the line of the rate: [requester, cost, number]
    call,           \* of each requester
    asked,          \* the last number
    taken,          \* what was taken: [at, cost, number], at: in real time
    faults

vars == <<now, real, seen, slots, gate, line, call, asked, taken, faults>>
None == "none"
Idle == [step |-> None]
Start == 2 * Window     \* so that no time is negative

RECURSIVE Sum(_, _)
Sum(S, f) == IF S = {} THEN 0 ELSE LET x == CHOOSE y \in S : TRUE IN f[x] + Sum(S \ {x}, f)
Most(S) == CHOOSE x \in S : \A y \in S : x >= y

Init ==
    /\ now = Start /\ real = Start /\ seen = Start
    /\ slots = [k \in {} |-> 0]
    /\ gate = None /\ line = <<>> /\ call = [r \in Requester |-> Idle] /\ asked = 0 /\ taken = {} /\ faults = 0

(* Which slots count: all whose end is not out of the window yet. *)
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

(* What a clock that went back has left in the future counts as used now. *)
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
    /\ \A n \in 1..Len(line) : line[n].requester # r
    /\ \E cost \in 1..MaxCost : call' = [call EXCEPT ![r] = [step |-> "gate", cost |-> cost]]
    /\ UNCHANGED <<now, real, seen, slots, gate, line, asked, taken, faults>>

TakeGate(r) ==
    /\ call[r].step = "gate"
    /\ gate = None \/ Mutant = "no gate"
    /\ gate' = r
    /\ call' = [call EXCEPT ![r].step = "look"]
    /\ UNCHANGED <<now, real, seen, slots, line, asked, taken, faults>>

InLine(r) == \E n \in 1..Len(line) : line[n].requester = r
First(r) == Mutant = "barging" \/ line = <<>> \/ line[1].requester = r

(* take_rate: reads the clock and the slots; who cannot take stands in line. *)
Look(r) ==
    /\ call[r].step = "look"
    /\ slots' = Righted(slots)
    /\ seen' = IF seen > now THEN now ELSE seen
    /\ LET mine == IF InLine(r) THEN CHOOSE n \in 1..Len(line) : line[n].requester = r ELSE 0
           number == IF mine > 0 THEN line[mine].number ELSE asked + 1
       IN IF First(r) /\ Room(slots', call[r].cost)
          THEN /\ call' = [call EXCEPT ![r] = [step |-> "take", cost |-> call[r].cost, at |-> now, real |-> real, number |-> number,
                                               used |-> slots']]
               /\ asked' = IF mine > 0 THEN asked ELSE asked + 1
               /\ UNCHANGED <<line, gate>>
          ELSE /\ line' = IF mine > 0 THEN line ELSE Append(line, [requester |-> r, cost |-> call[r].cost, number |-> number])
               /\ asked' = IF mine > 0 THEN asked ELSE asked + 1
               /\ call' = [call EXCEPT ![r] = Idle] /\ gate' = None
    /\ UNCHANGED <<now, real, taken, faults>>

(* Writes what it has reckoned, its row goes, and that is committed. *)
Take(r) ==
    /\ call[r].step = "take"
    /\ LET k == call[r].at \div Slot
           was == call[r].used
       IN slots' = [j \in DOMAIN was \cup {k} |-> (IF j \in DOMAIN was THEN was[j] ELSE 0) + IF j = k THEN call[r].cost ELSE 0]
    /\ seen' = Most({seen, call[r].at})
    /\ taken' = taken \cup {[at |-> call[r].real, cost |-> call[r].cost, number |-> call[r].number]}
    /\ line' = SelectSeq(line, LAMBDA one : one.requester # r)
    /\ gate' = None
    /\ call' = [call EXCEPT ![r] = Idle]
    /\ UNCHANGED <<now, real, asked, faults>>

(* Whose turn it may be looks again. *)
Again(r) ==
    /\ call[r] = Idle /\ InLine(r) /\ First(r)
    /\ LET n == CHOOSE m \in 1..Len(line) : line[m].requester = r
       IN call' = [call EXCEPT ![r] = [step |-> "gate", cost |-> line[n].cost]]
    /\ UNCHANGED <<now, real, seen, slots, gate, line, asked, taken, faults>>

(* It gives up, or its row goes with a dead process: Lines.tla. *)
Leave(r) ==
    /\ call[r] = Idle /\ InLine(r)
    /\ line' = SelectSeq(line, LAMBDA one : one.requester # r)
    /\ UNCHANGED <<now, real, seen, slots, gate, call, asked, taken, faults>>

Tick ==
    /\ real < Start + MaxTime
    /\ now' = now + 1 /\ real' = real + 1
    /\ UNCHANGED <<seen, slots, gate, line, call, asked, taken, faults>>

ClockBack ==
    /\ faults < MaxFaults /\ faults' = faults + 1
    /\ \E back \in 1..Window : now' = now - back
    /\ UNCHANGED <<real, seen, slots, gate, line, call, asked, taken>>

Next == Tick \/ ClockBack \/ \E r \in Requester : Ask(r) \/ TakeGate(r) \/ Look(r) \/ Take(r) \/ Again(r) \/ Leave(r)

-----------------------------------------------------------------------------------------
(* In no stretch of time as long as a window more is taken than the limit. *)
NeverMore ==
    \A t \in taken :
        LET after == {o \in taken : o.at >= t.at /\ o.at < t.at + Window}
        IN Sum(after, [o \in after |-> o.cost]) <= Limit

(* Who has taken has overtaken nobody that stands in line. *)
InTurn == \A t \in taken : \A n \in 1..Len(line) : line[n].number > t.number

(* Nobody waits for longer than for a slot too much: what is out of the window and a slot does not count. *)
Prompt == faults = 0 =>
    LET lately == {o \in taken : o.at > real - Window - Slot}
    IN Used(slots) <= Sum(lately, [o \in lately |-> o.cost])
=========================================================================================
