"""How the cost grows: with the number of waiters, with what was done under an old snapshot, with what is looked at."""
