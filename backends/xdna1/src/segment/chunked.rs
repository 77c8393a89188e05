//! The chunked graphs: consecutive layers of a model, a few in each dispatch.

use super::generation::{Dispatch, Generation, Life};
use super::{Phases, SegmentError, SegmentOptions, Sequence, is_finite_bf16, packed, show_kv, widen, zeroed};
use crate::chunk::{ChunkFormat, pack_qwen_params, pack_smollm_gammas};
use crate::header::{ROPE_ROW_ELEMENTS, RotaryTable};
use crate::kit::{Design, KernelImage, Kit, KitError, chunk_cache_bytes};
use crate::layout::{BF16_BYTES, CACHE_OBJECT_ELEMENTS, POSITIONS};
use crate::weights::PackageWeights;
use npuhal_core::device::{BufferRef, Device};
use npuhal_core::dtype::bf16_bits;
use npuhal_core::error::RunError;
use npuhal_core::stage::{
    Control, HiddenRows, PhaseTime, Row, Segment, SegmentCapacity, SequenceId, Takes, Tap, TapSink, Want, Yields,
};
use npuhal_models::package::{HEAD_DIM, Shape};
use std::cmp::Reverse;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

/// How layers are cut into dispatches: as few as the kit's kernels allow, of those the largest first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChunkPlan {
    /// The dispatches in order.
    pub chunks: Vec<Range<usize>>,
}

impl ChunkPlan {
    /// Cuts `layers` leading layers into dispatches of at most `limit` layers, each of a size that the kit has a kernel for.
    ///
    /// # Errors
    /// As [`Kit::find`] for the first dispatch that has no kernel.
    pub fn new(kit: &Kit, format: ChunkFormat, shape: Shape, layers: usize, limit: usize) -> Result<Self, KitError> {
        let design = Design::of_chunk(format);
        let mut chunks = Vec::new();
        let mut first = 0;
        for size in fewest(&kit.chunk_sizes(design, shape), layers, limit) {
            // What the kit states must fit also where the size is right.
            kit.find(design, size, shape)?;
            chunks.push(first..first + size);
            first += size;
        }
        Ok(Self { chunks })
    }

    /// The same number of layers in the same dispatches, from layer `first` on.
    #[must_use]
    pub fn moved_to(&self, first: usize) -> Self {
        let from = self.chunks.first().map_or(0, |chunk| chunk.start);
        let moved = |chunk: &Range<usize>| chunk.start - from + first..chunk.end - from + first;
        Self { chunks: self.chunks.iter().map(moved).collect() }
    }
}

/// Fewest dispatches of `layers` layers, each of one of the ascending `sizes` and at most `limit` long, the largest first. Where
/// there are none, the longest that can be filled, and then the size that is missing.
fn fewest(sizes: &[usize], layers: usize, limit: usize) -> Vec<usize> {
    // For each number of layers the fewest dispatches, and the largest size that one of them has.
    let mut best: Vec<Option<(usize, usize)>> = vec![Some((0, 0))];
    for count in 1..=layers {
        let fitting = sizes.iter().copied().filter(|size| (1..=count.min(limit.max(1))).contains(size));
        let cuts = fitting.filter_map(|size| Some((best[count - size]?.0 + 1, size)));
        let fewest = cuts.min_by_key(|(dispatches, size)| (*dispatches, Reverse(*size)));
        best.push(fewest);
    }
    let possible = (0..=layers).rev().find(|count| best[*count].is_some()).unwrap_or(0);
    let (mut cut, mut rest) = (Vec::new(), possible);
    while let Some((_, size)) = best[rest].filter(|_| rest > 0) {
        cut.push(size);
        rest -= size;
    }
    if possible < layers {
        cut.push(limit.clamp(1, layers - possible));
    }
    cut
}

