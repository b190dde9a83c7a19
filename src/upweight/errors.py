"""The one kind of error a person is meant to read."""


class UserError(Exception):
    """Something the user can mend: the command prints it without a traceback and exits 2."""
