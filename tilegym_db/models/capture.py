"""Capture the inputs of a model's call sites. The model runs two batches and decodes two positions of each."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from tilegym_db.catalog import Catalog
from tilegym_db.errors import TilegymDBError, UsageError
from tilegym_db.models.call_site import CallSite
from tilegym_db.models.upstream_code import of_models
from tilegym_db.records import Definition, Workload
from tilegym_db.records.call import bind_call
from tilegym_db.records.definition_parts import contiguous_strides, layout_class, layout_strides, span_of
from tilegym_db.resolver.hot_path import Allocate

PROMPT_TOKENS = 128
SEED = 0
BATCHES = 2
DECODED = 2
"""Positions after each prompt. With only one, a kernel could reuse the rotary tables of the first call of a shape."""
ALIGNMENT_BYTES = 256
"""Minimum alignment of allocators. A copy keeps the offset of a tensor that starts elsewhere."""

ModelInputs = torch.Tensor | Mapping[str, Any]
"""Token ids [batch, tokens], or the arguments of the model's forward by name."""


@dataclass(frozen=True)
class CapturedCall:
    """The first call of one kind (shapes, dtypes, strides) at a call site in one stage, ``prefill`` or ``decode``.

    ``inputs`` are in the order of the Definition: copies with the strides that the model passed, and the weights themselves.
    ``later`` are the inputs of further calls of this kind, one per forward, at other positions or of other tokens.
    """

    stage: str
    inputs: tuple[Any, ...]
    later: tuple[tuple[Any, ...], ...] = ()

    @property
    def all_inputs(self) -> tuple[tuple[Any, ...], ...]:
        """The inputs of every captured call, in the order of the calls."""
        return (self.inputs, *self.later)


def captured_calls(
    model: torch.nn.Module, sites: Sequence[CallSite], inputs: ModelInputs | None = None
) -> list[list[CapturedCall]]:
    """Run the model on stock code and return for each site the calls that ask for a kernel.

    Args:
        inputs: the inputs of the first batch; random token ids by default. The second batch has other random ids of the same
            sizes, if the inputs have ``input_ids`` and the model states its vocabulary. A model that generates decodes two
            positions of each batch.
    """
    if model.training:
        raise UsageError(
            "verification runs the model, and the model is in training mode: call model.eval() first.",
            code="model_in_training",
        )
    first = random_inputs(model, 1, PROMPT_TOKENS) if inputs is None else inputs
    given = {"input_ids": first} if isinstance(first, torch.Tensor) else first
    recorders = [_Recorder() for _ in sites]
    with contextlib.ExitStack() as undo:
        for site, recorder in zip(sites, recorders, strict=True):
            undo.enter_context(_serving(site, recorder))
        for number in range(BATCHES):
            batch = given if number == 0 else _with_other_tokens(model, given, SEED + number)
            if batch is not None:
                with staged(model, recorders):
                    run_model(model, batch)
    return [recorder.calls for recorder in recorders]


def _with_other_tokens(model: torch.nn.Module, given: Mapping[str, Any], seed: int) -> Mapping[str, Any] | None:
    """Return the same arguments with other random ids in place of the tokens, but not of the padding.

    Returns None if there are no ids or no vocabulary.
    """
    ids, mask, size = given.get("input_ids"), given.get("attention_mask"), _vocabulary(model)
    if not isinstance(ids, torch.Tensor) or size is None:
        return None
    drawn = torch.randint(1, size, tuple(ids.shape), generator=torch.Generator().manual_seed(seed)).to(ids)
    if isinstance(mask, torch.Tensor) and mask.shape == ids.shape:
        drawn = torch.where(mask.to(ids.device) != 0, drawn, ids)
    return {**given, "input_ids": drawn}


