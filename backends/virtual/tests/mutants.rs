//! Mutants of a passing case: each flush, each invalidation and each argument handle left out, each field of each
//! descriptor, each operation and each configuration command changed or left out. All are caught, but for closed lists.
//!
//! Caught means: a typed error, another result, or a diagnosis.

mod common;
#[path = "common/wrap.rs"]
mod wrap;

use common::{Bench, Flow, buffers, pattern, read_words, submit};
use npuhal_amdxdna::driver::BoKind;
use npuhal_amdxdna::format::cdo::{Cdo, CommandKind};
use npuhal_amdxdna::format::pdi::minimal_image;
use npuhal_amdxdna::format::registers::{
    Address, ChannelControl, Dimension, Direction, Iteration, LockUse, QueuePush, Register, ShimBd, TileKind, TokenWait,
};
use npuhal_amdxdna::format::txn::{
    Builder, DEV_GEN_AIE2, DEV_GEN_AIE2P, DdrPatch, Header, Masked, OpKind, Stream, Version,
};
use npuhal_amdxdna::silicon::Silicon;
use npuhal_core::device::{Device, Program};
use npuhal_virtual::kit::{self, Kit};
use npuhal_virtual::{ProgramDescription, VirtualSpec};
use std::sync::{Arc, Mutex};
use wrap::{Forget, Forgetful, Seen};

const IN_WORDS: usize = 2048;
const OUT_WORDS: usize = 1024;
const BLOCK_WRITES: [usize; 3] = [2, 4, 6];

/// A copy that uses what a shim has: strides, iterations, repetitions, a chain, locks, polls.
fn rich_code(silicon: Silicon) -> Stream {
    let (version, dev_gen) = match silicon {
        Silicon::Npu1 => (Version::Wide, DEV_GEN_AIE2),
        _ => (Version::Compact, DEV_GEN_AIE2P),
    };
    let lock = |id| Register::Lock(id).at(0, 0).unwrap();
    let use_locks = |acquire_id, release_id| LockUse {
        acquire_enable: true,
        acquire_value: -1,
        acquire_id,
        release_value: 1,
        release_id,
    };
    let first = ShimBd {
        length_words: 64,
        d0: Dimension { wrap: 8, step: 2 },
        d1: Dimension { wrap: 4, step: 32 },
        d2_step: 128,
        iteration: Iteration { current: 0, wrap: 2, step: 300 },
        next_bd: 1,
        use_next: true,
        locks: use_locks(5, 6),
        valid: true,
        ..ShimBd::default()
    };
    let second = ShimBd {
        length_words: 16,
        iteration: Iteration { current: 0, wrap: 2, step: 7 },
        locks: use_locks(6, 5),
        valid: true,
        ..ShimBd::default()
    };
    let output = ShimBd {
        length_words: 80,
        d0: Dimension { wrap: 16, step: 1 },
        d1: Dimension { wrap: 2, step: 20 },
        d2_step: 64,
        iteration: Iteration { current: 0, wrap: 2, step: 400 },
        burst: 2,
        valid: true,
        ..ShimBd::default()
    };
    let control = ChannelControl { controller_id: 3, ..ChannelControl::default() };
    let mut code = Builder::new(Header::new(version, dev_gen, 1));
    code.mask_write(lock(5), 1, 0x3F);
    code.write(
        Register::ChannelControl(Direction::Mm2s, 0).at(0, 0).unwrap(),
        control.encode(TileKind::Shim, Direction::Mm2s).unwrap(),
    );
    code.shim_bd(0, 0, &first).unwrap().patch_shim_bd(0, 0, 0, 64).unwrap();
    code.shim_bd(0, 1, &second).unwrap().patch_shim_bd(0, 1, 0, 4096).unwrap();
    code.shim_bd(0, 2, &output).unwrap().patch_shim_bd(0, 2, 1, 32).unwrap();
    let push = QueuePush { start_bd: 2, repeat: 2, issue_token: true };
    code.push_shim_task(0, Direction::S2mm, 0, push).unwrap();
    let push = QueuePush { start_bd: 0, repeat: 2, issue_token: false };
    code.push_shim_task(0, Direction::Mm2s, 0, push).unwrap();
    let wait = TokenWait { direction: Direction::S2mm, row: 0, column: 0, row_count: 1, column_count: 1, channel: 0 };
    code.wait(wait);
    code.mask_poll(lock(5), 1, 0x3F).mask_poll(lock(6), 0, 0x3F);
    code.into_stream()
}

