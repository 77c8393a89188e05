//! From the file's blocks to groups of eight rows.
//!
//! Works on words of four codes: word `j` of a block row holds the codes of step `j`.

use super::GROUP_ROWS;
use super::rare::{self, stored_as};
use npuhal_models::{Tensor, WeightType};

const LOW_NIBBLES: u32 = 0x0F0F_0F0F;

/// Packs group `index` of `tensor` into `out`. Rows past the end become zeros.
pub(super) fn group(tensor: &Tensor, index: usize, out: &mut [u8]) {
    let weight_type = tensor.weight_type();
    let first = index * GROUP_ROWS;
    if tensor.rows() - first < GROUP_ROWS {
        out.fill(0);
    }
    let stored = stored_as(weight_type);
    let mut converted = Vec::new();
    for lane in 0..GROUP_ROWS.min(tensor.rows() - first) {
        let mut src = tensor.row(first + lane);
        if stored != weight_type {
            converted.clear();
            rare::convert(weight_type, src, &mut converted);
            src = &converted;
        }
        row(stored, src, lane, out);
    }
}

/// Packs one row of file blocks into lane `lane` of a group.
fn row(weight_type: WeightType, src: &[u8], lane: usize, out: &mut [u8]) {
    match weight_type {
        WeightType::F32 => plain::<4>(src, lane, out),
        WeightType::F16 | WeightType::Bf16 => plain::<2>(src, lane, out),
        WeightType::Q4_0 => blocks::<18, 144>(src, lane, out, q4_0),
        WeightType::Q4_1 => blocks::<20, 160>(src, lane, out, q4_1),
        WeightType::Q5_0 => blocks::<22, 176>(src, lane, out, q5_0),
        WeightType::Q5_1 => blocks::<24, 192>(src, lane, out, q5_1),
        WeightType::Q8_0 => blocks::<34, 272>(src, lane, out, q8_0),
        WeightType::Q4K => blocks::<144, 1184>(src, lane, out, q4_k),
        WeightType::Q5K => blocks::<176, 1440>(src, lane, out, q5_k),
        WeightType::Q6K => blocks::<210, 1680>(src, lane, out, q6_k),
        // `group_bytes` is 0 for a type without a layout, so `Packer::add` has refused it.
        _ => {}
    }
}

fn plain<const BYTES: usize>(src: &[u8], lane: usize, out: &mut [u8]) {
    for (element, out) in src.chunks_exact(BYTES).zip(out.chunks_exact_mut(GROUP_ROWS * BYTES)) {
        out[lane * BYTES..(lane + 1) * BYTES].copy_from_slice(element);
    }
}

#[inline(always)]
fn blocks<const FROM: usize, const TO: usize>(
    src: &[u8],
    lane: usize,
    out: &mut [u8],
    block: impl Fn(&[u8; FROM], usize, &mut [u8; TO]),
) {
    for (src, out) in src.as_chunks::<FROM>().0.iter().zip(out.as_chunks_mut::<TO>().0) {
        block(src, lane, out);
    }
}

#[inline(always)]
fn word(src: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([src[at], src[at + 1], src[at + 2], src[at + 3]])
}

/// Writes row `lane`'s word of the plane at `plane`.
#[inline(always)]
fn put(out: &mut [u8], plane: usize, lane: usize, word: u32) {
    out[plane + 4 * lane..plane + 4 * lane + 4].copy_from_slice(&word.to_le_bytes());
}

/// Copies an f16 into the row of eight at `at`.
#[inline(always)]
fn half(out: &mut [u8], at: usize, lane: usize, src: &[u8], from: usize) {
    out[at + 2 * lane..at + 2 * lane + 2].copy_from_slice(&src[from..from + 2]);
}

#[inline(always)]
fn q4_0(src: &[u8; 18], lane: usize, out: &mut [u8; 144]) {
    half(out, 0, lane, src, 0);
    for j in 0..4 {
        put(out, 16 + 32 * j, lane, word(src, 2 + 4 * j));
    }
}

#[inline(always)]
fn q4_1(src: &[u8; 20], lane: usize, out: &mut [u8; 160]) {
    half(out, 0, lane, src, 0);
    half(out, 16, lane, src, 2);
    for j in 0..4 {
        put(out, 32 + 32 * j, lane, word(src, 4 + 4 * j));
    }
}

#[inline(always)]
fn q5_0(src: &[u8; 22], lane: usize, out: &mut [u8; 176]) {
    half(out, 0, lane, src, 0);
    planes5(&words5(src, 2, 6), lane, out, 16);
}

#[inline(always)]
fn q5_1(src: &[u8; 24], lane: usize, out: &mut [u8; 192]) {
    half(out, 0, lane, src, 0);
    half(out, 16, lane, src, 2);
    planes5(&words5(src, 4, 8), lane, out, 32);
}

