//! Our dialogue against the recorded one.

use crate::recorded::{Event, Executed, Recorded};
use crate::trace::{RecordedExec, RecordedPacket, handle_of};
use npuhal_amdxdna::driver::{BoKind, DEV_ALIGN_BYTES};
use sha2::{Digest, Sha256};
use std::collections::BTreeSet;
use std::sync::Mutex;

/// What may differ. Every entry has its reason in [`ALLOWED`]; anything else fails the test.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Difference {
    OpeningQueries,
    UnitMemoryBeforeContext,
    CodeHandleListed,
    CodeSizeRounded,
    CodePerRun,
    ChainBufferSize,
    ControlPacketPool,
    PacketRebuilt,
    ContextAfterFailure,
    NpuPayload,
    FreshTensorFlushedOnce,
    ImportWithoutSecondMapping,
    SharedPdi,
    KernelNamesMayRepeat,
    OtherClient,
}

/// The closed table of differences.
pub(crate) const ALLOWED: &[(Difference, &str)] = &[
    (Difference::OpeningQueries, "the version is asked and checked first, and the shape of the array at opening"),
    (
        Difference::UnitMemoryBeforeContext,
        "configurations are in device memory before the context is made, so that lack of memory costs no context",
    ),
    (Difference::CodeHandleListed, "every buffer that the device touches is listed, code included"),
    (Difference::CodeSizeRounded, "code takes whole units of the device heap, so that a longer kernel fits later"),
    (Difference::CodePerRun, "instructions belong to a run; the recorded client shares a caller's buffer"),
    (Difference::ChainBufferSize, "every command buffer is 4096 bytes; the recorded client gives chains 224"),
    (
        Difference::ControlPacketPool,
        "a run has one control-packet buffer; the recorded client keeps a pool of eight a kernel",
    ),
    (
        Difference::PacketRebuilt,
        "a packet is rebuilt before every submission; the recorded client sends what the driver wrote over it",
    ),
    (Difference::ContextAfterFailure, "a context that failed is lost; the recorded client goes on with it"),
    (
        Difference::NpuPayload,
        "START_NPU has its own payload; the recorded client sends that of the preemptible opcodes",
    ),
    (Difference::FreshTensorFlushedOnce, "a fresh tensor is flushed once; the recorded client flushes some twice"),
    (
        Difference::SharedPdi,
        "a configuration is in device memory once a context; the recorded client copies it for every run",
    ),
    (
        Difference::KernelNamesMayRepeat,
        "a context takes kernels of one name from several files; the recorded client refuses them",
    ),
    (
        Difference::OtherClient,
        "the second recorded client sends one argument word with START_NPU, and a type in the header of chains",
    ),
    (
        Difference::ImportWithoutSecondMapping,
        "an export that comes back is the object it was; the recorded client maps it again",
    ),
];

#[derive(Debug, Default)]
pub(crate) struct Differences(pub(crate) BTreeSet<Difference>);

/// What was seen in any replay of this process.
pub(crate) static SEEN: Mutex<BTreeSet<Difference>> = Mutex::new(BTreeSet::new());

impl Differences {
    pub(crate) fn note(&mut self, difference: Difference) {
        assert!(ALLOWED.iter().any(|(allowed, _)| *allowed == difference), "{difference:?} is not in the table");
        self.0.insert(difference);
        SEEN.lock().unwrap().insert(difference);
    }
}

/// Compares submission `at` of ours with the recorded one it answers to. With `rebuilt`, the recorded packet may be spoilt
/// and ours has to be that of the first submission.
pub(crate) fn exec(device: &Recorded, executed: &Executed, rebuilt: bool, differences: &mut Differences) {
    let recorded = &device.trace().execs[executed.index];
    let what = format!("{} submission {}", device.trace().name, executed.index);
    let Some(packet) = &recorded.packet else { return };
    if recorded.sub.is_empty() {
        one_packet(device, executed, &executed.packet, packet, rebuilt, &what, differences);
    } else {
        chain(executed, packet, &what);
        assert_eq!(executed.sub.len(), recorded.sub.len(), "{what}: runs in the chain");
        for (i, (ours, theirs)) in executed.sub.iter().zip(&recorded.sub).enumerate() {
            one_packet(device, executed, ours, theirs, rebuilt, &format!("{what} run {i}"), differences);
        }
    }
    for (handle, held) in &executed.held {
        let content = device.trace().sha256_of(&recorded.code[&format!("bo{handle}")]);
        contents(device, held, content, &format!("{what}: contents of buffer {handle}"), differences);
    }
    args(device, executed, recorded, &what, differences);
}

fn chain(executed: &Executed, recorded: &RecordedPacket, what: &str) {
    let ours = bytes(&executed.packet);
    let handles: Vec<usize> = recorded.fix.iter().map(|(at, _)| *at).collect();
    assert_eq!(masked(&ours, &handles), masked(&recorded.bytes, &handles), "{what}: chain");
}

