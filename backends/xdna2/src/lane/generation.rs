//! What lives from begin to end of one generation: a hardware context, its kernels, two slots.

use super::buffers::{Buffers, SLOTS};
use crate::kernels::{HEAD_KERNEL, INIT_KERNEL, Kernels};
use crate::layer_images::{ImageCursor, kernel_name};
use crate::packing::RopeTable;
use npuhal_core::device::{Arg, Context, Deadline, Device, Kernel, Program, RunIndex, Runlist, Submission};
use npuhal_core::error::{DeviceError, RunError};
use std::collections::VecDeque;
use std::time::Duration;

/// Layer kernels that are kept: the device's client keeps what its runlists use, and what it parsed, by itself.
const KERNELS_KEPT: usize = 32;

/// Everything the context needs from outside.
#[derive(Clone, Copy)]
pub(super) struct Parts<'a> {
    pub(super) kernels: &'a Kernels,
    pub(super) buffers: &'a Buffers,
    pub(super) rope: &'a RopeTable,
    pub(super) layers: usize,
}

/// Fields are dropped in this order: lists before kernels, kernels before their context.
pub(super) struct Generation {
    slots: [Slot; SLOTS],
    turn: usize,
    layer_kernels: LayerKernels,
    head: Box<dyn Kernel>,
    context: Box<dyn Context>,
}

/// Which runs a token needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Runs {
    /// The layers: nobody asks for the logits of a prompt's inner tokens.
    Layers,
    /// The layers and the head.
    LayersAndHead,
}

#[derive(Default)]
struct Slot {
    /// Context length that the rotation is for.
    rotation: Option<u32>,
    layers: List,
    layers_and_head: List,
}

#[derive(Default)]
struct List {
    list: Option<Box<dyn Runlist>>,
    /// Context length that all its runs are bound to.
    bound: Option<u32>,
}

impl Slot {
    fn list(&mut self, runs: Runs) -> &mut List {
        match runs {
            Runs::Layers => &mut self.layers,
            Runs::LayersAndHead => &mut self.layers_and_head,
        }
    }
}

/// Loaded layer kernels by context length, the oldest first.
struct LayerKernels {
    known: VecDeque<(u32, Box<dyn Kernel>)>,
    images: ImageCursor,
}

impl Generation {
    /// Opens a context, configures the array, loads the head's kernel.
    pub(super) fn open(device: &dyn Device, parts: Parts<'_>, timeout: Duration) -> Result<Self, RunError> {
        let boot = Program::FullElf { image: parts.kernels.init(), kernel: INIT_KERNEL };
        let mut context = device.open_context(&boot)?;
        let init = context.load(&boot)?;
        let mut list = context.runlist();
        list.push(&*init, &[Arg::Buffer(parts.buffers.init.clone())])?;
        list.submit()?.wait(Deadline::within(timeout))?;
        let head = context.load(&Program::FullElf { image: parts.kernels.head(), kernel: HEAD_KERNEL })?;
        let layer_kernels = LayerKernels { known: VecDeque::new(), images: parts.kernels.layers().cursor() };
        Ok(Self { slots: Default::default(), turn: 0, layer_kernels, head, context })
    }

    /// Prepares the slot that runs next, unless it is prepared for `context_len`.
    pub(super) fn prepare_next(&mut self, parts: Parts<'_>, context_len: u32, runs: Runs) -> Result<(), DeviceError> {
        self.prepare(parts, self.turn, context_len, runs)
    }

    /// Prepares the other slot while one runs.
    pub(super) fn prepare_other(&mut self, parts: Parts<'_>, context_len: u32, runs: Runs) -> Result<(), DeviceError> {
        self.prepare(parts, (self.turn + 1) % SLOTS, context_len, runs)
    }

    /// The slots change places.
    pub(super) fn flip(&mut self) {
        self.turn = (self.turn + 1) % SLOTS;
    }

