"""Observe a problem of another project: shapes, dtypes and origin of its inputs, weights and outputs. Runs in a confined worker.

A problem is called with its sizes, and then with one size doubled and tripled at a time. A dimension that grows with a size
becomes an axis or arithmetic over one, all others are numbers.
"""

from __future__ import annotations

import ast
import functools
import inspect
import json
import math
import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tilegym_db.judging.straight_line import NotPlain, traced

MAX_BYTES = 1 << 18
"""Bytes of a description."""
MAX_SECONDS = 120
"""Seconds for the description of one problem."""
MAX_TRIED = 24
"""Maximum number of halvings of a size in the search of a small workload."""
SMALL = 1 << 16
"""Maximum number of elements of all tensors of the small workload."""
KERNELBENCH, GPU_MODE = "kernelbench", "gpu-mode"
BUFFER, INPUT, SCALAR, WEIGHT, OUTPUT = "buffer", "input", "scalar", "weight", "output"

OURS = """
import torch

class Model(torch.nn.Module):
    def forward(self, x):
        return x.exp()

rows = 2

def get_inputs():
    return [torch.rand(rows)]

def get_init_inputs():
    return []
"""

Sizes = dict[str, int]
Seen = dict[str, Any]
"""One tensor or number: ``role``, ``name``, ``shape``, ``dtype``, and ``drawn`` or ``value``."""


class NotDescribed(Exception):
    """A problem that cannot become an operator. The message is the reason."""


def described(forms: Sequence[tuple[str, str, str]], which: int) -> torch.Tensor:
    """Return the description of one problem as JSON in a uint8 tensor, padded with spaces.

    Each problem runs in another process, so that the next one does not see what it does to PyTorch or Python.
    """
    _load_modules()
    forked = multiprocessing.get_context("fork")
    receiver, sender = forked.Pipe(duplex=False)
    child = forked.Process(target=_answer, args=(sender, *forms[which]), daemon=True)
    child.start()
    sender.close()
    try:
        if receiver.poll(MAX_SECONDS):
            spelled = receiver.recv_bytes(MAX_BYTES)
        else:
            spelled = _spelled({"reason": f"it does not end within {MAX_SECONDS} s"})
    except (EOFError, OSError):  # OSError: the answer is too long
        child.join(1)
        spelled = _spelled({"reason": f"its process ended before its end, with status {child.exitcode}"})
    finally:
        child.kill()
    return torch.frombuffer(bytearray(spelled.ljust(MAX_BYTES)), dtype=torch.uint8)


@functools.cache
def _load_modules() -> None:
    """Describe a problem of our own once: what that imports takes seconds, and each problem's process then has it."""
    _described(KERNELBENCH, OURS, {})


def _answer(sender: Connection, form: str, text: str, sizes: str) -> None:
    """Describe a problem, and send the description; foreign code runs here."""
    torch.set_num_threads(1)  # threads of the process that this one is forked from are not here
    torch.manual_seed(0)
    try:
        content = _described(form, text, json.loads(sizes))
    except NotDescribed as error:
        content = {"reason": str(error)}
    except Exception as error:  # foreign code may raise anything, and the reason reports it
        content = {"reason": f"it does not run here: {type(error).__name__}: {str(error).strip()[:200]}"}
    spelled = _spelled(content)
    if len(spelled) > MAX_BYTES:
        spelled = _spelled({"reason": f"its description has more than {MAX_BYTES} bytes"})
    sender.send_bytes(spelled)


def _spelled(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content).encode()


def _described(form: str, text: str, given: Mapping[str, Any]) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "problem"}
    exec(compile(text, "problem", "exec"), names)  # in the sandbox, and nowhere else
    packed = False
    if form == KERNELBENCH:
        observe, base, fixed = _kernelbench(names, text)
    else:
        observe, base, fixed, packed = _gpu_mode(names, text, given)
    seen = observe(base)
    if not any(one["role"] == INPUT for one in seen):
        raise NotDescribed("none of its inputs is a tensor with elements")
    run = _run_of(names, seen) if form == KERNELBENCH else ""
    axes, shapes = _axes(observe, base, seen, fixed)
    _check_at_other_sizes(observe, base, axes, shapes)
    return {
        "tensors": [_with_texts(one, texts) for one, texts in zip(seen, shapes, strict=True)],
        "axes": {name: base[name] for name in axes},
        "small": _small(observe, base, axes, shapes),
        "run": run,
        "packed": packed,
    }


