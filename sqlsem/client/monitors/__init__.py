"""Watches beside the operations for deadlocks, contention, cancel requests, notifications and the order of locks."""
