"""Products of float32 factors on the tensor cores, Triton: a factor is split into three of bfloat16, which have its range too.

``delta_triton`` has a copy of these functions. Its file stays as it was measured.
"""

import triton
import triton.language as tl


@triton.jit
def split(x):
    """x in float32 -> two of bfloat16 whose sum has 16 of its bits."""
    high = x.to(tl.bfloat16)
    return high, (x - high.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def split_all(x):
    """x in float32 -> three of bfloat16 whose sum has all of its bits."""
    high = x.to(tl.bfloat16)
    middle, low = split(x - high.to(tl.float32))
    return high, middle, low


@triton.jit
def add_parts(high, middle, low, x_high, x_middle, x_low, acc):
    """Return acc + (high + middle + low) (x_high + x_middle + x_low) in float32, without products below 2^-24."""
    acc = tl.dot(low, x_high, acc)
    acc = tl.dot(middle, x_middle, acc)
    acc = tl.dot(high, x_low, acc)
    acc = tl.dot(middle, x_high, acc)
    acc = tl.dot(high, x_middle, acc)
    return tl.dot(high, x_high, acc)


@triton.jit
def add_product(x, y, acc, ROUNDED: tl.constexpr):
    """Return acc + x y in float32, of x and y in float32; ROUNDED: 16 bits of each are enough."""
    high, middle, low = split_all(x)
    y_high, y_middle, y_low = split_all(y)
    if ROUNDED:
        acc = tl.dot(middle, y_high, acc)
        acc = tl.dot(high, y_middle, acc)
        acc = tl.dot(high, y_high, acc)
    else:
        acc = add_parts(high, middle, low, y_high, y_middle, y_low, acc)
    return acc


@triton.jit
def _join(T, A, rows, cols, SIZE: tl.constexpr):
    """T: the inverse of the blocks of SIZE on the diagonal of I + A -> that of the blocks of twice the size."""
    below = (rows[:, None] // (2 * SIZE) == cols[None, :] // (2 * SIZE)) & (
        rows[:, None] // SIZE > cols[None, :] // SIZE
    )
    half = T.to(tl.float16)
    corner = tl.dot(half, tl.where(below, A, 0.0).to(tl.float16))
    return T - tl.dot(corner.to(tl.float16), half)


@triton.jit
def inverse_of_unit_lower(A, rows, cols, SIZE: tl.constexpr):
    """Return (I + A)^-1 of A [SIZE, SIZE] float32, which is strictly lower; SIZE is 32 or 64.

    No element of the inverse of a block on the diagonal may exceed one much, since float16 holds it: that is so for the delta
    rule, of keys of norm one and rates of at most one. With E = I - (I + A) T, which is about 2^-8, T (I + E + E^2) then has
    nearly the bits of float32.
    """
    identity = tl.where(rows[:, None] == cols[None, :], 1.0, 0.0)
    pairs = (rows[:, None] // 2 == cols[None, :] // 2) & (rows[:, None] > cols[None, :])
    T = identity - tl.where(pairs, A, 0.0)
    T = _join(T, A, rows, cols, 2)
    T = _join(T, A, rows, cols, 4)
    T = _join(T, A, rows, cols, 8)
    T = _join(T, A, rows, cols, 16)
    if SIZE == 64:
        T = _join(T, A, rows, cols, 32)
    rough = T.to(tl.bfloat16)
    high, middle, low = split_all(A)
    product = tl.dot(high, rough, tl.dot(middle, rough, tl.dot(low, rough, tl.zeros_like(A))))
    rest = identity - rough.to(tl.float32) - product
    high = rest.to(tl.bfloat16)
    rest = tl.dot(high, high, rest)
    high, low = split(rest)
    return tl.dot(rough, high, tl.dot(rough, low, rough.to(tl.float32)))
