"""Measure how the cost grows: with the number of waiters, with the work done under an old snapshot, with the rows
read.
"""
