"""Import and export of other projects' data sets, one module per dialect. Bytes are kept, and an import executes nothing."""
