//! The block formats as views: scales, minima and codes in the order of the elements, for dequantization and repacking.
//!
//! All numbers are little-endian; `d`, `m` and `dmin` are binary16. "Element `i`" counts from the start of the block.

use half::f16;

/// A block of `LEN` elements in `BYTES` bytes.
pub trait Block<'a, const BYTES: usize, const LEN: usize>: Sized {
    /// A view of the block in `bytes`.
    fn new(bytes: &'a [u8; BYTES]) -> Self;

    /// The elements as f32.
    fn dequantize(&self, out: &mut [f32; LEN]);
}

macro_rules! block {
    ($(#[$doc:meta])* $name:ident, $bytes:literal) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy)]
        pub struct $name<'a>(pub &'a [u8; $bytes]);

        impl $name<'_> {
            /// Bytes of a block.
            pub const BYTES: usize = $bytes;

            fn f16_at(&self, at: usize) -> f16 {
                f16::from_le_bytes([self.0[at], self.0[at + 1]])
            }
        }
    };
}

block! {
    /// 32 elements, `(q - 8) · d`: `d` at 0; 16 bytes of codes at 2, byte `j` holding element `j` in its low and element
    /// `j + 16` in its high half.
    Q4_0Block, 18
}

impl Q4_0Block<'_> {
    /// Scale `d`.
    #[must_use]
    pub fn scale(&self) -> f16 {
        self.f16_at(0)
    }

    /// Codes `q`, 0 to 15, not centred.
    #[must_use]
    pub fn codes(&self) -> [u8; 32] {
        nibbles(&self.0[2..18])
    }
}

impl<'a> Block<'a, 18, 32> for Q4_0Block<'a> {
    fn new(bytes: &'a [u8; 18]) -> Self {
        Self(bytes)
    }

    fn dequantize(&self, out: &mut [f32; 32]) {
        let d = self.scale().to_f32();
        for (out, q) in out.iter_mut().zip(self.codes()) {
            *out = f32::from(q as i8 - 8) * d;
        }
    }
}

block! {
    /// 32 elements, `q · d + m`: `d` at 0, `m` at 2; codes at 4 as in [`Q4_0Block`].
    Q4_1Block, 20
}

impl Q4_1Block<'_> {
    /// Scale `d`.
    #[must_use]
    pub fn scale(&self) -> f16 {
        self.f16_at(0)
    }

    /// Minimum `m`, added.
    #[must_use]
    pub fn min(&self) -> f16 {
        self.f16_at(2)
    }

    /// Codes `q`, 0 to 15.
    #[must_use]
    pub fn codes(&self) -> [u8; 32] {
        nibbles(&self.0[4..20])
    }
}

impl<'a> Block<'a, 20, 32> for Q4_1Block<'a> {
    fn new(bytes: &'a [u8; 20]) -> Self {
        Self(bytes)
    }

    fn dequantize(&self, out: &mut [f32; 32]) {
        let (d, m) = (self.scale().to_f32(), self.min().to_f32());
        for (out, q) in out.iter_mut().zip(self.codes()) {
            *out = f32::from(q) * d + m;
        }
    }
}

block! {
    /// 32 elements, `(q - 16) · d`: `d` at 0; 32 bits at 2, bit `i` the fifth bit of element `i`; the low four bits at 6 as in
    /// [`Q4_0Block`].
    Q5_0Block, 22
}

impl Q5_0Block<'_> {
    /// Scale `d`.
    #[must_use]
    pub fn scale(&self) -> f16 {
        self.f16_at(0)
    }

    /// The fifth bits, bit `i` of element `i`.
    #[must_use]
    pub fn high_bits(&self) -> u32 {
        u32::from_le_bytes([self.0[2], self.0[3], self.0[4], self.0[5]])
    }

    /// Codes `q`, 0 to 31, not centred.
    #[must_use]
    pub fn codes(&self) -> [u8; 32] {
        with_fifth_bit(nibbles(&self.0[6..22]), self.high_bits())
    }
}

impl<'a> Block<'a, 22, 32> for Q5_0Block<'a> {
    fn new(bytes: &'a [u8; 22]) -> Self {
        Self(bytes)
    }

    fn dequantize(&self, out: &mut [f32; 32]) {
        let d = self.scale().to_f32();
        for (out, q) in out.iter_mut().zip(self.codes()) {
            *out = f32::from(q as i8 - 16) * d;
        }
    }
}

block! {
    /// 32 elements, `q · d + m`: `d` at 0, `m` at 2; fifth bits at 4 and low bits at 8 as in [`Q5_0Block`].
    Q5_1Block, 24
}

impl Q5_1Block<'_> {
    /// Scale `d`.
    #[must_use]
    pub fn scale(&self) -> f16 {
        self.f16_at(0)
    }

    /// Minimum `m`, added.
    #[must_use]
    pub fn min(&self) -> f16 {
        self.f16_at(2)
    }

    /// The fifth bits, bit `i` of element `i`.
    #[must_use]
    pub fn high_bits(&self) -> u32 {
        u32::from_le_bytes([self.0[4], self.0[5], self.0[6], self.0[7]])
    }

    /// Codes `q`, 0 to 31.
    #[must_use]
    pub fn codes(&self) -> [u8; 32] {
        with_fifth_bit(nibbles(&self.0[8..24]), self.high_bits())
    }
}

