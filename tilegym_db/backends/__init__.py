"""From a Solution's source to a callable, and to machine code for a GPU that this machine need not have.

``load`` imports a Solution's entry point, ``toolchains`` says which compilers are installed and what they need, ``aot``
compiles ahead of time in worker processes; ``triton``, ``tilelang`` and ``cutile`` hold what differs by language.
"""
