"""Models with random weights from a config on disk. Nothing is downloaded, and only code of transformers runs."""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
from pathlib import Path
from typing import Any

import torch

from tilegym_db.errors import MissingPackageError, UsageError, did_you_mean
from tilegym_db.models.capture import forward_arguments, text_configs, with_few_layers
from tilegym_db.records.dtypes import SHORT_NAMES
from tilegym_db.records.text import shown
from tilegym_db.scaffold.model_config import check_config_sizes, typed_config

DTYPES = ("bfloat16", "float16", "float32")
SEED = 0
VECTOR_NOISE = 0.1
"""Standard deviation of the noise on vectors that are initialised with one value, for example weights of norms."""


def check_dtype(dtype: str) -> None:
    """Raise :class:`UsageError` if a model cannot be built in a dtype."""
    if dtype not in DTYPES:
        hint = did_you_mean(SHORT_NAMES.get(str(dtype), str(dtype).removeprefix("torch.")), DTYPES)
        raise UsageError(f"dtype must be one of {', '.join(DTYPES)}, not {dtype!r}.{hint}", code="dtype_unknown")


def load_config(path: Path, layers: int | None = None) -> Any:
    """Return the config of a transformers model from its JSON file, or from a folder with a ``config.json``."""
    try:
        from transformers import CONFIG_MAPPING
    except ImportError:
        raise MissingPackageError(
            "models need transformers. Try: pip install 'tilegym-db[transformers]'", code="package_missing"
        ) from None
    file, content = typed_config(path)
    model_type = content["model_type"]
    if model_type not in CONFIG_MAPPING:
        spelled = shown(model_type)
        what = f"model_type '{spelled}' is unknown to transformers"
        if content.get("auto_map"):
            what += "; its code comes with the model, and only code of transformers runs"
        raise UsageError(
            f"{file} is no config of a model: {what}.{did_you_mean(spelled, CONFIG_MAPPING)}", code="model_type_unknown"
        )
    check_config_sizes(content, file)
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    try:
        config: Any = AutoConfig.from_pretrained(file, trust_remote_code=False, local_files_only=True)
    except (
        StrictDataclassError,
        *_REFUSALS,
    ) as error:  # exceptions of the many config classes for a value that they do not accept
        raise UsageError(
            f"{file}: transformers refuses this config: {_last_line(error)}.", code="config_refused"
        ) from None
    config._name_or_path = ""  # a digest of the config is one of its content
    if layers is None:
        return config
    return with_few_layers(config, layers, _without_memory)


_REFUSALS = (
    TypeError, ValueError, LookupError, AttributeError, ArithmeticError, AssertionError, ImportError, RuntimeError,
)  # fmt: skip


def _last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1][:300].rstrip('.')}" if lines else type(error).__name__


def config_content(config: Any) -> dict[str, Any]:
    """Return the content of a config as transformers saves it, without the version of transformers."""
    content: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return {key: value for key, value in content.items() if key != "transformers_version"}


FACTORIES = (
    "AutoModelForCausalLM",
    "AutoModelForImageTextToText",
    "AutoModelForSeq2SeqLM",
    "AutoModelForSpeechSeq2Seq",
    "AutoModelForMaskedLM",
    "AutoModel",
)
"""The factories of transformers in the order of preference. Encoders and encoder-decoders put their own one first."""


def model_class(config: Any) -> Any:
    """Return the class that the config names, or else a factory of transformers that has a model for it."""
    import transformers

    for name in getattr(config, "architectures", None) or ():
        named = getattr(transformers, name, None)
        if getattr(named, "config_class", None) is type(config):
            return named
    first = (
        ["AutoModelForSeq2SeqLM", "AutoModelForSpeechSeq2Seq"] if getattr(config, "is_encoder_decoder", False) else []
    )
    if not first and not getattr(config, "is_decoder", False):
        first = ["AutoModelForMaskedLM"]  # encoders may also be decoders, and then their config says so
    for name in (*first, *FACTORIES):
        factory = getattr(transformers, name)
        if type(config) in factory._model_mapping:
            return factory
    raise UsageError(
        f"transformers has no model for configs of type {config.model_type}. Try that of a part, such as its language model.",
        code="model_absent",
    )


def _made(config: Any, dtype: str) -> Any:
    factory = model_class(config)
    options = {"dtype": getattr(torch, dtype)}
    if hasattr(factory, "_model_mapping"):
        return factory.from_config(config, trust_remote_code=False, **options)
    return factory._from_config(config, **options)


def _without_memory(config: Any) -> Any:
    """Return the model of a config on the meta device; None if it cannot be built."""
    try:
        with torch.device("meta"):
            return _made(copy.deepcopy(config), "bfloat16")
    except (UsageError, *_REFUSALS):
        return None


def build_model(config: Any, device: str, dtype: str) -> Any:
    """Build a model with :func:`unchecked_model` and call it once, because layers of a config may be incompatible at run time."""
    model = unchecked_model(config, device, dtype)
    _check_runs(model, device)
    return model


def unchecked_model(config: Any, device: str, dtype: str) -> Any:
    """Return a model in eval mode with random weights, the same at every call on one kind of device.

    Weights of norms get noise, because trained weights are not all one, and some roundings differ only then.
    """
    devices = [torch.device(device)] if device.startswith("cuda") else []
    try:
        with torch.device("meta"):  # takes no memory: shows if the model can be built, and its size
            check_fits(_made(config, dtype), device)
    except UsageError:
        raise
    except _REFUSALS as error:
        raise UsageError(
            f"transformers builds no model from this config: {_last_line(error)}.", code="model_not_built"
        ) from None
    with torch.random.fork_rng(devices), torch.device(device):
        torch.manual_seed(SEED)
        model = _made(config, dtype).eval()
        _widen(model, dtype)
        generation = getattr(model, "generation_config", None)
        if getattr(config, "is_encoder_decoder", False) and generation is not None:
            first = generation.decoder_start_token_id
            # Checkpoints of T5 state the first token, its config does not.
            generation.decoder_start_token_id = 0 if first is None else first
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter += VECTOR_NOISE * torch.randn_like(parameter)
    return model


