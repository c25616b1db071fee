-------------------------------------- MODULE Queue -------------------------------------
(***************************************************************************************)
(* The queue of sqlsem in time: how dead members are found, and how a holder learns    *)
(* that it has lost. Names are those of the code (sql/postgresql/routines.sql,         *)
(* sqlsem/client/connection/membership.py).                                                         *)
(*                                                                                     *)
(* One database, any position of processes. The server's steps, and the arrival of its *)
(* replies in the process, are steps of their own: so a reply can be late, or lost     *)
(* after the commit, and a session can outlive its process. Times are ages, which stop *)
(* growing when they decide nothing more. State that decides nothing more is           *)
(* forgotten: the ages of a requester without a row, and all that a dead process knew. *)
(* So there are few states, and behaviours have no end.                                *)
(***************************************************************************************)
EXTENDS Rule

CONSTANTS
    Requester,      \* processes; each is a member with one session
    Leased,         \* the members with a lease instead of a beacon
    Request,        \* the possible requests: [resource, access, limit, weight]
    MaxRequests,    \* the position of requests of each
    Grace,          \* ticks after which a member that is missing, or a lease, is over
    Margin,         \* ticks earlier at which a process stops trusting itself
    MaxFaults,      \* crashes, pauses, cuts, restarts, revocations: the position of all
    AtOnce,         \* TRUE: a registration is one step; its own steps are in Queues.tla, too
    Prompt,         \* TRUE: calls of running processes are answered, and pings sent, before the lease is over
    AnyTurn         \* TRUE: a turn comes at any time, or never, as with any position of other processes

ASSUME Margin \in 1..(Grace - 1) /\ Leased \subseteq Requester

None == "none"
Resource == {q.resource : q \in Request}
Nothing == [resource |-> None, access |-> None, limit |-> 0, weight |-> 0]
Silent == [phase |-> None, age |-> 0, known |-> TRUE]
Highest(S) == IF S = {} THEN 0 ELSE CHOOSE n \in S : \A m \in S : n >= m

VARIABLES
    \* In the database
    rows,           \* the committed rows: [requester, position, request, granted, revoked]
    gate,           \* of each resource: its holder
    row,            \* the row that a session is inserting, if any: not committed
    member,         \* of each requester: [there, seen]
    suspected,      \* members that were found missing, and have not changed since
    call,           \* the call of its session: None, "gate", "insert", "commit", "poll", "grant"; or the answer that is
                    \* under way: "waits", "granted", "gone", "refused"
    session,        \* TRUE while the server has its session, and so its beacon
    \* In the processes
    run,            \* "runs", "paused" or "dead"
    linked,         \* TRUE while it is connected
    pc,             \* "idle", "asks", "waits", "holds" (it works), "leaves"
    request,            \* the request
    trust,          \* the age of its last heartbeat
    began,          \* the age of the call under way
    ping,           \* [phase, age, known]
    requests,       \* the position of its requests
    faults

vars == <<rows, gate, row, member, suspected, call, session, run, linked, pc, request, trust, began, ping, requests, faults>>
Mine(r) == {o \in rows : o.requester = r}
Engaged(r) == pc[r] # "idle" \/ call[r] # None \/ Mine(r) # {}
Up(r) == run[r] = "runs" /\ linked[r]

Init ==
    /\ rows = {} /\ gate = [s \in Resource |-> None] /\ row = [r \in Requester |-> {}]
    /\ member = [r \in Requester |-> [there |-> TRUE, seen |-> 0]] /\ suspected = {}
    /\ call = [r \in Requester |-> None] /\ session = [r \in Requester |-> TRUE]
    /\ run = [r \in Requester |-> "runs"] /\ linked = [r \in Requester |-> TRUE]
    /\ pc = [r \in Requester |-> "idle"] /\ request = [r \in Requester |-> Nothing]
    /\ trust = [r \in Requester |-> 0] /\ began = [r \in Requester |-> 0] /\ ping = [r \in Requester |-> Silent]
    /\ requests = [r \in Requester |-> 0] /\ faults = 0

-----------------------------------------------------------------------------------------
(* register. Only the order of the present numbers counts: so they are the smallest possible. *)

Ask(r) ==
    /\ Up(r) /\ pc[r] = "idle" /\ call[r] = None /\ Mine(r) = {} /\ requests[r] < MaxRequests
    /\ \E q \in Request : request' = [request EXCEPT ![r] = q]
    /\ pc' = [pc EXCEPT ![r] = "asks"]
    /\ call' = [call EXCEPT ![r] = "gate"] /\ began' = [began EXCEPT ![r] = 0]
    /\ UNCHANGED <<rows, gate, row, member, suspected, session, run, linked, trust, ping, requests, faults>>

Number(r) == 1 + Highest({o.position : o \in {p \in rows \cup UNION {row[x] : x \in Requester} : p.request.resource = request[r].resource}})
New(r, may) == [requester |-> r, position |-> Number(r), request |-> request[r], granted |-> may, revoked |-> -1]
Turn(q, position) == IF AnyTurn THEN BOOLEAN ELSE {Fits(rows, q, position)}     \* the possible answers of a poll
Sign(r) == member' = [member EXCEPT ![r].seen = 0]                                        \* touch_member
Reply(o) == IF o.granted /\ (o.revoked < 0 \/ Mutant = "repeated and revoked") THEN "granted" ELSE "waits"

TakeGate(r) ==
    /\ ~AtOnce /\ call[r] = "gate"
    /\ gate[request[r].resource] = None \/ Mutant = "no gate"
    /\ gate' = [gate EXCEPT ![request[r].resource] = r]
    /\ call' = [call EXCEPT ![r] = "insert"]
    /\ UNCHANGED <<rows, row, member, suspected, session, run, linked, pc, request, trust, began, ping, requests, faults>>

(* Read the rows ahead and insert, under the gate; no other session sees the row yet. A removed member is refused. The same
   call once more, after a lost answer, finds its row by its uid. *)
Insert(r) ==
    /\ call[r] = "insert"
    /\ IF member[r].there /\ Mine(r) = {}
       THEN /\ \E may \in Turn(request[r], Number(r)) : row' = [row EXCEPT ![r] = {New(r, may)}]
            /\ call' = [call EXCEPT ![r] = "commit"]
            /\ UNCHANGED <<gate, member>>
       ELSE /\ call' = [call EXCEPT ![r] = IF member[r].there THEN Reply(CHOOSE o \in Mine(r) : TRUE) ELSE "refused"]
            /\ gate' = [gate EXCEPT ![request[r].resource] = None]
            /\ IF member[r].there THEN Sign(r) ELSE UNCHANGED member
            /\ UNCHANGED row
    /\ UNCHANGED <<rows, suspected, session, run, linked, pc, request, trust, began, ping, requests, faults>>

Commit(r) ==
    /\ call[r] = "commit"
    /\ rows' = rows \cup row[r] /\ Sign(r)
    /\ gate' = [gate EXCEPT ![request[r].resource] = IF @ = r THEN None ELSE @]
    /\ call' = [call EXCEPT ![r] = Reply(CHOOSE o \in row[r] : TRUE)]
    /\ row' = [row EXCEPT ![r] = {}]
    /\ UNCHANGED <<suspected, session, run, linked, pc, request, trust, began, ping, requests, faults>>

Register(r) ==
    /\ AtOnce /\ call[r] = "gate"
    /\ IF member[r].there
       THEN /\ \E o \in IF Mine(r) = {} THEN {New(r, may) : may \in Turn(request[r], Number(r))} ELSE Mine(r) :
                 rows' = rows \cup {o} /\ call' = [call EXCEPT ![r] = Reply(o)]
            /\ Sign(r)
       ELSE /\ call' = [call EXCEPT ![r] = "refused"]
            /\ UNCHANGED <<rows, member>>
    /\ UNCHANGED <<gate, row, suspected, session, run, linked, pc, request, trust, began, ping, requests, faults>>

(* The answer is lost: repeat the call. *)
Again(r) ==
    /\ Up(r) /\ pc[r] = "asks" /\ call[r] = None
    /\ call' = [call EXCEPT ![r] = "gate"] /\ began' = [began EXCEPT ![r] = 0]
    /\ UNCHANGED <<rows, gate, row, member, suspected, session, run, linked, pc, request, trust, ping, requests, faults>>

-----------------------------------------------------------------------------------------
(* wait: the call polls until it can write the grant, which is committed in a step of its own. *)

Wait(r) ==
    /\ Up(r) /\ pc[r] = "waits" /\ call[r] = None
    /\ call' = [call EXCEPT ![r] = "poll"] /\ began' = [began EXCEPT ![r] = 0]
    /\ UNCHANGED <<rows, gate, row, member, suspected, session, run, linked, pc, request, trust, ping, requests, faults>>

Poll(r) ==
    /\ call[r] = "poll"
    /\ \/ /\ Mine(r) = {} \/ \E o \in Mine(r) : o.revoked >= 0
          /\ call' = [call EXCEPT ![r] = "gone"]
       \/ /\ \E o \in Mine(r) : o.revoked < 0 /\ (o.granted \/ TRUE \in Turn(o.request, o.position))
          /\ call' = [call EXCEPT ![r] = "grant"]
    /\ UNCHANGED <<rows, gate, row, member, suspected, session, run, linked, pc, request, trust, began, ping, requests, faults>>

Grant(r) ==
    /\ call[r] = "grant"
    /\ LET mine == {o \in Mine(r) : o.revoked < 0}
       IN /\ rows' = (rows \ mine) \cup {[o EXCEPT !.granted = TRUE] : o \in mine}
          /\ call' = [call EXCEPT ![r] = IF mine = {} THEN "gone" ELSE "granted"]
    /\ IF member[r].there THEN Sign(r) ELSE UNCHANGED member
    /\ UNCHANGED <<gate, row, suspected, session, run, linked, pc, request, trust, began, ping, requests, faults>>

(* The answer arrives, at any time after it was sent: it proves the instant at which the call began. *)
Answer(r) ==
    /\ Up(r) /\ pc[r] \in {"asks", "waits", "leaves"} /\ call[r] \in {"waits", "granted", "gone", "refused"}
    /\ call' = [call EXCEPT ![r] = None] /\ began' = [began EXCEPT ![r] = 0]
    /\ IF call[r] \in {"gone", "refused"} THEN UNCHANGED trust
       ELSE trust' = [trust EXCEPT ![r] = IF Mutant = "answer at its end" THEN 0
                                          ELSE IF began[r] < @ \/ pc[r] = "asks" THEN began[r] ELSE @]
    /\ IF pc[r] = "leaves" THEN UNCHANGED <<pc, requests>>       \* a ping reported earlier that the row is gone
       ELSE /\ pc' = [pc EXCEPT ![r] = CASE call[r] = "granted" -> "holds"
                                         [] call[r] = "waits" -> "waits"
                                         [] OTHER -> "leaves"]
            /\ requests' = [requests EXCEPT ![r] = IF call[r] = "granted" THEN @ + 1 ELSE @]
    /\ UNCHANGED <<rows, gate, row, member, suspected, session, run, linked, request, ping, faults>>

