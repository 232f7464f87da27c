"""One's own text becomes the indexed dataset that Megatron's --data-path reads."""
