//! Machines as directory trees: what is found, and what is said about it.

use npuhal_amdxdna::discovery::{Finding, FoundNpu, Identity, Roots, check, enumerate};
use npuhal_amdxdna::silicon::Silicon;
use npuhal_core::Generation;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::Path;
use tempfile::TempDir;

/// A machine with one healthy NPU, to be damaged by the test.
struct Machine {
    root: TempDir,
    pci: String,
}

impl Machine {
    fn new(device: &str, revision: &str) -> Self {
        let machine = Self { root: tempfile::tempdir().unwrap(), pci: "0000:c5:00.1".to_owned() };
        machine.add(&machine.pci, device, revision, 0);
        machine.write("proc/cpuinfo", "processor\t: 0\nflags\t\t: fpu sse2 clflushopt\n");
        machine.write("proc/cmdline", "quiet splash\n");
        machine.write("etc/group", "root:x:0:\nrender:x:992:somebody\nguests:x:64001:\n");
        fs::create_dir_all(machine.path("sys/module/amdxdna")).unwrap();
        machine
    }

    fn add(&self, pci: &str, device: &str, revision: &str, number: u32) {
        let directory = format!("sys/devices/pci0000:00/{pci}");
        for (name, text) in [("vendor", "0x1022"), ("device", device), ("revision", revision), ("device_type", "0")] {
            self.write(&format!("{directory}/{name}"), &format!("{text}\n"));
        }
        self.write(&format!("{directory}/vbnv"), "RyzenAI-npu\n");
        self.write(&format!("{directory}/fw_version"), "1.5.5.391\n");
        fs::create_dir_all(self.path(&format!("{directory}/accel/accel{number}"))).unwrap();
        fs::create_dir_all(self.path("sys/kernel/iommu_groups/7")).unwrap();
        fs::create_dir_all(self.path("sys/bus/pci/devices")).unwrap();
        fs::create_dir_all(self.path("sys/bus/pci/drivers/amdxdna")).unwrap();
        symlink(self.path("sys/kernel/iommu_groups/7"), self.path(&format!("{directory}/iommu_group"))).unwrap();
        symlink(self.path("sys/bus/pci/drivers/amdxdna"), self.path(&format!("{directory}/driver"))).unwrap();
        symlink(self.path(&directory), self.path(&format!("sys/bus/pci/devices/{pci}"))).unwrap();
        symlink(self.path(&directory), self.path(&format!("sys/bus/pci/drivers/amdxdna/{pci}"))).unwrap();
        self.write(&format!("dev/accel/accel{number}"), "");
        self.set_mode(number, 0o660);
    }

    fn path(&self, name: &str) -> std::path::PathBuf {
        self.root.path().join(name)
    }

    fn device(&self, name: &str) -> std::path::PathBuf {
        self.path(&format!("sys/devices/pci0000:00/{}/{name}", self.pci))
    }

