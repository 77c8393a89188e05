//! Control code, operation by operation, on memory without a driver.

use super::program::{CoreProgramTable, ProgramDescription};
use super::{DeviceMemory, ImageId, Loads, Partition, Surroundings, Trouble};
use crate::diagnosis::{Diagnosis, DiagnosisKind, DiagnosisLog};
use crate::kit;
use crate::packet::Arguments;
use npuhal_amdxdna::format::cdo::{Cdo, CommandKind};
use npuhal_amdxdna::format::pdi::minimal_image;
use npuhal_amdxdna::format::registers::{
    Address, ChannelControl, Dimension, Direction, Iteration, LockUse, PacketHeader, QueuePush, Register, ShimBd,
    TileKind, TokenWait,
};
use npuhal_amdxdna::format::txn::{Builder, DEV_GEN_AIE2, Header, OpKind, Version};
use proptest::prelude::*;
use std::cell::RefCell;

/// Host memory at this address.
const BASE: u64 = 0x10_0000;
const HOST: u64 = 0x8000_0000;
/// Offsets of the two buffers that the cases use.
const IN: u64 = 0;
const OUT: u64 = 0x8000;

/// Flat host memory, and one image in device memory.
struct Flat {
    bytes: RefCell<Vec<u8>>,
    code: Vec<u8>,
}

impl Flat {
    fn new() -> Self {
        let words = (0..0x4000_u32).flat_map(|i| (i * 3 + 1).to_le_bytes());
        Self { bytes: RefCell::new(words.collect()), code: Vec::new() }
    }

    fn words(&self, at: u64, count: usize) -> Vec<u32> {
        let bytes = self.bytes.borrow();
        let words = bytes[at as usize..].chunks_exact(4).take(count);
        words.map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
    }

    fn range(&self, address: u64, len: usize) -> Result<std::ops::Range<usize>, Diagnosis> {
        let at = address.checked_sub(BASE).filter(|at| at + len as u64 <= self.bytes.borrow().len() as u64);
        let at = at.ok_or_else(|| Diagnosis::new(DiagnosisKind::OutsideArguments, format!("{address:#x}")))?;
        Ok(at as usize..at as usize + len)
    }
}

impl DeviceMemory for Flat {
    fn read(&self, address: u64, dst: &mut [u8]) -> Result<(), Diagnosis> {
        let range = self.range(address, dst.len())?;
        dst.copy_from_slice(&self.bytes.borrow()[range]);
        Ok(())
    }

    fn write(&self, address: u64, src: &[u8]) -> Result<(), Diagnosis> {
        let range = self.range(address, src.len())?;
        self.bytes.borrow_mut()[range].copy_from_slice(src);
        Ok(())
    }

    fn read_code(&self, _address: u64, len_bytes: u64) -> Result<Vec<u8>, Diagnosis> {
        let len = len_bytes as usize;
        self.code.get(..len).map(<[u8]>::to_vec).ok_or_else(|| Diagnosis::new(DiagnosisKind::BadControlCode, "short"))
    }
}

/// A partition of two columns with the copy program for one word at a time on both channels.
struct Bench {
    partition: Partition,
    memory: Flat,
    log: DiagnosisLog,
    loads: Loads,
}

fn copy_image(portion_words: u32) -> Vec<u8> {
    kit::image(2, &ProgramDescription { id: kit::COPY, dimensions: vec![2, 2, portion_words] }).unwrap()
}

impl Bench {
    fn bare() -> Self {
        Self {
            partition: Partition::new(2),
            memory: Flat::new(),
            log: DiagnosisLog::default(),
            loads: Loads::default(),
        }
    }

    fn new() -> Self {
        let mut bench = Self::bare();
        bench.load(ImageId::Unit(0), copy_image(1)).unwrap();
        bench
    }

