//! MD5 (RFC 1321) of one message, or of several messages of one length that differ in a few words.
//!
//! Control code files carry the MD5 of their code as an identifier. The digest is a chain of dependent operations, so that one
//! message cannot be hashed faster than the chain; several messages side by side can.

/// Bytes of a digest.
pub const DIGEST_BYTES: usize = 16;
const BLOCK_BYTES: usize = 64;
const BLOCK_WORDS: usize = 16;

/// Bits by which each step rotates: four for each round of 16 steps.
const SHIFTS: [[u32; 4]; 4] = [[7, 12, 17, 22], [5, 9, 14, 20], [4, 11, 16, 23], [6, 10, 15, 21]];
const START: [u32; 4] = [0x6745_2301, 0xEFCD_AB89, 0x98BA_DCFE, 0x1032_5476];
/// Step constants: floor(2^32 · |sin(i + 1)|).
const SINES: [u32; 64] = [
    0xd76a_a478,
    0xe8c7_b756,
    0x2420_70db,
    0xc1bd_ceee,
    0xf57c_0faf,
    0x4787_c62a,
    0xa830_4613,
    0xfd46_9501,
    0x6980_98d8,
    0x8b44_f7af,
    0xffff_5bb1,
    0x895c_d7be,
    0x6b90_1122,
    0xfd98_7193,
    0xa679_438e,
    0x49b4_0821,
    0xf61e_2562,
    0xc040_b340,
    0x265e_5a51,
    0xe9b6_c7aa,
    0xd62f_105d,
    0x0244_1453,
    0xd8a1_e681,
    0xe7d3_fbc8,
    0x21e1_cde6,
    0xc337_07d6,
    0xf4d5_0d87,
    0x455a_14ed,
    0xa9e3_e905,
    0xfcef_a3f8,
    0x676f_02d9,
    0x8d2a_4c8a,
    0xfffa_3942,
    0x8771_f681,
    0x6d9d_6122,
    0xfde5_380c,
    0xa4be_ea44,
    0x4bde_cfa9,
    0xf6bb_4b60,
    0xbebf_bc70,
    0x289b_7ec6,
    0xeaa1_27fa,
    0xd4ef_3085,
    0x0488_1d05,
    0xd9d4_d039,
    0xe6db_99e5,
    0x1fa2_7cf8,
    0xc4ac_5665,
    0xf429_2244,
    0x432a_ff97,
    0xab94_23a7,
    0xfc93_a039,
    0x655b_59c3,
    0x8f0c_cc92,
    0xffef_f47d,
    0x8584_5dd1,
    0x6fa8_7e4f,
    0xfe2c_e6e0,
    0xa301_4314,
    0x4e08_11a1,
    0xf753_7e82,
    0xbd3a_f235,
    0x2ad7_d2bb,
    0xeb86_d391,
];

/// A word of the message, in each of `L` messages.
type Lanes<const L: usize> = [u32; L];

/// Digest of `message`.
#[must_use]
pub fn md5(message: &[u8]) -> [u8; DIGEST_BYTES] {
    let [digest] = md5_patched::<1>(message, []);
    digest
}

/// Digests of `L` messages: `message` with words exchanged. `words` gives the byte offset of each exchanged word, a multiple
/// of 4, ascending, and its values; words that reach past the end of the message are left out.
#[must_use]
pub fn md5_patched<const L: usize>(
    message: &[u8],
    words: impl IntoIterator<Item = (usize, Lanes<L>)>,
) -> [[u8; DIGEST_BYTES]; L] {
    let mut words = words.into_iter().peekable();
    let mut state = START.map(|word| [word; L]);
    let mut absorb = |at: usize, bytes: &[u8; BLOCK_BYTES]| {
        let mut block: [Lanes<L>; BLOCK_WORDS] = std::array::from_fn(|i| {
            [u32::from_le_bytes([bytes[4 * i], bytes[4 * i + 1], bytes[4 * i + 2], bytes[4 * i + 3]]); L]
        });
        while let Some((word_at, lanes)) = words.next_if(|(word_at, _)| *word_at < at + BLOCK_BYTES) {
            if word_at >= at && word_at + 4 <= message.len() {
                block[(word_at - at) / 4] = lanes;
            }
        }
        compress(&mut state, &block);
    };
    let (blocks, rest) = message.as_chunks::<BLOCK_BYTES>();
    for (i, block) in blocks.iter().enumerate() {
        absorb(i * BLOCK_BYTES, block);
    }
    let mut tail = [0; 2 * BLOCK_BYTES];
    tail[..rest.len()].copy_from_slice(rest);
    tail[rest.len()] = 0x80;
    let tail_bytes = if rest.len() < BLOCK_BYTES - 8 { BLOCK_BYTES } else { 2 * BLOCK_BYTES };
    let bits = (message.len() as u64).wrapping_mul(8);
    tail[tail_bytes - 8..tail_bytes].copy_from_slice(&bits.to_le_bytes());
    for (i, block) in tail[..tail_bytes].as_chunks::<BLOCK_BYTES>().0.iter().enumerate() {
        absorb((blocks.len() + i) * BLOCK_BYTES, block);
    }
    std::array::from_fn(|lane| {
        let mut digest = [0; DIGEST_BYTES];
        for (bytes, word) in digest.chunks_exact_mut(4).zip(&state) {
            bytes.copy_from_slice(&word[lane].to_le_bytes());
        }
        digest
    })
}

