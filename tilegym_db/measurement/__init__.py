"""The harness: it plans what to measure, verifies and times it, and writes each Trace as soon as it exists."""