/// The eight words of 5-bit codes of a Q5_0 or Q5_1 block with its fifth bits at `bits` and its nibbles at `nibbles`.
#[inline(always)]
fn words5(src: &[u8], bits: usize, nibbles: usize) -> [u32; 8] {
    let high = word(src, bits);
    let mut words = [0; 8];
    for j in 0..4 {
        let codes = word(src, nibbles + 4 * j);
        words[j] = codes & LOW_NIBBLES | spread(high >> (4 * j)) << 4;
        words[j + 4] = (codes >> 4) & LOW_NIBBLES | spread(high >> (16 + 4 * j)) << 4;
    }
    words
}

/// The lowest four bits, one to each byte.
#[inline(always)]
fn spread(bits: u32) -> u32 {
    ((bits & 15) * 0x0020_4081) & 0x0101_0101
}

/// Eight words of 5-bit codes in five planes: steps 0 to 4 lie in the low bits, steps 5 to 7 are split over the high bits.
#[inline(always)]
fn planes5(w: &[u32; 8], lane: usize, out: &mut [u8], at: usize) {
    const LOW3: u32 = 0x0707_0707;
    const BIT: u32 = 0x0101_0101;
    put(out, at, lane, w[0] | (w[5] & LOW3) << 5);
    put(out, at + 32, lane, w[1] | ((w[7] >> 3) & BIT) << 5 | ((w[5] >> 3) & (3 * BIT)) << 6);
    put(out, at + 64, lane, w[2] | (w[6] & LOW3) << 5);
    put(out, at + 96, lane, w[3] | ((w[7] >> 4) & BIT) << 5 | ((w[6] >> 3) & (3 * BIT)) << 6);
    put(out, at + 128, lane, w[4] | (w[7] & LOW3) << 5);
}

#[inline(always)]
fn q8_0(src: &[u8; 34], lane: usize, out: &mut [u8; 272]) {
    half(out, 0, lane, src, 0);
    for j in 0..8 {
        put(out, 16 + 32 * j, lane, word(src, 2 + 4 * j));
    }
}

#[inline(always)]
fn q4_k(src: &[u8; 144], lane: usize, out: &mut [u8; 1184]) {
    k_scales(src, lane, out);
    k_nibbles(&src[16..], lane, out);
}

#[inline(always)]
fn q5_k(src: &[u8; 176], lane: usize, out: &mut [u8; 1440]) {
    const BIT: u32 = 0x0101_0101;
    k_scales(src, lane, out);
    k_nibbles(&src[48..], lane, out);
    for c in 0..4 {
        let (mut low, mut high) = (0, 0);
        for j in 0..8 {
            let bits = word(src, 16 + 4 * j);
            low |= ((bits >> (2 * c)) & BIT) << j;
            high |= ((bits >> (2 * c + 1)) & BIT) << j;
        }
        put(out, 1184 + 64 * c, lane, low);
        put(out, 1216 + 64 * c, lane, high);
    }
}

/// Super-block scales, and the eight 6-bit scales and minima as bytes.
#[inline(always)]
fn k_scales(src: &[u8], lane: usize, out: &mut [u8]) {
    half(out, 0, lane, src, 0);
    half(out, 16, lane, src, 2);
    let packed = &src[4..16];
    for sub in 0..8 {
        let (scale, minimum) = if sub < 4 {
            (packed[sub] & 63, packed[sub + 4] & 63)
        } else {
            let shared = packed[sub + 4];
            (shared & 15 | (packed[sub - 4] >> 6) << 4, shared >> 4 | (packed[sub] >> 6) << 4)
        };
        out[32 + 8 * sub + lane] = scale;
        out[96 + 8 * sub + lane] = minimum;
    }
}

#[inline(always)]
fn k_nibbles(codes: &[u8], lane: usize, out: &mut [u8]) {
    for step in 0..32 {
        put(out, 160 + 32 * step, lane, word(codes, 4 * step));
    }
}

#[inline(always)]
fn q6_k(src: &[u8; 210], lane: usize, out: &mut [u8; 1680]) {
    half(out, 0, lane, src, 208);
    for sub in 0..16 {
        out[16 + 8 * sub + lane] = src[192 + sub];
    }
    for sub in 0..16 {
        // Sub-blocks of 16; in each half of 128 elements, quarters of 32 share their bytes of high bits.
        let (half_block, quarter, part) = (sub / 8, sub % 8 / 2, sub % 2);
        let mut w = [0; 4];
        for (j, w) in w.iter_mut().enumerate() {
            let at = 16 * part + 4 * j;
            let low = word(src, 64 * half_block + 32 * (quarter % 2) + at) >> (4 * (quarter / 2));
            let high = word(src, 128 + 32 * half_block + at) >> (2 * quarter);
            *w = low & LOW_NIBBLES | (high & 0x0303_0303) << 4;
        }
        let plane = 144 + 96 * sub;
        put(out, plane, lane, w[0] | (w[3] & 0x3030_3030) << 2);
        put(out, plane + 32, lane, w[1] | (w[3] & 0x0C0C_0C0C) << 4);
        put(out, plane + 64, lane, w[2] | (w[3] & 0x0303_0303) << 6);
    }
}
