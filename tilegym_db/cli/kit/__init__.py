"""Parts that several commands share: output, options, names, progress."""
