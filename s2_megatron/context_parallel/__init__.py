"""The op across context-parallel ranks: what each rank needs, how it travels, and what is computed meanwhile."""
