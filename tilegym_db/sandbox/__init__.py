"""Confines a process on this machine: namespaces, Landlock, a system call filter, resource limits. Knows no kernels."""

from __future__ import annotations
