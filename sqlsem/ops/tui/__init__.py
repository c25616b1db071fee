"""``sqlsem top``: a live view of the database on a terminal, with Textual (``pip install 'sqlsem[top]'``)."""
