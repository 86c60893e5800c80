"""Times every operation against its floor, beside the other ways of computing it: `python -m batchrun_kernels.bench`.

A case is an operation at a size; it is prepared, checked against its reference, and only then timed. Knows no model.
"""
