"""Parts of the benchmark of attention, context parallelism and the learner."""
