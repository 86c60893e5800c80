"""The kernels in Triton: what they compute is in `reference.py` and the tests, how they are cut in `configs.py`.

Not imported by the package itself: importing this imports Triton.
"""