-----------------------------------------------------------------------------------------
(* release: the program stops first, then its row is removed. A removed member is registered again by its next call. *)

Leave(r) ==
    /\ run[r] = "runs" /\ pc[r] = "holds"
    /\ pc' = [pc EXCEPT ![r] = "leaves"]
    /\ UNCHANGED <<rows, gate, row, member, suspected, call, session, run, linked, request, trust, began, ping, requests, faults>>

Release(r) ==
    /\ Up(r) /\ pc[r] = "leaves" /\ call[r] \in {None, "poll"}  \* (a wait is cancelled)
    /\ rows' = rows \ Mine(r)
    /\ member' = [member EXCEPT ![r] = [there |-> TRUE, seen |-> 0]] /\ suspected' = suspected \ {r}
    /\ call' = [call EXCEPT ![r] = None] /\ pc' = [pc EXCEPT ![r] = "idle"] /\ request' = [request EXCEPT ![r] = Nothing]
    /\ trust' = [trust EXCEPT ![r] = 0] /\ began' = [began EXCEPT ![r] = 0] /\ ping' = [ping EXCEPT ![r] = Silent]
    /\ UNCHANGED <<gate, row, session, run, linked, requests, faults>>

-----------------------------------------------------------------------------------------
(* The member's side: pings, and the watchdog, which only reads the clock. *)

Ping(r) ==
    /\ Up(r) /\ ping[r].phase = None /\ trust[r] > 0 /\ pc[r] \in {"waits", "holds"}
    /\ ping' = [ping EXCEPT ![r].phase = "asked"]
    /\ UNCHANGED <<rows, gate, row, member, suspected, call, session, run, linked, pc, request, trust, began, requests, faults>>

Pong(r) ==  \* on the server
    /\ session[r] /\ ping[r].phase = "asked"
    /\ ping' = [ping EXCEPT ![r].phase = "answered",
                            ![r].known = member[r].there /\ Mine(r) # {} /\ \A o \in Mine(r) : o.revoked < 0]
    /\ IF member[r].there THEN Sign(r) ELSE UNCHANGED member
    /\ UNCHANGED <<rows, gate, row, suspected, call, session, run, linked, pc, request, trust, began, requests, faults>>

Proof(r) ==  \* the answer arrives: it proves the instant at which the ping began
    /\ Up(r) /\ ping[r].phase = "answered"
    /\ trust' = [trust EXCEPT ![r] = IF Mutant = "proof at its end" THEN 0
                                     ELSE IF ping[r].age < @ THEN ping[r].age ELSE @]
    /\ ping' = [ping EXCEPT ![r] = Silent]
    \* A row that is gone, or revoked, is marked lost: also one whose grant is still under way.
    /\ pc' = [pc EXCEPT ![r] = IF ~ping[r].known /\ (@ = "holds" \/ (@ = "waits" /\ Mutant # "grant unheard")) THEN "leaves" ELSE @]
    /\ UNCHANGED <<rows, gate, row, member, suspected, call, session, run, linked, request, began, requests, faults>>

