------------------------------------ MODULE MCQueues ------------------------------------
EXTENDS Queues, TLC
CONSTANTS a, b, c
Asked(s, kind, most, weighs) == [resource |-> s, access |-> kind, limit |-> most, weight |-> weighs]
\* Two resources: readers and writers of the one, a limit of two on the other.
Both == {Asked("dim", "read", 1, 1), Asked("dim", "write", 1, 1), Asked("etl", "write", 2, 1), Asked("etl", "write", 2, 2)}
Readers == {Asked("dim", "read", 1, 1), Asked("dim", "write", 1, 1)}
Limits == {Asked("etl", "write", 2, 1), Asked("etl", "write", 2, 2), Asked("etl", "write", 1, 1)}
Stages == {Asked("stage", "stage:1", 1, 1), Asked("stage", "stage:2", 1, 1)}
Alike == Permutations(Requester)
=========================================================================================
