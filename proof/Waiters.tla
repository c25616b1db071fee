------------------------------------ MODULE Waiters -----------------------------------
(***************************************************************************************)
(* The waiters of one process for one mutex, and the other processes that request it:  *)
(* who asks the database, and who wakes whom. Step is `next_step` of                   *)
(* sqlsem/client/waiters/state.py without its times; tests/model/test_specification.py *)
(* has TLC compare the two for all states and facts. Waiters that share a lock are not *)
(* part of the model, nor are deadlocks: both only ask more often.                     *)
(***************************************************************************************)
EXTENDS Integers, Sequences, FiniteSets

CONSTANTS
    Waiter,         \* the waiters of this process, numbers in the order of their rows
    Others,         \* how many rows of other processes there may be
    MaxFaults,      \* waiters that give up, and local copies that are wrong
    Mutant

Other == 0
Asking == {"ON_CONNECTION", "POLLED", "SHARED_WAKEUP", "VICTIM"}
Final == {"GRANTED", "GONE", "TIMED_OUT"}

(* The facts are those of `Facts`; time_up stands for a deadline that has passed. *)
Step(state, f) ==
    CASE f.answer = "granted" -> "GRANTED"
      [] f.answer = "gone" -> "GONE"
      [] ~f.has_row -> "GONE"
      [] f.time_up -> "TIMED_OUT"
      [] f.is_victim -> "VICTIM"
      [] f.is_blocked -> "BLOCKED_LOCALLY"
      [] f.can_share -> "SHARED_WAKEUP"
      [] f.is_first /\ f.is_held /\ (state # "LOCAL_WAIT" \/ Mutant = "local for ever") -> "LOCAL_WAIT"
      [] f.is_first /\ f.has_connection /\ ~f.polls_for_others -> "ON_CONNECTION"
      [] OTHER -> "POLLED"

VARIABLES
    rows,           \* in the database, in order: the number of a waiter, or Other
    state,          \* of each waiter
    awake,          \* the waiters that take their next step now
    answered,       \* the waiters whose request is granted
    holds,          \* the waiters whose grant is not released
    wrong,          \* TRUE: this process believes that it holds what it does not
    faults

vars == <<rows, state, awake, answered, holds, wrong, faults>>

Waiting == {w \in Waiter : state[w] \notin Final}
Remaining(w) == SelectSeq(rows, LAMBDA o : o # w)
Behind(w) == {v \in Waiting : v > w /\ \A u \in Waiting : u < v => u = w}

Init ==
    /\ rows \in UNION {[1..n -> Waiter \cup {Other}] : n \in Cardinality(Waiter)..(Cardinality(Waiter) + Others)}
    /\ \A w \in Waiter : Cardinality({n \in DOMAIN rows : rows[n] = w}) = 1
    /\ \A m, n \in DOMAIN rows : m < n /\ rows[m] # Other /\ rows[n] # Other => rows[m] < rows[n]
    /\ state = [w \in Waiter |-> "REGISTERED"] /\ awake = Waiter
    /\ answered = {} /\ holds = {} /\ wrong = FALSE /\ faults = 0

FactsOf(w, connection) ==
    [answer |-> IF w \in answered THEN "granted" ELSE "unknown", has_row |-> TRUE, time_up |-> FALSE,
     is_victim |-> FALSE, is_blocked |-> \E v \in Waiting : v < w, can_share |-> FALSE,
     is_first |-> \A v \in Waiting : v >= w, is_held |-> holds # {} \/ wrong,
     polls_for_others |-> FALSE, has_connection |-> connection]

(* A waiter that is awake chooses its next step. One that has its answer leaves the queue, and wakes the next. *)
Choose(w, connection) ==
    LET next == Step(state[w], FactsOf(w, connection))
    IN
    /\ w \in awake /\ w \in Waiting
    /\ state' = [state EXCEPT ![w] = next]
    /\ holds' = IF next = "GRANTED" THEN holds \cup {w} ELSE holds
    /\ awake' = (awake \ {w}) \cup (IF next = "GRANTED" /\ Mutant # "wakes nobody" THEN Behind(w) ELSE {})
    /\ UNCHANGED <<rows, answered, wrong, faults>>

(* The database grants the first row, when its waiter asks. The waiter wakes with its answer, or when its slice is over. *)
Ask(w) ==
    /\ w \in Waiting \ awake /\ state[w] \in Asking
    /\ answered' = IF Head(rows) = w THEN answered \cup {w} ELSE answered
    /\ awake' = awake \cup {w}
    /\ UNCHANGED <<rows, state, holds, wrong, faults>>

(* A local slice ends. (A waiter that is blocked locally sleeps until it is woken.) *)
SliceOver(w) ==
    /\ w \in Waiting \ awake /\ state[w] = "LOCAL_WAIT"
    /\ awake' = awake \cup {w}
    /\ UNCHANGED <<rows, state, answered, holds, wrong, faults>>

(* The call that releases polls for the first waiter if it waits locally, and wakes it. *)
Release(w) ==
    LET first == {v \in Waiting : \A u \in Waiting : u >= v}
        local == {v \in first : state[v] = "LOCAL_WAIT"}
    IN
    /\ w \in holds
    /\ rows' = Remaining(w) /\ holds' = holds \ {w}
    /\ answered' = answered \cup {v \in local : Len(rows') > 0 /\ Head(rows') = v}
    /\ state' = [v \in Waiter |-> IF v \in local THEN "REGISTERED" ELSE state[v]]
    /\ awake' = awake \cup first
    /\ UNCHANGED <<wrong, faults>>

OtherLeaves ==
    /\ \E n \in DOMAIN rows : rows[n] = Other
       /\ rows' = SubSeq(rows, 1, n - 1) \o SubSeq(rows, n + 1, Len(rows))
    /\ UNCHANGED <<state, awake, answered, holds, wrong, faults>>

(* An interrupt, a cancellation, or a timeout: its row is removed, and it wakes the next. *)
GiveUp(w) ==
    /\ faults < MaxFaults /\ w \in Waiting
    /\ rows' = Remaining(w) /\ state' = [state EXCEPT ![w] = "TIMED_OUT"]
    /\ awake' = (awake \ {w}) \cup (IF Mutant = "wakes nobody" THEN {} ELSE Behind(w))
    /\ faults' = faults + 1
    /\ UNCHANGED <<answered, holds, wrong>>

BelievesToHold ==
    /\ faults < MaxFaults /\ ~wrong /\ wrong' = TRUE /\ faults' = faults + 1
    /\ UNCHANGED <<rows, state, awake, answered, holds>>

Next ==
    \/ \E w \in Waiter : (\E connection \in BOOLEAN : Choose(w, connection)) \/ Ask(w) \/ SliceOver(w) \/ Release(w) \/ GiveUp(w)
    \/ OtherLeaves \/ BelievesToHold

Fair ==
    /\ \A w \in Waiter : WF_vars(\E connection \in BOOLEAN : Choose(w, connection))
    /\ \A w \in Waiter : WF_vars(Ask(w)) /\ WF_vars(SliceOver(w)) /\ WF_vars(Release(w))
    /\ WF_vars(OtherLeaves)

Spec == Init /\ [][Next]_vars /\ Fair

-----------------------------------------------------------------------------------------
(* One holder; and each waiter is granted, or gives up. *)
OneHolder == Cardinality(holds) <= 1
FirstOnly == Cardinality({w \in Waiting : state[w] = "ON_CONNECTION"}) <= 1
Served == \A w \in Waiter : <>(state[w] \in Final)
========================================================================================
