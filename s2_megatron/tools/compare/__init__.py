"""`s2-megatron compare RUN RUN ...`: training runs side by side, with noise told from signal."""
