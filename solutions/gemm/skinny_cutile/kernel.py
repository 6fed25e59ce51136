"""Products of at most 16 rows with weights as nn.Linear stores them, cuTile: bound by reading the weights once.

Two kernels for each operator. For one row, a block multiplies a wide tile of a few rows of the weights by x and adds up along K
at the end. For more, tensor cores multiply tiles of the weights by all rows of x.
"""

import functools

import cuda.tile as ct
import torch

Int = ct.Constant[int]
ZERO = ct.PaddingMode.ZERO

ROWS = 16
"""Rows of x of the kernels on tensor cores; what is missing is zero."""


# -- one row: dot products --------------------------------------------------------------------------------------------


@ct.function
def _dots(x, w, m, block, TILE_N: Int, TILE_K: Int):
    """[TILE_N] sums of row m of x times rows of w, in float32."""
    acc = ct.zeros((TILE_N, TILE_K), dtype=ct.float32)
    for k in range(ct.cdiv(x.shape[1], TILE_K)):
        x_tile = ct.load(x, (m, k), (1, TILE_K), padding_mode=ZERO).astype(ct.float32)
        w_tile = ct.load(w, (block, k), (TILE_N, TILE_K), padding_mode=ZERO).astype(ct.float32)
        acc = acc + x_tile * w_tile
    return ct.sum(acc, axis=1)


@ct.function
def _put_row(out, m, block, sums, TILE_N: Int):
    """By element: a vector that is not full would be stored whole, past the last column."""
    n = block * TILE_N + ct.arange(TILE_N, dtype=ct.int32)
    ct.scatter(out, (m, n), sums.astype(out.dtype), mask=n < out.shape[1], check_bounds=False)


@ct.kernel
def _linear_row(x, w, out, TILE_N: Int, TILE_K: Int):
    block, m = ct.bid(0), ct.bid(1)
    _put_row(out, m, block, _dots(x, w, m, block, TILE_N, TILE_K), TILE_N)


@ct.kernel
def _qkv_row(x, wq, wk, wv, q, k, v, TILE_N: Int, TILE_K: Int):
    """Blocks of q first, then of k, then of v."""
    block, m = ct.bid(0), ct.bid(1)
    of_q = ct.cdiv(wq.shape[0], TILE_N)
    of_k = ct.cdiv(wk.shape[0], TILE_N)
    if block < of_q:
        _put_row(q, m, block, _dots(x, wq, m, block, TILE_N, TILE_K), TILE_N)
    elif block < of_q + of_k:
        _put_row(k, m, block - of_q, _dots(x, wk, m, block - of_q, TILE_N, TILE_K), TILE_N)
    else:
        _put_row(v, m, block - of_q - of_k, _dots(x, wv, m, block - of_q - of_k, TILE_N, TILE_K), TILE_N)


@ct.function
def _gated(gate, up, dtype):
    """Return silu(gate) * up with the roundings of a model: both products, silu, and the result."""
    gate = gate.astype(dtype).astype(ct.float32)
    silu = (gate / (1.0 + ct.exp(-gate))).astype(dtype).astype(ct.float32)
    return silu * up.astype(dtype).astype(ct.float32)


@ct.kernel
def _swiglu_row(x, wg, wu, out, TILE_N: Int, TILE_K: Int):
    block, m = ct.bid(0), ct.bid(1)
    gate = ct.zeros((TILE_N, TILE_K), dtype=ct.float32)
    up = ct.zeros((TILE_N, TILE_K), dtype=ct.float32)
    for k in range(ct.cdiv(x.shape[1], TILE_K)):
        x_tile = ct.load(x, (m, k), (1, TILE_K), padding_mode=ZERO).astype(ct.float32)
        g_tile = ct.load(wg, (block, k), (TILE_N, TILE_K), padding_mode=ZERO).astype(ct.float32)
        u_tile = ct.load(wu, (block, k), (TILE_N, TILE_K), padding_mode=ZERO).astype(ct.float32)
        gate = gate + x_tile * g_tile
        up = up + x_tile * u_tile
    _put_row(out, m, block, _gated(ct.sum(gate, axis=1), ct.sum(up, axis=1), out.dtype), TILE_N)


# -- up to 16 rows: tensor cores --------------------------------------------------------------------------------------


@ct.function
def _tile(x, w, block, TILE_N: Int, TILE_K: Int):
    """[TILE_N, ROWS] sums of rows of w times all rows of x; w's rows fill the tensor cores."""
    acc = ct.zeros((TILE_N, ROWS), dtype=ct.float32)
    for k in range(ct.cdiv(x.shape[1], TILE_K)):
        w_tile = ct.load(w, (block, k), (TILE_N, TILE_K), padding_mode=ZERO)
        x_tile = ct.load(x, (k, 0), (TILE_K, ROWS), order=(1, 0), padding_mode=ZERO)
        acc = ct.mma(w_tile, x_tile, acc)
    return acc


