//! The virtual driver against the published behaviour of the three drivers, without the client.

use npuhal_amdxdna::driver::{
    ArrayShape, BoHandle, BoKind, ContextHandle, ContextSpec, CreateBo, CreatedContext, CuConfig, DEV_ALIGN_BYTES,
    Driver, ExecCommand, HEAP_BASE, HEAP_CHUNK_BYTES, MapRequest, Mapping, Placement, SyncDirection, SyncobjHandle,
};
use npuhal_amdxdna::errno::Errno;
use npuhal_amdxdna::host_pages;
use npuhal_amdxdna::silicon::Silicon;
use npuhal_amdxdna::uapi::query::{self, AieMetadata};
use npuhal_virtual::{DiagnosisKind, Firmware, Profile, VirtualDevice, VirtualDriver, VirtualSpec};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

type Outcome = Result<(), Errno>;

/// An open file with what the cases need; the mappings keep everything mapped.
struct Fixture {
    driver: Arc<VirtualDriver>,
    mappings: Vec<Arc<dyn Mapping>>,
}

impl Fixture {
    fn bare(spec: &VirtualSpec) -> Self {
        Self { driver: VirtualDevice::new(spec).connect(), mappings: Vec::new() }
    }

    fn with_heap(spec: &VirtualSpec) -> Self {
        let mut fixture = Self::bare(spec);
        fixture.add_heap_chunk(0).unwrap();
        fixture
    }

    fn create(&self, kind: BoKind, size_bytes: u64) -> Result<BoHandle, Errno> {
        self.driver.create_bo(&CreateBo { kind, size_bytes, user_memory: None })
    }

    fn map(&mut self, bo: BoHandle, len_bytes: u64, placement: Placement) -> Result<Arc<dyn Mapping>, Errno> {
        let map_offset = self.driver.bo_info(bo)?.map_offset.ok_or(Errno::EINVAL)?;
        let mapping = self.driver.map(&MapRequest { bo, map_offset, len_bytes, placement })?;
        self.mappings.push(Arc::clone(&mapping));
        Ok(mapping)
    }

    fn add_heap_chunk(&mut self, index: u64) -> Result<BoHandle, Errno> {
        let bo = self.create(BoKind::DevHeap, HEAP_CHUNK_BYTES)?;
        let placement = Placement::HeapWindow { offset_bytes: index * HEAP_CHUNK_BYTES };
        self.map(bo, HEAP_CHUNK_BYTES, placement)?;
        Ok(bo)
    }

    fn context(&self) -> CreatedContext {
        self.driver.create_context(&spec_of(4)).unwrap()
    }

    /// A mapped command buffer with these words.
    fn command(&mut self, words: &[u32]) -> (BoHandle, Arc<dyn Mapping>) {
        let bo = self.create(BoKind::Cmd, 4096).unwrap();
        let mapping = self.map(bo, 4096, Placement::Anywhere).unwrap();
        put(&*mapping, words);
        (bo, mapping)
    }

    fn exec(&self, context: ContextHandle, command: BoHandle, args: &[BoHandle]) -> Result<u64, Errno> {
        self.driver.exec(&ExecCommand { context, command, args })
    }

    /// Waits as a client has to, and returns the state in the header: point 0 may signal early.
    fn state_after(&self, context: CreatedContext, sequence: u64, mapping: &dyn Mapping) -> u32 {
        self.driver.wait_timeline(context.syncobj, sequence, None).unwrap();
        let patience = self.driver.now() + Duration::from_secs(70);
        while sequence == 0 && mapping.load_u32(0).unwrap() & 0xF < 4 && self.driver.now() < patience {
            self.driver.pause();
        }
        mapping.load_u32(0).unwrap() & 0xF
    }
}

fn spec_of(columns: u32) -> ContextSpec {
    ContextSpec { num_tiles: 4 * columns, max_opc: 0, qos: Default::default() }
}

fn put(mapping: &dyn Mapping, words: &[u32]) {
    for (at, word) in (0..).step_by(4).zip(words) {
        mapping.store_u32(at, *word).unwrap();
    }
}

fn words_at(mapping: &dyn Mapping, first: usize, count: usize) -> Vec<u32> {
    (first..first + count).map(|i| mapping.load_u32(4 * i as u64).unwrap()).collect()
}

/// Specs of a part in the order of [`Profile::ALL`].
fn profiles(silicon: Silicon) -> [VirtualSpec; 3] {
    Profile::ALL.map(|profile| VirtualSpec::new(silicon).with_profile(profile))
}

/// START_NPU_PREEMPT_ELF with code at `address`.
fn elf_packet(address: u32, len_bytes: u32) -> [u32; 14] {
    [0x3B00_D001, 0, address, 0, 0, 0, 0, 0, len_bytes, 0, 0, 0, 3, 0]
}

/// A case: what is asked of a bare or prepared file, and the answer of the three drivers.
struct Case {
    name: &'static str,
    silicon: Silicon,
    run: fn(&mut Fixture) -> Outcome,
    wanted: [Outcome; 3],
}

const OK: Outcome = Ok(());
const EINVAL: Outcome = Err(Errno::EINVAL);

fn same(outcome: Outcome) -> [Outcome; 3] {
    [outcome; 3]
}