fn compress<const L: usize>(state: &mut [Lanes<L>; 4], block: &[Lanes<L>; BLOCK_WORDS]) {
    let [mut a, mut b, mut c, mut d] = *state;
    // Four steps written out, after which the words of the state are back at their places.
    macro_rules! round {
        ($round:literal, $word:expr, $mix:expr) => {
            for i in (0..16).step_by(4) {
                let (word, sine) = (|i: usize| &block[$word(i) % BLOCK_WORDS], |i: usize| SINES[16 * $round + i]);
                step::<L, { SHIFTS[$round][0] }>(&mut a, &b, &c, &d, word(i), sine(i), $mix);
                step::<L, { SHIFTS[$round][1] }>(&mut d, &a, &b, &c, word(i + 1), sine(i + 1), $mix);
                step::<L, { SHIFTS[$round][2] }>(&mut c, &d, &a, &b, word(i + 2), sine(i + 2), $mix);
                step::<L, { SHIFTS[$round][3] }>(&mut b, &c, &d, &a, word(i + 3), sine(i + 3), $mix);
            }
        };
    }
    round!(0, |i: usize| i, |x, y, z| z ^ (x & (y ^ z)));
    round!(1, |i: usize| 5 * i + 1, |x, y, z| y ^ (z & (x ^ y)));
    round!(2, |i: usize| 3 * i + 5, |x, y, z| x ^ y ^ z);
    round!(3, |i: usize| 7 * i, |x, y, z| y ^ (x | !z));
    for (word, added) in state.iter_mut().zip([a, b, c, d]) {
        for lane in 0..L {
            word[lane] = word[lane].wrapping_add(added[lane]);
        }
    }
}

#[inline(always)]
fn step<const L: usize, const SHIFT: u32>(
    a: &mut Lanes<L>,
    b: &Lanes<L>,
    c: &Lanes<L>,
    d: &Lanes<L>,
    word: &Lanes<L>,
    sine: u32,
    mix: impl Fn(u32, u32, u32) -> u32,
) {
    for lane in 0..L {
        let sum = a[lane].wrapping_add(word[lane].wrapping_add(sine)).wrapping_add(mix(b[lane], c[lane], d[lane]));
        a[lane] = b[lane].wrapping_add(sum.rotate_left(SHIFT));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hex(digest: [u8; DIGEST_BYTES]) -> String {
        digest.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    #[test]
    fn published_digests_are_met() {
        assert_eq!(hex(md5(b"")), "d41d8cd98f00b204e9800998ecf8427e");
        assert_eq!(hex(md5(b"abc")), "900150983cd24fb0d6963f7d28e17f72");
        let fox = b"The quick brown fox jumps over the lazy dog";
        assert_eq!(hex(md5(fox)), "9e107d9d372bb6826bd81d3542a419d6");
        // RFC 1321, appendix A.5: a message of more than one block.
        let digits = b"12345678901234567890123456789012345678901234567890123456789012345678901234567890";
        assert_eq!(hex(md5(digits)), "57edf4a22be3c955ac49da2e2107b67a");
    }

    #[test]
    fn step_constants_are_sines() {
        for (i, sine) in SINES.iter().enumerate() {
            assert_eq!(*sine, (4_294_967_296.0 * ((i + 1) as f64).sin().abs()) as u32, "{i}");
        }
    }

    #[test]
    fn patched_messages_hash_as_if_written_out() {
        for len in [0, 1, 4, 55, 56, 60, 63, 64, 68, 119, 120, 128, 1000] {
            let message: Vec<u8> = (0..len).map(|i| (i * 7) as u8).collect();
            let places: Vec<usize> = [0, 4, 52, 56, 60, 64, 116, 996, 4000].into();
            let words = places.iter().map(|at| (*at, [*at as u32, 1, 2, 0xFFFF_FFFF]));
            let digests = md5_patched::<4>(&message, words.clone());
            for lane in 0..4 {
                let mut written = message.clone();
                for (at, lanes) in words.clone() {
                    if let Some(bytes) = written.get_mut(at..at + 4) {
                        bytes.copy_from_slice(&lanes[lane].to_le_bytes());
                    }
                }
                assert_eq!(digests[lane], md5(&written), "{len} bytes, lane {lane}");
            }
        }
    }
}
