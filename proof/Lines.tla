-------------------------------------- MODULE Lines -------------------------------------
(***************************************************************************************)
(* The lines of several resources, without time: registering under the gate, looking   *)
(* and granting in steps of their own, readers and limits, upgrades and downgrades,    *)
(* operators and the dead. Who may be taken for dead, and that a loser knows it first, *)
(* is Queue.tla's matter: here a row is only removed when nobody works under it.       *)
(* Names are those of the code: sql/postgresql/routines.sql and conversions.sql.       *)
(***************************************************************************************)
EXTENDS Rule

CONSTANTS
    Requester,
    Request,        \* what may be asked for: [resource, access, limit, weight]
    MaxRequests,    \* how many requests each makes
    MaxFaults       \* crashes, and rows that operators take away

Resource == {q.resource : q \in Request}
None == "none"
Idle == [step |-> None]

VARIABLES
    rows,           \* what is committed: [requester, number, ask, granted, revoked]
    gate,           \* of each resource: who has it
    given,          \* of each resource: the last queue_position
    call,           \* of each requester: what its session does on the server
    believes,       \* under what somebody works: [requester, number, ask]
    alive,
    requests,       \* how many each has begun
    faults

vars == <<rows, gate, given, call, believes, alive, requests, faults>>

Of(s) == {o \in rows : o.ask.resource = s}
Mine(r) == {o \in rows : o.requester = r}
Same(o, p) == o.ask.resource = p.ask.resource /\ o.number = p.number
Works(r) == {b \in believes : b.requester = r}
Believed(o) == \E b \in believes : Same(b, o)
Ready(r) == alive[r] /\ call[r] = Idle
AsHeld(o) == [o EXCEPT !.ask.access = IF @ = "upgrade" THEN "read" ELSE @]

Init ==
    /\ rows = {} /\ gate = [s \in Resource |-> None] /\ given = [s \in Resource |-> 0]
    /\ call = [r \in Requester |-> Idle]
    /\ believes = {} /\ alive = [r \in Requester |-> TRUE]
    /\ requests = [r \in Requester |-> 0] /\ faults = 0

-----------------------------------------------------------------------------------------
(* register *)

Register(r, q) ==
    /\ Ready(r)
    /\ call' = [call EXCEPT ![r] = [step |-> "gate", ask |-> q]]
    /\ requests' = [requests EXCEPT ![r] = @ + 1]
    /\ UNCHANGED <<rows, gate, given, believes, alive, faults>>

TakeGate(r) ==
    /\ call[r].step = "gate"
    /\ gate[call[r].ask.resource] = None \/ Mutant = "no gate"
    /\ gate' = [gate EXCEPT ![call[r].ask.resource] = r]
    /\ call' = [call EXCEPT ![r].step = "place"]
    /\ UNCHANGED <<rows, given, believes, alive, requests, faults>>

(* Inserts, and grants at once where the rule allows it (who inserts a row by hand looks later). *)
Place(r, number, granted) ==
    /\ call[r].step = "place"
    /\ number > given[call[r].ask.resource]
    /\ granted => Fits(rows, call[r].ask, number)
    /\ given' = [given EXCEPT ![call[r].ask.resource] = number]
    /\ call' = [call EXCEPT ![r] = [step |-> "commit",
                row |-> [requester |-> r, number |-> number, ask |-> call[r].ask, granted |-> granted, revoked |-> FALSE]]]
    /\ UNCHANGED <<rows, gate, believes, alive, requests, faults>>

Free(r) == [s \in Resource |-> IF gate[s] = r THEN None ELSE gate[s]]

Commit(r) ==
    /\ call[r].step = "commit"
    /\ rows' = rows \cup {call[r].row}
    /\ gate' = Free(r)
    /\ call' = [call EXCEPT ![r] = Idle]
    /\ UNCHANGED <<given, believes, alive, requests, faults>>

-----------------------------------------------------------------------------------------
(* wait: looks without the gate, and writes the grant, which is committed in a step of its own. *)

Look(r, o) ==
    /\ Ready(r) /\ o \in Mine(r) /\ ~o.granted /\ ~o.revoked /\ Fits(rows, o.ask, o.number)
    /\ call' = [call EXCEPT ![r] = [step |-> "grant", row |-> o]]
    /\ UNCHANGED <<rows, gate, given, believes, alive, requests, faults>>

Grant(r) ==
    /\ call[r].step = "grant"
    /\ rows' = {IF Same(o, call[r].row) /\ ~o.revoked THEN [o EXCEPT !.granted = TRUE] ELSE o : o \in rows}
    /\ call' = [call EXCEPT ![r] = Idle]
    /\ UNCHANGED <<gate, given, believes, alive, requests, faults>>

