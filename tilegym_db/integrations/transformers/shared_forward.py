"""A forward whose parts are functions that it calls: the same code, with some of these functions replaced."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tilegym_db.integrations.transformers.call_site import IN_TRAINING, CallSite

__all__ = ["shared_forward"]

_is_compiling = torch.compiler.is_compiling


def shared_forward(
    stock: Callable[..., Any],
    shadow: Callable[..., Any],
    training_shadow: Callable[..., Any] | None,
    told: Sequence[CallSite],
    sites: Sequence[CallSite],
) -> Callable[..., Any]:
    """Forward of attention: a shadow, the same code with another rotary or attention function, or ``stock`` itself.

    Args:
        stock: the forward of the class.
        shadow: for modules that do not train.
        training_shadow: for those that do, which the functions in it cannot tell by what they are given; None for stock.
        told: the call sites that count what runs stock code as a whole.
        sites: all of the functions in the shadows.
    """
    untrained = [site for site in told if training_shadow is None or site.training is None]

    @functools.wraps(stock)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        is_compiling, training = _is_compiling(), self.training
        is_open = sites[0].is_open or any([site.is_open for site in sites])
        if not is_open or (training and (is_compiling or training_shadow is None)):
            if not is_compiling:
                for site in told:
                    site.bypass(IN_TRAINING if training else site.closed)
            return stock(self, *args, **kwargs)
        if training and training_shadow is not None:
            for site in untrained:
                site.bypass(IN_TRAINING)
            return training_shadow(self, *args, **kwargs)
        return shadow(self, *args, **kwargs)

    return forward
