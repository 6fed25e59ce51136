"""Tuning: which config of a Solution is fastest on a Workload. Offline only; nothing tunes itself at run time."""
