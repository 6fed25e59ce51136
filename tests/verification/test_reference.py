from __future__ import annotations

import pytest
import torch
from raising import raises

from tilegym_db.errors import RecordError
from tilegym_db.verification.oracle import evaluate_function, load_function, oracle, run_lifted, run_reference

X = {"x": {"shape": ["M", "N"], "dtype": "T"}}


def without_self_test(operator, body, **changes):
    return operator(body, inputs=X, self_test=None, cost=None, **changes)


@pytest.mark.parametrize(
    "cast",
    [
        "x.to(torch.bfloat16)",
        "x.half()",
        "x.float()",
        "x.to(dtype=torch.float16)",
        "x.type(torch.bfloat16)",
        "x.sum(dim=-1, keepdim=True, dtype=torch.float32) * 0 + x",
        "x + torch.zeros(x.shape, dtype=torch.bfloat16)",
    ],
)
def test_a_cast_inside_a_lifted_reference_does_not_round(cast, operator):
    definition = without_self_test(operator, f"return ({cast}) * 3")
    x = torch.tensor([[1 + 2**-30, 1e-9]], dtype=torch.float64)
    out = run_lifted(definition, {"x": x})["out"]
    assert out.dtype == torch.float64
    assert torch.equal(out, x * 3)


def test_a_lifted_reference_works_on_the_quantised_bits(operator):
    definition = without_self_test(operator, "return (x.float() * x.float()).to(x.dtype)")
    x = torch.tensor([[1 / 3]], dtype=torch.bfloat16)
    assert run_lifted(definition, {"x": x})["out"].item() == x.double().item() ** 2
    assert run_reference(definition, {"x": x})["out"].item() == (x.double() ** 2).to(torch.bfloat16).item()


def test_integers_stay_integers_when_lifted(operator):
    definition = without_self_test(
        operator, "return x.argmax(dim=-1)", outputs={"out": {"shape": ["M"], "dtype": "int64"}}
    )
    out = run_lifted(definition, {"x": torch.tensor([[1.0, 3.0, 2.0]])})["out"]
    assert (out.dtype, out.tolist()) == (torch.int64, [1])


def test_nothing_stays_lifted_afterwards(operator):
    run_lifted(without_self_test(operator, "return x.float()"), {"x": torch.ones(1, 1)})
    assert torch.ones(1).to(torch.bfloat16).dtype == torch.bfloat16


def test_the_oracle_of_a_quantiser_is_the_reference_as_written(operator):
    body = "return x.to(torch.float16).to(x.dtype)"
    x = {"x": torch.tensor([[1 + 2**-20]])}
    assert oracle(without_self_test(operator, body, oracle="as_written"), x)["out"].item() == 1.0
    assert oracle(without_self_test(operator, body), x)["out"].item() == 1 + 2**-20


def test_an_in_place_output_is_named_and_the_input_left_alone(operator):
    definition = without_self_test(
        operator,
        "x.add_(1); return x * 2",
        outputs={"out": {"shape": ["M", "N"], "dtype": "T"}, "x_out": {"shape": ["M", "N"], "dtype": "T"}},
        in_place={"x": "x_out"},
    )
    x = torch.zeros(1, 2)
    outputs = run_reference(definition, {"x": x})
    assert {name: value.tolist() for name, value in outputs.items()} == {"out": [[2, 2]], "x_out": [[1, 1]]}
    assert x.tolist() == [[0, 0]]


@pytest.mark.parametrize(
    ("body", "code", "fact"),
    [
        ("raise ArithmeticError('no such luck')", "reference_raises", "ArithmeticError: no such luck"),
        ("return x, x", "output_count_differs", "outputs out"),
        ("return 3", "output_not_tensor", "'out'"),
        ("return unknown", "reference_raises", "NameError"),
    ],
)
def test_unusable_reference_is_named_with_its_mistake(body, code, fact, operator):
    with raises(RecordError, code, "row_scale: reference", fact):
        run_reference(without_self_test(operator, body), {"x": torch.ones(1, 1)})


def test_reference_without_memory_on_a_gpu_can_be_tried_again(operator):
    definition = without_self_test(operator, "raise torch.OutOfMemoryError('CUDA out of memory')")
    for run in (run_reference, oracle):
        with pytest.raises(torch.OutOfMemoryError):
            run(definition, {"x": torch.ones(1, 1)})
    with pytest.raises(torch.OutOfMemoryError):
        evaluate_function(definition, "run", {"x": torch.ones(1, 1)}, {})


def test_a_source_that_raises_when_it_is_loaded_is_named(operator):
    definition = without_self_test(operator, "return x")
    with raises(RecordError, "reference_load_failed", "row_scale: alternative formulation", "ZeroDivision"):
        run_reference(definition, {"x": torch.ones(1, 1)}, source="1 / 0\ndef run(x): return x")


def test_reference_names_no_module_imported_by_torch_compile():
    """PyTorch 2.11 imports the module that the globals of an inlined function name; later releases do not."""
    half = "import torch\nHALF = 0.5\n\n\ndef _half(x):\n    return HALF * x\n\n\n"
    function = load_function(half + "def run(x):\n    return _half(x) + torch.sigmoid(x)\n", "half_and_sigmoid")
    assert "__name__" not in function.__globals__

    def inlined(x):
        return function(x)

    torch.compiler.reset()
    x = torch.arange(4.0)
    for compiled in (torch.compile(function, backend="eager"), torch.compile(inlined, backend="eager", fullgraph=True)):
        torch.testing.assert_close(compiled(x), x / 2 + torch.sigmoid(x))


def test_a_choice_of_two_numbers_is_one_of_fp64_numbers(operator):
    """PyTorch makes a tensor of its default dtype of them, which has 0.1 with an error of 1e-9."""
    definition = without_self_test(operator, "return torch.where(x > 0, 0.1, 0.2) + 0 * x")
    assert run_lifted(definition, {"x": torch.tensor([[1.0, -1.0]])})["out"].tolist() == [[0.1, 0.2]]


def test_a_cast_to_half_precision_copies_and_does_not_round(operator):
    definition = without_self_test(operator, "y = x.to(torch.bfloat16)\n    y += 1\n    return x.float() + 0 * y")
    x = torch.tensor([[0.1, 257.3]])
    assert torch.equal(run_lifted(definition, {"x": x})["out"], x.double())
