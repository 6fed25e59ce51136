"""The demo's model: patched on this machine, and as an H200 would run it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tilegym_db.cli.demo_kernel import HIDDEN
from tilegym_db.cli.demo_output import heartbeat, say, step
from tilegym_db.cli.output import print_table, table_width

if TYPE_CHECKING:
    from tilegym_db.bench.machine import Machine
    from tilegym_db.catalog import Catalog

__all__ = ["REFERENCE_GPU", "build_config", "explain_sites", "foresee", "patch_a_model"]

REFERENCE_GPU = "h200"


def patch_a_model(machine: Machine, tokens: int) -> int:
    """5. One line: the model runs verified kernels where they are faster."""
    import torch

    from tilegym_db.catalog import Catalog

    step(
        "5. patch a model",
        "A Llama of two layers with random weights. tilegym_db.patch(model) lets verified\n"
        "kernels serve its calls. What is not verified or not faster on this machine stays\n"
        "the model's own code, and the report says why.",
    )
    with heartbeat("loading transformers and building the model"):
        from tilegym_db.integrations.transformers import patched

        dtype = torch.bfloat16 if machine.is_gpu else torch.float32
        model = build_llama().to(device=machine.device, dtype=dtype)
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, model.config.vocab_size, (1, tokens), generator=generator).to(machine.device)
    ops = None if machine.is_gpu else ("rms_norm",)
    with heartbeat("running the model, stock and patched"), torch.no_grad():
        stock = model(ids).logits
        with patched(model, catalog=Catalog.default(), ops=ops) as handle:
            logits = model(ids).logits
            report = handle.report()
        again = model(ids).logits
    say(report.text(table_width()))
    error = float((logits.float() - stock.float()).norm() / stock.float().norm())
    say(
        f"{report.kernel_calls} calls ran a verified kernel. Patched logits against stock: relative difference {error:.1e}."
    )
    say(f"After unpatching, the model gives its own logits bit for bit: {torch.equal(stock, again)}.")
    if not report.kernel_calls:
        say("None was faster than the model's own code by more than the noise of this machine, so none was used.")
    return 0 if torch.equal(stock, again) else 1


def foresee(tokens: int) -> None:
    """6. The same model on an H200, from the shipped measurements."""
    from tilegym_db.catalog import Catalog

    step(
        "6. the same model on an H200",
        "What each call of that model runs on an H200 in bfloat16, by the shipped\n"
        "measurements: time of the kernel, and speedup over the model's own code. A call of\n"
        "one token is a step of decoding.",
    )
    with heartbeat("asking the resolver"):
        rows = explain_sites(build_config(), Catalog.default(), tokens=4096)
    print_table(("definition", "call", "runs", "us", "speedup"), rows)


def build_config(layers: int = 2) -> Any:
    """The sizes of Llama-3.2-1B, cut to a few layers and a small vocabulary."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=4096,
        hidden_size=HIDDEN,
        intermediate_size=8192,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
    )


def build_llama(layers: int = 2) -> Any:
    """A Llama of :func:`build_config` with random weights."""
    import torch
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(build_config(layers))
    return model.eval()


def explain_sites(config: Any, catalog: Catalog, *, tokens: int) -> list[tuple[Any, ...]]:
    """What the resolver gives each call site of such a model, for one prompt and for one new token: rows of a table."""
    from tilegym_db.resolver import decide_request, make_request

    heads = {"Hq": config.num_attention_heads, "Hkv": config.num_key_value_heads, "D": config.head_dim}
    transposed = {name: "row_contiguous" for name in ("q", "k", "q_out", "k_out")}
    rows: list[tuple[Any, ...]] = []
    for count in (tokens, 1):
        sites: list[tuple[str, dict[str, int], dict[str, str]]] = [
            ("rms_norm", {"M": count, "N": config.hidden_size}, {}),
            ("fused_add_rms_norm", {"M": count, "N": config.hidden_size}, {}),
            ("swiglu", {"M": count, "I": config.intermediate_size}, {}),
            ("rope_neox", {"B": 1, "Bc": 1, "S": count, **heads}, transposed if count > 1 else {}),
        ]
        for name, axes, layouts in sites:
            definition = catalog.definition(name)
            request = make_request(definition, axes=axes, dtypes={"T": "bfloat16"}, layouts=layouts, gpu=REFERENCE_GPU)
            decision, _ = decide_request(request, catalog)
            chosen = "stock" if decision.solution is None else decision.solution.name
            found = decision.evidence.candidate
            measured = (None, None) if found is None else (found.latency_us, found.speedup)
            rows.append((name, f"{count} token" + ("s" if count > 1 else ""), chosen, *measured))
    return rows
