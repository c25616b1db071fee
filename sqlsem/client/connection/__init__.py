"""The connections of this process to one database, and the threads that keep its rows alive there.

`main` holds the beacon and executes the calls; `membership` sends heartbeats and finds losses; waiters block on the
connections of `wait_pool`; `retention` deletes old history.
"""
