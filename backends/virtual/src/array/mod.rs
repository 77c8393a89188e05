//! The array of one hardware context, from the shim upwards.
//!
//! Control code is executed operation by operation. Transfers advance only while an operation waits, and no further
//! than the wait needs: what control code may not rely on has not happened yet. When the code ends, everything runs
//! until nothing moves, and what is left over is diagnosed.

mod builtin;
mod configure;
mod interpret;
pub mod program;
mod shim;
mod stream;
mod walk;

use crate::clock::Traffic;
use crate::diagnosis::{Diagnosis, DiagnosisKind, DiagnosisLog};
use npuhal_amdxdna::format::registers::{Address, Direction, Register, TileKind};
use program::{CoreProgram, CoreProgramTable, ID_OFFSET, ID_TILE, ProgramDescription, Step, StreamKey, Streams};
use shim::{DIRECTIONS, Shim};
use std::collections::BTreeMap;
use stream::{Fifo, StreamSet, TileMemory};

/// Bytes that an output stream holds while nobody takes them: the buffers of the tiles it passes.
const OUTPUT_BUFFER_BYTES: usize = 64 << 10;
/// Most bytes of one run: more than one stream moves until the shortest watch-dog bites (2 s at 6.8 GB/s).
const MAX_RUN_BYTES: u64 = 16 << 30;
/// Steps between two looks at the bytes moved.
const STEPS_PER_LOOK: u32 = 1024;
const CORE_ENABLE: u32 = 1;
const CORE_RESET: u32 = 2;

/// Memory as the device reaches it. Addresses are those of the host's side.
pub(crate) trait DeviceMemory {
    /// Reads data of a transfer.
    fn read(&self, address: u64, dst: &mut [u8]) -> Result<(), Diagnosis>;
    /// Writes data of a transfer.
    fn write(&self, address: u64, src: &[u8]) -> Result<(), Diagnosis>;
    /// Reads code or configuration from device memory.
    fn read_code(&self, address: u64, len_bytes: u64) -> Result<Vec<u8>, Diagnosis>;
    /// Bytes from `address` to the end of the buffer in device memory that holds it; 0 where none does.
    fn code_bytes_at(&self, address: u64) -> u64 {
        let _ = address;
        0
    }
}

/// What a run works with.
pub(crate) struct Surroundings<'a> {
    pub(crate) memory: &'a dyn DeviceMemory,
    pub(crate) programs: &'a CoreProgramTable,
    pub(crate) log: &'a DiagnosisLog,
    pub(crate) loads: &'a mut Loads,
}

/// How often configuration was loaded.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Loads {
    /// `LOADPDI` operations.
    pub(crate) requested: u64,
    /// Images executed.
    pub(crate) executed: u64,
}

/// Why a run does not end well.
#[derive(Debug)]
pub(crate) enum Trouble {
    /// The device reports an error.
    Fault(Diagnosis),
    /// The run never ends.
    Hang(Diagnosis),
}

/// Configuration that is loaded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ImageId {
    /// That of a compute unit.
    Unit(u32),
    /// That of a `LOADPDI` operation.
    Pdi(u16),
}

/// The columns of one context.
#[derive(Debug)]
pub(crate) struct Partition {
    columns: u8,
    shims: Vec<Shim>,
    memory: TileMemory,
    inputs: BTreeMap<StreamKey, Fifo>,
    outputs: BTreeMap<StreamKey, Fifo>,
    program: Option<Box<dyn CoreProgram>>,
    resident: Option<(ImageId, Vec<u8>)>,
    /// Traffic of this run before its configuration was loaded.
    carried: Traffic,
    max_run_bytes: u64,
}

impl Partition {
    pub(crate) fn new(columns: u8) -> Self {
        let shims = (0..columns).map(|_| Shim::default()).collect();
        Self {
            columns,
            shims,
            memory: TileMemory::default(),
            inputs: BTreeMap::new(),
            outputs: BTreeMap::new(),
            program: None,
            resident: None,
            carried: Traffic::default(),
            max_run_bytes: MAX_RUN_BYTES,
        }
    }

