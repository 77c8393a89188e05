//! Captured control code of a vendor's runtime.

mod common;

use common::{read, shared_golden};
use npuhal_amdxdna::format::txn::{OpKind, Stream, TxnError, View};
use std::collections::BTreeMap;
use std::path::Path;

/// First two header words of version 0.1 for an AIE2P partition of 8 columns.
const PROPER: [u8; 8] = [0, 1, 4, 6, 8, 1, 0, 0];

fn with_header(path: &Path) -> Vec<u8> {
    let mut bytes = read(path);
    bytes[..8].copy_from_slice(&PROPER);
    bytes
}

fn counts(stream: &Stream) -> BTreeMap<&'static str, usize> {
    let mut counts = BTreeMap::new();
    for op in &stream.ops {
        *counts.entry(op.kind.name()).or_default() += 1;
    }
    counts
}

#[test]
fn captured_layers_walk_to_the_last_byte_and_re_encode() {
    let Some(folder) = shared_golden("captured_layers", "xdna2/fused_insts") else { return };
    for length in [1, 2, 4, 8, 16, 32, 64, 256, 1024, 4096] {
        let path = folder.join(format!("layer_L{length}.bin"));
        assert!(matches!(Stream::parse(&read(&path)), Err(TxnError::Version { major: 0x1D, minor: 0x57, .. })));
        let bytes = with_header(&path);
        assert_eq!(bytes.len(), 34_172);
        let stream = Stream::parse(&bytes).unwrap();
        let expected = [("BLOCKWRITE", 204), ("DDR_PATCH", 204), ("MASKWRITE", 197), ("TCT", 197), ("WRITE", 246)];
        assert_eq!(counts(&stream), BTreeMap::from(expected));
        assert_eq!(stream.ops.len(), 1048);
        assert_eq!(stream.encode().unwrap(), bytes);
        let last = View::new(&bytes).unwrap().ops().last().unwrap().unwrap();
        assert_eq!(last.at_bytes + last.len_bytes, bytes.len());
        for op in &stream.ops {
            assert!(!matches!(op.kind.token_wait(), Some(Err(_))), "{op}");
            let line = op.to_string();
            assert!(!line.contains("tile("), "a row that does not exist: {line}");
        }
    }
}

#[test]
fn captured_attention_streams_walk_and_re_encode() {
    let Some(folder) = shared_golden("captured_attention", "xdna2/fused_insts") else { return };
    for (length, size, ops) in [(1, 1684, 73), (2, 1684, 73), (16, 4308, 141), (32, 7060, 217)] {
        let path = folder.join(format!("mha_L{length}.bin"));
        assert!(matches!(Stream::parse(&read(&path)), Err(TxnError::Version { major: 9, minor: 3, .. })));
        let bytes = with_header(&path);
        let stream = Stream::parse(&bytes).unwrap();
        assert_eq!((bytes.len(), stream.ops.len()), (size, ops));
        assert_eq!(stream.ops.iter().filter(|op| matches!(op.kind, OpKind::Preempt { .. })).count(), 1);
        assert_eq!(stream.encode().unwrap(), bytes);
    }
}

#[test]
fn a_captured_stream_with_a_proper_header_needs_no_change() {
    let Some(folder) = shared_golden("captured_token0", "xdna2/fused_insts") else { return };
    let bytes = read(folder.join("txn_full_layer_token0.bin"));
    let stream = Stream::parse(&bytes).unwrap();
    assert_eq!((bytes.len(), stream.ops.len()), (6892, 183));
    assert_eq!(stream.encode().unwrap(), bytes);
}
