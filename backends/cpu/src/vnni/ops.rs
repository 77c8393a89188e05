//! The operations that the kernels are written over: on this processor's registers, and as a scalar model.

use std::arch::x86_64::*;

/// Eight lanes of 32 bits, as integers (or 32 bytes, or 16 words) and as floats.
///
/// Every method has the safety contract that the processor has the implementation's instructions, and pointers cover what is
/// read or written.
#[allow(clippy::missing_safety_doc, reason = "one contract for all, stated above")]
pub(crate) trait Ops: Copy {
    type Int: Copy;
    type Float: Copy;

    /// 32 bytes.
    unsafe fn load(at: *const u8) -> Self::Int;
    unsafe fn splat(value: i32) -> Self::Int;
    unsafe fn splat_bytes(value: u8) -> Self::Int {
        // SAFETY: the trait's contract.
        unsafe { Self::splat(i32::from_le_bytes([value; 4])) }
    }
    unsafe fn and(a: Self::Int, b: Self::Int) -> Self::Int;
    unsafe fn or(a: Self::Int, b: Self::Int) -> Self::Int;
    /// Of 16-bit lanes.
    unsafe fn shift_right(a: Self::Int, bits: u32) -> Self::Int;
    /// Of 16-bit lanes.
    unsafe fn shift_left(a: Self::Int, bits: u32) -> Self::Int;
    /// Of 32-bit lanes.
    unsafe fn add(a: Self::Int, b: Self::Int) -> Self::Int;
    /// Of 32-bit lanes; the low halves of the products.
    unsafe fn multiply(a: Self::Int, b: Self::Int) -> Self::Int;
    /// In each lane: `sum + Σ` of four unsigned bytes times four signed ones.
    unsafe fn dot_bytes(sum: Self::Int, unsigned: Self::Int, signed: Self::Int) -> Self::Int;
    /// In each lane: `sum + Σ` of two signed words times two signed ones.
    unsafe fn dot_words(sum: Self::Int, a: Self::Int, b: Self::Int) -> Self::Int;
    /// Eight unsigned bytes.
    unsafe fn widen(at: *const u8) -> Self::Int;
    /// Eight signed bytes.
    unsafe fn widen_signed(at: *const u8) -> Self::Int;
    /// Eight f16.
    unsafe fn halves(at: *const u8) -> Self::Float;
    /// Eight f32.
    unsafe fn floats(at: *const u8) -> Self::Float;
    unsafe fn splat_float(value: f32) -> Self::Float;
    unsafe fn to_float(a: Self::Int) -> Self::Float;
    unsafe fn negate(a: Self::Float) -> Self::Float;
    unsafe fn mul(a: Self::Float, b: Self::Float) -> Self::Float;
    /// `a · b + c`, rounded once.
    unsafe fn mul_add(a: Self::Float, b: Self::Float, c: Self::Float) -> Self::Float;
    unsafe fn store(a: Self::Float, to: *mut f32);
}

/// 256-bit registers with VNNI in its AVX encoding.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AvxVnni;

/// 256-bit registers with VNNI in its AVX-512 encoding, hence 32 of them.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Avx512Vnni;