    fn with<T>(&mut self, act: impl FnOnce(&mut Partition, &mut Surroundings<'_>) -> T) -> T {
        let programs = CoreProgramTable::builtin();
        let mut surroundings =
            Surroundings { memory: &self.memory, programs: &programs, log: &self.log, loads: &mut self.loads };
        act(&mut self.partition, &mut surroundings)
    }

    fn load(&mut self, id: ImageId, image: Vec<u8>) -> Result<(), Trouble> {
        self.with(|partition, surroundings| partition.load_image(id, image, None, surroundings))
    }

    fn run_with(&mut self, code: &Builder, arguments: Arguments) -> Result<(), Trouble> {
        let code = code.encode().unwrap();
        self.with(|partition, surroundings| partition.run(&code, &arguments, false, surroundings))
    }

    fn run(&mut self, code: &Builder) -> Result<(), Trouble> {
        self.run_with(code, Arguments::Packet(vec![BASE + IN, BASE + OUT]))
    }

    /// Runs and says what was diagnosed: the reason of the end, then the log.
    fn verdict(&mut self, code: &Builder) -> Vec<(DiagnosisKind, Option<u32>)> {
        let end = self.run(code);
        let mut all: Vec<_> = self.log.to_vec();
        match end {
            Ok(()) => {}
            Err(Trouble::Fault(diagnosis) | Trouble::Hang(diagnosis)) => all.insert(0, diagnosis),
        }
        all.into_iter().map(|diagnosis| (diagnosis.kind, diagnosis.op)).collect()
    }
}

fn builder() -> Builder {
    Builder::new(Header::new(Version::Compact, DEV_GEN_AIE2, 2))
}

fn bd(at: u64, length_words: u32) -> ShimBd {
    ShimBd { address: HOST + BASE + at, length_words, valid: true, ..ShimBd::default() }
}

fn push(start_bd: u32, issue_token: bool) -> QueuePush {
    QueuePush { start_bd, repeat: 1, issue_token }
}

fn wait(direction: Direction, channel: u8) -> TokenWait {
    TokenWait { direction, row: 0, column: 0, row_count: 1, column_count: 1, channel }
}

use Direction::{Mm2s, S2mm};

/// Input of 16 words by descriptor 0, output by descriptor 1, a wait for the output.
fn copy_16() -> Builder {
    let mut code = builder();
    code.shim_bd(0, 0, &bd(IN, 16)).unwrap();
    code.shim_bd(0, 1, &bd(OUT, 16)).unwrap();
    code.push_shim_task(0, Mm2s, 0, push(0, false)).unwrap();
    code.push_shim_task(0, S2mm, 0, push(1, true)).unwrap();
    code.wait(wait(S2mm, 0));
    code
}

#[test]
fn a_copy_moves_words_and_leaves_nothing() {
    let mut bench = Bench::new();
    assert_eq!(bench.verdict(&copy_16()), []);
    assert_eq!(bench.memory.words(OUT, 16), bench.memory.words(IN, 16));
    assert_eq!(bench.memory.words(OUT + 64, 1), [(OUT as u32 + 64) / 4 * 3 + 1], "no more than that");
    let traffic = bench.partition.take_traffic();
    assert_eq!((traffic.read_bytes, traffic.read_streams, traffic.written_bytes), (64, 1, 64));
}

#[test]
fn strides_iterations_repeats_and_chains_follow_the_published_order() {
    let mut bench = Bench::new();
    let mut code = builder();
    // A transposition of 4 by 8 words, then 8 words behind it; twice, 64 words apart.
    let first = ShimBd {
        d0: Dimension { wrap: 4, step: 8 },
        d1: Dimension { wrap: 8, step: 1 },
        iteration: Iteration { current: 0, wrap: 2, step: 64 },
        next_bd: 5,
        use_next: true,
        ..bd(IN, 32)
    };
    let second = ShimBd { iteration: Iteration { current: 0, wrap: 2, step: 64 }, ..bd(IN + 4 * 32, 8) };
    code.shim_bd(0, 4, &first).unwrap();
    code.shim_bd(0, 5, &second).unwrap();
    code.shim_bd(0, 1, &bd(OUT, 80)).unwrap();
    code.push_shim_task(0, Mm2s, 0, QueuePush { start_bd: 4, repeat: 2, issue_token: false }).unwrap();
    code.push_shim_task(0, S2mm, 0, push(1, true)).unwrap();
    code.wait(wait(S2mm, 0));
    assert_eq!(bench.verdict(&code), []);
    let input = bench.memory.words(IN, 128);
    let mut wanted = Vec::new();
    for base in [0, 64] {
        wanted.extend((0..8).flat_map(|row| (0..4).map(move |column| base + row + 8 * column)));
        wanted.extend(base + 32..base + 40);
    }
    let wanted: Vec<u32> = wanted.into_iter().map(|i: usize| input[i]).collect();
    assert_eq!(bench.memory.words(OUT, 80), wanted);
}

#[test]
fn address_patches_write_the_argument_into_the_descriptor() {
    for (arguments, is_patched) in [
        (Arguments::Packet(vec![BASE + IN, BASE + OUT]), true),
        // Descriptors of the ELF flows were patched by the host: the operations change nothing.
        (Arguments::Host, false),
    ] {
        let mut bench = Bench::new();
        let mut code = builder();
        let old = BASE + OUT + 0x1000;
        code.shim_bd(0, 0, &bd(IN, 4)).unwrap();
        code.shim_bd(0, 1, &ShimBd { address: HOST + old, ..bd(0, 4) }).unwrap();
        code.patch_shim_bd(0, 1, 1, 0x40).unwrap();
        code.push_shim_task(0, Mm2s, 0, push(0, false)).unwrap();
        code.push_shim_task(0, S2mm, 0, push(1, true)).unwrap();
        code.wait(wait(S2mm, 0));
        bench.run_with(&code, arguments).unwrap();
        let target = if is_patched { OUT + 0x40 } else { OUT + 0x1000 };
        assert_eq!(bench.memory.words(target, 4), bench.memory.words(IN, 4));
    }
}

#[test]
fn addresses_carry_into_the_upper_half() {
    let mut bench = Bench::new();
    let mut code = builder();
    code.shim_bd(0, 0, &bd(IN, 4)).unwrap();
    code.patch_shim_bd(0, 0, 0, 0).unwrap();
    code.write(Address::from_word(0), 0);
    // The last operation names no register: what came before shows in the descriptor.
    let end = bench.run_with(&code, Arguments::Packet(vec![0x7E12_F000_0040]));
    assert!(matches!(end, Err(Trouble::Fault(d)) if d.kind == DiagnosisKind::UnknownRegister && d.op == Some(2)));
    let load = |word: u8| bench.partition.load(Register::Bd { bd: 0, word }.at(0, 0).unwrap().to_word()).unwrap();
    assert_eq!((load(1), load(2)), (0x7000_0040, 0x7E13));
}

#[test]
fn locks_hold_a_transfer_back() {
    let locked = |acquire_value| LockUse { acquire_enable: true, acquire_value, acquire_id: 3, ..LockUse::default() };
    let lock = Register::Lock(3).at(0, 0).unwrap();
    for (acquire_value, lock_value, runs) in
        [(-1, 0, false), (-1, 1, true), (-1, 2, true), (-2, 1, false), (1, 1, true), (1, 2, false), (0, 0, true)]
    {
        let mut bench = Bench::new();
        let mut code = builder();
        code.write(lock, lock_value);
        code.shim_bd(0, 0, &ShimBd { locks: locked(acquire_value), ..bd(IN, 4) }).unwrap();
        code.shim_bd(0, 1, &bd(OUT, 4)).unwrap();
        code.push_shim_task(0, Mm2s, 0, push(0, false)).unwrap();
        code.push_shim_task(0, S2mm, 0, push(1, true)).unwrap();
        code.wait(wait(S2mm, 0));
        let end = bench.run(&code);
        assert_eq!(end.is_ok(), runs, "acquire {acquire_value} of {lock_value}: {end:?}");
        let left = if runs { lock_value - u32::from(i8::unsigned_abs(acquire_value)) } else { lock_value };
        assert_eq!(bench.partition.load(lock.to_word()).unwrap(), left);
    }
    // Released by one descriptor, acquired by the next; a poll sees the value.
    let mut bench = Bench::new();
    let mut code = builder();
    let release = LockUse { release_value: 1, release_id: 3, ..LockUse::default() };
    code.shim_bd(0, 0, &ShimBd { locks: release, next_bd: 2, use_next: true, ..bd(IN, 4) }).unwrap();
    code.shim_bd(0, 2, &ShimBd { locks: locked(-1), ..bd(IN + 16, 4) }).unwrap();
    code.shim_bd(0, 1, &bd(OUT, 8)).unwrap();
    code.push_shim_task(0, Mm2s, 0, push(0, false)).unwrap();
    code.push_shim_task(0, S2mm, 0, push(1, true)).unwrap();
    code.wait(wait(S2mm, 0)).mask_poll(lock, 0, 0x3F);
    assert_eq!(bench.verdict(&code), []);
}

#[test]
fn polls_and_merged_waits_see_what_has_ended() {
    let mut bench = Bench::new();
    let mut code = builder();
    let status = Register::ChannelStatus(S2mm, 0).at(0, 0).unwrap();
    for column in 0..2 {
        let at = u64::from(column) * 0x100;
        code.shim_bd(column, 0, &bd(IN + at, 16)).unwrap();
        code.shim_bd(column, 1, &bd(OUT + at, 16)).unwrap();
        code.push_shim_task(column, Mm2s, 0, push(0, false)).unwrap();
        code.push_shim_task(column, S2mm, 0, push(1, true)).unwrap();
    }
    code.mask_poll(status, 0, 1 << 19);
    code.op(OpKind::MergeSync { tokens: 2, columns: 2, pad: 0 });
    assert_eq!(bench.verdict(&code), []);
    assert_eq!(bench.memory.words(OUT + 0x100, 16), bench.memory.words(IN + 0x100, 16));
    let mut code = copy_16();
    code.op(OpKind::MergeSync { tokens: 1, columns: 2, pad: 0 });
    assert_eq!(bench.verdict(&code), [(DiagnosisKind::WaitNeverSatisfied, Some(5))], "its token was taken");
}

/// Waits advance transfers no further than they need.
#[test]
fn what_nothing_waited_for_has_not_happened() {
    let mut bench = Bench::new();
    let mut code = copy_16();
    // A second pair of tasks on channel 1 that nobody waits for: its descriptor is still in use.
    code.shim_bd(0, 2, &bd(IN, 16)).unwrap();
    code.shim_bd(0, 3, &bd(OUT + 0x200, 16)).unwrap();
    code.push_shim_task(0, S2mm, 1, push(3, false)).unwrap();
    code.push_shim_task(0, Mm2s, 1, push(2, false)).unwrap();
    assert_eq!(bench.verdict(&code), [(DiagnosisKind::Unawaited, Some(7))]);
    assert_eq!(bench.memory.words(OUT + 0x200, 16), bench.memory.words(IN, 16), "it ends with the code");
    code.shim_bd(0, 3, &bd(OUT, 16)).unwrap();
    assert_eq!(Bench::new().verdict(&code), [(DiagnosisKind::DescriptorInUse, Some(9))]);
}

#[test]
fn mistakes_are_named_with_their_operation() {
    use DiagnosisKind as Kind;
    type Change = fn(&mut Builder);
    type Wanted = &'static [(Kind, Option<u32>)];
    // What follows (or stands in for) the copy, and the verdict. The copy itself is operations 0 to 4.
    let after: [(&str, Change, Wanted); 14] = [
        (
            "a register that is not there",
            |code| {
                code.write(Address::from_word(0x0000_1000), 1);
            },
            &[(Kind::UnknownRegister, Some(5))],
        ),
        (
            "a column that is not there",
            |code| {
                code.write(Register::Lock(0).at(2, 0).unwrap(), 1);
            },
            &[(Kind::UnknownRegister, Some(5))],
        ),
        (
            "a row that is not there",
            |code| {
                code.write(Address::from_word(7 << 20), 1);
            },
            &[(Kind::UnknownRegister, Some(5))],
        ),
        (
            "a misaligned register",
            |code| {
                code.write(Address::from_word(0x0020_0002), 1);
            },
            &[(Kind::UnknownRegister, Some(5))],
        ),
        (
            "a block past its register",
            |code| {
                code.block_write(Register::Lock(0).at(0, 0).unwrap(), vec![0; 2]);
            },
            &[(Kind::UnknownRegister, Some(5))],
        ),
        (
            "reserved bits of a push",
            |code| {
                code.write(Register::TaskQueue(S2mm, 0).at(0, 0).unwrap(), 1 << 24);
            },
            &[(Kind::BadRegisterValue, Some(5))],
        ),
        (
            "a status register",
            |code| {
                code.write(Register::ChannelStatus(S2mm, 0).at(0, 0).unwrap(), 0);
            },
            &[(Kind::BadRegisterValue, Some(5))],
        ),
        (
            "a lock above 63",
            |code| {
                code.write(Register::Lock(0).at(0, 0).unwrap(), 64);
            },
            &[(Kind::BadRegisterValue, Some(5))],
        ),
        (
            "finish on TLAST",
            |code| {
                code.write(Register::ChannelControl(S2mm, 0).at(0, 0).unwrap(), 1 << 16);
            },
            &[(Kind::Unsupported, Some(5))],
        ),
        (
            "a state table",
            |code| {
                code.op(OpKind::UpdateStateTable { index: 0, function: 1, operand: 1 });
            },
            &[(Kind::Unsupported, Some(5))],
        ),
        (
            "an invalid descriptor",
            |code| {
                code.push_shim_task(0, Mm2s, 0, push(9, false)).unwrap();
            },
            &[(Kind::InvalidDescriptor, Some(5))],
        ),
        (
            "a token too many",
            |code| {
                code.wait(wait(S2mm, 0));
            },
            &[(Kind::WaitNeverSatisfied, Some(5))],
        ),
        (
            "a token of a core tile",
            |code| {
                code.wait(TokenWait { row: 2, ..wait(S2mm, 0) });
            },
            &[(Kind::WaitNeverSatisfied, Some(5))],
        ),
        (
            "a missing argument",
            |code| {
                code.patch_shim_bd(0, 0, 2, 0).unwrap();
            },
            &[(Kind::MissingArgument, Some(5))],
        ),
    ];
    for (name, change, wanted) in after {
        let mut code = copy_16();
        change(&mut code);
        assert_eq!(Bench::new().verdict(&code), wanted, "{name}");
    }
}

#[test]
fn transfers_outside_of_memory_are_the_pushing_operations_fault() {
    for (input, output, wanted) in [
        (bd(0x10_0000, 16), bd(OUT, 16), (DiagnosisKind::OutsideArguments, Some(2))),
        (bd(IN, 16), bd(0xFFF0, 16), (DiagnosisKind::OutsideArguments, Some(3))),
        (ShimBd { address: 0x1000, ..bd(IN, 16) }, bd(OUT, 16), (DiagnosisKind::BadAddress, Some(2))),
        (
            ShimBd { d0: Dimension { wrap: 0, step: 0x1_0000 }, ..bd(IN, 16) },
            bd(OUT, 16),
            (DiagnosisKind::OutsideArguments, Some(2)),
        ),
    ] {
        let mut code = builder();
        code.shim_bd(0, 0, &input).unwrap();
        code.shim_bd(0, 1, &output).unwrap();
        code.push_shim_task(0, Mm2s, 0, push(0, false)).unwrap();
        code.push_shim_task(0, S2mm, 0, push(1, true)).unwrap();
        code.wait(wait(S2mm, 0));
        assert_eq!(Bench::new().verdict(&code), [wanted]);
    }
}

#[test]
fn starved_and_undrained_streams_are_found() {
    // Too little input: the wait never ends.
    let mut code = builder();
    code.shim_bd(0, 0, &bd(IN, 15)).unwrap();
    code.shim_bd(0, 1, &bd(OUT, 16)).unwrap();
    code.push_shim_task(0, Mm2s, 0, push(0, false)).unwrap();
    code.push_shim_task(0, S2mm, 0, push(1, true)).unwrap();
    let unawaited = code.clone();
    code.wait(wait(S2mm, 0));
    assert_eq!(Bench::new().verdict(&code), [(DiagnosisKind::WaitNeverSatisfied, Some(4))]);
    assert_eq!(Bench::new().verdict(&unawaited), [(DiagnosisKind::Starved, Some(3))]);
    // Too much input: words are left in the stream.
    let mut code = builder();
    code.shim_bd(0, 0, &bd(IN, 17)).unwrap();
    code.shim_bd(0, 1, &bd(OUT, 16)).unwrap();
    code.push_shim_task(0, Mm2s, 0, push(0, false)).unwrap();
    code.push_shim_task(0, S2mm, 0, push(1, true)).unwrap();
    code.wait(wait(S2mm, 0));
    assert_eq!(Bench::new().verdict(&code), [(DiagnosisKind::Undrained, Some(4))]);
    // A packet header sends the data to a stream that nobody reads.
    let mut code = builder();
    let packet = PacketHeader { enable: true, id: 1, kind: 0 };
    code.shim_bd(0, 0, &ShimBd { packet, ..bd(IN, 16) }).unwrap();
    code.shim_bd(0, 1, &bd(OUT, 16)).unwrap();
    code.push_shim_task(0, Mm2s, 0, push(0, false)).unwrap();
    code.push_shim_task(0, S2mm, 0, push(1, true)).unwrap();
    code.wait(wait(S2mm, 0));
    assert_eq!(Bench::new().verdict(&code), [(DiagnosisKind::WaitNeverSatisfied, Some(4))]);
}

#[test]
fn endless_tasks_end_in_the_watchdog() {
    // Two rings of descriptors: data goes round for ever, and no token comes. The second pair moves nothing at all.
    for length in [16, 0] {
        let mut code = builder();
        code.shim_bd(0, 0, &ShimBd { use_next: true, next_bd: 0, ..bd(IN, length) }).unwrap();
        code.shim_bd(0, 1, &ShimBd { use_next: true, next_bd: 1, ..bd(OUT, 16) }).unwrap();
        code.push_shim_task(0, Mm2s, 0, push(0, false)).unwrap();
        code.push_shim_task(0, S2mm, 0, push(1, true)).unwrap();
        code.wait(wait(S2mm, 0));
        let mut bench = Bench::bare();
        bench.load(ImageId::Unit(0), copy_image(16)).unwrap();
        bench.partition.max_run_bytes = 2 << 20;
        assert_eq!(bench.verdict(&code), [(DiagnosisKind::WaitNeverSatisfied, Some(4))]);
    }
}

#[test]
fn queues_hold_four_tasks_and_the_one_that_runs() {
    let mut code = builder();
    code.shim_bd(0, 0, &bd(IN, 4)).unwrap();
    for _ in 0..6 {
        code.push_shim_task(0, Mm2s, 0, push(0, false)).unwrap();
    }
    assert_eq!(Bench::new().verdict(&code), [(DiagnosisKind::QueueOverflow, Some(6))]);
}

#[test]
fn a_paused_or_disconnected_channel_moves_nothing() {
    let pause = ChannelControl { pause_stream: true, ..ChannelControl::default() };
    for (register, value) in [
        (Register::ChannelControl(Mm2s, 0), pause.encode(TileKind::Shim, Mm2s).unwrap()),
        (Register::ChannelControl(S2mm, 0), pause.encode(TileKind::Shim, S2mm).unwrap()),
        (Register::ShimMux, 0),
        (Register::ShimDemux, 0),
    ] {
        let mut code = builder();
        code.write(register.at(0, 0).unwrap(), value);
        let mut whole = copy_16().into_stream();
        whole.ops.splice(0..0, code.into_stream().ops);
        let mut code = Builder::new(whole.header);
        for op in whole.ops {
            code.op(op.kind);
        }
        assert_eq!(Bench::new().verdict(&code), [(DiagnosisKind::WaitNeverSatisfied, Some(5))], "{register}");
    }
}

#[test]
fn without_a_program_nothing_moves() {
    assert_eq!(Bench::bare().verdict(&copy_16()), [(DiagnosisKind::WaitNeverSatisfied, Some(4))]);
    // Resetting the core ends the program.
    let mut code = builder();
    code.write(Register::CoreControl.at(0, 2).unwrap(), 2);
    let mut bench = Bench::new();
    bench.run(&code).unwrap();
    assert_eq!(bench.verdict(&copy_16()), [(DiagnosisKind::WaitNeverSatisfied, Some(4))]);
}

#[test]
fn code_for_other_devices_or_sizes_is_refused() {
    let mut bench = Bench::new();
    for header in [Header::new(Version::Wide, 4, 2), Header::new(Version::Wide, DEV_GEN_AIE2, 3)] {
        let code = Builder::new(header);
        assert_eq!(bench.verdict(&code), [(DiagnosisKind::BadControlCode, None)]);
    }
    let mut bytes = copy_16().encode().unwrap();
    bytes.push(0);
    let end = bench.with(|partition, surroundings| partition.run(&bytes, &Arguments::Host, false, surroundings));
    assert!(matches!(end, Err(Trouble::Fault(diagnosis)) if diagnosis.kind == DiagnosisKind::BadControlCode));
    bytes.truncate(20);
    let end = bench.with(|partition, surroundings| partition.run(&bytes, &Arguments::Host, false, surroundings));
    assert!(end.is_err());
}

#[test]
fn images_load_once_and_never_in_flight() {
    let mut bench = Bench::bare();
    bench.memory.code = copy_image(4);
    let size_bytes = bench.memory.code.len() as u32;
    let mut load = builder();
    load.load_pdi(1, size_bytes);
    bench.run(&load).unwrap();
    bench.run(&load).unwrap();
    assert_eq!((bench.loads.executed, bench.log.to_vec()), (1, Vec::new()), "the same id stays resident");
    let mut other = builder();
    other.load_pdi(2, size_bytes);
    bench.run(&other).unwrap();
    assert_eq!(bench.loads, Loads { requested: 3, executed: 2 });
    // The same id with other contents is not loaded, and that is worth a word.
    bench.memory.code = copy_image(8);
    bench.run(&other).unwrap();
    assert_eq!((bench.loads.executed, bench.log.take()[0].kind), (2, DiagnosisKind::StaleConfiguration));
    // In flight it is a fault.
    let mut code = builder();
    code.shim_bd(0, 0, &bd(IN, 16)).unwrap();
    code.push_shim_task(0, Mm2s, 0, push(0, false)).unwrap();
    code.load_pdi(1, size_bytes);
    assert_eq!(bench.verdict(&code), [(DiagnosisKind::ConfigurationInFlight, Some(2))]);
}

#[test]
fn images_that_cannot_be_executed_are_refused() {
    let image = |commands: Vec<CommandKind<'static>>| minimal_image(&[Cdo::new(commands)]).unwrap();
    let write = |address, value| CommandKind::Write { address, value, long_address: false };
    let enable = u64::from(Register::CoreControl.at(0, 2).unwrap().to_word());
    let unknown = kit::image(2, &ProgramDescription { id: 0x777, dimensions: Vec::new() }).unwrap();
    let impossible = kit::image(2, &ProgramDescription { id: kit::COPY, dimensions: vec![9, 1, 1] }).unwrap();
    let mut damaged = copy_image(1);
    damaged[28] ^= 1;
    for (bytes, wanted) in [
        (vec![0; 64], DiagnosisKind::BadConfiguration),
        (damaged, DiagnosisKind::BadConfiguration),
        (image(vec![write(0x1000, 1)]), DiagnosisKind::UnknownRegister),
        (image(vec![write(enable, 1)]), DiagnosisKind::UnknownProgram),
        (unknown, DiagnosisKind::UnknownProgram),
        (impossible, DiagnosisKind::UnknownProgram),
        (
            image(vec![CommandKind::DmaXfer { source: 0, destination: 0, length: 1, rest: Vec::new().into() }]),
            DiagnosisKind::Unsupported,
        ),
    ] {
        let end = Bench::bare().load(ImageId::Unit(0), bytes);
        assert!(matches!(&end, Err(Trouble::Fault(diagnosis)) if diagnosis.kind == wanted), "{wanted:?}: {end:?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(debug_assertions) { 100 } else { 1000 }))]
    /// Whatever the code says, it ends.
    #[test]
    fn mutated_code_ends(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u32>(), 0_u32..32), 1..5),
        is_masked in any::<bool>(),
    ) {
        let mut code = copy_16();
        code.shim_bd(0, 2, &ShimBd { next_bd: 3, use_next: true, ..bd(IN, 16) }).unwrap();
        code.shim_bd(0, 3, &bd(IN, 16)).unwrap();
        code.push_shim_task(0, Mm2s, 1, push(2, true)).unwrap();
        code.wait(wait(Mm2s, 1));
        let mut bytes = code.encode().unwrap();
        for (at, value, shift) in changes {
            let at = 16 + 4 * at.index((bytes.len() - 16) / 4);
            let old = u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
            let new = if is_masked { old ^ 1 << shift } else { value };
            bytes[at..at + 4].copy_from_slice(&new.to_le_bytes());
        }
        let mut bench = Bench::new();
        bench.partition.max_run_bytes = 2 << 20;
        let arguments = Arguments::Packet(vec![BASE + IN, BASE + OUT]);
        let _ = bench.with(|partition, surroundings| partition.run(&bytes, &arguments, false, surroundings));
    }

    #[test]
    fn mutated_images_end(changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u32>()), 1..4)) {
        let mut bytes = copy_image(1);
        for (at, value) in changes {
            let at = 4 * at.index(bytes.len() / 4);
            bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
        }
        let mut bench = Bench::bare();
        let _ = bench.load(ImageId::Pdi(1), bytes);
        let _ = bench.run(&copy_16());
    }
}
