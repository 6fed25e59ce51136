"""cuTile and TileLang kernels of attention with a mask of numbers or flags: any mask over several tiles, in blocks or split."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("cuda.tile")
pytest.importorskip("tilelang")

import torch
from shipped_records import CATALOG

from tilegym_db.backends import cutile_interpreter, tilelang_interpreter
from tilegym_db.resolver.loader import load_verified
from tilegym_db.verification.oracle import oracle

pytestmark = pytest.mark.sweep

B, HQ, HKV, D = 2, 4, 2, 16
LENGTH = 300

Seen = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
MASKS: dict[str, Seen] = {
    "causal": lambda row, key: key <= row,
    "gap": lambda row, key: (key <= row) & ((key < 64) | (key >= 192)),
    "padded": lambda row, key: (key <= row) & (key >= 130),  # a row before 130 sees nothing
    "window": lambda row, key: (key <= row) & (key > row - 40),
    "scattered": lambda row, key: (7 * row + 5 * key) % 11 < 3,
    "nothing": lambda row, key: key < 0 * row,
    "everything": lambda row, key: key >= 0 * row,
}


def numbers(seen: Seen, queries: int, dtype: torch.dtype, *, added: bool, infinite: bool) -> torch.Tensor:
    """Return a mask [B, 1, queries, LENGTH] of the last queries, which both sequences share unless numbers are added."""
    row, key = torch.arange(LENGTH - queries, LENGTH)[:, None], torch.arange(LENGTH)[None]
    hidden = -torch.inf if infinite else torch.finfo(dtype).min
    if added:
        mask = torch.randn(B, 1, queries, LENGTH).to(dtype)
        return mask.masked_fill(~seen(row, key), hidden)
    mask = torch.zeros(1, 1, queries, LENGTH).to(dtype).masked_fill(~seen(row, key), hidden)
    return mask.expand(B, 1, queries, LENGTH)


LANGUAGES = {"cutile": cutile_interpreter, "tilelang": tilelang_interpreter}


def evaluated(definition: str, language: str, *inputs: object, **config: object) -> torch.Tensor:
    solution, q = CATALOG.solution(f"{definition}_{language}"), inputs[0]
    assert isinstance(q, torch.Tensor)
    out = torch.full_like(q, float("nan"))
    with LANGUAGES[language].interpreting():
        load_verified(solution, solution.digest)(*inputs, out, **config)
    return out


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize(
    ("definition", "language", "queries", "dtype", "added", "scale", "config"),
    [
        ("attention_sink_masked_prefill", "cutile", 140, torch.bfloat16, False, 0.3, {}),
        ("attention_sink_masked_prefill", "cutile", 140, torch.float16, True, -0.3, {"CONFIG": "s128_n128"}),
        ("attention_sink_masked_decode", "cutile", 1, torch.bfloat16, False, 0.3, {}),
        ("attention_sink_masked_decode", "cutile", 1, torch.float16, True, -0.3, {"BLOCKS": 1}),
        ("attention_sink_masked_prefill", "tilelang", 140, torch.bfloat16, False, 0.3, {}),
        ("attention_sink_masked_prefill", "tilelang", 140, torch.float16, True, 0.3, {"rows": 128, "keys": 128}),
        ("attention_sink_masked_prefill", "tilelang", 9, torch.float16, True, -0.3, {}),  # the plain kernel
        ("attention_sink_masked_decode", "tilelang", 1, torch.bfloat16, False, 0.3, {}),
        ("attention_sink_masked_decode", "tilelang", 1, torch.float16, True, 0.3, {"ctas": 0}),  # not split
        ("attention_sink_masked_decode", "tilelang", 1, torch.float16, True, -0.3, {}),
    ],
)
def test_every_mask_gives_the_sums_of_what_it_leaves(definition, language, queries, dtype, added, scale, config, kind):
    torch.manual_seed(queries)
    q = torch.randn(B, HQ, queries, D).to(dtype)
    k, v = torch.randn(2, B, HKV, LENGTH, D).to(dtype)
    sinks = torch.tensor([-3.0, 0.0, 2.5, 9.0]).to(dtype)
    mask = numbers(MASKS[kind], queries, dtype, added=added, infinite=kind in ("window", "gap"))
    inputs = {"q": q, "k": k, "v": v, "sinks": sinks, "mask": mask, "scale": scale}
    truth = oracle(CATALOG.definition(definition), inputs)["out"]
    out = evaluated(definition, language, *inputs.values(), **config)
    assert float((out - truth).abs().max()) < 1e-2 * max(1.0, float(truth.abs().max()))


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("sink", [-torch.inf, -3e38, 3e38])
def test_far_sink_takes_no_share_or_all(sink: float, language: str) -> None:
    q, k = torch.randn(1, 2, 1, D).bfloat16(), torch.randn(1, 2, 70, D).bfloat16()
    mask, sinks = torch.zeros(1, 1, 1, 70).bfloat16(), torch.full((2,), sink).bfloat16()
    out = evaluated("attention_sink_masked_decode", language, q, k, k, sinks, mask, 0.3)
    weights = torch.softmax(q.float() @ k.float().mT * 0.3, dim=-1)
    truth = torch.zeros_like(weights @ k.float()) if sink > 0 else weights @ k.float()
    assert float((out - truth).abs().max()) < 2e-2


SOFTCAP = [
    ("attention_softcap_cutile", 140, {}),
    ("attention_softcap_cutile", 1, {}),
    ("attention_softcap_tilelang", 140, {}),
    ("attention_softcap_tilelang", 1, {"keys": 128}),
]


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize(("name", "queries", "config"), SOFTCAP)
def test_capped_scores_are_weighed_under_every_mask(name, queries, config, kind) -> None:
    """A row that sees no key has the mean of all values, since the mask is finite; with -inf each row sees a key."""
    torch.manual_seed(queries)
    definition, language = name.rsplit("_", 1)
    q = 4 * torch.randn(B, HQ, queries, D).bfloat16()
    k, v = torch.randn(2, B, HKV, LENGTH, D).bfloat16()
    infinite = kind in ("window", "gap")
    mask = numbers(MASKS[kind], queries, torch.bfloat16, added=kind == "causal", infinite=infinite)
    inputs = {"q": q, "k": k, "v": v, "mask": mask, "softcap": 3.0, "scale": 0.5}
    truth = oracle(CATALOG.definition(definition), inputs)["out"]
    out = evaluated(definition, language, *inputs.values(), **config)
    assert float((out - truth).abs().max()) < 1e-2 * max(1.0, float(truth.abs().max()))


LATENT = [
    ("mla_masked_cutile", 140, (192, 32), 0.3, {}),
    ("mla_masked_cutile", 140, (24, 16), -0.3, {"CONFIG": "s128_n128"}),
    ("mla_masked_cutile", 1, (24, 16), 0.3, {}),
    ("mla_masked_tilelang", 140, (192, 32), 0.3, {}),
    ("mla_masked_tilelang", 140, (24, 16), 0.3, {"rows": 128, "keys": 128}),
    ("mla_masked_tilelang", 9, (24, 40), -0.3, {}),  # the plain kernel
]


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize(("name", "queries", "widths", "scale", "config"), LATENT)
def test_values_of_another_width_are_weighed_under_every_mask(name, queries, widths, scale, config, kind) -> None:
    torch.manual_seed(queries)
    definition, language = name.rsplit("_", 1)
    q, k, v = (
        torch.randn(B, HKV, rows, width).bfloat16()
        for rows, width in ((queries, widths[0]), (LENGTH, widths[0]), (LENGTH, widths[1]))
    )
    row, key = torch.arange(LENGTH - queries, LENGTH)[:, None], torch.arange(LENGTH)[None]
    mask = MASKS[kind](row, key).expand(B, 1, queries, LENGTH)
    if kind == "causal":
        mask = torch.cat([mask[:1], MASKS["window"](row, key).expand(1, 1, queries, LENGTH)])
    scale = scale / widths[0] ** 0.5
    truth = oracle(CATALOG.definition(definition), {"q": q, "k": k, "v": v, "mask": mask, "scale": scale})["out"]
    solution, out = CATALOG.solution(name), torch.full((B, HKV, queries, widths[1]), float("nan")).bfloat16()
    with LANGUAGES[language].interpreting():
        load_verified(solution, solution.digest)(q, k, v, mask, scale, out, **config)
    assert float((out - truth).abs().max()) < 1e-2 * max(1.0, float(truth.abs().max()))
