//! Shim tiles: descriptors, task queues, channels, tokens, locks; the transfers between host memory and streams.

use super::program::StreamKey;
use super::stream::Fifo;
use super::walk::Walk;
use super::{DeviceMemory, Trouble};
use crate::clock::Traffic;
use crate::diagnosis::{Diagnosis, DiagnosisKind};
use npuhal_amdxdna::format::registers::{
    ChannelControl, ChannelStatus, Direction, HOST_APERTURE, QueuePush, ShimBd, ShimDemux, ShimMux, ShimRoute, TileKind,
};
use std::collections::{BTreeMap, VecDeque};

/// Tasks that can be outstanding: those in the queue and the one that runs.
const MAX_OUTSTANDING: usize = QueuePush::QUEUE_DEPTH + 1;
/// Bytes that a transfer moves at once.
const PORTION_BYTES: usize = 16 << 10;

/// Descriptors that a task may start before the model takes it for endless. Without a cycle a task starts at most 4096.
const MAX_STARTS: u32 = 1 << 18;

/// Both directions, in the order in which channels are visited.
pub(super) const DIRECTIONS: [Direction; 2] = [Direction::S2mm, Direction::Mm2s];

/// One shim tile.
#[derive(Debug, Default)]
pub(super) struct Shim {
    bds: [[u32; 8]; 16],
    channels: [Channel; 4],
    locks: [u8; 16],
    mux: u32,
    demux: u32,
}

#[derive(Debug, Default)]
struct Channel {
    control: u32,
    tasks: VecDeque<Task>,
    tokens: u32,
    has_overflowed: bool,
    moved_bytes: u64,
}

/// A task: descriptors from the first along the chain, some times over.
#[derive(Debug)]
struct Task {
    start_bd: u8,
    repeats_left: u32,
    issues_token: bool,
    /// Operation that pushed it.
    op: u32,
    bd: u8,
    /// Descriptors started so far.
    starts: u32,
    transfer: Option<Transfer>,
}

/// A descriptor in progress: what it said when it started.
#[derive(Debug)]
struct Transfer {
    descriptor: ShimBd,
    walk: Walk,
}

fn index(direction: Direction, channel: u8) -> usize {
    2 * usize::from(direction == Direction::Mm2s) + usize::from(channel.min(1))
}

impl Shim {
    /// Forgets everything but what configuration wrote: the end of all tasks.
    pub(super) fn is_idle(&self) -> bool {
        self.channels.iter().all(|channel| channel.tasks.is_empty())
    }

    pub(super) fn load_bd(&self, bd: u8, word: u8) -> u32 {
        self.bds[usize::from(bd)][usize::from(word)]
    }

    pub(super) fn store_bd(&mut self, bd: u8, word: u8, value: u32) -> Result<(), Diagnosis> {
        if let Some(task) = self.user_of(bd) {
            let detail =
                format!("descriptor {bd} was rewritten while the task pushed by operation {} uses it", task.op);
            return Err(Diagnosis::new(DiagnosisKind::DescriptorInUse, detail));
        }
        self.bds[usize::from(bd)][usize::from(word)] = value;
        Ok(())
    }

    /// An outstanding task that uses `bd` or will come to it.
    fn user_of(&self, bd: u8) -> Option<&Task> {
        self.channels.iter().flat_map(|channel| &channel.tasks).find(|task| {
            // A descriptor that was left behind is used again when the task repeats.
            let first = if task.repeats_left > 1 { task.start_bd } else { task.bd };
            self.chain(first).contains(&bd) || self.chain(task.bd).contains(&bd)
        })
    }

    /// Descriptors from `first` along the chain, each once.
    fn chain(&self, first: u8) -> Vec<u8> {
        let mut chain = vec![first];
        let mut at = first;
        while let Ok(bd) = ShimBd::decode(&self.bds[usize::from(at)]) {
            at = bd.next_bd as u8;
            if !bd.use_next || chain.contains(&at) {
                break;
            }
            chain.push(at);
        }
        chain
    }

    pub(super) fn load_control(&self, direction: Direction, channel: u8) -> u32 {
        self.channels[index(direction, channel)].control
    }

