//! The recorded dialogues of public clients, played to the virtual driver: every answer must be the one that was
//! recorded.
//!
//! The recordings lie in the driver crate's test data. They were made on a device without an array, so control code is
//! not looked at here; how commands ended is put into the fault plan.

use npuhal_amdxdna::driver::{
    ArrayShape, BoHandle, BoKind, ContextHandle, ContextSpec, CreateBo, CuConfig, Driver, ExecCommand,
    HEAP_CHUNK_BYTES, MapRequest, Mapping, PAGE_BYTES, Placement, SyncDirection, SyncobjHandle,
};
use npuhal_amdxdna::errno::Errno;
use npuhal_amdxdna::host_pages;
use npuhal_virtual::{VirtualDevice, VirtualDriver, VirtualSpec};
use serde_json::Value;
use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

fn recordings() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../amdxdna/tests/data/driver");
    let entries = std::fs::read_dir(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let mut files: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
    files.retain(|path| path.extension().is_some_and(|extension| extension == "json"));
    files.sort();
    files
}

#[test]
fn every_answer_is_the_recorded_one() {
    let mut answers = 0;
    for path in recordings() {
        let text = std::fs::read_to_string(&path).unwrap();
        let recording: Value = serde_json::from_str(&text).unwrap();
        let Some(events) = recording["events"].as_array() else { continue };
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        let profile = match recording["profile"].as_str().unwrap() {
            "ml-new" => "mainline-new",
            "ml-old" => "mainline-old",
            _ => "out-of-tree",
        };
        let device = recording["device"].as_str().unwrap();
        let text = format!("virtual:{device}?profile={profile}&array=skip&fault={}", plan(events));
        let spec: VirtualSpec = text.parse().unwrap();
        let mut player = Player::new(&spec, name);
        for event in events {
            answers += player.play(event);
        }
    }
    assert!(answers > 1000, "{answers}");
}

fn u(value: &Value) -> u64 {
    value.as_u64().unwrap_or_else(|| panic!("not a number: {value}"))
}

fn s(value: &Value) -> &str {
    value.as_str().unwrap_or_else(|| panic!("not a text: {value}"))
}

/// How commands ended, by the order of submission.
fn plan(events: &[Value]) -> String {
    let mut faults = Vec::new();
    let (mut run, mut exec) = (0, 0);
    let mut first_runs = HashMap::new();
    for event in events.iter().filter(|event| event["ioctl"] == "EXEC_CMD") {
        if let Some(errno) = event["errno"].as_i64() {
            faults.push(format!("{}@exec:{exec}", Errno::from_raw(errno as i32)));
        } else {
            first_runs.insert((u(&event["dec"]["ctx"]), u(&event["dec"]["seq"])), run);
            run += event["sub"].as_array().map_or(1, Vec::len);
        }
        exec += 1;
    }
    for event in events {
        if event["ioctl"] == "SYNCOBJ_TIMELINE_WAIT" && event["errno"].is_i64() {
            let key = (u(&event["dec"]["syncobj"]), u(&event["dec"]["point"]));
            faults.push(format!("late@{}:1000", first_runs[&key]));
        }
        let Some(ended) = event.get("device") else { continue };
        let kind = match s(&ended["state"]) {
            "COMPLETED" => continue,
            "ERROR" => "error",
            "ABORT" => "abort",
            "TIMEOUT" => "timeout",
            "NORESPONSE" => "noresponse",
            other => panic!("{other}"),
        };
        let first = first_runs[&(u(&ended["ctx"]), u(&ended["seq"]))];
        faults.push(format!("{kind}@{}", first + u(&ended["error_index"]) as usize));
    }
    faults.join(",")
}

