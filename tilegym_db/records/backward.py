"""Rules that connect a Definition and its backward, by names, shapes and dtypes of their tensors.

A backward Definition takes the forward's inputs that it needs, and ``grad_<output>`` for every output. It returns
``grad_<input>`` for some of the inputs. It may also take outputs of the forward as ``saved`` tensors (an attention's output
and log-sum-exp, the row factors of a norm); the gradient of a saved output may be left out. A forward Definition may have
several backwards for different inputs: frozen weights need no gradient, and stock code does not compute it either.
"""

from __future__ import annotations

from tilegym_db.errors import RecordError
from tilegym_db.records.call import Call
from tilegym_db.records.definition import Definition
from tilegym_db.records.definition_parts import TensorSpec
from tilegym_db.records.definition_rules import GRADIENT


def bind_forward(backward: Definition, forward: Definition) -> Definition:
    """Return the same backward, bound to the forward that computes its saved tensors.

    Raises:
        RecordError: the two do not fit together.
    """
    problem = backward_problem(forward, backward)
    if problem:
        raise RecordError(
            f"{backward.name} cannot be the backward of {forward.name}: {problem}.", code="backward_differs"
        )
    backward._forward = forward
    return backward


def forward_of(backward: Definition) -> Definition:
    """Return the forward that computes the saved tensors of a backward.

    Raises:
        RecordError: the backward was not read from a catalog that has the forward.
    """
    if backward._forward is None:
        raise RecordError(
            f"{backward.name}: saved: '{backward.saved[0]}' is computed by '{backward.backward_of}', which is in no catalog "
            "that was read. Add it first (tilegym-db add-definition FILE).",
            code="forward_unknown",
        )
    return backward._forward


def differentiated(backward: Definition) -> tuple[str, ...]:
    """Return the forward's inputs whose gradients a backward computes, in the order of its outputs."""
    return tuple(name.removeprefix(GRADIENT) for name in backward.outputs)


def backward_problem(forward: Definition, backward: Definition) -> str:
    """Return the reason why one Definition cannot be the backward of another; empty if it can."""
    if forward.in_place:
        return f"{forward.name} overwrites its input '{next(iter(forward.in_place))}', which its gradient may need"
    for name, spec in backward.inputs.items():
        source = forward.outputs if name.startswith(GRADIENT) or name in backward.saved else forward.inputs
        problem = _differs(f"inputs.{name}", spec, source.get(name.removeprefix(GRADIENT)), forward)
        if problem:
            return problem
    for name, spec in backward.outputs.items():
        problem = _differs(f"outputs.{name}", spec, forward.inputs.get(name.removeprefix(GRADIENT)), forward)
        if problem:
            return problem
    for name in forward.outputs:
        if GRADIENT + name not in backward.inputs and name not in backward.saved:
            return f"it has no input '{GRADIENT}{name}', but {forward.name} has an output '{name}'"
    for variable, choices in backward.dtypes.items():
        if set(choices) - set(forward.dtypes.get(variable, ())):
            return f"its dtypes of '{variable}' are not among those of {forward.name}"
    return _cannot_be_drawn(forward, backward) if backward.saved else ""


def _cannot_be_drawn(forward: Definition, backward: Definition) -> str:
    """Return the reason why a backward call cannot evaluate the forward; empty if it can. Missing tensors are drawn."""
    scalars = [name for name, spec in forward.inputs.items() if spec.is_scalar]
    for what, needed, known in (
        ("axis", forward.axes, backward.axes),
        ("dtype variable", forward.dtypes, backward.dtypes),
        ("scalar input", scalars, backward.inputs),
    ):
        missing = [name for name in needed if name not in known]
        if missing:
            return f"its saved tensors depend on the {what} '{missing[0]}' of {forward.name}, which it does not have"
    return ""


def _differs(where: str, spec: TensorSpec, twin: TensorSpec | None, forward: Definition) -> str:
    if twin is None:
        return f"{where} belongs to no tensor of {forward.name}"
    if (spec.shape, spec.dtype) != (twin.shape, twin.dtype):
        return f"{where} differs in shape or dtype from its tensor of {forward.name}"
    return ""


def backward_call(backward: Definition, call: Call) -> Call:
    """Return the call that will be made of a backward Definition after a call of the forward one, as far as can be
    known then.

    Incoming gradients are assumed to have the layouts of the outputs, which holds for most PyTorch operations. Layouts of
    outgoing gradients are left open.
    """
    layouts = {}
    for name in backward.tensor_inputs:
        layout = call.layouts.get(name.removeprefix(GRADIENT) if name.startswith(GRADIENT) else name)
        if layout is not None:
            layouts[name] = layout
    return Call(
        backward.name,
        axes={name: size for name, size in call.axes.items() if name in backward.axes},
        dtypes={name: dtype for name, dtype in call.dtypes.items() if name in backward.dtypes},
        layouts=layouts,
        scalars={name: value for name, value in call.scalars.items() if name in backward.inputs},
    )
