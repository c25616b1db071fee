-------------------------------------- MODULE Rule --------------------------------------
(***************************************************************************************)
(* The rule that decides which requests are granted (sqlsem.values.locks.Request.fits),  *)
(* what must be true of the granted ones. A row is a record with at least              *)
(*   position  its queue_position                                                      *)
(*   request   [resource, access, limit, weight], its request                          *)
(*   granted   TRUE if it is granted                                                   *)
(***************************************************************************************)
EXTENDS Integers, FiniteSets

CONSTANT Mutant         \* the step that is left out, so that a promise fails; or "none"

RECURSIVE Sum(_)
Sum(some) == IF some = {} THEN 0
             ELSE LET one == CHOOSE r \in some : TRUE IN one.request.weight + Sum(some \ {one})

Least(S) == CHOOSE x \in S : \A y \in S : x <= y

Conflict(a, b) == a.access = "write" \/ a.access # b.access

-----------------------------------------------------------------------------------------
(* What the engines compute. *)

(* The rows that count against a request with this position. *)
Ahead(rows, q, position) ==
    {r \in rows :
        /\ r.request.resource = q.resource /\ r.position < position
        /\ Conflict(q, r.request) /\ (Mutant = "stages mix" => "write" \in {q.access, r.request.access})
        /\ Mutant = "barging" => r.granted}

Fits(rows, q, position) ==
    LET ahead == Ahead(rows, q, position)
        load == IF Mutant = "weights" THEN Cardinality(ahead) + 1 ELSE Sum(ahead) + q.weight
    IN load <= Least({q.limit} \cup {r.request.limit : r \in IF Mutant = "others limit" THEN {} ELSE ahead})

-----------------------------------------------------------------------------------------
(* What must be true. *)

(* G1: may these be held at the same time? *)
Together(S) ==
    \A a \in S : LET others == {b \in S : b # a /\ Conflict(a.request, b.request)}
                 IN Sum(others) + a.request.weight <= Least({a.request.limit} \cup {b.request.limit : b \in others})
                    \/ others = {}

(* G2: a granted request has overtaken none: the conflicting ones ahead may be granted as well. *)
InTurn(rows) ==
    \A o \in {r \in rows : r.granted} :
    \A p \in {r \in rows : r.request.resource = o.request.resource /\ r.position < o.position /\ Conflict(o.request, r.request)} :
        LET ahead == {r \in rows : r.request.resource = o.request.resource /\ r.position < p.position /\ Conflict(p.request, r.request)}
        IN Sum(ahead) + p.request.weight <= Least({p.request.limit} \cup {r.request.limit : r \in ahead})
==========================================================================================
