------------------------------------- MODULE Ungated ------------------------------------
(***************************************************************************************)
(* The three statements that sqlsem began with: INSERT a row, SELECT whether a row is  *)
(* ahead of it, DELETE it. A number is given when the row is inserted, and the row is  *)
(* visible when its transaction commits: in between a later number may be visible      *)
(* first.                                                                              *)
(***************************************************************************************)
EXTENDS Integers, FiniteSets

CONSTANTS Requester, Gated

VARIABLES given, number, seen, pc, gate

vars == <<given, number, seen, pc, gate>>

Init ==
    /\ given = 0 /\ gate = {}
    /\ number = [r \in Requester |-> 0]
    /\ seen = {}                                \* requesters with a committed row
    /\ pc = [r \in Requester |-> "idle"]

Insert(r) ==
    /\ pc[r] = "idle" /\ (gate = {} \/ ~Gated)
    /\ given' = given + 1
    /\ number' = [number EXCEPT ![r] = given + 1]
    /\ gate' = gate \cup {r}
    /\ pc' = [pc EXCEPT ![r] = "inserted"]
    /\ UNCHANGED seen

Commit(r) ==
    /\ pc[r] = "inserted"
    /\ seen' = seen \cup {r}
    /\ gate' = gate \ {r}
    /\ pc' = [pc EXCEPT ![r] = "waits"]
    /\ UNCHANGED <<given, number>>

Poll(r) ==
    /\ pc[r] = "waits" /\ \A o \in seen : number[o] >= number[r]
    /\ pc' = [pc EXCEPT ![r] = "holds"]
    /\ UNCHANGED <<given, number, seen, gate>>

Delete(r) ==
    /\ pc[r] = "holds"
    /\ seen' = seen \ {r}
    /\ pc' = [pc EXCEPT ![r] = "gone"]
    /\ UNCHANGED <<given, number, gate>>

Next == \E r \in Requester : Insert(r) \/ Commit(r) \/ Poll(r) \/ Delete(r)
Spec == Init /\ [][Next]_vars

Alone == Cardinality({r \in Requester : pc[r] = "holds"}) <= 1
========================================================================================