Doubtful(r) == pc[r] = "holds" /\ trust[r] >= Grace - Margin

Doubt(r) ==
    /\ run[r] = "runs" /\ Doubtful(r) /\ Mutant # "no watch"
    /\ pc' = [pc EXCEPT ![r] = "leaves"]
    /\ UNCHANGED <<rows, gate, row, member, suspected, call, session, run, linked, request, trust, began, ping, requests, faults>>

-----------------------------------------------------------------------------------------
(* Any session finds dead members: the test, and the removal, which requires that nothing has changed since. (missing_since,
   which is written while the grace is not over yet, is for operators: it decides nothing.) *)

Over(r) == member[r].seen >= Grace
Missing(r) == IF r \in Leased THEN Over(r) ELSE ~session[r] /\ (Over(r) \/ Mutant = "no grace")

Suspect(r) ==
    /\ member[r].there /\ Missing(r) /\ Mine(r) # {} /\ r \notin suspected /\ Mutant # "the dead stay"
    /\ suspected' = suspected \cup {r}
    /\ UNCHANGED <<rows, gate, row, member, call, session, run, linked, pc, request, trust, began, ping, requests, faults>>

(* (A member that gives a sign in a transaction under way has its row locked: it is passed over.) *)
Reap(r) ==
    /\ r \in suspected
    /\ suspected' = suspected \ {r}
    /\ IF member[r].there /\ call[r] \notin {"commit", "grant"} /\ (Over(r) \/ Mutant \in {"removed untested", "no grace"})
       THEN /\ rows' = rows \ Mine(r)
            /\ member' = [member EXCEPT ![r] = [there |-> FALSE, seen |-> IF run[r] = "dead" THEN 0 ELSE @.seen]]
       ELSE UNCHANGED <<member, rows>>
    /\ UNCHANGED <<gate, row, call, session, run, linked, pc, request, trust, began, ping, requests, faults>>

