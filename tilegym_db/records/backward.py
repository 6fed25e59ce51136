"""How a Definition and the one that computes its gradients belong together: by the names, shapes and dtypes of their tensors.

A backward Definition takes what the forward one was given, as far as it needs it, and ``grad_<output>`` for every output; it
gives ``grad_<input>`` for some of the inputs. There may be several for one forward Definition, for different inputs: frozen
weights need no gradient, and computing it would cost what stock code does not spend.
"""

from __future__ import annotations

from tilegym_db.records.binding import Binding
from tilegym_db.records.definition import GRADIENT, Definition
from tilegym_db.records.definition_parts import TensorSpec

__all__ = ["backward_binding", "backward_problem", "differentiated"]


def differentiated(backward: Definition) -> tuple[str, ...]:
    """The inputs of the forward Definition that a backward one gives the gradients of, in its order of outputs."""
    return tuple(name.removeprefix(GRADIENT) for name in backward.outputs)


def backward_problem(forward: Definition, backward: Definition) -> str:
    """Why one Definition cannot be the backward of another; empty where it can."""
    if forward.in_place:
        return f"{forward.name} overwrites its input '{next(iter(forward.in_place))}', which its gradient may need"
    for name, spec in backward.inputs.items():
        source = forward.outputs if name.startswith(GRADIENT) else forward.inputs
        problem = _differs(f"inputs.{name}", spec, source.get(name.removeprefix(GRADIENT)), forward)
        if problem:
            return problem
    for name, spec in backward.outputs.items():
        problem = _differs(f"outputs.{name}", spec, forward.inputs.get(name.removeprefix(GRADIENT)), forward)
        if problem:
            return problem
    for name in forward.outputs:
        if GRADIENT + name not in backward.inputs:
            return f"it has no input '{GRADIENT}{name}', but {forward.name} has an output '{name}'"
    for variable, choices in backward.dtypes.items():
        if set(choices) - set(forward.dtypes.get(variable, ())):
            return f"its dtypes of '{variable}' are not among those of {forward.name}"
    return ""


def _differs(where: str, spec: TensorSpec, twin: TensorSpec | None, forward: Definition) -> str:
    if twin is None:
        return f"{where} belongs to no tensor of {forward.name}"
    if (spec.shape, spec.dtype) != (twin.shape, twin.dtype):
        return f"{where} differs in shape or dtype from its tensor of {forward.name}"
    return ""


def backward_binding(backward: Definition, call: Binding) -> Binding:
    """The call that will be made of a backward Definition after a call of the forward one, as far as can be known then.

    The gradients that come in are taken to lie in memory as the outputs do: that is what PyTorch gives back for most of
    what follows. Of those that go out nothing is said.
    """
    layouts = {}
    for name in backward.tensor_inputs:
        layout = call.layouts.get(name.removeprefix(GRADIENT) if name.startswith(GRADIENT) else name)
        if layout is not None:
            layouts[name] = layout
    return Binding(
        axes={name: size for name, size in call.axes.items() if name in backward.axes},
        dtypes={name: dtype for name, dtype in call.dtypes.items() if name in backward.dtypes},
        layouts=layouts,
        scalars={name: value for name, value in call.scalars.items() if name in backward.inputs},
    )