struct Player {
    driver: Arc<VirtualDriver>,
    /// A second open file, for what others export.
    other: Arc<VirtualDriver>,
    name: String,
    handles: HashMap<String, BoHandle>,
    mappings: HashMap<String, Arc<dyn Mapping>>,
    chunks: u64,
    exported: Option<OwnedFd>,
    has_imported_own: bool,
    has_freed: bool,
    /// By their recorded handles, which are never used again.
    syncobjs: HashMap<u32, SyncobjHandle>,
    /// Commands by context and sequence number.
    commands: HashMap<(u64, u64), String>,
}

impl Player {
    fn new(spec: &VirtualSpec, name: String) -> Self {
        let device = VirtualDevice::new(spec);
        Self {
            driver: device.connect(),
            other: device.connect(),
            name,
            handles: HashMap::new(),
            mappings: HashMap::new(),
            chunks: 0,
            exported: None,
            has_imported_own: false,
            has_freed: false,
            syncobjs: HashMap::new(),
            commands: HashMap::new(),
        }
    }

    fn bo(&self, name: &Value) -> BoHandle {
        self.handles[s(name)]
    }

    /// Plays one event; the number of answers compared.
    fn play(&mut self, event: &Value) -> usize {
        let recorded = event["errno"].as_i64().map(|errno| Errno::from_raw(errno as i32));
        let found = if let Some(call) = event["ioctl"].as_str() {
            self.call(call, event, recorded)
        } else if let Some(map) = event.get("mmap").filter(|map| map["second_mapping"].is_null()) {
            self.map(map)
        } else if let Some(unmap) = event.get("munmap") {
            // The heap window of the recorded client is one range: its chunks go when the file is closed.
            self.mappings.remove(unmap["bo"].as_str().unwrap_or_default());
            return 0;
        } else if let Some(ended) = event.get("device") {
            self.ended(ended);
            return 1;
        } else {
            return 0;
        };
        assert_eq!(found.err(), recorded, "{}: {event}", self.name);
        1
    }

    fn call(&mut self, call: &str, event: &Value, recorded: Option<Errno>) -> Result<(), Errno> {
        let dec = &event["dec"];
        match call {
            "CREATE_BO" => self.create(event),
            "GET_BO_INFO" => {
                let info = self.driver.bo_info(self.bo(&dec["bo"]))?;
                let recorded = u64::from_str_radix(&swapped(&s(&event["out"])[80..96]), 16).unwrap();
                // Device memory has the recorded address, until something was given back: which gap is filled first is
                // the recording device's choice. Host pages have none before they are mapped; lent ones have
                // their own.
                let is_known = recorded != u64::MAX;
                assert_eq!(info.device_address.is_some(), is_known, "{}: {event}", self.name);
                if info.map_offset.is_none() && !self.has_freed {
                    assert_eq!(info.device_address, Some(recorded), "{}: {event}", self.name);
                }
                Ok(())
            }
            "GEM_CLOSE" => {
                let name = s(&dec["bo"]);
                self.has_freed = true;
                self.driver.close_bo(self.handles.remove(name).unwrap())
            }
            "SYNC_BO" => {
                let (offset, size) = (u(&dec["offset"]), u(&dec["size"]));
                self.driver.sync_bo(self.bo(&dec["bo"]), SyncDirection::ToDevice, offset..offset + size)
            }
            "GET_INFO" => {
                let mut payload = vec![0; event["data"].as_str().map_or(4096, str::len) / 2];
                self.driver.get_info(u(&dec["param"]) as u32, &mut payload)?;
                assert_eq!(hex(&payload), s(&event["data"]), "{}: {event}", self.name);
                Ok(())
            }
            "GET_ARRAY" => {
                let shape = ArrayShape {
                    element_bytes: u(&dec["element_size"]) as u32,
                    elements: u(&dec["num_element"]) as u32,
                };
                let mut buffer = vec![0; (shape.element_bytes * shape.elements) as usize];
                let found = self.driver.get_array(u(&dec["param"]) as u32, shape, &mut buffer)?;
                let wanted = event["out"].as_str().unwrap_or_else(|| s(&event["in"]))[8..24].to_owned();
                let found = [found.element_bytes.to_le_bytes(), found.elements.to_le_bytes()].concat();
                assert_eq!(hex(&found), wanted, "{}: {event}", self.name);
                Ok(())
            }
            "CREATE_HWCTX" => {
                let spec = ContextSpec {
                    num_tiles: u(&dec["num_tiles"]) as u32,
                    max_opc: u(&dec["max_opc"]) as u32,
                    qos: Default::default(),
                };
                let created = self.driver.create_context(&spec)?;
                assert_eq!(u64::from(created.context.0), u(&dec["ctx"]), "{}: {event}", self.name);
                let recorded = u32::from_str_radix(&swapped(&s(&event["out"])[104..112]), 16).unwrap();
                self.syncobjs.insert(recorded, created.syncobj);
                Ok(())
            }
            "CONFIG_HWCTX" => {
                let units = dec["cus"].as_array().unwrap().iter();
                let units: Vec<_> = units.map(|unit| CuConfig { bo: self.bo(&unit["bo"]), function: 0 }).collect();
                self.driver.config_cus(ContextHandle(u(&dec["ctx"]) as u32), &units)
            }
            "EXEC_CMD" => self.exec(event),
            "SYNCOBJ_TIMELINE_WAIT" => {
                let deadline = dec["relative_ms"].as_u64().map(|ms| self.driver.now() + Duration::from_millis(ms));
                let syncobj = self.syncobjs[&(u(&dec["syncobj"]) as u32)];
                self.driver.wait_timeline(syncobj, u(&dec["point"]), deadline)
            }
            "SYNCOBJ_DESTROY" => self.driver.destroy_syncobj(self.syncobjs[&first_word(event)]),
            "DESTROY_HWCTX" => {
                self.has_freed = true;
                self.driver.destroy_context(ContextHandle(first_word(event)))
            }
            "PRIME_HANDLE_TO_FD" => {
                self.exported = Some(self.driver.export_dma_buf(self.bo(&dec["bo"]))?);
                Ok(())
            }
            "PRIME_FD_TO_HANDLE" => self.import(dec),
            other => panic!("{}: {other}: {recorded:?}", self.name),
        }
    }

