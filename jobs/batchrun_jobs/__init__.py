"""What is built on batchrun rather than into it: presets, schedulers, benchmarks."""
