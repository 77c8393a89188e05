//! Execution of control code.

use super::{ImageId, Partition, Surroundings, Trouble};
use crate::diagnosis::{Diagnosis, DiagnosisKind};
use crate::packet::Arguments;
use npuhal_amdxdna::format::registers::{HOST_APERTURE, Register, TileKind, TokenWait};
use npuhal_amdxdna::format::txn::{DEV_GEN_AIE2, DEV_GEN_AIE2P, DdrPatch, Masked, OpAt, OpKind, View};

impl Partition {
    /// Executes control code for a run.
    pub(crate) fn run(
        &mut self,
        code: &[u8],
        arguments: &Arguments,
        is_second_generation: bool,
        surroundings: &mut Surroundings<'_>,
    ) -> Result<(), Trouble> {
        let view = View::new(code).map_err(|error| bad_code(&error))?;
        self.check_header(&view, is_second_generation)?;
        if view.len_bytes() != code.len() {
            let detail = format!("the packet says {} bytes, the code's header {}", code.len(), view.len_bytes());
            return Err(Trouble::Fault(Diagnosis::new(DiagnosisKind::BadControlCode, detail)));
        }
        for op in view.ops() {
            let op = op.map_err(|error| bad_code(&error))?;
            let index = op.index;
            self.operation(&op, arguments, surroundings).map_err(|trouble| match trouble {
                Trouble::Fault(diagnosis) => Trouble::Fault(diagnosis.at_op(index)),
                Trouble::Hang(diagnosis) => Trouble::Hang(diagnosis.at_op(index)),
            })?;
        }
        self.settle(view.op_count().saturating_sub(1), surroundings)
    }

    /// Whether firmware looks at the generation is not known; code for the other one is a mistake in any case.
    fn check_header(&self, view: &View<'_>, is_second_generation: bool) -> Result<(), Trouble> {
        let header = view.header();
        let wanted = if is_second_generation { DEV_GEN_AIE2P } else { DEV_GEN_AIE2 };
        if header.dev_gen != wanted {
            let detail = format!("control code for device generation {}; the device is {wanted}", header.dev_gen);
            return Err(Trouble::Fault(Diagnosis::new(DiagnosisKind::BadControlCode, detail)));
        }
        if header.columns > self.columns {
            let detail = format!("control code for {} columns; the context has {}", header.columns, self.columns);
            return Err(Trouble::Fault(Diagnosis::new(DiagnosisKind::BadControlCode, detail)));
        }
        Ok(())
    }

    fn operation(
        &mut self,
        op: &OpAt<'_>,
        arguments: &Arguments,
        surroundings: &mut Surroundings<'_>,
    ) -> Result<(), Trouble> {
        let index = op.index;
        match &op.op.kind {
            OpKind::Write { register, value } => {
                self.store(*register, *value, index, surroundings.programs).map_err(Trouble::Fault)
            }
            OpKind::BlockWrite { register, data } => (0..).zip(data.iter()).try_for_each(|(i, value)| {
                let register = u64::from(*register) + 4 * i;
                let register = u32::try_from(register).map_err(|_| Trouble::Fault(past_the_end(register)))?;
                self.store(register, value, index, surroundings.programs).map_err(Trouble::Fault)
            }),
            OpKind::MaskWrite(Masked { register, value, mask, .. }) => {
                let old = self.load(*register).map_err(Trouble::Fault)?;
                let new = old & !mask | value & mask;
                self.store(*register, new, index, surroundings.programs).map_err(Trouble::Fault)
            }
            OpKind::MaskPoll(poll) | OpKind::MaskPollBusy(poll) => self.poll(poll, surroundings),
            OpKind::Tct { word, config } => {
                let wait = TokenWait::decode(*word, *config).map_err(|error| {
                    Trouble::Fault(Diagnosis::new(DiagnosisKind::BadRegisterValue, error.to_string()))
                })?;
                self.wait_tokens(&wait, surroundings)
            }
            OpKind::MergeSync { tokens, columns, .. } => self.merge_sync(*tokens, *columns, surroundings),
            OpKind::DdrPatch(patch) => self.patch(patch, arguments, index, surroundings),
            OpKind::LoadPdi { id, size_bytes, address } => {
                surroundings.loads.requested += 1;
                // The published fast lane leaves the size 0, so firmware goes by the image itself; here its buffer ends it.
                let len_bytes = match size_bytes {
                    0 => surroundings.memory.code_bytes_at(*address),
                    size_bytes => u64::from(*size_bytes),
                };
                let image = surroundings.memory.read_code(*address, len_bytes).map_err(Trouble::Fault)?;
                self.load_image(ImageId::Pdi(*id), image, Some(index), surroundings)
            }
            OpKind::ReadRegs { addresses, .. } => {
                let words: Vec<u32> = addresses.iter().collect();
                words.chunks_exact(2).try_for_each(|pair| self.locate(pair[0]).map(|_| ()).map_err(Trouble::Fault))
            }
            OpKind::Noop | OpKind::Preempt { .. } | OpKind::RecordTimer { .. } => Ok(()),
            // Scratch memory is the firmware's own; the operations that load program memory are ordinary writes.
            OpKind::CreateScratchpad { .. } | OpKind::LoadPmStart { .. } => Ok(()),
            // What the entries of the state table do is not published.
            other => {
                let detail = format!("operation {} is not part of the virtual array", other.name());
                Err(Trouble::Fault(Diagnosis::new(DiagnosisKind::Unsupported, detail)))
            }
        }
    }