#[test]
fn error_numbers_before_there_is_a_heap() {
    use Silicon::{Npu1, Npu4, Npu5};
    let cases = [
        Case {
            name: "device memory before the heap",
            silicon: Npu5,
            run: |f| f.create(BoKind::Dev, 100).map(drop),
            wanted: [EINVAL, Err(Errno::EAGAIN), EINVAL],
        },
        Case {
            name: "device memory before the heap is mapped",
            silicon: Npu5,
            run: |f| {
                f.create(BoKind::DevHeap, HEAP_CHUNK_BYTES)?;
                f.create(BoKind::Dev, 100).map(drop)
            },
            wanted: [EINVAL, Err(Errno::EAGAIN), EINVAL],
        },
        Case {
            name: "heap of an odd size",
            silicon: Npu4,
            run: |f| f.create(BoKind::DevHeap, 1 << 20).map(drop),
            wanted: same(EINVAL),
        },
        Case {
            name: "heap of two chunks on npu1",
            silicon: Npu1,
            run: |f| f.create(BoKind::DevHeap, 2 * HEAP_CHUNK_BYTES).map(drop),
            wanted: same(EINVAL),
        },
        Case {
            name: "host pages of size 0",
            silicon: Npu1,
            run: |f| f.create(BoKind::Share, 0).map(drop),
            wanted: same(EINVAL),
        },
        Case {
            name: "command of size 0",
            silicon: Npu1,
            run: |f| f.create(BoKind::Cmd, 0).map(drop),
            wanted: same(EINVAL),
        },
        Case {
            name: "context without a heap",
            silicon: Npu5,
            run: |f| f.driver.create_context(&spec_of(4)).map(drop),
            wanted: same(Err(Errno::ENOENT)),
        },
        Case {
            name: "heap mapped outside its window",
            silicon: Npu5,
            run: |f| {
                let bo = f.create(BoKind::DevHeap, HEAP_CHUNK_BYTES)?;
                f.map(bo, HEAP_CHUNK_BYTES, Placement::Anywhere).map(drop)
            },
            wanted: same(EINVAL),
        },
        Case {
            name: "heap mapped at another chunk's place",
            silicon: Npu5,
            run: |f| {
                let bo = f.create(BoKind::DevHeap, HEAP_CHUNK_BYTES)?;
                f.map(bo, HEAP_CHUNK_BYTES, Placement::HeapWindow { offset_bytes: HEAP_CHUNK_BYTES }).map(drop)
            },
            wanted: same(EINVAL),
        },
        Case {
            name: "unknown buffer",
            silicon: Npu1,
            run: |f| f.driver.bo_info(BoHandle(9)).map(drop),
            wanted: same(Err(Errno::ENOENT)),
        },
        Case {
            name: "closing an unknown buffer",
            silicon: Npu1,
            run: |f| f.driver.close_bo(BoHandle(9)),
            wanted: same(EINVAL),
        },
        Case {
            name: "unknown query",
            silicon: Npu1,
            run: |f| f.driver.get_info(99, &mut [0; 8]).map(drop),
            wanted: same(Err(Errno::EOPNOTSUPP)),
        },
        Case {
            name: "telemetry",
            silicon: Npu5,
            run: |f| f.driver.get_info(query::TELEMETRY, &mut [0; 320]).map(drop),
            wanted: same(Err(Errno::EOPNOTSUPP)),
        },
        Case {
            name: "resource information",
            silicon: Npu5,
            run: |f| f.driver.get_info(query::RESOURCE_INFO, &mut [0; 40]).map(drop),
            wanted: [Err(Errno::EOPNOTSUPP), OK, OK],
        },
        Case {
            name: "array of no elements",
            silicon: Npu1,
            run: |f| f.driver.get_array(0, ArrayShape { element_bytes: 160, elements: 0 }, &mut []).map(drop),
            wanted: same(EINVAL),
        },
        Case {
            name: "array of giant elements",
            silicon: Npu1,
            run: |f| f.driver.get_array(0, ArrayShape { element_bytes: 8192, elements: 1 }, &mut [0; 8192]).map(drop),
            wanted: [EINVAL, EINVAL, OK],
        },
        Case {
            name: "unknown array",
            silicon: Npu1,
            run: |f| f.driver.get_array(77, ArrayShape { element_bytes: 8, elements: 1 }, &mut [0; 8]).map(drop),
            wanted: same(Err(Errno::EOPNOTSUPP)),
        },
        Case {
            name: "destroying an unknown synchronisation object",
            silicon: Npu1,
            run: |f| f.driver.destroy_syncobj(SyncobjHandle(1)),
            wanted: same(Err(Errno::ENOENT)),
        },
        Case {
            name: "waiting for an unknown synchronisation object",
            silicon: Npu1,
            run: |f| f.driver.wait_timeline(SyncobjHandle(1), 0, None),
            wanted: same(Err(Errno::ENOENT)),
        },
        Case {
            name: "user memory with a size",
            silicon: Npu1,
            run: |f| {
                let pages = host_pages(4096)?;
                f.driver
                    .create_bo(&CreateBo { kind: BoKind::Share, size_bytes: 4096, user_memory: Some(&pages) })
                    .map(drop)
            },
            wanted: same(EINVAL),
        },
    ];
    check(&cases, Fixture::bare);
}

