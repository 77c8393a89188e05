//! How data flows through the array: the object FIFOs of the engines, and the workers of the chunked SmolLM graph.
//!
//! Places, elements and depths of the engines are those of their published designs. Of the chunked graph the design states the
//! workers, their order and the weight streams; where its compiler puts the workers, and how deep its FIFOs are, it does not.

use crate::chunk::ChunkFormat;
use crate::layout::{
    CACHE_OBJECT_ELEMENTS, EngineLayout, GEMV_PLACES, GEMV_TILES, HUB_PLACE, JOIN_PLACE, LOGITS_GROUP_ROWS,
};
use npuhal_core::dtype::DType;
use npuhal_models::package::{Family, HEAD_DIM};

/// (column, row) of a tile; row 0 is the shim, row 1 the memory tile.
pub type TilePlace = (u8, u8);

/// What an object FIFO carries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Flow {
    /// Blocks of the weight stream of a GEMV tile.
    Weights(usize),
    /// The rows of a GEMV tile, on their way to the memory tile.
    Slice(usize),
    /// The hub's vector, on its way to a GEMV tile; one FIFO with a consumer on every tile.
    Broadcast(usize),
    /// Logits of a GEMV tile.
    Logits(usize),
    /// All slices, on their way to the hub.
    Joined,
    /// Header and KV cache.
    Cache,
    /// New keys and values.
    KvNew,
    /// The normed hidden vector.
    HiddenOut,
}

/// One end-to-end connection of an object FIFO.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fifo {
    /// What it carries.
    pub flow: Flow,
    /// Producer.
    pub source: TilePlace,
    /// Consumer.
    pub destination: TilePlace,
    /// Type of an element.
    pub dtype: DType,
    /// Elements of an object.
    pub elements: usize,
    /// Objects it holds.
    pub depth: usize,
}

/// The object FIFOs of an engine: those of each GEMV tile, then those of hub and memory tile.
#[must_use]
pub fn engine_fifos(layout: &EngineLayout) -> Vec<Fifo> {
    let bf16 = |flow, source, destination, elements, depth| Fifo {
        flow,
        source,
        destination,
        dtype: DType::Bf16,
        elements,
        depth,
    };
    let joined = layout.joined_elements();
    let mut fifos = Vec::new();
    for (tile, &place) in GEMV_PLACES.iter().enumerate() {
        let shim = weight_shim(tile);
        fifos.push(bf16(Flow::Weights(tile), shim, place, layout.block_elements, 2));
        fifos.push(bf16(Flow::Slice(tile), place, JOIN_PLACE, layout.slice_elements, 2));
        fifos.push(bf16(Flow::Broadcast(tile), HUB_PLACE, place, joined, 2));
        if layout.has_head {
            let (dtype, elements) = (DType::F32, LOGITS_GROUP_ROWS);
            fifos.push(Fifo { flow: Flow::Logits(tile), source: place, destination: shim, dtype, elements, depth: 2 });
        }
    }
    let hub_shim = (HUB_PLACE.0, 0);
    // The cache objects of the Qwen engine fill the hub's memory so far that it holds one at a time.
    let cache_depth = match layout.family {
        Family::Llama => 2,
        Family::Qwen2 => 1,
    };
    fifos.push(bf16(Flow::Joined, JOIN_PLACE, HUB_PLACE, joined, 2));
    fifos.push(bf16(Flow::Cache, hub_shim, HUB_PLACE, CACHE_OBJECT_ELEMENTS, cache_depth));
    fifos.push(bf16(Flow::KvNew, HUB_PLACE, hub_shim, layout.kv_new_elements(1), 1));
    if !layout.has_head {
        let hidden = layout.shape().hidden_size;
        fifos.push(bf16(Flow::HiddenOut, GEMV_PLACES[0], (GEMV_PLACES[0].0, 0), hidden, 1));
    }
    fifos
}

/// The shim through which the weight stream of a tile enters.
#[must_use]
pub const fn weight_shim(tile: usize) -> TilePlace {
    (GEMV_PLACES[tile % GEMV_TILES].0, 0)
}

/// A step of the chunked SmolLM graph, in the order of the pipeline.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Worker {
    /// RMSNorm before attention.
    InputNorm,
    /// Query, key and value projections.
    Qkv,
    /// Rotation, and packing for the attention workers.
    Rope,
    /// Attention of one KV head.
    Attention(usize),
    /// Output projection.
    OProj,
    /// First residual sum.
    AttentionResidual,
    /// RMSNorm before the feed-forward block.
    PostNorm,
    /// A third of the gate and up projections.
    GateUp(usize),
    /// The thirds put together.
    Merge,
    /// SwiGLU.
    SwiGlu,
    /// Down projection.
    Down,
    /// Second residual sum.
    MlpResidual,
}

