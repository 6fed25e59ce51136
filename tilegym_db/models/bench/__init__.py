"""Time whole models, patched and as they are."""
