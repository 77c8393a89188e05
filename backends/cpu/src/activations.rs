//! Inputs of matrix products: rows of f32, and the same rows quantized to 15 or to 8 bits per 32 elements.
//!
//! 15 bits, per block of 32: `d = amax / 16256`, `v = round(x / d)` (ties to even). `v = 128 hi + lo` with `hi` in -127..=127 and
//! `lo` in -64..=63, so that unsigned weight codes times either part accumulate in 16 bits without saturation. 8 bits:
//! `d = amax / 127`, `q = round(x / d)` in -127..=127. A block that
//! holds a NaN or an infinity gets a scale that is not finite, so every result it touches is not finite either.

use crate::memory::Scratch;
use crate::table::KernelTable;

/// Largest code of 15 bits.
pub const CODE_MAX: f32 = 16256.0;
/// Largest code of 8 bits.
pub const BYTE_CODE_MAX: f32 = 127.0;
/// Blocks whose largest magnitude is below this become zero; keeps `16256 / amax` finite.
pub const AMAX_MIN: f32 = 1.0e-30;
/// Elements of a block.
pub const BLOCK: usize = 32;

/// A block for GEMV: the high and low parts apart.
#[derive(Debug, Clone, Copy, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct SplitBlock {
    /// High parts.
    pub hi: [i8; 32],
    /// Low parts.
    pub lo: [i8; 32],
    /// Scale.
    pub d: f32,
    /// Scale times the sum of the codes: factor of a weight block's minimum.
    pub s: f32,
    /// Start values that centre codes at 16, for `hi` and `lo`: two i16, each `-16 ×` the sum of the elements that the same
    /// half of each word of four meets.
    pub centre16: [[i16; 2]; 2],
    /// Start values that centre codes at 32, for each half block: `[hi, lo]` of elements 0–15, then of 16–31.
    pub centre32: [[[i16; 2]; 2]; 2],
}

/// A block for GEMM and for byte weights: 16-bit codes.
#[derive(Debug, Clone, Copy, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct WideBlock {
    /// Codes.
    pub v: [i16; 32],
    /// Scale.
    pub d: f32,
    /// Scale times the sum of the codes.
    pub s: f32,
    /// Keeps blocks at multiples of 16 bytes.
    pub reserved: [f32; 2],
}

/// A block of 8-bit codes, for GEMV and GEMM.
#[derive(Debug, Clone, Copy, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct ByteBlock {
    /// Codes.
    pub q: [i8; 32],
    /// Scale.
    pub d: f32,
    /// Scale times the sum of the codes.
    pub s: f32,
    /// Start values that centre weight codes at 8: as [`SplitBlock::centre16`], of half the size.
    pub centre8: [i16; 2],
    /// Start values that centre weight codes at 16.
    pub centre16: [i16; 2],
    /// Start values that centre weight codes at 32, of elements 0–15, then of 16–31.
    pub centre32: [[i16; 2]; 2],
    /// Keeps blocks at cache lines.
    pub reserved: [u32; 2],
}

const _: () = assert!(size_of::<SplitBlock>() == 96 && size_of::<WideBlock>() == 80 && size_of::<ByteBlock>() == 64);

/// How finely the inputs of products are quantized.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Precision {
    /// 15 bits: near-exact.
    #[default]
    Bits15,
    /// 8 bits, but 15 where weights have 8 bits themselves and the finer input costs nothing.
    Bits8,
}

/// Forms in which a product's kernels want its input.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Forms {
    /// [`SplitBlock`]s.
    pub split: bool,
    /// [`WideBlock`]s.
    pub wide: bool,
    /// [`ByteBlock`]s.
    pub byte: bool,
    /// The f32 rows themselves.
    pub dense: bool,
}

impl Forms {
    /// Both needs.
    #[must_use]
    pub fn or(self, other: Self) -> Self {
        Self {
            split: self.split || other.split,
            wide: self.wide || other.wide,
            byte: self.byte || other.byte,
            dense: self.dense || other.dense,
        }
    }
}