fn one_packet(
    device: &Recorded,
    executed: &Executed,
    ours: &[u32],
    recorded: &RecordedPacket,
    rebuilt: bool,
    what: &str,
    differences: &mut Differences,
) {
    let fixed: Vec<usize> = recorded.fix.iter().map(|(at, _)| *at).collect();
    let ours_bytes = bytes(ours);
    if masked(&ours_bytes, &fixed) != masked(&recorded.bytes, &fixed) {
        let first = device.trace().execs[0].packet.as_ref().unwrap();
        assert!(rebuilt, "{what}: packet\n ours     {ours:08x?}\n recorded {:08x?}", words(&recorded.bytes));
        differences.note(Difference::PacketRebuilt);
        return one_packet(device, executed, ours, first, false, what, differences);
    }
    for (at, symbol) in &recorded.fix {
        let value = u64::from_le_bytes(ours_bytes[*at..at + 8].try_into().unwrap());
        let (kind, rest) = symbol.split_once(':').unwrap();
        let (name, offset) = rest.split_once('+').unwrap_or((rest, "0x0"));
        let offset = u64::from_str_radix(offset.trim_start_matches("0x"), 16).unwrap();
        match kind {
            "va" => assert_eq!(value, device.address_of(handle_of(name)) + offset, "{what}: {symbol}"),
            "dev" => code(device, executed, recorded_code(device, executed, name), value, name, what, differences),
            other => panic!("{what}: symbol {other}"),
        }
    }
}

fn recorded_code<'a>(device: &'a Recorded, executed: &Executed, name: &str) -> &'a crate::trace::Content {
    // A rebuilt packet is compared with the first one, whose code is the first's as well.
    let of = |index: usize| device.trace().execs[index].code.get(name);
    let content = of(executed.index).or_else(|| of(0)).unwrap_or_else(|| panic!("no contents of {name}"));
    device.trace().sha256_of(content)
}

/// The code behind an address is what was recorded; where it lies may differ.
fn code(
    device: &Recorded,
    executed: &Executed,
    content: &crate::trace::Content,
    address: u64,
    name: &str,
    what: &str,
    differences: &mut Differences,
) {
    if address != device.address_of(handle_of(name)) {
        differences.note(Difference::CodePerRun);
    }
    let held = executed.code.get(&address).unwrap_or_else(|| panic!("{what}: nothing at {address:#x} for {name}"));
    contents(device, held, content, &format!("{what}: contents of {name}"), differences);
}

/// What the device sees is what was recorded, but for the place of a configuration.
fn contents(
    device: &Recorded,
    held: &[u8],
    content: &crate::trace::Content,
    what: &str,
    differences: &mut Differences,
) {
    let held = &held[..content.size];
    if sha256(held) != content.sha256 && with_other_pdi(device, held).any(|image| sha256(&image) == content.sha256) {
        return differences.note(Difference::SharedPdi);
    }
    assert_eq!(sha256(held), content.sha256, "{what}");
}

/// The image with the address of a configuration exchanged for that of each other recorded one of the same size.
fn with_other_pdi<'a>(device: &'a Recorded, image: &'a [u8]) -> impl Iterator<Item = Vec<u8>> + 'a {
    let dev = |handle: &u32| device.trace().bos.get(handle).filter(|bo| bo.kind == "DEV");
    let ours = device.log().into_iter().filter_map(|event| match event {
        Event::CreateBo { bo, kind: BoKind::Dev, size, .. } => Some((bo, size)),
        _ => None,
    });
    let pairs = ours.collect::<Vec<_>>().into_iter().flat_map(move |(bo, size)| {
        let from = dev(&bo).filter(|bo| bo.size == Some(size)).and_then(|bo| bo.xdna);
        let others = device.trace().bos.values().filter(move |other| other.kind == "DEV" && other.size == Some(size));
        others.filter_map(move |other| Some((from?, other.xdna?)))
    });
    pairs.map(|(from, to)| {
        let mut image = image.to_vec();
        for at in (0..image.len() - 8).step_by(4) {
            if image[at..at + 8] == from.to_le_bytes() {
                image[at..at + 8].copy_from_slice(&to.to_le_bytes());
            }
        }
        image
    })
}

/// Ours are unique and ascending and hold all that is recorded, but for code, which is another buffer here.
fn args(device: &Recorded, executed: &Executed, recorded: &RecordedExec, what: &str, differences: &mut Differences) {
    assert!(executed.args.is_sorted_by(|a, b| a < b), "{what}: argument handles {:?}", executed.args);
    let is_code = |handle: u32| device.trace().bos.get(&handle).is_none_or(|bo| bo.kind != "SHARE");
    for name in &recorded.args {
        let handle = handle_of(name);
        let ok = executed.args.contains(&handle) || is_code(handle);
        assert!(ok, "{what}: argument {name} is not listed: {:?}", executed.args);
    }
    for handle in &executed.args {
        if !recorded.args.iter().any(|name| handle_of(name) == *handle) {
            assert!(is_code(*handle), "{what}: buffer {handle} is listed and was not an argument");
            differences.note(Difference::CodeHandleListed);
        }
    }
}

