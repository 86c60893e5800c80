"""As much of EleutherAI's harness as batchrun calls; `against_harness` and `inside_harness` take the real one."""
