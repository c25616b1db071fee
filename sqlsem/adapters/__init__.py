"""Adapters for other tools, in the style of these. Programs import each by its name.

pytest   a marker and a fixture, found by pytest itself
django   locks in the database of Django's settings, and transactions that end before their lock does
airflow  operators that wait for a lock without a worker slot
"""
