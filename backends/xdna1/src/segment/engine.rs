//! The single-dispatch engines: a whole decoder in one dispatch a token.

use super::generation::{Dispatch, Generation, Life};
use super::{
    POISON, Phases, SegmentError, SegmentOptions, Sequence, check_finite, is_finite_bf16, packed, show_kv, widen,
    zeroed,
};
use crate::header::{RotaryTable, header_elements, kv_rows, write_header};
use crate::kit::{Design, KernelImage, Kit, KitError};
use crate::layout::{BF16_BYTES, CACHE_OBJECT_ELEMENTS, EngineLayout};
use crate::stream::EngineStream;
use crate::weights::PackageWeights;
use npuhal_core::device::{BufferRef, Device};
use npuhal_core::error::RunError;
use npuhal_core::stage::{
    Control, HiddenRows, PhaseTime, Row, Segment, SegmentCapacity, SequenceId, Takes, Tap, TapSink, Want, Yields,
};
use npuhal_models::package::{Family, Shape};
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

/// A whole decoder on the NPU. The SmolLM engine yields normed rows, the Qwen engine logits.
///
/// Each position is one dispatch: the host writes the header (rotation, position, embedding), the NPU returns the keys and
/// values of all layers and the result, the host appends keys and values to the cache buffer.
pub struct Engine {
    life: Life,
    device: Arc<dyn Device>,
    whole: KernelImage,
    /// The engine without its head, where the kit has it.
    prefill: Option<KernelImage>,
    layout: EngineLayout,
    weights: PackageWeights,
    rotary: RotaryTable,
    buffers: Buffers,
    options: SegmentOptions,
    sequence: Sequence,
    header: Vec<u8>,
    embedding: Vec<u8>,
    kv_new: Vec<u8>,
    result: Vec<u8>,
    values: Vec<f32>,
    taps: Vec<Tap>,
    sink: Option<Box<dyn TapSink>>,
    phases: Phases,
}

/// In the order of the arguments.
struct Buffers {
    weights: BufferRef,
    cache: BufferRef,
    kv_new: BufferRef,
    result: BufferRef,
}

/// The list of the dispatch with the result, and of the one without.
const WHOLE: usize = 0;
const PREFILL: usize = 1;

impl Engine {
    /// Checks the kit against the package, then allocates the buffers and packs the weights straight from the mapped package.
    /// `theta` is the base of the rotary frequencies. No context is opened.
    ///
    /// # Errors
    /// [`SegmentError`]; nothing stays allocated.
    pub fn load(
        device: Arc<dyn Device>,
        weights: PackageWeights,
        theta: f32,
        kit: &Kit,
        options: SegmentOptions,
    ) -> Result<Self, SegmentError> {
        let (family, shape) = (weights.family(), weights.shape());
        let layers = shape.layers;
        let whole = kit.load(Design::engine(family), layers, shape)?;
        let prefill = match family {
            Family::Llama => None,
            Family::Qwen2 => match kit.load(Design::QwenEnginePrefill, layers, shape) {
                Ok(image) => Some(image),
                // Without it every position runs the head too.
                Err(KitError::NoKernel { .. }) => None,
                Err(error) => return Err(error.into()),
            },
        };
        let layout = EngineLayout::for_shape(family, shape)?;
        let [_, cache, kv_new, result] = layout.argument_bytes(layers);
        let stream = EngineStream::of_package(&weights)?;
        let buffers = Buffers {
            weights: packed(&*device, stream.len_bytes(), "engine weights".to_owned(), |bytes| {
                stream.pack(bytes, options.threads)
            })?,
            cache: zeroed(&*device, cache, "engine header and KV cache")?,
            kv_new: zeroed(&*device, kv_new, "engine new keys and values")?,
            result: zeroed(&*device, result, "engine result")?,
        };
        Ok(Self {
            life: Life::default(),
            device,
            whole,
            prefill,
            rotary: RotaryTable::new(theta),
            buffers,
            sequence: Sequence::new(&options, shape.vocab_size),
            options,
            header: vec![0; CACHE_OBJECT_ELEMENTS * BF16_BYTES],
            embedding: vec![0; shape.hidden_size * BF16_BYTES],
            kv_new: vec![0; kv_new],
            result: vec![0; result],
            values: Vec::new(),
            taps: taps_of(&layout),
            sink: None,
            phases: Phases::default(),
            layout,
            weights,
        })
    }

    fn layer_count(&self) -> usize {
        self.layout.shape().layers
    }

