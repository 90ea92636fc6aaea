"""Exceptions: errors that a user can fix, and interrupted runs."""


class UserError(ValueError):
    """An error that the user can fix: one sentence with the problem and the fix. The CLI prints it and exits with 2."""


class Interrupted(Exception):
    """A run was stopped by a signal; its state is saved."""
