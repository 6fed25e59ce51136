"""RMSNorm of the heads of q and k and the rotary embedding behind it, in one launch, in TileLang: a CTA a token."""

import functools

import tilelang
import tilelang.language as T
import torch


@functools.cache
@tilelang.jit(pass_configs={"tl.enable_lower_ldgstg": True})  # keeps 16-byte stores whole
def normed_rope_kernel(centred, q_heads, k_heads, D, dtype, vec, lanes, groups):
    """Compile for head size D: `lanes` lanes have a head, each `vec` pairs at a time, and `groups` of them the heads of a token.

    `centred`: the factor of a normalised value is 1 + weight, and their product is rounded once.
    """
    B, S, table_B = T.dynamic("B S table_B")
    q_strides = (*T.dynamic("q_b q_s q_h", "int64"), 1)
    k_strides = (*T.dynamic("k_b k_s k_h", "int64"), 1)
    q_out_strides = (*T.dynamic("q_out_b q_out_s q_out_h", "int64"), 1)
    k_out_strides = (*T.dynamic("k_out_b k_out_s k_out_h", "int64"), 1)
    cos_strides = (*T.dynamic("cos_b cos_s", "int64"), 1)
    sin_strides = (*T.dynamic("sin_b sin_s", "int64"), 1)
    row_strides = q_strides[:3] + k_strides[:3] + q_out_strides[:3] + k_out_strides[:3]
    row_strides += cos_strides[:2] + sin_strides[:2]
    half, heads = D // 2, q_heads + k_heads  # heads are numbered through: those of q, then those of k
    rounds, chunks = -(-heads // groups), -(-half // (lanes * vec))
    full = half % (lanes * vec) == 0  # then no lane is beyond the head
    steps = lanes.bit_length() - 1

    @T.macro
    def load_pairs(x, rows, i, b, s, head, lane):
        for c in T.unroll(chunks):
            if full or (c * lanes + lane) * vec < half:
                for side in T.unroll(2):
                    for v in T.vectorized(vec):
                        rows[i, c, side, v] = x[b, s, head, side * half + (c * lanes + lane) * vec + v]

    @T.macro
    def load_row(x, row, b, s, lane):
        for c in T.unroll(chunks):
            if full or (c * lanes + lane) * vec < half:
                for side in T.unroll(2):
                    for v in T.vectorized(vec):
                        row[c, side, v] = x[b, s, side * half + (c * lanes + lane) * vec + v]

    @T.macro
    def load_weight(x, row, lane):
        for c in T.unroll(chunks):
            if full or (c * lanes + lane) * vec < half:
                for side in T.unroll(2):
                    for v in T.vectorized(vec):
                        row[c, side, v] = x[side * half + (c * lanes + lane) * vec + v]

    @T.macro
    def norm_and_rotate(rows, i, r, scales, cosine, sine, normed, result, out, b, s, head, lane):
        """Products and sum are rounded to T each; T.fmul keeps float32 products out of a fused multiply-add.

        Every store has elements of `result` of its own: TileLang 0.1.15 may store a stale value of a reused one.
        """
        for c in T.unroll(chunks):
            if full or (c * lanes + lane) * vec < half:
                for side in T.unroll(2):
                    for v in T.vectorized(vec):
                        value = T.fmul(T.cast(rows[i, c, side, v], "float32"), r)
                        if centred:
                            normed[side, v] = T.cast(
                                T.cast(T.fmul(value, 1.0 + T.cast(scales[c, side, v], "float32")), dtype), "float32"
                            )
                        else:
                            normed[side, v] = T.cast(
                                T.cast(
                                    T.fmul(
                                        T.cast(T.cast(value, dtype), "float32"), T.cast(scales[c, side, v], "float32")
                                    ),
                                    dtype,
                                ),
                                "float32",
                            )
                for v in T.vectorized(vec):
                    kept = T.cast(T.fmul(normed[0, v], T.cast(cosine[c, 0, v], "float32")), dtype)
                    crossed = T.cast(T.fmul(normed[1, v], T.cast(sine[c, 0, v], "float32")), dtype)
                    result[i, c, 0, v] = T.cast(T.cast(kept, "float32") - T.cast(crossed, "float32"), dtype)
                for v in T.vectorized(vec):
                    kept = T.cast(T.fmul(normed[1, v], T.cast(cosine[c, 1, v], "float32")), dtype)
                    crossed = T.cast(T.fmul(normed[0, v], T.cast(sine[c, 1, v], "float32")), dtype)
                    result[i, c, 1, v] = T.cast(T.cast(kept, "float32") + T.cast(crossed, "float32"), dtype)
                for side in T.unroll(2):
                    for v in T.vectorized(vec):
                        out[b, s, head, side * half + (c * lanes + lane) * vec + v] = result[i, c, side, v]

    @T.prim_func
    def normed_rope(
        q: T.StridedTensor((B, S, q_heads, D), q_strides, dtype),
        k: T.StridedTensor((B, S, k_heads, D), k_strides, dtype),
        q_weight: T.Tensor((D,), dtype),
        k_weight: T.Tensor((D,), dtype),
        cos: T.StridedTensor((table_B, S, D), cos_strides, dtype),
        sin: T.StridedTensor((table_B, S, D), sin_strides, dtype),
        q_out: T.StridedTensor((B, S, q_heads, D), q_out_strides, dtype),
        k_out: T.StridedTensor((B, S, k_heads, D), k_out_strides, dtype),
        eps: T.float32,
    ):
        with T.Kernel(S, B, threads=lanes * groups) as (s, b):
            for stride in row_strides:
                T.assume(stride % vec == 0)  # the launch chose vec so; it lets the compiler use vector accesses
            lane, group = T.get_thread_binding(0) % lanes, T.get_thread_binding(0) // lanes
            table_b = T.min(b, table_B - 1)  # one table for the whole batch, or one for each
            rows = T.alloc_local((rounds, chunks, 2, vec), dtype)
            result = T.alloc_local((rounds, chunks, 2, vec), dtype)
            normed = T.alloc_local((2, vec), "float32")
            cos_row = T.alloc_local((chunks, 2, vec), dtype)
            sin_row = T.alloc_local((chunks, 2, vec), dtype)
            q_scales = T.alloc_local((chunks, 2, vec), dtype)
            k_scales = T.alloc_local((chunks, 2, vec), dtype)
            total = T.alloc_local((rounds,), "float32")

            # All loads first: they overlap.
            for i in T.unroll(rounds):
                for c in T.unroll(chunks):
                    for side in T.unroll(2):
                        for v in T.vectorized(vec):
                            rows[i, c, side, v] = 0
                if group + i * groups < q_heads:
                    load_pairs(q, rows, i, b, s, group + i * groups, lane)
                elif group + i * groups < heads:
                    load_pairs(k, rows, i, b, s, group + i * groups - q_heads, lane)
            load_row(cos, cos_row, table_b, s, lane)
            load_row(sin, sin_row, table_b, s, lane)
            load_weight(q_weight, q_scales, lane)
            load_weight(k_weight, k_scales, lane)
            for i in T.unroll(rounds):
                total[i] = 0.0
                for c in T.unroll(chunks):
                    for side in T.unroll(2):
                        for v in T.unroll(vec):
                            total[i] += T.cast(rows[i, c, side, v], "float32") * T.cast(rows[i, c, side, v], "float32")
                for step in T.unroll(steps):  # all lanes of a warp take part, those without a head too
                    total[i] += T.shfl_xor(total[i], 1 << step)
                total[i] = T.rsqrt(total[i] * (1.0 / D) + eps)
            for i in T.unroll(rounds):
                if group + i * groups < q_heads:
                    norm_and_rotate(
                        rows,
                        i,
                        total[i],
                        q_scales,
                        cos_row,
                        sin_row,
                        normed,
                        result,
                        q_out,
                        b,
                        s,
                        group + i * groups,
                        lane,
                    )
                elif group + i * groups < heads:
                    norm_and_rotate(
                        rows,
                        i,
                        total[i],
                        k_scales,
                        cos_row,
                        sin_row,
                        normed,
                        result,
                        k_out,
                        b,
                        s,
                        group + i * groups - q_heads,
                        lane,
                    )

    return normed_rope


@functools.cache
def kernel_for(centred, q_heads, k_heads, D, dtype, vec, rounds):
    """The kernel whose lanes have `rounds` heads, or more where a CTA would have over 1024 threads. Its warps are whole."""
    lanes = min(32, 1 << (-(-(D // 2) // vec) - 1).bit_length())
    most = 1024 // lanes
    groups = min(-(-(q_heads + k_heads) // rounds), most)
    whole = max(1, 32 // lanes)
    groups = min(-(-groups // whole) * whole, most)
    return normed_rope_kernel(centred, q_heads, k_heads, D, dtype, vec, lanes, groups)


def _launches(centred):
    """Fill in a function that only declares an entry: one that called a shared launcher would cost each launch a Python call.

    q, q_out: [B, S, Hq, D]; k, k_out: [B, S, Hkv, D]; q_weight, k_weight: [D]; cos, sin: [1 or B, S, D]; D even; last strides 1,
    the others free; T is bfloat16, float16 or float32, sums and products are taken in float32. A CTA owns a token: a few lanes
    have a head of it, and keep their part of cos, sin and the weights in registers for `rounds` heads. rounds=None: 2 from 512
    tokens on, else 1 (decode).
    """

    def run(q, k, q_weight, k_weight, cos, sin, eps, q_out, k_out, *, rounds=None):
        B, S, q_heads, D = q.shape
        if q.numel() == 0:
            return
        itemsize = q.dtype.itemsize
        # The widest power of two, at most 16 bytes, that divides half a head, all strides and all addresses.
        bits = D // 2 | 16 // itemsize
        addresses = q_weight.data_ptr() | k_weight.data_ptr()
        for tensor in (q, k, cos, sin, q_out, k_out):
            for stride in tensor.stride()[:-1]:
                bits |= stride
            addresses |= tensor.data_ptr()
        bits |= addresses // itemsize
        rounds = rounds or (2 if B * S >= 512 else 1)
        kernel = kernel_for(centred, q_heads, k.shape[2], D, q.dtype, bits & -bits, rounds)
        kernel(q, k, q_weight, k_weight, cos, sin, q_out, k_out, eps)

    return lambda declared: run


@_launches(False)
def run_qk_norm_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    eps: float,
    q_out: torch.Tensor,
    k_out: torch.Tensor,
    *,
    rounds=None,
):
    """q_out and k_out = rotated RMSNorm of every head of q and k, rounded to T after each operation."""


@_launches(True)
def run_qk_norm_rope_gemma(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    eps: float,
    q_out: torch.Tensor,
    k_out: torch.Tensor,
    *,
    rounds=None,
):
    """q_out and k_out = rotated RMSNorm of every head, with weights around zero; the norm is rounded once."""