    fn poll(&mut self, poll: &Masked, surroundings: &Surroundings<'_>) -> Result<(), Trouble> {
        self.locate(poll.register).map_err(Trouble::Fault)?;
        let holds = |partition: &Self| partition.load(poll.register).is_ok_and(|found| found & poll.mask == poll.value);
        if self.run_until(holds, surroundings.memory)? {
            return Ok(());
        }
        let found = self.load(poll.register).map_err(Trouble::Fault)?;
        Err(self.never(format!(
            "a poll of {:#010x}: {found:#x} & {:#x} is not {:#x}",
            poll.register, poll.mask, poll.value
        )))
    }

    /// Takes one token from the channel in each tile of the rectangle. Only shim tiles have channels here; the tokens
    /// of others never come.
    fn wait_tokens(&mut self, wait: &TokenWait, surroundings: &Surroundings<'_>) -> Result<(), Trouble> {
        for row in 0..wait.row_count {
            for column in 0..wait.column_count {
                let (row, column) = (u32::from(wait.row) + u32::from(row), u32::from(wait.column) + u32::from(column));
                let token = format!("a token of column {column}, row {row}, {}{}", wait.direction, wait.channel);
                let is_shim =
                    row == 0 && column < u32::from(self.columns) && wait.channel < TileKind::Shim.channel_count();
                if !is_shim {
                    return Err(self.never(token));
                }
                let column = column as usize;
                let has_token = |partition: &Self| partition.shims[column].tokens(wait.direction, wait.channel) > 0;
                if !self.run_until(has_token, surroundings.memory)? {
                    return Err(self.never(token));
                }
                self.shims[column].take_token(wait.direction, wait.channel);
            }
        }
        Ok(())
    }

    /// Waits for `tokens` tokens of any channel of the first `columns` columns. Beyond the two counts the meaning is
    /// not published; which tokens are taken is this model's choice: those of the lowest column first.
    fn merge_sync(&mut self, tokens: u8, columns: u8, surroundings: &Surroundings<'_>) -> Result<(), Trouble> {
        let columns = usize::from(columns).min(self.shims.len());
        let channels = || {
            let directions = super::DIRECTIONS.into_iter();
            directions.flat_map(|direction| (0..2).map(move |channel| (direction, channel)))
        };
        let count = |partition: &Self| -> u32 {
            let shims = partition.shims[..columns].iter();
            shims.flat_map(|shim| channels().map(|(direction, channel)| shim.tokens(direction, channel))).sum()
        };
        if !self.run_until(|partition| count(partition) >= u32::from(tokens), surroundings.memory)? {
            return Err(self.never(format!("{tokens} tokens of the first {columns} columns")));
        }
        let mut left = tokens;
        for shim in &mut self.shims[..columns] {
            for (direction, channel) in channels() {
                while left > 0 && shim.tokens(direction, channel) > 0 {
                    shim.take_token(direction, channel);
                    left -= 1;
                }
            }
        }
        Ok(())
    }

    /// Writes an argument's address into a descriptor, where the packet carries arguments.
    fn patch(
        &mut self,
        patch: &DdrPatch,
        arguments: &Arguments,
        op: u32,
        surroundings: &Surroundings<'_>,
    ) -> Result<(), Trouble> {
        let (address, tile, register) = self.locate(patch.register).map_err(Trouble::Fault)?;
        let Arguments::Packet(values) = arguments else { return Ok(()) };
        let (TileKind::Shim, Register::Bd { bd, word: 1 }) = (tile, register) else {
            let detail = format!("an address patch of {address}; wanted word 1 of a shim descriptor");
            return Err(Trouble::Fault(Diagnosis::new(DiagnosisKind::BadRegisterValue, detail)));
        };
        let value = values.get(patch.argument as usize).ok_or_else(|| {
            let detail = format!("argument {} of a packet with {}", patch.argument, values.len());
            Trouble::Fault(Diagnosis::new(DiagnosisKind::MissingArgument, detail))
        })?;
        let target = value.checked_add(patch.offset).and_then(|sum| sum.checked_add(HOST_APERTURE));
        let target = target.filter(|target| target.is_multiple_of(4) && target >> 48 == 0).ok_or_else(|| {
            let detail = format!("argument {} is at {value:#x}, plus {:#x}", patch.argument, patch.offset);
            Trouble::Fault(Diagnosis::new(DiagnosisKind::BadAddress, detail))
        })?;
        let high = self.shims[usize::from(address.column())].load_bd(bd, 2) & 0xFFFF_0000 | (target >> 32) as u32;
        self.store(patch.register, target as u32, op, surroundings.programs).map_err(Trouble::Fault)?;
        self.store(patch.register + 4, high, op, surroundings.programs).map_err(Trouble::Fault)
    }

    fn never(&self, what: String) -> Trouble {
        Trouble::Hang(Diagnosis::new(DiagnosisKind::WaitNeverSatisfied, format!("{what}; {}", self.situation())))
    }
}

fn bad_code(error: &dyn std::fmt::Display) -> Trouble {
    Trouble::Fault(Diagnosis::new(DiagnosisKind::BadControlCode, error.to_string()))
}

fn past_the_end(register: u64) -> Diagnosis {
    Diagnosis::new(DiagnosisKind::UnknownRegister, format!("{register:#x} lies past the last register"))
}
