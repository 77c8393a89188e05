//! The LM head on the NPU: int8 rows times the normed hidden vector.

use super::generation::{Dispatch, Generation, Life};
use super::{POISON, Phases, SegmentError, SegmentOptions, packed, widen, zeroed};
use crate::chunk::pack_w8_head;
use crate::kit::{Design, KernelImage, Kit};
use crate::layout::BF16_BYTES;
use crate::weights::PackageWeights;
use npuhal_core::device::{BufferRef, Device};
use npuhal_core::dtype::bf16_bits;
use npuhal_core::error::RunError;
use npuhal_core::stage::{
    Control, HiddenRows, PhaseTime, Row, Segment, SegmentCapacity, SequenceId, Takes, Tap, TapSink, Want, Yields,
};
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

/// The head of a SmolLM model by the int8 projection: normed rows in, logits (bf16) out.
pub struct NpuHead {
    life: Life,
    device: Arc<dyn Device>,
    image: KernelImage,
    weights: BufferRef,
    input: BufferRef,
    output: BufferRef,
    layers: usize,
    hidden_size: usize,
    vocab_size: usize,
    options: SegmentOptions,
    bytes: Vec<u8>,
    values: Vec<f32>,
    sink: Option<Box<dyn TapSink>>,
    phases: Phases,
}

impl NpuHead {
    /// Packs the head's int8 rows into a device buffer. No context is opened.
    ///
    /// # Errors
    /// [`SegmentError`]; nothing stays allocated.
    pub fn load(
        device: Arc<dyn Device>,
        weights: &PackageWeights,
        kit: &Kit,
        options: SegmentOptions,
    ) -> Result<Self, SegmentError> {
        let shape = weights.shape();
        let image = kit.load(Design::W8Projection, shape.layers, shape)?;
        let arguments = Design::W8Projection.arguments(shape, shape.layers)?;
        // This order is inferred, here and in `begin`: `Design::arguments` says why.
        let [matrix, input, output] = [0, 1, 2].map(|index| arguments[index].bytes as usize);
        Ok(Self {
            life: Life::default(),
            weights: packed(&*device, matrix, "head weights".to_owned(), |bytes| {
                pack_w8_head(weights, bytes, options.threads)
            })?,
            input: zeroed(&*device, input, "head input")?,
            output: zeroed(&*device, output, "head output")?,
            device,
            image,
            layers: shape.layers,
            hidden_size: shape.hidden_size,
            vocab_size: shape.vocab_size,
            options,
            bytes: Vec::new(),
            values: Vec::new(),
            sink: None,
            phases: Phases::default(),
        })
    }

    fn run(&mut self, row: Row, input: &[f32]) -> Result<(), RunError> {
        let started = Instant::now();
        self.bytes.clear();
        self.bytes.extend(input.iter().flat_map(|value| bf16_bits(*value).to_le_bytes()));
        self.input.write(0, &self.bytes)?;
        self.bytes.clear();
        self.bytes.resize(self.vocab_size * BF16_BYTES, POISON);
        self.output.write(0, &self.bytes)?;
        self.life.run(0, self.options.timeout)?;
        self.output.read(0, &mut self.bytes)?;
        self.phases.add("npu_lm_head", started);
        widen(&self.bytes, &mut self.values, || format!("logits at position {}", row.position))?;
        if let Some(sink) = &mut self.sink {
            sink.observe(Tap::Logits, row, &self.values);
        }
        Ok(())
    }
}

impl Segment for NpuHead {
    fn layers(&self) -> Range<usize> {
        self.layers..self.layers
    }

    fn takes(&self) -> Takes {
        Takes::Normed
    }

    fn yields(&self) -> Yields {
        Yields::Logits
    }

    fn width(&self) -> usize {
        self.vocab_size
    }

    fn capacity(&self) -> SegmentCapacity {
        SegmentCapacity { positions: self.options.positions, rows_per_call: 1, sequences: 1 }
    }

    fn device(&self) -> &str {
        &self.device.card().id
    }

    fn begin(&mut self) -> Result<(), RunError> {
        self.life.end();
        self.phases.clear();
        let buffers = [&self.weights, &self.input, &self.output].map(BufferRef::clone).to_vec();
        self.life.begin(Generation::open(&*self.device, &[vec![Dispatch { image: &self.image, buffers }]])?);
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
        if rows.len() > 1 {
            return Err(RunError::Capacity { what: "rows of a call", found: rows.len() as u64, limit: 1 });
        }
        if (hidden.rows(), hidden.width()) != (rows.len(), self.hidden_size) {
            let (found_rows, found_width, width) = (hidden.rows(), hidden.width(), self.hidden_size);
            let reason = format!("wanted {} × {width} normed values, found {found_rows} × {found_width}", rows.len());
            return Err(RunError::BadRows { reason });
        }
        let Some(row) = rows.first().filter(|_| want.selects(0, rows.len())) else {
            hidden.reset(0, self.vocab_size);
            return Ok(());
        };
        self.run(*row, hidden.row(0))?;
        hidden.reset(1, self.vocab_size);
        hidden.row_mut(0).copy_from_slice(&self.values);
        Ok(())
    }

    fn truncate(&mut self, _: SequenceId, len: usize) -> usize {
        len
    }

    fn taps(&self) -> &[Tap] {
        &[Tap::Logits]
    }

    fn observe(&mut self, sink: Option<Box<dyn TapSink>>) {
        self.sink = sink;
    }

    fn phases(&self) -> Vec<PhaseTime> {
        self.phases.of(self.options.profiles)
    }
}

impl std::fmt::Debug for NpuHead {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NpuHead")
            .field("device", &self.device())
            .field("vocab_size", &self.vocab_size)
            .finish_non_exhaustive()
    }
}
