"""`python -m vitral` is `vitral`."""

from vitral.cli import main

if __name__ == "__main__":
    main()
