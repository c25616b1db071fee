"""The names of the operating system's users: SQLite has no logins."""

from __future__ import annotations

import os


def user_name(number: int | None = None) -> str:
    """Return the name of an operating system's user (default: the user of this process), or else the number."""
    try:
        import pwd
    except ImportError:  # Windows
        import getpass

        return getpass.getuser()
    if number is None:
        number = os.geteuid()
    if number not in _user_names:  # a directory service may take long to answer
        try:
            _user_names[number] = pwd.getpwuid(number).pw_name
        except KeyError:
            _user_names[number] = str(number)
    return _user_names[number]


_user_names: dict[int, str] = {}
