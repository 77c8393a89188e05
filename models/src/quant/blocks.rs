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
        let (low, high) = (self.0[..128].as_chunks::<64>().0, self.0[128..192].as_chunks::<32>().0);
        for ((codes, low), high) in codes.as_chunks_mut::<128>().0.iter_mut().zip(low).zip(high) {
            // Shifts by constants, so that the compiler can take many bytes at once.
            for (index, high) in high.iter().enumerate() {
                let (first, second) = (low[index], low[index + 32]);
                codes[index] = first & 15 | (high & 3) << 4;
                codes[index + 32] = second & 15 | (high >> 2 & 3) << 4;
                codes[index + 64] = first >> 4 | (high >> 4 & 3) << 4;
                codes[index + 96] = second >> 4 | (high >> 6) << 4;
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

block! {
    /// 256 elements in 16 sub-blocks of 16, `(d · sc) · q - (dmin · mn)`: 16 bytes at 0 with scale `sc` in the low and minimum
    /// `mn` in the high half; 64 bytes of codes at 16, see [`Q2KBlock::codes`]; `d` at 80, `dmin` at 82.
    Q2KBlock, 84
}

impl Q2KBlock<'_> {
    /// Scale `d` of the scales.
    #[must_use]
    pub fn scale(&self) -> f16 {
        self.f16_at(80)
    }

    /// Scale `dmin` of the minima.
    #[must_use]
    pub fn min_scale(&self) -> f16 {
        self.f16_at(82)
    }

    /// Scale `sc` and minimum `mn` of sub-block `sub`, 0 to 15 each.
    ///
    /// # Panics
    /// When `sub` is above 15.
    #[must_use]
    pub fn scale_min(&self, sub: usize) -> (u8, u8) {
        assert!(sub < 16, "sub-block {sub} of 16");
        (self.0[sub] & 15, self.0[sub] >> 4)
    }

    /// Codes `q`, 0 to 3: each half of 128 elements has 32 bytes, of which byte `i` holds elements `i`, `i + 32`, `i + 64` and
    /// `i + 96` of the half from its low bits up.
    #[must_use]
    pub fn codes(&self) -> [u8; 256] {
        two_bits(&self.0[16..80])
    }
}

impl<'a> Block<'a, 84, 256> for Q2KBlock<'a> {
    fn new(bytes: &'a [u8; 84]) -> Self {
        Self(bytes)
    }

    fn dequantize(&self, out: &mut [f32; 256]) {
        let (d, dmin) = (self.scale().to_f32(), self.min_scale().to_f32());
        let codes = self.codes();
        for (sub, (out, codes)) in out.as_chunks_mut::<16>().0.iter_mut().zip(codes.as_chunks::<16>().0).enumerate() {
            let (sc, mn) = self.scale_min(sub);
            let (scale, min) = (d * f32::from(sc), dmin * f32::from(mn));
            for (out, code) in out.iter_mut().zip(codes) {
                *out = scale * f32::from(*code) - min;
            }
        }
    }
}

block! {
    /// 256 elements in 16 sub-blocks of 16, `(d · (sc - 32)) · (q - 4)`: 32 bytes of third bits at 0, bit `b` of byte `i` that of
    /// element `32·b + i`; the low two bits at 32 as in [`Q2KBlock::codes`]; 12 bytes of scales at 96; `d` at 108.
    Q3KBlock, 110
}

impl Q3KBlock<'_> {
    /// Scale `d`.
    #[must_use]
    pub fn scale(&self) -> f16 {
        self.f16_at(108)
    }

    /// Scales `sc - 32`, -32 to 31, one for each 16 elements. Of the 12 bytes the first eight hold the low four bits of scales
    /// 0 to 7 in their low and of 8 to 15 in their high halves; byte `8 + i` holds the top two bits of scales `i`, `i + 4`,
    /// `i + 8` and `i + 12` from its low bits up.
    #[must_use]
    pub fn sub_scales(&self) -> [i8; 16] {
        let packed = &self.0[96..108];
        std::array::from_fn(|sub| {
            let low = packed[sub % 8] >> (4 * (sub / 8)) & 15;
            let high = packed[8 + sub % 4] >> (2 * (sub / 4)) & 3;
            (low | high << 4) as i8 - 32
        })
    }

    /// Codes `q`, 0 to 7, not centred.
    #[must_use]
    pub fn codes(&self) -> [u8; 256] {
        let mut codes = two_bits(&self.0[32..96]);
        for (bit, codes) in codes.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            for (code, high) in codes.iter_mut().zip(&self.0[..32]) {
                *code |= (high >> bit & 1) << 2;
            }
        }
        codes
    }
}

impl<'a> Block<'a, 110, 256> for Q3KBlock<'a> {
    fn new(bytes: &'a [u8; 110]) -> Self {
        Self(bytes)
    }

    fn dequantize(&self, out: &mut [f32; 256]) {
        let d = self.scale().to_f32();
        let codes = self.codes();
        for (sub, sc) in self.sub_scales().into_iter().enumerate() {
            let scale = d * f32::from(sc);
            for index in 16 * sub..16 * sub + 16 {
                out[index] = scale * f32::from(codes[index] as i8 - 4);
            }
        }
    }
}

/// Values of the codes of IQ4_NL and IQ4_XS.
pub const IQ4_VALUES: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

