"""Adapters that bring sqlsem into other tools in their own style. Each is loaded by its name.

pytest  a marker and a fixture, found by pytest itself
django  locks in the database of Django's settings, and transactions that end before their lock does
airflow operators that wait for a lock without a worker slot
"""