    pub(super) fn store_control(&mut self, direction: Direction, channel: u8, value: u32) -> Result<(), Diagnosis> {
        let control = ChannelControl::decode(value, TileKind::Shim, direction)
            .map_err(|error| Diagnosis::new(DiagnosisKind::BadRegisterValue, error.to_string()))?;
        if control.out_of_order || control.fot_mode != 0 {
            let detail = format!("{direction}{channel}: out-of-order and finish-on-TLAST modes");
            return Err(Diagnosis::new(DiagnosisKind::Unsupported, detail));
        }
        self.channels[index(direction, channel)].control = value;
        Ok(())
    }

    pub(super) fn status(&self, direction: Direction, channel: u8) -> u32 {
        let channel = &self.channels[index(direction, channel)];
        let running = channel.tasks.front();
        let status = ChannelStatus {
            current_bd: running.map_or(0, |task| task.bd.into()),
            queue_size: channel.tasks.len().saturating_sub(1) as u32,
            running: running.is_some(),
            queue_overflow: channel.has_overflowed,
            state: u32::from(running.is_some()),
            ..ChannelStatus::default()
        };
        // Every field is in its range.
        status.encode(TileKind::Shim).unwrap_or(0)
    }

    /// Adds a task to a channel's queue.
    pub(super) fn push(&mut self, direction: Direction, channel: u8, value: u32, op: u32) -> Result<(), Diagnosis> {
        let push = QueuePush::decode(value, TileKind::Shim)
            .map_err(|error| Diagnosis::new(DiagnosisKind::BadRegisterValue, error.to_string()))?;
        let start_bd = push.start_bd as u8;
        self.descriptor(start_bd)?;
        let queue = &mut self.channels[index(direction, channel)];
        if queue.tasks.len() >= MAX_OUTSTANDING {
            queue.has_overflowed = true;
            let detail =
                format!("{direction}{channel} has {MAX_OUTSTANDING} tasks outstanding that nothing waited for");
            return Err(Diagnosis::new(DiagnosisKind::QueueOverflow, detail));
        }
        queue.tasks.push_back(Task {
            start_bd,
            repeats_left: push.repeat,
            issues_token: push.issue_token,
            op,
            bd: start_bd,
            starts: 0,
            transfer: None,
        });
        Ok(())
    }

    /// The descriptor that a transfer is about to start with.
    fn descriptor(&self, bd: u8) -> Result<ShimBd, Diagnosis> {
        let descriptor = ShimBd::decode(&self.bds[usize::from(bd)])
            .map_err(|error| Diagnosis::new(DiagnosisKind::BadRegisterValue, format!("descriptor {bd}: {error}")))?;
        if !descriptor.valid {
            return Err(Diagnosis::new(DiagnosisKind::InvalidDescriptor, format!("descriptor {bd} is not valid")));
        }
        Ok(descriptor)
    }

    pub(super) fn load_lock(&self, lock: u8) -> u32 {
        self.locks[usize::from(lock)].into()
    }

    pub(super) fn store_lock(&mut self, lock: u8, value: u32) -> Result<(), Diagnosis> {
        let value = u8::try_from(value).ok().filter(|value| *value < 64).ok_or_else(|| {
            Diagnosis::new(DiagnosisKind::BadRegisterValue, format!("lock {lock}: value {value}; wanted 0 to 63"))
        })?;
        self.locks[usize::from(lock)] = value;
        Ok(())
    }

    pub(super) fn load_mux(&self) -> u32 {
        self.mux
    }

    pub(super) fn load_demux(&self) -> u32 {
        self.demux
    }

    pub(super) fn store_mux(&mut self, value: u32) -> Result<(), Diagnosis> {
        ShimMux::decode(value).map_err(|error| Diagnosis::new(DiagnosisKind::BadRegisterValue, error.to_string()))?;
        self.mux = value;
        Ok(())
    }

    pub(super) fn store_demux(&mut self, value: u32) -> Result<(), Diagnosis> {
        ShimDemux::decode(value).map_err(|error| Diagnosis::new(DiagnosisKind::BadRegisterValue, error.to_string()))?;
        self.demux = value;
        Ok(())
    }

