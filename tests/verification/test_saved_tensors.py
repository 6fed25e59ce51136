"""A backward that takes what its forward gave: saved tensors are outputs of the forward for inputs that were drawn."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from tilegym_db.catalog import Catalog
from tilegym_db.errors import RecordError
from tilegym_db.paths import shipped_root
from tilegym_db.records import Definition, Workload
from tilegym_db.records.call import Call, backward_problem, bind_forward, differentiated
from tilegym_db.records.workload import Case
from tilegym_db.verification.distributions import CONTENTS
from tilegym_db.verification.expected import make_oracle_case
from tilegym_db.verification.inputs import draw_inputs, draws_noise
from tilegym_db.verification.oracle import Lifted, load_function, run_lifted, run_reference

CATALOG = Catalog((shipped_root(),))
BACKWARD, FORWARD = CATALOG.definition("softmax_backward"), CATALOG.definition("softmax")
ROWS, FACTORS, NUMBER = (
    {"shape": ["M", "N"], "dtype": "T"},
    {"shape": ["M"], "dtype": "float32"},
    {"shape": None, "dtype": "float32"},
)


def case(contents: str = "normal", dtype: str = "float32") -> Case:
    return Case(Call("row_scale", {"M": 9, "N": 70}, {"T": dtype}), distribution=contents, seed=4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("contents", ["normal", "row_scale", "one_hot", "large"])
def test_saved_tensor_is_the_forwards_result_on_the_same_inputs(contents, dtype):
    drawn = draw_inputs(BACKWARD, case(contents, dtype), "cpu")
    assert list(drawn) == ["out", "grad_out"]
    scores = draw_inputs(FORWARD, case(contents, dtype), "cpu")
    want = run_reference(FORWARD, scores)["out"]
    assert torch.equal(drawn["out"], want)
    torch.testing.assert_close(drawn["out"].float().sum(-1), torch.ones(9), rtol=0, atol=0.02)
    assert draws_noise(BACKWARD)  # a probability is no small integer


@pytest.mark.parametrize("contents", sorted(CONTENTS))
def test_reference_passes_its_gates_on_any_saved_tensors(contents):
    assert make_oracle_case(BACKWARD, case(contents), "cpu") is not None


def test_saved_tensor_comes_from_the_inputs_of_the_backward(definition_record):
    forward, backward = with_factors(definition_record)
    drawn = draw_inputs(bind_forward(backward, forward), factors_case(), "cpu")
    want = run_reference(forward, {name: drawn[name] for name in forward.inputs})
    assert torch.equal(drawn["rstd"], want["rstd"])
    assert list(drawn) == list(backward.inputs)


def test_the_backward_is_the_derivative_of_its_forward_in_fp64():
    scores = draw_inputs(FORWARD, case(), "cpu")
    grad = draw_inputs(BACKWARD, case(), "cpu")["grad_out"]
    out = run_lifted(FORWARD, scores)["out"]
    found = run_lifted(BACKWARD, {"out": out, "grad_out": grad})["grad_x"]
    x = scores["x"].double().requires_grad_()
    mode: Any = Lifted
    with mode():
        (want,) = torch.autograd.grad(load_function(FORWARD.reference, "softmax")(x), x, grad.double())
    torch.testing.assert_close(found, want, rtol=1e-9, atol=1e-12)


def test_stock_code_gives_the_gradient_of_stock_code():
    from tilegym_db.backends.load import load_entry

    x = draw_inputs(FORWARD, case(), "cpu")["x"].requires_grad_()
    grad = draw_inputs(BACKWARD, case(), "cpu")["grad_out"]
    out = torch.softmax(x, dim=-1)
    (want,) = torch.autograd.grad(out, x, grad)
    found = load_entry(CATALOG.solution("softmax_backward_stock"))(out.detach(), grad)
    torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-7)


def with_factors(definition_record: Any, **changes: Any) -> tuple[Definition, Definition]:
    """A forward with a factor a row as its second output, and a backward that takes it and no gradient of it."""
    source = "# Source: https://example.org\nimport torch\n\n\n"
    body = (
        "    rstd = torch.rsqrt(x.float().square().mean(-1) + eps)\n    return (x * rstd[:, None]).to(x.dtype), rstd\n"
    )
    forward = definition_record(
        name="scaled",
        inputs={"x": ROWS, "eps": NUMBER},
        outputs={"out": ROWS, "rstd": FACTORS},
        reference=f"{source}def run(x, eps):\n{body}",
        cost=None,
    )
    inputs = changes.pop("inputs", {"x": ROWS, "rstd": FACTORS, "grad_out": ROWS, "eps": NUMBER})
    backward = definition_record(
        name="scaled_backward",
        backward_of="scaled",
        saved=["rstd"],
        inputs=inputs,
        outputs={"grad_x": ROWS},
        reference=f"{source}def run({', '.join(inputs)}):\n    return (grad_out * rstd[:, None]).to(grad_out.dtype)\n",
        cost=None,
    )
    return Definition.from_dict(forward), Definition.from_dict({**backward, **changes})


def factors_case() -> Case:
    return Case(Call("row_scale", {"M": 9, "N": 70}, {"T": "float32"}, scalars={"eps": 1e-5}), seed=4)


def test_of_a_saved_output_no_gradient_is_needed(definition_record):
    forward, backward = with_factors(definition_record)
    assert backward_problem(forward, backward) == ""
    assert differentiated(backward) == ("x",)
    unsaved = backward_problem(forward, backward.model_copy(update={"saved": ()}))
    assert "inputs.rstd" in unsaved
    assert "scaled" in unsaved


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"inputs": {"rstd": ROWS, "grad_out": ROWS, "eps": NUMBER}}, "inputs.rstd differs in shape or dtype"),
        ({"inputs": {"rstd": FACTORS, "grad_out": ROWS}}, "depend on the scalar input 'eps' of scaled"),
        (
            {"inputs": {"x": ROWS, "rstd": FACTORS, "grad_out": ROWS, "eps": NUMBER}, "saved": ["x"]},
            "inputs.x belongs to no",
        ),
        ({"dtypes": {"T": ["float32"], "S": ["float32"]}, "saved": ["rstd"]}, "its dtypes of 'S'"),
    ],
)
def test_a_saved_tensor_that_no_forward_gives_says_where(changes, problem, definition_record):
    assert problem in backward_problem(*with_factors(definition_record, **changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"saved": ["other"]}, "saved names 'other', which is not a tensor input"),
        ({"saved": ["eps"]}, "saved names 'eps', which is not a tensor input"),
        ({"saved": ["grad_out"]}, "saved names 'grad_out'"),
        ({"backward_of": None}, "'backward_of' must name that"),
    ],
)
def test_saved_names_tensors_of_a_backward(changes, message, definition_record):
    with pytest.raises(RecordError, match=r"saved|backward") as error:
        with_factors(definition_record, **changes)
    assert message in str(error.value)


def test_backward_without_its_forward_is_not_drawn_and_says_so(definition_record):
    _, backward = with_factors(definition_record)
    with pytest.raises(RecordError, match="saved: 'rstd' is computed by 'scaled', which is in no catalog"):
        draw_inputs(backward, factors_case(), "cpu")


def test_a_catalog_without_the_forward_names_the_file(tmp_path: Path, definition_record):
    _, backward = with_factors(definition_record)
    folder = tmp_path / "definitions" / "elementwise"
    folder.mkdir(parents=True)
    (folder / "scaled_backward.json").write_text(backward.to_json())
    with pytest.raises(RecordError, match=r"scaled_backward\.json: backward_of: no definition 'scaled'"):
        Catalog((tmp_path,), warns=False).definition("scaled_backward")


def test_another_process_can_draw_it_too():
    again = pickle.loads(pickle.dumps(BACKWARD))
    assert torch.equal(draw_inputs(again, case(), "cpu")["out"], draw_inputs(BACKWARD, case(), "cpu")["out"])


def test_a_workload_does_not_say_what_a_saved_tensor_is():
    record = {"definition": "softmax_backward", "axes": {"M": 2, "N": 4}, "dtypes": {"T": "float32"}}
    Workload.from_dict(record).check_against(BACKWARD)
    given = Workload.from_dict({**record, "inputs": {"out": {"type": "random"}}})
    with pytest.raises(RecordError, match=r"inputs\.out: softmax computes it"):
        given.check_against(BACKWARD)
