//! The arrays of a package.

use super::shape::Shape;
use crate::source::{LayerTensor, TensorRole};

/// An array of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum LayerArray {
    /// Query, key and value projections, stacked on rows.
    Qkv,
    /// Their biases, one after the other.
    QkvBias,
    /// Output projection of attention.
    OProj,
    /// Gate projection, then up projection, stacked on rows.
    GateUp,
    /// Down projection.
    DownProj,
    /// RMSNorm before attention.
    InputNorm,
    /// RMSNorm before the feed-forward block.
    PostAttnNorm,
}

impl LayerArray {
    pub(super) const ALL: [Self; 7] =
        [Self::Qkv, Self::QkvBias, Self::OProj, Self::GateUp, Self::DownProj, Self::InputNorm, Self::PostAttnNorm];

    fn name(self) -> &'static str {
        match self {
            Self::Qkv => "qkv",
            Self::QkvBias => "qkv_bias",
            Self::OProj => "o_proj",
            Self::GateUp => "gate_up",
            Self::DownProj => "down_proj",
            Self::InputNorm => "input_norm",
            Self::PostAttnNorm => "post_attn_norm",
        }
    }
}

/// Name of a layer's array in a package: `layer07.qkv`.
#[must_use]
pub fn layer_array(layer: usize, array: LayerArray) -> String {
    format!("layer{layer:02}.{}", array.name())
}

/// How an array is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Storage {
    Raw,
    Quantized,
}

/// Where rows of an array come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Part {
    Tensor(TensorRole),
    /// Zeros where the source has no such tensor.
    TensorOrZeros(TensorRole),
    /// The head, or the embedding where the source has none.
    Head,
}

/// An array of a package: what it is called, how large it is, and what it is made of.
#[derive(Debug, Clone)]
pub(super) struct Array {
    pub(super) name: String,
    pub(super) storage: Storage,
    /// 1 for a vector.
    pub(super) rows: usize,
    pub(super) cols: usize,
    /// Each with its rows (of a matrix) or columns (of a vector).
    pub(super) parts: Vec<(Part, usize)>,
}

impl Array {
    pub(super) fn is_vector(&self) -> bool {
        self.rows == 1
    }

    pub(super) fn elements(&self) -> u64 {
        self.rows as u64 * self.cols as u64
    }

    /// Bytes of all its files.
    pub(super) fn len_bytes(&self) -> u64 {
        match self.storage {
            Storage::Raw => 2 * self.elements(),
            Storage::Quantized => 3 * self.elements() + 4 * self.rows as u64,
        }
    }

    /// Dimensions as `metadata.json` states them.
    pub(super) fn shape(&self) -> Vec<u64> {
        if self.is_vector() { vec![self.cols as u64] } else { vec![self.rows as u64, self.cols as u64] }
    }
}

/// All arrays of a package of `shape`.
pub(super) fn arrays(shape: &Shape) -> Vec<Array> {
    let matrix = |name: &str, storage, cols, parts: Vec<(Part, usize)>| Array {
        name: name.to_owned(),
        storage,
        rows: parts.iter().map(|(_, rows)| rows).sum(),
        cols,
        parts,
    };
    let vector = |name: &str, parts: Vec<(Part, usize)>| Array {
        name: name.to_owned(),
        storage: Storage::Raw,
        rows: 1,
        cols: parts.iter().map(|(_, cols)| cols).sum(),
        parts,
    };
    let Shape { hidden_size: hidden, intermediate_size: wide, vocab_size, layers, .. } = *shape;
    let (q, kv) = (shape.q_width(), shape.kv_width());
    let embedding = vec![(Part::Tensor(TensorRole::TokenEmbedding), vocab_size)];
    let mut arrays = vec![
        matrix("token_embedding", Storage::Raw, hidden, embedding),
        vector("final_norm", vec![(Part::Tensor(TensorRole::FinalNorm), hidden)]),
        matrix("lm_head", Storage::Quantized, hidden, vec![(Part::Head, vocab_size)]),
    ];
    for layer in 0..layers {
        let tensor = |tensor| Part::Tensor(TensorRole::Layer(layer, tensor));
        let bias = |tensor| Part::TensorOrZeros(TensorRole::Layer(layer, tensor));
        for array in LayerArray::ALL {
            let name = &layer_array(layer, array);
            let quantized = |cols, parts| matrix(name, Storage::Quantized, cols, parts);
            arrays.push(match array {
                LayerArray::Qkv => {
                    let (q_rows, k_rows, v_rows) =
                        (tensor(LayerTensor::Q), tensor(LayerTensor::K), tensor(LayerTensor::V));
                    quantized(hidden, vec![(q_rows, q), (k_rows, kv), (v_rows, kv)])
                }
                LayerArray::QkvBias => {
                    let parts = [(LayerTensor::QBias, q), (LayerTensor::KBias, kv), (LayerTensor::VBias, kv)];
                    vector(name, parts.map(|(part, len)| (bias(part), len)).to_vec())
                }
                LayerArray::OProj => quantized(q, vec![(tensor(LayerTensor::O), hidden)]),
                LayerArray::GateUp => {
                    quantized(hidden, vec![(tensor(LayerTensor::Gate), wide), (tensor(LayerTensor::Up), wide)])
                }
                LayerArray::DownProj => quantized(wide, vec![(tensor(LayerTensor::Down), hidden)]),
                LayerArray::InputNorm => vector(name, vec![(tensor(LayerTensor::InputNorm), hidden)]),
                LayerArray::PostAttnNorm => vector(name, vec![(tensor(LayerTensor::PostAttentionNorm), hidden)]),
            });
        }
    }
    arrays
}

#[cfg(test)]
mod tests {
    use super::super::shape::Family;
    use super::*;

    #[test]
    fn packages_have_the_published_sizes() {
        let sizes = |family: Family| {
            let arrays = arrays(&family.shape());
            let files: usize = arrays.iter().map(|array| if array.storage == Storage::Raw { 1 } else { 3 }).sum();
            (arrays.iter().map(Array::len_bytes).sum::<u64>(), files)
        };
        assert_eq!(sizes(Family::Llama), (461_009_280, 455));
        assert_eq!(sizes(Family::Qwen2), (1_756_120_320, 365));
    }
}
