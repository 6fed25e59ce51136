"""The untrusted side: the worker process that loads and calls a Solution, and what the harness shares with it."""
