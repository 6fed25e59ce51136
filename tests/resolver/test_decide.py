"""What is picked, and the reason for everything that is not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from tilegym_db.errors import UsageError
from tilegym_db.published.table import load_table
from tilegym_db.records.call import Call, Request
from tilegym_db.resolver.decide import Decision, decide, not_in_compiled_code
from tilegym_db.resolver.resolve import call_site, make_request, resolve


def ask(shop: Any, *, definition: str = "scale_rows", axes: dict[str, int] | None = None, **changes: Any) -> Request:
    if definition == "scale_rows":
        changes = {"dtypes": {"T": "bfloat16"}, **changes}
    parts = {name: changes.pop(name) for name in ("dtypes", "layouts", "scalars") if name in changes}
    call = Call(definition, axes or {"M": 4, "N": 8}, **parts)
    return make_request(shop.definition(definition), call, **{"gpu": "h200", **changes})


def decide_in(shop: Any, request: Request) -> Decision:
    solutions = {files.name: files for files in shop.catalog.solutions_for(request.definition.name)}
    return decide(request, load_table(request.gpu), solutions)


def reasons(decision: Decision) -> dict[str, str]:
    return {str(candidate): reason for candidate, reason in decision.rejected}


def publish(shop: Any, candidates: Sequence[dict[str, Any]], **changes: Any) -> None:
    shop.publish([shop.entry("scale_rows", {"M": 4, "N": 8}, list(candidates), **changes)], gpu="h200")


@pytest.fixture
def other_kernel(shop: Any, kernel: Any) -> Any:
    return shop.add("scale_rows", "scale_rows_other", "def run(x, weight, eps, out):\n    out.copy_(x)\n")


def test_decide_at_exact_axes_picks_the_fastest_verified(shop: Any, kernel: Any, other_kernel: Any) -> None:
    publish(shop, [shop.candidate(kernel, 9.0, config={"BIAS": 1}), shop.candidate(other_kernel, 10.0)])
    decision = decide_in(shop, ask(shop))
    assert decision.solution is not None
    assert (decision.solution.name, decision.config) == ("scale_rows_kernel", {"BIAS": 1})
    assert (decision.evidence.source, decision.evidence.axes) == ("exact", {"M": 4, "N": 8})
    assert reasons(decision) == {"scale_rows_other": "slower: 10.00 us against 9.00 us of scale_rows_kernel[BIAS=1]"}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"solution_digest": "0" * 64}, "digest differs from the catalog's source: verified 000000000000"),
        ({"tier": "interpreter"}, "tier interpreter: not a verified measurement; verify it (tilegym-db verify scale"),
        ({"tier": None}, "tier unknown: not a verified measurement"),
        ({"sandbox_level": 1}, "sandbox level 1: its worker could have reached what judged it"),
        ({"sandbox_level": None}, "sandbox level 0: its worker could have reached what judged it"),
        ({"speedup_ci_low": 1.02}, "not faster than stock by more than noise: speedup 1.50x, CI low 1.020 <= 1.02"),
        ({"speedup": 0.8, "speedup_ci_low": 0.79}, "slower than stock: speedup 0.80x"),
        ({"speedup": 0.98, "speedup_ci_low": 0.9}, "not faster than stock by more than noise"),
        ({"speedup": None, "speedup_ci_low": None}, "not compared with the stock code"),
    ],
)
def test_a_candidate_is_rejected_for(shop: Any, kernel: Any, changes: dict[str, Any], reason: str) -> None:
    publish(shop, [shop.candidate(kernel, **changes)])
    decision = decide_in(shop, ask(shop))
    assert decision.solution is None
    assert decision.evidence.source == "stock"
    assert reason in reasons(decision)["scale_rows_kernel"]


def test_a_pass_of_the_screen_is_no_verified_measurement(shop: Any, kernel: Any) -> None:
    publish(shop, [shop.candidate(kernel, tier="screen")])
    decision = decide_in(shop, ask(shop))
    assert decision.solution is None
    assert "tier screen: not a verified measurement" in reasons(decision)["scale_rows_kernel"]


@pytest.mark.parametrize(
    ("spec", "request_changes", "reason"),
    [
        ({"constraints": ["N >= 16"]}, {}, "its constraint N >= 16 excludes this shape"),
        ({"dtypes": {"T": ["float32"]}}, {}, "dtype T=bfloat16 is not among float32"),
        ({"language": "triton", "target_hardware": ["sm_100"]}, {}, "it is not declared for sm_90"),
        ({"role": "baseline", "provides": "library"}, {}, "role baseline (library): measured to compare with"),
        ({}, {"mode": "training"}, "mode training: it has no verified backward"),
        ({}, {"unavailable": {"python": "not installed: pip install it"}}, "not installed: pip install it"),
    ],
)
def test_a_solution_is_rejected_for(
    shop: Any, spec: dict[str, Any], request_changes: dict[str, Any], reason: str
) -> None:
    files = shop.add("scale_rows", "special", "def run(x, weight, eps, out):\n    pass\n", **spec)
    publish(shop, [shop.candidate(files)])
    decision = decide_in(shop, ask(shop, **request_changes))
    assert decision.solution is None
    assert reason in reasons(decision)["special"]


def test_a_layout_the_solution_does_not_read_is_a_reason(shop: Any, kernel: Any) -> None:
    publish(shop, [shop.candidate(kernel)], layouts={"x": "row_contiguous"})
    decision = decide_in(shop, ask(shop, layouts={"x": "row_contiguous"}))
    assert reasons(decision)["scale_rows_kernel"] == "it reads x as contiguous, not row_contiguous"


def test_another_layout_than_measured_is_not_served(shop: Any) -> None:
    files = shop.add("scale_rows", "any", "def run(x, weight, eps, out):\n    pass\n", layouts={"x": "strided"})
    publish(shop, [shop.candidate(files)])
    assert decide_in(shop, ask(shop)).solution is not None
    decision = decide_in(shop, ask(shop, layouts={"x": "strided"}))
    assert decision.solution is None
    told = "scale_rows was not measured on h200 with these layouts (x strided), but with others (all contiguous)"
    assert decision.evidence.reason == told


def test_a_solution_without_a_measurement_is_reported(shop: Any, kernel: Any, other_kernel: Any) -> None:
    publish(shop, [shop.candidate(kernel)])
    assert "not in the table" in reasons(decide_in(shop, ask(shop)))["scale_rows_other"]


def test_a_candidate_whose_solution_is_gone_is_reported(shop: Any, kernel: Any) -> None:
    publish(shop, [shop.candidate(kernel, solution="gone")])
    assert reasons(decide_in(shop, ask(shop)))["gone"] == "it is not in the catalog any more"


@pytest.mark.parametrize(
    ("request_changes", "entry_changes", "reason"),
    [
        ({"gpu": "b200"}, {}, "nothing is published for b200"),
        ({"dtypes": {"T": "float32"}}, {}, "not measured on h200 with T=float32 (measured: T=bfloat16)"),
        ({"definition": "add_into", "axes": {"M": 4}}, {}, "add_into was not measured on h200"),
        ({}, {"definition_digest": "0"}, "measured on h200 under another meaning than version 1.0.0"),
    ],
)
def test_without_an_entry_stock_runs_and_the_reason_says_why(
    shop: Any, kernel: Any, request_changes: dict[str, Any], entry_changes: dict[str, Any], reason: str
) -> None:
    publish(shop, [shop.candidate(kernel)], **entry_changes)
    decision = decide_in(shop, ask(shop, **request_changes))
    assert decision.solution is None
    assert reason in decision.evidence.reason
    assert all(why == decision.evidence.reason for why in reasons(decision).values())


def publish_range(shop: Any, kernel: Any, other_kernel: Any, **changes: Any) -> None:
    """The other kernel wins at M=1, the kernel at M=1024."""
    fast, slow = {"latency_us": 5.0, "ci_high_us": 5.01, **changes}, {"latency_us": 9.0, "ci_low_us": 8.9, **changes}
    entries = [
        shop.entry("scale_rows", {"M": m, "N": 8}, [shop.candidate(one, **fast), shop.candidate(two, **slow)])
        for m, one, two in ((1, other_kernel, kernel), (1024, kernel, other_kernel))
    ]
    shop.publish(entries, gpu="h200")


@pytest.mark.parametrize(
    ("m", "winner"), [(2, "scale_rows_other"), (31, "scale_rows_other"), (33, "scale_rows_kernel")]
)
def test_decide_between_points_uses_the_nearest_in_log_space(
    shop: Any, kernel: Any, other_kernel: Any, m: int, winner: str
) -> None:
    publish_range(shop, kernel, other_kernel)
    decision = decide_in(shop, ask(shop, axes={"M": m, "N": 8}))
    assert decision.solution is not None
    assert (decision.solution.name, decision.evidence.source) == (winner, "nearest")


@pytest.mark.parametrize("axes", [{"M": 8192, "N": 8}, {"M": 0, "N": 8}, {"M": 64, "N": 9}])
def test_outside_the_measured_range_stock_runs(shop: Any, kernel: Any, other_kernel: Any, axes: dict[str, int]) -> None:
    publish_range(shop, kernel, other_kernel)
    decision = decide_in(shop, ask(shop, axes=axes))
    assert decision.solution is None
    assert "outside the measured range" in decision.evidence.reason


def test_another_shape_than_the_measured_one_needs_fuzz_cases(shop: Any, kernel: Any, other_kernel: Any) -> None:
    publish_range(shop, kernel, other_kernel, envelope_cases=None)
    assert decide_in(shop, ask(shop, axes={"M": 1, "N": 8})).solution is not None
    decision = decide_in(shop, ask(shop, axes={"M": 2, "N": 8}))
    assert decision.solution is None
    assert "without fuzz cases" in reasons(decision)["scale_rows_kernel"]


def test_request_is_judged_at_its_axes_not_the_measured_ones(shop: Any) -> None:
    files = shop.add("scale_rows", "even", "def run(x, weight, eps, out):\n    pass\n", constraints=["M % 2 == 0"])
    shop.publish([shop.entry("scale_rows", {"M": m, "N": 8}, [shop.candidate(files)]) for m in (2, 64)], gpu="h200")
    assert decide_in(shop, ask(shop, axes={"M": 4, "N": 8})).solution is not None
    assert decide_in(shop, ask(shop, axes={"M": 5, "N": 8})).solution is None


def test_a_tie_inside_noise_goes_to_what_is_serving(shop: Any, kernel: Any, other_kernel: Any) -> None:
    publish(shop, [shop.candidate(kernel, 10.0), shop.candidate(other_kernel, 10.05)])
    picked = decide_in(shop, ask(shop)).solution
    assert picked is not None
    assert picked.name == "scale_rows_kernel"
    decision = decide_in(shop, ask(shop, serving="scale_rows_other"))
    assert decision.solution is not None
    assert decision.solution.name == "scale_rows_other"
    assert "inside noise of what is serving" in reasons(decision)["scale_rows_kernel"]


def test_tie_without_an_incumbent_goes_to_the_first_launched(shop: Any, kernel: Any, other_kernel: Any) -> None:
    slow_host = shop.candidate(kernel, 10.0, host_us=25.0)
    publish(shop, [slow_host, shop.candidate(other_kernel, 10.05, host_us=11.0)])
    decision = decide_in(shop, ask(shop))
    assert decision.solution is not None
    assert decision.solution.name == "scale_rows_other"
    assert "25.0 us of host time a call against 11.0 us" in reasons(decision)["scale_rows_kernel"]
    publish(
        shop, [slow_host, shop.candidate(other_kernel, 10.4, host_us=11.0)]
    )  # slower on the device by more than noise
    assert "slower: 10.40 us against 10.00 us" in reasons(decide_in(shop, ask(shop)))["scale_rows_other"]


def test_kernels_within_process_noise_are_a_tie(shop: Any, kernel: Any, other_kernel: Any) -> None:
    sure = {"ci_low_us": 5.2, "ci_high_us": 5.2}
    publish(
        shop, [shop.candidate(kernel, 5.0, ci_low_us=5.0, ci_high_us=5.0), shop.candidate(other_kernel, 5.2, **sure)]
    )
    for serving in ("scale_rows_kernel", "scale_rows_other"):
        picked = decide_in(shop, ask(shop, serving=serving)).solution
        assert picked is not None
        assert picked.name == serving


@pytest.mark.parametrize(("host_us", "served"), [(14.0, True), (16.0, False), (None, True)])
def test_kernel_launched_after_stock_is_done_is_refused(
    host_us: float | None, served: bool, shop: Any, kernel: Any, stock: Any
) -> None:
    publish(shop, [shop.candidate(kernel, 6.0, host_us=host_us), shop.candidate(stock, 9.0, host_us=20.0)])
    decision = decide_in(shop, ask(shop))
    assert (decision.solution is not None) == served
    if not served:
        assert "launch-bound: a call takes the host 16.0 us" in reasons(decision)["scale_rows_kernel"]


@pytest.mark.parametrize(("host_us", "served"), [(20.0, True), (40.0, False)])
def test_more_launches_at_one_size_are_no_noise(
    host_us: float, served: bool, shop: Any, kernel: Any, stock: Any
) -> None:
    def entry(columns: int, host_us: float) -> Any:
        both = [shop.candidate(kernel, 6.0, host_us=host_us), shop.candidate(stock, 25.0, host_us=10.0)]
        return shop.entry("scale_rows", {"M": 4, "N": columns}, both)

    shop.publish([entry(8, host_us), *(entry(columns, 14.0) for columns in (16, 32, 64))], gpu="h200")
    assert (decide_in(shop, ask(shop)).solution is not None) == served


def test_long_kernel_may_have_a_slow_launch(shop: Any, kernel: Any, stock: Any) -> None:
    publish(shop, [shop.candidate(kernel, 100.0, host_us=60.0), shop.candidate(stock, 150.0, host_us=10.0)])
    assert decide_in(shop, ask(shop)).solution is not None


@pytest.mark.parametrize(
    ("latency_us", "generated_us", "reason"),
    [
        (7.9, None, "a call of 7.90 us is left to the compiler, which fuses it with its neighbours"),
        (20.0, None, None),
        (20.0, 20.3, "not faster than compiled stock code with 20.30 us"),
        (20.0, 21.0, None),
    ],
)
def test_kernel_in_compiled_code_must_beat_the_compiler(
    latency_us: float, generated_us: float | None, reason: str | None, shop: Any, kernel: Any, other_kernel: Any
) -> None:
    generated = (
        [shop.candidate(other_kernel, generated_us, role="baseline", provides="compile")] if generated_us else []
    )
    publish(shop, [shop.candidate(kernel, latency_us), *generated])
    found = not_in_compiled_code(decide_in(shop, ask(shop)))
    assert (found is None) == (reason is None)
    if reason is not None:
        assert reason in str(found)


def test_what_stock_code_serves_stays_stock_in_compiled_code(shop: Any, kernel: Any) -> None:
    publish(shop, [shop.candidate(kernel, 20.0, speedup_ci_low=0.9)])
    assert "no verified solution is faster" in str(not_in_compiled_code(decide_in(shop, ask(shop))))


def test_a_few_microseconds_of_the_host_decide_no_tie(shop: Any, kernel: Any, other_kernel: Any) -> None:
    publish(shop, [shop.candidate(kernel, 10.0, host_us=15.0), shop.candidate(other_kernel, 10.05, host_us=11.0)])
    picked = decide_in(shop, ask(shop)).solution
    assert picked is not None
    assert picked.name == "scale_rows_kernel"


def test_what_is_serving_slower_than_noise_loses(shop: Any, kernel: Any, other_kernel: Any) -> None:
    publish(shop, [shop.candidate(kernel, 10.0), shop.candidate(other_kernel, 10.5)])
    decision = decide_in(shop, ask(shop, serving="scale_rows_other"))
    assert decision.solution is not None
    assert decision.solution.name == "scale_rows_kernel"


def test_continuous_scalar_prefers_the_equal_point(shop: Any, kernel: Any, other_kernel: Any) -> None:
    shop.publish(
        [
            shop.entry("scale_rows", {"M": 4, "N": 8}, [shop.candidate(files)], scalars={"eps": eps})
            for files, eps in ((kernel, 1e-5), (other_kernel, 1e-6))
        ],
        gpu="h200",
    )
    chosen = {eps: decide_in(shop, ask(shop, scalars={"eps": eps})).solution for eps in (1e-5, 1e-6, 5e-6)}
    assert {eps: files.name for eps, files in chosen.items() if files} == {
        1e-5: "scale_rows_kernel",
        1e-6: "scale_rows_other",
        5e-6: "scale_rows_kernel",
    }


def test_scalar_is_served_only_inside_its_verified_range(shop: Any, kernel: Any) -> None:
    candidate = shop.candidate(kernel)
    entry = shop.entry("scale_rows", {"M": 4, "N": 8}, [candidate], scalars={"eps": 1e-5})
    shop.publish([entry], gpu="h200")
    assert decide_in(shop, ask(shop, scalars={"eps": 1e-5})).solution is not None
    refused = decide_in(shop, ask(shop, scalars={"eps": 1e-4}))
    assert refused.solution is None
    assert "eps=0.0001 is outside the verified range 1e-05..1e-05" in refused.rejected[0].reason
    ranged = {**candidate, "scalar_ranges": {"eps": [1e-8, 1e-3]}}
    shop.publish([{**entry, "candidates": [ranged]}], gpu="h200")
    assert decide_in(shop, ask(shop, scalars={"eps": 1e-4})).solution is not None


def test_a_scalar_that_selects_code_must_match(shop: Any) -> None:
    files = shop.add("halves", "halves_kernel", "def run(x, swap, out):\n    pass\n")
    shop.publish([shop.entry("halves", {"M": 4, "I": 8}, [shop.candidate(files)], scalars={"swap": True})], gpu="h200")
    request = ask(shop, definition="halves", axes={"M": 4, "I": 8}, scalars={"swap": True})
    assert decide_in(shop, request).solution is not None
    decision = decide_in(shop, replace(request, call=replace(request.call, scalars={"swap": False})))
    assert decision.solution is None
    assert "code-selecting scalars" in decision.evidence.reason


@pytest.mark.parametrize(
    ("changes", "facts"),
    [
        ({"axes": {"M": 4}}, "'N'"),
        ({"axes": {"M": -4, "N": 8}}, "'M'.*-4"),
        ({"axes": {"M": 4, "N": 8, "K": 1}}, "no axis 'K'"),
        ({"dtypes": {}}, "dtype for 'T'"),
        ({"dtypes": {"T": "int8"}}, "'int8'"),
        ({"layouts": {"y": "strided"}}, "no tensor 'y'"),
        ({"layouts": {"x": "diagonal"}}, "'x'.*contiguous.*'diagonal'"),
        ({"scalars": {"epz": 1.0}}, "no scalar 'epz' .*'eps'"),
        ({"scalars": {"eps": "1e-5"}}, "scalar 'eps' .*'1e-5'"),
        ({"mode": "serving"}, "inference or training"),
        ({"definition": "halves", "axes": {"M": 1, "I": 1}}, "scalar 'swap'"),
    ],
)
def test_a_request_that_does_not_fit_is_refused(shop: Any, changes: dict[str, Any], facts: str) -> None:
    with pytest.raises(UsageError, match=facts):
        ask(shop, **changes)


def test_solution_omitting_an_output_serves_no_call(shop: Any) -> None:
    """Neither resolve, nor a bound call site, nor the functions of operators: a caller gets every output from stock code."""
    outputs = {"out": {"shape": ["M"], "dtype": "float32"}, "total": {"shape": [1], "dtype": "float32"}}
    shop.define(
        "with_total", axes={"M": {"type": "var"}}, inputs={"x": {"shape": ["M"], "dtype": "float32"}}, outputs=outputs,
        optional_outputs=["total"], reference="def run(x):\n    return 2 * x, x.sum().reshape(1)\n",
    )  # fmt: skip
    whole = "def run(x, out, total):\n    out.copy_(2 * x)\n    total.copy_(x.sum().reshape(1))\n"
    shop.add("with_total", "with_total_stock", whole, role="baseline", provides="stock")
    part = shop.add("with_total", "with_total_part", "def run(x, out):\n    out.copy_(3 * x)\n", omits=["total"])
    shop.publish([shop.entry("with_total", {"M": 4}, [shop.candidate(part, 1.0, host_us=1.0)])])
    request = make_request(shop.definition("with_total"), Call("with_total", {"M": 4}), gpu="cpu")
    decision = decide_in(shop, request)
    assert decision.solution is None
    assert "it omits total: it is verified without a time" in reasons(decision)["with_total_part"]
    x, out, total = torch.ones(4), torch.zeros(4), torch.zeros(1)
    resolved = resolve("with_total", like=(x,), catalog=shop.catalog)
    assert resolved.is_stock
    resolved(x, out, total)
    assert (out.tolist(), total.tolist()) == ([2.0] * 4, [4.0])
    site = call_site(shop.definition("with_total"), shop.catalog)
    assert site.attempt(x, out.zero_(), total.zero_()) is False
    assert out.eq(0).all()
