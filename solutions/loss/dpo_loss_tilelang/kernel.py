"""The loss of direct preference optimisation and its gradients, TileLang: one kernel each, a pair a thread."""

import functools

import tilelang
import tilelang.language as T

THREADS = 128


@functools.cache
@tilelang.jit
def losses_kernel():
    """Compile for any number of pairs."""
    N = T.dynamic("N")

    @T.prim_func
    def losses(
        chosen: T.Tensor((N,), "float32"),
        rejected: T.Tensor((N,), "float32"),
        ref_chosen: T.Tensor((N,), "float32"),
        ref_rejected: T.Tensor((N,), "float32"),
        loss: T.Tensor((N,), "float32"),
        margin: T.Tensor((N,), "float32"),
        beta: T.float32,
    ):
        with T.Kernel(T.ceildiv(N, THREADS), threads=THREADS) as block:
            pair = block * THREADS + T.get_thread_binding(0)
            found = T.alloc_var("float32", init=0.0)
            small = T.alloc_var("float32", init=0.0)
            total = T.alloc_var("float32", init=0.0)
            if pair < N:
                found = beta * ((chosen[pair] - ref_chosen[pair]) - (rejected[pair] - ref_rejected[pair]))
                small = T.exp(-T.abs(found))
                total = 1.0 + small
                # log(1 + small), with the rounding of the sum put back
                loss[pair] = T.max(-found, 0.0) + (T.log(total) + (small - (total - 1.0)) / total)
                margin[pair] = found

    return losses


@functools.cache
@tilelang.jit
def gradients_kernel():
    """Compile for any number of pairs."""
    N = T.dynamic("N")

    @T.prim_func
    def gradients(
        margin: T.Tensor((N,), "float32"),
        grad_loss: T.Tensor((N,), "float32"),
        grad_chosen: T.Tensor((N,), "float32"),
        grad_rejected: T.Tensor((N,), "float32"),
        beta: T.float32,
    ):
        with T.Kernel(T.ceildiv(N, THREADS), threads=THREADS) as block:
            pair = block * THREADS + T.get_thread_binding(0)
            small = T.alloc_var("float32", init=0.0)
            pull = T.alloc_var("float32", init=0.0)
            if pair < N:
                small = T.exp(-T.abs(margin[pair]))
                pull = T.if_then_else(margin[pair] > 0.0, small, 1.0) / (1.0 + small) * (beta * grad_loss[pair])
                grad_chosen[pair] = -pull
                grad_rejected[pair] = pull

    return gradients


def run(chosen, rejected, ref_chosen, ref_rejected, beta, loss, margin):
    """Write loss = -log(sigmoid(margin)) and margin = beta ((chosen - ref_chosen) - (rejected - ref_rejected)), [N] float32."""
    if chosen.shape[0] == 0:
        return
    losses_kernel()(chosen, rejected, ref_chosen, ref_rejected, loss, margin, beta)


def run_backward(margin, grad_loss, beta, grad_chosen, grad_rejected):
    """Write grad_rejected = beta sigmoid(-margin) grad_loss and its negative, grad_chosen, all [N] float32."""
    if margin.shape[0] == 0:
        return
    gradients_kernel()(margin, grad_loss, grad_chosen, grad_rejected, beta)
