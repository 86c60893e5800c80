"""`python -m batchrun`: the same as the command `batchrun`."""

from batchrun.cli import batchrun

if __name__ == "__main__":
    batchrun(prog_name="batchrun")
