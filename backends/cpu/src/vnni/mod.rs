//! Products by the instructions that multiply and add four bytes, or two 16-bit codes, in one step (VNNI).
//!
//! Written once over [`Ops`], 256 bits wide: Zen 4 computes 512 bits in two passes, and the Zen 5 parts that carry an NPU have
//! 256-bit data paths, so wider vectors would gain nothing there. Sums over 32 codes are exact integers as everywhere, so the
//! results have the bits of the portable kernels. The scalar model of [`Ops`] runs in the tests of any processor.
#![allow(unsafe_code, reason = "vector operations through the pointers of a job")]

mod ops;
mod panels;
#[cfg(test)]
mod tests;

pub(crate) use ops::{Avx512Vnni, AvxVnni, Ops};

use crate::activations::{BLOCK, ByteBlock, SplitBlock};
use crate::gemm::{self, PanelJob};
use crate::gemv::{self, GemvJob, MOST_ROWS};
use crate::table::{GemvKernel, PanelKernel};
use npuhal_models::WeightType;

/// Kernels of one instruction set: entry points with its features, over the generic bodies.
macro_rules! kernels {
    ($name:ident, $ops:ty, $features:literal) => {
        /// Kernels of one instruction set.
        pub(crate) mod $name {
            use super::*;

            pub(crate) fn gemv(weight_type: WeightType) -> GemvKernel {
                if blocked(weight_type) { split } else { gemv::avx2::kernel_without_asking(weight_type) }
            }

            pub(crate) fn byte_gemv(weight_type: WeightType) -> GemvKernel {
                if blocked(weight_type) { bytes } else { gemv::bytes::byte_kernel(weight_type) }
            }

            pub(crate) fn panel(weight_type: WeightType) -> PanelKernel {
                let quantized = crate::packed::decode::is_quantized(weight_type);
                if quantized { word_panel } else { gemm::avx2::kernel(weight_type) }
            }

            pub(crate) fn byte_panel(weight_type: WeightType) -> PanelKernel {
                if blocked(weight_type) { byte_panel_of } else { gemm::bytes::byte_kernel(weight_type) }
            }

            /// # Safety
            /// The processor has the instruction set; the job's pointers cover its groups, its input rows and eight results a
            /// group and row.
            #[target_feature(enable = $features)]
            unsafe fn split(job: &GemvJob) {
                // SAFETY: the caller's promise.
                unsafe { super::product::<$ops, SplitBlock>(job, job.split) };
            }

            /// # Safety
            /// As [`split`].
            #[target_feature(enable = $features)]
            unsafe fn bytes(job: &GemvJob) {
                // SAFETY: the caller's promise.
                unsafe { super::product::<$ops, ByteBlock>(job, job.byte) };
            }

            /// # Safety
            /// As [`split`], of input rows and a panel's results.
            #[target_feature(enable = $features)]
            unsafe fn word_panel(job: &PanelJob<'_>, scratch: &mut [u8]) {
                // SAFETY: the caller's promise.
                unsafe { super::panels::words::<$ops>(job, scratch) };
            }

            /// # Safety
            /// As [`word_panel`].
            #[target_feature(enable = $features)]
            unsafe fn byte_panel_of(job: &PanelJob<'_>, scratch: &mut [u8]) {
                // SAFETY: the caller's promise.
                unsafe { super::panels::bytes::<$ops>(job, scratch) };
            }
        }
    };
}

kernels!(avx_vnni, AvxVnni, "avx2,fma,f16c,avxvnni");
kernels!(avx512_vnni, Avx512Vnni, "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni");

/// Whether [`product`] knows the type. Weights of 8 bits are limited by memory and stay with the AVX2 kernels.
const fn blocked(weight_type: WeightType) -> bool {
    crate::packed::decode::takes_bytes(weight_type)
}

/// An array of vectors, filled by a plain loop: a closure would be a function without the instruction set's features.
macro_rules! array {
    ($len:literal, $j:ident => $value:expr) => {{
        let mut array = [O::splat(0); $len];
        for $j in 0..$len {
            array[$j] = $value;
        }
        array
    }};
}

