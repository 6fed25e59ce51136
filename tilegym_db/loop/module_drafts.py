"""A draft of a Definition for modules that none describes: what was captured of their calls, and a reference to write."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tilegym_db.files import write_folder
from tilegym_db.folder_locks import writing
from tilegym_db.scaffold import draft_definition
from tilegym_db.scaffold.tensors import parse_tensors

__all__ = ["draft_of", "source_of"]

AXES = "MNKHDSBEFGIJLPQRTUVW"


def draft_of(model: Any, cls: type[torch.nn.Module], inputs: torch.Tensor, folder: Path) -> Path:
    """Write the draft of what the modules of a class compute; one that is there already is left alone.

    Returns:
        Its folder: ``definition.json`` and its texts, with a reference to be written, and ``captured.json`` with the shapes,
        dtypes and strides of the first call and the place of the code.
    """
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", cls.__name__).lower()
    target = folder / name
    if target.exists():
        return target
    captured = _captured(model, cls, inputs)
    letters: dict[int, str] = {}
    files = draft_definition(
        name,
        "model",
        parse_tensors("inputs", _spelled(captured["inputs"], letters) or "x[M, N]"),
        parse_tensors("outputs", _spelled(captured["outputs"], letters) or "out[M, N]"),
        f"What {cls.__name__} computes besides the modules in it.",
    )
    source = source_of(cls)
    files["reference.py"] = f"# Source: {source}\n" + re.sub(r"(?m)^# Source:.*\n", "", files["reference.py"])
    files["captured.json"] = json.dumps({"source": source, **captured}, indent=2) + "\n"
    with writing(folder):
        write_folder(target, {path: text.encode() for path, text in files.items()})
    return target


def _captured(model: Any, cls: type[torch.nn.Module], inputs: torch.Tensor) -> dict[str, Any]:
    """The tensors of the first call of a module of the class: what it is given, its own weights, what it returns."""
    module = next(item for item in model.modules() if type(item) is cls)
    kept: dict[str, Any] = {}

    def keep(owner: Any, args: Any, kwargs: Any, output: Any) -> None:
        if not kept:
            names = list(inspect.signature(type(owner).forward).parameters)[1:]
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            own = {key: value for key, value in owner.named_parameters(recurse=False)}
            outputs = output if isinstance(output, tuple) else (output,)
            kept["inputs"] = _described({**given, **own})
            kept["outputs"] = _described({f"out{index or ''}": value for index, value in enumerate(outputs)})

    hook = module.register_forward_hook(keep, with_kwargs=True)
    try:
        with torch.no_grad():
            model(inputs)
    finally:
        hook.remove()
    return kept or {"inputs": {}, "outputs": {}}


def _described(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: {
            "shape": list(value.shape),
            "dtype": str(value.dtype).removeprefix("torch."),
            "strides": list(value.stride()),
        }
        for name, value in values.items()
        if isinstance(value, torch.Tensor)
    }


def _spelled(tensors: Mapping[str, Mapping[str, Any]], letters: dict[int, str]) -> str:
    """``x[M, N], index[M]:int64``, with one letter for each size."""
    parts = []
    for name, tensor in tensors.items():
        axes = [letters.setdefault(size, AXES[len(letters) % len(AXES)]) for size in tensor["shape"]]
        floating = tensor["dtype"] in ("float32", "bfloat16", "float16")
        if axes:
            parts.append(f"{name}[{', '.join(axes)}]" + ("" if floating else f":{tensor['dtype']}"))
    return ", ".join(parts)


def source_of(cls: type[torch.nn.Module]) -> str:
    """Where the code of a class lies: a permalink into the release of transformers, or the file."""
    import transformers

    file = inspect.getsourcefile(cls) or ""
    lines, first = inspect.getsourcelines(cls)
    package = Path(transformers.__file__).parent
    place = f"#L{first}-L{first + len(lines) - 1}"
    if not Path(file).is_relative_to(package):
        return f"{file}{place}"
    inner = Path(file).relative_to(package).as_posix()
    return (
        f"https://github.com/huggingface/transformers/blob/v{transformers.__version__}/src/transformers/{inner}{place}"
    )
