//! Payloads of GET_INFO and GET_ARRAY.

use crate::device::State;
use crate::spec::{Profile, VirtualSpec};
use npuhal_amdxdna::driver::ArrayShape;
use npuhal_amdxdna::errno::Errno;
use npuhal_amdxdna::silicon::Silicon;
use npuhal_amdxdna::uapi::query::{self, AieMetadata, TileMetadata};

const AIE_STATUS: u32 = 0;
const FORCE_PREEMPT_STATE: u32 = 11;
const FRAME_BOUNDARY_PREEMPT_STATE: u32 = 13;
const HW_CONTEXT_ALL: u32 = 0;
const LAST_ASYNC_ERROR: u32 = 2;
const BO_USAGE: u32 = 6;
const CONTEXT_BYTES: usize = 64;
const CONTEXT_ENTRY_BYTES: usize = 160;
const MAX_ELEMENT_BYTES: u32 = 4096;
const MAX_ELEMENTS: u32 = 1024;

/// GET_INFO: the payload of `param`, cut to the buffer. Returns the size that the driver reports.
pub(crate) fn get_info(state: &State, spec: &VirtualSpec, param: u32, buffer: &mut [u8]) -> Result<usize, Errno> {
    if param == query::HW_CONTEXTS {
        return Ok(contexts(state, buffer));
    }
    let payload = match param {
        AIE_STATUS => {
            // Columns in use, as a bitmap; there is no status dump.
            let filled = state
                .contexts
                .values()
                .fold(0_u32, |map, context| map | ((1 << context.columns) - 1) << context.start_column);
            let mut payload = vec![0; 16];
            payload[12..].copy_from_slice(&filled.to_le_bytes());
            payload
        }
        query::AIE_METADATA => metadata(spec.silicon).encode().to_vec(),
        query::AIE_VERSION => words(&[2, 0]),
        query::CLOCK_METADATA => clocks(spec.silicon),
        query::FIRMWARE_VERSION => words(&firmware(spec.silicon)),
        query::GET_POWER_MODE => vec![0; 8],
        query::RESOURCE_INFO if spec.profile != Profile::MainlineOld => resources(state, spec.silicon),
        FORCE_PREEMPT_STATE | FRAME_BOUNDARY_PREEMPT_STATE
            if spec.profile != Profile::MainlineOld && spec.silicon.facts().is_preemptible =>
        {
            vec![0; 8]
        }
        // Sensors need a platform driver, telemetry a firmware, that the virtual machine does not have.
        _ => return Err(Errno::EOPNOTSUPP),
    };
    let len = payload.len().min(buffer.len());
    buffer[..len].copy_from_slice(&payload[..len]);
    Ok(payload.len())
}

/// GET_ARRAY.
pub(crate) fn get_array(
    state: &State,
    spec: &VirtualSpec,
    param: u32,
    shape: ArrayShape,
    buffer: &mut [u8],
) -> Result<ArrayShape, Errno> {
    let is_bad = match spec.profile {
        Profile::OutOfTree => shape.elements > MAX_ELEMENTS,
        _ => shape.element_bytes > MAX_ELEMENT_BYTES || shape.elements > MAX_ELEMENTS,
    };
    let fits = (shape.element_bytes as usize).checked_mul(shape.elements as usize) == Some(buffer.len());
    if shape.element_bytes == 0 || shape.elements == 0 || is_bad || !fits {
        return Err(Errno::EINVAL);
    }
    let elements: Vec<Vec<u8>> = match param {
        HW_CONTEXT_ALL => state.contexts.values().map(|context| context_entry(state, context)).collect(),
        LAST_ASYNC_ERROR if spec.profile != Profile::MainlineOld => vec![vec![0; 24]],
        BO_USAGE if spec.profile == Profile::MainlineNew => vec![bo_usage(state)],
        _ => return Err(Errno::EOPNOTSUPP),
    };
    let element_bytes = match param {
        HW_CONTEXT_ALL => CONTEXT_ENTRY_BYTES,
        _ => elements.first().map_or(0, Vec::len),
    };
    let stride = element_bytes.min(shape.element_bytes as usize);
    let count = elements.len().min(shape.elements as usize);
    for (slot, element) in buffer.chunks_exact_mut(stride).zip(&elements[..count]) {
        slot.copy_from_slice(&element[..stride]);
    }
    Ok(ArrayShape { element_bytes: element_bytes as u32, elements: count as u32 })
}