def random_prompt(model: torch.nn.Module, batch: int, tokens: int) -> torch.Tensor:
    """Draw token ids [batch, tokens], the same at every call, on the device of the model's first parameter."""
    size = _vocabulary(model)
    if size is None:
        raise UsageError(
            f"{type(model).__name__} states no vocabulary size; pass inputs= with the arguments of its forward.",
            code="vocabulary_unknown",
        )
    generator = torch.Generator().manual_seed(SEED)
    ids = torch.randint(1, size, (batch, tokens), generator=generator)
    return ids.to(next(model.parameters()).device)


def random_inputs(model: Any, batch: int, tokens: int) -> dict[str, Any]:
    """Draw the inputs of a model that takes tokens, pixels, the features of audio or its samples, by its main input."""
    main = getattr(model, "main_input_name", "input_ids")
    if main not in INPUT_SIZES:
        return {"input_ids": random_prompt(model, batch, tokens)}
    return {main: _drawn(model, main, batch)}


def _drawn(model: Any, name: str, batch: int) -> torch.Tensor:
    """Draw pixels, or features or samples of audio, of the sizes that the config states."""
    config = getattr(model.config, "vision_config", model.config)
    found: list[Any] = [size if isinstance(size, int) else getattr(config, size, None) for size in INPUT_SIZES[name]]
    if not all(isinstance(size, int) for size in found):
        raise UsageError(
            f"{type(model).__name__} states no sizes of its {name}; pass inputs= with the arguments of its forward.",
            code="input_sizes_unknown",
        )
    if name == "input_features":
        found[-1] *= 2  # two convolutions halve the frames
    first = next(model.parameters())
    drawn = torch.randn((batch, *found), generator=torch.Generator().manual_seed(SEED))
    return drawn.to(first.device, first.dtype)


def unreached_parts(model: torch.nn.Module, inputs: ModelInputs) -> tuple[str, ...]:
    """Return the outermost parts with submodules and weights of which a call runs nothing, such as a vision tower without images.

    Part of a list, such as experts that no token chose, is none.
    """
    reached = set[int]()
    with torch.no_grad(), register_module_forward_pre_hook(lambda module, _: reached.add(id(module))):
        model(**forward_arguments(model, inputs))
    found: list[str] = []

    def visit(module: torch.nn.Module, path: str) -> None:
        for name, child in module._modules.items():
            if child is None or not child._modules:
                continue
            if any(id(part) in reached for part in child.modules()):
                visit(child, f"{path}{name}.")
            elif not isinstance(module, torch.nn.ModuleList) and any(True for _ in child.parameters()):
                found.append(f"{path}{name} ({type(child).__name__})")

    visit(model, "")
    return tuple(found)


def of_unreached(parts: Iterable[str]) -> str:
    """Return a sentence about :func:`unreached_parts`; empty if there are none."""
    names = ", ".join(parts)
    if not names:
        return ""
    return f"left out, because these inputs do not run it: {names}. patch serves it too; its inputs= and verify=True prove it"


def _encodes_both(model: Any) -> bool:
    """Return True if a forward takes tokens and pixels in any call, as those of CLIP and SigLIP do."""
    has_both = all(hasattr(model, name) for name in ("get_text_features", "get_image_features"))
    return has_both and PIXELS in inspect.signature(model.forward).parameters


def typical_inputs(model: Any, batch: int, tokens: int) -> ModelInputs:
    """Return :func:`random_prompt` for a model that takes tokens, and :func:`random_inputs` for any other."""
    drawn = random_inputs(model, batch, tokens)
    return drawn["input_ids"] if drawn.keys() == {"input_ids"} else drawn


PIXELS = "pixel_values"
INPUT_SIZES: dict[str, tuple[str | int, ...]] = {
    PIXELS: ("num_channels", "image_size", "image_size"),
    "input_features": ("num_mel_bins", "max_source_positions"),
    "input_values": (16_000,),
}
"""Main input -> the entries of the config that state its sizes, after the batch."""


