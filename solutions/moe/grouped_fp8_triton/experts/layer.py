"""Experts with FP8 weights, Triton: ids are sorted by expert on the device; casts, two grouped products and a sum follow."""

import torch
import triton
import triton.language as tl
from kernel import run_grouped

GROUP = tl.constexpr(128)  # channels that share a scale
FEW_PAIRS = 1024  # up to this many pairs of token and choice, every program counts all ids itself, in one launch
COUNTED = 512  # ids that are counted at a time
PLACED = 64  # ids that are placed at a time
MOST_PARTS = 128
CAST_ROWS = 16  # of a program


@triton.jit(do_not_specialize=["pairs", "share"])
def _count_ids(ids_ptr, counts_ptr, pairs, share, E: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr):
    """counts[part, e] = how many of the `share` ids of this part are e."""
    part = tl.program_id(0)
    bins = tl.arange(0, BINS)
    count = tl.zeros([BINS], tl.int32)
    for first in range(part * share, tl.minimum(part * share + share, pairs), BLOCK):
        places = first + tl.arange(0, BLOCK)
        ids = tl.load(ids_ptr + places, mask=(places < pairs) & (places < part * share + share), other=-1)
        known = (ids >= 0) & (ids < E)
        count += tl.histogram(tl.where(known, ids, 0).to(tl.int32), BINS, mask=known)
    tl.store(counts_ptr + part * BINS + bins, count)