#[test]
fn error_numbers_with_a_heap() {
    use Silicon::{Npu1, Npu4, Npu5};
    let cases = [
        Case {
            name: "second chunk on npu1",
            silicon: Npu1,
            run: |f| f.add_heap_chunk(1).map(drop),
            wanted: [Err(Errno::EBUSY), Err(Errno::EOPNOTSUPP), Err(Errno::EBUSY)],
        },
        Case {
            name: "second chunk on npu4",
            silicon: Npu4,
            run: |f| f.add_heap_chunk(1).map(drop),
            wanted: [Err(Errno::EBUSY), OK, Err(Errno::EBUSY)],
        },
        Case {
            name: "ninth chunk",
            silicon: Npu4,
            run: |f| (1..=8).try_for_each(|i| f.add_heap_chunk(i).map(drop)),
            wanted: [Err(Errno::EBUSY), Err(Errno::ENOSPC), Err(Errno::EBUSY)],
        },
        Case {
            name: "device memory over the heap of npu1",
            silicon: Npu1,
            run: |f| {
                f.create(BoKind::Dev, 30 << 20)?;
                f.create(BoKind::Dev, 30 << 20)?;
                f.create(BoKind::Dev, 30 << 20).map(drop)
            },
            wanted: same(Err(Errno::ENOSPC)),
        },
        Case {
            name: "device memory over the first chunk of npu4",
            silicon: Npu4,
            run: |f| f.create(BoKind::Dev, 65 << 20).map(drop),
            wanted: [Err(Errno::ENOSPC), Err(Errno::EAGAIN), Err(Errno::ENOSPC)],
        },
        Case {
            name: "device memory over the largest heap",
            silicon: Npu4,
            run: |f| {
                let _ = (1..8).try_for_each(|i| f.add_heap_chunk(i).map(drop));
                f.create(BoKind::Dev, 513 << 20).map(drop)
            },
            wanted: same(Err(Errno::ENOSPC)),
        },
        Case {
            name: "context of no tiles",
            silicon: Npu5,
            run: |f| f.driver.create_context(&spec_of(0)).map(drop),
            wanted: same(EINVAL),
        },
        Case {
            name: "context of less than a column",
            silicon: Npu5,
            run: |f| f.driver.create_context(&ContextSpec { num_tiles: 3, ..spec_of(1) }).map(drop),
            wanted: same(EINVAL),
        },
        Case {
            name: "context of five columns on npu1",
            silicon: Npu1,
            run: |f| f.driver.create_context(&spec_of(5)).map(drop),
            wanted: same(EINVAL),
        },
        Case {
            name: "context of nine columns",
            silicon: Npu5,
            run: |f| f.driver.create_context(&spec_of(9)).map(drop),
            wanted: same(EINVAL),
        },
        Case {
            name: "seventh context on npu1",
            silicon: Npu1,
            run: |f| (0..7).try_for_each(|_| f.driver.create_context(&spec_of(4)).map(drop)),
            wanted: [Err(Errno::ETIMEDOUT), Err(Errno::ETIMEDOUT), OK],
        },
        Case {
            name: "seventeenth context on npu5",
            silicon: Npu5,
            run: |f| (0..17).try_for_each(|_| f.driver.create_context(&spec_of(8)).map(drop)),
            wanted: [Err(Errno::ETIMEDOUT), Err(Errno::ETIMEDOUT), OK],
        },
        Case {
            name: "configuring an unknown context",
            silicon: Npu1,
            run: |f| f.driver.config_cus(ContextHandle(3), &[]),
            wanted: same(EINVAL),
        },
        Case {
            name: "configuring no units",
            silicon: Npu1,
            run: |f| f.driver.config_cus(f.context().context, &[]),
            wanted: same(EINVAL),
        },
        Case {
            name: "configuring 33 units",
            silicon: Npu1,
            run: |f| configure(f, 33, BoKind::Dev),
            wanted: same(EINVAL),
        },
        Case {
            name: "configuring 600 units",
            silicon: Npu1,
            run: |f| configure(f, 600, BoKind::Dev),
            wanted: same(Err(Errno::E2BIG)),
        },
        Case {
            name: "configuring a unit from host pages",
            silicon: Npu1,
            run: |f| configure(f, 1, BoKind::Share),
            wanted: same(EINVAL),
        },
        Case {
            name: "configuring twice",
            silicon: Npu1,
            run: |f| {
                let units = [CuConfig { bo: f.create(BoKind::Dev, 100)?, function: 0 }];
                let context = f.context().context;
                f.driver.config_cus(context, &units)?;
                f.driver.config_cus(context, &units)
            },
            wanted: same(EINVAL),
        },
        Case {
            name: "destroying an unknown context",
            silicon: Npu1,
            run: |f| f.driver.destroy_context(ContextHandle(200)),
            wanted: same(EINVAL),
        },
        Case {
            name: "mapping device memory",
            silicon: Npu1,
            run: |f| {
                let bo = f.create(BoKind::Dev, 100)?;
                f.driver
                    .map(&MapRequest { bo, map_offset: 1 << 32, len_bytes: 4096, placement: Placement::Anywhere })
                    .map(drop)
            },
            wanted: same(EINVAL),
        },
        Case {
            name: "mapping twice",
            silicon: Npu1,
            run: |f| {
                let bo = f.create(BoKind::Share, 100)?;
                f.map(bo, 4096, Placement::Anywhere)?;
                f.map(bo, 4096, Placement::Anywhere).map(drop)
            },
            wanted: same(EINVAL),
        },
        Case {
            name: "exporting device memory",
            silicon: Npu1,
            run: |f| f.driver.export_dma_buf(f.create(BoKind::Dev, 100)?).map(drop),
            wanted: same(Err(Errno::EOPNOTSUPP)),
        },
        Case {
            name: "importing something else",
            silicon: Npu1,
            run: |f| f.driver.import_dma_buf(std::io::stderr().as_fd()).map(drop),
            wanted: same(EINVAL),
        },
        Case {
            name: "cache maintenance from the device",
            silicon: Npu1,
            run: |f| f.driver.sync_bo(f.create(BoKind::Share, 100)?, SyncDirection::FromDevice, 0..100),
            wanted: [OK, EINVAL, OK],
        },
        Case {
            name: "cache maintenance past the end",
            silicon: Npu1,
            run: |f| f.driver.sync_bo(f.create(BoKind::Share, 100)?, SyncDirection::ToDevice, 0..200),
            wanted: [OK, OK, EINVAL],
        },
        Case {
            name: "cache maintenance behind the end",
            silicon: Npu1,
            run: |f| f.driver.sync_bo(f.create(BoKind::Share, 100)?, SyncDirection::ToDevice, 100..101),
            wanted: same(EINVAL),
        },
        Case {
            name: "cache maintenance of device memory",
            silicon: Npu1,
            run: |f| f.driver.sync_bo(f.create(BoKind::Dev, 100)?, SyncDirection::ToDevice, 0..100),
            wanted: same(OK),
        },
    ];
    check(&cases, Fixture::with_heap);
}

