"""A call site: what is remembered, what is checked, and what happens when a kernel fails."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from raising import raises

from tilegym_db.backends.toolchains import declared_libraries
from tilegym_db.errors import NoSolutionError, SolutionError
from tilegym_db.resolver.dispatch import Dispatcher
from tilegym_db.resolver.resolve import call_site


def args(m: int = 4, n: int = 8, **changes: Any) -> list[Any]:
    options = {"dtype": torch.float32, **changes}
    return [torch.ones(m, n, **options), torch.ones(n, **options), 0.5, torch.zeros(m, n, **options)]


def plain_stock(x: Any, weight: Any, eps: Any, out: Any) -> None:
    """Callable that marks its output, so that a test sees which one ran."""
    out.fill_(-1)


@pytest.fixture
def site(shop: Any, publish_kernel: Callable[..., None]) -> Dispatcher:
    """A call site of ``scale_rows`` whose kernel is published for M in 4..64, N = 8, float32."""
    publish_kernel(config={"BIAS": 1})
    return call_site(shop.definition("scale_rows"), shop.catalog, stock=plain_stock)


def kernel_ran(site: Dispatcher, call: list[Any]) -> bool:
    """Call the site; True where the kernel (1 * 1 + 0.5 + 1) wrote the output, False where stock (-1) did."""
    site(*call)
    value = call[3].flatten()[0].item() if call[3].numel() else -1
    assert value in (2.5, -1)
    return value == 2.5


def test_a_repeated_call_is_a_hit(site: Dispatcher) -> None:
    for _ in range(3):
        assert kernel_ran(site, args())
    report = site.report()
    assert (report.calls, report.hits, report.misses, report.kernel_calls) == (3, 2, 1, 3)
    (key,) = report.keys
    assert (key.axes, key.solution) == ({"M": 4, "N": 8}, "scale_rows_kernel[BIAS=1]")


def test_each_shape_is_a_key_of_its_own(site: Dispatcher) -> None:
    assert kernel_ran(site, args(4))
    assert kernel_ran(site, args(5))
    assert not kernel_ran(site, args(65))
    assert [key.solution is None for key in site.report().keys] == [False, False, True]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda a: [a[0].double(), a[1].double(), *a[2:]], "float64"),
        (lambda a: [a[0].bfloat16(), a[1].bfloat16(), a[2], a[3].bfloat16()], "not measured on cpu with T=bfloat16"),
        (lambda a: [a[0], a[1].bfloat16(), *a[2:]], "'weight' of scale_rows must be float32"),
        (lambda a: [a[0], torch.ones(7), *a[2:]], "dimension 0 of 'weight'"),
        (lambda a: [a[0][None], *a[1:]], "'x' of scale_rows has 2 dimensions"),
        (lambda a: [torch.ones(8, 4).T, *a[1:]], "layouts"),
        (lambda a: [a[0], a[1], a[2], torch.zeros(8, 4).T], "layouts"),
        (lambda a: [a[0], a[1], torch.tensor(0.5), a[3]], "'eps' of scale_rows is a Python number"),
        (lambda a: [a[0].as_subclass(Subclass), *a[1:]], "a Subclass, not a plain tensor"),
        (lambda a: [a[0].to("meta"), *a[1:]], "the tensors are on cpu and meta"),
    ],
)
def test_after_a_hit_a_call_that_differs_runs_stock(site: Dispatcher, change: Any, reason: str) -> None:
    assert kernel_ran(site, args())
    assert not kernel_ran(site, change(args()))
    assert reason in site.report().keys[-1].reason
    assert kernel_ran(site, args())


class Subclass(torch.Tensor):
    pass


def test_a_parameter_is_a_plain_tensor(site: Dispatcher) -> None:
    call = args()
    call[1] = torch.nn.Parameter(call[1], requires_grad=False)
    assert kernel_ran(site, call)


def test_a_wrong_number_of_arguments_names_the_operator(site: Dispatcher) -> None:
    with pytest.raises(TypeError, match=r"scale_rows\(\) missing 1 required positional argument: 'out'"):
        site(*args()[:3])


def test_attempt_leaves_the_call_to_the_caller(site: Dispatcher) -> None:
    served, left = args(), args(65)
    assert site.attempt(*served) is True
    assert site.attempt(*left) is False
    assert left[3].eq(0).all()


def test_without_kernel_and_stock_the_call_is_refused(shop: Any) -> None:
    with raises(NoSolutionError, "no_kernel", "scale_rows"):
        call_site(shop.definition("scale_rows"), shop.catalog)(*args())


def test_training_is_left_to_stock(shop: Any, publish_kernel: Callable[..., None]) -> None:
    publish_kernel(config={"BIAS": 1})
    site = call_site(shop.definition("scale_rows"), shop.catalog, mode="training", stock=plain_stock)
    assert not kernel_ran(site, args())


# -- failures ---------------------------------------------------------------------------------------------------------

FAILING = (
    "def run(x, weight, eps, out):\n    if x.shape[0] == 5:\n        raise ValueError('boom')\n    out.fill_(2.5)\n"
)


@pytest.fixture
def failing_site(shop: Any) -> Dispatcher:
    files = shop.add("scale_rows", "fails_at_five", FAILING)
    entries = [
        shop.entry("scale_rows", {"M": m, "N": 8}, [shop.candidate(files)], dtypes={"T": "float32"}) for m in (4, 64)
    ]
    shop.publish(entries)
    return call_site(shop.definition("scale_rows"), shop.catalog, stock=plain_stock)


def test_failing_kernel_is_quarantined_for_its_key(failing_site: Dispatcher) -> None:
    with pytest.warns(RuntimeWarning, match="fails_at_five.*scale_rows.*M=5,N=8.*ValueError: boom"):
        assert not kernel_ran(failing_site, args(5))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not kernel_ran(failing_site, args(5))
    assert kernel_ran(failing_site, args(4))
    report = failing_site.report()
    assert (report.kernel_calls, report.stock_calls) == (1, 2)
    (failure,) = report.failures
    assert "raise ValueError('boom')" in failure.traceback


def test_an_error_of_the_stock_code_is_the_callers(shop: Any) -> None:
    def broken(*args: Any) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        call_site(shop.definition("scale_rows"), shop.catalog, stock=broken)(*args())


def test_a_source_edited_after_its_measurement_is_quarantined(shop: Any) -> None:
    source = "# edited before its first call\ndef run(x, weight, eps, out):\n    out.fill_(2.5)\n"
    files = shop.add("scale_rows", "edited", source)
    shop.publish([shop.entry("scale_rows", {"M": 4, "N": 8}, [shop.candidate(files)], dtypes={"T": "float32"})])
    site = call_site(shop.definition("scale_rows"), shop.catalog, stock=plain_stock)
    (files.folder / "kernel.py").write_text(source.replace("2.5", "3.5"))
    with pytest.warns(RuntimeWarning, match="edited"):
        assert not kernel_ran(site, args())


@pytest.mark.parametrize("change", ["same", "another build", "only its version"])
def test_kernel_serves_only_with_its_verified_library(shop: Any, change: str) -> None:
    source = f"# {change}\ndef run(x, weight, eps, out):\n    out.fill_(2.5)\n"
    files = shop.add("scale_rows", "with_library", source, dependencies=["torch>=2.6", "pydantic>=2"])
    state = declared_libraries(("pydantic>=2",))["pydantic"]
    verified = {"same": state, "another build": state[:-1] + "?", "only its version": state.partition(" ")[0]}[change]
    candidate = shop.candidate(files, libs={"torch": "2.6.0", "pydantic": verified})
    shop.publish([shop.entry("scale_rows", {"M": 4, "N": 8}, [candidate], dtypes={"T": "float32"})])
    site = call_site(shop.definition("scale_rows"), shop.catalog, stock=plain_stock)
    if change == "same":
        assert kernel_ran(site, args())
    else:
        with pytest.warns(RuntimeWarning, match="with_library.*pydantic"):
            assert not kernel_ran(site, args())


IN_PLACE_FAILING = """\
CALLS = []
def run(x, total, out):
    CALLS.append(1)
    total.add_(x)
    if len(CALLS) == FAILS_AT:
        raise ValueError("boom")
    out.copy_(2 * total)