/// Workers that share the gate and up projections.
pub const GATE_UP_WORKERS: usize = 3;

/// The workers of the chunked SmolLM graph.
#[must_use]
pub fn chunk_workers() -> Vec<Worker> {
    let kv_heads = Family::Llama.shape().kv_heads;
    let mut workers = vec![Worker::InputNorm, Worker::Qkv, Worker::Rope];
    workers.extend((0..kv_heads).map(Worker::Attention));
    workers.extend([Worker::OProj, Worker::AttentionResidual, Worker::PostNorm]);
    workers.extend((0..GATE_UP_WORKERS).map(Worker::GateUp));
    workers.extend([Worker::Merge, Worker::SwiGlu, Worker::Down, Worker::MlpResidual]);
    workers
}

/// Elements of the vector that a worker hands on, as the model's shape has them.
#[must_use]
pub fn chunk_elements(worker: Worker) -> usize {
    let shape = Family::Llama.shape();
    match worker {
        Worker::Qkv | Worker::Rope => shape.qkv_rows(),
        Worker::Attention(_) => shape.heads / shape.kv_heads * HEAD_DIM,
        Worker::GateUp(_) => 2 * shape.intermediate_size / GATE_UP_WORKERS,
        Worker::Merge => 2 * shape.intermediate_size,
        Worker::SwiGlu => shape.intermediate_size,
        _ => shape.hidden_size,
    }
}

/// A weight stream of the chunked SmolLM graph: the shim's column, its first worker, rows and columns of a block.
#[must_use]
pub fn chunk_streams() -> [(u8, Worker, (usize, usize)); 4] {
    let workers = [Worker::Qkv, Worker::OProj, Worker::GateUp(0), Worker::Down];
    let blocks = ChunkFormat::SmolLmBf16.block_shapes();
    std::array::from_fn(|stream| (stream as u8, workers[stream], blocks[stream]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::{QWEN, SMOLLM};

    fn find(layout: &EngineLayout, flow: Flow) -> (TilePlace, TilePlace, DType, usize, usize) {
        let fifo = engine_fifos(layout).into_iter().find(|fifo| fifo.flow == flow).unwrap();
        (fifo.source, fifo.destination, fifo.dtype, fifo.elements, fifo.depth)
    }

    #[test]
    fn the_engines_have_the_published_fifos() {
        assert_eq!((engine_fifos(&SMOLLM).len(), engine_fifos(&QWEN).len()), (22, 27));
        assert_eq!(find(&SMOLLM, Flow::Weights(5)), ((2, 0), (2, 3), DType::Bf16, 4608, 2));
        assert_eq!(find(&SMOLLM, Flow::Slice(1)), ((0, 3), (1, 1), DType::Bf16, 256, 2));
        assert_eq!(find(&SMOLLM, Flow::Broadcast(3)), ((3, 2), (1, 3), DType::Bf16, 1536, 2));
        assert_eq!(find(&SMOLLM, Flow::Joined), ((1, 1), (3, 2), DType::Bf16, 1536, 2));
        assert_eq!(find(&SMOLLM, Flow::Cache), ((3, 0), (3, 2), DType::Bf16, 8192, 2));
        assert_eq!(find(&SMOLLM, Flow::KvNew), ((3, 2), (3, 0), DType::Bf16, 384, 1));
        assert_eq!(find(&SMOLLM, Flow::HiddenOut), ((0, 2), (0, 0), DType::Bf16, 576, 1));
        assert_eq!(find(&QWEN, Flow::Weights(2)), ((1, 0), (1, 2), DType::Bf16, 3584, 2));
        assert_eq!(find(&QWEN, Flow::Logits(4)), ((2, 2), (2, 0), DType::F32, 64, 2));
        assert_eq!(find(&QWEN, Flow::Cache), ((3, 0), (3, 2), DType::Bf16, 8192, 1));
        assert_eq!(find(&QWEN, Flow::KvNew), ((3, 2), (3, 0), DType::Bf16, 256, 1));
    }

    #[test]
    fn the_chunked_graph_fills_the_array() {
        assert_eq!(chunk_workers().len(), 16);
        assert_eq!(chunk_streams().map(|(_, _, (rows, cols))| rows * cols), [18_432, 18_432, 18_432, 24_576]);
        assert_eq!([Worker::Qkv, Worker::Attention(0), Worker::GateUp(1)].map(chunk_elements), [960, 192, 1024]);
    }
}
