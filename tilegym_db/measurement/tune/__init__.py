"""Tuning: search the fastest config of a Solution on a Workload. It runs offline only; no kernel tunes itself at run time."""
