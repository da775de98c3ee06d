"""``python -m leantune``: the command line."""

from leantune.cli import main

if __name__ == "__main__":
    main()