    fn write(&self, name: &str, text: &str) {
        let path = self.path(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    fn set_mode(&self, number: u32, mode: u32) {
        let node = self.path(&format!("dev/accel/accel{number}"));
        fs::set_permissions(node, fs::Permissions::from_mode(mode)).unwrap();
    }

    fn unbind(&self) {
        fs::remove_file(self.device("driver")).unwrap();
        fs::remove_file(self.path(&format!("sys/bus/pci/drivers/amdxdna/{}", self.pci))).unwrap();
    }

    fn found(&self) -> Vec<FoundNpu> {
        enumerate(&Roots::inside(self.root.path()))
    }

    /// Findings for a user who owns nothing and is in the node's group, or not.
    fn check(&self, is_member: bool) -> Vec<Finding> {
        let node = fs::metadata(self.path("dev/accel/accel0"));
        let group = node.map_or(0, |node| node.gid());
        let groups = if is_member { vec![group, 64001] } else { vec![64001] };
        let identity = Identity { user: 4242, groups, memlock_bytes: None, is_self: false };
        check(&Roots::inside(self.root.path()), &identity, &self.found()[0])
    }
}

#[test]
fn a_healthy_machine() {
    let machine = Machine::new("0x1502", "0x00");
    let found = machine.found();
    assert_eq!(found.len(), 1);
    let npu = &found[0];
    assert_eq!((npu.id.as_str(), npu.silicon), ("npu1", Some(Silicon::Npu1)));
    assert_eq!(npu.node.as_deref(), Some(machine.path("dev/accel/accel0").as_path()));
    assert_eq!((npu.bound_driver.as_deref(), npu.device_type), (Some("amdxdna"), Some(0)));
    let card = npu.card().unwrap();
    assert_eq!((card.generation, card.columns, card.core_rows), (Generation::Xdna1, 4, 4));
    assert_eq!(card.driver.unwrap().firmware.as_deref(), Some("1.5.5.391"));
    assert_eq!(machine.check(true), []);
    machine.set_mode(0, 0o666);
    assert_eq!(machine.check(false), []);
}

#[test]
fn several_devices_have_ids_of_their_own() {
    let machine = Machine::new("0x17f0", "0x11");
    machine.add("0000:c6:00.1", "0x17f0", "0x11", 1);
    machine.add("0000:c7:00.1", "0x17f0", "0x20", 2);
    machine.write("sys/devices/pci0000:00/0000:00:01.0/vendor", "0x8086\n");
    symlink(machine.path("sys/devices/pci0000:00/0000:00:01.0"), machine.path("sys/bus/pci/devices/0000:00:01.0"))
        .unwrap();
    let ids: Vec<_> = machine.found().into_iter().map(|npu| npu.id).collect();
    assert_eq!(ids, ["npu5", "amdxdna:0000:c6:00.1", "npu6"]);
}

#[test]
fn nothing_to_find() {
    let root = tempfile::tempdir().unwrap();
    assert!(enumerate(&Roots::inside(root.path())).is_empty());
    assert!(enumerate(&Roots::inside(Path::new("/nonexistent"))).is_empty());
}

#[test]
fn parts_that_are_not_served_are_declined_by_name() {
    let later = Machine::new("0x17f1", "0x10");
    let findings = later.check(true);
    assert_eq!(findings, [Finding::LaterPart { pci_device: 0x17F1 }]);
    assert!(findings[0].to_string().contains("17f1") && findings[0].is_blocking());
    assert_eq!(later.found()[0].card(), None);
    let unknown = Machine::new("0x17f0", "0x77");
    assert!(matches!(unknown.check(true)[..], [Finding::UnknownRevision { pci_revision: 0x77, .. }]));
}

#[test]
fn no_access_names_the_group_and_the_command() {
    let machine = Machine::new("0x17f0", "0x11");
    let node = fs::metadata(machine.path("dev/accel/accel0")).unwrap();
    machine.write("etc/group", &format!("guests:x:64001:\nrender:x:{}:somebody\n", node.gid()));
    machine.write(&format!("sys/devices/pci0000:00/{}/fw_version", machine.pci), "1.1.2.64");
    let findings = machine.check(false);
    let [finding @ Finding::NoAccess { user_groups, group_may: true, .. }] = &findings[..] else {
        panic!("{findings:?}")
    };
    assert_eq!(user_groups, &["guests"]);
    assert!(finding.to_string().contains("belongs to group render, the user is in guests"), "{finding}");
    assert_eq!(finding.remedy(), "sudo usermod -aG render $USER, then log in again");
    // A member of a group that may not write either.
    machine.set_mode(0, 0o640);
    let findings = machine.check(true);
    assert!(matches!(findings[..], [Finding::NoAccess { group_may: false, .. }]), "{findings:?}");
    assert!(findings[0].remedy().contains("chmod 660"));
}

#[test]
fn driver_missing_failed_or_another_one() {
    let machine = Machine::new("0x1502", "0x00");
    machine.unbind();
    assert_eq!(machine.check(true), [Finding::NoDriver { is_module_loaded: true }]);
    fs::remove_dir(machine.path("sys/module/amdxdna")).unwrap();
    let findings = machine.check(true);
    assert_eq!(findings, [Finding::NoDriver { is_module_loaded: false }]);
    assert_eq!(findings[0].remedy(), "sudo modprobe amdxdna");
    fs::create_dir_all(machine.path("sys/bus/pci/drivers/vfio-pci")).unwrap();
    symlink(machine.path("sys/bus/pci/drivers/vfio-pci"), machine.device("driver")).unwrap();
    assert_eq!(machine.check(true), [Finding::OtherDriver { name: "vfio-pci".to_owned() }]);
}

#[test]
fn node_missing_or_of_another_kind() {
    let machine = Machine::new("0x1502", "0x00");
    fs::remove_file(machine.path("dev/accel/accel0")).unwrap();
    assert!(matches!(&machine.check(true)[..], [Finding::NoNode { node: Some(_) }]));
    fs::remove_dir_all(machine.device("accel")).unwrap();
    assert_eq!(machine.check(true), [Finding::NoNode { node: None }]);
    fs::write(machine.device("device_type"), "1\n").unwrap();
    assert_eq!(machine.check(true), [Finding::OtherQueues { device_type: 1 }]);
}

#[test]
fn memory_that_cannot_be_shared() {
    let machine = Machine::new("0x1502", "0x00");
    fs::remove_file(machine.device("iommu_group")).unwrap();
    assert_eq!(machine.check(true), [Finding::NoIommu { boot_parameter: None }]);
    machine.write("proc/cmdline", "quiet amd_iommu=off\n");
    let findings = machine.check(true);
    assert_eq!(findings[0].remedy(), "boot without `amd_iommu=off`");
    machine.write("proc/cpuinfo", "flags\t\t: fpu hypervisor\n");
    assert_eq!(machine.check(true), [Finding::VirtualMachine]);
}

#[test]
fn firmware_and_locked_memory() {
    let machine = Machine::new("0x17f0", "0x10");
    fs::write(machine.device("fw_version"), "1.0.20.31\n").unwrap();
    let findings = machine.check(true);
    assert!(matches!(findings[..], [Finding::FirmwareTooOld { .. }]), "{findings:?}");
    assert!(!findings[0].is_blocking());
    let machine = Machine::new("0x1502", "0x00");
    fs::write(machine.device("fw_version"), "1.5.1.323\n").unwrap();
    assert!(matches!(machine.check(true)[..], [Finding::FirmwareDenied { .. }]));
    let machine = Machine::new("0x1502", "0x00");
    let identity = Identity { user: 0, groups: vec![], memlock_bytes: Some(8 << 20), is_self: false };
    let findings = check(&Roots::inside(machine.root.path()), &identity, &machine.found()[0]);
    assert!(matches!(findings[..], [Finding::LowMemlock { limit_bytes: 0x80_0000, .. }]), "{findings:?}");
    assert!(!findings[0].is_blocking());
}

#[test]
fn this_machine_can_be_asked() {
    let identity = Identity::current();
    for npu in enumerate(&Roots::default()) {
        for finding in check(&Roots::default(), &identity, &npu) {
            assert!(!finding.to_string().is_empty());
        }
    }
}
