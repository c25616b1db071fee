"""``sqlsem top``: what goes on, on a terminal, with Textual (``pip install 'sqlsem[top]'``)."""
