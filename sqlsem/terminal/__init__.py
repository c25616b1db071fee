"""What people see: where everything is printed, and the pictures of queues, tasks and batches. Knows no commands."""