fn rich_program() -> ProgramDescription {
    ProgramDescription { id: kit::COPY, dimensions: vec![1, 1, 8] }
}

fn rich_kit(silicon: Silicon) -> Kit {
    let image = kit::image(1, &rich_program()).unwrap();
    Kit { name: "rich".to_owned(), columns: 1, image, image_id: 1, code: rich_code(silicon), buffers: 2 }
}

/// The result, by the published address formula.
fn rich_result(input: &[u32]) -> Vec<u32> {
    let mut stream = Vec::new();
    for round in 0..2 {
        for n in 0..64 {
            stream.push(input[16 + 2 * (n % 8) + 32 * (n / 8 % 4) + 128 * (n / 32) + 300 * round]);
        }
        stream.extend_from_slice(&input[1024 + 7 * round..][..16]);
    }
    let mut output = vec![0; OUT_WORDS];
    for (i, word) in stream.into_iter().enumerate() {
        let (round, n) = (i / 80, i % 80);
        output[8 + n % 16 + 20 * (n / 16 % 2) + 64 * (n / 32) + 400 * round] = word;
    }
    output
}

/// How a mutant was caught; `None` is a survivor.
type Verdict = Option<String>;

/// Two rounds with other data each.
fn verdict(kit: &Kit, silicon: Silicon, flow: Flow, forget: Forget, seen: &Arc<Mutex<Seen>>) -> Verdict {
    let spec = VirtualSpec::new(silicon);
    let bench = match Bench::wrapped(&spec, |driver| Forgetful::new(driver, forget, seen)) {
        Ok(bench) => bench,
        Err(error) => return Some(error.to_string()),
    };
    let wrong = two_rounds(&bench, kit, flow);
    let diagnoses = bench.hardware.diagnoses();
    match wrong {
        Err(error) => Some(error),
        Ok(()) => diagnoses.first().map(ToString::to_string),
    }
}

fn two_rounds(bench: &Bench, kit: &Kit, flow: Flow) -> Result<(), String> {
    let text = |error: &dyn std::fmt::Display| error.to_string();
    let input = bench.empty(IN_WORDS).map_err(|error| text(&error))?;
    let output = bench.empty(OUT_WORDS).map_err(|error| text(&error))?;
    let (mut context, kernel) = bench.load(kit, flow).map_err(|error| text(&error))?;
    let mut list = context.runlist();
    list.push(&*kernel, &buffers(&[&input, &output])).map_err(|error| text(&error))?;
    for round in 1..3 {
        let words = pattern(IN_WORDS, round);
        input.write(0, &common::to_bytes(&words)).map_err(|error| text(&error))?;
        submit(&mut *list).map_err(|error| text(&error))?;
        if read_words(&output).map_err(|error| text(&error))? != rich_result(&words) {
            return Err(format!("wrong result in round {round}"));
        }
    }
    Ok(())
}

const PARTS: [(Silicon, Flow); 3] =
    [(Silicon::Npu1, Flow::Xclbin), (Silicon::Npu1, Flow::PartialElf), (Silicon::Npu5, Flow::FullElf)];

fn judge(kit: &Kit, silicon: Silicon, flow: Flow) -> Verdict {
    // Control code that cannot be written for a flow does not reach the device.
    let writes = match flow {
        Flow::Xclbin => kit.instructions().map(drop),
        Flow::PartialElf => kit.partial_elf().map(drop),
        Flow::FullElf => kit.full_elf(true).map(drop),
    };
    match writes {
        Ok(()) => verdict(kit, silicon, flow, Forget::Nothing, &Arc::default()),
        Err(error) => Some(format!("not written: {error}")),
    }
}

#[test]
fn the_case_itself_passes() {
    for (silicon, flow) in PARTS {
        assert_eq!(judge(&rich_kit(silicon), silicon, flow), None, "{silicon} {flow:?}");
    }
}

