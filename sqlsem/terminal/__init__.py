"""What people see: where everything is printed, and the pictures of queues, tasks and rounds. Knows no commands."""