/// Layers of a model on the NPU: tokens in, or from a later layer on the residual stream; the residual stream out, both in bf16.
/// Keys and values stay in device buffers, which the graphs extend themselves.
pub struct Chunked {
    life: Life,
    device: Arc<dyn Device>,
    format: ChunkFormat,
    weights: PackageWeights,
    rotary: RotaryTable,
    images: Vec<KernelImage>,
    chunks: Vec<Chunk>,
    rope: BufferRef,
    hidden: BufferRef,
    options: SegmentOptions,
    sequence: Sequence,
    bytes: Vec<u8>,
    values: Vec<f32>,
    taps: Vec<Tap>,
    sink: Option<Box<dyn TapSink>>,
    phases: Phases,
}

struct Chunk {
    layers: Range<usize>,
    /// Its kernel among the images.
    image: usize,
    weights: BufferRef,
    params: BufferRef,
    cache: BufferRef,
}

impl Chunked {
    /// Loads the kernels that `plan` needs, allocates the buffers and packs the weights. `theta` is the base of the rotary
    /// frequencies. No context is opened.
    ///
    /// # Errors
    /// [`SegmentError`]; nothing stays allocated.
    pub fn load(
        device: Arc<dyn Device>,
        weights: PackageWeights,
        theta: f32,
        kit: &Kit,
        format: ChunkFormat,
        plan: &ChunkPlan,
        options: SegmentOptions,
    ) -> Result<Self, SegmentError> {
        let (design, shape) = (Design::of_chunk(format), weights.shape());
        let mut images: Vec<KernelImage> = Vec::new();
        for layers in &plan.chunks {
            if !images.iter().any(|image| image.layers == layers.len()) {
                images.push(kit.load(design, layers.len(), shape)?);
            }
        }
        let chunk = |layers: &Range<usize>| -> Result<Chunk, SegmentError> {
            let arguments = design.arguments(shape, layers.len())?;
            let label = |what: &str| format!("layers {}..{} {what}", layers.start, layers.end);
            let pack_params = match format {
                ChunkFormat::QwenBf16 => pack_qwen_params,
                _ => pack_smollm_gammas,
            };
            Ok(Chunk {
                // Every size of the plan is among the images.
                image: images.iter().position(|image| image.layers == layers.len()).unwrap_or(0),
                weights: packed(&*device, arguments[0].bytes as usize, label("weights"), |bytes| {
                    format.pack(&weights, layers.clone(), bytes, options.threads)
                })?,
                params: packed(&*device, arguments[1].bytes as usize, label("parameters"), |bytes| {
                    pack_params(&weights, layers.clone(), bytes)
                })?,
                cache: zeroed(&*device, chunk_cache_bytes(shape, layers.len()), &label("KV cache"))?,
                layers: layers.clone(),
            })
        };
        let chunks = plan.chunks.iter().map(chunk).collect::<Result<Vec<_>, _>>()?;
        Ok(Self {
            life: Life::default(),
            rope: zeroed(&*device, ROPE_ROW_ELEMENTS * BF16_BYTES, "rotary row")?,
            hidden: zeroed(&*device, shape.hidden_size * BF16_BYTES, "hidden row")?,
            device,
            format,
            rotary: RotaryTable::new(theta),
            taps: taps_of(&chunks),
            weights,
            images,
            chunks,
            sequence: Sequence::new(&options, shape.vocab_size),
            options,
            bytes: Vec::new(),
            values: Vec::new(),
            sink: None,
            phases: Phases::default(),
        })
    }

    /// How it reads its weights.
    #[must_use]
    pub fn format(&self) -> ChunkFormat {
        self.format
    }

    /// Consecutive chunks that run as one list: those of one kernel container.
    fn lists(&self) -> Vec<Range<usize>> {
        let container = |index: usize| &self.images[self.chunks[index].image].xclbin_sha256;
        let mut lists: Vec<Range<usize>> = Vec::new();
        for index in 0..self.chunks.len() {
            match lists.last_mut() {
                Some(last) if container(last.start) == container(index) => last.end = index + 1,
                _ => lists.push(index..index + 1),
            }
        }
        lists
    }

