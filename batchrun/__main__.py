"""`python -m batchrun`: the same as the command `batchrun`."""

from batchrun.cli import main

if __name__ == "__main__":
    main()