    /// Starts the prepared slot.
    pub(super) fn launch(&mut self, runs: Runs) -> Result<Box<dyn Submission>, DeviceError> {
        match &mut self.slots[self.turn].list(runs).list {
            Some(list) => list.submit(),
            None => Err(DeviceError::Misuse { operation: "launch", reason: "the slot was not prepared".to_owned() }),
        }
    }

    /// Rotation for a token that is run layer by layer, in the slot that runs next.
    pub(super) fn rotate_next(&mut self, parts: Parts<'_>, context_len: u32) -> Result<(), DeviceError> {
        self.rotate(parts, self.turn, context_len)
    }

    /// A list of one layer alone, for observers.
    pub(super) fn single_layer(
        &mut self,
        parts: Parts<'_>,
        layer: usize,
        context_len: u32,
    ) -> Result<Box<dyn Runlist>, DeviceError> {
        let kernel = self.layer_kernels.get(&mut *self.context, parts.kernels, context_len)?;
        let mut list = self.context.runlist();
        list.push(&*kernel, &parts.buffers.layer_args(layer, self.turn))?;
        Ok(list)
    }

    /// A list of the head alone, for observers.
    pub(super) fn single_head(&mut self, parts: Parts<'_>) -> Result<Box<dyn Runlist>, DeviceError> {
        let mut list = self.context.runlist();
        list.push(&*self.head, &parts.buffers.head_args())?;
        Ok(list)
    }

    fn prepare(&mut self, parts: Parts<'_>, slot: usize, context_len: u32, runs: Runs) -> Result<(), DeviceError> {
        self.rotate(parts, slot, context_len)?;
        if self.slots[slot].list(runs).bound == Some(context_len) {
            return Ok(());
        }
        let kernel = self.layer_kernels.get(&mut *self.context, parts.kernels, context_len)?;
        // A list that could not be bound throughout is not used again.
        let list = match std::mem::take(self.slots[slot].list(runs)).list {
            Some(mut list) => {
                (0..parts.layers as u32).try_for_each(|layer| list.rebind(RunIndex(layer), &*kernel))?;
                list
            }
            None => self.new_list(parts, slot, &*kernel, runs)?,
        };
        *self.slots[slot].list(runs) = List { list: Some(list), bound: Some(context_len) };
        Ok(())
    }

    /// Writes the rotation of the last position of a context into the buffers of a slot.
    fn rotate(&mut self, parts: Parts<'_>, slot: usize, context_len: u32) -> Result<(), DeviceError> {
        if self.slots[slot].rotation != Some(context_len) {
            self.slots[slot].rotation = None;
            parts.buffers.write_rotation(slot, &parts.rope.row(context_len - 1))?;
            self.slots[slot].rotation = Some(context_len);
        }
        Ok(())
    }

    fn new_list(
        &mut self,
        parts: Parts<'_>,
        slot: usize,
        kernel: &dyn Kernel,
        runs: Runs,
    ) -> Result<Box<dyn Runlist>, DeviceError> {
        let mut list = self.context.runlist();
        for layer in 0..parts.layers {
            list.push(kernel, &parts.buffers.layer_args(layer, slot))?;
        }
        if runs == Runs::LayersAndHead {
            list.push(&*self.head, &parts.buffers.head_args())?;
        }
        Ok(list)
    }
}

impl LayerKernels {
    fn get(
        &mut self,
        context: &mut dyn Context,
        kernels: &Kernels,
        context_len: u32,
    ) -> Result<Box<dyn Kernel>, DeviceError> {
        if let Some((_, kernel)) = self.known.iter().find(|(known, _)| *known == context_len) {
            return Ok(kernel.clone());
        }
        let name = kernel_name(context_len);
        let image = kernels.layers().seek(&mut self.images, context_len);
        let image =
            image.map_err(|error| DeviceError::BadProgram { program: name.clone(), reason: error.to_string() })?;
        let kernel = context.load(&Program::FullElf { image, kernel: &name })?;
        if self.known.len() == KERNELS_KEPT {
            self.known.pop_front();
        }
        self.known.push_back((context_len, kernel.clone()));
        Ok(kernel)
    }
}
