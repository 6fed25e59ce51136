"""Verification: inputs, oracle, gates and the separate process that runs a Solution. Decides what counts as correct."""
