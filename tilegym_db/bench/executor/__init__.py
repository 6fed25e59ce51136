"""Where a plan runs: on this machine (``local``)."""