    /// Everything is lost: as after a reset of the columns.
    pub(crate) fn reset(&mut self) {
        *self = Self::new(self.columns);
    }

    /// What the shims have moved since the last call.
    pub(crate) fn take_traffic(&mut self) -> Traffic {
        let mut traffic = std::mem::take(&mut self.carried);
        self.shims.iter_mut().for_each(|shim| shim.take_traffic(&mut traffic));
        traffic
    }

    fn is_idle(&self) -> bool {
        self.shims.iter().all(Shim::is_idle)
    }

    /// The register behind an address word.
    fn locate(&self, word: u32) -> Result<(Address, TileKind, Register), Diagnosis> {
        let address = Address::from_word(word);
        if address.column() >= self.columns {
            let detail = format!("{address} ({word:#010x}): column {} of {}", address.column(), self.columns);
            return Err(Diagnosis::new(DiagnosisKind::UnknownRegister, detail));
        }
        match (address.tile(), address.register()) {
            (Some(tile), Some(register)) if address.offset().is_multiple_of(4) => Ok((address, tile, register)),
            _ => Err(Diagnosis::new(DiagnosisKind::UnknownRegister, format!("{address} ({word:#010x})"))),
        }
    }

    fn load(&self, word: u32) -> Result<u32, Diagnosis> {
        let (address, tile, register) = self.locate(word)?;
        let shim = &self.shims[usize::from(address.column())];
        Ok(match (tile, register) {
            (TileKind::Shim, Register::Bd { bd, word }) => shim.load_bd(bd, word),
            (TileKind::Shim, Register::ChannelControl(direction, channel)) => shim.load_control(direction, channel),
            (TileKind::Shim, Register::ChannelStatus(direction, channel)) => shim.status(direction, channel),
            (TileKind::Shim, Register::Lock(lock)) => shim.load_lock(lock),
            (TileKind::Shim, Register::ShimMux) => shim.load_mux(),
            (TileKind::Shim, Register::ShimDemux) => shim.load_demux(),
            (TileKind::Shim, Register::TaskQueue(..)) => 0,
            _ => self.memory.load(address.column(), address.row(), address.offset()),
        })
    }

    fn store(&mut self, word: u32, value: u32, op: u32, programs: &CoreProgramTable) -> Result<(), Diagnosis> {
        let (address, tile, register) = self.locate(word)?;
        let shim = &mut self.shims[usize::from(address.column())];
        match (tile, register) {
            (TileKind::Shim, Register::Bd { bd, word }) => shim.store_bd(bd, word, value),
            (TileKind::Shim, Register::ChannelControl(direction, channel)) => {
                shim.store_control(direction, channel, value)
            }
            (TileKind::Shim, Register::TaskQueue(direction, channel)) => shim.push(direction, channel, value, op),
            (TileKind::Shim, Register::Lock(lock)) => shim.store_lock(lock, value),
            (TileKind::Shim, Register::ShimMux) => shim.store_mux(value),
            (TileKind::Shim, Register::ShimDemux) => shim.store_demux(value),
            (_, Register::ChannelStatus(..) | Register::CoreStatus) => {
                Err(Diagnosis::new(DiagnosisKind::BadRegisterValue, format!("{address} cannot be written")))
            }
            _ => {
                self.memory.store(address.column(), address.row(), address.offset(), value);
                if register == Register::CoreControl && (address.column(), address.row()) == ID_TILE {
                    return self.control_core(value, programs);
                }
                Ok(())
            }
        }
    }

    /// Enabling the core of the identification tile binds the core program; disabling or resetting it ends the program.
    fn control_core(&mut self, value: u32, programs: &CoreProgramTable) -> Result<(), Diagnosis> {
        if value & CORE_RESET != 0 || value & CORE_ENABLE == 0 {
            self.program = None;
            return Ok(());
        }
        let (column, row) = ID_TILE;
        let unknown = |reason| Diagnosis::new(DiagnosisKind::UnknownProgram, reason);
        let load = |i: u32| self.memory.load(column, row, ID_OFFSET + 4 * i);
        let description = ProgramDescription::read(load).map_err(unknown)?;
        self.program = Some(programs.make(&description).map_err(unknown)?);
        Ok(())
    }