"""


@pytest.fixture
def in_place_site(shop: Any) -> Callable[[int], Dispatcher]:
    """Makes a call site of ``add_into`` whose kernel fails at its n-th call, after it wrote its input."""

    def make(fails_at: int) -> Dispatcher:
        files = shop.add("add_into", "add_into_kernel", IN_PLACE_FAILING.replace("FAILS_AT", str(fails_at)))
        shop.publish([shop.entry("add_into", {"M": 3}, [shop.candidate(files)])])

        def stock(x: Any, total: Any, out: Any) -> None:
            out.copy_(2 * total.add_(x))

        return call_site(shop.definition("add_into"), shop.catalog, stock=stock)

    return make


def test_input_overwritten_by_a_failed_first_launch_is_restored(
    in_place_site: Callable[[int], Dispatcher],
) -> None:
    total, out = torch.ones(3), torch.zeros(3)
    with pytest.warns(RuntimeWarning, match="boom"):
        in_place_site(1)(torch.ones(3), total, out)
    assert (total.tolist(), out.tolist()) == ([2.0] * 3, [4.0] * 3)


def test_later_failure_after_an_in_place_write_raises(
    in_place_site: Callable[[int], Dispatcher],
) -> None:
    site = in_place_site(2)
    site(torch.ones(3), torch.ones(3), torch.zeros(3))
    with pytest.warns(RuntimeWarning, match="boom"), raises(SolutionError, "in_place_failed", "total"):
        site(torch.ones(3), torch.ones(3), torch.zeros(3))
    total = torch.ones(3)
    site(torch.ones(3), total, torch.zeros(3))
    assert total.tolist() == [2.0] * 3


# -- capture, memory, threads -----------------------------------------------------------------------------------------


def captured_site(site: Dispatcher, capturing: list[bool]) -> Dispatcher:
    return Dispatcher(site.definition, site.choose, stock=plain_stock, is_capturing=lambda: capturing[0])


def test_during_a_capture_only_known_keys_run_kernels(site: Dispatcher) -> None:
    capturing = [False]
    frozen = captured_site(site, capturing)
    assert kernel_ran(frozen, args(4))
    capturing[0] = True
    assert kernel_ran(frozen, args(4))
    assert not kernel_ran(frozen, args(5))
    capturing[0] = False
    assert kernel_ran(frozen, args(5))
    report = frozen.report()
    assert (report.calls, report.capture_misses, report.kernel_calls, report.stock_calls) == (4, 1, 3, 1)


def test_the_oldest_key_is_forgotten_but_its_calls_are_counted(site: Dispatcher) -> None:
    small = Dispatcher(site.definition, site.choose, stock=plain_stock, max_keys=2)
    for m in (4, 5, 6):
        assert kernel_ran(small, args(m))
    report = small.report()
    assert [key.axes["M"] for key in report.keys] == [5, 6]
    assert (report.calls, report.kernel_calls, report.misses) == (3, 3, 3)


def test_threads_share_a_call_site(site: Dispatcher) -> None:
    wrong: list[int] = []

    def work(offset: int) -> None:
        for index in range(100):
            if not kernel_ran(site, args(4 + (index + offset) % 8)):
                wrong.append(index)

    threads = [threading.Thread(target=work, args=(offset,)) for offset in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(site.report().keys) == 8


@pytest.mark.gpu
def test_a_captured_graph_replays_a_kernel_resolved_before(shop: Any, kernel: Any) -> None:
    from tilegym_db.resolver.device import device_gpu

    gpu, _ = device_gpu(torch.device("cuda", 0))
    candidates = [shop.candidate(kernel, config={"BIAS": 1})]
    shop.publish([shop.entry("scale_rows", {"M": 4, "N": 8}, candidates, dtypes={"T": "float32"})], gpu=gpu)
    site = call_site(shop.definition("scale_rows"), shop.catalog, stock=plain_stock)
    call, unseen = args(device="cuda"), args(5, device="cuda")
    assert kernel_ran(site, call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        site(*call)
        site(*unseen)
    call[3].zero_()
    graph.replay()
    assert call[3].eq(2.5).all()
    assert unseen[3].eq(-1).all()
    assert site.report().capture_misses == 1


def test_a_launch_changes_the_current_gpu_only_if_it_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    from tilegym_db.resolver.device import on_device

    current, changed = [1], []

    @contextlib.contextmanager
    def device(where: torch.device) -> Iterator[None]:
        changed.append(where.index)
        before, current[0] = current[0], where.index
        yield
        current[0] = before

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "device", device)
    launched: list[tuple[int, int]] = []
    launches = [
        on_device(lambda gpu=gpu: launched.append((gpu, current[0])), torch.device("cuda", gpu)) for gpu in (0, 1)
    ]
    for launch in (*launches, launches[1]):
        launch()
    assert launched == [(0, 0), (1, 1), (1, 1)]
    assert changed == [0]
    current[0] = 0  # the user changes it between two calls
    launches[1]()
    assert (launched[-1], changed) == ((1, 1), [0, 1])