(* The answer reaches the program: it works under its row, as what the row is. *)
Enter(r, o) ==
    /\ Ready(r) /\ o \in Mine(r) /\ o.granted /\ ~o.revoked
    /\ LET new == [requester |-> r, number |-> o.number, ask |-> AsHeld(o).ask]
       IN /\ new \notin believes
          /\ believes' = {b \in believes : ~Same(b, o)} \cup {new}
    /\ UNCHANGED <<rows, gate, given, call, alive, requests, faults>>

-----------------------------------------------------------------------------------------
(* A reader becomes the writer. *)

Others(o) == {p \in Of(o.ask.resource) : ~Same(p, o) /\ (p.number < o.number \/ p.granted)}

(* Under the gate: who is inside, which readers behind fit, and what stands between must not leave before the commit. *)
BeginUpgrade(r, o) ==
    LET s == o.ask.resource
        behind == {p \in Of(s) : p.number > o.number /\ p.ask.access = "read" /\ ~p.granted}
    IN
    /\ Ready(r) /\ o \in Mine(r) /\ o.granted /\ ~o.revoked /\ o.ask.access = "read" /\ o.ask.limit = 1
    /\ gate[s] = None
    /\ Mutant = "two upgraders" \/ \A p \in Of(s) : p.ask.access # "upgrade"
    /\ gate' = [gate EXCEPT ![s] = r]
    /\ call' = [call EXCEPT ![r] = [step |-> "upgrade", row |-> o, others |-> Others(o),
                free |-> {p \in behind : ~p.revoked /\ Fits(rows, p.ask, p.number)},
                kept |-> {p \in Of(s) : p.ask.access # "read" /\ \E b \in behind : o.number < p.number /\ p.number < b.number}]]
    /\ UNCHANGED <<rows, given, believes, alive, requests, faults>>

(* It writes at once where it is alone. Else it lets those in who fit, as they may just have seen that they do. *)
Convert(r) ==
    LET c == call[r]
        alone == c.others = {} /\ c.free = {}
    IN
    /\ c.step = "upgrade"
    /\ rows' = {IF Same(o, c.row) /\ ~o.revoked THEN [o EXCEPT !.ask.access = IF alone THEN "write" ELSE "upgrade"]
                ELSE IF Mutant # "readers behind" /\ \E f \in c.free : Same(o, f) THEN [o EXCEPT !.granted = TRUE]
                ELSE o : o \in rows}
    /\ gate' = Free(r)
    /\ call' = [call EXCEPT ![r] = Idle]
    /\ UNCHANGED <<given, believes, alive, requests, faults>>

Locked(o) == Mutant # "unlocked" /\ \E r \in Requester : call[r].step = "upgrade" /\ \E p \in call[r].kept : Same(o, p)

Upgrade(r, o) ==
    /\ Ready(r) /\ o \in Mine(r) /\ o.ask.access = "upgrade" /\ ~o.revoked
    /\ {p \in Others(o) : Mutant = "past readers" => p.number < o.number} = {}
    /\ rows' = (rows \ {o}) \cup {[o EXCEPT !.ask.access = "write"]}
    /\ UNCHANGED <<gate, given, call, believes, alive, requests, faults>>

(* A writer that goes on as a reader writes no more before that is so; an upgrade that is given up goes on as a reader. *)
Downgrade(r, o) ==
    /\ Ready(r) /\ o \in Mine(r) /\ o.granted /\ ~o.revoked /\ o.ask.limit = 1 /\ o.ask.access \in {"write", "upgrade"}
    /\ rows' = (rows \ {o}) \cup {[o EXCEPT !.ask.access = "read"]}
    /\ believes' = {IF Same(b, o) THEN [b EXCEPT !.ask.access = "read"] ELSE b : b \in believes}
    /\ UNCHANGED <<gate, given, call, alive, requests, faults>>

-----------------------------------------------------------------------------------------
(* The program leaves first, then the row goes. *)

Leave(r, b) ==
    /\ alive[r] /\ b \in Works(r)
    /\ believes' = believes \ {b}
    /\ UNCHANGED <<rows, gate, given, call, alive, requests, faults>>

End(r, o) ==
    /\ Ready(r) /\ o \in Mine(r) /\ ~Believed(o) /\ ~Locked(o)
    /\ rows' = rows \ {o}
    /\ UNCHANGED <<gate, given, call, believes, alive, requests, faults>>

Release(r, o) == o.granted /\ End(r, o)
Cancel(r, o) == ~o.granted /\ End(r, o)