fn configure(f: &mut Fixture, count: usize, kind: BoKind) -> Outcome {
    let unit = CuConfig { bo: f.create(kind, 100)?, function: 0 };
    f.driver.config_cus(f.context().context, &vec![unit; count])
}

#[test]
fn error_numbers_of_submissions() {
    use Silicon::{Npu1, Npu5};
    fn packet(f: &mut Fixture) -> BoHandle {
        f.command(&elf_packet(HEAP_BASE as u32, 16)).0
    }
    let cases = [
        Case {
            name: "to an unknown context",
            silicon: Npu5,
            run: |f| {
                let c = packet(f);
                f.exec(ContextHandle(77), c, &[]).map(drop)
            },
            wanted: same(EINVAL),
        },
        Case {
            name: "of no command",
            silicon: Npu5,
            run: |f| f.exec(f.context().context, BoHandle(0), &[]).map(drop),
            wanted: same(EINVAL),
        },
        Case {
            name: "with an unknown argument",
            silicon: Npu5,
            run: |f| {
                let c = packet(f);
                f.exec(f.context().context, c, &[BoHandle(99)]).map(drop)
            },
            wanted: same(Err(Errno::ENOENT)),
        },
        Case {
            name: "with too many arguments",
            silicon: Npu5,
            run: |f| {
                let c = packet(f);
                f.exec(f.context().context, c, &vec![c; 4096]).map(drop)
            },
            wanted: same(EINVAL),
        },
        Case {
            name: "of host pages",
            silicon: Npu5,
            run: |f| {
                let bo = f.create(BoKind::Share, 4096)?;
                f.exec(f.context().context, bo, &[]).map(drop)
            },
            wanted: [EINVAL, OK, OK],
        },
        Case {
            name: "of device memory",
            silicon: Npu5,
            run: |f| {
                let bo = f.create(BoKind::Dev, 4096)?;
                f.exec(f.context().context, bo, &[]).map(drop)
            },
            wanted: same(EINVAL),
        },
        Case {
            name: "of a large command",
            silicon: Npu5,
            run: |f| {
                let bo = f.create(BoKind::Cmd, 40 << 10)?;
                f.exec(f.context().context, bo, &[]).map(drop)
            },
            wanted: [EINVAL, OK, OK],
        },
        Case {
            name: "of an empty chain",
            silicon: Npu5,
            run: |f| {
                let (c, _) = f.command(&[0x0980_6001, 0, 0, 0, 0, 0, 0]);
                f.exec(f.context().context, c, &[]).map(drop)
            },
            wanted: same(EINVAL),
        },
        Case {
            name: "of a chain with an unknown command",
            silicon: Npu5,
            run: |f| {
                let (c, _) = f.command(&[0x0980_8001, 1, 0, 0, 0, 0, 0, 99, 0]);
                f.exec(f.context().context, c, &[]).map(drop)
            },
            wanted: same(EINVAL),
        },
        Case {
            name: "after another context went away (npu1)",
            silicon: Npu1,
            run: |f| {
                let c = packet(f);
                let (gone, kept) = (f.context(), f.context());
                f.driver.destroy_context(gone.context)?;
                f.exec(kept.context, c, &[]).map(drop)
            },
            wanted: same(Err(Errno::ENOENT)),
        },
        Case {
            name: "after another context went away (npu5)",
            silicon: Npu5,
            run: |f| {
                let c = packet(f);
                let (gone, kept) = (f.context(), f.context());
                f.driver.destroy_context(gone.context)?;
                f.exec(kept.context, c, &[]).map(drop)
            },
            wanted: same(OK),
        },
    ];
    check(&cases, Fixture::with_heap);
}

fn check(cases: &[Case], prepare: fn(&VirtualSpec) -> Fixture) {
    for case in cases {
        for (spec, wanted) in profiles(case.silicon).iter().zip(case.wanted) {
            let mut fixture = prepare(spec);
            assert_eq!((case.run)(&mut fixture), wanted, "{} on {spec}", case.name);
        }
    }
}

#[test]
fn old_firmware_cannot_grow_the_heap() {
    let spec = VirtualSpec { firmware: Firmware::Old, ..VirtualSpec::new(Silicon::Npu5) };
    let mut fixture = Fixture::with_heap(&spec);
    assert_eq!(fixture.create(BoKind::Dev, 65 << 20), Err(Errno::ENOSPC));
    assert_eq!(fixture.add_heap_chunk(1), Err(Errno::EOPNOTSUPP));
}