(* The revoked row of a living member is removed when its grace is over. *)
TakeAway(r) ==
    /\ \E o \in Mine(r) : o.revoked >= Grace
    /\ rows' = rows \ Mine(r)
    /\ UNCHANGED <<gate, row, member, suspected, call, session, run, linked, pc, request, trust, began, ping, requests, faults>>

-----------------------------------------------------------------------------------------
(* Sessions end, and come back. *)

Free(r) == [s \in Resource |-> IF gate[s] = r THEN None ELSE gate[s]]

(* The server notices that the client is gone: it rolls back the session's transaction, and its locks are free. *)
SessionEnds(r) ==
    /\ session[r] /\ ~linked[r]
    /\ session' = [session EXCEPT ![r] = FALSE]
    /\ call' = [call EXCEPT ![r] = None] /\ row' = [row EXCEPT ![r] = {}] /\ gate' = Free(r)
    /\ ping' = [ping EXCEPT ![r] = Silent] /\ began' = [began EXCEPT ![r] = 0]
    /\ request' = [request EXCEPT ![r] = IF run[r] = "dead" THEN Nothing ELSE @]
    /\ UNCHANGED <<rows, member, suspected, run, linked, pc, trust, requests, faults>>

(* Reattach a member with a new beacon, so that an earlier test that found it missing no longer counts. That proves nothing
   about its rows: an operator may have revoked one meanwhile, which the next ping reports. A removed member registers again.
   The call of the old session ends first: here for all rows, in the code for the rows that it has locked. *)
Reconnect(r) ==
    /\ run[r] = "runs" /\ ~linked[r] /\ ~session[r]
    /\ linked' = [linked EXCEPT ![r] = TRUE] /\ session' = [session EXCEPT ![r] = TRUE]
    /\ member' = [member EXCEPT ![r] = [there |-> TRUE, seen |-> 0]]
    /\ pc' = [pc EXCEPT ![r] = IF ~member[r].there /\ @ \in {"holds", "waits"} THEN "leaves" ELSE @]
    /\ trust' = IF Mutant = "back and well" THEN [trust EXCEPT ![r] = 0] ELSE trust
    /\ suspected' = IF Mutant \in {"same beacon", "removed untested"} THEN suspected ELSE suspected \ {r}
    /\ UNCHANGED <<rows, gate, row, call, run, request, began, ping, requests, faults>>

-----------------------------------------------------------------------------------------
(* Faults, of processes with something to lose. *)

Fault == faults < MaxFaults /\ faults' = faults + 1

Crash(r) ==
    /\ Fault /\ run[r] # "dead" /\ Engaged(r)
    /\ run' = [run EXCEPT ![r] = "dead"] /\ linked' = [linked EXCEPT ![r] = FALSE] /\ pc' = [pc EXCEPT ![r] = "idle"]
    /\ trust' = [trust EXCEPT ![r] = 0] /\ began' = [began EXCEPT ![r] = 0]
    /\ ping' = [ping EXCEPT ![r] = IF @.phase = "asked" THEN [@ EXCEPT !.age = 0] ELSE Silent]
    /\ UNCHANGED <<rows, gate, row, member, suspected, call, session, request, requests>>

Pause(r) ==
    /\ Fault /\ run[r] = "runs" /\ Engaged(r)
    /\ run' = [run EXCEPT ![r] = "paused"]
    /\ UNCHANGED <<rows, gate, row, member, suspected, call, session, linked, pc, request, trust, began, ping, requests>>

Wake(r) ==
    /\ run[r] = "paused"
    /\ run' = [run EXCEPT ![r] = "runs"]
    /\ UNCHANGED <<rows, gate, row, member, suspected, call, session, linked, pc, request, trust, began, ping, requests, faults>>

Cut(r) ==
    /\ Fault /\ linked[r] /\ Engaged(r)
    /\ linked' = [linked EXCEPT ![r] = FALSE]
    /\ UNCHANGED <<rows, gate, row, member, suspected, call, session, run, pc, request, trust, began, ping, requests>>

(* The server restarts: all sessions end at once. Heartbeats are not durable, the last ones may be lost: so the first check
   gives every member its full grace again. *)
Restart ==
    /\ Fault /\ \E r \in Requester : Engaged(r)
    /\ session' = [r \in Requester |-> ~Engaged(r) /\ session[r]] /\ linked' = [r \in Requester |-> ~Engaged(r) /\ linked[r]]
    /\ member' = [r \in Requester |-> [member[r] EXCEPT !.seen = IF Mutant = "no new life" THEN Grace ELSE 0]]
    /\ call' = [r \in Requester |-> None] /\ row' = [r \in Requester |-> {}] /\ gate' = [s \in Resource |-> None]
    /\ ping' = [r \in Requester |-> Silent] /\ began' = [r \in Requester |-> 0]
    /\ request' = [r \in Requester |-> IF run[r] = "dead" THEN Nothing ELSE request[r]]
    /\ UNCHANGED <<rows, suspected, run, pc, trust, requests>>

(* A waiter leaves the queue at once; a holder is notified, and has its grace. *)
Revoke(r) ==
    /\ Fault /\ \E o \in Mine(r) : o.revoked < 0
    /\ rows' = (rows \ Mine(r)) \cup {[o EXCEPT !.revoked = 0] : o \in {x \in Mine(r) : x.granted}}
    /\ UNCHANGED <<gate, row, member, suspected, call, session, run, linked, pc, request, trust, began, ping, requests>>

-----------------------------------------------------------------------------------------
(* Time passes; but a running process reads its own clock before it goes on. *)
Older(age, most) == IF age < most THEN age + 1 ELSE most
InTime(r) == IF pc[r] = "asks" \/ call[r] = "grant" THEN ~(Up(r) /\ session[r])
             ELSE pc[r] \in {"waits", "holds"} /\ Up(r) /\ session[r] => trust[r] < Grace - Margin

Tick ==
    /\ \E r \in Requester : Engaged(r)
    /\ \A r \in Requester : run[r] = "runs" => ~Doubtful(r) \/ Mutant = "no watch"
    /\ Prompt => \A r \in Requester : InTime(r)
    /\ member' = [r \in Requester |-> [member[r] EXCEPT !.seen = IF Engaged(r) THEN Older(@, Grace) ELSE 0]]
    /\ rows' = {[o EXCEPT !.revoked = IF @ < 0 THEN @ ELSE Older(@, Grace)] : o \in rows}
    /\ trust' = [r \in Requester |-> IF pc[r] \in {"waits", "holds"} THEN Older(trust[r], Grace - Margin) ELSE 0]
    /\ began' = [r \in Requester |-> IF call[r] # None /\ run[r] # "dead" THEN Older(began[r], Grace - Margin) ELSE 0]
    /\ ping' = [r \in Requester |-> IF ping[r].phase = None \/ run[r] = "dead" THEN ping[r]
                                    ELSE [ping[r] EXCEPT !.age = Older(@, Grace - Margin)]]
    /\ UNCHANGED <<gate, row, suspected, call, session, run, linked, pc, request, requests, faults>>

