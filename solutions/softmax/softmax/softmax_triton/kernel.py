"""Softmax over the last axis, Triton."""

import os

import torch
import triton
import triton.language as tl

# Up to this many columns a row stays in registers (32 fp32 values a thread at 32 warps); longer rows are read twice.
MAX_REGISTER_COLUMNS = 32768
# Up to this many such rows, about one a multiprocessor would leave the machine idle: they are cut into pieces.
FEW_ROWS = 128
PIECE_COLUMNS = 4096
CLUSTER = 8  # blocks that share a long row and tell each other their maxima and sums
CLUSTER_REGISTERS = {4: 168, 8: 80}  # a thread's, by warps a block: three blocks a multiprocessor
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["M"])
def _softmax_tile(
    x_ptr, out_ptr, x_stride, out_stride, M, N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    cols = tl.arange(0, BLOCK_N)[None, :]
    mask = (rows < M) & (cols < N)
    # evict_last, although nothing is read again: up to 6% faster than no policy, where evict_first is slower (H200).
    x = tl.load(x_ptr + rows * x_stride + cols, mask=mask, other=float("-inf"), eviction_policy="evict_last").to(
        tl.float32
    )
    # A row of -inf gives -inf - -inf = NaN and a +inf gives inf - inf = NaN, as in PyTorch: no special case.
    exps = tl.exp(x - tl.max(x, axis=1, keep_dims=True))
    result = exps / tl.sum(exps, axis=1, keep_dims=True)
    tl.store(out_ptr + rows * out_stride + cols, result.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _softmax_long_row(x_ptr, out_ptr, x_stride, out_stride, N: tl.constexpr, BLOCK_N: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_stride
    out_ptr += row * out_stride
    lanes = tl.arange(0, BLOCK_N)
    row_max = float("-inf")
    row_sum = 0.0
    # Online maximum and sum. The next block is asked for before this one is reduced, to keep memory busy.
    following = tl.load(x_ptr + lanes, mask=lanes < N, other=float("-inf"))
    for start in range(0, N, BLOCK_N):
        x = following.to(tl.float32)
        cols = start + BLOCK_N + lanes
        following = tl.load(x_ptr + cols, mask=cols < N, other=float("-inf"))
        new_max = tl.maximum(row_max, tl.max(x, axis=0))
        # While everything seen is -inf subtract 0: -inf - -inf would make the sum NaN before the row is known.
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        row_sum = row_sum * tl.exp(row_max - shift) + tl.sum(tl.exp(x - shift), axis=0)
        row_max = new_max
    # Backwards: the end of the row was read last and is still in cache.
    for back in range(0, N, BLOCK_N):
        cols = (N - 1) // BLOCK_N * BLOCK_N - back + lanes
        x = tl.load(x_ptr + cols, mask=cols < N, other=float("-inf"), eviction_policy="evict_first").to(tl.float32)
        tl.store(out_ptr + cols, (tl.exp(x - row_max) / row_sum).to(out_ptr.dtype.element_ty), mask=cols < N)


@triton.jit
def _softmax_piece_stats(x_ptr, stats_ptr, x_stride, N: tl.constexpr, BLOCK_N: tl.constexpr, PIECES: tl.constexpr):
    pid = tl.program_id(0)
    cols = pid % PIECES * BLOCK_N + tl.arange(0, BLOCK_N)
    row = (pid // PIECES).to(tl.int64)
    x = tl.load(x_ptr + row * x_stride + cols, mask=cols < N, other=float("-inf")).to(tl.float32)
    piece_max = tl.max(x, axis=0)
    shift = tl.where(piece_max == float("-inf"), 0.0, piece_max)
    tl.store(stats_ptr + 2 * pid, piece_max)
    tl.store(stats_ptr + 2 * pid + 1, tl.sum(tl.exp(x - shift), axis=0))


@triton.jit
def _softmax_piece(
    x_ptr,
    stats_ptr,
    out_ptr,
    x_stride,
    out_stride,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PIECES: tl.constexpr,
    BLOCK_PIECES: tl.constexpr,
):
    pid = tl.program_id(0)
    cols = pid % PIECES * BLOCK_N + tl.arange(0, BLOCK_N)
    row = (pid // PIECES).to(tl.int64)
    x = tl.load(x_ptr + row * x_stride + cols, mask=cols < N, other=float("-inf")).to(tl.float32)
    # Every program of a row combines the statistics of all pieces, in the same order.
    pieces = tl.arange(0, BLOCK_PIECES)
    stats_ptrs = stats_ptr + 2 * (row * PIECES + pieces)
    maxima = tl.load(stats_ptrs, mask=pieces < PIECES, other=float("-inf"))
    sums = tl.load(stats_ptrs + 1, mask=pieces < PIECES, other=0.0)
    row_max = tl.max(maxima, axis=0)
    row_sum = tl.sum(sums * tl.exp(maxima - row_max), axis=0)
    result = tl.exp(x - row_max) / row_sum
    tl.store(out_ptr + row * out_stride + cols, result.to(out_ptr.dtype.element_ty), mask=cols < N)


@triton.jit
def _exp2(x):
    """2 ** x; results below 2 ** -126 become 0."""
    return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1)


# How the blocks of a cluster add up a row (_softmax_cluster, PTX below).
#
# Every warp of the cluster has a part: a maximum, and a sum relative to it. Every block has a box for all parts in its
# shared memory, and an mbarrier that counts the bytes that came. Lane b of a warp writes the warp's part into the box
# of block b. Each block waits until its own box is full; then every warp adds up the same parts in the same order.
# - Before a block arrives at the cluster's barrier, it initialises its mbarrier and tells it how much will come. Nobody
#   writes to another block before the wait at that barrier: until then the other may not have begun, and its shared
#   memory not be its own. The load of the row is issued between arrival and wait.
# - st.async writes a part and counts it at the reader's mbarrier in one, so a reader waits for the parts and for nothing
#   else. A second barrier of the cluster would have to release the writes before it: a fence that takes as long as all
#   memory accesses of the block that are under way, anywhere on the GPU.
# - The parts are read from shared memory only, so the wait need not drop the L1 cache, as acquire.cluster would.
# - A block that goes on has got all that is ever written to it, so it may exit. What it wrote itself may still be under
#   way then; that comes from registers, and the blocks it goes to do not exit before it is there.
# max.f32 drops a NaN unless both are, but the sum of a part with a NaN is NaN, and no later step loses that. +inf: its
# thread's sum is NaN already (inf - inf). Parts that are empty (blocks beyond the row) or all -inf are (-inf, 0), which
# changes no sum; a row of nothing else gives -inf - -inf = NaN at the end. All as in PyTorch.


@triton.constexpr_function
def _ptx_open_box(warps, blocks):
    """PTX: makes the block's box, the mbarrier behind it, and arrives at the cluster's barrier; $0 = the box's address.

    Thread 0's arrival with expect_tx is the only one that the mbarrier waits for; the rest is bytes.
    """
    size = 8 * warps * blocks
    return f"""{{
        .shared .align 16 .b8 box[{size + 16}];
        .reg .b32 thread;
        .reg .pred first;
        mov.u32 $0, box;
        mov.u32 thread, %tid.x;
        setp.eq.u32 first, thread, 0;
        @first mbarrier.init.shared::cta.b64 [$0 + {size}], 1;
        @first fence.mbarrier_init.release.cluster;
        @first mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0 + {size}], {size};
        barrier.cluster.arrive.relaxed;
    }}"""


@triton.constexpr_function
def _ptx_base(base, top):
    """PTX: base = top, or 0 where that is -inf: -inf - -inf would make a sum NaN before the row is known."""
    return f"setp.eq.f32 p, {top}, 0fFF800000; selp.f32 {base}, 0f00000000, {top}, p;"


@triton.constexpr_function
def _ptx_rebase(total, top, base):
    """PTX: total, relative to top, becomes relative to base: total *= 2 ** ((top - base) * log2(e))."""
    return f"sub.f32 t, {top}, {base}; mul.f32 t, t, 0f3FB8AA3B; ex2.approx.ftz.f32 t, t; mul.f32 {total}, {total}, t;"


@triton.constexpr_function
def _ptx_over_warp(operation, value):
    """PTX: value = operation over the values of all lanes; each lane gets the same bits."""
    return " ".join(
        f"shfl.sync.bfly.b32 t, {value}, {distance}, 31, 0xffffffff; {operation} {value}, {value}, t;"
        for distance in (16, 8, 4, 2, 1)
    )


@triton.constexpr_function
def _ptx_add_up_warp():
    """PTX: (top, total) = the parts of all lanes in one."""
    return f"""
        mov.f32 other_top, top;
        {_ptx_over_warp("max.f32", "top")}
        {_ptx_base("base", "top")}
        {_ptx_rebase("total", "other_top", "base")}
        {_ptx_over_warp("add.f32", "total")}"""


@triton.constexpr_function
def _ptx_add_up_cluster(warps, blocks):
    """PTX: $0, $1 = maximum and sum of the row, from the thread's own $2, $3. $4 = the box.

    $5 = place of the thread's values among the cluster's: block * threads + thread, or the sum becomes NaN.
    """
    parts = warps * blocks  # a multiple of 32: a lane reads parts / 32 of them
    others = "".join(
        f"""
        ld.shared.v2.f32 {{other_top, other_total}}, [address + {256 * i}];
        max.f32 new_top, top, other_top;
        {_ptx_base("base", "new_top")}
        {_ptx_rebase("total", "top", "base")}
        {_ptx_rebase("other_total", "other_top", "base")}
        add.f32 total, total, other_total;
        mov.f32 top, new_top;"""
        for i in range(1, parts // 32)
    )
    return f"""{{
        .reg .f32 top, total, new_top, other_top, other_total, base, t;
        .reg .b32 thread, lane, warp, block, place, address, full, target, target_full;
        .reg .pred p, writes;
        mov.u32 thread, %tid.x;
        and.b32 lane, thread, 31;
        shr.u32 warp, thread, 5;
        mov.u32 block, %cluster_ctarank;
        mov.f32 top, $2;
        mov.f32 total, $3;
        mad.lo.u32 place, block, {32 * warps}, thread;
        setp.ne.u32 p, place, $5;
        @p mov.f32 total, 0f7FC00000;
        {_ptx_add_up_warp()}
        mad.lo.u32 address, block, {warps}, warp;
        shl.b32 address, address, 3;
        add.u32 address, $4, address;
        add.u32 full, $4, {8 * parts};
        setp.lt.u32 writes, lane, {blocks};
        barrier.cluster.wait.acquire;
        @writes mapa.shared::cluster.u32 target, address, lane;
        @writes mapa.shared::cluster.u32 target_full, full, lane;
        @writes st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [target], {{top, total}}, [target_full];
    WAIT:
        mbarrier.try_wait.parity.shared::cta.b64 p, [full], 0;
        @!p bra WAIT;
        shl.b32 address, lane, 3;
        add.u32 address, $4, address;
        ld.shared.v2.f32 {{top, total}}, [address];{others}
        {_ptx_add_up_warp()}
        mov.f32 $0, top;
        mov.f32 $1, total;
    }}"""


@triton.jit
def _softmax_cluster(
    x_ptr,
    out_ptr,
    x_stride,
    out_stride,
    N: tl.constexpr,
    BLOCKS: tl.constexpr,
    WARPS: tl.constexpr,
    REPEAT: tl.constexpr,
):
    """One row in the registers of a cluster of BLOCKS blocks of WARPS warps, 8 * REPEAT values a thread."""
    LANES: tl.constexpr = 32 * WARPS
    box = tl.inline_asm_elementwise(_ptx_open_box(WARPS, BLOCKS), "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    row = tl.program_id(0).to(tl.int64)
    # [BLOCKS, REPEAT, LANES * 8]: the last axis is what the threads of a block read at once, 8 neighbours each. It fills
    # them exactly, so that the compiler has one way to share out the tile.
    blocks = tl.arange(0, BLOCKS)
    cols = (
        blocks[:, None, None] * (REPEAT * LANES * 8)
        + tl.arange(0, REPEAT)[None, :, None] * (LANES * 8)
        + tl.arange(0, LANES * 8)[None, None, :]
    )
    x = tl.load(x_ptr + row * x_stride + cols, mask=cols < N, other=float("-inf"), eviction_policy="evict_last")
    # Each thread subtracts its own maximum, so that nobody waits before the exponentials, which are computed once.
    x = x.reshape(BLOCKS, REPEAT, LANES, 8)
    own = tl.max(tl.max(x, axis=3), axis=1).to(tl.float32)
    safe = tl.where(own == float("-inf"), 0.0, own)  # -inf - -inf would make the sum NaN before the row is known
    # exp(x - own) = 2 ** (slope * x - offset), one multiply-add. From 2 ** 20 on it would lose all precision, or
    # overflow; but there all smaller 16-bit values are at least 4096 smaller, and any base gives 0 and 1.
    slope = tl.where(tl.abs(safe) < 1048576.0, LOG2E, 1.0)
    offset = safe * slope
    undo = _exp2(-tl.fma(safe, slope, -offset))  # what the rounding of offset did
    slopes = tl.broadcast_to(slope[:, None, :, None], x.shape)
    offsets = tl.broadcast_to(-offset[:, None, :, None], x.shape)
    exps = _exp2(tl.fma(x.to(tl.float32), slopes, offsets))
    total = tl.sum(tl.sum(exps, axis=3), axis=1) * undo
    # The PTX below counts every thread once. That is right if thread l of block b holds total[b, l], which Triton does
    # not promise: so each thread says what it holds, and should it be anything else, the row becomes NaN.
    place = blocks[:, None] * LANES + tl.arange(0, LANES)[None, :]
    row_top, row_sum = tl.inline_asm_elementwise(
        _ptx_add_up_cluster(WARPS, BLOCKS),
        "=f,=f,f,f,r,r",
        [own, total, box, place],
        dtype=(tl.float32, tl.float32),
        is_pure=False,
        pack=1,
    )
    factor = undo * _exp2((own - row_top) * LOG2E) * (1.0 / row_sum)
    result = (exps * factor[:, None, :, None]).to(out_ptr.dtype.element_ty).reshape(cols.shape)
    tl.store(out_ptr + row * out_stride + cols, result, mask=cols < N, eviction_policy="evict_first")


def _cluster_repeat(x: torch.Tensor, out: torch.Tensor, warps: int) -> int:
    """REPEAT of _softmax_cluster for these rows, or 0 where another kernel is right for them."""
    N = x.shape[1]
    if os.environ.get("TRITON_INTERPRET") == "1" or torch.cuda.get_device_capability(x.device)[0] < 9:
        return 0  # no clusters
    vectors = N | x.stride(0) | out.stride(0) | (x.data_ptr() | out.data_ptr()) // x.element_size()
    if x.element_size() != 2 or vectors % 8 != 0:
        return 0
    width = CLUSTER * warps * 32 * 8
    repeat = 1 << ((N + width - 1) // width - 1).bit_length()
    # More than 64 values a thread of 8 warps, or 128 of 4, do not fit in CLUSTER_REGISTERS; a cluster that is a quarter
    # empty does not pay.
    return repeat if repeat * warps <= 64 and 3 * width * repeat < 4 * N else 0


def run(x: torch.Tensor, out: torch.Tensor, *, BLOCK_M=None, LOOP_BLOCK=16384, num_warps=None, CLUSTER_WARPS=8):
    """out = T(exp(x - max(x)) / sum(exp(x - max(x)))) over the last axis, in fp32, rounded to nearest even.

    Shapes: x, out [M, N], unit last stride, any row stride; one dtype T in bfloat16, float16, float32.
    Mapping: a program owns BLOCK_M whole rows and keeps them in registers, so x is read once. Rows longer than
    MAX_REGISTER_COLUMNS (vocabularies):
    - few rows: each row in pieces of PIECE_COLUMNS over many programs, one kernel for the statistics of the pieces and
      one for the result; BLOCK_M, LOOP_BLOCK and num_warps do not apply.
    - else, where it fits (compute capability 9, 16-bit T, whole aligned vectors), a row stays in the registers of
      CLUSTER blocks of CLUSTER_WARPS warps (0: never), which write their maxima and sums into each other's shared
      memory; x is read once.
    - else one program a row loops over blocks of LOOP_BLOCK: an online maximum and sum, then the result. Here and
      with pieces, the second read of the row comes mostly from L2.
    BLOCK_M = None: 1 while there are few rows to share out, else as many rows as make a tile of 2048 values.
    num_warps = None: 16 values a thread.
    """
    M, N = x.shape
    if M == 0 or N == 0:
        return
    if N > MAX_REGISTER_COLUMNS and M <= FEW_ROWS:
        pieces = (N + PIECE_COLUMNS - 1) // PIECE_COLUMNS
        stats = torch.empty((M, pieces, 2), dtype=torch.float32, device=x.device)
        _softmax_piece_stats[(M * pieces,)](x, stats, x.stride(0), N, PIECE_COLUMNS, pieces, num_warps=8)
        _softmax_piece[(M * pieces,)](
            x,
            stats,
            out,
            x.stride(0),
            out.stride(0),
            N,
            PIECE_COLUMNS,
            pieces,
            1 << (pieces - 1).bit_length(),
            num_warps=8,
        )
        return
    repeat = _cluster_repeat(x, out, CLUSTER_WARPS) if N > MAX_REGISTER_COLUMNS and CLUSTER_WARPS else 0
    if repeat:
        _softmax_cluster[(M,)](
            x,
            out,
            x.stride(0),
            out.stride(0),
            N,
            CLUSTER,
            CLUSTER_WARPS,
            repeat,
            num_warps=CLUSTER_WARPS,
            num_ctas=CLUSTER,
            maxnreg=CLUSTER_REGISTERS[CLUSTER_WARPS],
        )
        return
    if N > MAX_REGISTER_COLUMNS:
        _softmax_long_row[(M,)](
            x, out, x.stride(0), out.stride(0), N, LOOP_BLOCK, num_warps=num_warps or min(32, max(4, LOOP_BLOCK // 512))
        )
        return
    block_n = 1 << (N - 1).bit_length()  # next power of two; triton.next_power_of_2 costs microseconds a call
    block_m = BLOCK_M or (1 if M <= 512 else max(1, 2048 // block_n))
    warps = num_warps or min(32, max(1, block_m * block_n // 512))
    _softmax_tile[((M + block_m - 1) // block_m,)](
        x, out, x.stride(0), out.stride(0), M, N, block_m, block_n, num_warps=warps
    )
