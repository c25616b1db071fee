"""``sqlsem dashboard``: what ``sqlsem top`` shows, for a browser, with Starlette (``pip install 'sqlsem[dashboard]'``).

app.py        the pages, and what is done from them
pages.py      how they are drawn
feed.py       one look for all who have a page open
guarding.py   who may ask, and from where
connection.py how long a browser may take, and how many may be connected
server.py     uvicorn, until somebody ends it
"""
