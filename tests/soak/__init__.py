"""The soak: locks of every kind under faults of every kind, for as long as it is told to. See `__main__`.

`jobs` is what processes do, again and again, and what they write down; `doors` the kernel's own locks beside it, a
second judge; `checks` looks through what was written down; `places` are the databases and what can happen to them;
`night` lets a crowd work in one place for some time, while things happen; `record` adds up what many such times gave.
"""
