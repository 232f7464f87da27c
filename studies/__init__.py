"""Studies of quality: the harness, and in results/ what is kept of every run. README.md says how it is measured."""