    /// Writes what the first layer starts from: the token's embedding, or the residual stream of the layer before.
    fn write_input(&mut self, row: Row, hidden: &HiddenRows) -> Result<(), RunError> {
        self.bytes.resize(self.weights.shape().hidden_size * BF16_BYTES, 0);
        if self.takes() == Takes::Tokens {
            let bad_rows = |error: crate::LaneError| RunError::BadRows { reason: error.to_string() };
            self.weights.copy_embedding(row.token, &mut self.bytes).map_err(bad_rows)?;
        } else {
            for (bytes, value) in self.bytes.as_chunks_mut::<BF16_BYTES>().0.iter_mut().zip(hidden.row(0)) {
                *bytes = bf16_bits(*value).to_le_bytes();
            }
        }
        Ok(self.hidden.write(0, &self.bytes)?)
    }

    /// Runs a row that was admitted; leaves the residual stream in `self.values`.
    fn run(&mut self, row: Row, hidden: &HiddenRows) -> Result<(), RunError> {
        let started = Instant::now();
        self.write_input(row, hidden)?;
        let started = self.phases.add("embedding", started);
        let rotation = self.rotary.chunk_row(row.position).map(u16::to_le_bytes);
        self.rope.write(0, rotation.as_flattened())?;
        let started = self.phases.add("rope_lut", started);
        // An observer sees what is between the chunks, so each runs by itself: those lists follow the others.
        let whole = self.lists().len();
        if self.sink.is_none() {
            (0..whole).try_for_each(|list| self.life.run(list, self.options.timeout))?;
        } else {
            for chunk in 0..self.chunks.len() {
                self.life.run(whole + chunk, self.options.timeout)?;
                self.show(row, chunk)?;
            }
        }
        self.hidden.read(0, &mut self.bytes)?;
        self.phases.add("npu_decoder", started);
        self.check_kv(row)?;
        widen(&self.bytes, &mut self.values, || format!("the hidden row at position {}", row.position))
    }

    /// Keys and values that the graphs have appended are finite.
    fn check_kv(&self, row: Row) -> Result<(), RunError> {
        let kv_heads = self.weights.shape().kv_heads;
        let mut vector = [0; HEAD_DIM * BF16_BYTES];
        for chunk in &self.chunks {
            for object in 0..chunk.layers.len() * kv_heads {
                for part in 0..2 {
                    let at_bytes = cache_row(object, part, row.position);
                    chunk.cache.read(at_bytes, &mut vector)?;
                    if !is_finite_bf16(&vector) {
                        let layer = chunk.layers.start + object / kv_heads;
                        let what = format!("keys or values of layer {layer} at position {}", row.position);
                        return Err(RunError::NotFinite { what });
                    }
                }
            }
        }
        Ok(())
    }

    /// Shows what a chunk has left behind: keys and values of its layers, and the residual stream.
    fn show(&mut self, row: Row, index: usize) -> Result<(), RunError> {
        let Some(sink) = &mut self.sink else { return Ok(()) };
        let chunk = &self.chunks[index];
        let kv_heads = self.weights.shape().kv_heads;
        show_kv(&mut **sink, row, chunk.layers.clone(), kv_heads, |layer, head, part, vector| {
            Ok(chunk.cache.read(cache_row(layer * kv_heads + head, part, row.position), vector)?)
        })?;
        self.hidden.read(0, &mut self.bytes)?;
        // Shown first: an observer looks for where numbers stop being finite.
        let widened = widen(&self.bytes, &mut self.values, || format!("the hidden row at position {}", row.position));
        sink.observe(Tap::LayerOut(chunk.layers.end as u32 - 1), row, &self.values);
        widened
    }

