"""The head of a language model, its loss and both gradients in chunks of tokens, Triton: four kernels a chunk."""

import functools

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

GROUP_M = 8  # rows of tiles that share columns of the other factor in L2


@functools.cache
def _sm_count(device: torch.device) -> int:
    """Return the multiprocessors of the device; on a machine without a GPU, which only compiles, those of an H200."""
    return torch.cuda.get_device_properties(device).multi_processor_count if torch.cuda.is_available() else 132


@triton.jit
def _halves(acc):
    """Return the left and the right half of the columns."""
    M: tl.constexpr = acc.shape[0]
    N: tl.constexpr = acc.shape[1]
    return tl.split(tl.permute(tl.reshape(acc, (M, 2, N // 2)), (0, 2, 1)))


@triton.jit
def _with_partial(partial_ptr, acc, m_start, n_start, M, N, ADDS: tl.constexpr, KEEPS: tl.constexpr):
    """Return acc plus the sums of earlier chunks; with KEEPS, store it as the sums for the next chunk."""
    m = m_start + tl.arange(0, acc.shape[0])[:, None]
    n = n_start + tl.arange(0, acc.shape[1])[None, :]
    partial_ptrs = partial_ptr + m.to(tl.int64) * N + n
    inside = (m < M) & (n < N)
    if ADDS:
        acc += tl.load(partial_ptrs, mask=inside, other=0.0)
    if KEEPS:
        tl.store(partial_ptrs, acc, mask=inside)
    return acc


@triton.jit(do_not_specialize=["M", "N", "K"])
def _product(
    a_desc,
    b_desc,
    out_desc,
    partial_ptr,
    M,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    A_ROWS: tl.constexpr,
    B_ROWS: tl.constexpr,
    ADDS: tl.constexpr,
    KEEPS: tl.constexpr,
):
    """out [M, N] = a @ b with the tensor copy engine, which fills with zeros beyond the edges and clips what it stores.

    A_ROWS: a is [M, K] in memory, else [K, M]. B_ROWS: b is [N, K] in memory, else [K, N]. A program works off tiles, so
    the loads of the next tile run while a tile is stored.
    """
    m_tiles = tl.cdiv(M, BLOCK_M)
    n_tiles = tl.cdiv(N, BLOCK_N)
    HALF: tl.constexpr = BLOCK_N // 2
    for tile in tl.range(tl.program_id(0), m_tiles * n_tiles, tl.num_programs(0), flatten=True):
        group_size = GROUP * n_tiles
        first_m = tile // group_size * GROUP
        rows = tl.minimum(m_tiles - first_m, GROUP)
        m_start = (first_m + tile % group_size % rows) * BLOCK_M
        n_start = tile % group_size // rows * BLOCK_N
        acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
        for k_tile in range(0, tl.cdiv(K, BLOCK_K)):
            k_start = k_tile * BLOCK_K
            a = a_desc.load([m_start, k_start]) if A_ROWS else a_desc.load([k_start, m_start]).T
            b = b_desc.load([n_start, k_start]).T if B_ROWS else b_desc.load([k_start, n_start])
            acc = tl.dot(a, b, acc)
        left, right = _halves(acc)
        # Parts of a tile: less shared memory for the result leaves room for another stage of loads.
        if ADDS or KEEPS:
            for half in tl.static_range(2):
                first, second = _halves(left if half == 0 else right)
                n_first = n_start + half * HALF
                first = _with_partial(partial_ptr, first, m_start, n_first, M, N, ADDS, KEEPS)
                second = _with_partial(partial_ptr, second, m_start, n_first + HALF // 2, M, N, ADDS, KEEPS)
                if not KEEPS:
                    out_desc.store([m_start, n_first], first.to(out_desc.dtype))
                    out_desc.store([m_start, n_first + HALF // 2], second.to(out_desc.dtype))
        else:
            out_desc.store([m_start, n_start], left.to(out_desc.dtype))
            out_desc.store([m_start, n_start + HALF], right.to(out_desc.dtype))


@triton.jit(do_not_specialize=["M", "N", "K"])
def _product_pointers(
    a_ptr,
    b_ptr,
    out_ptr,
    partial_ptr,
    a_stride_m,
    a_stride_k,
    b_stride_k,
    b_stride_n,
    out_stride,
    M,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ADDS: tl.constexpr,
    KEEPS: tl.constexpr,
):
    """out [M, N] = a @ b for any strides and addresses, which the tensor copy engine does not take."""
    n_tiles = tl.cdiv(N, BLOCK_N)
    m_start = tl.program_id(0) // n_tiles * BLOCK_M
    n_start = tl.program_id(0) % n_tiles * BLOCK_N
    m = (m_start + tl.arange(0, BLOCK_M)).to(tl.int64)
    n = (n_start + tl.arange(0, BLOCK_N)).to(tl.int64)
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for k_start in range(0, K, BLOCK_K):
        k = (k_start + tl.arange(0, BLOCK_K)).to(tl.int64)
        a_ptrs = a_ptr + m[:, None] * a_stride_m + k[None, :] * a_stride_k
        b_ptrs = b_ptr + k[:, None] * b_stride_k + n[None, :] * b_stride_n
        a = tl.load(a_ptrs, mask=(m[:, None] < M) & (k[None, :] < K), other=0.0)
        b = tl.load(b_ptrs, mask=(k[:, None] < K) & (n[None, :] < N), other=0.0)
        acc = tl.dot(a, b, acc)
    if ADDS or KEEPS:
        acc = _with_partial(partial_ptr, acc, m_start, n_start, M, N, ADDS, KEEPS)
    if not KEEPS:
        inside = (m[:, None] < M) & (n[None, :] < N)
        tl.store(out_ptr + m[:, None] * out_stride + n[None, :], acc.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _expm1(x):
    """Return exp(x) - 1 for x <= 0, near 0 by its series: the difference would have no correct digit there."""
    series = x / 8 + 1
    series = x / 7 * series + 1
    series = x / 6 * series + 1
    series = x / 5 * series + 1
    series = x / 4 * series + 1
    series = x / 3 * series + 1
    series = x / 2 * series + 1
    return tl.where(x > -0.4, x * series, tl.exp(x) - 1)


@triton.jit(do_not_specialize=["ignore_index"])
def _logits_to_gradients(
    x_ptr,
    labels_ptr,
    grad_loss_ptr,
    loss_ptr,
    stride,
    V,
    ignore_index,
    REPEAT: tl.constexpr,
    LANES: tl.constexpr,
):
    """Store the loss of a row and write the gradient of its logits over them."""
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * stride
    label = tl.load(labels_ptr + row)
    offsets = tl.arange(0, REPEAT)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    if label == ignore_index:
        tl.store(loss_ptr + row, 0.0)
        for start in range(0, V, REPEAT * LANES):
            cols = start + offsets
            tl.store(x_ptr + cols, tl.zeros([REPEAT, LANES], dtype=x_ptr.dtype.element_ty), mask=cols < V)
    else:
        inside = (label >= 0) & (label < V)  # a label that is neither a column nor ignored is an error: NaN
        of_label = tl.load(x_ptr + label, mask=inside, other=float("nan")).to(tl.float32)
        factor = tl.load(grad_loss_ptr + row)
        # A lane has its own maximum and sum until the end of the row, so warps do not wait for each other.
        top = tl.full([LANES], float("-inf"), dtype=tl.float32)
        total = tl.zeros([LANES], dtype=tl.float32)
        for start in range(0, V, REPEAT * LANES):
            cols = start + offsets
            x = tl.load(x_ptr + cols, mask=cols < V, other=float("-inf"), eviction_policy="evict_last").to(tl.float32)
            new_top = tl.maximum(top, tl.max(x, axis=0))
            base = tl.where(new_top == float("-inf"), 0.0, new_top)
            total = total * tl.exp(top - base) + tl.sum(tl.exp(x - base[None, :]), axis=0)
            top = new_top
        row_top = tl.max(top, axis=0)
        row_total = tl.sum(total * tl.exp(top - row_top), axis=0)  # NaN for a row of -inf
        log_sum = tl.log(row_total)
        tl.store(loss_ptr + row, log_sum + (row_top - of_label))
        of_label = _expm1((of_label - row_top) - log_sum)
        # Backwards: the end of the row was read last and is still in cache.
        steps = tl.cdiv(V, REPEAT * LANES)
        for step in range(0, steps):
            cols = (steps - 1 - step) * (REPEAT * LANES) + offsets
            x = tl.load(x_ptr + cols, mask=cols < V, other=float("-inf")).to(tl.float32)
            off = tl.where(cols == label, of_label, tl.exp((x - row_top) - log_sum))
            tl.store(x_ptr + cols, (off * factor).to(x_ptr.dtype.element_ty), mask=cols < V)


def _is_aligned(tensor):
    """Return True if the tensor copy engine takes a tensor: it begins, and its rows do, at a multiple of 16 bytes."""
    return tensor.data_ptr() % 16 == 0 and tensor.stride(0) * tensor.element_size() % 16 == 0


def _multiply(a, b, out, partial, M, N, K, *, a_rows, b_rows, adds=False, keeps=False, stages):
    """Launch out [M, N] = a @ b; a and b are [M, K] and [N, K] in memory with a_rows and b_rows, else [K, M] and [K, N]."""
    if not (_is_aligned(a) and _is_aligned(b) and _is_aligned(out)):
        block_m, block_n, block_k = 64, 64, 32
        tiles = -(-M // block_m) * -(-N // block_n)
        a_strides = (a.stride(0), 1) if a_rows else (1, a.stride(0))
        b_strides = (1, b.stride(0)) if b_rows else (b.stride(0), 1)
        _product_pointers[(tiles,)](
            a,
            b,
            out,
            partial,
            *a_strides,
            *b_strides,
            out.stride(0),
            M,
            N,
            K,
            block_m,
            block_n,
            block_k,
            adds,
            keeps,
            num_warps=4,
            num_stages=3,
        )
        return
    block_m, block_n, block_k = 128, 256 if N > 128 else 128, 64
    tiles = -(-M // block_m) * -(-N // block_n)
    a_block = [block_m, block_k] if a_rows else [block_k, block_m]
    b_block = [block_n, block_k] if b_rows else [block_k, block_n]
    out_block = [block_m, block_n // (4 if adds or keeps else 2)]
    _product[(min(tiles, _sm_count(a.device)),)](
        TensorDescriptor(a, [M, K] if a_rows else [K, M], [a.stride(0), 1], a_block),
        TensorDescriptor(b, [N, K] if b_rows else [K, N], [b.stride(0), 1], b_block),
        TensorDescriptor(out, [M, N], [out.stride(0), 1], out_block),
        partial,
        M,
        N,
        K,
        block_m,
        block_n,
        block_k,
        GROUP_M,
        a_rows,
        b_rows,
        adds,
        keeps,
        num_warps=8,
        num_stages=stages,
    )


def run(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    grad_loss: torch.Tensor,
    ignore_index: int,
    loss: torch.Tensor,
    grad_hidden: torch.Tensor,
    grad_weight: torch.Tensor,
    *,
    CHUNK: int = 2048,
    REPEAT: int = 8,
    num_stages: int = 4,
) -> None:
    """Write the loss of each token and the gradients of sum(loss * grad_loss).

    hidden, grad_hidden [M, H] and weight, grad_weight [V, H] in T (bfloat16, float16); labels [M] int64; grad_loss, loss
    [M] float32. CHUNK tokens at a time: their logits in T, the losses and the gradient of the logits in their place, then
    both products with it. With several chunks, the gradient of the weight is added up in a float32 tensor of its size,
    which the product of every chunk reads and writes once.
    """
    M, H = hidden.shape
    V = weight.shape[0]
    if M == 0:
        grad_weight.zero_()
        return
    chunks = -(-M // CHUNK)
    rows = -(-M // chunks)
    logits = torch.empty((rows, -(-V // 8) * 8), dtype=hidden.dtype, device=hidden.device)
    partial = grad_weight
    if chunks > 1:
        partial = torch.empty((V, H), dtype=torch.float32, device=hidden.device)
    lanes = 2048
    while lanes > 64 and REPEAT * lanes > 2 * V:
        REPEAT, lanes = (REPEAT // 2, lanes) if REPEAT > 1 else (1, lanes // 2)
    for start in range(0, M, rows):
        stop = min(M, start + rows)
        count, part = stop - start, hidden[start:stop]
        _multiply(part, weight, logits, partial, count, V, H, a_rows=True, b_rows=True, stages=num_stages)
        _logits_to_gradients[(count,)](
            logits,
            labels[start:],
            grad_loss[start:],
            loss[start:],
            logits.stride(0),
            V,
            ignore_index,
            REPEAT,
            lanes,
            num_warps=8,
        )
        out = grad_hidden[start:stop]
        _multiply(logits, weight, out, partial, count, H, V, a_rows=True, b_rows=False, stages=num_stages)
        _multiply(
            logits,
            part,
            grad_weight,
            partial,
            V,
            H,
            count,
            a_rows=False,
            b_rows=False,
            adds=start > 0,
            keeps=stop < M,
            stages=min(num_stages, 3) if start else num_stages,  # adding takes shared memory for the sums
        )
