"""The benchmark: ways of answering the same rows, each in a process of its own, by turns, in one table.

`python -m batchrun_jobs.bench`; jobs/README.md says how to read what it prints and how to add a peer.
"""
