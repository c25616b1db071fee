----------------------------------- MODULE TraceQueues ----------------------------------
(***************************************************************************************)
(* Whether a recorded history is a behaviour of Queues.tla (trace validation, as CCF   *)
(* does it: "Smart Casual Verification of the Confidential Consortium Framework", NSDI *)
(* 2025). proof/traces.py makes module Trace of a history:                             *)
(*   Moments      a sequence of sets of events; events of one set have the same time,  *)
(*                and may have happened in any order                                   *)
(*   Requester, Request, UpgradeLater                                                  *)
(* An event is [what, who, of, resource, position, access, limit, weight]: its actor,  *)
(* and the owner of the row. The steps in between are not recorded: the gate, the      *)
(* commit, the poll, the beginning of an upgrade. Some are taken as early as possible, *)
(* or only where the next event needs them: a history accepted so is a behaviour all   *)
(* the same.                                                                           *)
(***************************************************************************************)
EXTENDS Queues, Trace, Sequences, TLC

VARIABLES
    moment,         \* the index of the present set
    left,           \* its remaining events
    early           \* rows that an upgrade has granted, before their events

all == <<vars, moment, left, early>>

Key(e) == <<e.resource, e.position>>
Id(o) == <<o.request.resource, o.position>>
RequestOf(e) == [resource |-> e.resource, access |-> e.access, limit |-> e.limit, weight |-> e.weight]
RowOf(e) == {o \in rows : Id(o) = Key(e)}

TraceInit == Init /\ moment = 1 /\ left = Moments[1] /\ early = {}

Hidden == UNCHANGED <<moment, left, early>>
Consume(e) ==
    /\ IF left = {e} /\ moment < Len(Moments)
       THEN moment' = moment + 1 /\ left' = Moments[moment + 1]
       ELSE moment' = moment /\ left' = left \ {e}

-----------------------------------------------------------------------------------------
(* Each event is a step of the specification. *)

Registered(e) ==
    LET r == e.who IN
    \/ Register(r, RequestOf(e)) /\ Hidden
    \/ call[r].step = "gate" /\ call[r].request = RequestOf(e) /\ TakeGate(r) /\ Hidden
    \/ call[r].step = "insert" /\ call[r].request = RequestOf(e) /\ Insert(r, e.position, FALSE) /\ Consume(e) /\ UNCHANGED early

Granted(e) ==
    \/ \E o \in RowOf(e) : Poll(e.who, o) /\ Hidden
    \/ /\ call[e.who].step = "grant" /\ Id(call[e.who].row) = Key(e)
       /\ Grant(e.who) /\ Consume(e) /\ UNCHANGED early
    \/ Key(e) \in early /\ early' = early \ {Key(e)} /\ Consume(e) /\ UNCHANGED vars

Entered(e) == \E o \in RowOf(e) : Enter(e.who, o) /\ Consume(e) /\ UNCHANGED early
Left(e) == \E b \in grants : Same(b, [request |-> RequestOf(e), position |-> e.position]) /\ Leave(e.who, b) /\ Consume(e) /\ UNCHANGED early

Ended(e) == \E o \in RowOf(e) : End(e.who, o) /\ Consume(e) /\ UNCHANGED early

(* It was reaped, or an operator revoked it: its program had stopped working before. *)
Removed(e) == \E o \in RowOf(e) :
    \/ o.requester = e.of /\ HasGrant(o) /\ Mutant # "told too late"
        /\ grants' = {b \in grants : ~Same(b, o)} /\ UNCHANGED <<rows, gate, last_position, call, alive, requests, faults>> /\ Hidden
    \/ o.requester = e.of /\ ~o.revoked /\ ~HasGrant(o) /\ o.granted /\ Revoke(o) /\ Hidden
    \/ o.requester = e.of /\ ~o.granted /\ Revoke(o) /\ Consume(e) /\ UNCHANGED early
    \/ o.requester = e.of /\ Remove(o) /\ Consume(e) /\ UNCHANGED early

Upgraded(e) ==
    \/ \E o \in RowOf(e) : Upgrade(e.who, o) /\ Consume(e) /\ UNCHANGED early
    \* (It was alone, and is the writer at once.)
    \/ \E o \in RowOf(e) : Others(o) = {} /\ BeginUpgrade(e.who, o) /\ call'[e.who].free = {} /\ Hidden

Downgraded(e) == \E o \in RowOf(e) : Downgrade(e.who, o) /\ Consume(e) /\ UNCHANGED early

Event(e) ==
    CASE e.what = "registered" -> Registered(e)
      [] e.what = "granted" -> Granted(e)
      [] e.what = "entered" -> Entered(e)
      [] e.what = "left" -> Left(e)
      [] e.what = "ended" -> Ended(e)
      [] e.what = "removed" -> Removed(e)
      [] e.what = "upgraded" -> Upgraded(e)
      [] e.what = "downgraded" -> Downgraded(e)

-----------------------------------------------------------------------------------------
(* The unrecorded steps, taken as early as possible. *)

Committing == {r \in Requester : call[r].step \in {"commit", "upgrade"}}

Commits(r) ==
    \/ Commit(r) /\ Hidden
    \* The upgrade of a row that was alone is its event.
    \/ /\ Convert(r)
       /\ IF call[r].others = {} /\ call[r].free = {}
          THEN /\ UNCHANGED early
               /\ \E e \in left : e.what = "upgraded" /\ Key(e) = Id(call[r].row) /\ Consume(e)
          ELSE early' = early \cup {Id(f) : f \in call[r].free} /\ UNCHANGED <<moment, left>>

(* A reader whose upgrade follows in the trace begins it at some earlier time: the only guess. *)
Begins == \E o \in rows :
    /\ Id(o) \in UpgradeLater /\ o.request.access = "read" /\ (Others(o) # {})
    /\ BeginUpgrade(o.requester, o) /\ Hidden

(* A requester ends the steps of its event before others begin theirs: of many orders one is enough. *)
TraceNext ==
    LET busy == {r \in Requester : call[r] # Idle}
    IN IF Committing # {} THEN \E r \in Committing : Commits(r)
       ELSE IF busy # {} THEN \E e \in left : e.who \in busy /\ e.what \in {"registered", "granted"} /\ Event(e)
       ELSE Begins \/ \E e \in left : Event(e)

(* TLC reports a violation at the end of the trace: then the trace is accepted. *)
NotAccepted == ~(moment = Len(Moments) /\ left = {})
(* The progress: the last printed line names the moment that cannot follow. *)
Progress == IF moment > TLCGet(1) THEN TLCSet(1, moment) /\ PrintT(<<"moment", moment>>) ELSE TRUE
ASSUME TLCSet(1, 0)
=========================================================================================
