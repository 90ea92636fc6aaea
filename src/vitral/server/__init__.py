"""`vitral serve`: models behind HTTP."""
