"""The waiters of this process: which of them waits in the database, which polls, which one a release wakes. No I/O."""
