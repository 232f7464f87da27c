"""What a run writes down: its losses, throughput, settings and tables, and how it ended."""
