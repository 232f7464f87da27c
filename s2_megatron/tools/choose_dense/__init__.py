"""Which KV heads stay dense when a dense model goes on with S2-Attention: measured on its checkpoint."""
