------------------------------------- MODULE Queues -------------------------------------
(***************************************************************************************)
(* The queues of several resources, without time: a registration under the gate, polls *)
(* and grants in steps of their own, readers and limits, upgrades and downgrades,      *)
(* operators and dead members. When a member counts as dead, and that a holder learns  *)
(* of its loss first, is the matter of Queue.tla: here a row is removed only while no  *)
(* program works under it. Names are those of the code: sql/postgresql/routines.sql    *)
(* and conversions.sql.                                                                *)
(***************************************************************************************)
EXTENDS Rule

CONSTANTS
    Requester,
    Request,        \* the possible requests: [resource, access, limit, weight]
    MaxRequests,    \* how many requests each makes
    MaxFaults       \* crashes, and rows that operators revoke

Resource == {q.resource : q \in Request}
None == "none"
Idle == [step |-> None]

VARIABLES
    rows,           \* the committed rows: [requester, position, request, granted, revoked]
    gate,           \* of each resource: its holder
    last_position,          \* of each resource: the last queue_position
    call,           \* of each requester: the call of its session on the server
    grants,       \* the locks that programs work under: [requester, position, request]
    alive,
    requests,       \* the position of requests of each
    faults

vars == <<rows, gate, last_position, call, grants, alive, requests, faults>>

Of(s) == {o \in rows : o.request.resource = s}
Mine(r) == {o \in rows : o.requester = r}
Same(o, p) == o.request.resource = p.request.resource /\ o.position = p.position
GrantsOf(r) == {b \in grants : b.requester = r}
HasGrant(o) == \E b \in grants : Same(b, o)
Ready(r) == alive[r] /\ call[r] = Idle
AsHeld(o) == [o EXCEPT !.request.access = IF @ = "upgrade" THEN "read" ELSE @]

Init ==
    /\ rows = {} /\ gate = [s \in Resource |-> None] /\ last_position = [s \in Resource |-> 0]
    /\ call = [r \in Requester |-> Idle]
    /\ grants = {} /\ alive = [r \in Requester |-> TRUE]
    /\ requests = [r \in Requester |-> 0] /\ faults = 0

-----------------------------------------------------------------------------------------
(* register *)

Register(r, q) ==
    /\ Ready(r)
    /\ call' = [call EXCEPT ![r] = [step |-> "gate", request |-> q]]
    /\ requests' = [requests EXCEPT ![r] = @ + 1]
    /\ UNCHANGED <<rows, gate, last_position, grants, alive, faults>>

TakeGate(r) ==
    /\ call[r].step = "gate"
    /\ gate[call[r].request.resource] = None \/ Mutant = "no gate"
    /\ gate' = [gate EXCEPT ![call[r].request.resource] = r]
    /\ call' = [call EXCEPT ![r].step = "insert"]
    /\ UNCHANGED <<rows, last_position, grants, alive, requests, faults>>

(* Insert, and grant at once where the rule allows it (a row inserted by hand is polled later). *)
Insert(r, position, granted) ==
    /\ call[r].step = "insert"
    /\ position > last_position[call[r].request.resource]
    /\ granted => Fits(rows, call[r].request, position)
    /\ last_position' = [last_position EXCEPT ![call[r].request.resource] = position]
    /\ call' = [call EXCEPT ![r] = [step |-> "commit",
                row |-> [requester |-> r, position |-> position, request |-> call[r].request, granted |-> granted, revoked |-> FALSE]]]
    /\ UNCHANGED <<rows, gate, grants, alive, requests, faults>>

Free(r) == [s \in Resource |-> IF gate[s] = r THEN None ELSE gate[s]]

Commit(r) ==
    /\ call[r].step = "commit"
    /\ rows' = rows \cup {call[r].row}
    /\ gate' = Free(r)
    /\ call' = [call EXCEPT ![r] = Idle]
    /\ UNCHANGED <<last_position, grants, alive, requests, faults>>

-----------------------------------------------------------------------------------------
(* wait: poll without the gate, and write the grant, which is committed in a step of its own. *)

Poll(r, o) ==
    /\ Ready(r) /\ o \in Mine(r) /\ ~o.granted /\ ~o.revoked /\ Fits(rows, o.request, o.position)
    /\ call' = [call EXCEPT ![r] = [step |-> "grant", row |-> o]]
    /\ UNCHANGED <<rows, gate, last_position, grants, alive, requests, faults>>

Grant(r) ==
    /\ call[r].step = "grant"
    /\ rows' = {IF Same(o, call[r].row) /\ ~o.revoked THEN [o EXCEPT !.granted = TRUE] ELSE o : o \in rows}
    /\ call' = [call EXCEPT ![r] = Idle]
    /\ UNCHANGED <<gate, last_position, grants, alive, requests, faults>>