#[test]
fn every_forgotten_flush_and_handle_is_caught() {
    for (silicon, flow) in PARTS {
        let kit = rich_kit(silicon);
        let seen = Arc::default();
        assert_eq!(verdict(&kit, silicon, flow, Forget::Nothing, &seen), None);
        let Seen { flushes, invalidations, arguments } = std::mem::take(&mut *seen.lock().unwrap());
        assert!(flushes.len() > 4 && !invalidations.is_empty() && arguments.len() >= 4, "{silicon} {flow:?}");
        let survivors = |kinds: &[BoKind], forget: fn(usize) -> Forget| -> Vec<(usize, BoKind)> {
            let list = kinds.iter().enumerate();
            list.filter(|(i, _)| verdict(&kit, silicon, flow, forget(*i), &Arc::default()).is_none())
                .map(|(i, kind)| (i, *kind))
                .collect()
        };
        // Flush 0 belongs to the allocation of the input, which is written and flushed whole afterwards. Command
        // packets are read by the kernel, coherently: flushing them does nothing.
        let left = survivors(&flushes, Forget::Flush);
        assert!(left.iter().all(|(i, kind)| *i == 0 || *kind == BoKind::Cmd), "{silicon} {flow:?}: {left:?}");
        assert_eq!(survivors(&invalidations, Forget::Invalidate), [], "{silicon} {flow:?}");
        // Device memory need not be listed: the reference client leaves code and images out.
        let left = survivors(&arguments, Forget::Argument);
        assert!(left.iter().all(|(_, kind)| *kind == BoKind::Dev), "{silicon} {flow:?}: {left:?}");
        let tensors = arguments.iter().filter(|kind| **kind == BoKind::Share).count();
        assert_eq!(tensors, 4, "two tensors in two submissions");
    }
}

