"""What can be known from the tables: pure functions over their rows. No I/O, and no clock but the database's, as the
rows have it.

    overview.py    all that is there at one instant
    reasons.py     why somebody waits, in words
    chains.py      who waits for whom, up to the one at the head
    rule.py        the rule over a whole queue
    audit.py       whether a history was in order
    replay.py      what a night would have been
    timeline.py    what happened when, to be drawn
    estimates.py   when somebody will go in, from the history of such holds
"""