def _run_of(names: dict[str, Any], seen: list[Seen]) -> str:
    """Return the source of a module's calls as a function."""
    inputs = [one["name"] for one in seen if one["role"] in (INPUT, SCALAR)]
    scalars = {one["name"]: one["value"] for one in seen if one["role"] == SCALAR}
    with torch.device("meta"):
        model = names["Model"](*names["get_init_inputs"]())
    try:
        return traced(model, inputs, scalars)
    except NotPlain as error:
        raise NotDescribed(str(error)) from None


# ---- Forms ------------------------------------------------------------------------------------------------


def _kernelbench(names: dict[str, Any], text: str) -> tuple[Callable[[Sizes], list[Seen]], Sizes, set[str]]:
    """Return how to observe a problem of KernelBench, its sizes, and those that its module or its weights depend on."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    base = _stated_sizes(names, text)

    def observe(sizes: Sizes) -> list[Seen]:
        _set_sizes(names, base, sizes)
        with FakeTensorMode(allow_non_fake_inputs=True), _Origins() as origins:
            inputs = list(names["get_inputs"]())
            kinds = [_drawn(value) for value in inputs]
            model = names["Model"](*names["get_init_inputs"]())
            _check_module(model)
            origins.forbidden = True
            versions = [getattr(value, "_version", 0) for value in inputs]
            with torch.no_grad():
                returned = model(*inputs)
        called = _argument_names(names["Model"].forward, len(inputs))
        for name, value, version in zip(called, inputs, versions, strict=True):
            if getattr(value, "_version", 0) != version:
                raise NotDescribed(
                    f"its forward() writes to its input {name}, and an operator leaves its inputs as they are"
                )
        seen = [_one(value, INPUT, name, kind) for value, name, kind in zip(inputs, called, kinds, strict=True)]
        weights = [_one(value, WEIGHT, key, None) for key, value in model.named_parameters()]
        return [*seen, *weights, *_outputs(returned)]

    return observe, base, _read_at_construction(text, base)


def _stated_sizes(names: Mapping[str, Any], text: str) -> Sizes:
    """Return the positive whole numbers that a module assigns to names, and those in its tuples as ``name_0``, ``name_1``."""
    found: Sizes = {}
    for node in ast.parse(text).body:
        for name in [target.id for target in getattr(node, "targets", ()) if isinstance(target, ast.Name)]:
            value = names.get(name)
            entries = enumerate(value) if isinstance(value, tuple) else [("", value)]
            found |= {f"{name}{_place(at)}": entry for at, entry in entries if type(entry) is int and entry > 0}
    return found


def _set_sizes(names: dict[str, Any], base: Sizes, sizes: Sizes) -> None:
    """Give the names of a module, whose sizes are ``base``, other sizes."""
    for name, value in list(names.items()):
        if isinstance(value, tuple) and f"{name}_0" in base:
            names[name] = tuple(sizes.get(f"{name}_{at}", entry) for at, entry in enumerate(value))
        elif type(value) is int and name in base:
            names[name] = sizes[name]


def _argument_names(forward: Callable[..., Any], count: int) -> list[str]:
    """Return a name for each argument of a forward: those of its parameters, or made ones if it has too few."""
    named = [name for name in inspect.signature(forward).parameters if name != "self"][:count]
    return named if len(named) == count else [f"x_{at}" for at in range(count)]


def _place(at: int | str) -> str:
    return "" if at == "" else f"_{at}"


def _read_at_construction(text: str, names: Mapping[str, int]) -> set[str]:
    """Return the sizes that the model and its initial inputs read."""
    bodies = [node for node in ast.parse(text).body if getattr(node, "name", None) in ("Model", "get_init_inputs")]
    read = {node.id for body in bodies for node in ast.walk(body) if isinstance(node, ast.Name)}
    return {name for name in names if name in read or name.rpartition("_")[0] in read}


def _check_module(model: torch.nn.Module) -> None:
    """Refuse a module with a state that no call states."""
    for key, module in model.named_modules():
        where = f"{key}: " if key else ""
        if isinstance(module, torch.nn.modules.dropout._DropoutNd) and module.p > 0:
            raise NotDescribed(f"{where}{type(module).__name__} draws random numbers, so no two calls agree")
        loose = [name for name, value in vars(module).items() if isinstance(value, torch.Tensor)]
        if loose:
            raise NotDescribed(f"{where}{loose[0]} is a tensor that is neither a weight nor a buffer")
        drawn = [name for name, value in module.named_buffers(recurse=False) if _drawn(value) is not None]
        if drawn:
            raise NotDescribed(f"{where}the buffer {drawn[0]} is drawn at random")


def _gpu_mode(
    names: dict[str, Any], text: str, given: Mapping[str, Any]
) -> tuple[Callable[[Sizes], list[Seen]], Sizes, set[str], bool]:
    """Return how to observe a problem of GPU MODE, its sizes, no fixed ones, and whether its data is a tuple.

    Its data is drawn, and its reference runs.
    """
    others = {name: value for name, value in given.items() if type(value) is not int or name == "seed"}
    base = {name: value for name, value in given.items() if name not in others and value > 0}
    others |= {name: value for name, value in given.items() if name not in base}
    whole = isinstance(names["generate_input"](**others, **base), tuple | list)

    def observe(sizes: Sizes) -> list[Seen]:
        with _Origins():
            data = names["generate_input"](**others, **sizes)
            values = list(data) if whole else [data]
            kinds = [_drawn(value) for value in values]
        with torch.no_grad():
            returned = names["ref_kernel"](_copied(values, whole))
            outputs = _outputs(returned)
            called = _unpacked(text, len(values))
            seen = []
            for at, (value, name) in enumerate(zip(values, called, strict=True)):
                role = BUFFER if whole and _is_buffer(names["ref_kernel"], values, at, returned) else INPUT
                seen.append(_one(value, role, name, kinds[at]))
        return [*seen, *outputs]

    return observe, base, set(), whole


def _copied(values: list[Any], whole: bool, at: int = -1) -> Any:
    """Return a copy of the data; the element ``at`` has other contents."""
    copies = [value.clone() if isinstance(value, torch.Tensor) else value for value in values]
    if at >= 0:
        copies[at] = torch.full_like(copies[at], 7)
    return tuple(copies) if whole else copies[0]


def _is_buffer(reference: Callable[..., Any], values: list[Any], at: int, returned: Any) -> bool:
    """Return True if an element is a tensor that the reference only writes to: other contents change nothing."""
    if not isinstance(values[at], torch.Tensor) or len(values) == 1:
        return False
    try:
        again = reference(_copied(values, True, at))
    except Exception:  # contents that the reference refuses are contents that it reads
        return False
    pairs = zip(_tensors(returned), _tensors(again), strict=True)
    return all(one.shape == other.shape and torch.equal(one.nan_to_num(), other.nan_to_num()) for one, other in pairs)


def _unpacked(text: str, count: int) -> list[str]:
    """Return names for the elements of the data: those that the reference unpacks, or that the generator returns."""
    functions = {node.name: node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}
    unpacks = [node.targets[0] for node in ast.walk(functions["ref_kernel"]) if isinstance(node, ast.Assign)]
    returns = [node.value for node in ast.walk(functions["generate_input"]) if isinstance(node, ast.Return)]
    for node in (*unpacks, *returns):
        elements = node.elts if isinstance(node, ast.Tuple | ast.List) else [node] if count == 1 else []
        found = [one.id for one in elements if isinstance(one, ast.Name)]
        if len(found) == count == len(set(found) - {"_"}):
            return found
    return [f"x_{at}" for at in range(count)]


# ---- One observation --------------------------------------------------------------------------------------

_MADE = {
    "rand": {"kind": "uniform", "low": 0.0, "high": 1.0},
    "randn": {"kind": "normal"},
    "normal_": {"kind": "normal"},
}
_KEEP = frozenset(
    {"contiguous", "to", "cuda", "cpu", "clone", "detach", "half", "float", "bfloat16", "double", "view", "reshape"}
)
_RANDOM = frozenset(
    {"rand", "randn", "randint", "dropout", "bernoulli", "multinomial", "rand_like", "randn_like", "normal"}
)


class _Origins(TorchFunctionMode):
    """Mark each tensor with the distribution that it was drawn from, and refuse draws where they are forbidden."""

    forbidden = False

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        if self.forbidden and name in _RANDOM and kwargs.get("p", 1) != 0 and not (name == "dropout" and args[1] == 0):
            raise NotDescribed(f"its forward() calls {name}, so no two calls agree")
        result = function(*args, **kwargs)
        if isinstance(result, torch.Tensor):
            mark = (
                _MADE.get(name) if name != "normal_" or (not args[1:] and not kwargs.keys() & {"mean", "std"}) else None
            )
            if name == "randint" and not any(isinstance(one, torch.Tensor) for one in args):
                bounds = [one for one in args if type(one) is int]
                low, high = kwargs.get("low", 0), kwargs.get("high", bounds[-1] if bounds else None)
                low = bounds[0] if len(bounds) > 1 else low
                mark = None if high is None else {"kind": "integers", "low": low, "high": high}
            elif name == "uniform_":
                ends = (*args[1:3], kwargs.get("from"), kwargs.get("to"))
                high = 1.0 if ends[1] is None else float(ends[1])
                mark = {"kind": "uniform", "low": float(ends[0] or 0.0), "high": high}
            elif name in _KEEP and args:
                mark = _drawn(args[0])
            elif name.endswith("_like") or name in ("empty", "zeros", "ones"):
                mark = {"kind": "made"}
            if mark is not None:
                result._drawn = mark  # type: ignore[attr-defined]
            elif name.endswith("_") and not name.startswith("_") and hasattr(result, "_drawn"):
                del result._drawn
        return result


def _drawn(value: Any) -> dict[str, Any] | None:
    return getattr(value, "_drawn", None) if isinstance(value, torch.Tensor) else None


def _one(value: Any, role: str, name: str, drawn: Mapping[str, Any] | None) -> Seen:
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        if not value.is_contiguous() and role == INPUT:
            drawn = None
        return {"role": role, "name": name, "shape": list(value.shape), "dtype": dtype, "drawn": drawn}
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
        raise NotDescribed(f"its input {name} does not fit in 64 bits")
    if isinstance(value, float) and not math.isfinite(value):
        raise NotDescribed(f"its input {name} is {value}, and a record holds finite numbers")
    if isinstance(value, bool | int | float):
        dtype = "bool" if isinstance(value, bool) else "int64" if isinstance(value, int) else "float32"
        return {"role": SCALAR, "name": name, "shape": None, "dtype": dtype, "value": value}
    raise NotDescribed(f"its input {name} is a {type(value).__name__}, not a tensor or a number")


def _tensors(returned: Any) -> list[torch.Tensor]:
    values = list(returned) if isinstance(returned, tuple | list) else [returned]
    if not values or not all(isinstance(value, torch.Tensor) for value in values):
        raise NotDescribed(f"it returns a {type(returned).__name__}, not a tensor or a tuple of tensors")
    return values


def _outputs(returned: Any) -> list[Seen]:
    values = _tensors(returned)
    return [_one(value, OUTPUT, "out" if len(values) == 1 else f"out_{at}", None) for at, value in enumerate(values)]


# ---- Axes -------------------------------------------------------------------------------------------------


def _axes(
    observe: Callable[[Sizes], list[Seen]], base: Sizes, seen: list[Seen], fixed: set[str]
) -> tuple[list[str], list[list[str]]]:
    """Return the sizes that are axes, and the shapes of all tensors as texts over them."""
    dims = [_dims(one) for one in seen]
    grown: dict[str, list[list[list[int]]]] = {}
    for name in base:
        if name not in fixed:
            found = [_dims_at(observe, {**base, name: factor * base[name]}, seen) for factor in (2, 3)]
            if None not in found and any(one != dims for one in found):
                grown[name] = found  # type: ignore[assignment]
    texts = [[_text(base, grown, dims, i, j) for j in range(len(shape))] for i, shape in enumerate(dims)]
    while True:  # a size with a dimension that no text says is a number after all, and so are its partners
        lost = {name for shape in texts for names, text in shape if text is None for name in names}
        if not lost:
            break
        grown = {name: found for name, found in grown.items() if name not in lost}
        texts = [[_text(base, grown, dims, i, j) for j in range(len(shape))] for i, shape in enumerate(dims)]
    return list(grown), [[str(text) for _, text in shape] for shape in texts]


def _dims_at(observe: Callable[[Sizes], list[Seen]], sizes: Sizes, seen: list[Seen]) -> list[list[int]] | None:
    try:
        other = observe(sizes)
    except Exception:  # not every size is allowed, and foreign code may raise anything
        return None
    same = [(one["role"], one["dtype"], len(_dims(one))) for one in other]
    if same != [(one["role"], one["dtype"], len(_dims(one))) for one in seen]:
        return None
    return [_dims(one) for one in other]


def _dims(one: Seen) -> list[int]:
    """Return the whole numbers of an observation that may depend on sizes: its shape, and the bound of drawn indices."""
    bound = [one["drawn"]["high"]] if (one.get("drawn") or {}).get("kind") == "integers" else []
    return [*(one["shape"] or ()), *bound]


def _with_texts(one: Seen, texts: list[str]) -> Seen:
    """Return an observation with its numbers as texts over axes."""
    if one["shape"] is None:
        return one
    rank = len(one["shape"])
    drawn = one["drawn"] if len(texts) == rank else {**one["drawn"], "high": texts[rank]}
    return {**one, "shape": texts[:rank], "drawn": drawn}


def _text(
    base: Sizes, grown: Mapping[str, list[list[list[int]]]], dims: list[list[int]], i: int, j: int
) -> tuple[list[str], str | None]:
    """Return the sizes that a dimension depends on, and its text; None if it is neither linear nor a product."""
    size = dims[i][j]
    names = [name for name, found in grown.items() if any(one[i][j] != size for one in found)]
    if not names:
        return [], str(size)
    steps = {name: [one[i][j] - size for one in grown[name]] for name in names}
    if any(third != 2 * second or second <= 0 for second, third in steps.values()):
        return names, None
    if len(names) > 1:
        product = math.prod(base[name] for name in names)
        linear = size % product == 0 and all(second == size for second, _ in steps.values())
        factor = "" if size == product else f" * {size // product}"
        return names, " * ".join(names) + factor if linear else None
    (name,) = names
    step, value = steps[name][0], base[name]
    if step % value == 0:
        left, offset = (name if step == value else f"{name} * {step // value}"), size - step
    elif value % step == 0:
        left, offset = f"{name} // {value // step}", size - step
    else:
        return names, None
    return names, left if offset == 0 else f"{left} + {offset}" if offset > 0 else f"{left} - {-offset}"


def _evaluated(shapes: list[list[str]], sizes: Sizes) -> list[list[int]]:
    return [[int(eval(text, {}, dict(sizes))) for text in shape] for shape in shapes]  # texts of this module


def _check_at_other_sizes(
    observe: Callable[[Sizes], list[Seen]], base: Sizes, axes: list[str], shapes: list[list[str]]
) -> None:
    """Refuse shapes that do not hold if all axes change at once."""
    if not axes:
        return
    sizes = {**base, **{name: 2 * base[name] for name in axes}}
    try:
        found = [_dims(one) for one in observe(sizes)]
    except Exception as error:
        raise NotDescribed(f"it does not run with all of {', '.join(axes)} doubled: {str(error)[:120]}") from None
    if found != _evaluated(shapes, sizes):
        raise NotDescribed(f"its shapes are not arithmetic over {', '.join(axes)}")


def _small(
    observe: Callable[[Sizes], list[Seen]], base: Sizes, axes: list[str], shapes: list[list[str]]
) -> Sizes | None:
    """Return smaller sizes at which it runs with the same shapes, for the self-test; None if none were found."""
    best, sizes = None, dict(base)
    for _ in range(MAX_TRIED):
        shrinkable = [name for name in axes if sizes[name] > 1]
        if not shrinkable:
            break
        largest = max(shrinkable, key=lambda name: sizes[name])
        trial = {**sizes, largest: max(1, sizes[largest] // 2)}
        try:
            found = [_dims(one) for one in observe(trial)]
        except Exception:  # too small for this problem
            break
        if found != _evaluated(shapes, trial):
            break
        best = sizes = trial
        if sum(math.prod(shape) for shape in found) <= SMALL:
            break
    return None if best is None else {name: best[name] for name in axes}
