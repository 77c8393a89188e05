//! Packed streams of synthetic weights against published digests, and of a package against its own rows.

use npuhal_core::stage::Control;
use npuhal_models::package::{Family, LayerArray, OpenOptions, Package};
use npuhal_xdna1::layout::{EngineLayout, GEMV_TILES, QWEN, SMOLLM};
use npuhal_xdna1::stream::EngineStream;
use npuhal_xdna1::{EngineWeights, LaneError, Matrix, PackageWeights, Vector};
use proptest::prelude::*;
use serde_json::Value;
use sha2::{Digest, Sha256};
use std::num::NonZeroUsize;
use std::path::Path;
use std::sync::LazyLock;

/// bf16 bits by a formula of row, column, layer and kind.
struct Synthetic;

fn element(row: u64, col: u64, layer: u64, tag: u64) -> u16 {
    ((row * 7919 + col * 104_729 + layer * 15_485_863 + tag * 32_452_843) % 0x3f80) as u16
}

impl EngineWeights for Synthetic {
    fn copy_rows(&self, matrix: Matrix, first: usize, rows: usize, out: &mut [u8]) {
        let len = out.len() / rows / 2;
        for (index, out) in out.chunks_exact_mut(2 * len).enumerate() {
            self.copy_columns(matrix, first + index, 0, len, out);
        }
    }

    fn copy_columns(&self, matrix: Matrix, row: usize, first: usize, columns: usize, out: &mut [u8]) {
        let (layer, tag) = match matrix {
            Matrix::Qkv(layer) => (layer, 1),
            Matrix::OProj(layer) => (layer, 2),
            Matrix::GateUp(layer) => (layer, 3),
            Matrix::Down(layer) => (layer, 4),
            Matrix::Head => (0, 8),
        };
        for (col, out) in (first..first + columns).zip(out.as_chunks_mut::<2>().0) {
            *out = element(row as u64, col as u64, layer as u64, tag).to_le_bytes();
        }
    }

    fn copy_gamma(&self, vector: Vector, out: &mut [u8]) {
        let (layer, tag) = match vector {
            Vector::InputNorm(layer) => (layer, 5),
            Vector::PostAttnNorm(layer) => (layer, 6),
            Vector::FinalNorm => (0, 7),
        };
        for (col, out) in out.as_chunks_mut::<2>().0.iter_mut().enumerate() {
            *out = element(0, col as u64, layer as u64, tag).to_le_bytes();
        }
    }

    fn copy_bias(&self, layer: usize, first: usize, out: &mut [f32]) {
        for (channel, out) in (first..).zip(out) {
            *out = channel as f32 * 0.125 - 64.0 + layer as f32;
        }
    }
}

fn golden() -> Value {
    serde_json::from_str(include_str!("data/engine_layout_digests.json")).unwrap()
}

