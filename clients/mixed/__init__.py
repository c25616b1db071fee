"""``python -m clients.mixed``: one limit, shared by programs in several languages.

Processes of Python, C# (clients/dotnet, where Mono is there), psql (where it is there), and a bare participant, which
knows nothing but the queue's table, take turns on one limit. Each reads the database's clock once it is in, and before
it leaves; from that the limit and the order are checked at the end.
"""
