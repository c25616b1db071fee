"""The tools of operators: ``sqlsem top``, the dashboard, metrics, ``sqlsem certify``, the demonstration, and output.

They only read the database, or call `sqlsem.api.admin`. No program that locks needs this package.
"""