macro_rules! registers {
    ($name:ident, $dot_bytes:ident, $dot_words:ident) => {
        #[allow(clippy::undocumented_unsafe_blocks, reason = "the trait's contract covers every intrinsic")]
        impl Ops for $name {
            type Int = __m256i;
            type Float = __m256;

            #[inline(always)]
            unsafe fn load(at: *const u8) -> __m256i {
                unsafe { _mm256_loadu_si256(at.cast()) }
            }
            #[inline(always)]
            unsafe fn splat(value: i32) -> __m256i {
                unsafe { _mm256_set1_epi32(value) }
            }
            #[inline(always)]
            unsafe fn and(a: __m256i, b: __m256i) -> __m256i {
                unsafe { _mm256_and_si256(a, b) }
            }
            #[inline(always)]
            unsafe fn or(a: __m256i, b: __m256i) -> __m256i {
                unsafe { _mm256_or_si256(a, b) }
            }
            #[inline(always)]
            unsafe fn shift_right(a: __m256i, bits: u32) -> __m256i {
                unsafe { _mm256_srl_epi16(a, _mm_cvtsi32_si128(bits.cast_signed())) }
            }
            #[inline(always)]
            unsafe fn shift_left(a: __m256i, bits: u32) -> __m256i {
                unsafe { _mm256_sll_epi16(a, _mm_cvtsi32_si128(bits.cast_signed())) }
            }
            #[inline(always)]
            unsafe fn add(a: __m256i, b: __m256i) -> __m256i {
                unsafe { _mm256_add_epi32(a, b) }
            }
            #[inline(always)]
            unsafe fn multiply(a: __m256i, b: __m256i) -> __m256i {
                unsafe { _mm256_mullo_epi32(a, b) }
            }
            #[inline(always)]
            unsafe fn dot_bytes(sum: __m256i, unsigned: __m256i, signed: __m256i) -> __m256i {
                unsafe { $dot_bytes(sum, unsigned, signed) }
            }
            #[inline(always)]
            unsafe fn dot_words(sum: __m256i, a: __m256i, b: __m256i) -> __m256i {
                unsafe { $dot_words(sum, a, b) }
            }
            #[inline(always)]
            unsafe fn widen(at: *const u8) -> __m256i {
                unsafe { _mm256_cvtepu8_epi32(_mm_loadl_epi64(at.cast())) }
            }
            #[inline(always)]
            unsafe fn widen_signed(at: *const u8) -> __m256i {
                unsafe { _mm256_cvtepi8_epi32(_mm_loadl_epi64(at.cast())) }
            }
            #[inline(always)]
            unsafe fn halves(at: *const u8) -> __m256 {
                unsafe { _mm256_cvtph_ps(_mm_loadu_si128(at.cast())) }
            }
            #[inline(always)]
            unsafe fn floats(at: *const u8) -> __m256 {
                unsafe { _mm256_loadu_ps(at.cast()) }
            }
            #[inline(always)]
            unsafe fn splat_float(value: f32) -> __m256 {
                unsafe { _mm256_set1_ps(value) }
            }
            #[inline(always)]
            unsafe fn to_float(a: __m256i) -> __m256 {
                unsafe { _mm256_cvtepi32_ps(a) }
            }
            #[inline(always)]
            unsafe fn negate(a: __m256) -> __m256 {
                unsafe { _mm256_xor_ps(a, _mm256_set1_ps(-0.0)) }
            }
            #[inline(always)]
            unsafe fn mul(a: __m256, b: __m256) -> __m256 {
                unsafe { _mm256_mul_ps(a, b) }
            }
            #[inline(always)]
            unsafe fn mul_add(a: __m256, b: __m256, c: __m256) -> __m256 {
                unsafe { _mm256_fmadd_ps(a, b, c) }
            }
            #[inline(always)]
            unsafe fn store(a: __m256, to: *mut f32) {
                unsafe { _mm256_storeu_ps(to, a) }
            }
        }
    };
}

registers!(AvxVnni, _mm256_dpbusd_avx_epi32, _mm256_dpwssd_avx_epi32);
registers!(Avx512Vnni, _mm256_dpbusd_epi32, _mm256_dpwssd_epi32);

/// The model of the operations, for tests.
#[cfg(test)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct Scalar;

#[cfg(test)]
impl Scalar {
    fn words(a: [i32; 8]) -> [u16; 16] {
        bytemuck::cast(a)
    }

    fn zip<T: Copy>(a: [T; 8], b: [T; 8], of: impl Fn(T, T) -> T) -> [T; 8] {
        std::array::from_fn(|lane| of(a[lane], b[lane]))
    }
}

#[cfg(test)]
#[allow(clippy::undocumented_unsafe_blocks, reason = "the trait's contract covers every read and write")]
impl Ops for Scalar {
    type Int = [i32; 8];
    type Float = [f32; 8];