    fn create(&mut self, event: &Value) -> Result<(), Errno> {
        let dec = &event["dec"];
        let kind = match s(&dec["type"]) {
            "SHARE" => BoKind::Share,
            "DEV_HEAP" => BoKind::DevHeap,
            "DEV" => BoKind::Dev,
            _ => BoKind::Cmd,
        };
        let pages = event["va_tbl"].as_str().map(|table| {
            let len_bytes = u64::from_str_radix(&swapped(&table[32..48]), 16).unwrap();
            host_pages(len_bytes).unwrap()
        });
        let request = CreateBo { kind, size_bytes: u(&dec["size"]), user_memory: pages.as_ref() };
        let bo = self.driver.create_bo(&request)?;
        self.handles.insert(s(&dec["bo"]).to_owned(), bo);
        Ok(())
    }

    fn map(&mut self, map: &Value) -> Result<(), Errno> {
        let (bo, len_bytes) = (self.bo(&map["bo"]), u(&map["len"]).next_multiple_of(PAGE_BYTES));
        let map_offset = self.driver.bo_info(bo)?.map_offset.unwrap();
        let is_heap = len_bytes == HEAP_CHUNK_BYTES;
        let offset_bytes = self.chunks * HEAP_CHUNK_BYTES;
        self.chunks += u64::from(is_heap);
        let placement = if is_heap { Placement::HeapWindow { offset_bytes } } else { Placement::Anywhere };
        let mapping = self.driver.map(&MapRequest { bo, map_offset, len_bytes, placement })?;
        self.mappings.insert(s(&map["bo"]).to_owned(), mapping);
        Ok(())
    }

