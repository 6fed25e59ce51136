"""Why a call site that asked for kernels in vain leaves a model, and whether it may leave now."""

from __future__ import annotations

import sys

from tilegym_db.integrations.transformers.call_site import CallSite

__all__ = ["is_compiled_code_about", "why_given_up"]

NEVER_MATCHED = "none of its first {} calls could be served; it runs the model's own code"
NEVER_FOLLOWED = "none of its first {} calls could be served by what comes after it; the model's own code runs"


def why_given_up(site: CallSite) -> dict[CallSite, str]:
    """The reason for a site whose patience is over, and for the one before it; empty where a kernel has served a call.

    A site with another before it is asked only where that one was served, so that it may have had fewer calls.
    """
    counts = [] if site.dispatcher is None else [site.dispatcher.report()]
    counts += () if site.training is None else site.training.reports()
    if any(one.kernel_calls for one in counts):
        return {}
    calls = sum(one.calls for one in counts[:1])
    if site.before is None or site.before.dispatcher is None:
        return {site: NEVER_MATCHED.format(calls)}
    before = site.before.dispatcher.report()
    waited = max(calls, before.calls)
    told = NEVER_FOLLOWED if before.kernel_calls else NEVER_MATCHED
    return {site: NEVER_MATCHED.format(waited), site.before: told.format(waited)}


def is_compiled_code_about() -> bool:
    """Whether this process holds code that torch.compile made: its guards look at classes, and would have it compiled anew."""
    frames = sys.modules.get("torch._dynamo.convert_frame")
    made = getattr(frames, "output_codes", None)
    return frames is not None and bool(getattr(made, "seen", True))
