"""Scores the same choices in several ways on this machine's CPU, by turns: `python -m batchrun_jobs.bench_score`."""
