"""Run and judge Solutions of imported data sets in the sandbox."""
