"""The `upweight` command: arguments in `app.py`, what is more than a few lines in a file beside it."""