#[test]
fn addresses_follow_the_rules() {
    let mut f = Fixture::with_heap(&VirtualSpec::new(Silicon::Npu4));
    let heap = f.driver.bo_info(BoHandle(1)).unwrap();
    assert_eq!(heap.device_address, Some(HEAP_BASE));
    assert_eq!(heap.host_address.unwrap() % HEAP_CHUNK_BYTES, 0);

    let share = f.create(BoKind::Share, 100).unwrap();
    let before = f.driver.bo_info(share).unwrap();
    assert_eq!((before.host_address, before.device_address), (None, None));
    assert!(before.map_offset.unwrap() >= 1 << 32);
    let mapping = f.map(share, 4096, Placement::Anywhere).unwrap();
    let after = f.driver.bo_info(share).unwrap();
    assert_eq!((after.host_address, after.device_address), (Some(mapping.address()), Some(mapping.address())));

    let dev =
        [f.create(BoKind::Dev, 1).unwrap(), f.create(BoKind::Dev, 40_000).unwrap(), f.create(BoKind::Dev, 1).unwrap()];
    let places = dev.map(|bo| f.driver.bo_info(bo).unwrap());
    assert_eq!(places.map(|info| info.device_address.unwrap() - HEAP_BASE), [0, DEV_ALIGN_BYTES, 3 * DEV_ALIGN_BYTES]);
    assert!(places.iter().all(|info| info.map_offset.is_none()));
    assert_eq!(places[1].host_address, Some(heap.host_address.unwrap() + DEV_ALIGN_BYTES));

    let pages = host_pages(8192).unwrap();
    let user = f.driver.create_bo(&CreateBo { kind: BoKind::Share, size_bytes: 0, user_memory: Some(&pages) }).unwrap();
    assert_eq!(f.driver.bo_info(user).unwrap().device_address, Some(pages.address()));

    f.add_heap_chunk(1).unwrap();
    let info = f.driver.bo_info(f.create(BoKind::Dev, 63 << 20).unwrap()).unwrap();
    assert_eq!(info.device_address, Some(HEAP_BASE + 4 * DEV_ALIGN_BYTES));
}

#[test]
fn contexts_take_slots_and_ids() {
    for spec in profiles(Silicon::Npu5) {
        let device = VirtualDevice::new(&spec);
        let mut files: Vec<_> = (0..2).map(|_| Fixture { driver: device.connect(), mappings: Vec::new() }).collect();
        for file in &mut files {
            file.add_heap_chunk(0).unwrap();
        }
        let used = device.statistics().heap_used_bytes;
        let ids: Vec<_> = (0..6).map(|i| files[i % 2].context().context.0).collect();
        assert_eq!(device.statistics().heap_used_bytes - used, 6 * 4 * DEV_ALIGN_BYTES);
        // Ids of the device, or of each client.
        let wanted = if spec.profile == Profile::MainlineNew { [1, 2, 3, 4, 5, 6] } else { [1, 1, 2, 2, 3, 3] };
        assert_eq!(ids, wanted, "{spec}");
        assert_eq!(device.statistics().contexts, 6);
        drop(files);
        let left = device.statistics();
        assert_eq!(
            (left.files, left.contexts, left.buffer_objects, left.syncobjs, left.heap_used_bytes),
            (0, 0, 0, 0, 0)
        );
    }
}

#[test]
fn dma_bufs_come_back_as_what_they_were() {
    let spec = VirtualSpec::new(Silicon::Npu1);
    let device = VirtualDevice::new(&spec);
    let (first, second) = (device.connect(), device.connect());
    let create = CreateBo { kind: BoKind::Share, size_bytes: 5000, user_memory: None };
    let bo = first.create_bo(&create).unwrap();
    let fd = first.export_dma_buf(bo).unwrap();
    let own = first.import_dma_buf(fd.as_fd()).unwrap();
    assert_eq!((own.bo, own.size_bytes), (bo, 5000));
    let other = second.import_dma_buf(fd.as_fd()).unwrap();
    assert_eq!(other.size_bytes, 5000);
    // Both files map the same memory.
    let map = |driver: &VirtualDriver, bo| {
        let map_offset = driver.bo_info(bo).unwrap().map_offset.unwrap();
        driver.map(&MapRequest { bo, map_offset, len_bytes: 8192, placement: Placement::Anywhere }).unwrap()
    };
    let (here, there) = (map(&first, bo), map(&second, other.bo));
    here.write(5, b"shared").unwrap();
    let mut bytes = [0; 6];
    there.read(5, &mut bytes).unwrap();
    assert_eq!(&bytes, b"shared");
    drop((here, there));
    first.close_bo(bo).unwrap();
    assert_eq!(first.import_dma_buf(fd.as_fd()), Err(Errno::EINVAL));
    second.close_bo(other.bo).unwrap();
}

#[test]
fn queries_fill_short_buffers() {
    for silicon in [Silicon::Npu1, Silicon::Npu4, Silicon::Npu5] {
        let f = Fixture::with_heap(&VirtualSpec::new(silicon));
        let version = f.driver.version().unwrap();
        assert_eq!((version.name.as_str(), version.major, version.minor), ("amdxdna_accel_driver", 0, 16));
        let mut whole = [0; 64];
        assert_eq!(f.driver.get_info(query::AIE_METADATA, &mut whole), Ok(64));
        let metadata = AieMetadata::decode(&whole).unwrap();
        assert_eq!(u32::from(metadata.cols), silicon.facts().columns);
        assert_eq!((metadata.core.row_count, metadata.mem.lock_count, metadata.shim.dma_channel_count), (4, 64, 2));
        let mut short = [0xAA; 8];
        assert_eq!(f.driver.get_info(query::AIE_METADATA, &mut short), Ok(64));
        assert_eq!(short, whole[..8]);

        let (first, second) = (f.context(), f.context());
        let mut list = [0; 100];
        assert_eq!(f.driver.get_info(query::HW_CONTEXTS, &mut list), Ok(64));
        assert_eq!(u32::from_le_bytes([list[0], list[1], list[2], list[3]]), first.context.0);
        let shape = ArrayShape { element_bytes: 160, elements: 1024 };
        let mut entries = vec![0; 160 * 1024];
        let found = f.driver.get_array(0, shape, &mut entries).unwrap();
        assert_eq!((found.element_bytes, found.elements), (160, 2));
        assert_eq!(entries[160], second.context.0 as u8);
        let shape = ArrayShape { element_bytes: 8, elements: 2 };
        let mut narrow = [0; 16];
        assert_eq!(f.driver.get_array(0, shape, &mut narrow).unwrap().elements, 2);
        assert_eq!(narrow[8], second.context.0 as u8);
    }
}

