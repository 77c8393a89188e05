//! Sizes of the buffers, and the small ones' contents.

use super::layer::check_destination;
use super::{HEAD_DIM, LayerLayout, PackError, RopeTable, TILE_BYTES, tiles_of};
use crate::dimensions::Dimensions;

/// Size of the small buffers.
pub const AUXILIARY_BYTES: u64 = 1 << 20;
/// Size of the buffer that the initial run takes and does not touch.
pub const INIT_BYTES: u64 = 4096;
/// Bytes of a rotation at the start of the norms buffer: 64 cosines, 64 sines, bf16.
pub const ROPE_BYTES: usize = 2 * HEAD_DIM;
/// Bytes of a norms buffer that the kernel reads: a rotation, and the norms of query and key heads.
pub const NORMS_BYTES: usize = 3 * ROPE_BYTES;
/// Most positions that the lane serves.
pub const POSITIONS_MAX: u32 = 8192;
const KV_BYTES_MIN: u64 = 32 << 20;
/// Halves of the KV heads, for keys and for values.
const KV_REGIONS: u64 = 4;

/// Sizes of the buffers, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BufferSizes {
    /// Residual stream, one for all layers.
    pub act: u64,
    /// Weights of a layer.
    pub weights: u64,
    /// The two norms of a layer.
    pub layer_norms: u64,
    /// Rotation and norms of heads, one a layer and slot.
    pub norms: u64,
    /// KV cache of a layer.
    pub kv: u64,
    /// Logits.
    pub logits: u64,
    /// Weights of the head.
    pub head: u64,
    /// Final norm.
    pub final_norm: u64,
}

impl BufferSizes {
    /// Sizes for a model, as the published host allocates them.
    #[must_use]
    pub fn new(dimensions: &Dimensions) -> Self {
        let region = dimensions.kv_heads as u64 / 2 * HEAD_DIM as u64 * 2 * u64::from(POSITIONS_MAX);
        let auxiliary = |bytes: usize| AUXILIARY_BYTES.max(bytes as u64);
        Self {
            act: auxiliary(dimensions.hidden_bytes()),
            weights: LayerLayout::new(dimensions).len_bytes() as u64,
            layer_norms: auxiliary(2 * dimensions.hidden_bytes()),
            norms: AUXILIARY_BYTES,
            kv: KV_BYTES_MIN.max(region * KV_REGIONS),
            logits: auxiliary(dimensions.logits_bytes()),
            head: (tiles_of(dimensions.vocab, dimensions.hidden) * TILE_BYTES) as u64,
            final_norm: auxiliary(dimensions.hidden_bytes()),
        }
    }
}

/// Fills the start of the norms buffer of a layer: input norm, then post-attention norm, bf16.
///
/// # Errors
/// A norm of another length; a destination of another size than both.
pub fn fill_layer_norms(
    dimensions: &Dimensions,
    input: &[u8],
    post_attention: &[u8],
    into: &mut [u8],
) -> Result<(), PackError> {
    let len_bytes = dimensions.hidden_bytes();
    check_norm("input_layernorm.weight", len_bytes, input)?;
    check_norm("post_attention_layernorm.weight", len_bytes, post_attention)?;
    check_destination("layer norms", 2 * len_bytes, into)?;
    let (first, second) = into.split_at_mut(len_bytes);
    first.copy_from_slice(input);
    second.copy_from_slice(post_attention);
    Ok(())
}

/// Fills the norms buffer of a layer and slot: the rotation of position 0, then the norms of query and key heads. Missing norms
/// stay zero.
///
/// # Errors
/// A norm of another length; a destination of another size than [`NORMS_BYTES`].
pub fn fill_norms(rope: &RopeTable, q: Option<&[u8]>, k: Option<&[u8]>, into: &mut [u8]) -> Result<(), PackError> {
    const LEN_BYTES: usize = 2 * HEAD_DIM;
    for (what, norm) in [("self_attn.q_norm.weight", q), ("self_attn.k_norm.weight", k)] {
        norm.map_or(Ok(()), |norm| check_norm(what, LEN_BYTES, norm))?;
    }
    check_destination("head norms", NORMS_BYTES, into)?;
    into.fill(0);
    into[..ROPE_BYTES].copy_from_slice(&rope.row(0));
    for (at, norm) in [(ROPE_BYTES, q), (ROPE_BYTES + LEN_BYTES, k)] {
        if let Some(norm) = norm {
            into[at..at + LEN_BYTES].copy_from_slice(norm);
        }
    }
    Ok(())
}

fn check_norm(what: &str, wanted_bytes: usize, norm: &[u8]) -> Result<(), PackError> {
    match norm.len() == wanted_bytes {
        true => Ok(()),
        false => Err(PackError::NormBytes { what: what.to_owned(), wanted_bytes, found_bytes: norm.len() }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dimensions::tests::qwen3_0_6b;

    #[test]
    fn sizes_are_the_published_ones() {
        let dimensions = Dimensions::of(&qwen3_0_6b()).unwrap();
        let sizes = BufferSizes::new(&dimensions);
        assert_eq!((sizes.weights, sizes.head, sizes.kv), (9_830_400, 97_239_040, 32 << 20));
        assert_eq!([sizes.act, sizes.layer_norms, sizes.norms, sizes.logits, sizes.final_norm], [1 << 20; 5]);
        let wide = Dimensions { kv_heads: 16, heads: 32, vocab: 1 << 20, ..dimensions };
        let sizes = BufferSizes::new(&wide);
        assert_eq!((sizes.kv, sizes.logits), (64 << 20, 2 << 20));
        assert_eq!(BufferSizes::new(&Dimensions { kv_heads: 2, ..dimensions }).kv, 32 << 20);
    }

    #[test]
    fn norms_stand_one_behind_the_other() {
        let dimensions = Dimensions::of(&qwen3_0_6b()).unwrap();
        let mut norms = vec![0; 4096];
        fill_layer_norms(&dimensions, &[1; 2048], &[2; 2048], &mut norms).unwrap();
        assert_eq!((norms[0], norms[2047], norms[2048], norms[4095]), (1, 1, 2, 2));
        let error = fill_layer_norms(&dimensions, &[1; 2048], &[2; 2047], &mut norms).unwrap_err();
        assert!(error.to_string().contains("post_attention_layernorm.weight has 2047 bytes; wanted 2048"), "{error}");
        assert!(fill_layer_norms(&dimensions, &[1; 2048], &[2; 2048], &mut norms[1..]).is_err());

        let rope = RopeTable::new(1e6);
        let mut norms = [9; NORMS_BYTES];
        fill_norms(&rope, Some(&[3; 256]), None, &mut norms).unwrap();
        // cos 0 is 1 in bf16, sin 0 is 0.
        assert_eq!(norms[..4], [0x80, 0x3F, 0x80, 0x3F]);
        assert_eq!((norms[126..130].to_vec(), norms[255]), (vec![0x80, 0x3F, 0, 0], 0));
        assert_eq!((norms[256], norms[511], norms[512], norms[767]), (3, 3, 0, 0));
        fill_norms(&rope, Some(&[3; 256]), Some(&[4; 256]), &mut norms).unwrap();
        assert_eq!((norms[512], norms[767]), (4, 4));
        assert!(fill_norms(&rope, Some(&[3; 255]), None, &mut norms).is_err());
        assert!(fill_norms(&rope, None, None, &mut norms[1..]).is_err());
    }
}