def _widen(model: Any, dtype: str) -> None:
    """Convert to float32 the weights that transformers keeps in float32 when it loads a checkpoint; a config alone does not."""
    kept = {*(model._keep_in_fp32_modules_strict or ())} if dtype != "float32" else set()
    if dtype == "float16":
        kept |= {*(model._keep_in_fp32_modules or ())}
    for name, value in itertools.chain(model.named_parameters(), model.named_buffers()):
        if value.is_floating_point() and any(part in name for part in kept):
            value.data = value.data.float()
    if kept:
        _narrow_promoting_norms(model, getattr(torch, dtype))


def _narrow_promoting_norms(model: Any, dtype: torch.dtype) -> None:
    """Narrow the float32 weights of norms that return float32, because the following linear layers have weights of ``dtype``.

    The norms of DeepSeek-V4 in transformers 5.17 do so; a checkpoint loaded with that release does not run in bfloat16.
    """
    for module in model.modules():
        held = dict(module.named_parameters())
        weight = held.get("weight")
        if len(held) != 1 or weight is None or weight.dim() != 1 or weight.dtype != torch.float32:
            continue
        with (
            torch.no_grad(),
            contextlib.suppress(*_REFUSALS),
        ):  # a module that needs more than a hidden state is no such norm
            if module(torch.ones(1, len(weight), dtype=dtype, device=weight.device)).dtype == torch.float32:
                weight.data = weight.data.to(dtype)


def _check_runs(model: Any, device: str) -> None:
    """Call the model with one token, if it takes tokens."""
    if getattr(model, "main_input_name", "input_ids") != "input_ids":
        return
    token = torch.zeros(1, 1, dtype=torch.long, device=device)
    try:
        with torch.no_grad():
            model(**forward_arguments(model, token))
    except torch.OutOfMemoryError:
        raise
    except _REFUSALS as error:
        raise UsageError(
            f"the model of this config does not run: {_last_line(error)}.", code="model_does_not_run"
        ) from None


# ---- model sizes ----------------------------------------------------------------------------------
# A model that does not fit into a device is refused before anything is allocated.


def check_fits(model: torch.nn.Module, device: str) -> None:
    """Raise :class:`UsageError` if the weights of a model on the meta device exceed a device's free memory."""
    weights = _weights(model)
    fix = "Keep fewer layers (--layers), or take a smaller model."
    repeated = max(
        (part for part in model.modules() if isinstance(part, torch.nn.ModuleList)), key=_weights, default=None
    )
    if weights > available_bytes(device) and repeated is not None and len(repeated) and _weights(repeated):
        free = available_bytes(device) - (weights - _weights(repeated))
        layers = max(0, min(len(repeated), int(free * len(repeated) // _weights(repeated))))
        fix = f"{layers} of its {len(repeated)} layers would fit: --layers {layers}."
        if not layers:
            fix = (
                f"None of its {len(repeated)} layers would fit. Run this on a larger machine, or take a smaller model."
            )
    _check_bytes(weights, device, "the weights", fix)


def _weights(part: torch.nn.Module) -> int:
    """Return the bytes of a module's parameters; all layers count as equally large."""
    return sum(parameter.numel() * parameter.element_size() for parameter in part.parameters())


def check_run_fits(config: Any, device: str, dtype: str, batch: int, prompt: int, new: int = 0) -> None:
    """Raise :class:`UsageError` if the hidden states and the cache of a run alone exceed a device's free memory."""
    text = text_configs(config)[0]
    width, layers = (int(getattr(text, name, None) or 1) for name in ("hidden_size", "num_hidden_layers"))
    # A config whose layers differ, such as Gemma-4's, refuses to give one number for all of them.
    of_layers = text.per_layer_config if getattr(text, "is_heterogeneous", False) else [text]
    cached = min(_cached_elements(one, width) for one in of_layers)
    element = getattr(torch, dtype).itemsize
    # Token ids and the hidden states of one layer. The cache of a sliding window may be smaller, so a cache counts once.
    needed = batch * prompt * (8 + width * element) + batch * (prompt + new) * cached * element * (2 if layers else 0)
    _check_bytes(needed, device, f"batch {batch}, prompt {prompt} and {new} new tokens", "Ask for fewer.")


def _cached_elements(config: Any, width: int) -> int:
    """Return the elements of the keys of one position in a layer."""
    heads = int(getattr(config, "num_attention_heads", None) or 1)
    size: int = getattr(config, "head_dim", None) or width // heads
    return (getattr(config, "num_key_value_heads", None) or heads) * size


def _check_bytes(needed: int, device: str, what: str, fix: str) -> None:
    free = available_bytes(device)
    if needed > free:
        raise UsageError(
            f"{what} take at least {needed / 1e9:,.1f} GB, and {device} has {free / 1e9:,.1f} GB free. {fix}",
            code="memory_short",
        )


def available_bytes(device: str) -> int:
    """Return the free memory of a device: by the driver for a GPU, by Linux's available memory for a CPU."""
    if device.startswith("cuda"):
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return 1 << 62
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(found[0]) * 1024 if found else 1 << 62
