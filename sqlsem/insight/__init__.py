"""Answer questions from the tables' rows: pure functions. No I/O, and no clock but the database's, as the rows have it.

"The rule" in these modules is `Request.fits`: which rows ahead of a request in its queue block it.

overview.py        all rows at one instant
patterns.py        limits that the server sets for all names that begin alike
chains.py          the chain of waiters, up to the row that blocks them all
reasons.py         why a request or a task waits, in words
blockers.py        the rows that block a request, for an error message
kept.py            locks inside the database that a session keeps too long
totals.py          the rule along a queue, from running sums
rule.py            the rule over a whole queue while rows come and go
audit.py           check that a history kept the rule
replay.py          run a history again with other settings
timeline.py        lay out a history to be drawn
estimates.py       when a request will be granted, from the history of such holds
task_estimates.py  when a task will be started, from the history of such tasks
rates.py           when a request for a rate will be granted
consequences.py    what an operator's action would do
board.py           the tables of `sqlsem top` and the dashboard
columns.py         the columns of these tables
words.py           durations and processes in a few words
"""
