"""The untrusted side: the worker process that loads and calls a Solution, and what the supervisor shares with it."""
