"""Layers of models as modules over the catalog's operators, with their gradients: hyper-connections and n-gram memory.

A layer runs the fastest verified kernels of the machine, forward and backward, and the references of the Definitions where there
are none. Parameters have the names that transformers gives them, so that its checkpoints load.
"""

from tilegym_db.layers.engram import EngramGateLayer
from tilegym_db.layers.hyper_connections import HyperConnection, HyperHead, MHCPipeline

__all__ = ["EngramGateLayer", "HyperConnection", "HyperHead", "MHCPipeline"]