/// The rows of one product's input, in the forms its kernels want. Keeps its memory from call to call.
#[derive(Debug, Default)]
pub struct Activations {
    rows: usize,
    cols: usize,
    forms: Forms,
    precision: Precision,
    split: Scratch,
    wide: Scratch,
    byte: Scratch,
    dense: Scratch,
}

impl Activations {
    /// Empty.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Makes room for `rows` × `cols` in `forms`, which are those of products in `precision`. Contents are undefined until
    /// [`Activations::fill`].
    pub fn reset(&mut self, rows: usize, cols: usize, precision: Precision, forms: Forms) {
        (self.rows, self.cols, self.precision, self.forms) = (rows, cols, precision, forms);
        let blocks = rows * (cols / BLOCK);
        if forms.split {
            self.split.reserve::<SplitBlock>(blocks);
        }
        if forms.wide {
            self.wide.reserve::<WideBlock>(blocks);
        }
        if forms.byte {
            self.byte.reserve::<ByteBlock>(blocks);
        }
        if forms.dense {
            self.dense.reserve::<f32>(rows * cols);
        }
    }

    /// Quantizes all of `x` (rows × cols) on the calling thread.
    ///
    /// # Panics
    /// When `x` is not rows × cols long.
    pub fn fill(&mut self, table: &KernelTable, x: &[f32]) {
        let (rows, cols) = (self.rows, self.cols);
        assert_eq!(x.len(), rows * cols);
        let writer = self.writer();
        for row in 0..rows {
            // SAFETY: one row after the other, each in range.
            #[allow(unsafe_code, reason = "rows are disjoint")]
            unsafe {
                writer.row(table, row, &x[row * cols..(row + 1) * cols]);
            }
        }
    }

    /// Rows.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Elements of a row.
    #[must_use]
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// What products read of it where they have a choice.
    #[must_use]
    pub fn precision(&self) -> Precision {
        self.precision
    }

    /// Forms that are filled.
    #[must_use]
    pub fn forms(&self) -> Forms {
        self.forms
    }

    /// All split blocks, row after row; empty where the form was not asked for.
    #[must_use]
    pub fn split(&self) -> &[SplitBlock] {
        if self.forms.split { self.split.get(self.rows * (self.cols / BLOCK)) } else { &[] }
    }

    /// All wide blocks, row after row; empty where the form was not asked for.
    #[must_use]
    pub fn wide(&self) -> &[WideBlock] {
        if self.forms.wide { self.wide.get(self.rows * (self.cols / BLOCK)) } else { &[] }
    }

    /// All byte blocks, row after row; empty where the form was not asked for.
    #[must_use]
    pub fn byte(&self) -> &[ByteBlock] {
        if self.forms.byte { self.byte.get(self.rows * (self.cols / BLOCK)) } else { &[] }
    }

    /// All f32 rows; empty where the form was not asked for.
    #[must_use]
    pub fn dense(&self) -> &[f32] {
        if self.forms.dense { self.dense.get(self.rows * self.cols) } else { &[] }
    }

    /// Write access by rows, for several threads.
    pub(crate) fn writer(&mut self) -> ActivationWriter<'_> {
        let (rows, cols) = (self.rows, self.cols);
        let blocks = rows * (cols / BLOCK);
        ActivationWriter {
            rows,
            cols,
            split: if self.forms.split { self.split.get_mut(blocks).as_mut_ptr() } else { std::ptr::null_mut() },
            wide: if self.forms.wide { self.wide.get_mut(blocks).as_mut_ptr() } else { std::ptr::null_mut() },
            byte: if self.forms.byte { self.byte.get_mut(blocks).as_mut_ptr() } else { std::ptr::null_mut() },
            dense: if self.forms.dense { self.dense.get_mut(rows * cols).as_mut_ptr() } else { std::ptr::null_mut() },
            _borrow: std::marker::PhantomData,
        }
    }
}

/// Write access to [`Activations`] by disjoint rows.
pub(crate) struct ActivationWriter<'a> {
    rows: usize,
    cols: usize,
    split: *mut SplitBlock,
    wide: *mut WideBlock,
    byte: *mut ByteBlock,
    dense: *mut f32,
    _borrow: std::marker::PhantomData<&'a mut Activations>,
}

