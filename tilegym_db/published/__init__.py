"""Shipped and published measurements: written, locked, read, checked for trust, and merged."""