    /// Whether the multiplexers connect the channel with the stream switch, and nothing pauses it. MM2S 0 and 1 enter
    /// through South3 and South7, S2MM 0 and 1 leave through South2 and South3.
    fn is_connected(&self, direction: Direction, channel: u8) -> bool {
        let route = match direction {
            Direction::Mm2s => ShimMux::decode(self.mux).ok().map(|mux| mux.south[if channel == 0 { 1 } else { 3 }]),
            Direction::S2mm => ShimDemux::decode(self.demux).ok().map(|demux| demux.south[usize::from(channel.min(1))]),
        };
        let control = self.channels[index(direction, channel)].control;
        let is_paused = ChannelControl::decode(control, TileKind::Shim, direction)
            .is_ok_and(|control| control.pause_stream || control.pause_memory);
        route == Some(ShimRoute::Dma) && !is_paused
    }

    pub(super) fn tokens(&self, direction: Direction, channel: u8) -> u32 {
        self.channels[index(direction, channel)].tokens
    }

    /// Consumes one token.
    pub(super) fn take_token(&mut self, direction: Direction, channel: u8) {
        let tokens = &mut self.channels[index(direction, channel)].tokens;
        *tokens = tokens.saturating_sub(1);
    }

    /// Ends a run: its tokens are counted for nobody else.
    pub(super) fn drop_tokens(&mut self) {
        self.channels.iter_mut().for_each(|channel| channel.tokens = 0);
    }