def forward_arguments(model: Any, given: ModelInputs) -> dict[str, Any]:
    """Return the arguments of one forward.

    An encoder-decoder also gets the first token of its decoder, and a model with an encoder of images beside one of tokens
    gets pixels.
    """
    arguments = {"input_ids": given} if isinstance(given, torch.Tensor) else dict(given)
    if "input_ids" in arguments and PIXELS not in arguments and _encodes_both(model):
        arguments[PIXELS] = _drawn(model, PIXELS, arguments["input_ids"].shape[0])
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False) and "decoder_input_ids" not in arguments:
        batch = next(value.shape[0] for value in arguments.values() if isinstance(value, torch.Tensor))
        device = next(model.parameters()).device
        arguments["decoder_input_ids"] = torch.zeros(batch, 1, dtype=torch.long, device=device)
    return arguments


def _vocabulary(model: torch.nn.Module) -> int | None:
    config: Any = getattr(model, "config", None)
    text = text_configs(config)[0] if hasattr(config, "get_text_config") else config
    size = getattr(text, "vocab_size", None)
    return size if isinstance(size, int) and size >= 2 else None


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy in new memory with the same strides, overlaps and alignment."""
    if tensor.numel() == 0:
        return tensor.clone()
    span = span_of(tensor.shape, tensor.stride())
    ahead = tensor.data_ptr() % ALIGNMENT_BYTES // tensor.element_size()
    memory = tensor.new_empty(ahead + span)
    memory[ahead:].copy_(tensor.as_strided((span,), (1,)))
    return memory.as_strided(tensor.shape, tensor.stride(), ahead)


def own_inputs(given: Mapping[str, Any]) -> dict[str, Any]:
    """Copy a model's arguments for one run, because a run may change them, for example a cache of keys and values."""
    copies = {}
    for name, value in given.items():
        try:
            copies[name] = copy.deepcopy(value)
        except (RuntimeError, TypeError, ValueError) as error:
            raise UsageError(
                f"inputs[{name!r}], a {type(value).__name__}, is used in several runs and cannot be copied: {error}. Leave it "
                "out, or create it under torch.no_grad().",
                code="inputs_not_copyable",
            ) from error
    return copies


class _Recorder:
    """A stand-in for ``serve`` of a call site. It keeps the first call of each kind in each forward and serves none."""

    def __init__(self) -> None:
        self._stage = ""
        self._forward = 0
        self._kept: dict[Any, list[tuple[Any, ...]]] = {}
        self._last: dict[Any, int] = {}

    def begin(self, stage: str) -> None:
        """Note that a forward of the model in that stage comes next."""
        self._stage = stage
        self._forward += 1

    @property
    def calls(self) -> list[CapturedCall]:
        """The captured calls, one of each kind."""
        return [CapturedCall(stage, first, tuple(later)) for (stage, _), (first, *later) in self._kept.items()]

    def __call__(self, *inputs: Any) -> None:
        key = (self._stage, tuple(map(_kind, inputs)))
        if self._last.get(key) != self._forward:  # further layers of one forward have the same positions
            self._last[key] = self._forward
            kept = tuple(copied(value) if _is_activation(value) else value for value in inputs)
            self._kept.setdefault(key, []).append(kept)


def _is_activation(value: Any) -> bool:
    """Return True if a model may overwrite a value before the comparison reads it.

    Weights do not change, and those of experts are too large to copy.
    """
    return isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter)


