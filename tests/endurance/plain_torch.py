"""`batchrun` as on a machine without a C compiler: python -m tests.endurance.plain_torch submit …"""

from pathlib import Path

from batchrun.cli import main
from batchrun_kernels import native

if __name__ == "__main__":
    native.FOLDER = Path("/nonexistent")
    main()