    unsafe fn load(at: *const u8) -> [i32; 8] {
        unsafe { at.cast::<[i32; 8]>().read_unaligned() }
    }
    unsafe fn splat(value: i32) -> [i32; 8] {
        [value; 8]
    }
    unsafe fn and(a: [i32; 8], b: [i32; 8]) -> [i32; 8] {
        Self::zip(a, b, |a, b| a & b)
    }
    unsafe fn or(a: [i32; 8], b: [i32; 8]) -> [i32; 8] {
        Self::zip(a, b, |a, b| a | b)
    }
    unsafe fn shift_right(a: [i32; 8], bits: u32) -> [i32; 8] {
        bytemuck::cast(Self::words(a).map(|word| word >> bits))
    }
    unsafe fn shift_left(a: [i32; 8], bits: u32) -> [i32; 8] {
        bytemuck::cast(Self::words(a).map(|word| word << bits))
    }
    unsafe fn add(a: [i32; 8], b: [i32; 8]) -> [i32; 8] {
        Self::zip(a, b, i32::wrapping_add)
    }
    unsafe fn multiply(a: [i32; 8], b: [i32; 8]) -> [i32; 8] {
        Self::zip(a, b, i32::wrapping_mul)
    }
    unsafe fn dot_bytes(sum: [i32; 8], unsigned: [i32; 8], signed: [i32; 8]) -> [i32; 8] {
        let (unsigned, signed): ([[u8; 4]; 8], [[i8; 4]; 8]) = (bytemuck::cast(unsigned), bytemuck::cast(signed));
        std::array::from_fn(|lane| {
            let products = unsigned[lane].iter().zip(signed[lane]);
            sum[lane].wrapping_add(products.map(|(&a, b)| i32::from(a) * i32::from(b)).sum())
        })
    }
    unsafe fn dot_words(sum: [i32; 8], a: [i32; 8], b: [i32; 8]) -> [i32; 8] {
        let (a, b): ([[i16; 2]; 8], [[i16; 2]; 8]) = (bytemuck::cast(a), bytemuck::cast(b));
        std::array::from_fn(|lane| {
            let product = |index: usize| i32::from(a[lane][index]) * i32::from(b[lane][index]);
            sum[lane].wrapping_add(product(0)).wrapping_add(product(1))
        })
    }
    unsafe fn widen(at: *const u8) -> [i32; 8] {
        unsafe { at.cast::<[u8; 8]>().read() }.map(i32::from)
    }
    unsafe fn widen_signed(at: *const u8) -> [i32; 8] {
        unsafe { at.cast::<[i8; 8]>().read() }.map(i32::from)
    }
    unsafe fn halves(at: *const u8) -> [f32; 8] {
        unsafe { at.cast::<[u16; 8]>().read_unaligned() }.map(npuhal_core::dtype::f16_value)
    }
    unsafe fn floats(at: *const u8) -> [f32; 8] {
        unsafe { at.cast::<[f32; 8]>().read_unaligned() }
    }
    unsafe fn splat_float(value: f32) -> [f32; 8] {
        [value; 8]
    }
    unsafe fn to_float(a: [i32; 8]) -> [f32; 8] {
        a.map(|a| a as f32)
    }
    unsafe fn negate(a: [f32; 8]) -> [f32; 8] {
        a.map(|a| -a)
    }
    unsafe fn mul(a: [f32; 8], b: [f32; 8]) -> [f32; 8] {
        Self::zip(a, b, |a, b| a * b)
    }
    unsafe fn mul_add(a: [f32; 8], b: [f32; 8], c: [f32; 8]) -> [f32; 8] {
        std::array::from_fn(|lane| a[lane].mul_add(b[lane], c[lane]))
    }
    unsafe fn store(a: [f32; 8], to: *mut f32) {
        unsafe { to.cast::<[f32; 8]>().write_unaligned(a) };
    }
}
