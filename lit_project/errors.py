"""The one exception type whose message is written for the person at the command line."""


class InputError(ValueError):
    """Something the user gave (a file, a folder, a setting) cannot be used.

    The message says what is wrong, where, and what to do. ``lit_project.cli`` prints it without a traceback and exits
    with status 1; from Python it is an ordinary ``ValueError``.
    """
