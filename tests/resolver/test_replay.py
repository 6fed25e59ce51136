"""Calls that will be replayed: a kernel is chosen by its device time, and eager calls keep their answers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from raising import raises

from tilegym_db.errors import UsageError
from tilegym_db.resolver.dispatch import Dispatcher
from tilegym_db.resolver.hot_path import is_replayed, replayed, threads
from tilegym_db.resolver.resolve import call_site, resolve

OTHER = "def run(x, weight, eps, out):\n    out.fill_(7)\n"


def args(m: int = 4) -> list[Any]:
    return [torch.ones(m, 8), torch.ones(8), 0.5, torch.zeros(m, 8)]


def plain_stock(x: Any, weight: Any, eps: Any, out: Any) -> None:
    out.fill_(-1)


@pytest.fixture
def publish(shop: Any, stock: Any) -> Callable[..., None]:
    def publish(*kernels: dict[str, Any]) -> None:
        own = shop.candidate(stock, 9.0, host_us=20.0, speedup=1.0, speedup_ci_low=1.0)
        shop.publish(
            [shop.entry("scale_rows", {"M": m, "N": 8}, [*kernels, own], dtypes={"T": "float32"}) for m in (4, 64)]
        )

    return publish


@pytest.fixture
def site(shop: Any, kernel: Any, publish: Callable[..., None]) -> Dispatcher:
    """A call site whose kernel takes the host longer than stock code takes at all."""
    publish(shop.candidate(kernel, 6.0, host_us=80.0))
    return call_site(shop.definition("scale_rows"), shop.catalog, stock=plain_stock)


def value(site: Any, m: int = 4) -> float:
    call = args(m)
    site(*call)
    return float(call[3][0, 0])


def test_both_answers_of_a_call_stay_what_they_are(site: Dispatcher) -> None:
    found = []
    for _ in range(2):
        found.append(value(site))
        with replayed():
            found.append(value(site))
    assert found == [-1.0, 1.5, -1.0, 1.5]
    report = site.report()
    assert (report.calls, report.misses, report.hits, report.kernel_calls) == (4, 2, 2, 2)
    assert [key.axes["M"] for key in report.keys] == [4, 4]
    assert "calls are replayed, so only the device time counts" in report.keys[1].reason
    assert "replayed" not in report.keys[0].reason


def test_tie_goes_to_the_faster_kernel_of_the_device(shop: Any, kernel: Any, publish: Callable[..., None]) -> None:
    other = shop.add("scale_rows", "scale_rows_other", OTHER)
    publish(shop.candidate(kernel, 6.0, host_us=25.0), shop.candidate(other, 6.05, host_us=11.0))
    site = call_site(shop.definition("scale_rows"), shop.catalog, stock=plain_stock)
    with replayed():
        assert value(site) == 1.5
    assert value(site) == 7.0  # what serves in replays does not win a tie in eager calls
    with replayed():
        assert value(site, 5) == 1.5
    assert value(site, 5) == 7.0


def test_a_thread_sees_only_its_own_answers(site: Dispatcher) -> None:
    wrong: list[float] = []

    def work(is_capturing: bool) -> None:
        for index in range(200):
            if is_capturing:
                with replayed():
                    found = value(site, 4 + index % 8)
            else:
                found = value(site, 4 + index % 8)
            if found != (1.5 if is_capturing else -1.0):
                wrong.append(found)

    workers = [threading.Thread(target=work, args=(number % 2 == 0,)) for number in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong
    assert (site.report().calls, site.report().kernel_calls) == (800, 400)
    assert not threads


def test_an_exception_ends_the_answers_for_replays() -> None:
    def interrupted() -> None:
        with replayed(), replayed():
            assert is_replayed()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not is_replayed()


def test_a_first_call_inside_a_capture_runs_stock(site: Dispatcher) -> None:
    capturing = [False]
    frozen = Dispatcher(site.definition, site.choose, stock=plain_stock, is_capturing=lambda: capturing[0])
    assert value(frozen) == -1.0
    capturing[0] = True
    with replayed():
        assert value(frozen) == -1.0  # only the eager answer is known
    capturing[0] = False
    with replayed():
        assert value(frozen) == 1.5
        capturing[0] = True
        assert value(frozen) == 1.5
    assert frozen.report().capture_misses == 1


def test_a_refused_kernel_serves_no_replay(site: Dispatcher) -> None:
    site.refuse("scale_rows_kernel", "refused here")
    with replayed():
        assert value(site) == -1.0
    assert site.report().keys[0].reason == "refused here"


def test_what_fails_in_eager_code_is_not_tried_in_replays(shop: Any, publish: Callable[..., None]) -> None:
    source = (
        "def run(x, weight, eps, out):\n    if x.shape[0] == 5:\n        raise ValueError('boom')\n    out.fill_(2)\n"
    )
    publish(shop.candidate(shop.add("scale_rows", "scale_rows_kernel", source), 6.0, host_us=10.0))
    site = call_site(shop.definition("scale_rows"), shop.catalog, stock=plain_stock)
    with pytest.warns(RuntimeWarning, match="boom"):
        assert value(site, 5) == -1.0
    with replayed():
        assert value(site, 5) == -1.0
        assert value(site, 4) == 2.0
    assert len(site.report().failures) == 1


def test_growing_axis_has_spans_for_replays(shop: Any) -> None:
    shop.define(
        "summed",
        axes={"L": {"type": "var"}, "D": {"type": "var"}},
        inputs={"q": {"shape": ["D"], "dtype": "float32"}, "k": {"shape": ["L", "D"], "dtype": "float32"}},
        outputs={"out": {"shape": ["D"], "dtype": "float32"}},
        reference="def run(q, k):\n    return q * k.sum(0)\n",
    )
    kernel = shop.add("summed", "summed_kernel", "def run(q, k, out):\n    out.copy_(q * k.sum(0))\n")
    stock = shop.add("summed", "summed_stock", "def run(q, k, out):\n    pass\n", role="baseline", provides="stock")
    measured = [shop.candidate(kernel, 6.0, host_us=80.0), shop.candidate(stock, 9.0, host_us=20.0)]
    shop.publish([shop.entry("summed", {"L": length, "D": 4}, measured) for length in (8, 64)])
    site = call_site(shop.definition("summed"), shop.catalog)
    serve = site.serving(lambda q, k: torch.empty_like(q), growing="L")
    for length in (24, 25, 30):
        assert serve(torch.ones(4), torch.ones(length, 4)) is None
        with replayed():
            assert float(serve(torch.ones(4), torch.ones(length, 4))[0]) == length
    assert (site.report().misses, site.report().kernel_calls, site.report().calls) == (2, 3, 6)


def test_resolve_for_replays_serves_calls_that_a_graph_captures(
    shop: Any, kernel: Any, publish: Callable[..., None]
) -> None:
    publish(shop.candidate(kernel, 6.0, host_us=80.0))
    picked = {way: resolve("scale_rows", like=args(), launch=way, catalog=shop.catalog) for way in ("call", "replay")}  # type: ignore[arg-type]
    assert {way: found.is_stock for way, found in picked.items()} == {"call": True, "replay": False}
    call = args()
    picked["replay"](*call)
    assert float(call[3][0, 0]) == 1.5


def test_an_unknown_way_of_launching_is_named(shop: Any, kernel: Any) -> None:
    with raises(UsageError, "launch_unknown", "launch must be call or replay, not 'graph'"):
        resolve("scale_rows", like=args(), launch="graph", catalog=shop.catalog)  # type: ignore[arg-type]
