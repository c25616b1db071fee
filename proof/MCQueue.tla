------------------------------------- MODULE MCQueue ------------------------------------
EXTENDS Queue, TLC
CONSTANTS a, b, c, x, y
Asked(s, kind, most) == [resource |-> s, access |-> kind, limit |-> most, weight |-> 1]
Mutex == {Asked(x, "write", 1)}
Two == {Asked(s, "write", 1) : s \in {x, y}}
Readers == {Asked(x, "write", 1), Asked(x, "read", 1)}
Alike == Permutations(Requester \ Leased) \cup Permutations(Leased) \cup Permutations(Resource)
===========================================================================================