    /// Tasks that have not ended: channel and the operation that pushed the task.
    pub(super) fn outstanding(&self, direction: Direction) -> impl Iterator<Item = (u8, u32)> + '_ {
        (0..2).flat_map(move |channel| {
            self.channels[index(direction, channel)].tasks.iter().map(move |task| (channel, task.op))
        })
    }

    /// Bytes that the channels have moved since the last [`Shim::take_traffic`].
    pub(super) fn moved_bytes(&self) -> u64 {
        self.channels.iter().map(|channel| channel.moved_bytes).sum()
    }

    /// What the channels have moved since the last call.
    pub(super) fn take_traffic(&mut self, traffic: &mut Traffic) {
        for (i, channel) in self.channels.iter_mut().enumerate() {
            let moved = std::mem::take(&mut channel.moved_bytes);
            let (bytes, streams) = match i {
                0 | 1 => (&mut traffic.written_bytes, &mut traffic.write_streams),
                _ => (&mut traffic.read_bytes, &mut traffic.read_streams),
            };
            *bytes += moved;
            *streams += u32::from(moved > 0);
        }
    }

    /// Moves up to `limit_bytes` from memory into the stream of an MM2S channel, within one descriptor.
    /// `None`: the channel has nothing to do.
    pub(super) fn pump_input(
        &mut self,
        column: u8,
        channel: u8,
        limit_bytes: usize,
        fifos: &mut BTreeMap<StreamKey, Fifo>,
        memory: &dyn DeviceMemory,
    ) -> Result<Option<usize>, Trouble> {
        let direction = Direction::Mm2s;
        if limit_bytes == 0 || !self.start_transfer(direction, channel)? {
            return Ok(None);
        }
        let channel_state = &mut self.channels[index(direction, channel)];
        let Some(task) = channel_state.tasks.front_mut() else { return Ok(None) };
        let Some(transfer) = task.transfer.as_mut() else { return Ok(None) };
        let packet = transfer.descriptor.packet.enable.then_some(transfer.descriptor.packet.id as u8);
        let fifo = fifos.entry(StreamKey { column, direction, channel, packet }).or_default();
        let mut moved = 0;
        let mut portion = [0; PORTION_BYTES];
        while let Some((address, len)) = transfer.walk.next_run((limit_bytes - moved).min(PORTION_BYTES)) {
            let bytes = &mut portion[..len];
            memory.read(host_address(address, task.op)?, bytes).map_err(|d| Trouble::Fault(d.at_op(task.op)))?;
            fifo.push(bytes);
            moved += len;
        }
        channel_state.moved_bytes += moved as u64;
        self.finish_transfer(direction, channel);
        Ok(Some(moved))
    }

    /// Moves from the stream of an S2MM channel to memory, within one descriptor. `None`: nothing to do.
    pub(super) fn pump_output(
        &mut self,
        channel: u8,
        fifo: &mut Fifo,
        memory: &dyn DeviceMemory,
    ) -> Result<Option<usize>, Trouble> {
        let direction = Direction::S2mm;
        if fifo.len() == 0 || !self.start_transfer(direction, channel)? {
            return Ok(None);
        }
        let channel_state = &mut self.channels[index(direction, channel)];
        let Some(task) = channel_state.tasks.front_mut() else { return Ok(None) };
        let Some(transfer) = task.transfer.as_mut() else { return Ok(None) };
        let mut moved = 0;
        while let Some((address, len)) = transfer.walk.next_run(fifo.len().min(PORTION_BYTES)) {
            memory
                .write(host_address(address, task.op)?, fifo.front(len))
                .map_err(|d| Trouble::Fault(d.at_op(task.op)))?;
            fifo.advance(len);
            moved += len;
        }
        channel_state.moved_bytes += moved as u64;
        self.finish_transfer(direction, channel);
        Ok(Some(moved))
    }

    /// Makes sure that the channel's first task has a transfer in progress; `false` when it cannot.
    fn start_transfer(&mut self, direction: Direction, channel: u8) -> Result<bool, Trouble> {
        if !self.is_connected(direction, channel) {
            return Ok(false);
        }
        let Some(task) = self.channels[index(direction, channel)].tasks.front() else { return Ok(false) };
        if task.transfer.is_some() {
            return Ok(true);
        }
        if task.starts == MAX_STARTS {
            return Ok(false);
        }
        let (bd, op) = (task.bd, task.op);
        let descriptor = self.descriptor(bd).map_err(|diagnosis| Trouble::Fault(diagnosis.at_op(op)))?;
        if !self.acquire(&descriptor) {
            return Ok(false);
        }
        let walk = Walk::new(&descriptor);
        // The register counts the starts.
        let iteration = descriptor.iteration;
        let next = (iteration.current + 1) % iteration.wrap;
        let word = &mut self.bds[usize::from(bd)][6];
        *word = *word & !(0x3F << 26) | next << 26;
        if let Some(task) = self.channels[index(direction, channel)].tasks.front_mut() {
            task.transfer = Some(Transfer { descriptor, walk });
            task.starts += 1;
        }
        Ok(true)
    }

    /// Goes on to the next descriptor, repetition or task when the transfer is complete.
    fn finish_transfer(&mut self, direction: Direction, channel: u8) {
        let state = &mut self.channels[index(direction, channel)];
        let Some(task) = state.tasks.front_mut() else { return };
        let Some(transfer) = task.transfer.take_if(|transfer| transfer.walk.is_done()) else { return };
        let descriptor = transfer.descriptor;
        if descriptor.use_next {
            task.bd = descriptor.next_bd as u8;
        } else {
            task.repeats_left -= 1;
            task.bd = task.start_bd;
            if task.repeats_left == 0 {
                state.tokens += u32::from(task.issues_token);
                state.tasks.pop_front();
            }
        }
        let locks = descriptor.locks;
        let lock = &mut self.locks[locks.release_id as usize % 16];
        *lock = lock.saturating_add_signed(locks.release_value).min(63);
    }

    /// A non-negative value waits for equality (inferred), a negative one for at least its magnitude; both subtract it.
    fn acquire(&mut self, descriptor: &ShimBd) -> bool {
        let locks = descriptor.locks;
        if !locks.acquire_enable {
            return true;
        }
        let lock = &mut self.locks[locks.acquire_id as usize % 16];
        let amount = locks.acquire_value.unsigned_abs();
        let is_free = if locks.acquire_value < 0 { *lock >= amount } else { *lock == amount };
        if is_free {
            *lock -= amount;
        }
        is_free
    }
}

/// The host address behind an address as the array sees it.
fn host_address(address: u64, op: u32) -> Result<u64, Trouble> {
    address.checked_sub(HOST_APERTURE).ok_or_else(|| {
        let detail = format!("address {address:#x} lies below the host's memory at {HOST_APERTURE:#x}");
        Trouble::Fault(Diagnosis::new(DiagnosisKind::BadAddress, detail).at_op(op))
    })
}
