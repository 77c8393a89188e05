//! Buffers of a loaded model. They outlive contexts.

use super::LaneError;
use super::source::{LaneSource, LayerTensors};
use crate::dimensions::Dimensions;
use crate::kernels::Kernels;
use crate::packing::{
    BufferSizes, INIT_BYTES, LayerLayout, LayerWeights, NORMS_BYTES, PackError, ROPE_BYTES, RopeTable,
    fill_layer_norms, fill_norms, pack_head, pack_layer,
};
use npuhal_core::device::{Arg, BufferRef, BufferSpec, Device};
use npuhal_core::error::DeviceError;
use std::panic::resume_unwind;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// Slots: one is prepared while the other runs.
pub(super) const SLOTS: usize = 2;

pub(super) struct Buffers {
    pub(super) act: BufferRef,
    pub(super) logits: BufferRef,
    pub(super) init: BufferRef,
    head: BufferRef,
    final_norm: BufferRef,
    layers: Vec<LayerBuffers>,
}

struct LayerBuffers {
    weights: BufferRef,
    norms: BufferRef,
    /// Rotation and head norms of each slot.
    head_norms: [BufferRef; SLOTS],
    kv: BufferRef,
}

/// What the buffers are filled from.
#[derive(Clone, Copy)]
pub(super) struct Filling<'a> {
    pub(super) device: &'a dyn Device,
    pub(super) source: &'a dyn LaneSource,
    pub(super) kernels: &'a Kernels,
    pub(super) dimensions: &'a Dimensions,
    pub(super) rope: &'a RopeTable,
    /// Threads that pack.
    pub(super) threads: usize,
}

impl Filling<'_> {
    fn layer(&self, layer: usize) -> Result<LayerBuffers, LaneError> {
        let Self { device, source, kernels, dimensions, rope, .. } = *self;
        let sizes = BufferSizes::new(dimensions);
        let layout = LayerLayout::new(dimensions);
        let tensors = source.layer(layer)?;
        let weights = device.allocate(&BufferSpec::tensor(sizes.weights, format!("layer {layer} weights")))?;
        fill(&weights, |bytes| pack_layer(&layout, &weights_of(&tensors), bytes))?;
        let norms = zeroed(device, sizes.layer_norms, &format!("layer {layer} norms"))?;
        let both = norms.slice(0..2 * dimensions.hidden_bytes() as u64)?;
        fill(&both, |bytes| fill_layer_norms(dimensions, tensors.input_norm, tensors.post_attention_norm, bytes))?;
        let head_norms = |slot: usize| -> Result<BufferRef, LaneError> {
            let buffer = zeroed(device, sizes.norms, &format!("layer {layer} head norms {slot}"))?;
            let used = buffer.slice(0..NORMS_BYTES as u64)?;
            fill(&used, |bytes| fill_norms(rope, tensors.q_norm, tensors.k_norm, bytes))?;
            Ok(buffer)
        };
        let head_norms = [head_norms(0)?, head_norms(1)?];
        let kv = zeroed(device, kernels.kv_bytes(&sizes), &format!("layer {layer} KV cache"))?;
        Ok(LayerBuffers { weights, norms, head_norms, kv })
    }

    /// All layers, each on one of the threads. The error of the lowest layer is returned.
    fn layers(&self) -> Result<Vec<LayerBuffers>, LaneError> {
        let count = self.dimensions.layers;
        let next = AtomicUsize::new(0);
        let failed = AtomicBool::new(false);
        let work = || {
            let mut done = Vec::new();
            while !failed.load(Ordering::Relaxed) {
                let layer = next.fetch_add(1, Ordering::Relaxed);
                if layer >= count {
                    break;
                }
                let result = self.layer(layer);
                failed.fetch_or(result.is_err(), Ordering::Relaxed);
                done.push((layer, result));
            }
            done
        };
        let mut done = std::thread::scope(|scope| {
            let workers: Vec<_> = (0..self.threads.clamp(1, count)).map(|_| scope.spawn(work)).collect();
            let join = workers.into_iter().map(|worker| worker.join().unwrap_or_else(|panic| resume_unwind(panic)));
            join.flatten().collect::<Vec<_>>()
        });
        done.sort_by_key(|(layer, _)| *layer);
        done.into_iter().map(|(_, result)| result).collect()
    }
}

impl Buffers {
    /// Allocates and fills everything.
    pub(super) fn load(filling: Filling<'_>) -> Result<Self, LaneError> {
        let Filling { device, source, dimensions, threads, .. } = filling;
        let sizes = BufferSizes::new(dimensions);
        let layers = filling.layers()?;
        let head = device.allocate(&BufferSpec::tensor(sizes.head, "head weights"))?;
        let tiles = source.head()?;
        fill(&head, |bytes| pack_head(dimensions, &*tiles, bytes, threads))?;
        let final_norm = zeroed(device, sizes.final_norm, "final norm")?;
        final_norm.write(0, source.final_norm()?)?;
        let act = zeroed(device, sizes.act, "act")?;
        let logits = zeroed(device, sizes.logits, "logits")?;
        let init = zeroed(device, INIT_BYTES, "init")?;
        Ok(Self { act, logits, init, head, final_norm, layers })
    }

    /// Arguments of a layer's run in a slot.
    pub(super) fn layer_args(&self, layer: usize, slot: usize) -> [Arg; 5] {
        let buffers = &self.layers[layer];
        [&self.act, &buffers.weights, &buffers.norms, &buffers.head_norms[slot], &buffers.kv]
            .map(|buffer| Arg::Buffer(buffer.clone()))
    }

    /// Arguments of the head's run.
    pub(super) fn head_args(&self) -> [Arg; 4] {
        [&self.logits, &self.head, &self.act, &self.final_norm].map(|buffer| Arg::Buffer(buffer.clone()))
    }

    /// Rotation of a position, for all layers of a slot.
    pub(super) fn write_rotation(&self, slot: usize, row: &[u8; ROPE_BYTES]) -> Result<(), DeviceError> {
        self.layers.iter().try_for_each(|layer| layer.head_norms[slot].write(0, row))
    }

    /// KV cache of a layer.
    pub(super) fn kv(&self, layer: usize) -> &BufferRef {
        &self.layers[layer].kv
    }
}

fn weights_of<'a>(tensors: &'a LayerTensors<'_>) -> LayerWeights<'a> {
    LayerWeights {
        q: &*tensors.q,
        k: &*tensors.k,
        v: &*tensors.v,
        o: &*tensors.o,
        gate: &*tensors.gate,
        up: &*tensors.up,
        down: &*tensors.down,
    }
}

fn zeroed(device: &dyn Device, len_bytes: u64, label: &str) -> Result<BufferRef, LaneError> {
    let buffer = device.allocate(&BufferSpec::tensor(len_bytes, label))?;
    buffer.fill(&mut |bytes| bytes.fill(0))?;
    Ok(buffer)
}

/// Fills a buffer in place; a failure of `pack` is passed on.
fn fill(buffer: &BufferRef, mut pack: impl FnMut(&mut [u8]) -> Result<(), PackError>) -> Result<(), LaneError> {
    let mut result = Ok(());
    buffer.fill(&mut |bytes| result = pack(bytes))?;
    Ok(result?)
}
