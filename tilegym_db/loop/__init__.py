"""Tasks, submissions and the loop that optimises a model.

An author only writes a kernel. ``verify`` and ``bench`` provide the reference, inputs, comparison, timing and verdict.
This package does not call a language model.
"""