fn digest(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

fn threads(count: usize) -> NonZeroUsize {
    NonZeroUsize::new(count).unwrap()
}

#[test]
fn smollm_streams_have_the_published_digests() {
    let golden = &golden()["smollm"];
    let stream = EngineStream::new(&SMOLLM, &Synthetic, 2);
    let mut buffer = vec![0xaa; stream.len_bytes()];
    stream.pack(&mut buffer, threads(3)).unwrap();
    assert_eq!(digest(&buffer), golden["sha256_all"].as_str().unwrap());
    let tile_bytes = 2 * golden["elements_per_tile"].as_u64().unwrap() as usize;
    let digests: Vec<String> = buffer.chunks_exact(tile_bytes).map(digest).collect();
    assert_eq!(serde_json::json!(digests), golden["sha256_per_tile_le_u16"]);
}

/// The streams hold 300 MB; one tile is in memory at a time.
#[test]
fn qwen_streams_have_the_published_digests() {
    let golden = &golden()["qwen"];
    let stream = EngineStream::new(&QWEN, &Synthetic, 1);
    for tile in 0..GEMV_TILES {
        let (blocks, layer_blocks) = (QWEN.tile_blocks(1, tile), QWEN.layer_blocks(tile));
        let mut buffer = vec![0xaa; blocks * QWEN.block_bytes()];
        assert_eq!(buffer.len() as u64, 2 * golden["elements_per_tile"][tile].as_u64().unwrap());
        // In two pieces that do not end where a part does.
        let (first, second) = buffer.split_at_mut(1000 * QWEN.block_bytes());
        stream.pack_blocks(tile, 0..1000, first).unwrap();
        stream.pack_blocks(tile, 1000..blocks, second).unwrap();
        assert_eq!(digest(&buffer), golden["sha256_per_tile_le_u16"][tile].as_str().unwrap(), "tile {tile}");
        let layer = &buffer[..layer_blocks * QWEN.block_bytes()];
        assert_eq!(digest(layer), golden["sha256_layer_part_per_tile"][tile].as_str().unwrap(), "tile {tile}");
    }
}

#[test]
fn blocks_and_buffers_are_checked() {
    let stream = EngineStream::new(&SMOLLM, &Synthetic, 1);
    let mut block = vec![0; SMOLLM.block_bytes()];
    let last = SMOLLM.tile_blocks(1, 0);
    assert!(stream.pack_blocks(0, last - 1..last, &mut block).is_ok());
    assert!(matches!(stream.pack_blocks(0, last..last + 1, &mut block), Err(LaneError::OutOfRange { .. })));
    assert!(matches!(stream.pack_blocks(6, 0..1, &mut block), Err(LaneError::OutOfRange { .. })));
    assert!(matches!(stream.pack_blocks(0, 0..2, &mut block), Err(LaneError::BufferLength { .. })));
    assert!(matches!(stream.pack(&mut block, threads(1)), Err(LaneError::BufferLength { .. })));
}

/// A package in `NPUHAL_XDNA1_PACKAGES/*`, made by `npuhal convert`; these tests need real ones of full size.
fn packages() -> Vec<Package> {
    let Some(folder) = std::env::var_os("NPUHAL_XDNA1_PACKAGES") else {
        #[expect(clippy::print_stderr, reason = "a test that does not run says so")]
        {
            eprintln!("soak: streams of real packages run with NPUHAL_XDNA1_PACKAGES=FOLDER");
        }
        return Vec::new();
    };
    let found = npuhal_models::package::scan(Path::new(&folder)).unwrap();
    let open = |path: &Path| {
        let options = OpenOptions { verify: false, control: &Control::new(), progress: &mut |_, _| () };
        Package::open(path, options).unwrap()
    };
    found.packages.iter().map(|package| open(&package.path)).collect()
}

#[test]
fn a_package_is_packed_straight_into_the_callers_memory() {
    for package in packages() {
        let weights = PackageWeights::new(&package).unwrap();
        let stream = EngineStream::of_package(&weights).unwrap();
        let layout = EngineLayout::of(package.metadata().family);
        let layers = package.metadata().shape.layers;
        // Blocks in the middle of a stream against the package's rows.
        let mut block = vec![0; layout.block_bytes()];
        let (tile, layer) = (4, layers - 1);
        let at = layer * layout.layer_blocks(tile) + 1 + 2;
        stream.pack_blocks(tile, at..at + 1, &mut block).unwrap();
        let first = layout.qkv_share(tile).start + 2 * layout.block_rows;
        let qkv = &package.layer_quantized(layer, LayerArray::Qkv).unwrap().bf16;
        for (row, packed) in (first..).zip(block.chunks_exact(qkv.row_bytes())) {
            assert_eq!(qkv.row(row), packed);
        }
        let mut embedding = vec![0; package.metadata().shape.hidden_size * 2];
        weights.copy_embedding(2, &mut embedding).unwrap();
        assert!(matches!(weights.copy_embedding(u32::MAX, &mut embedding), Err(LaneError::OutOfRange { .. })));
        let other = if package.metadata().family == Family::Llama { Family::Qwen2 } else { Family::Llama };
        assert!(matches!(weights.require("other", other), Err(LaneError::WrongModel { .. })));
    }
}

static WHOLE: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let stream = EngineStream::new(&SMOLLM, &Synthetic, 1);
    let mut buffer = vec![0; stream.len_bytes()];
    stream.pack(&mut buffer, threads(2)).unwrap();
    buffer
});

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Any run of blocks is that part of the whole buffer.
    #[test]
    fn any_part_is_part_of_the_whole(tile in 0..GEMV_TILES, first in 0..130usize, count in 0..130usize) {
        let stream = EngineStream::new(&SMOLLM, &Synthetic, 1);
        let last = (first + count).min(SMOLLM.tile_blocks(1, tile));
        let mut part = vec![0xaa; (last - first) * SMOLLM.block_bytes()];
        stream.pack_blocks(tile, first..last, &mut part).unwrap();
        let start = SMOLLM.tile_offset_bytes(1, tile) + first * SMOLLM.block_bytes();
        prop_assert!(part == WHOLE[start..start + part.len()]);
    }
}