// SAFETY: stands for an exclusive borrow; threads write disjoint rows by the contract of `row`.
#[allow(unsafe_code, reason = "shared between the threads of one region")]
unsafe impl Sync for ActivationWriter<'_> {}

impl ActivationWriter<'_> {
    /// Fills row `row` from `x` in every form.
    ///
    /// # Safety
    /// No other thread fills the same row at the same time.
    #[allow(unsafe_code, reason = "raw rows, for several threads")]
    pub(crate) unsafe fn row(&self, table: &KernelTable, row: usize, x: &[f32]) {
        assert!(row < self.rows && x.len() == self.cols);
        let blocks = self.cols / BLOCK;
        if !self.split.is_null() {
            // SAFETY: row `row` of the split blocks lies in its allocation and is this thread's own.
            let out = unsafe { std::slice::from_raw_parts_mut(self.split.add(row * blocks), blocks) };
            table.quantize_split(x, out);
        }
        if !self.wide.is_null() {
            // SAFETY: as above, of the wide blocks.
            let out = unsafe { std::slice::from_raw_parts_mut(self.wide.add(row * blocks), blocks) };
            table.quantize_wide(x, out);
        }
        if !self.byte.is_null() {
            // SAFETY: as above, of the byte blocks.
            let out = unsafe { std::slice::from_raw_parts_mut(self.byte.add(row * blocks), blocks) };
            table.quantize_byte(x, out);
        }
        if !self.dense.is_null() {
            // SAFETY: as above, of the f32 rows.
            unsafe { std::slice::from_raw_parts_mut(self.dense.add(row * self.cols), self.cols) }.copy_from_slice(x);
        }
    }
}

/// Quantizes one block to 15 bits; the scalar model of the vector quantizers.
#[must_use]
pub fn quantize_block(x: &[f32; BLOCK]) -> WideBlock {
    let (v, d, s) = quantize(x, CODE_MAX);
    WideBlock { v, d, s, reserved: [0.0; 2] }
}

/// Codes up to `largest`, scale, and scale times the sum of the codes.
fn quantize(x: &[f32; BLOCK], largest: f32) -> ([i16; BLOCK], f32, f32) {
    let amax_bits = x.iter().map(|x| x.to_bits() & 0x7FFF_FFFF).max().unwrap_or(0);
    let amax = f32::from_bits(amax_bits);
    if amax_bits < AMAX_MIN.to_bits() {
        return ([0; BLOCK], 0.0, 0.0);
    }
    let inverse = largest / amax;
    let d = amax / largest;
    let codes = x.map(|x| (x * inverse).round_ties_even() as i16);
    let sum: i32 = codes.iter().map(|&code| i32::from(code)).sum();
    (codes, d, d * sum as f32)
}

/// `-centre ×` the sums of elements `from..to` that each half of a word of four meets.
fn centred(codes: &[i8; BLOCK], from: usize, to: usize, centre: i16) -> [i16; 2] {
    std::array::from_fn(|half| {
        let words = codes[from..to].chunks_exact(4);
        -centre * words.map(|word| i16::from(word[2 * half]) + i16::from(word[2 * half + 1])).sum::<i16>()
    })
}

/// The split form of a block.
#[must_use]
pub fn split_block(wide: &WideBlock) -> SplitBlock {
    let hi: [i8; 32] = wide.v.map(|v| ((i32::from(v) + 64) >> 7) as i8);
    let lo: [i8; 32] = std::array::from_fn(|k| (i32::from(wide.v[k]) - 128 * i32::from(hi[k])) as i8);
    SplitBlock {
        hi,
        lo,
        d: wide.d,
        s: wide.s,
        centre16: [centred(&hi, 0, 32, 16), centred(&lo, 0, 32, 16)],
        centre32: [
            [centred(&hi, 0, 16, 32), centred(&lo, 0, 16, 32)],
            [centred(&hi, 16, 32, 32), centred(&lo, 16, 32, 32)],
        ],
    }
}