/// Every `CREATE_BO` of tensors as recorded, in order; sizes of the rest by the table.
pub(crate) fn allocations(device: &Recorded, differences: &mut Differences) {
    let trace = device.trace();
    let theirs: Vec<u64> =
        trace.bos.values().filter(|bo| bo.kind == "SHARE" && !bo.is_imported).map(|bo| bo.size.unwrap()).collect();
    let log = device.log();
    let created = log.iter().filter_map(|event| match event {
        Event::CreateBo { bo, kind, size, .. } => Some((*bo, *kind, *size)),
        _ => None,
    });
    let created: Vec<_> = created.collect();
    let ours: Vec<u64> =
        created.iter().filter(|(_, kind, _)| *kind == BoKind::Share).map(|(_, _, size)| *size).collect();
    assert_eq!(ours, theirs, "{}: tensors", trace.name);
    for (bo, kind, size) in created {
        let recorded = trace.bos.get(&bo).and_then(|bo| bo.size);
        match kind {
            BoKind::Dev
                if recorded.is_none() && trace.bos.values().any(|bo| bo.kind == "DEV" && bo.size == Some(size)) =>
            {
                // A configuration again, for another context.
                differences.note(Difference::ContextAfterFailure);
            }
            BoKind::Dev if recorded != Some(size) => {
                assert!(size.is_multiple_of(DEV_ALIGN_BYTES), "{}: code of {size} bytes", trace.name);
                differences.note(Difference::CodeSizeRounded);
            }
            BoKind::Cmd if recorded.is_none() => {
                assert_eq!(size, 4096, "{}: command buffer", trace.name);
                differences.note(Difference::ChainBufferSize);
            }
            _ => {}
        }
    }
}

/// Rules about order that hold in every dialogue.
pub(crate) fn order(device: &Recorded, differences: &mut Differences) {
    let (trace, log) = (device.trace(), device.log());
    let at = |is: &dyn Fn(&Event) -> bool| log.iter().position(is);
    let heap_map = at(&|event| {
        matches!(event, Event::Map { placement: npuhal_amdxdna::driver::Placement::HeapWindow { .. }, .. })
    });
    let dev = at(&|event| matches!(event, Event::CreateBo { kind: BoKind::Dev, .. }));
    let context = at(&|event| matches!(event, Event::CreateContext { .. }));
    let units = at(&|event| matches!(event, Event::ConfigCus { .. }));
    let exec = at(&|event| matches!(event, Event::Exec(_)));
    let heap_map = heap_map.expect("the heap is mapped");
    for later in [dev, context].into_iter().flatten() {
        assert!(heap_map < later, "{}: heap map < device memory, context", trace.name);
    }
    if let (Some(dev), Some(context), Some(units)) = (dev, context, units) {
        assert!(dev < context && context < units, "{}: device memory < context < units", trace.name);
        differences.note(Difference::UnitMemoryBeforeContext);
    }
    if let (Some(context), Some(exec)) = (context, exec) {
        assert!(
            context < exec && units.is_none_or(|units| units < exec),
            "{}: context, units < submission",
            trace.name
        );
    }
    let contexts = log.iter().filter_map(|event| match event {
        Event::CreateContext { context, .. } => Some(*context),
        _ => None,
    });
    for number in contexts.collect::<Vec<_>>() {
        let syncobj = at(&|event| *event == Event::DestroySyncobj(number)).expect("the syncobj is destroyed");
        let destroyed = at(&|event| *event == Event::DestroyContext(number)).expect("the context is destroyed");
        assert!(syncobj < destroyed, "{}: SYNCOBJ_DESTROY < DESTROY_HWCTX", trace.name);
    }
    for (unmap, event) in log.iter().enumerate() {
        if let Event::Close(bo) = event {
            assert!(!log[unmap..].contains(&Event::Unmap { bo: *bo }), "{}: unmapped after close: {bo}", trace.name);
        }
    }
    differences.note(Difference::OpeningQueries);
}

pub(crate) fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

fn bytes(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

fn words(bytes: &[u8]) -> Vec<u32> {
    bytes.chunks_exact(4).map(|word| u32::from_le_bytes(word.try_into().unwrap())).collect()
}

fn masked(bytes: &[u8], fixed: &[usize]) -> Vec<u8> {
    let mut masked = bytes.to_vec();
    for at in fixed {
        masked[*at..at + 8].fill(0);
    }
    masked
}
