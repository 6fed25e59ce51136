"""Layers of models as modules over the catalog's operators, with gradients: hyper-connections and n-gram memory.

A layer runs the fastest verified kernels of the machine, forward and backward, or else the references of the Definitions. Its
parameters have the names that transformers uses, so checkpoints of transformers load.
"""

from tilegym_db.layers.engram import EngramGateLayer
from tilegym_db.layers.hyper_connections import HyperConnection, HyperHead, MHCPipeline

__all__ = ["EngramGateLayer", "HyperConnection", "HyperHead", "MHCPipeline"]