/// 32 input features of a group.
struct Weights<O: Ops> {
    /// Step vectors of unsigned codes.
    steps: [O::Int; 8],
    /// What codes are centred at.
    centre: i32,
    scale: O::Float,
    /// Integer scales of each half, in 32 bits.
    factors: Option<[O::Int; 2]>,
    /// Whether 8-bit inputs keep the sums of the halves apart.
    halves: bool,
    minimum: Option<O::Float>,
}

/// A block of a product's input.
trait Input: Copy {
    /// `acc + weights · self`, with the operations and rounding of `gemv::portable`.
    ///
    /// # Safety
    /// The processor has the instructions of `O`.
    unsafe fn accumulate<O: Ops>(&self, weights: &Weights<O>, acc: O::Float) -> O::Float;
}

/// `start + Σ steps[j] · codes[4j..]` over steps `FROM..TO`.
///
/// # Safety
/// The processor has the instructions of `O`.
#[inline(always)]
unsafe fn dot<O: Ops, const FROM: usize, const TO: usize>(start: i32, steps: &[O::Int; 8], codes: &[i8; 32]) -> O::Int {
    let words: &[[i8; 4]; 8] = bytemuck::cast_ref(codes);
    // SAFETY: the caller's promise.
    unsafe {
        let mut sum = O::splat(start);
        for j in FROM..TO {
            sum = O::dot_bytes(sum, steps[j], O::splat(i32::from_le_bytes(words[j].map(i8::cast_unsigned))));
        }
        sum
    }
}

fn both(start: [i16; 2]) -> i32 {
    i32::from(start[0]) + i32::from(start[1])
}

impl Input for SplitBlock {
    #[inline(always)]
    unsafe fn accumulate<O: Ops>(&self, weights: &Weights<O>, acc: O::Float) -> O::Float {
        let parts = [&self.hi, &self.lo];
        // SAFETY: the caller's promise.
        unsafe {
            let sums = match weights.factors {
                None => array!(2, part => {
                    let start = both(self.centre16[part]) * weights.centre / 16;
                    dot::<O, 0, 8>(start, &weights.steps, parts[part])
                }),
                Some(factors) => array!(2, part => {
                    let start = self.centre32.map(|half| both(half[part]) * weights.centre / 32);
                    let first = dot::<O, 0, 4>(start[0], &weights.steps, parts[part]);
                    let second = dot::<O, 4, 8>(start[1], &weights.steps, parts[part]);
                    O::add(O::multiply(first, factors[0]), O::multiply(second, factors[1]))
                }),
            };
            let sum = O::add(O::multiply(sums[0], O::splat(128)), sums[1]);
            let acc = O::mul_add(O::to_float(sum), O::mul(weights.scale, O::splat_float(self.d)), acc);
            match weights.minimum {
                None => acc,
                Some(minimum) => O::mul_add(minimum, O::splat_float(self.s), acc),
            }
        }
    }
}

impl Input for ByteBlock {
    #[inline(always)]
    unsafe fn accumulate<O: Ops>(&self, weights: &Weights<O>, acc: O::Float) -> O::Float {
        // SAFETY: the caller's promise.
        unsafe {
            let d = O::splat_float(self.d);
            let scales = match weights.factors {
                None => [O::mul(weights.scale, d); 2],
                Some([first, second]) => [
                    O::mul(O::mul(weights.scale, O::to_float(first)), d),
                    O::mul(O::mul(weights.scale, O::to_float(second)), d),
                ],
            };
            let mut acc = acc;
            if weights.halves {
                let start = self.centre32.map(|half| both(half) * weights.centre / 32);
                acc = O::mul_add(O::to_float(dot::<O, 0, 4>(start[0], &weights.steps, &self.q)), scales[0], acc);
                acc = O::mul_add(O::to_float(dot::<O, 4, 8>(start[1], &weights.steps, &self.q)), scales[1], acc);
            } else {
                let start = both(self.centre16) * weights.centre / 16;
                acc = O::mul_add(O::to_float(dot::<O, 0, 8>(start, &weights.steps, &self.q)), scales[0], acc);
            }
            match weights.minimum {
                None => acc,
                Some(minimum) => O::mul_add(minimum, O::splat_float(self.s), acc),
            }
        }
    }
}

