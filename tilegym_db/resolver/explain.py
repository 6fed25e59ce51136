"""Explains a decision: which Solution serves a call, and why each other one does not."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tilegym_db.catalog import Catalog, stock_of
from tilegym_db.paths import home
from tilegym_db.published.entries import Candidate
from tilegym_db.published.shared_tables import serving, tables_in
from tilegym_db.records import Definition
from tilegym_db.records.call import Request
from tilegym_db.records.dtypes import Scalar
from tilegym_db.records.hardware import CPU, same_gpu
from tilegym_db.records.solution import Config
from tilegym_db.resolver.decide import (
    MEASURED,
    Decision,
    Evidence,
    Rejection,
    candidates_table,
    not_in_compiled_code,
    spelled_decision,
)
from tilegym_db.resolver.resolve import ask, decide_request, requirements


@dataclass(frozen=True, repr=False)
class Explanation:
    """The decision about one call, with the reason for every candidate.

    ``solution`` is the name of the verified kernel that serves the call. It is None if stock code runs; ``stock`` names that.
    """

    request: Request
    decision: Decision
    stock: str | None
    shared_tables: tuple[Mapping[str, Any], ...] = ()
    """Shared tables of this GPU: origin, trust, and use or the reason against it."""

    @property
    def solution(self) -> str | None:
        """The name of the kernel that serves the call; None if stock code runs."""
        return self.decision.solution.name if self.decision.solution else None

    @property
    def config(self) -> Config:
        """The config of the kernel."""
        return self.decision.config

    @property
    def evidence(self) -> Evidence:
        """The measured point behind the decision, or the reason for stock code."""
        return self.decision.evidence

    @property
    def rejected(self) -> tuple[Rejection, ...]:
        """Every other candidate with the reason against it."""
        return self.decision.rejected

    @property
    def left_to_compilers(self) -> str | None:
        """The reason why a kernel for eager calls does not serve compiled code; None if it does, or if no kernel serves."""
        return not_in_compiled_code(self.decision) if self.decision.solution else None

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as plain values, for JSON."""
        call, evidence, chosen = self.request.call, self.evidence, self.evidence.candidate
        return {
            "definition": self.request.definition.name,
            "axes": dict(call.axes),
            "dtypes": dict(call.dtypes),
            "scalars": dict(call.scalars),
            "layouts": dict(call.layouts),
            "gpu": self.request.gpu,
            "mode": self.request.mode,
            "launch": self.request.launch,
            "solution": self.solution,
            "stock": self.stock,
            "config": self.config,
            "left_to_compilers": self.left_to_compilers,
            "evidence": {
                "source": evidence.source,
                "reason": evidence.reason,
                "gpu": evidence.gpu,
                "published": evidence.published,
                "axes": dict(evidence.axes) if evidence.axes is not None else None,
                "measurement": vars(chosen) if chosen is not None else None,
            },
            "rejected": [{**vars(candidate), "reason": reason} for candidate, reason in self.rejected],
            "shared_tables": [dict(table) for table in self.shared_tables],
        }

    def candidates(self) -> list[dict[str, Any]]:
        """Return one flat record per candidate: the picked one first, then the rejected ones with their reasons."""
        chosen = self.evidence.candidate
        stock = f"stock ({self.stock})" if self.stock else "none: there is no stock solution"
        picked = {"picked": True, **(_figures(chosen) if chosen else dict.fromkeys(MEASURED) | {"solution": stock})}
        return [
            {**picked, "reason": self.evidence.reason},
            *({"picked": False, **_figures(candidate), "reason": reason} for candidate, reason in self.rejected),
        ]

    def __repr__(self) -> str:
        """Return the call, what serves it and why, in one line; ``str`` has all candidates."""
        served = str(self.evidence.candidate or self.stock or "no solution")
        return f"<Explanation: {spelled_decision(self.request, served, self.evidence)}>"

    def _repr_html_(self) -> str:
        return candidates_table(self.request, self.evidence, self.rejected, self.stock)

    def __str__(self) -> str:
        lines = (
            f"{'picked' if row['picked'] else 'not'} {row['solution']}: {row['reason']}" for row in self.candidates()
        )
        return "\n".join(lines)


