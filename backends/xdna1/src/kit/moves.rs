//! What an instruction stream moves of the host's buffers: the shim descriptors it writes, the arguments it patches into them,
//! and the tasks it starts.

use npuhal_amdxdna::format::registers::{Address, Direction, QueuePush, Register, RegisterError, ShimBd, TileKind};
use npuhal_amdxdna::format::reloc::FOLD_FLAG;
use npuhal_amdxdna::format::txn::{OpKind, Stream};
use std::collections::BTreeMap;

/// Descriptors of a shim tile: a chain is not longer.
const DESCRIPTORS: usize = 16;
const WORD_BYTES: u64 = 4;

/// What a stream moves.
#[derive(Debug, Default)]
pub(super) struct Moves {
    /// By argument.
    pub(super) arguments: BTreeMap<u32, Moved>,
    /// Outputs whose end the stream waits for.
    pub(super) waits: usize,
    descriptors: BTreeMap<(u8, u8), Descriptor>,
}

/// What is moved of one argument.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Moved {
    /// The end of what is furthest in the buffer.
    pub(super) end_bytes: u64,
    /// What all tasks move together, in both directions. `None` where a descriptor is not written by the stream itself: then
    /// the stream does not tell.
    pub(super) total_bytes: Option<u64>,
}

/// A shim descriptor in the making.
#[derive(Debug, Clone, Copy, Default)]
struct Descriptor {
    words: [u32; 8],
    /// Words that the stream has written, a bit each.
    written: u8,
    /// Argument and byte offset of its address.
    patch: Option<(u32, u64)>,
}

impl Descriptor {
    /// `None` unless the stream has written all of it.
    fn decoded(&self) -> Option<ShimBd> {
        // The words of the address may be left to the patch.
        if self.written | 0b110 == u8::MAX { ShimBd::decode(&self.words).ok() } else { None }
    }
}

impl Moves {
    /// Follows `stream` from its first operation to its last.
    pub(super) fn of(stream: &Stream) -> Result<Self, RegisterError> {
        let mut moves = Self::default();
        for op in &stream.ops {
            match &op.kind {
                OpKind::Write { register, value } => moves.write(*register, *value),
                OpKind::BlockWrite { register, data } => {
                    for (index, word) in (0..).zip(data.iter()) {
                        moves.write(register.wrapping_add(4 * index), word);
                    }
                }
                OpKind::MaskWrite(masked) => {
                    // What is under the mask's other bits is not known.
                    if let Some((place, word)) = descriptor_word(masked.register) {
                        moves.descriptors.entry(place).or_default().written &= !(1 << word);
                    }
                }
                OpKind::DdrPatch(patch) => {
                    moves.patch(patch.register, patch.argument, patch.offset & !FOLD_FLAG);
                }
                OpKind::MergeSync { tokens, .. } => moves.waits += usize::from(*tokens),
                kind => {
                    if let Some(wait) = kind.token_wait().transpose()?
                        && wait.direction == Direction::S2mm
                    {
                        moves.waits += usize::from(wait.row_count) * usize::from(wait.column_count);
                    }
                }
            }
        }
        Ok(moves)
    }

    fn write(&mut self, register: u32, value: u32) {
        if let Some((place, word)) = descriptor_word(register) {
            let descriptor = self.descriptors.entry(place).or_default();
            descriptor.words[usize::from(word)] = value;
            descriptor.written |= 1 << word;
            if word == 1 {
                descriptor.patch = None;
            }
            return;
        }
        let address = Address::from_word(register);
        if let (Some(TileKind::Shim), Some(Register::TaskQueue(..))) = (address.tile(), address.register())
            && let Ok(push) = QueuePush::decode(value, TileKind::Shim)
        {
            self.start(address.column(), push);
        }
    }

    fn patch(&mut self, register: u32, argument: u32, offset: u64) {
        let moved = self.arguments.entry(argument).or_insert(Moved { end_bytes: 0, total_bytes: Some(0) });
        let Some((place, _)) = descriptor_word(register) else {
            moved.total_bytes = None;
            return;
        };
        let descriptor = self.descriptors.entry(place).or_default();
        descriptor.patch = Some((argument, offset));
        // A word at least, where the descriptor is not known.
        let words = descriptor.decoded().map_or(1, |descriptor| extent_words(&descriptor, 1));
        moved.end_bytes = moved.end_bytes.max(offset.saturating_add(words.saturating_mul(WORD_BYTES)));
    }

