"""`python -m upweight` is the `upweight` command."""

from upweight.cli.app import main

if __name__ == "__main__":
    main()