#[test]
fn payloads_are_those_of_the_recorded_dialogues() {
    // GET_INFO payloads as the recording device gave them (metadata, clocks, firmware, resources).
    let cases = [
        (
            Silicon::Npu1,
            "00000002050006000200000000000000040002000200100000000000000000000100010006004000000000000000000001000000020010000000000000000000",
            "4d502d4e505520436c6f636b0000000058020000000000004820436c6f636b0000000000000000004006000000000000",
            "01000000050000000500000087010000",
        ),
        (
            Silicon::Npu5,
            "00000002080006000200000000000000040002000200100000000000000000000100010006004000000000000000000001000000020010000000000000000000",
            "4d502d4e505520436c6f636b000000004f030000000000004820436c6f636b0000000000000000000807000000000000",
            "01000000010000000000000040000000",
        ),
    ];
    for (silicon, metadata, clocks, firmware) in cases {
        let f = Fixture::bare(&VirtualSpec::new(silicon));
        for (param, wanted) in
            [(query::AIE_METADATA, metadata), (query::CLOCK_METADATA, clocks), (query::FIRMWARE_VERSION, firmware)]
        {
            let mut payload = vec![0; wanted.len() / 2];
            f.driver.get_info(param, &mut payload).unwrap();
            let found: String = payload.iter().map(|byte| format!("{byte:02x}")).collect();
            assert_eq!(found, wanted, "{silicon} {param}");
        }
    }
}

#[test]
fn preemption_opcodes_are_refused_when_they_are_to_run_on_npu1() {
    for spec in profiles(Silicon::Npu1) {
        let mut f = Fixture::with_heap(&spec);
        let context = f.context();
        let (command, mapping) = f.command(&elf_packet(HEAP_BASE as u32, 16));
        // Sequence number 0 has rules of its own: a second command shows the refusal.
        f.exec(context.context, command, &[]).unwrap();
        let sequence = f.exec(context.context, command, &[]).unwrap();
        f.driver.wait_timeline(context.syncobj, sequence, None).unwrap();
        assert_eq!(mapping.load_u32(0).unwrap() & 0xF, 1, "{spec}: the header stays NEW");
        assert_eq!(f.driver.device().diagnoses()[0].kind, DiagnosisKind::BadPacket);
    }
}

#[test]
fn waits_have_absolute_deadlines_in_virtual_time() {
    let spec: VirtualSpec = "virtual:npu5?array=skip&fault=late@1:500".parse().unwrap();
    let mut f = Fixture::with_heap(&spec);
    let context = f.context();
    let (command, mapping) = f.command(&elf_packet(HEAP_BASE as u32, 16));
    assert_eq!(f.exec(context.context, command, &[]), Ok(0));
    assert_eq!(f.driver.wait_timeline(context.syncobj, 0, None), Ok(()));
    assert_eq!(mapping.load_u32(0).unwrap() & 0xF, 1, "point 0 signals too early");
    assert_eq!(f.state_after(context, 0, &*mapping), 4);

    put(&*mapping, &elf_packet(HEAP_BASE as u32, 16));
    let start = f.driver.now();
    assert_eq!(f.exec(context.context, command, &[]), Ok(1));
    let deadline = start + Duration::from_millis(100);
    assert_eq!(f.driver.wait_timeline(context.syncobj, 1, Some(deadline)), Err(Errno::ETIME));
    assert_eq!((f.driver.now(), mapping.load_u32(0).unwrap() & 0xF), (deadline, 1));
    assert_eq!(f.driver.wait_timeline(context.syncobj, 1, None), Ok(()));
    assert_eq!(mapping.load_u32(0).unwrap() & 0xF, 4);
    assert!(f.driver.now() >= start + Duration::from_millis(500));
    let time = f.driver.device_time(context.context, 1).unwrap();
    assert_eq!(time.elapsed, Duration::from_micros(500_140));
    assert_eq!(time.claim, npuhal_core::card::Claim::Modelled);

    assert_eq!(f.driver.wait_timeline(context.syncobj, 9, Some(f.driver.now())), Err(Errno::ETIME));
    assert_eq!(f.driver.wait_timeline(context.syncobj, 9, None), Err(Errno::ETIME));
}

#[test]
fn the_queue_holds_four_commands() {
    let spec: VirtualSpec = "virtual:npu5?array=skip".parse().unwrap();
    let mut f = Fixture::with_heap(&spec);
    let context = f.context();
    let commands: Vec<_> = (0..6).map(|_| f.command(&elf_packet(HEAP_BASE as u32, 16))).collect();
    for (i, (command, _)) in commands.iter().enumerate() {
        assert_eq!(f.exec(context.context, *command, &[]), Ok(i as u64));
    }
    let done = commands.iter().filter(|(_, mapping)| mapping.load_u32(0).unwrap() & 0xF == 4).count();
    assert_eq!(done, 2, "the fifth and sixth command waited for room");
}

