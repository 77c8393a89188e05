//! MD5 (RFC 1321): instruction files carry that of their code as their id, containers that of their images.

const SHIFTS: [[u32; 4]; 4] = [[7, 12, 17, 22], [5, 9, 14, 20], [4, 11, 16, 23], [6, 10, 15, 21]];
const START: [u32; 4] = [0x6745_2301, 0xEFCD_AB89, 0x98BA_DCFE, 0x1032_5476];

/// The digest of `bytes`.
pub(super) fn digest(bytes: &[u8]) -> [u8; 16] {
    let mut message = bytes.to_vec();
    message.push(0x80);
    message.resize(message.len().next_multiple_of(64), 0);
    if message.len() - bytes.len() <= 8 {
        message.resize(message.len() + 64, 0);
    }
    let end = message.len() - 8;
    message[end..].copy_from_slice(&(8 * bytes.len() as u64).to_le_bytes());
    // Integer parts of 2^32 · |sin(i + 1)|.
    let constants: [u32; 64] = std::array::from_fn(|i| (4_294_967_296.0 * ((i + 1) as f64).sin().abs()) as u32);
    let mut state = START;
    for block in message.as_chunks::<64>().0 {
        let words: [u32; 16] = std::array::from_fn(|i| u32::from_le_bytes(std::array::from_fn(|j| block[4 * i + j])));
        let [mut a, mut b, mut c, mut d] = state;
        for i in 0..64 {
            let (mixed, word) = match i / 16 {
                0 => (b & c | !b & d, i),
                1 => (d & b | !d & c, (5 * i + 1) % 16),
                2 => (b ^ c ^ d, (3 * i + 5) % 16),
                _ => (c ^ (b | !d), 7 * i % 16),
            };
            let sum = a.wrapping_add(mixed).wrapping_add(constants[i]).wrapping_add(words[word]);
            (a, d, c) = (d, c, b);
            b = b.wrapping_add(sum.rotate_left(SHIFTS[i / 16][i % 4]));
        }
        for (state, value) in state.iter_mut().zip([a, b, c, d]) {
            *state = state.wrapping_add(value);
        }
    }
    std::array::from_fn(|i| state[i / 4].to_le_bytes()[i % 4])
}

#[cfg(test)]
mod tests {
    use super::digest;

    #[test]
    fn digests_of_the_rfc() {
        for (text, wanted) in [
            ("", "d41d8cd98f00b204e9800998ecf8427e"),
            ("abc", "900150983cd24fb0d6963f7d28e17f72"),
            ("The quick brown fox jumps over the lazy dog", "9e107d9d372bb6826bd81d3542a419d6"),
            (
                "12345678901234567890123456789012345678901234567890123456789012345678901234567890",
                "57edf4a22be3c955ac49da2e2107b67a",
            ),
            ("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789", "d174ab98d277d9f5a5611c2c9f419d9f"),
        ] {
            let found: String = digest(text.as_bytes()).iter().map(|byte| format!("{byte:02x}")).collect();
            assert_eq!(found, wanted, "{text}");
        }
    }
}
