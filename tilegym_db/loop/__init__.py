"""From a task to a promotion: what is worth writing, what an author is given, how a submission is judged, what came of it.

An author writes a kernel and nothing else. Reference, inputs, comparison, timing and verdict are those of ``verify`` and
``bench``; nothing here judges, and nothing here calls a language model.
"""