/// Shape of the array, as the published drivers report it.
pub(crate) fn metadata(silicon: Silicon) -> AieMetadata {
    let tile = |rows, start, channels, locks| TileMetadata {
        row_count: rows,
        row_start: start,
        dma_channel_count: channels,
        lock_count: locks,
        ..TileMetadata::default()
    };
    let facts = silicon.facts();
    AieMetadata {
        col_size: 0x0200_0000,
        cols: facts.columns as u16,
        rows: 6,
        version_major: 2,
        version_minor: 0,
        core: tile(facts.core_rows as u16, 2, 2, 16),
        mem: tile(1, 1, 6, 64),
        shim: tile(1, 0, 2, 16),
    }
}

fn firmware(silicon: Silicon) -> [u32; 4] {
    match silicon {
        Silicon::Npu1 => [1, 5, 5, 391],
        _ => [1, 1, 0, 64],
    }
}

/// Highest clocks of the two domains in MHz.
fn megahertz(silicon: Silicon) -> (u32, u32) {
    match silicon {
        Silicon::Npu1 => (600, 1600),
        _ => (847, 1800),
    }
}

fn clocks(silicon: Silicon) -> Vec<u8> {
    let (mp_npu, h) = megahertz(silicon);
    let mut payload = vec![0; 48];
    for (at, name, frequency) in [(0, "MP-NPU Clock", mp_npu), (24, "H Clock", h)] {
        payload[at..at + name.len()].copy_from_slice(name.as_bytes());
        payload[at + 16..at + 20].copy_from_slice(&frequency.to_le_bytes());
    }
    payload
}

fn resources(state: &State, silicon: Silicon) -> Vec<u8> {
    let facts = silicon.facts();
    let (_, h_clock) = megahertz(silicon);
    let ops_per_column = if facts.is_preemptible { 4096 } else { 2048 };
    let columns = facts.columns.min(8);
    // Rounded to the nearest, as the recorded device answers.
    let tops = (u64::from(ops_per_column * columns) * u64::from(h_clock) + 500_000) / 1_000_000;
    [u64::from(h_clock), tops, facts.context_limit.into(), 0, state.contexts.len() as u64]
        .iter()
        .flat_map(|value| value.to_le_bytes())
        .collect()
}

/// Contexts of every file, as many as fit; the bytes written.
fn contexts(state: &State, buffer: &mut [u8]) -> usize {
    let mut written = 0;
    for (slot, context) in buffer.chunks_exact_mut(CONTEXT_BYTES).zip(state.contexts.values()) {
        slot.fill(0);
        for (at, value) in [(0, context.id), (4, context.start_column), (8, context.columns)] {
            slot[at..at + 4].copy_from_slice(&value.to_le_bytes());
        }
        let counts = [u64::from(std::process::id()), context.next_sequence, context.completed, 0, 0, context.errors];
        for (i, value) in counts.into_iter().enumerate() {
            slot[16 + 8 * i..24 + 8 * i].copy_from_slice(&value.to_le_bytes());
        }
        written += CONTEXT_BYTES;
    }
    written
}

fn context_entry(state: &State, context: &crate::device::Context) -> Vec<u8> {
    let mut entry = vec![0; CONTEXT_ENTRY_BYTES];
    let heap_usage = state.files.get(&context.file).map_or(0, |file| file.objects.heap.used_bytes());
    let qos = context.qos;
    let is_active = u32::from(!context.queue.is_empty());
    for (at, value) in [
        (0, context.id),
        (4, context.start_column),
        (8, context.columns),
        (12, context.id),
        (88, is_active),
        (96, qos.gops),
        (100, qos.fps),
        (104, qos.dma_bandwidth),
        (108, qos.latency_ms),
        (112, qos.frame_exec_time_ms),
    ] {
        entry[at..at + 4].copy_from_slice(&value.to_le_bytes());
    }
    for (at, value) in [
        (16, u64::from(std::process::id())),
        (24, context.next_sequence),
        (32, context.completed),
        (56, context.errors),
        (64, u64::from(if qos.priority == 0 { 0x200 } else { qos.priority })),
        (72, heap_usage),
    ] {
        entry[at..at + 8].copy_from_slice(&value.to_le_bytes());
    }
    entry
}

fn bo_usage(state: &State) -> Vec<u8> {
    let objects = || state.files.values().flat_map(|file| file.objects.iter());
    let total: u64 = objects().map(|bo| bo.size_bytes).sum();
    let heap: u64 = state.files.values().map(|file| file.objects.heap.size_bytes()).sum();
    let slots = state.contexts.values().map(|context| context.slots.len() as u64 * 4096).sum();
    [u64::from(std::process::id()), total, slots, heap].iter().flat_map(|value| value.to_le_bytes()).collect()
}

fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}