block! {
    /// 32 elements, `d · table[q]` with [`IQ4_VALUES`]: `d` at 0; codes at 2 as in [`Q4_0Block`].
    Iq4NlBlock, 18
}

impl Iq4NlBlock<'_> {
    /// Scale `d`.
    #[must_use]
    pub fn scale(&self) -> f16 {
        self.f16_at(0)
    }

    /// Values `table[q]`.
    #[must_use]
    pub fn values(&self) -> [i8; 32] {
        nibbles(&self.0[2..18]).map(|code| IQ4_VALUES[usize::from(code)])
    }
}

impl<'a> Block<'a, 18, 32> for Iq4NlBlock<'a> {
    fn new(bytes: &'a [u8; 18]) -> Self {
        Self(bytes)
    }

    fn dequantize(&self, out: &mut [f32; 32]) {
        let d = self.scale().to_f32();
        for (out, value) in out.iter_mut().zip(self.values()) {
            *out = d * f32::from(value);
        }
    }
}

block! {
    /// 256 elements in 8 sub-blocks of 32, `(d · (sc - 32)) · table[q]` with [`IQ4_VALUES`]: `d` at 0; the top two bits of the
    /// eight scales at 2, as a little-endian number with scale 0 lowest; their low four bits at 4, two to a byte, the even one
    /// low; codes at 8, 16 bytes a sub-block as in [`Q4_0Block`].
    Iq4XsBlock, 136
}

impl Iq4XsBlock<'_> {
    /// Scale `d`.
    #[must_use]
    pub fn scale(&self) -> f16 {
        self.f16_at(0)
    }

    /// Scales `sc - 32`, -32 to 31, one for each 32 elements.
    #[must_use]
    pub fn sub_scales(&self) -> [i8; 8] {
        let high = u16::from_le_bytes([self.0[2], self.0[3]]);
        std::array::from_fn(|sub| {
            let low = self.0[4 + sub / 2] >> (4 * (sub % 2)) & 15;
            (low | ((high >> (2 * sub) & 3) as u8) << 4) as i8 - 32
        })
    }

    /// Values `table[q]`.
    #[must_use]
    pub fn values(&self) -> [i8; 256] {
        let mut values = [0; 256];
        for (values, bytes) in values.as_chunks_mut::<32>().0.iter_mut().zip(self.0[8..].as_chunks::<16>().0) {
            *values = nibbles(bytes).map(|code| IQ4_VALUES[usize::from(code)]);
        }
        values
    }
}

impl<'a> Block<'a, 136, 256> for Iq4XsBlock<'a> {
    fn new(bytes: &'a [u8; 136]) -> Self {
        Self(bytes)
    }

    fn dequantize(&self, out: &mut [f32; 256]) {
        let d = self.scale().to_f32();
        let values = self.values();
        for (sub, sc) in self.sub_scales().into_iter().enumerate() {
            let scale = d * f32::from(sc);
            for index in 32 * sub..32 * sub + 32 {
                out[index] = scale * f32::from(values[index]);
            }
        }
    }
}

/// Twice the values of the codes of MXFP4 (E2M1 of the OCP microscaling specification).
pub const MXFP4_VALUES: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// 32 elements, `2^(e - 128) · table[q]` with [`MXFP4_VALUES`]: exponent `e` at 0; codes at 1 as in [`Q4_0Block`].
#[derive(Debug, Clone, Copy)]
pub struct Mxfp4Block<'a>(pub &'a [u8; 17]);

impl Mxfp4Block<'_> {
    /// Bytes of a block.
    pub const BYTES: usize = 17;

    /// Half of the block's power of two: `2^(e - 128)`.
    #[must_use]
    pub fn half_scale(&self) -> f32 {
        match self.0[0] {
            // 2^-128 and 2^-127 are subnormal.
            low @ 0..2 => f32::from_bits(0x0020_0000 << low),
            exponent => f32::from_bits((u32::from(exponent) - 1) << 23),
        }
    }

    /// Values `table[q]`, twice those of the specification.
    #[must_use]
    pub fn values(&self) -> [i8; 32] {
        nibbles(&self.0[1..17]).map(|code| MXFP4_VALUES[usize::from(code)])
    }
}

impl<'a> Block<'a, 17, 32> for Mxfp4Block<'a> {
    fn new(bytes: &'a [u8; 17]) -> Self {
        Self(bytes)
    }

    fn dequantize(&self, out: &mut [f32; 32]) {
        let d = self.half_scale();
        for (out, value) in out.iter_mut().zip(self.values()) {
            *out = d * f32::from(value);
        }
    }
}

/// Codes of two bits: of each 32 bytes the lowest pairs first, the highest last.
fn two_bits(bytes: &[u8]) -> [u8; 256] {
    let mut codes = [0; 256];
    for (codes, bytes) in codes.as_chunks_mut::<128>().0.iter_mut().zip(bytes.as_chunks::<32>().0) {
        for (shift, codes) in codes.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            for (code, byte) in codes.iter_mut().zip(bytes) {
                *code = byte >> (2 * shift) & 3;
            }
        }
    }
    codes
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
    for (codes, high) in codes.as_chunks_mut::<8>().0.iter_mut().zip(high_bits.to_le_bytes()) {
        for (index, code) in codes.iter_mut().enumerate() {
            *code |= if high & 1 << index == 0 { 0 } else { 16 };
        }
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
