"""``python -m support.next_version``: the command line of a client of the next version."""

from support.next_version import run

run()
