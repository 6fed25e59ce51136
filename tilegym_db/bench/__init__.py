"""The harness: plan what to measure, verify and time it, write a Trace the moment it exists."""
