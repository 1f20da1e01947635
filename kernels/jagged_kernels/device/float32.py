"""Products of float32 on tensor cores: "bf16x6", as Triton calls it, in fewer instructions.

Each number is the sum of three bfloat16, and of their nine products the three smallest, below
float32's rounding, are left out. Triton rounds numbers one by one, with an instruction of a quarter
of the speed; here they are rounded in pairs, to the same parts.

Of inf, what is left behind the first part is NaN. So the products with the other parts have a sum
of their own, which counts where it is a number: where it is none, the first parts say all.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Two numbers at a time, $3 and $4: their parts in the lower and the upper halves of $0, $1 and $2.
_SPLIT = tl.constexpr("""{
.reg .b32 lower, upper, first, second;
cvt.rn.bf16x2.f32 $0, $4, $3;
shl.b32 lower, $0, 16;
and.b32 upper, $0, 0xffff0000;
sub.f32 first, $3, lower;
sub.f32 second, $4, upper;
cvt.rn.bf16x2.f32 $1, second, first;
shl.b32 lower, $1, 16;
and.b32 upper, $1, 0xffff0000;
sub.f32 lower, first, lower;
sub.f32 upper, second, upper;
cvt.rn.bf16x2.f32 $2, upper, lower;
}""")


@triton.jit
def dot(a, b, PRECISION: tl.constexpr):
    """a @ b, in float32."""
    return dot_factors(factor(a, PRECISION), factor(b, PRECISION), PRECISION)


@triton.jit
def factor(x, PRECISION: tl.constexpr):
    """x as `dot_factors` takes it, for several products: what is split is split once."""
    if PRECISION == "bf16x6":
        x = float32_parts(x)
    return x


@triton.jit
def transposed(x, PRECISION: tl.constexpr):
    """The factor x.T of a factor x."""
    PARTS: tl.constexpr = PRECISION == "bf16x6"
    return (tl.trans(x[0]), tl.trans(x[1]), tl.trans(x[2])) if PARTS else tl.trans(x)


@triton.jit
def dot_factors(a, b, PRECISION: tl.constexpr, MIRRORED: tl.constexpr = False):
    """a @ b of factors, in float32; MIRRORED: to the bit the transposed b.T @ a.T."""
    if PRECISION == "bf16x6":
        rest = add_rest(None, a, b, MIRRORED)
        product = tl.dot(a[0], b[0], tl.where(rest == rest, rest, 0.0))
    else:
        product = tl.dot(a, b, input_precision=PRECISION)
    return product


@triton.jit
def add_rest(rest, a_parts, b_parts, MIRRORED: tl.constexpr = False):
    """rest + the five products beside that of the first parts, small ones first; MIRRORED: in the
    order in which those of b.T and a.T are."""
    a_high, a_middle, a_low = a_parts
    b_high, b_middle, b_low = b_parts
    rest = tl.dot(a_middle, b_middle, rest)
    if MIRRORED:
        rest = tl.dot(a_high, b_low, rest)
        rest = tl.dot(a_low, b_high, rest)
        rest = tl.dot(a_high, b_middle, rest)
        rest = tl.dot(a_middle, b_high, rest)
    else:
        rest = tl.dot(a_low, b_high, rest)
        rest = tl.dot(a_high, b_low, rest)
        rest = tl.dot(a_middle, b_high, rest)
        rest = tl.dot(a_high, b_middle, rest)
    return rest


@triton.jit
def float32_parts(x):
    """Three bfloat16 whose sum is the float32 x, each the nearest to what is left."""
    return tl.inline_asm_elementwise(
        _SPLIT,
        "=&r,=&r,=r,r,r",
        [x],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=2,
    )
