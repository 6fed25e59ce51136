"""A planted mistake: what one thread puts into shared memory another takes out, and no barrier stands between."""

import functools

import tilelang
import tilelang.language as T

THREADS = 256


@functools.cache
@tilelang.jit(pass_configs={"tl.disable_thread_storage_sync": True})
def racing_gate(columns, dtype):
    M = T.dynamic("M")

    @T.prim_func
    def racing_gate_rows(x: T.Tensor((M, 2 * columns), dtype), out: T.Tensor((M, columns), dtype)):
        with T.Kernel(M, T.ceildiv(columns, THREADS), threads=THREADS) as (row, block):
            staged = T.alloc_shared((THREADS,), "float32")
            thread = T.get_thread_binding(0)
            own, other = block * THREADS + thread, block * THREADS + THREADS - 1 - thread
            if own < columns:
                staged[thread] = T.cast(x[row, own], "float32")
            if other < columns:
                gate = staged[THREADS - 1 - thread]
                out[row, other] = T.cast(
                    gate / (1.0 + T.exp(-gate)) * T.cast(x[row, columns + other], "float32"), dtype
                )

    return racing_gate_rows


def run(x, out):
    if out.numel():
        racing_gate(out.shape[1], out.dtype)(x, out)