/// All groups of a type whose block takes `$bytes` in a group and has `$subs` blocks of 32; `$weights` reads sub-block `$sub` of
/// the block at `$at`.
macro_rules! groups {
    ($job:ident, $input:ident, $subs:literal, $bytes:literal, $at:ident, $sub:ident => $weights:expr) => {{
        let rows = if MOST == 1 { 1 } else { $job.rows.min(MOST) };
        let mut $at = $job.groups;
        for index in 0..$job.count {
            let mut sums = [O::splat_float(0.0); MOST];
            for block in 0..$job.cols / ($subs * BLOCK) {
                for $sub in 0..$subs {
                    let x = $input.add(block * $subs + $sub);
                    let weights = $weights;
                    for row in 0..rows {
                        let sum = &mut *sums.as_mut_ptr().add(row);
                        *sum = (*x.add(row * ($job.cols / BLOCK))).accumulate(&weights, *sum);
                    }
                }
                $at = $at.add($bytes);
            }
            for row in 0..rows {
                O::store(sums[row], $job.out.add(row * $job.stride + 8 * index));
            }
        }
    }};
}

/// A job's groups times its input rows, whose blocks start at `input`.
///
/// # Safety
/// The processor has the instructions of `O`; the job's pointers cover its groups, its input rows and eight results a group and
/// row.
#[inline(always)]
unsafe fn product<O: Ops, I: Input>(job: &GemvJob, input: *const I) {
    // SAFETY: the caller's promise.
    unsafe { if job.rows == 1 { product_of::<O, I, 1>(job, input) } else { product_of::<O, I, MOST_ROWS>(job, input) } }
}

/// As [`product`], of at most `MOST` input rows.
///
/// # Safety
/// As [`product`].
#[inline(always)]
unsafe fn product_of<O: Ops, I: Input, const MOST: usize>(job: &GemvJob, input: *const I) {
    // SAFETY: block by block inside the groups and the input rows, as promised by the caller; eight results a group and row.
    unsafe {
        match job.weight_type {
            WeightType::Q4_0 => groups!(job, input, 1, 144, at, sub => {
                of_32::<O>(nibbles::<O>(at.add(16)), 8, at, false)
            }),
            WeightType::Q4_1 => groups!(job, input, 1, 160, at, sub => {
                of_32::<O>(nibbles::<O>(at.add(32)), 0, at, true)
            }),
            WeightType::Q5_0 => groups!(job, input, 1, 176, at, sub => {
                of_32::<O>(fives::<O>(at.add(16)), 16, at, false)
            }),
            WeightType::Q5_1 => groups!(job, input, 1, 192, at, sub => {
                Weights::<O> { halves: true, ..of_32::<O>(fives::<O>(at.add(32)), 0, at, true) }
            }),
            WeightType::Q4K => groups!(job, input, 8, 1184, at, sub => {
                of_k::<O>(at, sub, half_nibbles::<O>(at.add(160 + 256 * (sub / 2)), sub % 2), false)
            }),
            WeightType::Q5K => groups!(job, input, 8, 1440, at, sub => {
                let nibbles = half_nibbles::<O>(at.add(160 + 256 * (sub / 2)), sub % 2);
                let bits = O::load(at.add(1184 + 32 * sub));
                let steps = array!(8, j => {
                    let bit = O::and(O::shift_right(bits, j as u32), O::splat_bytes(1));
                    O::or(nibbles[j], O::shift_left(bit, 4))
                });
                of_k::<O>(at, sub, steps, true)
            }),
            _ => groups!(job, input, 8, 1680, at, sub => {
                let [a, b, c, d] = sixes::<O>(at.add(144 + 192 * sub));
                let [e, f, g, h] = sixes::<O>(at.add(240 + 192 * sub));
                let factors = [O::widen_signed(at.add(16 + 16 * sub)), O::widen_signed(at.add(24 + 16 * sub))];
                Weights::<O> {
                    steps: [a, b, c, d, e, f, g, h],
                    centre: 32,
                    scale: O::halves(at),
                    factors: Some(factors),
                    halves: true,
                    minimum: None,
                }
            }),
        }
    }
}

