"""What judges an implementation: the fp64 oracle and the check of context parallelism, for tests and benchmarks."""
