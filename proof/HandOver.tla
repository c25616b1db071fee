------------------------------------ MODULE HandOver ------------------------------------
(***************************************************************************************)
(* A hand-over (sql/postgresql/handovers.sql, sqlsem/client/operations/handover.py): the giver      *)
(* hands the lock over under a token, and the process that adopts it has the same row. *)
(* In between the row belongs to a member in transit, which lives by a lease. Another  *)
(* process waits behind it for the mutex. Answers may be lost, and calls repeated.     *)
(***************************************************************************************)
EXTENDS Integers, FiniteSets

CONSTANTS
    Giver, Adopter,     \* processes: one, and a set (the giver may adopt, too: let it be among them)
    Ttl,                \* ticks after which the lease in transit is over
    MaxFaults,          \* crashes, lost answers, revocations
    Mutant

Process == Adopter \cup {Giver}
Transit == "in transit"
Nobody == "nobody"

VARIABLES
    owner,              \* the owner of the row: a process, Transit, or Nobody when it is gone
    number,             \* its queue_position; the waiter has 2
    revoked,
    age,                \* of the lease in transit
    adopted,            \* the adopter in table handover
    given,              \* TRUE if the token is in table handover
    suspected,          \* the owner whose member was found dead
    pc,                 \* of a process: "idle", "holds", "giving", "answered" (it has the token's answer), "adopting", "left", "lost", "dead"
    works,              \* the processes that work under the lock; "next" is the waiter
    faults

vars == <<owner, number, revoked, age, adopted, given, suspected, pc, works, faults>>

Init ==
    /\ owner = Giver /\ number = 1 /\ revoked = FALSE /\ age = 0
    /\ adopted = Nobody /\ given = FALSE /\ suspected = Nobody
    /\ pc = [p \in Process |-> IF p = Giver THEN "holds" ELSE "idle"]
    /\ works = {Giver} /\ faults = 0

Row == <<owner, number, revoked, age>>
Handover == <<adopted, given>>

-----------------------------------------------------------------------------------------
(* hand_over: the caller stops working, whatever the answer will be. *)

Call(p) ==
    /\ p = Giver /\ pc[p] = "holds" /\ ~given
    /\ pc' = [pc EXCEPT ![p] = "giving"]
    /\ works' = IF Mutant = "giver goes on" THEN works ELSE works \ {p}
    /\ UNCHANGED <<Row, Handover, suspected, faults>>

HandOver(p) ==      \* on the server; a call that is repeated finds the token
    /\ pc[p] = "giving" /\ ~given /\ owner = p /\ ~revoked
    /\ owner' = Transit /\ age' = 0 /\ given' = TRUE
    /\ UNCHANGED <<number, revoked, adopted, suspected, pc, works, faults>>

Answered(p) ==          \* from here on other processes may have the token
    /\ pc[p] = "giving" /\ given
    /\ pc' = [pc EXCEPT ![p] = "answered"]
    /\ works' = works \ {p}
    /\ UNCHANGED <<Row, Handover, suspected, faults>>

(* No answer in time, or the row was gone: mark it lost; if it is still our row, it is removed. *)
Unanswered(p) ==
    /\ pc[p] = "giving"
    /\ IF ~given /\ (owner # p \/ revoked) THEN UNCHANGED faults     \* refused
       ELSE faults < MaxFaults /\ faults' = faults + 1
    /\ pc' = [pc EXCEPT ![p] = "lost"]
    /\ works' = works \ {p}
    /\ UNCHANGED <<Row, Handover, suspected>>

-----------------------------------------------------------------------------------------
(* adopt *)

Adopting(p) ==
    /\ p \in Adopter /\ pc[Giver] \in {"answered", "adopting"} /\ pc[p] \in {"idle", "answered"}
    /\ pc' = [pc EXCEPT ![p] = "adopting"]
    /\ UNCHANGED <<Row, Handover, suspected, works, faults>>

(* The token was not used, and the member in transit is there with the row, whose lease is locked until the commit. *)
Adopt(p) ==
    /\ pc[p] = "adopting" /\ given
    /\ \/ adopted = Nobody /\ owner = Transit /\ age <= Ttl /\ ~revoked
       \/ Mutant = "token used twice" /\ owner \in Process
    /\ owner' = p /\ adopted' = p
    /\ number' = IF Mutant = "another number" THEN 3 ELSE number
    /\ UNCHANGED <<revoked, age, given, suspected, pc, works, faults>>

Enter(p) ==         \* the answer, or that of the call repeated with the same uid
    /\ pc[p] = "adopting" /\ adopted = p /\ owner = p /\ ~revoked
    /\ pc' = [pc EXCEPT ![p] = "holds"]
    /\ works' = works \cup {p}
    /\ UNCHANGED <<Row, Handover, suspected, faults>>

Refused(p) ==       \* used, or too late
    /\ pc[p] = "adopting" /\ (adopted \notin {p, Nobody} \/ owner \notin {p, Transit} \/ revoked \/ (owner = Transit /\ age > Ttl))
    /\ pc' = [pc EXCEPT ![p] = "lost"]
    /\ UNCHANGED <<Row, Handover, suspected, works, faults>>

-----------------------------------------------------------------------------------------
(* The program leaves, and the row is removed, if it is its own. *)

Leave(p) ==
    /\ pc[p] = "holds"
    /\ pc' = [pc EXCEPT ![p] = "left"]
    /\ works' = works \ {p}
    /\ UNCHANGED <<Row, Handover, suspected, faults>>

Release(p) ==
    /\ pc[p] \in {"left", "lost"} \/ (pc[p] = "answered" /\ Mutant = "release by position")
    /\ IF Mutant = "release by position" THEN owner # Nobody ELSE owner = p
    /\ owner' = Nobody
    /\ UNCHANGED <<number, revoked, age, Handover, suspected, pc, works, faults>>

(* Any process finds a member dead, and then removes it with the rows that it has at that time. *)
Over(m) == IF m = Transit THEN age > Ttl ELSE pc[m] = "dead"

Suspect ==
    /\ owner # Nobody /\ Over(owner) /\ suspected = Nobody /\ Mutant # "no lease"
    /\ suspected' = owner
    /\ UNCHANGED <<Row, Handover, pc, works, faults>>

Reap ==
    /\ suspected # Nobody
    /\ owner' = IF owner = suspected THEN Nobody ELSE owner
    /\ suspected' = Nobody
    /\ UNCHANGED <<number, revoked, age, Handover, pc, works, faults>>

RemoveRevoked ==         \* a revoked row is removed when no program works under it (Queue.tla)
    /\ revoked /\ owner # Nobody /\ owner \notin works
    /\ owner' = Nobody
    /\ UNCHANGED <<number, revoked, age, Handover, suspected, pc, works, faults>>

NextGoesIn ==
    /\ "next" \notin works /\ (owner = Nobody \/ number > 2)
    /\ works' = works \cup {"next"}
    /\ UNCHANGED <<Row, Handover, suspected, pc, faults>>

-----------------------------------------------------------------------------------------
Fault == faults < MaxFaults /\ faults' = faults + 1

Crash(p) ==
    /\ Fault /\ pc[p] # "dead"
    /\ pc' = [pc EXCEPT ![p] = "dead"]
    /\ works' = works \ {p}
    /\ UNCHANGED <<Row, Handover, suspected>>

Revoke ==
    /\ Fault /\ owner # Nobody /\ ~revoked
    /\ revoked' = TRUE
    /\ works' = works \ {owner}         \* (it is notified first: Queue.tla)
    /\ pc' = [p \in Process |-> IF pc[p] = "holds" THEN "lost" ELSE pc[p]]
    /\ UNCHANGED <<owner, number, age, Handover, suspected>>

Tick ==
    /\ owner = Transit /\ age <= Ttl
    /\ age' = age + 1
    /\ UNCHANGED <<owner, number, revoked, Handover, suspected, pc, works, faults>>

Do(p) == Call(p) \/ HandOver(p) \/ Answered(p) \/ Adopt(p) \/ Enter(p) \/ Refused(p) \/ Leave(p) \/ Release(p)
Next ==
    \/ \E p \in Process : Do(p) \/ Adopting(p) \/ Unanswered(p) \/ Crash(p)
    \/ Suspect \/ Reap \/ RemoveRevoked \/ NextGoesIn \/ Revoke \/ Tick

(* No process has to adopt. *)
Fairness ==
    /\ \A p \in Process : WF_vars(HandOver(p)) /\ WF_vars(Answered(p)) /\ WF_vars(Unanswered(p)) /\ WF_vars(Adopt(p)) /\ WF_vars(Enter(p))
                          /\ WF_vars(Refused(p)) /\ WF_vars(Leave(p)) /\ WF_vars(Release(p))
    /\ WF_vars(Suspect) /\ WF_vars(Reap) /\ WF_vars(RemoveRevoked) /\ WF_vars(NextGoesIn) /\ WF_vars(Tick)
Spec == Init /\ [][Next]_vars /\ Fairness

-----------------------------------------------------------------------------------------
(* G1 and G6: one at a time, in the order of numbers. *)
OneWorks == Cardinality(works) <= 1
(* G5 *)
LoserKnows == \A p \in works \ {"next"} : owner = p \/ pc[p] = "giving"
(* A token is used once. *)
UsedOnce == [][adopted # Nobody => adopted' = adopted]_vars
(* G3: the waiter behind it is granted. *)
Served == <>("next" \in works)
=========================================================================================
