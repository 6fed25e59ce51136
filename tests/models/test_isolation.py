"""A patch changes one instance and nothing else, and leaves nothing behind."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import sys
import threading
import weakref
from typing import Any

import pytest
import torch
from raising import raises
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel
from transformers.models.llama import modeling_llama

from tilegym_db import Catalog, patch, patched, patched_init
from tilegym_db.errors import UsageError
from tilegym_db.models import handle
from tilegym_db.models.operators import make_site

pytestmark = pytest.mark.sweep


def transformers_state() -> dict[str, Any]:
    """Everything of transformers that a patch could reach: module globals, class attributes, the registries."""
    classes = [value for value in vars(modeling_llama).values() if isinstance(value, type)]
    return {
        "globals": dict(vars(modeling_llama)),
        "classes": {cls: dict(vars(cls)) for cls in [*classes, PreTrainedModel, torch.nn.Module]},
        "attention": dict(modeling_llama.ALL_ATTENTION_FUNCTIONS.items()),
    }


def model_state(model: Any) -> list[Any]:
    return [(name, type(module), list(vars(module))) for name, module in model.named_modules()]


def test_nothing_of_transformers_changes(kernels: Catalog, logits: Any, build: Any, prompt: Any) -> None:
    model = build()
    before = transformers_state()
    with patched(model, catalog=kernels):
        logits(model, prompt())
        assert transformers_state() == before
    assert transformers_state() == before


def test_another_model_is_untouched_also_in_another_thread(
    poison: Catalog, logits: Any, build: Any, prompt: Any
) -> None:
    ours, other, ids = build(), build(), prompt()
    stock = logits(other, ids)
    wrong: list[bool] = []
    done = threading.Event()

    def work() -> None:
        while not done.is_set():
            wrong.append(not torch.equal(logits(other, ids), stock))

    thread = threading.Thread(target=work)
    thread.start()
    for _ in range(10):
        with patched(ours, catalog=poison):
            assert logits(ours, ids).isnan().all()
            assert torch.equal(logits(other, ids), stock)
    done.set()
    thread.join()
    assert wrong
    assert not any(wrong)


def test_unpatch_restores_every_class_and_leaves_no_trace(
    poison: Catalog, logits: Any, build: Any, prompt: Any
) -> None:
    model, ids = build(), prompt()
    patch(build(), catalog=poison).unpatch()  # loads stock code of operators, which stays
    stock, before, modules = logits(model, ids), model_state(model), set(sys.modules)
    handle = patch(model, catalog=poison)
    assert [keys for *_, keys in model_state(model)] == [keys for *_, keys in before]
    kept = model.model.norm.forward
    assert kept(torch.ones(1, 64)).requires_grad  # grad is enabled: its own code
    handle.unpatch()
    handle.unpatch()
    assert model_state(model) == before
    assert set(sys.modules) <= modules
    assert torch.equal(logits(model, ids), stock)
    with torch.no_grad():
        assert not kept(torch.ones(1, 64)).isnan().any()  # even a bound method that was kept


def test_an_exception_in_the_block_restores_the_model(kernels: Catalog, build: Any) -> None:
    model = build()
    before = model_state(model)
    with pytest.raises(ZeroDivisionError), patched(model, catalog=kernels):
        raise ZeroDivisionError
    assert model_state(model) == before


def test_a_patch_that_fails_half_way_is_undone(kernels: Catalog, monkeypatch: pytest.MonkeyPatch, build: Any) -> None:
    model, calls = build(), iter(range(9))
    before, modules = model_state(model), set(sys.modules)

    def fail_at_the_third(*args: Any, **options: Any) -> Any:
        if next(calls) == 2:
            raise KeyboardInterrupt
        return make_site(*args, **options)

    monkeypatch.setattr(handle, "make_site", fail_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        patch(model, catalog=kernels)
    assert model_state(model) == before
    assert set(sys.modules) <= modules


@pytest.mark.parametrize("name", ["qwen3", "phi3", "gemma3"])
def test_copies_and_checkpoints_are_stock(name: str, poison: Catalog, logits: Any, build: Any, prompt: Any) -> None:
    model, ids = build(name), prompt()
    before, stock, keys = model_state(model), logits(model, ids), list(model.state_dict())
    saved = io.BytesIO()
    with patched(model, catalog=poison):
        assert list(model.state_dict()) == keys
        torch.save(model, saved)
        pickled = [pickle.dumps(model, protocol) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)]
        copies = [copy.deepcopy(model), *map(pickle.loads, pickled)]
        copies.append(torch.load(io.BytesIO(saved.getvalue()), weights_only=False))
    assert not any(b"tilegym" in content for content in [*pickled, saved.getvalue()])
    for found in copies:
        assert [(name, cls) for name, cls, _ in model_state(found)] == [(name, cls) for name, cls, _ in before]
        assert torch.equal(logits(found, ids), stock)


def test_a_copy_can_share_the_weights_of_a_patched_model(poison: Catalog, logits: Any, build: Any, prompt: Any) -> None:
    model, ids = build(), prompt()
    stock = logits(model, ids)
    with patched(model, catalog=poison):
        twin = copy.deepcopy(model, {id(tensor): tensor for tensor in model.parameters()})
        assert torch.equal(logits(twin, ids), stock)


def test_a_dropped_model_takes_its_patch_along(kernels: Catalog, logits: Any, build: Any, prompt: Any) -> None:
    modules = set(sys.modules)
    model = build()
    patch(model, catalog=kernels)
    logits(model, prompt())
    alive = [weakref.ref(model), weakref.ref(type(model.model.norm))]
    del model
    gc.collect()
    assert [reference() for reference in alive] == [None, None]
    assert set(sys.modules) <= modules


@pytest.mark.parametrize("part", ["model", "model.norm"])
def test_a_patched_part_is_not_patched_again(part: str, kernels: Catalog, build: Any) -> None:
    model = build()
    handle = patch(model.get_submodule(part), catalog=kernels)
    with raises(UsageError, "model_patched_already", "unpatch()"):
        patch(model, catalog=kernels)
    handle.unpatch()
    patch(model, catalog=kernels).unpatch()


def test_a_class_changed_after_the_patch_is_not_overwritten(
    poison: Catalog, logits: Any, build: Any, prompt: Any
) -> None:
    model, ids = build(), prompt()
    stock, before = logits(model, ids), model_state(model)
    handle = patch(model, catalog=poison)
    norm = model.model.norm
    ours = type(norm)
    norm.__class__ = type("Wrapped", (ours,), {})
    with raises(UsageError, "modules_wrapped", "Wrapped", "unpatch()"):
        handle.unpatch()
    assert torch.equal(logits(model, ids), stock)
    norm.__class__ = ours
    handle.unpatch()
    assert model_state(model) == before


def test_patched_init_patches_only_models_of_the_block(poison: Catalog, logits: Any, build: Any, prompt: Any) -> None:
    config, ids, init = build().config, prompt(), PreTrainedModel.__init__
    other = LlamaForCausalLM(config).eval()
    elsewhere: list[Any] = []
    with patched_init(catalog=poison) as handles:
        thread = threading.Thread(target=lambda: elsewhere.append(LlamaForCausalLM(config).eval()))
        thread.start()
        thread.join()
        model = AutoModelForCausalLM.from_config(config).eval()
        LlamaForCausalLM(config)  # dropped at once
        assert not logits(model, ids).isnan().any()
    assert PreTrainedModel.__init__ is init
    assert len(handles) == 1
    assert logits(model, ids).isnan().all()
    assert not logits(other, ids).isnan().any()
    assert not logits(elsewhere[0], ids).isnan().any()
    handles[0].unpatch()
    assert not logits(model, ids).isnan().any()


def test_blocks_of_two_threads_may_overlap(kernels: Catalog, build: Any) -> None:
    config, init = build().config, PreTrainedModel.__init__
    both_inside, first_left = threading.Barrier(2), threading.Event()
    counts: dict[str, int] = {}

    def work(name: str) -> None:
        with patched_init(catalog=kernels) as handles:
            both_inside.wait(10)
            if name == "second":
                first_left.wait(10)
            kept = LlamaForCausalLM(config)
        first_left.set()
        counts[name] = len(handles)
        assert kept is not None

    threads = [threading.Thread(target=work, args=(name,)) for name in ("first", "second")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts == {"first": 1, "second": 1}
    assert PreTrainedModel.__init__ is init


def test_an_exception_while_building_leaves_models_stock(kernels: Catalog, build: Any) -> None:
    init, built = PreTrainedModel.__init__, []

    def fail_after_building() -> None:
        with patched_init(catalog=kernels):
            built.append(build())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_after_building()
    assert PreTrainedModel.__init__ is init
    assert model_state(built[0]) == model_state(build())


def test_second_patch_of_a_model_undoes_the_first(kernels: Catalog, build: Any, prompt: Any, logits: Any) -> None:
    model = build()
    stock, classes = logits(model, prompt()), [type(module) for module in model.modules()]
    for _ in range(3):  # a cell that is run again
        handle = patch(model, catalog=kernels)
        assert torch.equal(logits(model, prompt()), stock)
        assert handle.report().hits()["rms_norm"] == 2
        assert len(repr(handle)) < 200
        assert "<table>" in handle._repr_html_()
    handle.unpatch()
    assert [type(module) for module in model.modules()] == classes


def test_block_does_not_undo_an_earlier_patch(kernels: Catalog, build: Any) -> None:
    model = build()
    handle = patch(model, catalog=kernels)
    with raises(UsageError, "model_patched_already", "unpatch()"), patched(model, catalog=kernels):
        pass
    assert handle.report().sites