impl<'a> Block<'a, 24, 32> for Q5_1Block<'a> {
    fn new(bytes: &'a [u8; 24]) -> Self {
        Self(bytes)
    }

    fn dequantize(&self, out: &mut [f32; 32]) {
        let (d, m) = (self.scale().to_f32(), self.min().to_f32());
        for (out, q) in out.iter_mut().zip(self.codes()) {
            *out = f32::from(q) * d + m;
        }
    }
}

block! {
    /// 32 elements, `q · d`: `d` at 0; 32 signed bytes at 2.
    Q8_0Block, 34
}

impl Q8_0Block<'_> {
    /// Scale `d`.
    #[must_use]
    pub fn scale(&self) -> f16 {
        self.f16_at(0)
    }

    /// Codes `q`, signed.
    #[must_use]
    pub fn codes(&self) -> [i8; 32] {
        std::array::from_fn(|index| self.0[2 + index] as i8)
    }
}

impl<'a> Block<'a, 34, 32> for Q8_0Block<'a> {
    fn new(bytes: &'a [u8; 34]) -> Self {
        Self(bytes)
    }

    fn dequantize(&self, out: &mut [f32; 32]) {
        let d = self.scale().to_f32();
        for (out, q) in out.iter_mut().zip(self.codes()) {
            *out = f32::from(q) * d;
        }
    }
}

/// Scale and minimum, 6 bits each, of sub-block `sub` (0 to 7) of a Q4_K or Q5_K block.
///
/// The 12 bytes hold eight pairs. For `sub` below 4 the scale is the low six bits of byte `sub`, the minimum those of byte
/// `sub + 4`. For the others the low four bits are the halves of byte `sub + 4` (scale low, minimum high), and the top two are
/// bits 6 and 7 of byte `sub - 4` (scale) and of byte `sub` (minimum).
///
/// # Panics
/// When `sub` is above 7.
#[must_use]
pub fn k_scale_min(sub: usize, scales: &[u8; 12]) -> (u8, u8) {
    assert!(sub < 8, "sub-block {sub} of 8");
    if sub < 4 {
        (scales[sub] & 63, scales[sub + 4] & 63)
    } else {
        let low = scales[sub + 4];
        ((low & 15) | (scales[sub - 4] >> 6) << 4, (low >> 4) | (scales[sub] >> 6) << 4)
    }
}

block! {
    /// 256 elements in 8 sub-blocks of 32, `(d · sc) · q - (dmin · mn)`: `d` at 0, `dmin` at 2; 12 bytes of scales and minima at
    /// 4 (see [`k_scale_min`]); 128 bytes of codes at 16: each 32 bytes hold two sub-blocks, the even one in the low and the odd
    /// one in the high halves.
    Q4KBlock, 144
}

impl Q4KBlock<'_> {
    /// Scale `d` of the scales.
    #[must_use]
    pub fn scale(&self) -> f16 {
        self.f16_at(0)
    }

    /// Scale `dmin` of the minima.
    #[must_use]
    pub fn min_scale(&self) -> f16 {
        self.f16_at(2)
    }

    /// Scale `sc` and minimum `mn` of sub-block `sub`, 0 to 63 each.
    ///
    /// # Panics
    /// When `sub` is above 7.
    #[must_use]
    pub fn scale_min(&self, sub: usize) -> (u8, u8) {
        k_scale_min(sub, &twelve(self.0))
    }

    /// Codes `q`, 0 to 15.
    #[must_use]
    pub fn codes(&self) -> [u8; 256] {
        k_nibbles(&self.0[16..144])
    }
}

impl<'a> Block<'a, 144, 256> for Q4KBlock<'a> {
    fn new(bytes: &'a [u8; 144]) -> Self {
        Self(bytes)
    }

    fn dequantize(&self, out: &mut [f32; 256]) {
        let (d, dmin) = (self.scale().to_f32(), self.min_scale().to_f32());
        dequantize_k(d, dmin, &twelve(self.0), &self.codes(), out);
    }
}

block! {
    /// 256 elements in 8 sub-blocks of 32, `(d · sc) · q - (dmin · mn)`: as [`Q4KBlock`] with the low four bits of the codes at 48,
    /// and the fifth bits in 32 bytes at 16: bit `s` of byte `i` belongs to element `i` of sub-block `s`.
    Q5KBlock, 176
}

