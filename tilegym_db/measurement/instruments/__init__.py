"""NVIDIA's tools on a Solution: compute-sanitizer (``sanitize``) and Nsight Compute (``profile``).

Both attach to a process, which a sandbox does not allow. So the calls run in a plain process of this user, and only for
sources that the static scan accepts.
"""
