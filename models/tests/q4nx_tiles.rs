//! Tiles against the published layouts: SHA-256 of what they decode to, re-encoding, the repacked Q4_K tile and its bound.

use npuhal_models::q4nx::tile::{
    GROUP_COLS, Q4_1_BYTES, Q8Layout, TILE_COLS, TILE_ELEMENTS, TILE_ROWS, TileCodes, TileDecoder, TileError, TileKind,
    repack_bound, repack_q4k,
};
use proptest::prelude::*;
use sha2::{Digest, Sha256};

const Q4_1: &[u8] = include_bytes!("data/q4nx/tile_q4_1.bin");
const Q4K: &[u8] = include_bytes!("data/q4nx/tile_q4k.bin");
const Q4K_AS_Q4_1: &[u8] = include_bytes!("data/q4nx/tile_q4k_as_q4_1.bin");
const Q8: &[u8] = include_bytes!("data/q4nx/tile_q8.bin");

fn decoded(decoder: TileDecoder, tile: &[u8]) -> Box<[f32; TILE_ELEMENTS]> {
    let mut out = Box::new([0.0; TILE_ELEMENTS]);
    decoder.decode(tile, &mut out).unwrap();
    out
}

fn sha256(elements: &[f32]) -> String {
    let bytes: Vec<u8> = elements.iter().flat_map(|element| element.to_le_bytes()).collect();
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

#[test]
fn golden_tiles_decode_bit_for_bit() {
    for (decoder, tile, wanted, first, last) in [
        (
            TileDecoder::Q4_1,
            Q4_1,
            "fff1e3effa945b1a29ce64aa40c74903cb4bdf7835b0002cd03df492132d0997",
            0.074_615_48,
            0.189_453_13,
        ),
        (
            TileDecoder::Q4K,
            Q4K,
            "90380f8f738675a71a7e26f3fa3d88b11f2ae1360811af7205531765cac0eee5",
            40.866_7,
            2.084_015,
        ),
        (
            TileDecoder::Q8(Q8Layout::A),
            Q8,
            "17b3f7106c5effea38b5da5c91bd38522cc40a9721d409757460b550acd3aa08",
            -0.132_446_29,
            -0.545_043_95,
        ),
        (
            TileDecoder::Q8(Q8Layout::B),
            Q8,
            "f122670b48b960e59565c3643533fa061c2f196f93c6ca62d5b756c081c412c0",
            -0.132_446_29,
            -0.545_043_95,
        ),
        (
            TileDecoder::Q4_1,
            Q4K_AS_Q4_1,
            "702c4601bc1c7bdb4ccfaac2c9b8f22f39ff977dd043e83a0ef457fe9f255078",
            40.890_625,
            2.081_054_7,
        ),
    ] {
        let elements = decoded(decoder, tile);
        assert_eq!((elements[0], elements[TILE_ELEMENTS - 1]), (first, last), "{decoder:?}");
        assert_eq!(sha256(&elements[..]), wanted, "{decoder:?}");
    }
}

#[test]
fn a_tile_encodes_to_the_bytes_it_came_from() {
    let tile: &[u8; Q4_1_BYTES] = Q4_1.try_into().unwrap();
    let mut out = [0; Q4_1_BYTES];
    assert!(TileCodes::from_q4_1(tile).write_q4_1(&mut out));
    assert_eq!(&out, tile);
}

#[test]
fn a_q4k_tile_becomes_the_golden_q4_1_tile_within_its_bound() {
    let repacked = repack_q4k(Q4K).unwrap();
    assert_eq!(repacked, Q4K_AS_Q4_1);
    let worst = worst_share(Q4K, &repacked);
    assert!((0.99..=1.0 + 1e-6).contains(&worst), "{worst}");
}

/// Largest error as a share of its bound.
fn worst_share(tile: &[u8], repacked: &[u8]) -> f64 {
    let (source, written) = (decoded(TileDecoder::Q4K, tile), decoded(TileDecoder::Q4_1, repacked));
    let mut worst = 0.0_f64;
    for r in 0..TILE_ROWS {
        for c in 0..TILE_COLS {
            let at = r * TILE_COLS + c;
            let error = (f64::from(source[at]) - f64::from(written[at])).abs();
            worst = worst.max(error / repack_bound(tile, c / GROUP_COLS, r));
        }
    }
    worst
}

#[test]
fn lengths_and_layouts_are_checked() {
    let mut out = [0.0; TILE_ELEMENTS];
    for decoder in [TileDecoder::Q4_1, TileDecoder::Q4K, TileDecoder::Q8(Q8Layout::A), TileDecoder::Q8(Q8Layout::B)] {
        let error = decoder.decode(&Q8[..decoder.bytes() - 1], &mut out).unwrap_err();
        assert_eq!(error, TileError::ByteCount { wanted: decoder.bytes(), found: decoder.bytes() - 1 });
        assert!(decoder.decode(&[], &mut out).is_err());
    }
    assert_eq!(TileKind::Q8.decoder(None), Err(TileError::LayoutUnknown));
    assert_eq!(TileKind::Q4K.decoder(None), Ok(TileDecoder::Q4K));
    assert_eq!(repack_q4k(Q4_1).unwrap_err(), TileError::ByteCount { wanted: 4736, found: 5120 });
    // An infinite or undefined `d` or `dmin`, and one that becomes infinite by its 8-bit factor.
    for (at, bits) in [(4608, 0x7F80), (4608, 0x7F7F), (4610, 0x7FC0), (4672, 0xFF80), (4674, 0x7FC0u16)] {
        let mut tile = Q4K.to_vec();
        tile[..512].fill(2);
        tile[at..at + 2].copy_from_slice(&bits.to_le_bytes());
        assert_eq!(repack_q4k(&tile).unwrap_err(), TileError::NotFinite, "{bits:#x} at {at}");
    }
    for kind in [TileKind::Q4_1, TileKind::Q4K, TileKind::Q8] {
        assert_eq!(TileKind::from_bytes(kind.bytes()), Some(kind));
    }
    assert_eq!(TileKind::from_bytes(5121), None);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]

    /// Whatever the bytes, decoding ends, and codes survive being written again.
    #[test]
    fn any_bytes_decode(seed in any::<u64>()) {
        let mut state = seed;
        let mut bytes = vec![0_u8; 8704];
        for byte in &mut bytes {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            *byte = (state >> 56) as u8;
        }
        for decoder in [TileDecoder::Q4_1, TileDecoder::Q4K, TileDecoder::Q8(Q8Layout::A), TileDecoder::Q8(Q8Layout::B)] {
            decoded(decoder, &bytes[..decoder.bytes()]);
        }
        let tile: &[u8; Q4_1_BYTES] = bytes[..Q4_1_BYTES].try_into().unwrap();
        let mut out = [0; Q4_1_BYTES];
        TileCodes::from_q4_1(tile).write_q4_1(&mut out);
        prop_assert_eq!(&out[1024..], &tile[1024..]);
    }

    /// With constants of any usual size the repacked tile stays within its bound.
    #[test]
    fn repacking_keeps_its_bound(seed in any::<u64>(), exponents in prop::collection::vec(100_u16..140, 64)) {
        let mut state = seed;
        let mut tile = vec![0_u8; 4736];
        for byte in &mut tile {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            *byte = (state >> 56) as u8;
        }
        for (constant, exponent) in tile[4608..].as_chunks_mut::<2>().0.iter_mut().zip(exponents) {
            let bits = u16::from_le_bytes(*constant) & 0x807F | exponent << 7;
            *constant = bits.to_le_bytes();
        }
        // One rounding of the decoder itself comes on top where the constants differ much in size.
        let share = worst_share(&tile, &repack_q4k(&tile).unwrap());
        prop_assert!(share <= 1.01, "{}", share);
    }
}