/// Quantizes one block to 8 bits; the scalar model of the vector quantizers.
#[must_use]
pub fn quantize_byte_block(x: &[f32; BLOCK]) -> ByteBlock {
    let (codes, d, s) = quantize(x, BYTE_CODE_MAX);
    let q = codes.map(|code| code as i8);
    ByteBlock {
        q,
        d,
        s,
        centre8: centred(&q, 0, 32, 8),
        centre16: centred(&q, 0, 32, 16),
        centre32: [centred(&q, 0, 16, 32), centred(&q, 16, 32, 32)],
        reserved: [0; 2],
    }
}

pub(crate) mod portable {
    use super::{BLOCK, ByteBlock, SplitBlock, WideBlock, quantize_block, quantize_byte_block, split_block};

    pub(crate) fn quantize_split(x: &[f32], out: &mut [SplitBlock]) {
        for (x, out) in x.as_chunks::<BLOCK>().0.iter().zip(out) {
            *out = split_block(&quantize_block(x));
        }
    }

    pub(crate) fn quantize_wide(x: &[f32], out: &mut [WideBlock]) {
        for (x, out) in x.as_chunks::<BLOCK>().0.iter().zip(out) {
            *out = quantize_block(x);
        }
    }

    pub(crate) fn quantize_byte(x: &[f32], out: &mut [ByteBlock]) {
        for (x, out) in x.as_chunks::<BLOCK>().0.iter().zip(out) {
            *out = quantize_byte_block(x);
        }
    }
}

#[cfg(target_arch = "x86_64")]
pub(crate) mod avx2 {
    #![allow(unsafe_code, reason = "vector loads and stores")]

    use super::{AMAX_MIN, BLOCK, BYTE_CODE_MAX, ByteBlock, CODE_MAX, SplitBlock, WideBlock};
    use std::arch::x86_64::*;

