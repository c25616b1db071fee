"""``python -m clients.mixed``: one limit, shared by programs in several languages.

Processes of Python, C# (clients/dotnet, if Mono is installed) and psql (if installed) take turns on one limit. So does
a bare participant, which uses only the queue's table. Each reads the database's clock right after the grant and before
the release; from these times the limit and the order are checked at the end.
"""