(* The answer reaches the program, which works under its row, with the row's access. *)
Enter(r, o) ==
    /\ Ready(r) /\ o \in Mine(r) /\ o.granted /\ ~o.revoked
    /\ LET new == [requester |-> r, position |-> o.position, request |-> AsHeld(o).request]
       IN /\ new \notin grants
          /\ grants' = {b \in grants : ~Same(b, o)} \cup {new}
    /\ UNCHANGED <<rows, gate, last_position, call, alive, requests, faults>>

-----------------------------------------------------------------------------------------
(* A reader becomes the writer. *)

Others(o) == {p \in Of(o.request.resource) : ~Same(p, o) /\ (p.position < o.position \/ p.granted)}

(* Under the gate: read the holders and the readers behind that fit; rows between them must not leave before the commit. *)
BeginUpgrade(r, o) ==
    LET s == o.request.resource
        behind == {p \in Of(s) : p.position > o.position /\ p.request.access = "read" /\ ~p.granted}
    IN
    /\ Ready(r) /\ o \in Mine(r) /\ o.granted /\ ~o.revoked /\ o.request.access = "read" /\ o.request.limit = 1
    /\ gate[s] = None
    /\ Mutant = "two upgraders" \/ \A p \in Of(s) : p.request.access # "upgrade"
    /\ gate' = [gate EXCEPT ![s] = r]
    /\ call' = [call EXCEPT ![r] = [step |-> "upgrade", row |-> o, others |-> Others(o),
                free |-> {p \in behind : ~p.revoked /\ Fits(rows, p.request, p.position)},
                kept |-> {p \in Of(s) : p.request.access # "read" /\ \E b \in behind : o.position < p.position /\ p.position < b.position}]]
    /\ UNCHANGED <<rows, last_position, grants, alive, requests, faults>>

(* Alone, it is the writer at once. Otherwise it grants the readers that fit: they may just have seen that they do. *)
Convert(r) ==
    LET c == call[r]
        alone == c.others = {} /\ c.free = {}
    IN
    /\ c.step = "upgrade"
    /\ rows' = {IF Same(o, c.row) /\ ~o.revoked THEN [o EXCEPT !.request.access = IF alone THEN "write" ELSE "upgrade"]
                ELSE IF Mutant # "readers behind" /\ \E f \in c.free : Same(o, f) THEN [o EXCEPT !.granted = TRUE]
                ELSE o : o \in rows}
    /\ gate' = Free(r)
    /\ call' = [call EXCEPT ![r] = Idle]
    /\ UNCHANGED <<last_position, grants, alive, requests, faults>>

Locked(o) == Mutant # "unlocked" /\ \E r \in Requester : call[r].step = "upgrade" /\ \E p \in call[r].kept : Same(o, p)

Upgrade(r, o) ==
    /\ Ready(r) /\ o \in Mine(r) /\ o.request.access = "upgrade" /\ ~o.revoked
    /\ {p \in Others(o) : Mutant = "past readers" => p.position < o.position} = {}
    /\ rows' = (rows \ {o}) \cup {[o EXCEPT !.request.access = "write"]}
    /\ UNCHANGED <<gate, last_position, call, grants, alive, requests, faults>>

(* A downgrading writer stops writing first; a cancelled upgrade goes on as a reader. *)
Downgrade(r, o) ==
    /\ Ready(r) /\ o \in Mine(r) /\ o.granted /\ ~o.revoked /\ o.request.limit = 1 /\ o.request.access \in {"write", "upgrade"}
    /\ rows' = (rows \ {o}) \cup {[o EXCEPT !.request.access = "read"]}
    /\ grants' = {IF Same(b, o) THEN [b EXCEPT !.request.access = "read"] ELSE b : b \in grants}
    /\ UNCHANGED <<gate, last_position, call, alive, requests, faults>>

-----------------------------------------------------------------------------------------
(* The program stops working first, then its row is removed. *)

Leave(r, b) ==
    /\ alive[r] /\ b \in GrantsOf(r)
    /\ grants' = grants \ {b}
    /\ UNCHANGED <<rows, gate, last_position, call, alive, requests, faults>>

End(r, o) ==
    /\ Ready(r) /\ o \in Mine(r) /\ ~HasGrant(o) /\ ~Locked(o)
    /\ rows' = rows \ {o}
    /\ UNCHANGED <<gate, last_position, call, grants, alive, requests, faults>>

Release(r, o) == o.granted /\ End(r, o)
Cancel(r, o) == ~o.granted /\ End(r, o)

(* Remove the row of a dead member, or a revoked row. *)
Remove(o) ==
    /\ o \in rows /\ (~alive[o.requester] \/ o.revoked) /\ ~HasGrant(o) /\ ~Locked(o)
    /\ call[o.requester].step # "upgrade"       \* (its transaction has its member, and its row, locked)
    /\ Mutant # "the dead stay"
    /\ rows' = rows \ {o}
    /\ UNCHANGED <<gate, last_position, call, grants, alive, requests, faults>>

-----------------------------------------------------------------------------------------
(* Faults. *)

Fault == faults < MaxFaults /\ faults' = faults + 1

Crash(r) ==
    /\ Fault /\ alive[r]
    /\ alive' = [alive EXCEPT ![r] = FALSE]
    /\ grants' = grants \ GrantsOf(r)
    /\ UNCHANGED <<rows, gate, last_position, call, requests>>

(* The last call of a dead process's session is committed, or rolled back. *)
SessionEnds(r) ==
    /\ ~alive[r] /\ call[r] # Idle
    /\ call' = [call EXCEPT ![r] = Idle]
    /\ gate' = Free(r)
    /\ UNCHANGED <<rows, last_position, grants, alive, requests, faults>>

Revoke(o) ==
    /\ Fault /\ o \in rows /\ ~o.revoked /\ ~Locked(o)
    /\ rows' = (rows \ {o}) \cup IF o.granted THEN {[o EXCEPT !.revoked = TRUE]} ELSE {}
    /\ UNCHANGED <<gate, last_position, call, grants, alive, requests>>

-----------------------------------------------------------------------------------------
Number(r) == last_position[call[r].request.resource] + 1

Asks(r) == \E q \in Request : requests[r] < MaxRequests /\ Mine(r) = {} /\ Register(r, q)
Server(r) == TakeGate(r) \/ Commit(r) \/ Grant(r) \/ Convert(r) \/ SessionEnds(r)
Inserts(r) == call[r].step = "insert" /\ Insert(r, Number(r), Fits(rows, call[r].request, Number(r)))
Polls(r) == \E o \in rows : Poll(r, o)
Enters(r) == \E o \in rows : Enter(r, o)
Upgrades(r) == \E o \in rows : Upgrade(r, o)
Leaves(r) == \E b \in grants : Leave(r, b)
Releases(r) == \E o \in rows : Release(r, o)
Removes(r) == \E o \in Mine(r) : Remove(o)

Next == \E r \in Requester :
    \/ Asks(r) \/ Server(r) \/ Inserts(r) \/ Polls(r) \/ Enters(r) \/ Upgrades(r) \/ Leaves(r) \/ Releases(r) \/ Removes(r)
    \/ Crash(r)
    \/ \E o \in rows : BeginUpgrade(r, o) \/ Downgrade(r, o) \/ Cancel(r, o) \/ (o.requester = r /\ Revoke(o))

(* A living process ends its call, leaves in the end, and a poll finds the dead. No process has to upgrade. *)
Fairness == \A r \in Requester :
    /\ WF_vars(TakeGate(r)) /\ WF_vars(Commit(r)) /\ WF_vars(Grant(r)) /\ WF_vars(Convert(r)) /\ WF_vars(SessionEnds(r))
    /\ WF_vars(Inserts(r)) /\ WF_vars(Polls(r)) /\ WF_vars(Upgrades(r)) /\ WF_vars(Removes(r))
    /\ SF_vars(Leaves(r)) /\ SF_vars(Releases(r) /\ \A o \in Mine(r) : o.request.access # "upgrade")

Spec == Init /\ [][Next]_vars /\ Fairness

-----------------------------------------------------------------------------------------
(* Guarantees. *)

(* G1, of the table, and of the working programs. *)
SafeRows == \A s \in Resource : Together({AsHeld(o) : o \in {p \in Of(s) : p.granted}})
SafeWork == \A s \in Resource : Together({b \in grants : b.request.resource = s})

(* G2: no request is overtaken, and numbers appear in order. *)
Ordered == InTurn({AsHeld(o) : o \in rows})
InOrder == \A r \in Requester : call[r].step = "commit" =>
               \A o \in Of(call[r].row.request.resource) : o.position < call[r].row.position

(* G5: a working program has its row, with the access that the program grants. *)
LoserKnows == \A b \in grants : \E o \in rows :
    Same(b, o) /\ o.granted /\ o.requester = b.requester /\ (b.request.access = "write" => o.request.access = "write")

Safe == SafeRows /\ SafeWork /\ Ordered /\ InOrder /\ LoserKnows

(* G3: each waiter is granted, unless it dies or its row is removed. *)
Waits(r) == alive[r] /\ \E o \in Mine(r) : ~o.granted \/ o.request.access = "upgrade"
Served == \A r \in Requester : Waits(r) ~> ~Waits(r)
=========================================================================================
