"""What ends a verb early: a mistake that the user can fix, in a single sentence that names the fix, or Ctrl-C."""


class UserError(ValueError):
    """A mistake of the user's. The command line prints the sentence and exits with code 2; a traceback is for ours."""


class Interrupted(Exception):
    """The run was asked to stop; its state is saved."""
