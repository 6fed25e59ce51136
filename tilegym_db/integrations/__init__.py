"""Where tilegym-db meets other systems: models that run its kernels, formats it exchanges."""