    /// Moves data until `goal` holds. `false`: nothing moves any more and it does not hold.
    fn run_until(&mut self, goal: impl Fn(&Self) -> bool, memory: &dyn DeviceMemory) -> Result<bool, Trouble> {
        let mut steps: u32 = 0;
        loop {
            if goal(self) {
                return Ok(true);
            }
            steps = steps.wrapping_add(1);
            if steps.is_multiple_of(STEPS_PER_LOOK)
                && self.shims.iter().map(Shim::moved_bytes).sum::<u64>() > self.max_run_bytes
            {
                return Ok(false);
            }
            if !(self.drain(memory)? || self.step(memory)? || self.prefetch(memory)?) {
                return Ok(goal(self));
            }
        }
    }

    /// Output streams into waiting tasks: one portion.
    fn drain(&mut self, memory: &dyn DeviceMemory) -> Result<bool, Trouble> {
        for (key, fifo) in &mut self.outputs {
            let shim = &mut self.shims[usize::from(key.column)];
            if shim.pump_output(key.channel, fifo, memory)?.is_some() {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// One step of the core program.
    fn step(&mut self, memory: &dyn DeviceMemory) -> Result<bool, Trouble> {
        let Some(program) = &mut self.program else { return Ok(false) };
        let mut ports = Ports {
            shims: &mut self.shims,
            inputs: &mut self.inputs,
            outputs: &mut self.outputs,
            memory,
            trouble: None,
        };
        let step = program.step(&mut Streams { streams: &mut ports, memory: &self.memory });
        match ports.trouble {
            Some(trouble) => Err(trouble),
            None => Ok(step == Step::Progress),
        }
    }

    /// Input tasks into the buffers behind their streams, as far as these go.
    fn prefetch(&mut self, memory: &dyn DeviceMemory) -> Result<bool, Trouble> {
        let Some(program) = &self.program else { return Ok(false) };
        for (column, shim) in (0..).zip(&mut self.shims) {
            for channel in 0..2 {
                let buffered = self
                    .inputs
                    .iter()
                    .filter(|(key, _)| (key.column, key.channel) == (column, channel))
                    .map(|(_, fifo)| fifo.len());
                let room = program.input_buffer_bytes(StreamKey::input(column, channel)).saturating_sub(buffered.sum());
                if shim.pump_input(column, channel, room, &mut self.inputs, memory)?.is_some() {
                    return Ok(true);
                }
            }
        }
        Ok(false)
    }

    /// After the last operation: lets everything run out, and says what should not be left.
    fn settle(&mut self, last_op: u32, surroundings: &Surroundings<'_>) -> Result<(), Trouble> {
        let unawaited: Vec<_> = self.outstanding(Direction::S2mm);
        self.run_until(|_| false, surroundings.memory)?;
        let log = |kind, detail: String, op| surroundings.log.push(Diagnosis::new(kind, detail).at_op(op));
        let starved = self.outstanding(Direction::S2mm);
        for (column, channel, op) in &unawaited {
            let kind = match starved.contains(&(*column, *channel, *op)) {
                true => DiagnosisKind::Starved,
                false => DiagnosisKind::Unawaited,
            };
            let detail = format!("the task pushed to column {column} s2mm{channel} had not ended with the code");
            log(kind, detail, *op);
        }
        for (column, channel, op) in self.outstanding(Direction::Mm2s) {
            let detail = format!("the task pushed to column {column} mm2s{channel} has data that nobody takes");
            log(DiagnosisKind::Undrained, detail, op);
        }
        let leftovers = self.inputs.iter().chain(&self.outputs).filter(|(_, fifo)| fifo.len() > 0);
        for (key, fifo) in leftovers {
            log(DiagnosisKind::Undrained, format!("{} bytes are left in the stream of {key}", fifo.len()), last_op);
        }
        if let Some(rest) = self.program.as_ref().and_then(|program| program.unfinished()) {
            log(DiagnosisKind::Starved, format!("the core program is not done: {rest}"), last_op);
        }
        self.shims.iter_mut().for_each(Shim::drop_tokens);
        Ok(())
    }

    fn outstanding(&self, direction: Direction) -> Vec<(u8, u8, u32)> {
        let shims = (0..).zip(&self.shims);
        shims
            .flat_map(|(column, shim)| shim.outstanding(direction).map(move |(channel, op)| (column, channel, op)))
            .collect()
    }

    /// What is outstanding, for people.
    fn situation(&self) -> String {
        let Some(program) = &self.program else { return "no core program is bound".to_owned() };
        let tasks = DIRECTIONS.into_iter().flat_map(|direction| {
            let tasks = self.outstanding(direction).into_iter();
            tasks.map(move |(column, channel, op)| format!("column {column} {direction}{channel} (operation {op})"))
        });
        let tasks: Vec<_> = tasks.collect();
        let outstanding = match tasks.is_empty() {
            true => "no task is outstanding".to_owned(),
            false => format!("outstanding: {}", tasks.join(", ")),
        };
        program.unfinished().map_or(outstanding.clone(), |rest| format!("{outstanding}; the cores: {rest}"))
    }
}

/// The streams of one step.
struct Ports<'a> {
    shims: &'a mut [Shim],
    inputs: &'a mut BTreeMap<StreamKey, Fifo>,
    outputs: &'a mut BTreeMap<StreamKey, Fifo>,
    memory: &'a dyn DeviceMemory,
    trouble: Option<Trouble>,
}

impl StreamSet for Ports<'_> {
    fn read(&mut self, input: StreamKey, dst: &mut [u8]) -> bool {
        if input.direction != Direction::Mm2s || !dst.len().is_multiple_of(4) || self.trouble.is_some() {
            return false;
        }
        loop {
            let len = self.inputs.get(&input).map_or(0, Fifo::len);
            if len >= dst.len() {
                break;
            }
            let Some(shim) = self.shims.get_mut(usize::from(input.column)) else { return false };
            match shim.pump_input(input.column, input.channel, dst.len() - len, self.inputs, self.memory) {
                Ok(Some(_)) => {}
                Ok(None) => return false,
                Err(trouble) => {
                    self.trouble = Some(trouble);
                    return false;
                }
            }
        }
        if let Some(fifo) = self.inputs.get_mut(&input) {
            dst.copy_from_slice(fifo.front(dst.len()));
            fifo.advance(dst.len());
        }
        true
    }

    fn write(&mut self, output: StreamKey, src: &[u8]) -> bool {
        if !src.len().is_multiple_of(4) || !self.has_room(output, src.len()) {
            return false;
        }
        self.outputs.entry(output).or_default().push(src);
        true
    }

    fn is_wanted(&self, output: StreamKey) -> bool {
        let held = self.outputs.get(&output).map_or(0, Fifo::len);
        let shim = self.shims.get(usize::from(output.column));
        held == 0
            && shim.is_some_and(|shim| shim.outstanding(Direction::S2mm).any(|(channel, _)| channel == output.channel))
    }

    fn has_room(&self, output: StreamKey, len_bytes: usize) -> bool {
        let is_output = output.direction == Direction::S2mm
            && output.packet.is_none()
            && output.channel < 2
            && usize::from(output.column) < self.shims.len();
        // A portion larger than the buffers passes when they are empty.
        let held = self.outputs.get(&output).map_or(0, Fifo::len);
        is_output && (held == 0 || held + len_bytes <= OUTPUT_BUFFER_BYTES)
    }
}

#[cfg(test)]
mod captured;
#[cfg(test)]
mod tests;
