"""``sqlsem dashboard``: the views of ``sqlsem top`` in a browser, by Starlette (``pip install 'sqlsem[dashboard]'``).

app.py     the pages and their actions
pages.py   draws the pages
feed.py    sends each new board to all browsers; one poll for all of them
access.py  checks hosts, origins and the token
server.py  runs uvicorn; limits the number of connections and the time for a request
"""
