"""What other people's programs are given, so that they use sqlsem in their own way. Each is loaded by its name.

pytest  a marker and a fixture, found by pytest itself
django  locks in the database of Django's settings, and transactions that end before their lock does
"""
