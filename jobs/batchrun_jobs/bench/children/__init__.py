"""What runs in the benchmark's child processes: `start.py`, and a script for each way.

A script has a function `run(given)` and imports nothing of ours but what it measures: batchrun's imports batchrun and
its clock, a peer's only the peer, so that it runs under a Python that has the peer and nothing else.
"""