def _kind(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.stride(), value.dtype, value.device
    return value


class StageListener(Protocol):
    """Protocol of an object that learns the stage of each forward of a model."""

    def begin(self, stage: str) -> None:
        """Note that a forward of the model in that stage comes next."""


@contextlib.contextmanager
def staged(model: torch.nn.Module, recorders: Sequence[StageListener]) -> Iterator[None]:
    """Announce each stage to the recorders: the first forward of the model is the prefill, all others decode."""
    stages = iter(("prefill",))

    def begin(*_: Any) -> None:
        stage = next(stages, "decode")
        for recorder in recorders:
            recorder.begin(stage)

    hook = model.register_forward_pre_hook(begin)
    try:
        yield
    finally:
        hook.remove()


@contextlib.contextmanager
def _serving(site: CallSite, serve: Callable[..., Any]) -> Iterator[None]:
    own = site.serve
    site.serve, site.is_recorded = serve, True
    try:
        yield
    finally:
        site.serve, site.is_recorded = own, False


def run_model(model: Any, shared: Mapping[str, Any]) -> None:
    """Run a model once on copies of its arguments; a model that generates also decodes two positions."""
    given = own_inputs(shared)
    try:
        with torch.no_grad():
            if hasattr(model, "generate") and model.can_generate():
                options = {
                    "max_new_tokens": 1 + DECODED,
                    "min_new_tokens": 1 + DECODED,
                    "do_sample": False,
                    "num_beams": 1,
                }
                model.generate(**given, **options, disable_compile=True)
            else:
                model(**forward_arguments(model, given))
    except torch.OutOfMemoryError:
        raise
    except of_models() as error:
        raise UsageError(
            f"verification runs {type(model).__name__}, and it does not run on {', '.join(given)}: {error}. "
            "Pass inputs= with the arguments of its forward.",
            code="model_does_not_run",
        ) from error


# ---- workloads ------------------------------------------------------------------------------------
# Captured calls become Workloads, so that ``bench`` measures the calls that a model really makes.

CAPTURED = "captured"


def workload_of(definition: Definition, call: CapturedCall, allocate: Allocate) -> Workload | None:
    """Return the sizes, dtypes, scalars and strides of a captured call; None if a Workload cannot express the call.

    A Workload cannot express a call outside the Definition, which stock code serves, or a tensor that overlaps itself.
    """
    shadows = [
        torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        if isinstance(value, torch.Tensor)
        else value
        for value in call.inputs
    ]
    made = allocate(*shadows)
    values = (*shadows, *(made if isinstance(made, tuple) else (made,)))
    try:
        binding = bind_call(definition, values)
    except TilegymDBError:
        return None
    layouts = {}
    for name, value in zip((*definition.inputs, *definition.written_outputs), values, strict=True):
        if isinstance(value, torch.Tensor) and binding.layouts[name] != "contiguous":
            strides = _settled_strides(value)
            if 0 in strides:
                return None
            layouts[name] = f"strided({', '.join(map(str, strides))})"
    return Workload.from_dict(
        {
            "definition": definition.name,
            "axes": {name: binding.axes[name] for name in definition.var_axes},
            "dtypes": binding.dtypes,
            "inputs": {name: {"type": "scalar", "value": value} for name, value in binding.scalars.items()},
            "layouts": layouts,
            "tags": [f"stage:{call.stage}", CAPTURED],
        }
    )


def _settled_strides(value: torch.Tensor) -> tuple[int, ...]:
    """Return the strides. Those of dimensions of size 1, which are arbitrary, become those of a dense tensor."""
    dense = contiguous_strides(value.shape)
    return tuple(own if size != 1 else step for size, own, step in zip(value.shape, value.stride(), dense, strict=True))


def new_workloads(workloads: Iterable[Workload], catalog: Catalog, tags: Sequence[str] = ()) -> list[Workload]:
    """Return the workloads that the catalog does not have yet, with more tags.

    Two Workloads are equal if sizes, dtypes, scalars and strides agree: ``strided(S*D, 1)`` can equal ``strided(1024, 1)``.
    """
    known: dict[str, set[Any]] = {}
    new = []
    for workload in workloads:
        definition = catalog.definition(workload.definition)
        seen = known.setdefault(
            workload.definition, {_meaning(definition, other) for other in catalog.workloads_for(workload.definition)}
        )
        meaning = _meaning(definition, workload)
        if meaning not in seen:
            seen.add(meaning)
            new.append(workload.model_copy(update={"tags": (*tags, *workload.tags)}))
    return new


def _meaning(definition: Definition, workload: Workload) -> Any:
    axes = definition.bind_axes(workload.axes)
    layouts = {}
    for name, text in workload.layouts.items():
        shape = definition.shape_of(name, axes)
        strides = layout_strides(text, shape, axes)
        if layout_class(shape, strides) != "contiguous":
            pairs = zip(shape, strides, strict=True)
            layouts[name] = tuple(stride for size, stride in pairs if size != 1)
    contents = {name: spec.model_dump_json() for name, spec in workload.inputs.items() if spec.type != "scalar"}
    parts: tuple[dict[str, Any], ...] = (
        axes, definition.bind_dtypes(workload.dtypes), workload.scalars(), layouts, contents,
    )  # fmt: skip
    return tuple(tuple(sorted(part.items())) for part in parts)


# ---- few layers of every kind ---------------------------------------------------------------------
# Reduce a config to few layers of which every kind of the model's layers is one.
#
# A kind is seen in the model itself, built on the meta device: the classes of a layer's modules and their settings. Lists of
# the config with one entry per layer count too. Each reduced config is built and compared, so no rule of a config class is
# repeated.

COUNTS = ("layer", "layers", "blocks", "depth")
"""Ends of the names of config entries that count layers."""
LISTS = ("layer", "type", "block", "pattern", "idx")
"""Parts of the names of lists with one entry per layer. Other lists count only if they are long."""
LONG = 4

Build = Callable[[Any], "torch.nn.Module | None"]
Kinds = dict[str, list[Any]]
"""Name of a stack of layers -> the kind of each layer."""


def with_few_layers(config: Any, layers: int, build: Build) -> Any:
    """Return a config with ``layers`` layers, or with more if the model has more kinds of layers.

    The first layers remain if they are of every kind. Otherwise one layer of each kind remains, or all layers up to the last
    new kind if the config class allows nothing else.

    Args:
        build: returns the model of a config without memory, or None if it cannot be built.
    """
    model = build(config)
    if model is None:
        return config  # building it in earnest says why
    names = {
        name for part in text_configs(config) for name, value in vars(part).items() if isinstance(value, list | tuple)
    }
    kinds = _kinds(config, model, names)
    names = {name for of_stack in kinds.values() for name, _ in _listed(config, len(of_stack), names)}
    counts = {count for part in text_configs(config) for count in _counts(part, kinds).values()}
    if not counts:
        return config
    if not 1 <= layers <= max(counts):
        raise UsageError(
            f"the model has {max(counts)} layers; keep 1 to {max(counts)} of them, not {layers}.",
            code="layers_out_of_range",
        )
    stacks = [of_stack for of_stack in kinds.values() if len(of_stack) in counts]
    firsts = sorted({of_stack.index(kind) for of_stack in stacks for kind in of_stack})
    prefix = range(max(layers, firsts[-1] + 1))
    others = [index for index in range(max(counts)) if index not in firsts]
    picked = sorted([*firsts, *others[: max(0, layers - len(firsts))]])
    for kept in (picked, prefix) if len(prefix) > layers else (prefix,):
        reduced = _reduced(config, kept, kinds)
        found = build(reduced)
        if found is not None and _sets(_kinds(reduced, found, names)) == _sets(kinds):
            return reduced
    return config


SHARED_SIZES = (
    *("num_attention_heads", "intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"),
    *("linear_num_key_heads", "linear_num_value_heads", "linear_num_heads"),
)
"""Entries of a config that the GPUs of a tensor-parallel model share."""
KEYS = "num_key_value_heads"
"""Heads that are repeated if there are fewer than GPUs."""


def of_one_gpu(config: Any, parallel: int) -> Any:
    """Return the config of the part of a tensor-parallel model that one of ``parallel`` GPUs computes.

    Heads and intermediate sizes are shared. The hidden size, the vocabulary and the experts are whole.
    """
    if parallel == 1:
        return config
    part = copy.deepcopy(config)
    for text in text_configs(part):
        heads = getattr(text, "num_attention_heads", None)
        if type(heads) is int and type(getattr(text, "head_dim", None)) is not int:
            text.head_dim = text.hidden_size // heads
        for name in SHARED_SIZES:
            size = getattr(text, name, None)
            if type(size) is int and size:
                if size % parallel:
                    raise UsageError(
                        f"--tp {parallel}: the model's {name} of {size} is no multiple of it. Give a number that divides it.",
                        code="parallel_indivisible",
                    )
                setattr(text, name, size // parallel)
        pairs = getattr(text, KEYS, None)
        if type(pairs) is int:
            setattr(text, KEYS, max(1, pairs // parallel))
    return part


def _sets(kinds: Kinds) -> dict[str, frozenset[Any]]:
    return {name: frozenset(of_stack) for name, of_stack in kinds.items()}


def _reduced(config: Any, kept: Iterable[int], kinds: Kinds) -> Any:
    reduced = copy.deepcopy(config)
    for part in text_configs(reduced):
        counts = _counts(part, kinds)
        for name, count in counts.items():
            setattr(part, name, sum(index < count for index in kept))
        for count in set(counts.values()):
            for name, values in _lists(part, count):
                setattr(part, name, type(values)(values[index] for index in kept if index < count))
    return reduced


def text_configs(config: Any) -> list[Any]:
    """Return the configs of text models inside a config, or the config itself if it has none."""
    found = [one for one in _nested(config) if "vocab_size" in vars(one)]
    return found or [config]


def _nested(config: Any) -> Iterator[Any]:
    yield config
    for value in vars(config).values():
        if hasattr(value, "get_text_config"):
            yield from _nested(value)


def _counts(part: Any, kinds: Kinds) -> dict[str, int]:
    """Return the entries of a config that count the layers of a stack."""
    lengths = {len(of_stack) for of_stack in kinds.values()}
    return {
        name: value
        for name, value in vars(part).items()
        if name.endswith(COUNTS) and type(value) is int and value in lengths and not name.startswith("max_")
    }


def _lists(part: Any, count: int) -> list[tuple[str, list[Any] | tuple[Any, ...]]]:
    return [
        (name, values)
        for name, values in vars(part).items()
        if isinstance(values, list | tuple)
        and len(values) == count
        and (count > LONG or any(word in name for word in LISTS))
    ]


def _kinds(config: Any, model: torch.nn.Module, names: set[str]) -> Kinds:
    """Return the kinds of the layers of each outermost list of modules.

    ``names`` are the lists of the config that may state the kinds. A list with another meaning may have the same length.
    """
    found: Kinds = {}
    for name, stack in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in found)
        if isinstance(stack, torch.nn.ModuleList) and len(stack) and not inside:
            listed = [values for _, values in _listed(config, len(stack), names)]
            found[name] = [
                (_structure(layer), tuple(values[index] for values in listed)) for index, layer in enumerate(stack)
            ]
    return found


def _listed(config: Any, count: int, names: set[str]) -> list[tuple[str, Sequence[Any]]]:
    return [
        (name, values)
        for part in text_configs(config)
        for name, values in _lists(part, count)
        if name in names and all(isinstance(value, str | bool) for value in values)
    ]


def _structure(layer: torch.nn.Module) -> Any:
    """Return the classes of a layer's modules and their settings; of numbers only if they are given at all."""
    return tuple(
        (name, type(module), tuple(sorted(filter(None, (_setting(*item) for item in vars(module).items())))))
        for name, module in layer.named_modules()
    )


def _setting(name: str, value: Any) -> tuple[str, str] | None:
    if name.startswith("_") or name == "training" or not isinstance(value, bool | str | int | float | None):
        return None
    return name, str(value) if isinstance(value, bool | str) else str(value is None)
