"""Data sets of other projects, in and out: one dialect a file, exact bytes kept, nothing executed on import."""
