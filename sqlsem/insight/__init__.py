"""Answer questions from the tables' rows: pure functions. No I/O, and no clock but the database's, as the rows have it.

overview.py        all rows at one instant
reasons.py         why a request waits, in words
chains.py          the chain of waiters, up to the row that blocks them all
totals.py          the rule along a queue, from running sums
rule.py            the rule over a whole queue
audit.py           check that a history kept the rule
replay.py          run a history again with other settings
timeline.py        lay out a history to be drawn
estimates.py       when a request will be granted, from the history of such holds
consequences.py    what an operator's action would do
board.py           the tables of `sqlsem top` and the dashboard
"""
