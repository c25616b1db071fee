----------------------------------- MODULE TraceLines -----------------------------------
(***************************************************************************************)
(* Whether a history that was recorded is a behaviour of Lines.tla (trace validation,  *)
(* as CCF does it: "Smart Casual Verification of the Confidential Consortium           *)
(* Framework", NSDI 2025). proof/traces.py makes module Trace of a history:            *)
(*   Moments      a sequence of sets of events; events of one set have one time, and   *)
(*                may have happened in any order                                       *)
(*   Requester, Request, UpgradeLater                                                  *)
(* An event is [what, who, of, resource, number, access, limit, weight]: who does it,  *)
(* and whose row it is. In between are steps that nobody has written down: the gate,   *)
(* the commit, the look, the beginning of an upgrade. Some are taken as early as they  *)
(* can be, or only where the next event needs them: what is accepted so is a behaviour *)
(* all the same.                                                                       *)
(***************************************************************************************)
EXTENDS Lines, Trace, Sequences, TLC

VARIABLES
    moment,         \* where the trace is
    left,           \* what is left of it
    letIn           \* rows that an upgrade has granted, and the trace has not told yet

all == <<vars, moment, left, letIn>>

Key(e) == <<e.resource, e.number>>
Id(o) == <<o.ask.resource, o.number>>
AsAsked(e) == [resource |-> e.resource, access |-> e.access, limit |-> e.limit, weight |-> e.weight]
RowOf(e) == {o \in rows : Id(o) = Key(e)}

TraceInit == Init /\ moment = 1 /\ left = Moments[1] /\ letIn = {}

Hidden == UNCHANGED <<moment, left, letIn>>
Told(e) ==
    /\ IF left = {e} /\ moment < Len(Moments)
       THEN moment' = moment + 1 /\ left' = Moments[moment + 1]
       ELSE moment' = moment /\ left' = left \ {e}

-----------------------------------------------------------------------------------------
(* Each event is a step of the specification. *)

Registered(e) ==
    LET r == e.who IN
    \/ Register(r, AsAsked(e)) /\ Hidden
    \/ call[r].step = "gate" /\ call[r].ask = AsAsked(e) /\ TakeGate(r) /\ Hidden
    \/ call[r].step = "place" /\ call[r].ask = AsAsked(e) /\ Place(r, e.number, FALSE) /\ Told(e) /\ UNCHANGED letIn

Granted(e) ==
    \/ \E o \in RowOf(e) : Look(e.who, o) /\ Hidden
    \/ /\ call[e.who].step = "grant" /\ Id(call[e.who].row) = Key(e)
       /\ Grant(e.who) /\ Told(e) /\ UNCHANGED letIn
    \/ Key(e) \in letIn /\ letIn' = letIn \ {Key(e)} /\ Told(e) /\ UNCHANGED vars

Entered(e) == \E o \in RowOf(e) : Enter(e.who, o) /\ Told(e) /\ UNCHANGED letIn
Left(e) == \E b \in believes : Same(b, [ask |-> AsAsked(e), number |-> e.number]) /\ Leave(e.who, b) /\ Told(e) /\ UNCHANGED letIn

Ended(e) == \E o \in RowOf(e) : End(e.who, o) /\ Told(e) /\ UNCHANGED letIn

(* It was given up, or an operator took it away: before that nobody worked under it any more. *)
Removed(e) == \E o \in RowOf(e) :
    \/ o.requester = e.of /\ Believed(o) /\ Mutant # "told too late"
        /\ believes' = {b \in believes : ~Same(b, o)} /\ UNCHANGED <<rows, gate, given, call, alive, requests, faults>> /\ Hidden
    \/ o.requester = e.of /\ ~o.revoked /\ ~Believed(o) /\ o.granted /\ Revoke(o) /\ Hidden
    \/ o.requester = e.of /\ ~o.granted /\ Revoke(o) /\ Told(e) /\ UNCHANGED letIn
    \/ o.requester = e.of /\ Remove(o) /\ Told(e) /\ UNCHANGED letIn

Upgraded(e) ==
    \/ \E o \in RowOf(e) : Upgrade(e.who, o) /\ Told(e) /\ UNCHANGED letIn
    \* (It was alone, and is the writer at once.)
    \/ \E o \in RowOf(e) : Others(o) = {} /\ BeginUpgrade(e.who, o) /\ call'[e.who].free = {} /\ Hidden

Downgraded(e) == \E o \in RowOf(e) : Downgrade(e.who, o) /\ Told(e) /\ UNCHANGED letIn

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
(* What nobody has written down, and happens as soon as it can. *)

Committing == {r \in Requester : call[r].step \in {"commit", "upgrade"}}

Commits(r) ==
    \/ Commit(r) /\ Hidden
    \* An upgrade of one that was alone is its event.
    \/ /\ Convert(r)
       /\ IF call[r].others = {} /\ call[r].free = {}
          THEN /\ UNCHANGED letIn
               /\ \E e \in left : e.what = "upgraded" /\ Key(e) = Id(call[r].row) /\ Told(e)
          ELSE letIn' = letIn \cup {Id(f) : f \in call[r].free} /\ UNCHANGED <<moment, left>>

(* A reader that the trace will have upgraded begins with it at some time before: the one thing that is to be guessed. *)
Begins == \E o \in rows :
    /\ Id(o) \in UpgradeLater /\ o.ask.access = "read" /\ (Others(o) # {})
    /\ BeginUpgrade(o.requester, o) /\ Hidden

(* What one has begun for an event it ends before others do theirs: of many orders one is enough. *)
TraceNext ==
    LET busy == {r \in Requester : call[r] # Idle}
    IN IF Committing # {} THEN \E r \in Committing : Commits(r)
       ELSE IF busy # {} THEN \E e \in left : e.who \in busy /\ e.what \in {"registered", "granted"} /\ Event(e)
       ELSE Begins \/ \E e \in left : Event(e)

(* TLC says that this is violated when it has come to the end of the trace: then the trace is accepted. *)
NotAccepted == ~(moment = Len(Moments) /\ left = {})
(* How far it came: the last of these lines that are printed tells which moment cannot follow. *)
Progress == IF moment > TLCGet(1) THEN TLCSet(1, moment) /\ PrintT(<<"moment", moment>>) ELSE TRUE
ASSUME TLCSet(1, 0)
=========================================================================================