Server(r) == TakeGate(r) \/ Insert(r) \/ Commit(r) \/ Register(r) \/ Poll(r) \/ Grant(r) \/ Pong(r) \/ SessionEnds(r)
Process(r) == Ask(r) \/ Again(r) \/ Wait(r) \/ Answer(r) \/ Leave(r) \/ Release(r) \/ Ping(r) \/ Proof(r) \/ Doubt(r)
              \/ Reconnect(r) \/ Wake(r)
Anybody(r) == Suspect(r) \/ Reap(r) \/ TakeAway(r)
Faulty(r) == Crash(r) \/ Pause(r) \/ Cut(r) \/ Revoke(r)

Next == Tick \/ Restart \/ \E r \in Requester : Server(r) \/ Process(r) \/ Anybody(r) \/ Faulty(r)

(* Time passes; the server ends the calls that it has begun; a running process takes its steps, wakes, and leaves in the end;
   and each missing member is tested. *)
Fairness ==
    /\ WF_vars(Tick)
    /\ \A r \in Requester :
        /\ WF_vars(TakeGate(r)) /\ WF_vars(Insert(r)) /\ WF_vars(Commit(r)) /\ WF_vars(Register(r)) /\ WF_vars(Poll(r))
        /\ WF_vars(Grant(r)) /\ WF_vars(Pong(r)) /\ WF_vars(SessionEnds(r))
        /\ WF_vars(Ask(r)) /\ WF_vars(Again(r)) /\ WF_vars(Wait(r)) /\ WF_vars(Answer(r)) /\ WF_vars(Leave(r)) /\ WF_vars(Release(r))
        /\ WF_vars(Ping(r)) /\ WF_vars(Proof(r)) /\ WF_vars(Doubt(r)) /\ WF_vars(Reconnect(r)) /\ WF_vars(Wake(r))
        /\ WF_vars(Suspect(r)) /\ WF_vars(Reap(r)) /\ WF_vars(TakeAway(r))

