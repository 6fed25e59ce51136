"""Timing of whole models, patched and stock."""
