"""The soak: locks of every kind under faults of every kind, for as long as asked. See `__main__`.

`jobs` is the repeated work of processes, and their records; `kernel_locks` has the kernel's own locks as a second
judge; `checks` examines the records; `places` are the databases and their faults; `night` lets a crowd work in one
place for some time, under faults; `record` sums up the results of many nights.
"""