Spec == Init /\ [][Next]_vars /\ Fairness

-----------------------------------------------------------------------------------------
(* Guarantees. *)

(* The working programs. A process that was stopped reads its clock as it wakes, before it goes on. *)
Works(r) == pc[r] = "holds" /\ run[r] = "runs" /\ (~Doubtful(r) \/ Mutant = "no watch")

(* G1, of the table, and of the working holders. *)
SafeRows == \A s \in Resource : Together({o \in rows : o.granted /\ o.request.resource = s})
SafeWork == \A s \in Resource :
    Together({[requester |-> r, request |-> request[r]] : r \in {x \in Requester : Works(x) /\ request[x].resource = s}})

(* G2: no request is overtaken, and numbers appear in order. *)
Ordered == InTurn(rows)
InOrder == \A r \in Requester : \A n \in row[r] : \A o \in rows :
              o.request.resource = n.request.resource => o.position < n.position

(* G5: a working program has its row. *)
LoserKnows == \A r \in Requester : Works(r) => \E o \in Mine(r) : o.granted

(* G4: a member is removed only while nothing proves that it lives. *)
LivingAlone == [][\A r \in Requester : member[r].there /\ ~member'[r].there => (r \in Leased \/ ~session[r]) /\ Over(r)]_vars

(* G3: each request of a living process is granted; and the dead have no rows in the end. *)
Served == \A r \in Requester : <>(requests[r] = MaxRequests \/ run[r] = "dead")
Freed == \A r \in Requester : run[r] = "dead" ~> Mine(r) = {}
========================================================================================
