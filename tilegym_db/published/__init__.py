"""Shipped and published measurements: write, lock, trust, read, merge."""