    fn open(&self) -> Result<Generation, RunError> {
        let dispatch = |chunk: &Chunk| {
            let Chunk { image, weights, params, cache, .. } = chunk;
            let buffers = [weights, params, &self.rope, &self.hidden, cache].map(BufferRef::clone).to_vec();
            Dispatch { image: &self.images[*image], buffers }
        };
        let single = (0..self.chunks.len()).map(|chunk| chunk..chunk + 1);
        let lists: Vec<Vec<Dispatch<'_>>> = self
            .lists()
            .into_iter()
            .chain(single)
            .map(|chunks| self.chunks[chunks].iter().map(dispatch).collect())
            .collect();
        Ok(Generation::open(&*self.device, &lists)?)
    }
}

impl Segment for Chunked {
    fn layers(&self) -> Range<usize> {
        let first = self.chunks.first().map_or(0, |chunk| chunk.layers.start);
        first..self.chunks.last().map_or(first, |chunk| chunk.layers.end)
    }

    fn takes(&self) -> Takes {
        if self.layers().start == 0 { Takes::Tokens } else { Takes::Hidden }
    }

    fn yields(&self) -> Yields {
        Yields::Hidden
    }

    fn width(&self) -> usize {
        self.weights.shape().hidden_size
    }

    fn capacity(&self) -> SegmentCapacity {
        self.sequence.capacity()
    }

    fn device(&self) -> &str {
        &self.device.card().id
    }

    fn begin(&mut self) -> Result<(), RunError> {
        self.life.end();
        self.phases.clear();
        self.sequence.begin();
        let generation = self.open()?;
        self.life.begin(generation);
        Ok(())
    }

    fn end(&mut self) {
        self.life.end();
    }

    fn forward(
        &mut self,
        rows: &[Row],
        hidden: &mut HiddenRows,
        want: Want<'_>,
        control: &Control,
    ) -> Result<(), RunError> {
        control.check()?;
        let row = self.sequence.admit(rows, want)?;
        let width = self.width();
        if self.takes() == Takes::Hidden && (hidden.rows(), hidden.width()) != (rows.len(), width) {
            let (found_rows, found_width) = (hidden.rows(), hidden.width());
            let reason = format!("wanted {} × {width} hidden values, found {found_rows} × {found_width}", rows.len());
            return Err(RunError::BadRows { reason });
        }
        if let Some(row) = row {
            self.run(row, hidden)?;
            self.sequence.append(row);
        }
        hidden.reset(want.count(rows.len()), width);
        if row.is_some() && want.selects(0, rows.len()) {
            hidden.row_mut(0).copy_from_slice(&self.values);
        }
        Ok(())
    }

    fn truncate(&mut self, sequence: SequenceId, len: usize) -> usize {
        self.sequence.truncate(sequence, len)
    }

    fn taps(&self) -> &[Tap] {
        &self.taps
    }

    fn observe(&mut self, sink: Option<Box<dyn TapSink>>) {
        self.sink = sink;
    }

    fn phases(&self) -> Vec<PhaseTime> {
        self.phases.of(self.options.profiles)
    }
}

impl std::fmt::Debug for Chunked {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Chunked")
            .field("device", &self.device())
            .field("format", &self.format)
            .field("layers", &self.layers())
            .field("len", &self.sequence.len)
            .finish_non_exhaustive()
    }
}

/// Byte offset in a chunk's cache of a key (part 0) or a value (part 1) of an object: of a layer's head.
fn cache_row(object: usize, part: usize, position: u32) -> u64 {
    let row = part * POSITIONS + position as usize;
    (BF16_BYTES * (object * CACHE_OBJECT_ELEMENTS + row * HEAD_DIM)) as u64
}

fn taps_of(chunks: &[Chunk]) -> Vec<Tap> {
    let of_layer = |layer: usize| [Tap::K(layer as u32), Tap::V(layer as u32)];
    let of_chunk = |chunk: &Chunk| {
        let last = Tap::LayerOut(chunk.layers.end as u32 - 1);
        chunk.layers.clone().flat_map(of_layer).chain([last]).collect::<Vec<_>>()
    };
    chunks.iter().flat_map(of_chunk).collect()
}
