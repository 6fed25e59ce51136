"""``generate`` that compiles the forward over a static cache, as transformers' own tests of generation ask for it."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from decoding_models import made, prompt
from transformers import CompileConfig, DynamicCache

from tilegym_db.models.decoding import Decoding
from tilegym_db.models.patch import PatchOptions, patch_what_fits

# A static cache is compiled daily in test_compiled.py.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.sweep(4),
    pytest.mark.turn(
        "tilegym_db/models/decoding.py", "tilegym_db/models/call_site.py", "tilegym_db/models/operators.py"
    ),
]

ARCHITECTURES = ("llama", "qwen3", "mistral", "qwen3_moe")
PROMPTS = [prompt(2, 7, seed) for seed in (0, 1)]


def generated(model: Any, ids: torch.Tensor, **options: Any) -> Any:
    config = CompileConfig(fullgraph=True, dynamic=False, backend="aot_eager", mode=None)
    config._compile_all_devices = True
    return model.generate(
        ids, do_sample=False, max_new_tokens=5, return_dict_in_generate=True, output_scores=True,
        compile_config=config, **options,
    )  # fmt: skip


@pytest.mark.parametrize("smallest", [1, 128], ids=["served", "too small for a kernel"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_patched_static_cache_compiles_to_one_graph(
    name: str, smallest: int, shop: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Decoding, "fits", staticmethod(lambda model: True))
    model, catalog = made(name), shop.offer(smallest=smallest)
    torch.compiler.reset()
    with torch.compiler.set_stance("force_eager"):
        handle = patch_what_fits(model, PatchOptions(catalog=catalog))
        eager = [generated(model, ids) for ids in PROMPTS]
    assert all(isinstance(one.past_key_values, DynamicCache) for one in eager)
    assert not hasattr(model, "_compiled_call")
    try:
        torch._logging.set_logs(recompiles_verbose=True)
        with caplog.at_level(logging.DEBUG, logger="torch._dynamo.guards"):
            compiled = [generated(model, ids, cache_implementation="static") for ids in PROMPTS]
    finally:
        torch._logging.set_logs()
    assert hasattr(model, "_compiled_call")
    assert "Recompiling" not in caplog.text
    for want, got in zip(eager, compiled, strict=True):
        assert torch.equal(got.sequences, want.sequences)
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(got.scores, want.scores, strict=True))
    assert bool(handle.report().kernel_calls) == (smallest == 1)
