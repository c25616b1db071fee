"""The output of the command line: printing, and the rendering of queues, tasks and batches. Knows no commands."""