    /// Runs a task: its first descriptor and those that follow it, as often as the task says.
    fn start(&mut self, column: u8, push: QueuePush) {
        let mut bd = push.start_bd as u8;
        for _ in 0..DESCRIPTORS {
            let Some(descriptor) = self.descriptors.get(&(column, bd)) else { return };
            let decoded = descriptor.decoded();
            if let Some((argument, offset)) = descriptor.patch
                && let Some(moved) = self.arguments.get_mut(&argument)
            {
                match decoded {
                    Some(descriptor) => {
                        let bytes = WORD_BYTES * u64::from(descriptor.length_words) * u64::from(push.repeat);
                        moved.total_bytes = moved.total_bytes.map(|total| total.saturating_add(bytes));
                        let reach = extent_words(&descriptor, push.repeat).saturating_mul(WORD_BYTES);
                        moved.end_bytes = moved.end_bytes.max(offset.saturating_add(reach));
                    }
                    None => moved.total_bytes = None,
                }
            }
            match decoded {
                Some(descriptor) if descriptor.use_next => bd = descriptor.next_bd as u8,
                _ => return,
            }
        }
    }
}

/// Column, descriptor and word, where `register` is one of a shim's descriptors.
fn descriptor_word(register: u32) -> Option<((u8, u8), u8)> {
    let address = Address::from_word(register);
    match (address.tile()?, address.register()?) {
        (TileKind::Shim, Register::Bd { bd, word }) => Some(((address.column(), bd), word)),
        _ => None,
    }
}

/// Words from the first that `descriptor` touches to the last, when it runs `repeat` times.
fn extent_words(descriptor: &ShimBd, repeat: u32) -> u64 {
    let ShimBd { length_words, d0, d1, d2_step, iteration, .. } = *descriptor;
    if length_words == 0 {
        return 0;
    }
    // A wrap of 0 has no end.
    let counted = |wrap: u32, left: u32| if wrap == 0 { left } else { wrap.min(left) };
    let first = counted(d0.wrap, length_words);
    let second = counted(d1.wrap, length_words.div_ceil(first));
    let third = length_words.div_ceil(first).div_ceil(second);
    let steps = [(first, d0.step), (second, d1.step), (third, d2_step), (repeat.min(iteration.wrap), iteration.step)];
    1 + steps.into_iter().map(|(count, step)| u64::from(count.saturating_sub(1)) * u64::from(step)).sum::<u64>()
}

#[cfg(test)]
mod tests {
    use super::*;
    use npuhal_amdxdna::format::registers::{Dimension, Iteration};
    use npuhal_amdxdna::format::txn::{Builder, DEV_GEN_AIE2, Header, Version};

    fn push(start_bd: u32, repeat: u32) -> QueuePush {
        QueuePush { start_bd, repeat, issue_token: false }
    }

    fn moved(build: impl Fn(&mut Builder)) -> BTreeMap<u32, Moved> {
        let mut code = Builder::new(Header::new(Version::Wide, DEV_GEN_AIE2, 4));
        build(&mut code);
        let bytes = code.encode().unwrap();
        Moves::of(&Stream::parse(&bytes).unwrap()).unwrap().arguments
    }

    #[test]
    fn repeats_chains_and_steps_are_counted() {
        let linear = |length_words| ShimBd { length_words, valid: true, ..ShimBd::default() };
        let found = moved(|code| {
            // Three rounds over 64 words, each 100 words further on; then a second descriptor of another argument.
            let first = ShimBd {
                iteration: Iteration { current: 0, wrap: 3, step: 100 },
                use_next: true,
                next_bd: 5,
                ..linear(64)
            };
            code.shim_bd(1, 4, &first).unwrap().shim_bd(1, 5, &linear(8)).unwrap();
            code.patch_shim_bd(1, 4, 0, 40).unwrap().patch_shim_bd(1, 5, 2, 0).unwrap();
            code.push_shim_task(1, Direction::Mm2s, 0, push(4, 3)).unwrap();
            // Rows of 4 words out of 10, and of 3 such blocks 100 words apart.
            let (d0, d1) = (Dimension { wrap: 4, step: 1 }, Dimension { wrap: 2, step: 10 });
            let strided = ShimBd { d0, d1, d2_step: 100, ..linear(24) };
            code.shim_bd(0, 0, &strided).unwrap().patch_shim_bd(0, 0, 1, 0).unwrap();
            code.push_shim_task(0, Direction::S2mm, 1, push(0, 1)).unwrap();
        });
        assert_eq!(found[&0], Moved { end_bytes: 40 + 4 * 264, total_bytes: Some(3 * 256) });
        assert_eq!(found[&2], Moved { end_bytes: 32, total_bytes: Some(3 * 32) });
        assert_eq!(found[&1], Moved { end_bytes: 4 * (200 + 10 + 4), total_bytes: Some(96) });
    }

    #[test]
    fn what_a_stream_does_not_write_it_does_not_tell() {
        let found = moved(|code| {
            code.patch_shim_bd(2, 1, 0, 16).unwrap();
            code.push_shim_task(2, Direction::Mm2s, 0, push(1, 1)).unwrap();
            let never = ShimBd { length_words: 9, valid: true, ..ShimBd::default() };
            code.shim_bd(3, 1, &never).unwrap().patch_shim_bd(3, 1, 1, 0).unwrap();
        });
        assert_eq!(found[&0], Moved { end_bytes: 20, total_bytes: None });
        assert_eq!(found[&1], Moved { end_bytes: 36, total_bytes: Some(0) }, "no task moves it");
    }
}
