"""What is built on batchrun rather than into it: today the benchmark, `python -m batchrun_jobs.bench`."""
