-------------------------------------- MODULE Rule --------------------------------------
(***************************************************************************************)
(* The rule that decides which requests are granted (sqlsem.model.Request.fits), and   *)
(* what must be true of the granted ones. A row is a record with at least              *)
(*   number    its queue_position                                                      *)
(*   ask       [resource, access, limit, weight], its request                          *)
(*   granted   TRUE if it is granted                                                   *)
(***************************************************************************************)
EXTENDS Integers, FiniteSets

CONSTANT Mutant         \* the step that is left out, so that a promise fails; or "none"

RECURSIVE Sum(_)
Sum(some) == IF some = {} THEN 0
             ELSE LET one == CHOOSE r \in some : TRUE IN one.ask.weight + Sum(some \ {one})

Least(S) == CHOOSE x \in S : \A y \in S : x <= y

Conflict(a, b) == a.access = "write" \/ a.access # b.access

-----------------------------------------------------------------------------------------
(* What the engines compute. *)

(* The rows that count against a request with this number. *)
Ahead(rows, q, number) ==
    {r \in rows :
        /\ r.ask.resource = q.resource /\ r.number < number
        /\ Conflict(q, r.ask) /\ (Mutant = "stages mix" => "write" \in {q.access, r.ask.access})
        /\ Mutant = "barging" => r.granted}

Fits(rows, q, number) ==
    LET ahead == Ahead(rows, q, number)
        load == IF Mutant = "weights" THEN Cardinality(ahead) + 1 ELSE Sum(ahead) + q.weight
    IN load <= Least({q.limit} \cup {r.ask.limit : r \in IF Mutant = "others limit" THEN {} ELSE ahead})

-----------------------------------------------------------------------------------------
(* What must be true. *)

(* G1: may these be held at the same time? *)
Together(S) ==
    \A a \in S : LET others == {b \in S : b # a /\ Conflict(a.ask, b.ask)}
                 IN Sum(others) + a.ask.weight <= Least({a.ask.limit} \cup {b.ask.limit : b \in others})
                    \/ others = {}

(* G2: a granted request has overtaken none: the conflicting ones ahead may be granted as well. *)
InTurn(rows) ==
    \A o \in {r \in rows : r.granted} :
    \A p \in {r \in rows : r.ask.resource = o.ask.resource /\ r.number < o.number /\ Conflict(o.ask, r.ask)} :
        LET ahead == {r \in rows : r.ask.resource = o.ask.resource /\ r.number < p.number /\ Conflict(p.ask, r.ask)}
        IN Sum(ahead) + p.ask.weight <= Least({p.ask.limit} \cup {r.ask.limit : r \in ahead})
==========================================================================================
