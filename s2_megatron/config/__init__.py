"""The sparsity YAML: its schema, its errors, and the pattern of every layer that follows from it. No torch."""