impl Q5KBlock<'_> {
    /// Scale `d` of the scales.
    #[must_use]
    pub fn scale(&self) -> f16 {
        self.f16_at(0)
    }

    /// Scale `dmin` of the minima.
    #[must_use]
    pub fn min_scale(&self) -> f16 {
        self.f16_at(2)
    }

    /// Scale `sc` and minimum `mn` of sub-block `sub`, 0 to 63 each.
    ///
    /// # Panics
    /// When `sub` is above 7.
    #[must_use]
    pub fn scale_min(&self, sub: usize) -> (u8, u8) {
        k_scale_min(sub, &twelve(self.0))
    }

    /// Codes `q`, 0 to 31.
    #[must_use]
    pub fn codes(&self) -> [u8; 256] {
        let mut codes = k_nibbles(&self.0[48..176]);
        for (sub, codes) in codes.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            for (code, high) in codes.iter_mut().zip(&self.0[16..48]) {
                *code |= (high >> sub & 1) << 4;
            }
        }
        codes
    }
}

impl<'a> Block<'a, 176, 256> for Q5KBlock<'a> {
    fn new(bytes: &'a [u8; 176]) -> Self {
        Self(bytes)
    }

    fn dequantize(&self, out: &mut [f32; 256]) {
        let (d, dmin) = (self.scale().to_f32(), self.min_scale().to_f32());
        dequantize_k(d, dmin, &twelve(self.0), &self.codes(), out);
    }
}

block! {
    /// 256 elements in 16 sub-blocks of 16, `(d · sc) · (q - 32)`: low four bits at 0 (128 bytes), top two bits at 128 (64 bytes),
    /// 16 signed scales `sc` at 192, `d` at 208. Elements lie in two halves of 128, each with 64 low and 32 high bytes of its
    /// own: element `32·g + i` of a half (`g` 0 to 3) takes byte `i + 32·(g mod 2)` of the low bytes, its low half for `g` 0 and 1
    /// and its high half for `g` 2 and 3, and bits `2·g` of high byte `i`.
    Q6KBlock, 210
}

impl Q6KBlock<'_> {
    /// Scale `d` of the scales.
    #[must_use]
    pub fn scale(&self) -> f16 {
        self.f16_at(208)
    }

    /// Scales `sc`, one for each 16 elements.
    #[must_use]
    pub fn sub_scales(&self) -> [i8; 16] {
        std::array::from_fn(|sub| self.0[192 + sub] as i8)
    }

    /// Codes `q`, 0 to 63, not centred.
    #[must_use]
    pub fn codes(&self) -> [u8; 256] {
        let mut codes = [0; 256];
        for half in 0..2 {
            let low = &self.0[64 * half..64 * half + 64];
            let high = &self.0[128 + 32 * half..160 + 32 * half];
            for group in 0..4 {
                let start = 128 * half + 32 * group;
                for (index, code) in codes[start..start + 32].iter_mut().enumerate() {
                    let nibble = low[index + 32 * (group % 2)] >> (4 * (group / 2)) & 15;
                    *code = nibble | (high[index] >> (2 * group) & 3) << 4;
                }
            }
        }
        codes
    }
}

impl<'a> Block<'a, 210, 256> for Q6KBlock<'a> {
    fn new(bytes: &'a [u8; 210]) -> Self {
        Self(bytes)
    }

    fn dequantize(&self, out: &mut [f32; 256]) {
        let d = self.scale().to_f32();
        let codes = self.codes();
        for (sub, sc) in self.sub_scales().into_iter().enumerate() {
            let scale = d * f32::from(sc);
            for index in 16 * sub..16 * sub + 16 {
                out[index] = scale * f32::from(codes[index] as i8 - 32);
            }
        }
    }
}

/// Low halves of 16 bytes, then their high halves.
fn nibbles(bytes: &[u8]) -> [u8; 32] {
    let mut codes = [0; 32];
    let (low, high) = codes.split_at_mut(16);
    for ((low, high), byte) in low.iter_mut().zip(high).zip(bytes) {
        (*low, *high) = (byte & 15, byte >> 4);
    }
    codes
}

fn with_fifth_bit(mut codes: [u8; 32], high_bits: u32) -> [u8; 32] {
    for (index, code) in codes.iter_mut().enumerate() {
        *code |= ((high_bits >> index & 1) as u8) << 4;
    }
    codes
}

/// For each 32 of 128 bytes: their low halves, then their high halves.
fn k_nibbles(bytes: &[u8]) -> [u8; 256] {
    let mut codes = [0; 256];
    for (codes, bytes) in codes.as_chunks_mut::<64>().0.iter_mut().zip(bytes.as_chunks::<32>().0) {
        for (index, byte) in bytes.iter().enumerate() {
            (codes[index], codes[index + 32]) = (byte & 15, byte >> 4);
        }
    }
    codes
}

/// The scale bytes of a Q4_K or Q5_K block.
fn twelve(block: &[u8]) -> [u8; 12] {
    std::array::from_fn(|index| block[4 + index])
}

fn dequantize_k(d: f32, dmin: f32, scales: &[u8; 12], codes: &[u8; 256], out: &mut [f32; 256]) {
    for (sub, (out, codes)) in out.as_chunks_mut::<32>().0.iter_mut().zip(codes.as_chunks::<32>().0).enumerate() {
        let (sc, mn) = k_scale_min(sub, scales);
        let (scale, min) = (d * f32::from(sc), dmin * f32::from(mn));
        for (out, code) in out.iter_mut().zip(codes) {
            *out = scale * f32::from(*code) - min;
        }
    }
}