(* The row of one that is dead, or that an operator has taken away. *)
Remove(o) ==
    /\ o \in rows /\ (~alive[o.requester] \/ o.revoked) /\ ~Believed(o) /\ ~Locked(o)
    /\ call[o.requester].step # "upgrade"       \* (its transaction has its member, and its row, locked)
    /\ Mutant # "the dead stay"
    /\ rows' = rows \ {o}
    /\ UNCHANGED <<gate, given, call, believes, alive, requests, faults>>

-----------------------------------------------------------------------------------------
(* What goes wrong. *)

Fault == faults < MaxFaults /\ faults' = faults + 1

Crash(r) ==
    /\ Fault /\ alive[r]
    /\ alive' = [alive EXCEPT ![r] = FALSE]
    /\ believes' = believes \ Works(r)
    /\ UNCHANGED <<rows, gate, given, call, requests>>

(* What the dead one's session still does is done, or undone. *)
SessionEnds(r) ==
    /\ ~alive[r] /\ call[r] # Idle
    /\ call' = [call EXCEPT ![r] = Idle]
    /\ gate' = Free(r)
    /\ UNCHANGED <<rows, given, believes, alive, requests, faults>>

Revoke(o) ==
    /\ Fault /\ o \in rows /\ ~o.revoked /\ ~Locked(o)
    /\ rows' = (rows \ {o}) \cup IF o.granted THEN {[o EXCEPT !.revoked = TRUE]} ELSE {}
    /\ UNCHANGED <<gate, given, call, believes, alive, requests>>

-----------------------------------------------------------------------------------------
Number(r) == given[call[r].ask.resource] + 1

Asks(r) == \E q \in Request : requests[r] < MaxRequests /\ Mine(r) = {} /\ Register(r, q)
Server(r) == TakeGate(r) \/ Commit(r) \/ Grant(r) \/ Convert(r) \/ SessionEnds(r)
PermitPool(r) == call[r].step = "place" /\ Place(r, Number(r), Fits(rows, call[r].ask, Number(r)))
Looks(r) == \E o \in rows : Look(r, o)
Enters(r) == \E o \in rows : Enter(r, o)
Upgrades(r) == \E o \in rows : Upgrade(r, o)
Leaves(r) == \E b \in believes : Leave(r, b)
Releases(r) == \E o \in rows : Release(r, o)
Removes(r) == \E o \in Mine(r) : Remove(o)

Next == \E r \in Requester :
    \/ Asks(r) \/ Server(r) \/ PermitPool(r) \/ Looks(r) \/ Enters(r) \/ Upgrades(r) \/ Leaves(r) \/ Releases(r) \/ Removes(r)
    \/ Crash(r)
    \/ \E o \in rows : BeginUpgrade(r, o) \/ Downgrade(r, o) \/ Cancel(r, o) \/ (o.requester = r /\ Revoke(o))

(* Whoever lives does what it has begun, leaves in the end, and those who look find the dead. Nobody has to upgrade. *)
Fairness == \A r \in Requester :
    /\ WF_vars(TakeGate(r)) /\ WF_vars(Commit(r)) /\ WF_vars(Grant(r)) /\ WF_vars(Convert(r)) /\ WF_vars(SessionEnds(r))
    /\ WF_vars(PermitPool(r)) /\ WF_vars(Looks(r)) /\ WF_vars(Upgrades(r)) /\ WF_vars(Removes(r))
    /\ SF_vars(Leaves(r)) /\ SF_vars(Releases(r) /\ \A o \in Mine(r) : o.ask.access # "upgrade")

Spec == Init /\ [][Next]_vars /\ Fairness

-----------------------------------------------------------------------------------------
(* What is promised. *)

(* G1, of the table, and of those who work. *)
SafeRows == \A s \in Resource : Together({AsHeld(o) : o \in {p \in Of(s) : p.granted}})
SafeWork == \A s \in Resource : Together({b \in believes : b.ask.resource = s})

(* G2: nobody is overtaken, and numbers appear in order. *)
Ordered == InTurn({AsHeld(o) : o \in rows})
InOrder == \A r \in Requester : call[r].step = "commit" =>
               \A o \in Of(call[r].row.ask.resource) : o.number < call[r].row.number

(* G5: who works has its row, and it is what the program takes it for. *)
LoserKnows == \A b \in believes : \E o \in rows :
    Same(b, o) /\ o.granted /\ o.requester = b.requester /\ (b.ask.access = "write" => o.ask.access = "write")

Safe == SafeRows /\ SafeWork /\ Ordered /\ InOrder /\ LoserKnows

(* G3: whoever waits goes in, unless it dies or its row goes. *)
Waits(r) == alive[r] /\ \E o \in Mine(r) : ~o.granted \/ o.ask.access = "upgrade"
Served == \A r \in Requester : Waits(r) ~> ~Waits(r)
=========================================================================================