#[test]
fn failures_are_written_back_as_each_driver_does() {
    let record = [1, 0, 0x11, 0x2233_4455, 6, 7, 0x88, 9];
    let ones = [u32::MAX; 8];
    let body: [u32; 8] = std::array::from_fn(|i| elf_packet(HEAP_BASE as u32, 16)[1 + i]);
    // (fault, state, body after it in the three profiles)
    let cases = [
        ("timeout@1", 8, [body, record, record]),
        ("error@1", 5, [body, ones, body]),
        ("abort@1", 6, [body, ones, body]),
        ("noresponse@1", 9, [body, body, body]),
        (
            "corrupt-health@1",
            8,
            [
                body,
                [0xDEAD_BEEF, 0, 0x11, 0x2233_4455, 6, 7, 0x88, 9],
                [0xDEAD_BEEF, 0, 0x11, 0x2233_4455, 6, 7, 0x88, 9],
            ],
        ),
    ];
    for (fault, state, bodies) in cases {
        for (profile, wanted) in Profile::ALL.into_iter().zip(bodies) {
            let spec: VirtualSpec = format!("virtual:npu5?array=skip&profile={profile}&fault={fault}").parse().unwrap();
            let mut f = Fixture::with_heap(&spec);
            let context = f.context();
            let (command, mapping) = f.command(&elf_packet(HEAP_BASE as u32, 16));
            f.exec(context.context, command, &[]).unwrap();
            f.exec(context.context, command, &[]).unwrap();
            f.driver.wait_timeline(context.syncobj, 1, None).unwrap();
            assert_eq!(mapping.load_u32(0).unwrap() & 0xF, state, "{spec}");
            assert_eq!(words_at(&*mapping, 1, 8), wanted, "{spec}");
            let last = if profile == Profile::MainlineNew && state != 9 { u32::MAX } else { 0 };
            assert_eq!(mapping.load_u32(4092).unwrap(), last, "{spec}: to the end of the buffer");
        }
    }
}

#[test]
fn failing_chains_report_the_entry() {
    let record = [1, 0, 0x11, 0x2233_4455, 6, 7, 0x88, 9];
    // (fault at entry 1 of the chain, state, index)
    for (fault, state, index) in [("error@2", 5, 1), ("timeout@2", 8, 1), ("bad-index@2", 5, 0), ("abort@3", 6, 2)] {
        for profile in Profile::ALL {
            let spec: VirtualSpec = format!("virtual:npu5?array=skip&profile={profile}&fault={fault}").parse().unwrap();
            let mut f = Fixture::with_heap(&spec);
            let context = f.context();
            let (first, _) = f.command(&elf_packet(HEAP_BASE as u32, 16));
            f.exec(context.context, first, &[]).unwrap();
            let entries: Vec<_> = (0..3).map(|_| f.command(&elf_packet(HEAP_BASE as u32, 16))).collect();
            let handles: Vec<_> = entries.iter().flat_map(|(bo, _)| [bo.0, 0]).collect();
            let mut words = vec![0x0980_C001, 3, 0, 0, 0, 0, 0];
            words.extend(&handles);
            let (chain, mapping) = f.command(&words);
            f.exec(context.context, chain, &[]).unwrap();
            f.driver.wait_timeline(context.syncobj, 1, None).unwrap();
            assert_eq!(mapping.load_u32(0).unwrap() & 0xF, state, "{spec}");
            assert_eq!(mapping.load_u32(12).unwrap(), index, "{spec}");
            let bodies: Vec<_> = entries.iter().map(|(_, entry)| words_at(&**entry, 1, 8)).collect();
            let states: Vec<_> = entries.iter().map(|(_, entry)| entry.load_u32(0).unwrap() & 0xF).collect();
            match (profile, state) {
                (Profile::MainlineNew, 8) => assert_eq!((&bodies[0][..], &states[..]), (&record[..], &[1, 1, 1][..])),
                (Profile::MainlineNew, _) => {
                    assert_eq!((&bodies[0][..], &states[..]), (&[u32::MAX; 8][..], &[1, 1, 1][..]))
                }
                (Profile::OutOfTree, 8) => assert_eq!((&bodies[1][..], &states[..]), (&record[..], &[1, 8, 1][..])),
                _ => assert!(bodies.iter().all(|body| body[..] == bodies[2][..]) && states == [1, 1, 1], "{spec}"),
            }
        }
    }
}

#[test]
fn chains_of_two_opcodes_are_refused_when_they_are_to_run() {
    let mut f = Fixture::with_heap(&VirtualSpec::new(Silicon::Npu5));
    let context = f.context();
    let (first, _) = f.command(&elf_packet(HEAP_BASE as u32, 16));
    let (second, _) = f.command(&[0x3A00_7001, 0, 0, 0, 16, 0, 3, 0]);
    let (chain, mapping) = f.command(&[0x0980_A001, 2, 0, 0, 0, 0, 0, first.0, 0, second.0, 0]);
    f.exec(context.context, chain, &[]).unwrap();
    f.exec(context.context, chain, &[]).unwrap();
    f.driver.wait_timeline(context.syncobj, 1, None).unwrap();
    assert_eq!(mapping.load_u32(0).unwrap() & 0xF, 1);
}

