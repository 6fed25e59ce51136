"""Loads a Solution's source as a callable, and compiles it ahead of time for GPUs that this machine may not have.

``load`` imports a Solution's entry point, ``toolchains`` says which compilers are installed and what they need, ``aot``
compiles ahead of time in worker processes; ``triton``, ``tilelang`` and ``cutile`` hold what differs by language.
"""
