"""Runs verified kernels inside unmodified Hugging Face models, one instance at a time.

:func:`patch` finds the call sites of a model by structure, confirms each by probing it, and puts a dispatcher in front of the
stock code; :meth:`Handle.unpatch` takes everything away again. Nothing of transformers itself is changed.
"""

from tilegym_db.models.handle import Handle
from tilegym_db.models.patch import patch, patched, patched_init

__all__ = ["Handle", "patch", "patched", "patched_init"]