#[test]
fn a_timeout_takes_the_watchdogs_time_and_what_is_queued_behind_it() {
    for profile in Profile::ALL {
        let spec: VirtualSpec = format!("virtual:npu5?array=skip&profile={profile}&fault=timeout@1").parse().unwrap();
        let mut f = Fixture::with_heap(&spec);
        let context = f.context();
        let commands: Vec<_> = (0..4).map(|_| f.command(&elf_packet(HEAP_BASE as u32, 16))).collect();
        let start = f.driver.now();
        for (command, _) in &commands {
            f.exec(context.context, *command, &[]).unwrap();
        }
        f.driver.wait_timeline(context.syncobj, 3, None).unwrap();
        let states: Vec<_> = commands.iter().map(|(_, mapping)| mapping.load_u32(0).unwrap() & 0xF).collect();
        assert_eq!(states, [4, 8, 6, 6], "{spec}");
        assert!(f.driver.now() - start >= profile.watchdog());
    }
}

#[test]
fn destroying_a_context_aborts_what_is_in_flight() {
    let spec: VirtualSpec = "virtual:npu5?array=skip".parse().unwrap();
    let mut f = Fixture::with_heap(&spec);
    let context = f.context();
    let (command, mapping) = f.command(&elf_packet(HEAP_BASE as u32, 16));
    f.exec(context.context, command, &[]).unwrap();
    f.driver.destroy_context(context.context).unwrap();
    assert_eq!(mapping.load_u32(0).unwrap() & 0xF, 6);
    assert_eq!(f.driver.wait_timeline(context.syncobj, 0, None), Ok(()));
    assert_eq!(f.exec(context.context, command, &[]), Err(Errno::EINVAL));
    let last = f.driver.device().diagnoses().pop().unwrap();
    assert_eq!(last.kind, DiagnosisKind::StaleContext);
    f.driver.destroy_syncobj(context.syncobj).unwrap();
    assert_eq!(f.driver.wait_timeline(context.syncobj, 0, None), Err(Errno::ENOENT));
}

#[test]
fn a_removed_device_answers_nothing() {
    let mut f = Fixture::with_heap(&VirtualSpec::new(Silicon::Npu5));
    let context = f.context();
    let (command, mapping) = f.command(&elf_packet(HEAP_BASE as u32, 16));
    f.exec(context.context, command, &[]).unwrap();
    f.driver.device().remove();
    assert_eq!(mapping.load_u32(0).unwrap() & 0xF, 6);
    let gone = Errno::ENODEV;
    assert_eq!(f.driver.version().unwrap_err(), gone);
    assert_eq!(f.create(BoKind::Share, 1), Err(gone));
    assert_eq!(f.driver.wait_timeline(context.syncobj, 0, None), Err(gone));
    assert_eq!(f.exec(context.context, command, &[]), Err(gone));
    assert_eq!(f.driver.destroy_context(context.context), Err(gone));
    assert_eq!(f.driver.close_bo(command), Err(gone));
    let device = Arc::clone(f.driver.device());
    drop(f);
    assert_eq!(device.statistics().buffer_objects, 0);
}

#[test]
fn calls_fail_as_planned() {
    let spec: VirtualSpec =
        "virtual:npu5?fault=ENOMEM@share:0,EINTR@exec:0x2,EAGAIN@dev:1,ENODEV@info:0,EBUSY@syncobj:0".parse().unwrap();
    let mut f = Fixture::with_heap(&spec);
    assert_eq!(f.create(BoKind::Share, 1), Err(Errno::ENOMEM));
    assert!(f.create(BoKind::Share, 1).is_ok());
    assert!(f.create(BoKind::Dev, 1).is_ok());
    assert_eq!(f.create(BoKind::Dev, 1), Err(Errno::EAGAIN));
    assert_eq!(f.driver.get_info(query::AIE_METADATA, &mut [0; 64]), Err(Errno::ENODEV));
    let context = f.context();
    let (command, _) = f.command(&elf_packet(HEAP_BASE as u32, 16));
    assert_eq!(f.exec(context.context, command, &[]), Err(Errno::EINTR));
    assert_eq!(f.exec(context.context, command, &[]), Err(Errno::EINTR));
    assert_eq!(f.exec(context.context, command, &[]), Ok(0));
    assert_eq!(f.driver.destroy_syncobj(context.syncobj), Err(Errno::EBUSY));
}

#[test]
fn a_device_that_goes_while_a_submission_blocks_is_gone() {
    let spec: VirtualSpec = "virtual:npu5?array=skip&fault=remove@1".parse().unwrap();
    let mut f = Fixture::with_heap(&spec);
    let context = f.context();
    let (command, _) = f.command(&elf_packet(HEAP_BASE as u32, 16));
    let results: Vec<_> = (0..6).map(|_| f.exec(context.context, command, &[])).collect();
    assert_eq!(results, [Ok(0), Ok(1), Ok(2), Ok(3), Ok(4), Err(Errno::ENODEV)]);
}

#[test]
fn closed_memory_stays_while_a_command_uses_it() {
    let spec: VirtualSpec = "virtual:npu5?array=skip".parse().unwrap();
    let mut f = Fixture::with_heap(&spec);
    let context = f.context();
    let code = f.create(BoKind::Dev, 100).unwrap();
    let place = f.driver.bo_info(code).unwrap().device_address;
    let (command, _) = f.command(&elf_packet(HEAP_BASE as u32, 16));
    f.exec(context.context, command, &[code]).unwrap();
    f.driver.close_bo(code).unwrap();
    let other = f.create(BoKind::Dev, 100).unwrap();
    assert_ne!(f.driver.bo_info(other).unwrap().device_address, place);
    f.exec(context.context, command, &[]).unwrap();
    f.driver.wait_timeline(context.syncobj, 1, None).unwrap();
    let reused = f.create(BoKind::Dev, 100).unwrap();
    assert_eq!(f.driver.bo_info(reused).unwrap().device_address, place);
}