    fn import(&mut self, dec: &Value) -> Result<(), Errno> {
        let name = s(&dec["bo"]).to_owned();
        if !std::mem::replace(&mut self.has_imported_own, true) {
            let imported = self.driver.import_dma_buf(self.exported.as_ref().unwrap().as_fd())?;
            assert_eq!(imported.bo, self.handles[&name], "{}: the own export comes back", self.name);
            return Ok(());
        }
        let create = CreateBo { kind: BoKind::Share, size_bytes: 12_288, user_memory: None };
        let foreign = self.other.export_dma_buf(self.other.create_bo(&create)?)?;
        self.handles.insert(name, self.driver.import_dma_buf(foreign.as_fd())?.bo);
        Ok(())
    }

    fn exec(&mut self, event: &Value) -> Result<(), Errno> {
        let dec = &event["dec"];
        for packet in event["sub"].as_array().into_iter().flatten().chain([&event["cmd"]]) {
            if packet["hex"].is_string() {
                self.write_packet(packet);
            }
        }
        let args: Vec<_> = dec["args"].as_array().into_iter().flatten().map(|arg| self.bo(arg)).collect();
        let (context, command) = (ContextHandle(u(&dec["ctx"]) as u32), self.bo(&dec["cmd_bo"]));
        let sequence = self.driver.exec(&ExecCommand { context, command, args: &args })?;
        assert_eq!(sequence, u(&dec["seq"]), "{}", self.name);
        self.commands.insert((u(&dec["ctx"]), sequence), s(&dec["cmd_bo"]).to_owned());
        Ok(())
    }

    /// The recorded packet with the addresses and handles of this run.
    fn write_packet(&self, packet: &Value) {
        let mapping = &self.mappings[s(&packet["bo"])];
        let bytes: Vec<u8> = (0..s(&packet["hex"]).len() / 2)
            .map(|i| u8::from_str_radix(&s(&packet["hex"])[2 * i..2 * i + 2], 16).unwrap())
            .collect();
        mapping.write(0, &bytes).unwrap();
        for fix in packet["fix"].as_array().into_iter().flatten() {
            let (kind, name) = s(&fix[1]).split_once(':').unwrap();
            let (name, offset) = name.split_once('+').unwrap_or((name, "0"));
            let offset = match offset.strip_prefix("0x") {
                Some(digits) => u64::from_str_radix(digits, 16).unwrap(),
                None => offset.parse().unwrap(),
            };
            let handle = self.handles[name];
            let value = match kind {
                "h" => u64::from(handle.0),
                _ => self.driver.bo_info(handle).unwrap().device_address.unwrap() + offset,
            };
            mapping.write(u(&fix[0]), &value.to_le_bytes()).unwrap();
        }
    }

    /// A command has ended in the recording: here it ends no later, and in the same state.
    fn ended(&self, ended: &Value) {
        let (context, sequence) = (u(&ended["ctx"]), u(&ended["seq"]));
        let Some(command) = self.commands.get(&(context, sequence)) else { return };
        let Some(mapping) = self.mappings.get(command) else { return };
        let patience = self.driver.now() + Duration::from_secs(5);
        while mapping.load_u32(0).unwrap() & 0xF < 4 && self.driver.now() < patience {
            self.driver.pause();
        }
        let state = match s(&ended["state"]) {
            "COMPLETED" => 4,
            "ERROR" => 5,
            "ABORT" => 6,
            "TIMEOUT" => 8,
            _ => 9,
        };
        let header = mapping.load_u32(0).unwrap();
        assert_eq!(header & 0xF, state, "{}: {ended}", self.name);
        if header >> 23 & 0x1F == 19 && state != 4 {
            assert_eq!(u64::from(mapping.load_u32(12).unwrap()), u(&ended["error_index"]), "{}: {ended}", self.name);
        }
    }
}

fn first_word(event: &Value) -> u32 {
    u32::from_str_radix(&swapped(&s(&event["in"])[..8]), 16).unwrap()
}

/// Hexadecimal digits with the bytes the other way round.
fn swapped(text: &str) -> String {
    (0..text.len() / 2).rev().map(|i| &text[2 * i..2 * i + 2]).collect()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
