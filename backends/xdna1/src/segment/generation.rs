//! What lives from begin to end of one generation: hardware contexts, their kernels, runlists.

use crate::kit::KernelImage;
use npuhal_core::device::{Arg, BufferRef, Context, Deadline, Device, Kernel, Program, Runlist};
use npuhal_core::error::{DeviceError, RunError};
use std::sync::Arc;
use std::time::Duration;

/// A kernel and the buffers it runs on.
pub(super) struct Dispatch<'a> {
    pub(super) image: &'a KernelImage,
    pub(super) buffers: Vec<BufferRef>,
}

/// One or more lists, each of dispatches that run one after the other. Lists are dropped before the contexts they live in.
pub(super) struct Generation {
    lists: Vec<Box<dyn Runlist>>,
    _contexts: Vec<OpenContext>,
}

struct OpenContext {
    xclbin_sha256: String,
    /// Loaded kernels by their instruction streams.
    kernels: Vec<(Arc<[u8]>, Box<dyn Kernel>)>,
    context: Box<dyn Context>,
}

impl Generation {
    /// Opens a context for each container and makes a list for each entry of `lists`, whose dispatches are of one container.
    pub(super) fn open(device: &dyn Device, lists: &[Vec<Dispatch<'_>>]) -> Result<Self, DeviceError> {
        let mut contexts: Vec<OpenContext> = Vec::new();
        let mut made = Vec::with_capacity(lists.len());
        for dispatches in lists {
            let Some(first) = dispatches.first() else { continue };
            let index = context_of(device, &mut contexts, first.image)?;
            let open = &mut contexts[index];
            let mut list = open.context.runlist();
            for Dispatch { image, buffers } in dispatches {
                let kernel = open.kernel(image)?;
                let args: Vec<Arg> = buffers.iter().cloned().map(Arg::Buffer).collect();
                list.push(&*kernel, &args)?;
            }
            made.push(list);
        }
        Ok(Self { lists: made, _contexts: contexts })
    }

    /// Runs list `index` and waits for its end.
    pub(super) fn run(&mut self, index: usize, timeout: Duration) -> Result<(), RunError> {
        let count = self.lists.len();
        let list = self
            .lists
            .get_mut(index)
            .ok_or_else(|| DeviceError::Misuse { operation: "run", reason: format!("list {index} of {count}") })?;
        list.submit()?.wait(Deadline::within(timeout)).map(drop)
    }
}

fn context_of(device: &dyn Device, contexts: &mut Vec<OpenContext>, image: &KernelImage) -> Result<usize, DeviceError> {
    if let Some(index) = contexts.iter().position(|open| open.xclbin_sha256 == image.xclbin_sha256) {
        return Ok(index);
    }
    let context = device.open_context(&Program::Xclbin { image: &image.xclbin })?;
    contexts.push(OpenContext { xclbin_sha256: image.xclbin_sha256.clone(), kernels: Vec::new(), context });
    Ok(contexts.len() - 1)
}

impl OpenContext {
    fn kernel(&mut self, image: &KernelImage) -> Result<Box<dyn Kernel>, DeviceError> {
        let is_it = |(known, _): &&(Arc<[u8]>, _)| Arc::ptr_eq(known, &image.instructions);
        if let Some((_, kernel)) = self.kernels.iter().find(is_it) {
            return Ok(kernel.clone());
        }
        let kernel = self.context.load(&Program::Instructions {
            unit: &image.unit,
            stream: &image.instructions,
            length_unit: image.length_unit,
        })?;
        self.kernels.push((Arc::clone(&image.instructions), kernel.clone()));
        Ok(kernel)
    }
}

/// The generation at hand, or why there is none.
#[derive(Default)]
pub(super) struct Life {
    generation: Option<Generation>,
    lost: Option<String>,
}

impl Life {
    pub(super) fn begin(&mut self, generation: Generation) {
        *self = Self { generation: Some(generation), lost: None };
    }

    pub(super) fn end(&mut self) {
        *self = Self::default();
    }

    /// Runs list `index`. A context that was lost is dropped at once; what follows fails until the next generation.
    pub(super) fn run(&mut self, index: usize, timeout: Duration) -> Result<(), RunError> {
        let Some(generation) = &mut self.generation else {
            return Err(match &self.lost {
                Some(reason) => DeviceError::ContextLost { reason: reason.clone() }.into(),
                None => {
                    let reason = "no generation was begun".to_owned();
                    DeviceError::Misuse { operation: "forward", reason }.into()
                }
            });
        };
        let result = generation.run(index, timeout);
        if let Err(error) = &result
            && error.loses_context()
        {
            self.lost = Some(error.to_string());
            self.generation = None;
        }
        result
    }
}
