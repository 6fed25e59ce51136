"""Per-head RMSNorm of q and k in one launch, in TileLang: a warp a head, heads and weights kept in registers."""

import functools

import tilelang
import tilelang.language as T


@functools.cache
@tilelang.jit(pass_configs={"tl.enable_lower_ldgstg": True})
def qk_rms_norm_kernel(q_heads, k_heads, D, dtype, vec, warps, rounds):
    """Compile for head size D: `warps` warps normalise `rounds` heads of a token each, a lane `vec` elements."""
    M = T.dynamic("M")
    q_strides = (*T.dynamic("q_m q_h", "int64"), 1)
    k_strides = (*T.dynamic("k_m k_h", "int64"), 1)
    q_out_strides = (*T.dynamic("q_out_m q_out_h", "int64"), 1)
    k_out_strides = (*T.dynamic("k_out_m k_out_h", "int64"), 1)
    row_strides = q_strides[:2] + k_strides[:2] + q_out_strides[:2] + k_out_strides[:2]
    heads = q_heads + k_heads  # numbered through: those of q, then those of k
    chunks = -(-D // (32 * vec))
    full = D % (32 * vec) == 0  # then no lane is beyond the head

    @T.macro
    def load(x, values, i, m, head, lane):
        for c in T.unroll(chunks):
            if full or (c * 32 + lane) * vec < D:
                for v in T.vectorized(vec):
                    values[i, c, v] = x[m, head, (c * 32 + lane) * vec + v]

    @T.macro
    def load_weight(weight, scales, lane):
        for c in T.unroll(chunks):
            if full or (c * 32 + lane) * vec < D:
                for v in T.vectorized(vec):
                    scales[c, v] = weight[(c * 32 + lane) * vec + v]

    @T.macro
    def store(values, i, r, scales, result, out, m, head, lane):
        """Every store has elements of `result` of its own: TileLang 0.1.15 may store a stale value of a reused one."""
        for c in T.unroll(chunks):
            if full or (c * 32 + lane) * vec < D:
                for v in T.vectorized(vec):
                    normed = T.cast(T.cast(values[i, c, v], "float32") * r, dtype)
                    result[i, c, v] = T.cast(T.cast(normed, "float32") * T.cast(scales[c, v], "float32"), dtype)
                for v in T.vectorized(vec):
                    out[m, head, (c * 32 + lane) * vec + v] = result[i, c, v]

    @T.prim_func
    def qk_rms_norm(
        q: T.StridedTensor((M, q_heads, D), q_strides, dtype),
        k: T.StridedTensor((M, k_heads, D), k_strides, dtype),
        q_weight: T.Tensor((D,), dtype),
        k_weight: T.Tensor((D,), dtype),
        eps: T.float32,
        q_out: T.StridedTensor((M, q_heads, D), q_out_strides, dtype),
        k_out: T.StridedTensor((M, k_heads, D), k_out_strides, dtype),
    ):
        with T.Kernel(M, -(-heads // (warps * rounds)), threads=(32, warps)) as (m, block):
            for stride in row_strides:
                T.assume(stride % vec == 0)  # run() chose vec so; it lets the compiler use vector accesses
            lane = T.get_thread_binding(0)
            first = block * (warps * rounds) + T.get_thread_binding(1)
            values = T.alloc_local((rounds, chunks, vec), dtype)
            result = T.alloc_local((rounds, chunks, vec), dtype)
            q_scales = T.alloc_local((chunks, vec), dtype)
            k_scales = T.alloc_local((chunks, vec), dtype)
            total = T.alloc_local((rounds,), "float32")

            for i in T.unroll(rounds):  # all loads first: they overlap
                if not full:
                    for c in T.unroll(chunks):
                        for v in T.vectorized(vec):
                            values[i, c, v] = 0
                if first + i * warps < q_heads:
                    load(q, values, i, m, first + i * warps, lane)
                elif first + i * warps < heads:
                    load(k, values, i, m, first + i * warps - q_heads, lane)
            load_weight(q_weight, q_scales, lane)
            load_weight(k_weight, k_scales, lane)
            for i in T.unroll(rounds):  # the branches are the same for all lanes of a warp
                if first + i * warps < heads:
                    total[i] = 0.0
                    for c, v in T.grid(chunks, vec):
                        total[i] += T.cast(values[i, c, v], "float32") * T.cast(values[i, c, v], "float32")
                    total[i] = T.rsqrt(T.warp_reduce_sum(total[i]) * (1.0 / D) + eps)
                    if first + i * warps < q_heads:
                        store(values, i, total[i], q_scales, result, q_out, m, first + i * warps, lane)
                    else:
                        store(values, i, total[i], k_scales, result, k_out, m, first + i * warps - q_heads, lane)

    return qk_rms_norm


def run(q, k, q_weight, k_weight, eps, q_out, k_out, *, rounds=None):
    """y = T(T(x * rsqrt(mean(x^2) + eps)) * weight) over every head x of q (q_weight) and of k (k_weight).

    q, q_out: [M, Hq, D]; k, k_out: [M, Hkv, D]; last strides 1, the others free; weights: [D] contiguous; T is
    bfloat16, float16 or float32, sums are float32. A warp normalises `rounds` heads of one token, a CTA has up to 8
    warps.
    rounds=None: 4 from 512 tokens on (heads of up to 256), else 1 (decode: many CTAs, little work in each).
    """
    M, q_heads, D = q.shape
    if M == 0:
        return
    dtype = q.dtype
    itemsize = dtype.itemsize
    # The widest power of two, at most 16 bytes, that divides a head, all strides and all addresses...
    bits = D | 16 // itemsize
    addresses = q_weight.data_ptr() | k_weight.data_ptr()
    for tensor in (q, k, q_out, k_out):
        m, h, _ = tensor.stride()
        bits |= m | h
        addresses |= tensor.data_ptr()
    bits |= addresses // itemsize
    # ... and no wider than gives every lane a part of the head.
    vec = min(bits & -bits, 1 << (-(-D // 32) - 1).bit_length())
    k_heads = k.shape[1]
    heads = q_heads + k_heads
    if rounds is None:
        rounds = 4 if M >= 512 and D <= 256 else 1
    warps = 8 if rounds > 1 else 4
    warps = -(-heads // (rounds * -(-heads // (rounds * warps))))  # as few as cover all heads with as many CTAs
    kernel = qk_rms_norm_kernel(q_heads, k_heads, D, dtype, vec, warps, rounds)
    kernel(q, k, q_weight, k_weight, eps, q_out, k_out)
