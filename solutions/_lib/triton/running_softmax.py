"""A block of queries that streams keys with a running softmax, for scores to which numbers are added."""

import triton
import triton.language as tl


@triton.jit
def load_queries(ptr, rows, cols, row_stride, S, D: tl.constexpr):
    """Load [rows, columns] of one head; zeros past S and past D. ``rows`` int64."""
    return tl.load(
        ptr + rows[:, None] * row_stride + cols[None, :], mask=(rows[:, None] < S) & (cols[None, :] < D), other=0.0
    )


@triton.jit
def load_keys(k_ptr, v_ptr, keys, cols, k_stride, v_stride, L, D: tl.constexpr):
    """Load keys [columns, keys] and values [keys, columns] of one head; zeros past L and past D. ``keys`` int64."""
    k = tl.load(
        k_ptr + keys[None, :] * k_stride + cols[:, None], mask=(keys[None, :] < L) & (cols[:, None] < D), other=0.0
    )
    v = tl.load(
        v_ptr + keys[:, None] * v_stride + cols[None, :], mask=(keys[:, None] < L) & (cols[None, :] < D), other=0.0
    )
    return k, v


@triton.jit
def load_added(ptr, rows, keys, row_stride, key_stride, S, L):
    """Load the numbers that are added to scores [rows, keys] in float32; -inf past S and past L."""
    inside = (rows[:, None] < S) & (keys[None, :] < L)
    places = rows[:, None] * row_stride + keys[None, :] * key_stride
    return tl.load(ptr + places, mask=inside, other=float("-inf")).to(tl.float32)


@triton.jit
def add_values(scores, v, acc, sums, largest):
    """Add values [keys, columns] with the weights of scores [rows, keys] to the running softmax; return it."""
    new_largest = tl.maximum(largest, tl.max(scores, 1))
    # A row that has seen only -inf so far has no largest score, and -inf - -inf is no number.
    top = tl.where(new_largest == float("-inf"), 0.0, new_largest)
    weights = tl.exp(scores - top[:, None])
    shrink = tl.exp(largest - top)
    acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return acc, sums * shrink + tl.sum(weights, 1), new_largest


@triton.jit
def store_means(ptr, rows, cols, row_stride, acc, sums, S, D: tl.constexpr):
    """Store the weighted means of values [rows, columns] of one head; zeros for a row without a weight."""
    means = acc / tl.where(sums > 0, sums, 1.0)[:, None]
    inside = (rows[:, None] < S) & (cols[None, :] < D)
    tl.store(ptr + rows[:, None] * row_stride + cols[None, :], means.to(ptr.dtype.element_ty), mask=inside)