@triton.jit(do_not_specialize=["pairs", "share", "parts"])
def _place_ids(
    ids_ptr,
    counts_ptr,
    slots_ptr,
    offs_ptr,
    pairs,
    share,
    parts,
    E: tl.constexpr,
    BINS: tl.constexpr,
    COUNTED_BEFORE: tl.constexpr,
    COUNT_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """slots[pair] = its place among the pairs sorted stably by expert, -1 for ids of none; offs[e] = where those of e end."""
    part = tl.program_id(0)
    bins = tl.arange(0, BINS)
    # Ids of each expert among all, and among those before this part.
    total = tl.zeros([BINS], tl.int32)
    before = tl.zeros([BINS], tl.int32)
    if COUNTED_BEFORE:
        PART_BLOCK: tl.constexpr = 8192 // BINS
        for first in range(0, parts, PART_BLOCK):
            other = first + tl.arange(0, PART_BLOCK)[:, None]
            counts = tl.load(counts_ptr + other * BINS + bins[None, :], mask=other < parts, other=0)
            total += tl.sum(counts, axis=0)
            before += tl.sum(tl.where(other < part, counts, 0), axis=0)
    else:
        for first in range(0, pairs, COUNT_BLOCK):
            places = first + tl.arange(0, COUNT_BLOCK)
            ids = tl.load(ids_ptr + places, mask=places < pairs, other=-1)
            known = (ids >= 0) & (ids < E)
            experts = tl.where(known, ids, 0).to(tl.int32)
            total += tl.histogram(experts, BINS, mask=known)
            before += tl.histogram(experts, BINS, mask=known & (places < part * share))
    ends = tl.cumsum(total, axis=0)
    tl.store(offs_ptr + bins, ends, mask=bins < tl.where(part == 0, E, 0))

    following = ends - total + before
    lanes = tl.arange(0, BLOCK)
    for first in range(part * share, tl.minimum(part * share + share, pairs), BLOCK):
        places = first + lanes
        inside = (places < pairs) & (places < part * share + share)
        ids = tl.load(ids_ptr + places, mask=inside, other=-1)
        known = (ids >= 0) & (ids < E)
        keys = tl.where(known, ids, E).to(tl.int32)
        earlier = (lanes[None, :] < lanes[:, None]) & (keys[None, :] == keys[:, None])
        experts = tl.where(known, keys, 0)
        slots = tl.gather(following, experts, axis=0) + tl.sum(earlier.to(tl.int32), axis=1)
        tl.store(slots_ptr + places, tl.where(known, slots, -1), mask=inside)
        following += tl.histogram(experts, BINS, mask=known)


@triton.jit
def _cast_block(x):
    """Codes of a block of 128 channels a row, and what they are multiplied by. Both divisions round as IEEE asks."""
    x = x.to(tl.float32)
    amax = tl.maximum(tl.max(tl.abs(x), axis=1), 1e-4)
    most = tl.zeros_like(amax) + 448.0
    codes = (x * tl.div_rn(most, amax)[:, None]).to(tl.float8e4nv)  # saturates
    return codes, tl.div_rn(amax, most)


@triton.jit(do_not_specialize=["M", "pairs"])
def _cast_into_slots(
    x_ptr, slots_ptr, codes_ptr, scale_ptr, x_stride, M, pairs, H, K: tl.constexpr, BLOCK_M: tl.constexpr
):
    """codes[slot, H] and scale[block, slot] of a token's row, for the slots of its choices. One block of channels a program."""
    token = (tl.program_id(0) * BLOCK_M).to(tl.int64) + tl.arange(0, BLOCK_M)
    block = tl.program_id(1)
    k = block * GROUP + tl.arange(0, GROUP)
    inside = (token < M)[:, None] & (k < H)[None, :]
    codes, scale = _cast_block(tl.load(x_ptr + token[:, None] * x_stride + k[None, :], mask=inside, other=0.0))
    for choice in tl.static_range(K):
        slot = tl.load(slots_ptr + token * K + choice, mask=token < M, other=-1).to(tl.int64)
        tl.store(codes_ptr + slot[:, None] * H + k[None, :], codes, mask=(slot >= 0)[:, None] & (k < H)[None, :])
        tl.store(scale_ptr + block.to(tl.int64) * pairs + slot, scale, mask=slot >= 0)


@triton.jit(do_not_specialize=["pairs"])
def _activate_and_cast(both_ptr, codes_ptr, scale_ptr, pairs, I, BLOCK_M: tl.constexpr):
    """codes[slot, I] and scale[block, slot] of silu(gate) * up, each step rounded to bfloat16; both [pairs, 2 I], gate first."""
    slot = (tl.program_id(0) * BLOCK_M).to(tl.int64) + tl.arange(0, BLOCK_M)
    block = tl.program_id(1)
    n = block * GROUP + tl.arange(0, GROUP)
    inside = (slot < pairs)[:, None] & (n < I)[None, :]
    places = both_ptr + slot[:, None] * 2 * I + n[None, :]
    gate = tl.load(places, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(places + I, mask=inside, other=0.0).to(tl.float32)
    gate = (gate / (1.0 + tl.exp(-gate))).to(tl.bfloat16).to(tl.float32)
    codes, scale = _cast_block((gate * up).to(tl.bfloat16))
    tl.store(codes_ptr + slot[:, None] * I + n[None, :], codes, mask=inside)
    tl.store(scale_ptr + block.to(tl.int64) * pairs + slot, scale, mask=slot < pairs)


@triton.jit
def _sum_choices(rows_ptr, slots_ptr, weights_ptr, out_ptr, out_stride, H, K: tl.constexpr, BLOCK: tl.constexpr):
    """out[token] = sum over its choices, in order, of weight times row, each product rounded to bfloat16."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for choice in tl.static_range(K):
        slot = tl.load(slots_ptr + token * K + choice).to(tl.int64)
        share = tl.load(weights_ptr + token * K + choice).to(tl.bfloat16).to(tl.float32)
        row = tl.load(rows_ptr + slot * H + columns, mask=columns < tl.where(slot >= 0, H, 0), other=0.0)
        weighted = (row.to(tl.float32) * share).to(tl.bfloat16).to(tl.float32)
        total += tl.where(slot >= 0, weighted, 0.0)
    tl.store(out_ptr + token * out_stride + columns, total.to(out_ptr.dtype.element_ty), mask=columns < H)


def _cdiv(value: int, divisor: int) -> int:
    return -(-value // divisor)  # triton.cdiv costs microseconds a call


def _route(ids: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Slots of the pairs of token and choice, and where those of each expert end."""
    pairs = ids.numel()
    bins = max(32, 1 << (experts - 1).bit_length())  # at least one a lane of a warp
    parts = min(MOST_PARTS, _cdiv(pairs, PLACED))
    share = _cdiv(_cdiv(pairs, parts), PLACED) * PLACED
    parts = _cdiv(pairs, share)
    slots = torch.empty(pairs, dtype=torch.int32, device=ids.device)
    offs = torch.empty(experts, dtype=torch.int32, device=ids.device)
    counts = offs
    if pairs > FEW_PAIRS:
        counts = torch.empty(parts * bins, dtype=torch.int32, device=ids.device)
        _count_ids[(parts,)](ids, counts, pairs, share, experts, bins, PLACED)
    _place_ids[(parts,)](
        ids, counts, slots, offs, pairs, share, parts, experts, bins, pairs > FEW_PAIRS, COUNTED, PLACED
    )
    return slots, offs


def _codes(rows: int, columns: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for codes [rows, columns], and for their scales a column of them for each block of 128 channels."""
    codes = torch.empty((rows, columns), dtype=torch.float8_e4m3fn, device=device)
    return codes, torch.empty((_cdiv(columns, 128), rows), dtype=torch.float32, device=device)


def run_experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_scale: torch.Tensor,
    down: torch.Tensor,
    down_scale: torch.Tensor,
    out: torch.Tensor,
    *,
    BLOCK_M=None,
    UP=None,
    DOWN=None,
    GROUP_M=8,
):
    """out[t] = sum over choices of weights[t, k] * (silu(x gate^T) * (x up^T)) down^T of expert ids[t, k], activations cast.

    Shapes: x and out [M, H] in bfloat16 with unit last stride, any row stride; ids [M, K] int64, weights [M, K]; gate_up
    [E, 2 I, H] with gate rows first and down [E, H, I] in float8_e4m3fn, scales of blocks of 128 x 128 in float32, contiguous.
    Roundings are those of the Definition; ids outside of 0..E-1 contribute nothing. Sums are in a fixed order.
    Mapping: pairs of token and choice are sorted by expert on the device, and nothing is read back. A token is cast once and
    written to the slots of its choices; `run_grouped` multiplies, its result is activated and cast, and multiplied again.
    BLOCK_M and GROUP_M are those of `run_grouped`, UP and DOWN its VARIANT in the first and the second product.
    """
    M, H = out.shape
    if M == 0:
        return
    K = ids.shape[1]
    E, I = down.shape[0], down.shape[2]
    pairs = M * K
    slots, offs = _route(ids, E)
    codes, scale = _codes(pairs, H, x.device)
    _cast_into_slots[(_cdiv(M, CAST_ROWS), scale.shape[0])](
        x, slots, codes, scale, x.stride(0), M, pairs, H, K, CAST_ROWS, num_warps=4
    )
    both = torch.empty((pairs, 2 * I), dtype=torch.bfloat16, device=x.device)
    run_grouped(codes, gate_up, scale.T, gate_up_scale, offs, both, BLOCK_M=BLOCK_M, VARIANT=UP, GROUP_M=GROUP_M)
    inner, inner_scale = _codes(pairs, I, x.device)
    _activate_and_cast[(_cdiv(pairs, CAST_ROWS), inner_scale.shape[0])](
        both, inner, inner_scale, pairs, I, CAST_ROWS, num_warps=4
    )
    rows = torch.empty((pairs, H), dtype=torch.bfloat16, device=x.device)
    run_grouped(inner, down, inner_scale.T, down_scale, offs, rows, BLOCK_M=BLOCK_M, VARIANT=DOWN, GROUP_M=GROUP_M)
    block = min(1024, max(32, 1 << (H - 1).bit_length()))
    _sum_choices[(M, _cdiv(H, block))](
        rows, slots, weights, out, out.stride(0), H, K, block, num_warps=max(1, block // 256)
    )
