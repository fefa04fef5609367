"""`python -m fitstep` is the command `fitstep`."""

from fitstep.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