@ct.function
def _put_rows(out, block, sums, TILE_N: Int):
    """By element, as in _put_row."""
    n = block * TILE_N + ct.arange(TILE_N, dtype=ct.int32)[:, None]
    m = ct.arange(ROWS, dtype=ct.int32)[None, :]
    inside = (n < out.shape[1]) & (m < out.shape[0])
    ct.scatter(out, (m, n), sums.astype(out.dtype), mask=inside, check_bounds=False)


@ct.kernel
def _linear_rows(x, w, out, TILE_N: Int, TILE_K: Int):
    _put_rows(out, ct.bid(0), _tile(x, w, ct.bid(0), TILE_N, TILE_K), TILE_N)


@ct.kernel
def _qkv_rows(x, wq, wk, wv, q, k, v, TILE_N: Int, TILE_K: Int):
    """Blocks of q first, then of k, then of v."""
    block = ct.bid(0)
    of_q = ct.cdiv(wq.shape[0], TILE_N)
    of_k = ct.cdiv(wk.shape[0], TILE_N)
    if block < of_q:
        _put_rows(q, block, _tile(x, wq, block, TILE_N, TILE_K), TILE_N)
    elif block < of_q + of_k:
        _put_rows(k, block - of_q, _tile(x, wk, block - of_q, TILE_N, TILE_K), TILE_N)
    else:
        _put_rows(v, block - of_q - of_k, _tile(x, wv, block - of_q - of_k, TILE_N, TILE_K), TILE_N)


@ct.kernel
def _swiglu_rows(x, wg, wu, out, TILE_N: Int, TILE_K: Int):
    block = ct.bid(0)
    gate = ct.zeros((TILE_N, ROWS), dtype=ct.float32)
    up = ct.zeros((TILE_N, ROWS), dtype=ct.float32)
    for k in range(ct.cdiv(x.shape[1], TILE_K)):
        x_tile = ct.load(x, (k, 0), (TILE_K, ROWS), order=(1, 0), padding_mode=ZERO)
        g_tile = ct.load(wg, (block, k), (TILE_N, TILE_K), padding_mode=ZERO)
        u_tile = ct.load(wu, (block, k), (TILE_N, TILE_K), padding_mode=ZERO)
        gate = ct.mma(g_tile, x_tile, gate)
        up = ct.mma(u_tile, x_tile, up)
    _put_rows(out, block, _gated(gate, up, out.dtype), TILE_N)


# -- which, and how large ---------------------------------------------------------------------------------------------


@functools.lru_cache
def _hinted(kernel, warps, occupancy):
    return kernel.replace_hints(num_worker_warps=warps, occupancy=occupancy)


def _launch(one, several, products, x, weights, outs, tile, wide, occupancy):
    """Launch one of two kernels: the first for one row, and row by row for float32, which tensor cores would round."""
    M = x.shape[0]
    if M == 1 or x.dtype == torch.float32:
        kernel, tiles, rows = _hinted(one, 4, occupancy or 8), (4 // products, wide), M
    else:
        most = max(weight.shape[0] for weight in weights)
        tiles = (tile or (64 if most * products >= 64 * 132 and products == 1 else 32), 256 if products == 1 else 128)
        kernel, rows = _hinted(several, 4, occupancy or 2), 1
    blocks = sum(-(-out.shape[1] // tiles[0]) for out in outs)
    ct.launch(torch.cuda.current_stream(), (blocks, rows, 1), kernel, (x, *weights, *outs, *tiles))


def run_linear(a, b, out, *, TILE=None, WIDE=1024, OCCUPANCY=None):
    """out = T(a @ b.T), sums in float32.

    Shapes: a [M, K], b [N, K], out [M, N]; unit last stride, any row stride; M <= 16; T bfloat16, float16 or float32.
    TILE: rows of b a block for more than one row (None: by shape). WIDE: elements of K at a time for one row.
    """
    if out.numel():
        _launch(_linear_row, _linear_rows, 1, a, (b,), (out,), TILE, WIDE, OCCUPANCY)


def run_swiglu(x, wg, wu, out, *, TILE=None, WIDE=1024, OCCUPANCY=None):
    """out = T(T(silu(T(x @ wg.T))) * T(x @ wu.T)), sums in float32.

    Shapes: x [M, K], wg and wu [I, K], out [M, I]; unit last stride, any row stride; M <= 16.
    """
    if out.numel():
        _launch(_swiglu_row, _swiglu_rows, 2, x, (wg, wu), (out,), TILE, WIDE, OCCUPANCY)


def run_qkv(x, wq, wk, wv, q, k, v, *, TILE=None, WIDE=1024, OCCUPANCY=None):
    """q, k, v = T(x @ wq.T), T(x @ wk.T), T(x @ wv.T) in one launch, sums in float32.

    Shapes: x [M, K], wq [NQ, K], wk [NK, K], wv [NV, K], q [M, NQ], k [M, NK], v [M, NV]; unit last stride; M <= 16.
    """
    if x.shape[0]:
        _launch(_qkv_row, _qkv_rows, 1, x, (wq, wk, wv), (q, k, v), TILE, WIDE, OCCUPANCY)