def _figures(candidate: Candidate) -> dict[str, Any]:
    return {key: getattr(candidate, key) for key in MEASURED}


def explain(
    definition: str | Definition,
    *,
    axes: Mapping[str, int] | None = None,
    dtypes: Mapping[str, Any] | None = None,
    layouts: Mapping[str, str] | None = None,
    scalars: Mapping[str, Scalar] | None = None,
    gpu: str | None = None,
    mode: str = "inference",
    launch: str = "call",
    like: Sequence[Any] | None = None,
    catalog: Catalog | None = None,
    trust: bool = False,
    require: str | Collection[str] = (),
) -> Explanation:
    """Return which Solution the resolver picks for a call, and why it rejects the others. Nothing runs.

    The arguments are those of :func:`~tilegym_db.resolve`, which returns the picked Solution as a callable. Unlike it, this
    also answers for an operator without stock code.

    Raises:
        NotFoundError: the Definition is unknown.
        UsageError: the request does not fit the Definition, or the GPU is unknown.
    """
    catalog = (catalog or Catalog.default()).trusting(trust).requiring(requirements(require))
    request = ask(
        definition,
        catalog,
        axes=axes,
        dtypes=dtypes,
        layouts=layouts,
        scalars=scalars,
        gpu=gpu,
        mode=mode,
        launch=launch,
        like=like,
    )
    decision, solutions = decide_request(request, catalog)
    stock = stock_of(solutions.values())
    tables = shared_tables(request.gpu, trust=catalog.trust_foreign)
    return Explanation(request, decision, stock.name if stock else None, tuple(tables))


def shared_tables(gpu: str, *, trust: bool = False) -> list[dict[str, Any]]:
    """Return the shared tables for a GPU slug or family: origin, trust, and use."""
    found = [table for table in tables_in(home()) if same_gpu(gpu, table.gpu)]
    used = {table.snapshot.folder for table in serving(found, trust=trust)}
    return [
        {
            "gpu": table.gpu,
            "address": table.address,
            "published": table.snapshot.published,
            "standing": table.standing,
            "used": table.snapshot.folder in used,
            "why": "" if table.snapshot.folder in used else table.why_unused,
        }
        for table in found
    ]


def next_step(
    definition: str, asked: str, here: str, measured: Sequence[str] = (), waiting: int = 0, *, can_bench: bool = True
) -> str:
    """Return the next command that is possible on this machine, for ``definition`` on the GPU ``asked``.

    Args:
        asked: a slug or a family.
        waiting: screen passes on ``asked`` that await verification.
    """
    if asked == here or same_gpu(asked, here):
        if not can_bench:
            return "Measurements need PyTorch, which is not installed here. Next: pip install 'tilegym-db[torch]'"
        if waiting:
            return f"Next, on this {here}: tilegym-db verify {definition}, then tilegym-db publish --gpu {here}."
        return (
            f"Next, on this {here}: tilegym-db bench {definition} --gpu {here} --verify, "
            f"then tilegym-db publish --gpu {here}."
        )
    others = [gpu for gpu in measured if not same_gpu(asked, gpu)]
    what = "has no GPU" if here == CPU else f"has a {here}"
    absent = f"This machine {what}, so nothing can be measured for {asked} here. "
    if any(same_gpu(asked, gpu) for gpu in measured):
        return f"{absent}Kernels measured on {asked}: tilegym-db best {definition} --gpu {asked}"
    if others:
        return (
            f"{absent}It is measured on {', '.join(others)}. Next, on a machine with {asked}: "
            f"tilegym-db bench {definition} --gpu {asked} --verify"
        )
    return f"{absent}Its kernels can still be compiled here: tilegym-db compile {definition}"