/// A block of a type with 32 input features.
///
/// # Safety
/// The processor has the instructions of `O`; the block at `at` is readable.
#[inline(always)]
unsafe fn of_32<O: Ops>(steps: [O::Int; 8], centre: i32, at: *const u8, minimum: bool) -> Weights<O> {
    // SAFETY: the caller's promise.
    unsafe {
        let scale = O::halves(at);
        let minimum = if minimum { Some(O::halves(at.add(16))) } else { None };
        Weights { steps, centre, scale, factors: None, halves: false, minimum }
    }
}

/// A sub-block of Q4_K or Q5_K.
///
/// # Safety
/// The processor has the instructions of `O`; the block at `at` is readable.
#[inline(always)]
unsafe fn of_k<O: Ops>(at: *const u8, sub: usize, steps: [O::Int; 8], halves: bool) -> Weights<O> {
    // SAFETY: the caller's promise.
    unsafe {
        let factor = O::widen(at.add(32 + 8 * sub));
        let minimum = O::to_float(O::widen(at.add(96 + 8 * sub)));
        let negated_dmin = O::negate(O::halves(at.add(16)));
        Weights {
            steps,
            centre: 0,
            scale: O::halves(at),
            factors: Some([factor; 2]),
            halves,
            minimum: Some(O::mul(negated_dmin, minimum)),
        }
    }
}

/// Four planes of nibbles as eight step vectors.
///
/// # Safety
/// The processor has the instructions of `O`; 128 bytes are readable.
#[inline(always)]
unsafe fn nibbles<O: Ops>(at: *const u8) -> [O::Int; 8] {
    // SAFETY: the caller's promise.
    unsafe {
        array!(8, j => {
            let plane = O::load(at.add(32 * (j % 4)));
            O::and(if j < 4 { plane } else { O::shift_right(plane, 4) }, O::splat_bytes(15))
        })
    }
}

/// Eight planes of nibbles: the low ones, or the high ones, as step vectors.
///
/// # Safety
/// The processor has the instructions of `O`; 256 bytes are readable.
#[inline(always)]
unsafe fn half_nibbles<O: Ops>(at: *const u8, high: usize) -> [O::Int; 8] {
    // SAFETY: the caller's promise.
    unsafe {
        array!(8, j => {
            let plane = O::load(at.add(32 * j));
            O::and(if high == 0 { plane } else { O::shift_right(plane, 4) }, O::splat_bytes(15))
        })
    }
}

/// Five planes of 5-bit codes as eight step vectors.
///
/// # Safety
/// The processor has the instructions of `O`; 160 bytes are readable.
#[inline(always)]
unsafe fn fives<O: Ops>(at: *const u8) -> [O::Int; 8] {
    // SAFETY: the caller's promise.
    unsafe {
        let p = array!(5, plane => O::load(at.add(32 * plane)));
        macro_rules! part {
            ($plane:literal, $shift:literal, $mask:literal) => {
                O::and(O::shift_right(p[$plane], $shift), O::splat_bytes($mask))
            };
        }
        let last = O::or(part!(1, 2, 8), part!(3, 1, 16));
        [
            part!(0, 0, 31),
            part!(1, 0, 31),
            part!(2, 0, 31),
            part!(3, 0, 31),
            part!(4, 0, 31),
            O::or(part!(0, 5, 7), part!(1, 3, 0x18)),
            O::or(part!(2, 5, 7), part!(3, 3, 0x18)),
            O::or(part!(4, 5, 7), last),
        ]
    }
}

/// Three planes of 6-bit codes as four step vectors.
///
/// # Safety
/// The processor has the instructions of `O`; 96 bytes are readable.
#[inline(always)]
unsafe fn sixes<O: Ops>(at: *const u8) -> [O::Int; 4] {
    // SAFETY: the caller's promise.
    unsafe {
        let p = array!(3, plane => O::load(at.add(32 * plane)));
        macro_rules! part {
            ($plane:literal, $shift:literal, $mask:literal) => {
                O::and(O::shift_right(p[$plane], $shift), O::splat_bytes($mask))
            };
        }
        let last = O::or(O::or(part!(0, 2, 0x30), part!(1, 4, 0x0C)), part!(2, 6, 3));
        [part!(0, 0, 63), part!(1, 0, 63), part!(2, 0, 63), last]
    }
}
