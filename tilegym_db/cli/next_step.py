"""What to do where the resolver has nothing to serve: pure, and only what is possible on this machine."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["next_step"]


def next_step(
    definition: str, asked: str, here: str, measured: Sequence[str] = (), waiting: int = 0, *, can_bench: bool = True
) -> str:
    """The next command for someone who asked about ``definition`` on the GPU ``asked``.

    Args:
        asked: a slug or a family.
        here: the slug of this machine; ``cpu`` where it has no GPU.
        measured: GPUs on which the definition has verified traces.
        waiting: passes of a screen on the GPU asked for that wait for their promotion.
        can_bench: whether PyTorch is installed here, which all measuring takes.
    """
    from tilegym_db.records.hardware import CPU, same_gpu

    if asked == here or same_gpu(asked, here):
        if not can_bench:
            return "Measuring takes PyTorch, which is not installed here. Next: pip install 'tilegym-db[torch]'"
        if waiting:
            return f"Next, on this {here}: tilegym-db promote {definition}, then tilegym-db publish --gpu {here}."
        return (
            f"Next, on this {here}: tilegym-db bench {definition} --gpu {here} --promote, "
            f"then tilegym-db publish --gpu {here}."
        )
    others = [gpu for gpu in measured if not same_gpu(asked, gpu)]
    what = "has no GPU" if here == CPU else f"has a {here}"
    absent = f"This machine {what}, so nothing can be measured for {asked} here. "
    if any(same_gpu(asked, gpu) for gpu in measured):
        return f"{absent}What is measured on {asked}: tilegym-db best {definition} --gpu {asked}"
    if others:
        return f"{absent}What is measured elsewhere: tilegym-db best {definition} --gpu {others[0]}"
    return f"{absent}Its kernels can be compiled here all the same: tilegym-db compile {definition}"
