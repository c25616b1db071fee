------------------------------------- MODULE HandOver -----------------------------------
(***************************************************************************************)
(* A lock that travels (sql/postgresql/handovers.sql, sqlsem/core/handover.py): the    *)
(* giver hands it over under a token, and whoever adopts it has the same row. From the *)
(* one to the other the row is that of a member in transit, which lives by a lease.    *)
(* Behind it somebody waits for the mutex. Answers may be lost, and calls repeated.    *)
(***************************************************************************************)
EXTENDS Integers, FiniteSets

CONSTANTS
    Giver, Adopter,     \* processes: one, and a set (the giver may adopt, too: let it be among them)
    Ttl,                \* ticks after which what is in transit is over
    MaxFaults,          \* crashes, answers that are lost, what an operator takes away
    Mutant

Process == Adopter \cup {Giver}
Transit == "in transit"
Nobody == "nobody"

VARIABLES
    owner,              \* whose the row is: a process, Transit, or Nobody when it is gone
    number,             \* its queue_position; 2 has the one who waits
    revoked,
    age,                \* of the lease in transit
    adopted,            \* by whom, as table handover has it
    given,              \* whether the token is in table handover
    suspected,          \* whose member somebody has found dead
    pc,                 \* of a process: "idle", "holds", "giving", "told" (it has the token's answer), "adopting", "left", "lost", "dead"
    works,              \* who works under the lock; "next" is the one who waits
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
(* hand_over: who calls it works no more, whatever the answer will be. *)

Call(p) ==
    /\ p = Giver /\ pc[p] = "holds" /\ ~given
    /\ pc' = [pc EXCEPT ![p] = "giving"]
    /\ works' = IF Mutant = "giver goes on" THEN works ELSE works \ {p}
    /\ UNCHANGED <<Row, Handover, suspected, faults>>

HandOver(p) ==      \* on the server; a call that is repeated finds the token
    /\ pc[p] = "giving" /\ ~given /\ owner = p /\ ~revoked
    /\ owner' = Transit /\ age' = 0 /\ given' = TRUE
    /\ UNCHANGED <<number, revoked, adopted, suspected, pc, works, faults>>

Told(p) ==          \* from here on others may have the token
    /\ pc[p] = "giving" /\ given
    /\ pc' = [pc EXCEPT ![p] = "told"]
    /\ works' = works \ {p}
    /\ UNCHANGED <<Row, Handover, suspected, faults>>

(* No answer in time, or the row was gone: lost, and if it is ours after all nobody shall hold it (disown). *)
NotTold(p) ==
    /\ pc[p] = "giving"
    /\ IF ~given /\ (owner # p \/ revoked) THEN UNCHANGED faults     \* refused
       ELSE faults < MaxFaults /\ faults' = faults + 1
    /\ pc' = [pc EXCEPT ![p] = "lost"]
    /\ works' = works \ {p}
    /\ UNCHANGED <<Row, Handover, suspected>>

-----------------------------------------------------------------------------------------
(* adopt *)

Adopting(p) ==
    /\ p \in Adopter /\ pc[Giver] \in {"told", "adopting"} /\ pc[p] \in {"idle", "told"}
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
(* The program leaves, and the row goes: if it is its own. *)

Leave(p) ==
    /\ pc[p] = "holds"
    /\ pc' = [pc EXCEPT ![p] = "left"]
    /\ works' = works \ {p}
    /\ UNCHANGED <<Row, Handover, suspected, faults>>

Release(p) ==
    /\ pc[p] \in {"left", "lost"} \/ (pc[p] = "told" /\ Mutant = "release by position")
    /\ IF Mutant = "release by position" THEN owner # Nobody ELSE owner = p
    /\ owner' = Nobody
    /\ UNCHANGED <<number, revoked, age, Handover, suspected, pc, works, faults>>

(* Anybody finds a member dead, and then removes it with what is its own at that time. *)
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

TakeAway ==         \* what an operator has revoked goes when nobody works under it (Queue.tla)
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
    /\ works' = works \ {owner}         \* (it is told first: Queue.tla)
    /\ pc' = [p \in Process |-> IF pc[p] = "holds" THEN "lost" ELSE pc[p]]
    /\ UNCHANGED <<owner, number, age, Handover, suspected>>

Tick ==
    /\ owner = Transit /\ age <= Ttl
    /\ age' = age + 1
    /\ UNCHANGED <<owner, number, revoked, Handover, suspected, pc, works, faults>>

Do(p) == Call(p) \/ HandOver(p) \/ Told(p) \/ Adopt(p) \/ Enter(p) \/ Refused(p) \/ Leave(p) \/ Release(p)
Next ==
    \/ \E p \in Process : Do(p) \/ Adopting(p) \/ NotTold(p) \/ Crash(p)
    \/ Suspect \/ Reap \/ TakeAway \/ NextGoesIn \/ Revoke \/ Tick

(* Nobody has to adopt. *)
Fairness ==
    /\ \A p \in Process : WF_vars(HandOver(p)) /\ WF_vars(Told(p)) /\ WF_vars(NotTold(p)) /\ WF_vars(Adopt(p)) /\ WF_vars(Enter(p))
                          /\ WF_vars(Refused(p)) /\ WF_vars(Leave(p)) /\ WF_vars(Release(p))
    /\ WF_vars(Suspect) /\ WF_vars(Reap) /\ WF_vars(TakeAway) /\ WF_vars(NextGoesIn) /\ WF_vars(Tick)
Spec == Init /\ [][Next]_vars /\ Fairness

-----------------------------------------------------------------------------------------
(* G1 and G6: one at a time, in the order of numbers. *)
OneWorks == Cardinality(works) <= 1
(* G5 *)
LoserKnows == \A p \in works \ {"next"} : owner = p \/ pc[p] = "giving"
(* A token is used once. *)
UsedOnce == [][adopted # Nobody => adopted' = adopted]_vars
(* G3: whoever waits behind it goes in. *)
Served == <>("next" \in works)
=========================================================================================