    /// Two vectors of 16 codes, in order, with scale and sum.
    struct Codes {
        v: [__m256i; 2],
        d: f32,
        s: f32,
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn quantize(x: &[f32; BLOCK], largest: f32) -> Codes {
        let x: [__m256; 4] = std::array::from_fn(|i| {
            // SAFETY: eight elements from 8 i lie in the block.
            unsafe { _mm256_loadu_ps(x.as_ptr().add(8 * i)) }
        });
        // Magnitudes compare as integers; a NaN is the largest.
        let magnitude = _mm256_set1_epi32(0x7FFF_FFFF);
        let a: [__m256i; 4] = std::array::from_fn(|i| _mm256_and_si256(_mm256_castps_si256(x[i]), magnitude));
        let max = _mm256_max_epi32(_mm256_max_epi32(a[0], a[1]), _mm256_max_epi32(a[2], a[3]));
        let max = _mm_max_epi32(_mm256_castsi256_si128(max), _mm256_extracti128_si256(max, 1));
        let max = _mm_max_epi32(max, _mm_shuffle_epi32(max, 0b01_00_11_10));
        let max = _mm_max_epi32(max, _mm_shuffle_epi32(max, 0b10_11_00_01));
        let amax_bits = _mm_cvtsi128_si32(max).cast_unsigned();
        if amax_bits < AMAX_MIN.to_bits() {
            return Codes { v: [_mm256_setzero_si256(); 2], d: 0.0, s: 0.0 };
        }
        let amax = f32::from_bits(amax_bits);
        let inverse = _mm256_set1_ps(largest / amax);
        let q: [__m256i; 4] = std::array::from_fn(|i| _mm256_cvtps_epi32(_mm256_mul_ps(x[i], inverse)));
        let sum = _mm256_add_epi32(_mm256_add_epi32(q[0], q[1]), _mm256_add_epi32(q[2], q[3]));
        let sum = _mm_add_epi32(_mm256_castsi256_si128(sum), _mm256_extracti128_si256(sum, 1));
        let sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0b01_00_11_10));
        let sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0b10_11_00_01));
        let d = amax / largest;
        let pack = |a, b| _mm256_permute4x64_epi64(_mm256_packs_epi32(a, b), 0b11_01_10_00);
        Codes { v: [pack(q[0], q[1]), pack(q[2], q[3])], d, s: d * _mm_cvtsi128_si32(sum) as f32 }
    }

    /// # Safety
    /// The processor has AVX2.
    #[target_feature(enable = "avx2,fma,f16c")]
    pub(crate) unsafe fn quantize_wide(x: &[f32], out: &mut [WideBlock]) {
        for (x, out) in x.as_chunks::<BLOCK>().0.iter().zip(out) {
            let codes = quantize(x, CODE_MAX);
            // SAFETY: 32 i16 are 64 bytes.
            unsafe {
                _mm256_storeu_si256(out.v.as_mut_ptr().cast(), codes.v[0]);
                _mm256_storeu_si256(out.v.as_mut_ptr().add(16).cast(), codes.v[1]);
            }
            (out.d, out.s) = (codes.d, codes.s);
        }
    }

    /// # Safety
    /// The processor has AVX2.
    #[target_feature(enable = "avx2,fma,f16c")]
    pub(crate) unsafe fn quantize_split(x: &[f32], out: &mut [SplitBlock]) {
        let round = _mm256_set1_epi16(64);
        for (x, out) in x.as_chunks::<BLOCK>().0.iter().zip(out) {
            let codes = quantize(x, CODE_MAX);
            let hi = codes.v.map(|v| _mm256_srai_epi16(_mm256_add_epi16(v, round), 7));
            let lo: [__m256i; 2] = std::array::from_fn(|i| _mm256_sub_epi16(codes.v[i], _mm256_slli_epi16(hi[i], 7)));
            // SAFETY: each part is 32 bytes.
            unsafe {
                _mm256_storeu_si256(out.hi.as_mut_ptr().cast(), narrow(hi));
                _mm256_storeu_si256(out.lo.as_mut_ptr().cast(), narrow(lo));
            }
            (out.d, out.s) = (codes.d, codes.s);
            out.centre32 = std::array::from_fn(|i| [centre32(hi[i]), centre32(lo[i])]);
            out.centre16 = std::array::from_fn(|part| {
                std::array::from_fn(|half| {
                    let sum = i32::from(out.centre32[0][part][half]) + i32::from(out.centre32[1][part][half]);
                    (sum / 2) as i16
                })
            });
        }
    }

    /// # Safety
    /// The processor has AVX2.
    #[target_feature(enable = "avx2,fma,f16c")]
    pub(crate) unsafe fn quantize_byte(x: &[f32], out: &mut [ByteBlock]) {
        for (x, out) in x.as_chunks::<BLOCK>().0.iter().zip(out) {
            let codes = quantize(x, BYTE_CODE_MAX);
            // SAFETY: 32 codes are 32 bytes.
            unsafe { _mm256_storeu_si256(out.q.as_mut_ptr().cast(), narrow(codes.v)) };
            (out.d, out.s, out.reserved) = (codes.d, codes.s, [0; 2]);
            out.centre32 = [centre32(codes.v[0]), centre32(codes.v[1])];
            out.centre16 = std::array::from_fn(|half| {
                ((i32::from(out.centre32[0][half]) + i32::from(out.centre32[1][half])) / 2) as i16
            });
            out.centre8 = out.centre16.map(|centre| centre / 2);
        }
    }

    /// 32 codes as bytes.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn narrow(v: [__m256i; 2]) -> __m256i {
        _mm256_permute4x64_epi64(_mm256_packs_epi16(v[0], v[1]), 0b11_01_10_00)
    }

    /// `-32 ×` the sums over each half of the words of four, of 16 codes.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn centre32(v: __m256i) -> [i16; 2] {
        let pairs = _mm256_madd_epi16(v, _mm256_set1_epi16(-32));
        let sum = _mm_add_epi32(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
        let sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0b01_00_11_10));
        [_mm_cvtsi128_si32(sum) as i16, _mm_extract_epi32(sum, 1) as i16]
    }
}
