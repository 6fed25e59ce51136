"""Shared parts of commands: options, output, formats, names and progress bars."""