    /// Runs a row that was admitted; leaves its result in `self.values` where it is wanted.
    fn run(&mut self, row: Row, is_wanted: bool) -> Result<(), RunError> {
        let started = Instant::now();
        self.weights.copy_embedding(row.token, &mut self.embedding).map_err(bad_rows)?;
        write_header(&self.layout, &self.rotary, row.position, &self.embedding, &mut self.header).map_err(bad_rows)?;
        self.buffers.cache.write(0, &self.header[..header_elements(&self.layout) * BF16_BYTES])?;
        let list = if is_wanted || self.prefill.is_none() { WHOLE } else { PREFILL };
        self.kv_new.fill(POISON);
        self.buffers.kv_new.write(0, &self.kv_new)?;
        if is_wanted {
            self.result.fill(POISON);
            self.buffers.result.write(0, &self.result)?;
        }
        let started = self.phases.add("embedding", started);
        self.life.run(list, self.options.timeout)?;
        let started = self.phases.add("npu_engine", started);
        self.buffers.kv_new.read(0, &mut self.kv_new)?;
        if is_wanted {
            self.buffers.result.read(0, &mut self.result)?;
        }
        let result = if is_wanted { self.take_result(row) } else { Ok(()) };
        // Shown before it is judged: an observer looks for where numbers stop being finite.
        self.show(row, is_wanted)?;
        self.keep_kv(row)?;
        self.phases.add("kv_store", started);
        result
    }

    /// Appends the new keys and values to the cache buffer.
    fn keep_kv(&mut self, row: Row) -> Result<(), RunError> {
        if !is_finite_bf16(&self.kv_new) {
            let what = format!("keys or values at position {}", row.position);
            return Err(RunError::NotFinite { what });
        }
        for (at_bytes, bytes) in kv_rows(row.position, &self.kv_new) {
            self.buffers.cache.write(at_bytes, bytes)?;
        }
        Ok(())
    }

    /// The result that was read, as numbers.
    fn take_result(&mut self, row: Row) -> Result<(), RunError> {
        if self.layout.has_head {
            self.values.clear();
            self.values.extend(self.result.as_chunks::<4>().0.iter().map(|bits| f32::from_le_bytes(*bits)));
            check_finite(&self.values, || format!("logits at position {}", row.position))
        } else {
            widen(&self.result, &mut self.values, || format!("the hidden row at position {}", row.position))
        }
    }

    fn show(&mut self, row: Row, has_result: bool) -> Result<(), RunError> {
        let Some(sink) = &mut self.sink else { return Ok(()) };
        let Shape { layers, kv_heads, .. } = self.layout.shape();
        show_kv(&mut **sink, row, 0..layers, kv_heads, |layer, head, part, vector| {
            let first = ((layer * kv_heads + head) * 2 + part) * vector.len();
            vector.copy_from_slice(&self.kv_new[first..first + vector.len()]);
            Ok(())
        })?;
        if has_result {
            let tap = if self.layout.has_head { Tap::Logits } else { Tap::Normed };
            sink.observe(tap, row, &self.values);
        }
        Ok(())
    }
}

impl Segment for Engine {
    fn layers(&self) -> Range<usize> {
        0..self.layer_count()
    }

    fn takes(&self) -> Takes {
        Takes::Tokens
    }

    fn yields(&self) -> Yields {
        if self.layout.has_head { Yields::Logits } else { Yields::Normed }
    }

    fn width(&self) -> usize {
        if self.layout.has_head { self.layout.shape().vocab_size } else { self.layout.shape().hidden_size }
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
        let Buffers { weights, cache, kv_new, result } = &self.buffers;
        let dispatch = |image| {
            let buffers = [weights, cache, kv_new, result].map(BufferRef::clone).to_vec();
            vec![Dispatch { image, buffers }]
        };
        let lists: Vec<_> = [&self.whole].into_iter().chain(&self.prefill).map(dispatch).collect();
        self.life.begin(Generation::open(&*self.device, &lists)?);
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
        hidden.reset(want.count(rows.len()), self.width());
        let Some(row) = row else { return Ok(()) };
        let is_wanted = want.selects(0, rows.len());
        let has_result = is_wanted || self.sink.is_some();
        self.run(row, has_result)?;
        if is_wanted {
            hidden.row_mut(0).copy_from_slice(&self.values);
        }
        self.sequence.append(row);
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

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine")
            .field("device", &self.device())
            .field("layout", &self.layout.name)
            .field("len", &self.sequence.len)
            .finish_non_exhaustive()
    }
}

fn bad_rows(error: crate::LaneError) -> RunError {
    RunError::BadRows { reason: error.to_string() }
}

fn taps_of(layout: &EngineLayout) -> Vec<Tap> {
    let of_layer = |layer: usize| [Tap::K(layer as u32), Tap::V(layer as u32)];
    let result = if layout.has_head { Tap::Logits } else { Tap::Normed };
    (0..layout.shape().layers).flat_map(of_layer).chain([result]).collect()
}
