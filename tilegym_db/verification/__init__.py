"""Verification of Solutions: inputs, oracle, gates, and the sessions with the worker process that runs a Solution."""
