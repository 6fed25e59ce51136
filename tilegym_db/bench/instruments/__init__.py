"""NVIDIA's tools over a Solution: compute-sanitizer (``sanitize``) and Nsight Compute (``profile``).

Both attach to a process, which no sandbox lets them do. So the calls run in a plain process of this user, and only a source that
the scan passes is run.
"""
