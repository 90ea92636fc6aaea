"""The one exception that means "the user can fix this": a single sentence that names the fix."""


class UserError(ValueError):
    """A mistake of the user's. The command line prints the sentence and exits with code 2; a traceback is for ours."""