type Change = (&'static str, fn(&mut ShimBd));

const BD_CHANGES: [Change; 30] = [
    ("length", |bd| bd.length_words += 8),
    ("address", |bd| bd.address += 4096),
    ("packet enable", |bd| bd.packet.enable = true),
    ("packet id", |bd| bd.packet.id = 9),
    ("packet type", |bd| bd.packet.kind = 3),
    ("out-of-order id", |bd| bd.out_of_order_id = 9),
    ("secure", |bd| bd.secure = true),
    ("D0 wrap", |bd| bd.d0.wrap += 1),
    ("D0 step", |bd| bd.d0.step += 1),
    ("D1 wrap", |bd| bd.d1.wrap += 1),
    ("D1 step", |bd| bd.d1.step += 1),
    ("D2 step", |bd| bd.d2_step += 1),
    ("burst", |bd| bd.burst = 1),
    ("SMID", |bd| bd.smid = 1),
    ("cache", |bd| bd.cache = 2),
    ("QoS", |bd| bd.qos = 3),
    ("iteration current", |bd| bd.iteration.current = 1),
    ("iteration wrap", |bd| bd.iteration.wrap += 1),
    ("iteration step", |bd| bd.iteration.step += 1),
    ("TLAST suppress", |bd| bd.tlast_suppress = true),
    ("next", |bd| bd.next_bd = 2),
    ("use next", |bd| bd.use_next = !bd.use_next),
    ("valid", |bd| bd.valid = false),
    ("acquire enable", |bd| bd.locks.acquire_enable = !bd.locks.acquire_enable),
    ("acquire value", |bd| bd.locks.acquire_value -= 1),
    ("acquire id", |bd| bd.locks.acquire_id += 1),
    ("release value", |bd| bd.locks.release_value += 1),
    ("release id", |bd| bd.locks.release_id += 1),
    ("burst code", |bd| bd.burst = 3),
    ("all steps", |bd| (bd.d0.step, bd.d1.step, bd.d2_step) = (3, 3, 3)),
];

/// Fields whose change nobody sees, with the reason. `None` is every descriptor.
const BD_SURVIVORS: [(Option<usize>, &str, &str); 26] = [
    (None, "address", "the patch of the run's argument replaces it"),
    (None, "packet id", "no header is sent"),
    (None, "packet type", "no header is sent"),
    (None, "out-of-order id", "the channel is not in out-of-order mode"),
    (None, "secure", "access attributes are not part of the model"),
    (None, "burst", "the burst length changes speed only"),
    (None, "burst code", "the fourth code is not documented, and real control code uses it"),
    (None, "SMID", "the stream id of the memory unit is not part of the model"),
    (None, "cache", "cache attributes are not part of the model"),
    (None, "QoS", "the quality of service changes speed only"),
    (None, "TLAST suppress", "no receiver looks at the end of a packet"),
    (Some(1), "D0 wrap", "rows of one word, one word apart, are the same addresses"),
    (Some(1), "D1 wrap", "the first dimension is unbounded"),
    (Some(1), "D1 step", "the first dimension is unbounded"),
    (Some(1), "D2 step", "the first dimension is unbounded"),
    (Some(1), "next", "no descriptor follows"),
    (Some(2), "next", "no descriptor follows"),
    (Some(2), "packet enable", "an incoming stream is not given a header"),
    (Some(2), "acquire value", "nothing is acquired"),
    (Some(2), "acquire id", "nothing is acquired"),
    (Some(2), "release id", "nothing is released"),
    (Some(2), "acquire enable", "a lock is acquired that is free: value 0 of lock 0"),
    (Some(2), "release value", "a lock is released that nobody uses"),
    (Some(0), "iteration wrap", "the descriptor starts twice in a run, and the third value is not reached"),
    (Some(1), "iteration wrap", "the descriptor starts twice in a run, and the third value is not reached"),
    (Some(2), "iteration wrap", "the descriptor starts twice in a run, and the third value is not reached"),
];

#[test]
fn every_functional_field_of_a_descriptor_matters() {
    for (silicon, flow) in PARTS {
        let mut found = Vec::new();
        for (index, op) in BLOCK_WRITES.into_iter().enumerate() {
            for (name, change) in BD_CHANGES {
                let mut kit = rich_kit(silicon);
                let OpKind::BlockWrite { register, data } = &kit.code.ops[op].kind else { panic!("operation {op}") };
                let mut bd = ShimBd::decode(&data.first().unwrap()).unwrap();
                change(&mut bd);
                kit.code.ops[op].kind =
                    OpKind::BlockWrite { register: *register, data: bd.encode().unwrap().to_vec().into() };
                if judge(&kit, silicon, flow).is_none() {
                    found.push((index, name));
                }
            }
        }
        let mut wanted: Vec<(usize, &str)> = Vec::new();
        for (bd, name, _reason) in BD_SURVIVORS {
            wanted.extend((0..3).filter(|index| bd.is_none_or(|bd| bd == *index)).map(|index| (index, name)));
        }
        wanted.sort_unstable();
        found.sort_unstable();
        assert_eq!(found, wanted, "{silicon} {flow:?}");
    }
}

/// Changes of an operation: what each does, and the operation after it (`None`: left out).
fn op_changes(kind: &OpKind<'static>) -> Vec<(String, Option<OpKind<'static>>)> {
    let mut changes = vec![("left out".to_owned(), None)];
    let mut add = |name: &str, kind: OpKind<'static>| changes.push((name.to_owned(), Some(kind)));
    match kind {
        OpKind::Write { register, value } => {
            add("register", OpKind::Write { register: register + 8, value: *value });
            add("column", OpKind::Write { register: register + (1 << 25), value: *value });
            if let Some(Register::TaskQueue(..)) = Address::from_word(*register).register() {
                let push = QueuePush::decode(*value, TileKind::Shim).unwrap();
                for (name, push) in [
                    ("start", QueuePush { start_bd: push.start_bd + 1, ..push }),
                    ("repeat", QueuePush { repeat: push.repeat + 1, ..push }),
                    ("fewer repeats", QueuePush { repeat: push.repeat - 1, ..push }),
                    ("token", QueuePush { issue_token: !push.issue_token, ..push }),
                ] {
                    add(name, OpKind::Write { register: *register, value: push.encode(TileKind::Shim).unwrap() });
                }
            } else {
                add("controller id", OpKind::Write { register: *register, value: value + 0x100 });
                add("pause stream", OpKind::Write { register: *register, value: value | 4 });
                add("pause memory", OpKind::Write { register: *register, value: value | 2 });
            }
        }
        OpKind::BlockWrite { register, data } => {
            add("register", OpKind::BlockWrite { register: register + 0x20, data: data.clone() });
            add("column", OpKind::BlockWrite { register: register + (1 << 25), data: data.clone() });
            let short: Vec<u32> = data.iter().take(7).collect();
            add("short", OpKind::BlockWrite { register: *register, data: short.into() });
        }
        OpKind::MaskWrite(op) => {
            add("value", OpKind::MaskWrite(Masked { value: op.value + 1, ..*op }));
            add("mask", OpKind::MaskWrite(Masked { mask: 0x3E, ..*op }));
            add("register", OpKind::MaskWrite(Masked { register: op.register + 0x10, ..*op }));
        }
        OpKind::MaskPoll(op) => {
            add("value", OpKind::MaskPoll(Masked { value: op.value + 1, ..*op }));
            add("mask", OpKind::MaskPoll(Masked { mask: op.mask >> 1, ..*op }));
            add("register", OpKind::MaskPoll(Masked { register: op.register + 4, ..*op }));
        }
        OpKind::Tct { word, config } => {
            let wait = TokenWait::decode(*word, *config).unwrap();
            for (name, wait) in [
                ("direction", TokenWait { direction: Direction::Mm2s, ..wait }),
                ("row", TokenWait { row: 1, ..wait }),
                ("column", TokenWait { column: 1, ..wait }),
                ("rows", TokenWait { row_count: 2, ..wait }),
                ("columns", TokenWait { column_count: 2, ..wait }),
                ("no columns", TokenWait { column_count: 0, ..wait }),
                ("channel", TokenWait { channel: 1, ..wait }),
            ] {
                let (word, config) = wait.encode();
                add(name, OpKind::Tct { word, config });
            }
        }
        OpKind::DdrPatch(patch) => {
            add("register", OpKind::DdrPatch(DdrPatch { register: patch.register + 0x20, ..*patch }));
            add("argument", OpKind::DdrPatch(DdrPatch { argument: 1 - patch.argument, ..*patch }));
            add("missing argument", OpKind::DdrPatch(DdrPatch { argument: 7, ..*patch }));
            add("offset", OpKind::DdrPatch(DdrPatch { offset: patch.offset + 4, ..*patch }));
        }
        other => panic!("{other:?}"),
    }
    changes
}

/// Operation, change, reason.
const OP_SURVIVORS: [(usize, &str, &str); 8] = [
    (1, "left out", "the controller id is carried by tokens only, whose routing is not part of the model"),
    (1, "controller id", "the controller id is carried by tokens only, whose routing is not part of the model"),
    (1, "register", "the controller id of another channel"),
    (9, "token", "a token that nobody waits for is dropped at the end of the run"),
    (11, "left out", "a poll only looks"),
    (11, "mask", "the bits that are left are as wanted as well"),
    (12, "left out", "a poll only looks"),
    (12, "mask", "the bits that are left are as wanted as well"),
];

#[test]
fn every_operation_matters() {
    for (silicon, flow) in PARTS {
        let mut found = Vec::new();
        let original = rich_kit(silicon);
        for (index, op) in original.code.ops.iter().enumerate() {
            for (name, changed) in op_changes(&op.kind) {
                let mut kit = original.clone();
                match changed {
                    Some(kind) => kit.code.ops[index].kind = kind,
                    None => drop(kit.code.ops.remove(index)),
                }
                if judge(&kit, silicon, flow).is_none() {
                    found.push((index, name));
                }
            }
        }
        let mut wanted: Vec<_> = OP_SURVIVORS.iter().map(|(op, name, _)| (*op, (*name).to_owned())).collect();
        wanted.sort_unstable();
        // On a second-generation part the context has all eight columns: a column beside the design's is there.
        let beside = |(op, name): &(usize, String)| silicon == Silicon::Npu5 && *op == 1 && name == "column";
        found.retain(|survivor| !beside(survivor));
        found.sort_unstable();
        assert_eq!(found, wanted, "{silicon} {flow:?}");
    }
}

/// The operation that a full ELF starts with.
#[test]
fn loading_the_image_matters() {
    let kit = rich_kit(Silicon::Npu5);
    let size = (kit.image.len() as u32).to_le_bytes();
    let wanted = [8, 0, 1, 0, size[0], size[1], size[2], size[3]];
    let elf = kit.full_elf(true).unwrap();
    let at = elf.windows(8).position(|bytes| bytes == wanted).unwrap();
    // (byte, value, whether it is seen)
    for (byte, value, is_caught) in [
        (at, 5, true),
        // The id names the image for later loads; there is none.
        (at + 2, 2, false),
        (at + 5, 0, true),
        (at + 6, 1, true),
    ] {
        let mut elf = elf.clone();
        elf[byte] = value;
        let bench = Bench::new(&VirtualSpec::new(Silicon::Npu5));
        let program = Program::FullElf { image: &elf, kernel: "rich" };
        let run = || -> Result<Vec<u32>, String> {
            let mut context = bench.npu.open_context(&program).map_err(|error| error.to_string())?;
            let kernel = context.load(&program).map_err(|error| error.to_string())?;
            let (input, output) = (bench.buffer(&pattern(IN_WORDS, 1)).unwrap(), bench.empty(OUT_WORDS).unwrap());
            let mut list = context.runlist();
            list.push(&*kernel, &buffers(&[&input, &output])).map_err(|error| error.to_string())?;
            submit(&mut *list).map_err(|error| error.to_string())?;
            Ok(read_words(&output).unwrap())
        };
        assert_eq!(run() != Ok(rich_result(&pattern(IN_WORDS, 1))), is_caught, "byte {}", byte - at);
    }
}

#[test]
fn headers_for_other_parts_are_refused() {
    for (silicon, flow) in PARTS {
        for change in [|header: &mut Header| header.dev_gen = 7, |header: &mut Header| header.columns = 9] {
            let mut kit = rich_kit(silicon);
            change(&mut kit.code.header);
            assert!(judge(&kit, silicon, flow).is_some(), "{silicon} {flow:?}");
        }
    }
}

/// Commands of an image that can be left out, with the reason.
fn image_survivor(command: &CommandKind<'_>) -> Option<&'static str> {
    let address = match command {
        CommandKind::Write { address, .. } | CommandKind::DmaWrite { address, .. } => *address as u32,
        _ => return None,
    };
    let address = Address::from_word(address);
    match address.register()? {
        Register::ProgramMemory(_) => Some("the core's program is not executed"),
        Register::CoreControl => Some("the core is in reset before"),
        Register::Lock(_) => Some("core locks are 0 before"),
        Register::SwitchMaster(_) | Register::SwitchSlave(_) => Some("streams are told by shim channel, not by route"),
        _ => None,
    }
}

#[test]
fn every_configuration_command_matters() {
    for (silicon, flow) in PARTS {
        let commands = kit::configuration(1, &rich_program()).unwrap();
        for index in 0..commands.len() {
            let mut left = commands.clone();
            let removed = left.remove(index);
            let mut kit = rich_kit(silicon);
            kit.image = minimal_image(&[Cdo::new(left)]).unwrap();
            let verdict = judge(&kit, silicon, flow);
            assert_eq!(
                verdict.is_none(),
                image_survivor(&removed).is_some(),
                "{silicon} {flow:?}: {removed:?}: {verdict:?}"
            );
        }
        // Values: every word of the identification.
        let words = rich_program().words();
        for word in 0..words.len() {
            let mut kit = rich_kit(silicon);
            let commands = commands.iter().cloned().map(|command| match command {
                CommandKind::DmaWrite { address, data } if data.iter().eq(words.iter().copied()) => {
                    let mut changed = words.clone();
                    changed[word] += 1;
                    CommandKind::DmaWrite { address, data: changed.into() }
                }
                other => other,
            });
            kit.image = minimal_image(&[Cdo::new(commands)]).unwrap();
            let verdict = judge(&kit, silicon, flow);
            // A second column or channel has no transfers and stays idle; portions of 9 words do not divide the stream.
            assert_eq!(verdict.is_none(), matches!(word, 3 | 4), "{silicon} {flow:?}: word {word}: {verdict:?}");
        }
    }
}
